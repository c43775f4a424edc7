"""The early DeepSpeed pytorch-profiler as a drop-in, and DeepSpeed's profiler settings for any training loop.

The printed text is the model's repr with figures at each module: parameters, multiply-adds and time, the shares of
these, and TFLOPS = 2 · multiply-adds / time / 10¹². The tool's "flops" are multiply-adds ("Mac").
docs/coming-from-deepspeed.md says what counts, and where torchprof's own count differs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
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
from torchprof.integrations import conventions, recorded_model
from torchprof.integrations.conventions import (
    duration_to_string,
    flops_to_string,
    macs_to_string,
    number_to_string,
    params_to_string,
    share_text,
)
from torchprof.integrations.flops_profiler import FlopsProfiler
from torchprof.integrations.recorded_model import FiguresByModule, LayerFigures, ModelFigures, ModelRecording, Position

__all__ = [
    "StepProfiler",
    "add_profile_methods",
    "duration_to_string",
    "flops_to_string",
    "from_config",
    "get_model_profile",
    "macs_to_string",
    "number_to_string",
    "params_to_string",
]


class ProfileMethods(ModelRecording):
    """Profiles one model. ``add_profile_methods`` adds the methods of this class to the model."""

    convention = conventions.DEEPSPEED

    def end_profile(self) -> None:
        """Stop profiling, drop the figures, and remove the methods from the model."""
        super().end_profile()
        for name in METHODS:
            if getattr(vars(self.model).get(name), "__self__", None) is self:
                del vars(self.model)[name]

    def get_total_flops(self) -> int | None:
        """The multiply-adds of the recorded forwards; None if there are none."""
        return self.figures().whole.work

    def get_total_duration(self) -> float | None:
        """The seconds of the recorded forwards; None if there are none."""
        return self.figures().whole.seconds

    def get_total_params(self) -> int | None:
        """The number of parameters, each counted once; None if a lazy module has not made its parameters yet."""
        return recorded_model.parameter_count(self.model)

    compute_total_flops = get_total_flops
    compute_total_duration = get_total_duration
    compute_total_params = get_total_params

    def print_model_profile(self) -> None:
        """Print the model's repr with the figures of each module, and how they were counted."""
        self.print_all(-1, 1, top=False)

    def print_model_aggregated_profile(self, depth: int = -1, top_num: int = 3) -> None:
        """Print the ``top_num`` classes of modules at a depth with the most multiply-adds, parameters and time.
        ``depth`` 0 is the model itself. -1, or more than the largest depth, is the largest depth."""
        recorded_model.check_whole("depth", depth, -1)
        recorded_model.check_whole("top_num", top_num, 1)
        recorded_model.show("\n".join(top_lines(self.figures(), depth, top_num)))

    def print_all(self, depth: int, top_num: int, tree: bool = True, top: bool = True) -> None:
        """Print the tree, the largest modules, or both, and then how they were counted."""
        figures = self.figures()
        lines = [*(tree_lines(figures) if tree else ()), *(top_lines(figures, depth, top_num) if top else ())]
        if lines:
            recorded_model.show("\n".join([*lines, *counting_sentences(figures)]))


METHODS = (
    *("start_profile", "stop_profile", "end_profile", "print_model_profile", "print_model_aggregated_profile"),
    *(f"{verb}_total_{figure}" for verb in ("get", "compute") for figure in ("flops", "duration", "params")),
)


def add_profile_methods(model: nn.Module) -> nn.Module:
    """Add methods for profiling to a model, and return the model: those of ``ProfileMethods`` that ``METHODS`` names.

    Figures can be read and printed from start to end; the first reading stops the recording. ``end_profile`` removes
    the methods. A model that already has the methods is not changed. Raises TorchprofError for anything but a module,
    and if the model has another attribute with one of these names.
    """
    recorded_model.check_model(model)
    owner = getattr(getattr(model, "start_profile", None), "__self__", None)
    if isinstance(owner, ProfileMethods) and owner.model is model:
        return model
    for name in METHODS:
        if hasattr(model, name):
            raise TorchprofError(
                f"This {type(model).__name__} has an attribute of its own by the name {name!r}: rename it, or use "
                "get_model_profile(model, …) or from_config(…), which add nothing to the model."
            )
    methods = ProfileMethods(model)
    vars(model).update({name: getattr(methods, name) for name in METHODS})
    return model


def get_model_profile(
    model: nn.Module,
    input_res: Any,
    input_constructor: Callable[[Any], Mapping[str, Any]] | None = None,
    print_profile: bool = True,
    print_aggregated_profile: bool = True,
    depth: int = -1,
    top_num: int = 3,
    warm_up: int = 10,
    as_strings: bool = True,
    ignore_modules: Iterable[Any] | None = None,
) -> tuple[int | str | None, int | str | None]:
    """Profile one forward of a model in eval mode, print it, and return (multiply-adds, parameters).

    ``input_res``: the shape of one example. The model is called on a batch with one example, a tensor of ones with the
    dtype and the device of the model's parameters. With ``input_constructor``, the call is
    ``model(**input_constructor(input_res))``. ``depth``, ``top_num``: see ``print_model_aggregated_profile``.
    ``warm_up`` calls come first and are not measured. ``as_strings`` returns text (``"429.25 KMac"``, ``"61.71 k"``).
    ``ignore_modules``: modules, or classes of modules, whose own work does not count. Gradients are recorded if the
    caller has them enabled.

    Afterwards, every module is in the mode (train or eval) that it had before. Raises TorchprofError for bad arguments;
    errors of the model pass through.
    """
    recording = ProfileMethods(model)
    recorded_model.check_whole("depth", depth, -1)
    recorded_model.check_whole("top_num", top_num, 1)
    recorded_model.check_whole("warm_up", warm_up, 0)
    if input_constructor is not None and not callable(input_constructor):
        raise TorchprofError(
            f"input_constructor={input_constructor!r} must be a function of input_res that returns a dict of arguments."
        )

    def inputs() -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        if input_constructor is None:
            return (recorded_model.ones(model, "input_res", input_res, batch=(1,)),), {}
        made = input_constructor(input_res)
        if not isinstance(made, Mapping) or not all(isinstance(name, str) for name in made):
            raise TorchprofError(
                f"input_constructor returned a {type(made).__name__}, and not a dict of keyword arguments, {{'x': x}}: "
                "the call is model(**input_constructor(input_res))."
            )
        return (), made

    recording.record_call(model, inputs, warm_up, ignore_modules)
    recording.print_all(depth, top_num, tree=print_profile, top=print_aggregated_profile)
    figures = recording.figures()
    if as_strings:
        return _macs_text(figures.whole, precision=2), params_to_string(figures.params)
    return figures.whole.work, figures.params


def tree_lines(figures: ModelFigures) -> Iterator[str]:
    """The model's repr with the figures of each module."""
    whole = figures.whole

    def text_at(position: Position) -> str:
        module = figures.at(position)
        params = recorded_model.parameter_count(position.module)
        rate = conventions.per_second(module.work, module.seconds)
        tflops = f"{conventions.UNKNOWN_TEXT} TFLOPS" if rate is None else flops_to_string(2 * rate, "TFLOPS", 3)
        return (
            f"{params_to_string(params)}, {share_text(params, figures.params, 3)} Params, "
            f"{_macs_text(module, precision=3)}, {share_text(module.work, whole.work, 3)} MACs, "
            f"{duration_to_string(module.seconds, precision=3)}, {share_text(module.seconds, whole.seconds)} time, "
            f"{tflops}"
        )

    return recorded_model.repr_lines(figures.model, text_at)


def top_lines(figures: ModelFigures, depth: int, top_num: int) -> Iterator[str]:
    """The module classes at one depth with the most multiply-adds, parameters and time."""
    depth = figures.deepest if depth == -1 else min(depth, figures.deepest)
    classes = figures.by_class(depth)
    columns: dict[str, FiguresByModule] = {
        "flops": {name: (own.work, _macs_text(own, precision=2)) for name, own, _ in classes},
        "params": {name: (params, params_to_string(params)) for name, _, params in classes},
        "time": {name: (own.seconds, duration_to_string(own.seconds)) for name, own, _ in classes},
    }
    for what, column in columns.items():
        largest = recorded_model.largest(column, top_num)
        yield f"Top {min(top_num, len(classes))} modules in {what} at depth {depth} are {largest}"


def counting_sentences(figures: ModelFigures) -> Iterator[str]:
    """The difference between this count and torchprof's own, and what the figures do not include."""
    own = figures.run.tree("forward").total
    bound = "at least " if own.uncounted else ""
    macs, flops = (number_to_string(number if figures.whole.calls else None) for number in (own.macs, own.flops))
    difference = (
        "Multiply-adds by this tool's convention: products of convolution (plus its bias), linear and recurrent "
        "layers, one for each input element of pooling, relu-like functions and softmax, two of batch norm, 0 for "
        f"all else; torchprof itself counts {bound}{macs} MACs and {bound}{flops} FLOPs here."
    )
    if figures.device is not None:
        difference += f" Time is that of the work on the {figures.device} device."
    yield difference
    yield from figures.sentences()


def _macs_text(figures: LayerFigures, precision: int) -> str:
    return figures.bounded(macs_to_string(figures.work, precision=precision))


# Settings of DeepSpeed


class _Setting(NamedTuple):
    """A key of the configuration: the expected value in words, a check of the value, and the default."""

    expected: str
    is_right: Callable[[Any], bool]
    default: Any


def _yes_or_no(default: bool) -> _Setting:
    return _Setting("true or false", lambda value: isinstance(value, bool), default)


def _whole(least: int, default: int) -> _Setting:
    return _Setting(f"a whole number from {least} on", lambda value: recorded_model.is_whole(value, least), default)


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
    "recompute_fwd_factor": _Setting(
        "a number from 0 on", lambda value: conventions.is_number(value) and bool(value >= 0), 0.0
    ),
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
        recorded_model.check_model(model)
        self.steps += 1
        distributed = torch.distributed
        is_in_job = distributed.is_available() and distributed.is_initialized()
        is_first_rank = not is_in_job or distributed.get_rank() == 0
        return self._profiled(model) if self.steps == self.profile_step and is_first_rank else nullcontext()

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

    With the section ``flops_profiler`` the text of ``torchprof.integrations.flops_profiler`` is printed, with the older
    keys (``pytorch_profiler``, …) that of this module. DeepSpeed's other keys are ignored; without any of these keys,
    nothing is profiled. docs/coming-from-deepspeed.md has all keys. Use it as::

        profiler = from_config("ds_config.json")
        for batch in loader:
            with profiler.step(model):
                ...  # forward, backward, optimizer.step()

    Raises TorchprofError for unknown keys of the profiler, values of a wrong type, and a file without a JSON object.
    """
    settings = _loaded(config)
    known = [_SECTION, *_EARLY_KEYS]
    for key in settings:  # all but misspelled keys of the profiler are DeepSpeed's own
        if key not in known and ("profil" in str(key).lower() or get_close_matches(str(key), known, 1, 0.8)):
            raise TorchprofError(f"The configuration has an unknown key {key!r}. {suggest(str(key), known)}")
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


def _checked(given: Mapping[str, Any], known: Mapping[str, _Setting], where: str) -> dict[str, Any]:
    """All settings: the given ones, checked, and the defaults of the others."""
    for key, value in given.items():
        if key not in known:
            raise TorchprofError(f"{where} has an unknown key {key!r}. {suggest(str(key), known)}")
        if not known[key].is_right(value):
            raise TorchprofError(f'"{key}" is {value!r:.80}, and should be {known[key].expected}.')
    return {key: given.get(key, setting.default) for key, setting in known.items()}
