"""Profile one step of a training loop, with the settings of DeepSpeed's configuration file."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import partial
from os import PathLike, fspath
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from torchprof.errors import TorchprofError, suggest
from torchprof.integrations.conventions import is_number
from torchprof.integrations.deepspeed.profiler import ProfileMethods
from torchprof.integrations.flops_profiler import FlopsProfiler
from torchprof.integrations.model_recording import check_model, is_whole


class _Setting(NamedTuple):
    """A key of the configuration: the expected value in words, a check of the value, and the default."""

    expected: str
    is_right: Callable[[Any], bool]
    default: Any


def _yes_or_no(default: bool) -> _Setting:
    return _Setting("true or false", lambda value: isinstance(value, bool), default)


def _whole(least: int, default: int) -> _Setting:
    return _Setting(f"a whole number from {least} on", lambda value: is_whole(value) and bool(value >= least), default)


def _is_file_or_none(value: Any) -> bool:
    return value is None or (isinstance(value, (str, PathLike)) and bool(fspath(value)))


_SECTION = "flops_profiler"
_SECTION_KEYS = {
    "enabled": _yes_or_no(False),
    "profile_step": _whole(1, 1),
    "module_depth": _whole(-1, -1),
    "top_modules": _whole(1, 1),
    "detailed": _yes_or_no(True),
    "output_file": _Setting("the path of a file, or null", _is_file_or_none, None),
    "recompute_fwd_factor": _Setting("a number from 0 on", lambda value: is_number(value) and bool(value >= 0), 0.0),
}
_EARLY = "pytorch_profiler"  # the keys of DeepSpeed before it had flops_profiler
_EARLY_KEYS = {
    _EARLY: _yes_or_no(False),
    "profile_step": _whole(1, 5),
    "profile_depth": _whole(-1, -1),
    "profile_top_num": _whole(1, 3),
}


@dataclass
class StepProfiler:
    """Profiles one step of a training loop. ``from_config`` makes it.

    Use ``with profiler.step(model):`` around each step: forward, backward and the optimizer's step. ``steps`` counts
    the steps from 1. The step with the number ``profile_step`` is profiled, by the profiler that ``make`` makes of the
    model, and printed by ``print_profile`` with the ``options``; the others run without a profiler.
    """

    enabled: bool
    profile_step: int
    make: Callable[[nn.Module], Any] = field(repr=False)
    print_profile: Callable[..., None] = field(repr=False)
    options: Mapping[str, Any]
    steps: int = 0

    def step(self, model: nn.Module) -> AbstractContextManager[None]:
        """A ``with`` block for one step of this model. Errors inside pass through, and then nothing is printed. In a
        distributed job, only rank 0 is profiled. Raises TorchprofError for anything but a module."""
        if not self.enabled:
            return nullcontext()
        check_model(model)
        self.steps += 1
        return self._profiled(model) if self.steps == self.profile_step and _is_first_rank() else nullcontext()

    @contextmanager
    def _profiled(self, model: nn.Module) -> Iterator[None]:
        recording = self.make(model)
        recording.start_profile()
        try:
            yield
            recording.stop_profile()
            self.print_profile(recording, **self.options)
        finally:
            recording.end_profile()


def from_config(config: Mapping[str, Any] | str | PathLike[str]) -> StepProfiler:
    """Make a profiler for one step of any training loop from a DeepSpeed configuration: a dict or a JSON file's path.

    With the section ``flops_profiler`` (``enabled``, ``profile_step``, ``module_depth``, ``top_modules``, ``detailed``,
    ``output_file``, ``recompute_fwd_factor``) the text of ``torchprof.integrations.flops_profiler`` is printed. With
    the older keys ``pytorch_profiler``, ``profile_step``, ``profile_depth`` and ``profile_top_num`` the text of this
    package is printed. DeepSpeed's other keys are ignored; without any of these keys, nothing is profiled. Use it as::

        profiler = from_config("ds_config.json")
        for batch in loader:
            with profiler.step(model):
                ...  # forward, backward, optimizer.step()

    Raises TorchprofError for unknown keys of the profiler, values of a wrong type, and a file without a JSON object.
    """
    settings = _loaded(config)
    _check_top_keys(settings)
    section = settings.get(_SECTION, {})
    if not isinstance(section, Mapping):
        raise TorchprofError(
            f'"{_SECTION}" is {section!r:.80}, and should be an object: {{"enabled": true, "profile_step": 5}}.'
        )
    recent = _checked(section, _SECTION_KEYS, f'"{_SECTION}"')
    given = {key: settings[key] for key in _EARLY_KEYS if key in settings}
    early = _checked(given, _EARLY_KEYS, "the configuration")
    if given and _EARLY not in given:
        raise TorchprofError(
            f'{", ".join(map(repr, given))} without "{_EARLY}": add "{_EARLY}": true, or write the section '
            f'"{_SECTION}": {{"enabled": true, "profile_step": 5}}.'
        )
    if recent["enabled"] and early[_EARLY]:
        raise TorchprofError(f'"{_SECTION}" and "{_EARLY}" are both on: switch one of the two off.')
    if early[_EARLY]:
        options = {"depth": early["profile_depth"], "top_num": early["profile_top_num"]}
        return StepProfiler(True, early["profile_step"], ProfileMethods, ProfileMethods.print_all, options)
    make = partial(FlopsProfiler, recompute_fwd_factor=recent["recompute_fwd_factor"])
    options = {key: value for key, value in recent.items() if key not in ("enabled", "recompute_fwd_factor")}
    return StepProfiler(recent["enabled"], recent["profile_step"], make, FlopsProfiler.print_model_profile, options)


def _is_first_rank() -> bool:
    distributed = torch.distributed
    return not (distributed.is_available() and distributed.is_initialized()) or distributed.get_rank() == 0


def _loaded(config: Any) -> Mapping[str, Any]:
    if isinstance(config, (str, PathLike)):
        path = fspath(config)
        try:
            config = json.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise TorchprofError(f"The configuration {path!r} cannot be read: {error.strerror or error}.") from error
        except ValueError as error:  # not JSON, or not text
            raise TorchprofError(f"The configuration {path!r} is not JSON: {error}.") from error
    if not isinstance(config, Mapping):
        raise TorchprofError(
            f"A configuration is a dict, or the path of a JSON file that holds an object, not {config!r:.80}. Write "
            f'{{"{_SECTION}": {{"enabled": true, "profile_step": 5}}}}.'
        )
    return config


def _check_top_keys(settings: Mapping[str, Any]) -> None:
    """Raise TorchprofError for misspelled keys of the profiler. All other keys are DeepSpeed's own."""
    known = [_SECTION, *_EARLY_KEYS]
    for key in settings:
        if key not in known and ("profil" in str(key).lower() or get_close_matches(str(key), known, 1, 0.8)):
            raise TorchprofError(f"The configuration has an unknown key {key!r}. {suggest(str(key), known)}")


def _checked(given: Mapping[str, Any], known: Mapping[str, _Setting], where: str) -> dict[str, Any]:
    """All settings: the given ones, checked, and the defaults of the others."""
    for key, value in given.items():
        if key not in known:
            raise TorchprofError(f"{where} has an unknown key {key!r}. {suggest(str(key), known)}")
        if not known[key].is_right(value):
            raise TorchprofError(f'"{key}" is {value!r:.80}, and should be {known[key].expected}.')
    return {key: given.get(key, setting.default) for key, setting in known.items()}
