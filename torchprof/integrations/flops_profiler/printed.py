"""The text that flops-profiler prints: the part by depth, the part by module, and how figures were counted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torchprof.integrations.figures import at_least, known_sum, share_text
from torchprof.integrations.flops_profiler.measured import LayerFigures, LayerPath, Measured
from torchprof.integrations.flops_profiler.strings import duration_text, macs_text, number_text, params_text, rate_text
from torchprof.integrations.modules import Position, repr_lines

_CONVENTION = (
    "Flops are counted as flops-profiler counts them: 2 for each multiply-accumulate, the bias of convolutions, and a "
    "number for each element in norms, activations, softmax and pooling."
)


def printed_text(measured: Measured, step: int, module_depth: int, top_modules: int, detailed: bool) -> str:
    """The whole text: the part by depth, if ``detailed`` the part by module, and how the figures were counted."""
    lines = ["", "-------------------------- Flops Profiler --------------------------", f"Profile at step {step}"]
    lines += ["", "----------------------------- Aggregated Profile per Device -----------------------------"]
    lines += lines_by_depth(measured, module_depth, top_modules)
    if detailed:
        lines += [
            "",
            "------------------------------ Detailed Profile per Device ------------------------------",
            "Each module profile is listed after its name in the following order:",
            "module: what it did with all below it, and which share of the model that is; functionals: the same by "
            "functional; then what the module says of itself",
            "",
            "Note: 1. What a module does itself is not in the modules that it holds, so these may make up less.",
            "2. Flops follow from shapes alone. What a kernel saves is not taken off.",
            "3. The latency of a module is how long its forward lasted, or on a device, its kernels.",
            "",
            *lines_by_module(measured),
        ]
    lines += ["", *_sentences(measured)]
    lines.append("------------------------------------------------------------------------------")
    return "\n".join(lines)


def _sentences(measured: Measured) -> Iterator[str]:
    """How the figures were counted, what they do not include, and the run's warnings."""
    yield f"{_CONVENTION} By torchprof's own convention, which counts all elementwise work, fwd: {measured.own_flops}."
    if measured.outside:
        yield f"Outside of the model's forward (code around it, a loss), not among these figures: {measured.outside}."
    for name, calls in measured.unknown.items():
        yield f"Not counted: {name} ({calls} call{'s' if calls > 1 else ''} on tensors whose shapes are not known)."
    yield from map(str, measured.run.warnings)


def lines_by_depth(measured: Measured, module_depth: int, top_modules: int) -> Iterator[str]:
    """For each depth, the module classes with the largest sums."""
    levels: list[dict[str, list[LayerPath]]] = []
    for path, figures in measured.of.items():
        if len(path) > len(levels):
            levels.append({})
        levels[len(path) - 1].setdefault(figures.kind, []).append(path)
    columns: tuple[tuple[str, Any, Any], ...] = (
        ("params", measured.params_at, params_text),
        ("flops", lambda paths: known_sum(measured.of[path].known[0] for path in paths), number_text),
        ("MACs", lambda paths: known_sum(measured.of[path].known[1] for path in paths), macs_text),
        ("fwd latency", lambda paths: known_sum(measured.of[path].known[2] for path in paths), duration_text),
    )
    yield f"Top {top_modules} modules in terms of params, flops, MACs or duration at different model depths:"
    for depth, level in enumerate(levels if module_depth < 0 else levels[: module_depth + 1]):
        yield f"depth {depth}:"
        for label, total, written in columns:
            sums = {kind: total(paths) for kind, paths in level.items()}
            largest = sorted(sums, key=lambda kind: sums[kind] or 0, reverse=True)[:top_modules]
            unsure = {kind for kind in largest if any(measured.of[path].is_lower_bound for path in level[kind])}
            bounded = unsure if label in ("flops", "MACs") else ()
            yield f"    {label:<11} - { {kind: at_least(written(sums[kind]), kind in bounded) for kind in largest} }"


def lines_by_module(measured: Measured) -> Iterator[str]:
    """The lines of the model's repr, with the figures of each module of the run."""

    def figures_at(position: Position) -> str | None:
        path = measured.layer_of.get(position.path)
        return None if path is None else _figures_text(measured, measured.of[path])

    return repr_lines(measured.model, figures_at)


def _figures_text(measured: Measured, figures: LayerFigures) -> str:
    whole = measured.whole
    flops, macs, ns = figures.known
    module = {
        "param": params_text(figures.params),
        "flops": at_least(number_text(flops), figures.is_lower_bound),
        "macs": at_least(macs_text(macs), figures.is_lower_bound),
        "duration": duration_text(ns),
        "FLOPS": at_least(rate_text(flops, ns), figures.is_lower_bound),
        "params%": share_text(figures.params, whole.params),
        "flops%": share_text(flops, whole.flops),
        "macs%": share_text(macs, whole.macs),
        "duration%": share_text(ns, whole.ns),
    }
    functionals = {
        name: {
            "flops": number_text(counted.flops),
            "macs": macs_text(counted.macs),
            "duration": duration_text(measured.ns(counted)),
            "FLOPS": rate_text(counted.flops, measured.ns(counted)),
            "flops%": share_text(counted.flops, whole.flops),
            "macs%": share_text(counted.macs, whole.macs),
            "duration%/allfuncs": share_text(measured.ns(counted), measured.functionals_ns),
            "duration%/e2e": share_text(measured.ns(counted), whole.ns),
        }
        for name, counted in figures.functionals.items()
    }
    lasted = duration_text(sum(map(measured.ns, figures.functionals.values())) if figures.seen else None)
    return f"module = {module}, functionals = {functionals}, functionals_duration = {lasted}"
