"""The text that flops-profiler prints below its summary: the part by depth, and the part by module."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torchprof.integrations.conventions import Counted
from torchprof.integrations.model_figures import LayerFigures, ModelFigures
from torchprof.integrations.modules import Position, largest, parameter_count, repr_lines
from torchprof.integrations.strings import (
    MACS,
    RATES,
    duration_to_string,
    number_to_string,
    params_to_string,
    per_second,
    share_text,
    text_in_units,
)


def printed_lines(figures: ModelFigures, module_depth: int, top_modules: int, detailed: bool) -> Iterator[str]:
    """The part by depth and, if ``detailed``, the part by module."""
    yield ""
    yield "----------------------------- Aggregated Profile per Device -----------------------------"
    yield from lines_by_depth(figures, module_depth, top_modules)
    if detailed:
        yield ""
        yield "------------------------------ Detailed Profile per Device ------------------------------"
        yield "Each module profile is listed after its name in the following order:"
        yield (
            "module: what it did with all below it, and which share of the model that is; functionals: the same by "
            "functional; then what the module says of itself"
        )
        yield ""
        yield "Note: 1. What a module does itself is not in the modules that it holds, so these may make up less."
        yield "2. Flops follow from shapes alone. What a kernel saves is not taken off."
        yield "3. The latency of a module is how long its forward lasted, or on a device, its kernels."
        yield ""
        yield from repr_lines(figures.model, lambda position: _module_text(figures, position))
    yield "------------------------------------------------------------------------------"


def lines_by_depth(figures: ModelFigures, module_depth: int, top_modules: int) -> Iterator[str]:
    """For each depth, the module classes with the largest sums."""
    yield f"Top {top_modules} modules in terms of params, flops, MACs or duration at different model depths:"
    last = figures.deepest if module_depth == -1 else min(module_depth, figures.deepest)
    for depth in range(last + 1):
        classes = figures.by_class(depth)
        sums = {name: own.figures for name, own in classes.items()}
        columns: dict[str, dict[str, tuple[float | None, str]]] = {
            "params": {name: (own.params, params_to_string(own.params)) for name, own in classes.items()},
            "flops": {name: (own.work, own.bounded(number_to_string(own.work))) for name, own in sums.items()},
            "MACs": {name: (own.macs, own.bounded(text_in_units(own.macs, MACS))) for name, own in sums.items()},
            "fwd latency": {name: (own.seconds, duration_text(own.seconds)) for name, own in sums.items()},
        }
        yield f"depth {depth}:"
        for label, column in columns.items():
            yield f"    {label:<11} - {largest(column, top_modules)}"


def _module_text(figures: ModelFigures, position: Position) -> str:
    own, whole = figures.at(position), figures.whole
    params = parameter_count(position.module)
    module = {
        "param": params_to_string(params),
        "flops": own.bounded(number_to_string(own.work)),
        "macs": own.bounded(text_in_units(own.macs, MACS)),
        "duration": duration_text(own.seconds),
        "FLOPS": own.bounded(rate_text(own.work, own.seconds)),
        "params%": share_text(params, figures.params),
        "flops%": share_text(own.work, whole.work),
        "macs%": share_text(own.macs, whole.macs),
        "duration%": share_text(own.seconds, whole.seconds),
    }
    functionals = {name: _functional_texts(counted, whole) for name, counted in own.functionals.items()}
    lasted = duration_text(own.functional_seconds)
    return f"module = {module}, functionals = {functionals}, functionals_duration = {lasted}"


def _functional_texts(counted: Counted, whole: LayerFigures) -> dict[str, Any]:
    seconds = counted.ns / 1e9
    return {
        "flops": number_to_string(counted.work),
        "macs": text_in_units(counted.macs, MACS),
        "duration": duration_text(seconds),
        "FLOPS": rate_text(counted.work, seconds),
        "flops%": share_text(counted.work, whole.work),
        "macs%": share_text(counted.macs, whole.macs),
        "duration%/allfuncs": share_text(seconds, whole.functional_seconds),
        "duration%/e2e": share_text(seconds, whole.seconds),
    }


def duration_text(seconds: float | None) -> str:
    return "0.0" if seconds == 0 else duration_to_string(seconds)


def rate_text(flops: float | None, seconds: float | None) -> str:
    """Floating-point operations per second."""
    return text_in_units(per_second(flops, seconds), RATES)
