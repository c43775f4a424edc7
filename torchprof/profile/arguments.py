"""Checks of the arguments of ``Profile``, made when its block is entered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerAction

from torchprof.errors import TorchprofError, suggest
from torchprof.record.compiler import Provenance
from torchprof.run.warnings import Caveat
from torchprof.run.words import DIVISORS

_DEVICES = ("cuda", "xpu", "mps", "mtia", "hpu")
_ACTIONS = (ProfilerAction.NONE, ProfilerAction.WARMUP, ProfilerAction.RECORD, ProfilerAction.RECORD_AND_SAVE)
"""The actions that a schedule may return. torch has one more action, which is private."""


def checked_schedule(schedule: Any, warmup: Any, on_trace_ready: Any) -> None:
    """Raise TorchprofError if one of these has a wrong type, or if two of them contradict each other."""
    if not isinstance(warmup, int) or warmup < 0:
        raise TorchprofError(f"warmup must be a number of calls, 0 or more, not {warmup!r}.")
    if schedule is not None and not callable(schedule):
        raise TorchprofError(
            f"schedule={schedule!r:.80} is not a schedule: use for example "
            "torch.profiler.schedule(wait=1, warmup=1, active=3)."
        )
    if schedule is not None and warmup:
        raise TorchprofError(
            "warmup= counts calls, schedule= counts steps: give only one of them (a schedule has its own warmup)."
        )
    if on_trace_ready is not None and not callable(on_trace_ready):
        raise TorchprofError(
            f"on_trace_ready={on_trace_ready!r:.80} is not a function: it must take one argument, this Profile."
        )


def action_of(schedule: Callable[[int], ProfilerAction] | None, step: int) -> ProfilerAction | None:
    """The schedule's action for a step; None without a schedule. Raises TorchprofError if it returns no action."""
    if schedule is None:
        return None
    action = schedule(step)
    if action not in _ACTIONS:
        raise TorchprofError(
            f"schedule({step}) gave {action!r}, where one of {', '.join(map(str, _ACTIONS))} was expected: use "
            "for example torch.profiler.schedule(wait=1, warmup=1, active=3)."
        )
    return action


def checked_device(use_cuda: bool, use_device: str | None) -> str | None:
    """The kind of device to record in addition to the CPU; None for no device. Raises TorchprofError."""
    if use_device is None:
        return "cuda" if use_cuda else None
    backend = torch._C._get_privateuse1_backend_name()
    known = (*_DEVICES, *([backend] if backend != "privateuseone" else []))
    if use_device not in known:
        raise TorchprofError(f"use_device={use_device!r} is not a kind of device. {suggest(str(use_device), known)}")
    if use_cuda and use_device != "cuda":
        raise TorchprofError(
            f"use_cuda=True and use_device={use_device!r} contradict each other: give only one of them."
        )
    return use_device


def checked_provenance(compile_layers: bool | str, notes: list[Caveat]) -> Provenance | None:
    """The object that finds the layers of compiled graphs; None if the user does not want it.

    It is also None if this version of torch does not support it: then the reason is added to ``notes``. Raises
    TorchprofError for another value of ``compile_layers``.
    """
    if compile_layers not in (False, True, *DIVISORS):
        raise TorchprofError(
            f"compile_layers={compile_layers!r:.80} must be True, False, "
            f"{' and '.join(map(repr, DIVISORS))}: these two say by what a kernel of several layers is divided."
        )
    if not compile_layers:
        return None
    return Provenance.if_supported(compile_layers if isinstance(compile_layers, str) else None, notes)
