"""Profile one step of a training loop, with the settings of DeepSpeed's configuration file."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from difflib import get_close_matches
from os import PathLike, fspath
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from torchprof.errors import TorchprofError, suggest
from torchprof.integrations.deepspeed.profiler import ProfileMethods
from torchprof.integrations.flops_profiler import FlopsProfiler
from torchprof.integrations.model_recording import ModelRecording, check_model, is_whole
from torchprof.integrations.strings import is_number


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
    the steps from 1. The step with the number ``profile_step`` is profiled and its text is printed; the others run
    without a profiler.
    """

    enabled: bool
    profile_step: int
    profiled: Callable[[nn.Module], AbstractContextManager[None]] = field(repr=False)
    steps: int = 0

    def step(self, model: nn.Module) -> AbstractContextManager[None]:
        """A ``with`` block for one step of this model. Errors inside pass through, and then nothing is printed. In a
        distributed job, only rank 0 is profiled. Raises TorchprofError for anything but a module."""
        if not self.enabled:
            return nullcontext()
        check_model(model)
        self.steps += 1
        return self.profiled(model) if self.steps == self.profile_step and _is_first_rank() else nullcontext()


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
        return StepProfiler(True, early["profile_step"], lambda model: _early_step(model, early))
    return StepProfiler(recent["enabled"], recent["profile_step"], lambda model: _recent_step(model, recent))


def _early_step(model: nn.Module, settings: Mapping[str, Any]) -> AbstractContextManager[None]:
    methods = ProfileMethods(model)
    return _recorded(methods, lambda: methods.print_all(settings["profile_depth"], settings["profile_top_num"]))


def _recent_step(model: nn.Module, settings: Mapping[str, Any]) -> AbstractContextManager[None]:
    profiler = FlopsProfiler(model, recompute_fwd_factor=settings["recompute_fwd_factor"])
    names = ("profile_step", "module_depth", "top_modules", "detailed", "output_file")
    return _recorded(profiler, lambda: profiler.print_model_profile(**{name: settings[name] for name in names}))


@contextmanager
def _recorded(recording: ModelRecording, print_profile: Callable[[], None]) -> Iterator[None]:
    recording.start_profile()
    try:
        yield
        recording.stop_profile()
        print_profile()
    finally:
        recording.end_profile()


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
