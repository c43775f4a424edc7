"""DeepSpeed's early profiler: ``get_model_profile`` of one call, and the methods that it adds to a model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch import nn

from torchprof import TorchprofError
from torchprof.integrations.conventions import (
    DEEPSPEED,
    UNKNOWN_TEXT,
    duration_to_string,
    flops_to_string,
    macs_to_string,
    number_to_string,
    params_to_string,
    per_second,
    share_text,
)
from torchprof.integrations.model_figures import (
    LayerFigures,
    ModelFigures,
    Position,
    largest,
    parameter_count,
    repr_lines,
)
from torchprof.integrations.model_recording import ModelRecording, check_model, check_whole, ones, show


class ProfileMethods(ModelRecording):
    """Profiles one model. ``add_profile_methods`` adds the methods of this class to the model."""

    convention = DEEPSPEED

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
        return parameter_count(self.model)

    compute_total_flops = get_total_flops
    compute_total_duration = get_total_duration
    compute_total_params = get_total_params

    def print_model_profile(self) -> None:
        """Print the model's repr with the figures of each module, and how they were counted."""
        self.print_all(-1, 1, top=False)

    def print_model_aggregated_profile(self, depth: int = -1, top_num: int = 3) -> None:
        """Print the ``top_num`` classes of modules at a depth with the most multiply-adds, parameters and time.
        ``depth`` 0 is the model itself. -1, or more than the largest depth, is the largest depth."""
        check_whole("depth", depth, -1)
        check_whole("top_num", top_num, 1)
        show("\n".join(top_lines(self.figures(), depth, top_num)))

    def print_all(self, depth: int, top_num: int, tree: bool = True, top: bool = True) -> None:
        """Print the tree, the largest modules, or both, and then how they were counted."""
        figures = self.figures()
        parts = [*tree_lines(figures)] if tree else []
        parts += top_lines(figures, depth, top_num) if top else []
        if parts:
            show("\n".join([*parts, *counting_sentences(figures)]))


METHODS = (
    *("start_profile", "stop_profile", "end_profile", "print_model_profile", "print_model_aggregated_profile"),
    *(f"{verb}_total_{figure}" for verb in ("get", "compute") for figure in ("flops", "duration", "params")),
)


def add_profile_methods(model: nn.Module) -> nn.Module:
    """Add methods for profiling to a model, and return the model.

    They are ``start_profile(ignore_list=None)``, ``stop_profile()``, ``end_profile()``, ``get_total_flops()``,
    ``get_total_duration()`` (seconds), ``get_total_params()``, these three also as ``compute_total_…``,
    ``print_model_profile()`` and ``print_model_aggregated_profile(depth=-1, top_num=3)``. LayerFigures can be read and
    printed from start to end; the first reading stops the recording. ``end_profile`` removes the methods. A model that
    already has the methods is not changed. Raises TorchprofError for anything but a module, and if the model has
    another attribute with one of these names.
    """
    check_model(model)
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
    ``model(**input_constructor(input_res))``. ``depth`` and ``top_num`` are for the aggregated profile: depth 0 is the
    model itself, -1 the innermost modules. ``warm_up`` calls come first and are not measured. ``as_strings`` returns
    text (``"429.25 KMac"``, ``"61.71 k"``). ``ignore_modules``: modules, or classes of modules, whose own work does not
    count. Gradients are recorded if the caller has them enabled.

    Afterwards, every module is in the mode (train or eval) that it had before. Raises TorchprofError for bad arguments;
    errors of the model pass through.
    """
    recording = ProfileMethods(model)
    check_whole("depth", depth, -1)
    check_whole("top_num", top_num, 1)
    check_whole("warm_up", warm_up, 0)
    if input_constructor is not None and not callable(input_constructor):
        raise TorchprofError(
            f"input_constructor={input_constructor!r} must be a function of input_res that returns a dict of arguments."
        )

    def inputs() -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        if input_constructor is None:
            return (ones(model, "input_res", input_res, batch=(1,)),), {}
        return (), _named(input_constructor(input_res))

    recording.record_call(model, inputs, warm_up, ignore_modules)
    recording.print_all(depth, top_num, tree=print_profile, top=print_aggregated_profile)
    figures = recording.figures()
    if as_strings:
        return _macs_text(figures.whole, precision=2), params_to_string(figures.params)
    return figures.whole.work, figures.params


def _named(made: Any) -> Mapping[str, Any]:
    if not isinstance(made, Mapping) or not all(isinstance(name, str) for name in made):
        raise TorchprofError(
            f"input_constructor returned a {type(made).__name__}, and not a dict of keyword arguments, {{'x': x}}: the "
            "call is model(**input_constructor(input_res))."
        )
    return made


# The text


def tree_lines(figures: ModelFigures) -> Iterator[str]:
    """The model's repr with the figures of each module."""
    whole = figures.whole

    def text_at(position: Position) -> str:
        module = figures.at(position)
        params = parameter_count(position.module)
        rate = per_second(module.work, module.seconds)
        return ", ".join(
            (
                params_to_string(params),
                f"{share_text(params, figures.params, 3)} Params",
                _macs_text(module, precision=3),
                f"{share_text(module.work, whole.work, 3)} MACs",
                duration_to_string(module.seconds, precision=3),
                f"{share_text(module.seconds, whole.seconds)} time",
                f"{UNKNOWN_TEXT} TFLOPS" if rate is None else flops_to_string(2 * rate, "TFLOPS", 3),
            )
        )

    return repr_lines(figures.model, text_at)


def top_lines(figures: ModelFigures, depth: int, top_num: int) -> Iterator[str]:
    """The module classes at one depth with the most multiply-adds, parameters and time."""
    depth = figures.deepest if depth == -1 else min(depth, figures.deepest)
    classes = figures.by_class(depth)
    columns: dict[str, dict[str, tuple[float | None, str]]] = {
        "flops": {name: (own.figures.work, _macs_text(own.figures, precision=2)) for name, own in classes.items()},
        "params": {name: (own.params, params_to_string(own.params)) for name, own in classes.items()},
        "time": {name: (own.figures.seconds, duration_to_string(own.figures.seconds)) for name, own in classes.items()},
    }
    for what, column in columns.items():
        yield f"Top {min(top_num, len(classes))} modules in {what} at depth {depth} are {largest(column, top_num)}"


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
