"""Checks of the arguments of ``Profile``, made when its block is entered; and ``Profile`` as a decorator."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerAction

from torchprof.errors import TorchprofError, suggest
from torchprof.record.compiled.inductor import Provenance
from torchprof.record.modules import walk_modules
from torchprof.record.torch_internals import optional
from torchprof.run.meta import RunWarning

AUTO = "auto"  # the value of ``device`` for what the model is on
_TORCHS_DEVICES = ("cuda", "xpu", "mps", "mtia", "hpu")
_ACTIONS = (ProfilerAction.NONE, ProfilerAction.WARMUP, ProfilerAction.RECORD, ProfilerAction.RECORD_AND_SAVE)
"""The actions that a schedule may return. torch has one more action, which is private."""
_USE_SCHEDULE = "use for example torch.profiler.schedule(wait=1, warmup=1, active=3)."


_OF_THE_SHELL = {
    "memory": "profile_memory",
    "flops": "with_flops",
    "shapes": "record_shapes",
    "timeline": "with_timeline",
}


def refuse_unknown(unknown: Iterable[str], function: Callable[..., Any]) -> None:
    """Raise TypeError for a keyword argument that a function does not have, with the one that is meant."""
    for name in unknown:
        if (meant := _OF_THE_SHELL.get(name)) is not None:
            raise TypeError(f"There is no argument {name!r}: in Python it is {meant}=True.")
        known = [each.name for each in inspect.signature(function).parameters.values() if each.kind != each.VAR_KEYWORD]
        raise TypeError(f"There is no argument {name!r}. {suggest(name, known)}")


def check_warmup(warmup: Any) -> None:
    check_count(warmup, 0, "warmup must be a number of calls of the model, 0 or more")


def check_count(value: Any, least: int, expected: str) -> None:
    """Raise TorchprofError if a value is not an integer of at least ``least``."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise TorchprofError(f"{expected}, not {value!r:.80}.")


def checked_schedule(schedule: Any, warmup: Any, on_trace_ready: Any) -> None:
    """Raise TorchprofError if one of these has a wrong type, or if two of them contradict each other."""
    check_warmup(warmup)
    if schedule is not None and not callable(schedule):
        raise TorchprofError(f"schedule={schedule!r:.80} is not a schedule: {_USE_SCHEDULE}")
    if schedule is not None and warmup:
        raise TorchprofError(
            "warmup= counts calls of the model, and schedule= counts steps: give only one. A schedule has "
            "a warm-up of its own: torch.profiler.schedule(wait=0, warmup=1, active=3)."
        )
    if on_trace_ready is not None and not callable(on_trace_ready):
        expected = "it must take one argument, this Profile."
        raise TorchprofError(f"on_trace_ready={on_trace_ready!r:.80} is not a function: {expected}")


def action_of(schedule: Callable[[int], ProfilerAction] | None, step: int) -> ProfilerAction | None:
    """The schedule's action for a step; None without a schedule. Raises TorchprofError if it returns no action."""
    if schedule is None:
        return None
    action = schedule(step)
    if action not in _ACTIONS:
        expected = ", ".join(map(str, _ACTIONS))
        raise TorchprofError(f"schedule({step}) gave {action!r}, where one of {expected} was expected: {_USE_SCHEDULE}")
    return action


def checked_device(
    device: str | torch.device, use_cuda: bool | None, use_device: str | None, models: Iterable[nn.Module]
) -> str | None:
    """The kind of device to record in addition to the CPU; None for no device. ``use_cuda``, ``use_device``: None if
    not given. Raises TorchprofError for an unknown device, and a contradiction."""
    known = ("cpu", *_known_devices())
    if use_device is not None and use_device not in known:
        choices = suggest(str(use_device), known)
        raise TorchprofError(f"use_device={use_device!r} is not a kind of device. {choices}")
    if use_cuda and use_device not in (None, "cuda"):
        raise TorchprofError(f"use_cuda=True and use_device={use_device!r} contradict each other: give only one.")
    older_kind = use_device or (None if use_cuda is None else "cuda" if use_cuda else "cpu")
    kind = _kind_of(device, known)
    if kind == AUTO:
        kind = older_kind or device_of(models)
    elif older_kind not in (None, kind):
        older = f"use_cuda={bool(use_cuda)}" if use_device is None else f"use_device={use_device!r}"
        raise TorchprofError(f"device={str(device)!r} and {older} contradict each other: leave {older} out.")
    return None if kind == "cpu" else kind


def _known_devices() -> tuple[str, ...]:
    """The kinds of devices that torch's profiler records, with the one that an extension of torch may have added."""
    backend = optional("torch._C._get_privateuse1_backend_name", lambda: "privateuseone")()
    return (*_TORCHS_DEVICES, *([backend] if backend != "privateuseone" else []))


def _kind_of(device: Any, known: Sequence[str]) -> str:
    """The kind of the device that ``device`` names; "auto" for that."""
    if isinstance(device, str) and device == AUTO:
        return AUTO
    with suppress(RuntimeError):  # for a string that names no device of torch
        kind: str = torch.device(device).type if isinstance(device, (str, torch.device)) else ""
        if kind in known:
            return kind
    given = repr(str(device)) if isinstance(device, torch.device) else repr(device)
    named = str(device).partition(":")[0]
    choices = suggest("cuda" if named.lower() == "gpu" else named, (AUTO, *known))
    raise TorchprofError(f"device={given} cannot be recorded. {choices}")


def device_of(models: Iterable[nn.Module]) -> str:
    """The kind of device that models are on: that of their first parameter or buffer on a device, else "cpu". The meta
    device, which computes nothing, and kinds that torch's profiler does not know do not count."""
    known = _known_devices()
    for model in models:
        for _, _, module in walk_modules(model):
            for tensor in (*module._parameters.values(), *module._buffers.values()):
                if tensor is None or tensor.is_cpu:  # faster than its device, and most are
                    continue
                kind: str = tensor.device.type
                if kind in known:
                    return kind
    return "cpu"


def checked_provenance(compile_layers: bool, warnings: list[RunWarning]) -> Provenance | None:
    """What finds the layers of compiled graphs; None without ``compile_layers``, and if this version of torch does not
    support it: then the reason is added to ``warnings``. Raises TorchprofError for another value."""
    if compile_layers not in (False, True):
        raise TorchprofError(f"compile_layers={compile_layers!r:.80} must be True or False.")
    return Provenance.if_supported(warnings) if compile_layers else None


def decorated(function: Callable[..., Any], block: Callable[[], AbstractContextManager[object]]) -> Callable[..., Any]:
    """Wrap a function, coroutine function or generator function, so that each call is inside a block. ``block()``: the
    profile for the first call; for later calls, and calls inside the first one, a block that does nothing, because a
    profile is used once. Raises TorchprofError for an asynchronous generator."""

    @functools.wraps(function)
    def profiled(*args: Any, **kwargs: Any) -> Any:
        with block():
            return function(*args, **kwargs)

    @functools.wraps(function)
    async def profiled_coroutine(*args: Any, **kwargs: Any) -> Any:
        with block():
            return await function(*args, **kwargs)

    @functools.wraps(function)
    def profiled_generator(*args: Any, **kwargs: Any) -> Any:
        with block():
            return (yield from function(*args, **kwargs))

    if inspect.isasyncgenfunction(function):
        raise TorchprofError(
            f"{function.__qualname__} is an asynchronous generator, which Profile cannot decorate: put the block "
            "inside it, or around the loop that uses it."
        )
    if inspect.iscoroutinefunction(function):
        return profiled_coroutine
    return profiled_generator if inspect.isgeneratorfunction(function) else profiled
