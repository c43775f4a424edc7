"""The warnings of a run: those stored in it, and those computed from its figures. Their texts: ``run/sentences.py``."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import replace
from typing import Any

from torchprof.analyze.compiled_regions import compiled_in
from torchprof.analyze.figures import varying_calls
from torchprof.run.meta import Meta, RunWarning
from torchprof.run.rows import Rows
from torchprof.run.run import Run
from torchprof.run.sentences import WITHOUT_SHAPES
from torchprof.run.words import (
    FORWARD,
    GRAPH,
    LAUNCH_NOT_RECORDED,
    LAYERS_NOT_RECORDED,
    NO_LAYERS,
    REPLAY,
    REPLAYS,
    Frame,
    FrameKind,
    is_generated,
    is_left_over,
)

_LAST = ("label_cost", "backward_incomplete", "counted_on_data")  # stored warnings that come after the computed ones

_NEVER, _NOT_RECORDED = "never_called", "not_called_when_recorded"
"""A layer without calls; and the same where not all passes of a loop were recorded."""

# Thresholds: above each, it is a warning.
_SLOW_START = 2  # the first call over the mean of the later calls
_SHARE_NOT_LAUNCHED = 0.05  # of the device's time in kernels whose launch was not recorded
_SHARE_UNKNOWN = 0.01  # of the time of compiled kernels with unknown layers
_SLOWER = 1.05  # passes at the end take so many times as long as those at the beginning
_SHARE_UNUSUAL = 0.01  # of the time by which unusual passes took longer
_SHARE_WAITED = 0.05  # of the time in which the main thread waited for a processor


def all_warnings(run: Run) -> tuple[RunWarning, ...]:
    """``Run.warnings``: those stored in it, and those computed from its figures. Each warning is there once, with the
    ranks that have it; warnings of most ranks first."""
    is_merged = len(run.metas) > 1
    ranks_of: dict[RunWarning, list[int]] = {}
    for one_rank in run.of_ranks([meta.rank for meta in run.metas]) if is_merged else [run]:
        stored = [
            replace(warning, code=_NOT_RECORDED) if one_rank.passes and warning.code == _NEVER else warning
            for warning in one_rank.meta.warnings
            if warning.code != WITHOUT_SHAPES
        ]
        last = [warning for warning in stored if warning.code in _LAST and not warning.added]
        first = (warning for warning in stored if warning not in last)
        for warning in dict.fromkeys([*first, *following_from(one_rank, is_merged), *last]):
            ranks_of.setdefault(warning, []).append(one_rank.meta.rank)
    most_first = sorted(ranks_of.items(), key=lambda item: -len(item[1]))
    return tuple(replace(warning, ranks=tuple(ranks)) for warning, ranks in most_first)


def following_from(run: Run, is_merged: bool = False) -> Iterator[RunWarning]:
    """The warnings that are computed from the run of one rank. For a sum of cycles they hold for the whole sum.

    ``is_merged``: the run was taken out of a run of several ranks, and has the layers of all ranks.
    """
    yield from about_passes(run)
    yield from about_start(run, is_merged)
    yield from _about_launches(run)
    yield from about_compiled(run)
    if "flops" in run.meta.measured:
        yield from about_uncounted(run.rows, operators_without_shapes(run.meta.warnings))
    yield from about_processors(run.meta)


def about_passes(run: Run) -> Iterator[RunWarning]:
    """How many passes of a loop were recorded, and those of the others that took far longer than usual."""
    if not run.passes:
        return
    recorded, count = (sum(getattr(passes, name) for passes in run.passes) for name in ("recorded", "count"))
    yield RunWarning.of("passes_sampled", recorded=recorded, count=count, memory=bool(run.memory))
    extra_ns = sum(passes.unusual_ns for passes in run.passes)
    unusual = [(each.ns, passes.layer, each) for passes in run.passes for each in passes.unusual]
    if unusual and extra_ns > _SHARE_UNUSUAL * run.meta.wall_ns:
        longest_ns, layer, longest = max(unusual)
        name = run.layers[layer].name if layer >= 0 else NO_LAYERS[layer]
        facts: dict[str, Any] = {"number": longest.number + 1, "line": str(longest.line), "extra_ns": extra_ns}
        yield RunWarning.of("passes_unusual", [name], longest_ns=longest_ns, **facts)
    for passes in run.passes:
        if (slowdown := passes.slowdown) is not None and slowdown[1] > _SLOWER * slowdown[0]:
            name = run.layers[passes.layer].name if passes.layer >= 0 else NO_LAYERS[passes.layer]
            first_ns, last_ns = map(round, slowdown)
            yield RunWarning.of("passes_slower", [name], count=passes.count, first_ns=first_ns, last_ns=last_ns)


def about_start(run: Run, is_merged: bool = False) -> Iterator[RunWarning]:
    """Models whose first call took much longer than the later ones. That is start-up, if all had the same shapes.

    In a merged run shapes may vary only between ranks: then it is unknown whether they vary on this rank.
    """
    if run.passes:  # the times are of calls that were not recorded, long after start-up
        return
    for key, spread in run.samples.items():
        if key.measure != "cpu_ns" or key.phase != FORWARD or len(run.layers[key.layer].path) > 1:
            continue
        mean_later = (spread.sum - spread.first) / (spread.count - 1) if spread.count > 1 else 0
        if 0 < mean_later * _SLOW_START < spread.first:
            layer = run.layers[key.layer]
            varies = varying_calls(run, of_model=True)[layer.path]
            shapes = "same" if varies is False else "varying" if varies and not is_merged else ""
            yield RunWarning.of("slow_start", [layer.name], first_ns=spread.first, later_ns=mean_later, shapes=shapes)


def _about_launches(run: Run) -> Iterator[RunWarning]:
    """Kernels that were launched before the recording, and kernels whose launch was not recorded."""
    device = run.meta.device_heading
    if kernels := run.rows.total("calls", frames=is_left_over):
        left, whole = run.left_over.device_ns, run.rows.total("device_ns")
        yield RunWarning.of("launched_before", kernels=kernels, device=device, device_ns=left, all_ns=whole)
    if ns := run.rows.total("device_ns", frames=_has_no_launch):
        operators = [frame for frames in run.rows.frames for frame in frames if frame.kind == FrameKind.OP]
        has_operators = any("::" in frame.name for frame in operators)  # a trace of the device alone has no launches
        whole = run.rows.of_recording.total("device_ns")
        if has_operators and ns >= _SHARE_NOT_LAUNCHED * whole:
            yield RunWarning.of("launch_not_recorded", device=device, device_ns=ns, all_ns=whole)


def _has_no_launch(frames: Sequence[Frame]) -> bool:
    """Whether these are the frames of a kernel whose launch was not recorded."""
    return bool(frames) and frames[0].kind == FrameKind.LABEL and frames[0].name == LAUNCH_NOT_RECORDED


def about_compiled(run: Run) -> Iterator[RunWarning]:
    """Graph breaks, compilation during the recording, and kernels of unknown layers."""
    usage = compiled_in(run)
    if usage.breaks:
        yield RunWarning.of("graph_breaks", places=tuple(region.break_place for region in usage.breaks))
    by_layers = ("compile_layers", True) in run.meta.flags
    if usage.compiled:
        yield RunWarning.of("compiled_meanwhile", cpu_ns=usage.compiling.cpu_ns, by_layers=by_layers)
    has_warning = any(warning.code == "compiler_unknown" for warning in run.meta.warnings)
    for reason, (ns, share) in usage.unknown_times(run).items():
        if share > _SHARE_UNKNOWN and not (reason == LAYERS_NOT_RECORDED and has_warning):
            yield RunWarning.of("not_attributable", reason=reason, share=share, ns=ns)
    has_graphs = any(part.graph for use in usage.uses for part in use.phases.values())
    if has_graphs and not by_layers and not usage.shares:
        called = {layer for (layer, _), (_, calls) in run.rows.by_layer.items() if calls}
        if any(layer.compiled and index not in called for index, layer in enumerate(run.layers)):
            yield RunWarning.of("inside_compiled")


def about_processors(meta: Meta) -> Iterator[RunWarning]:
    """A machine that was too busy: times are elapsed times, so they include waiting for a processor."""
    if waited_share(meta):
        yield RunWarning.of("machine_busy", delay_ns=meta.run_delay_ns or 0, wall_ns=meta.wall_ns)


def waited_share(meta: Meta) -> float:
    """The share of the recorded time for which the main thread waited for a processor, if it matters, else 0."""
    waited, wall = meta.run_delay_ns, meta.wall_ns
    is_busy = waited is not None and "cpu_ns" in meta.measured and waited > _SHARE_WAITED * wall > 0
    return (waited or 0) / wall if is_busy else 0.0


# Work that is missing from the MACs and FLOPs

_NO_FORMULA = "uncounted_operator"
_OPERATORS_NAMED = 8  # the most operators without a formula that have a warning of their own


def about_uncounted(rows: Rows, without_shapes: Set[str]) -> Iterator[RunWarning]:
    """A warning for each operator without a formula, most calls first, and one for each other reason why work is not
    counted.

    ``without_shapes``: the operators that have a formula, but were recorded without shapes.
    """
    calls: defaultdict[tuple[str, str], Counter[str]] = defaultdict(Counter)  # by the reason and the operator
    layers: defaultdict[tuple[str, str], dict[str, None]] = defaultdict(dict)
    for (layer, chain), uncounted in rows.of_recording.summed(("layer", "frames"), "uncounted").items():
        frames = rows.frames[chain]
        if frames and uncounted:  # rows without frames are Python's time: no FLOPs
            reason = _why_uncounted(frames, without_shapes)
            work = reason, frames[-1].name if reason == _NO_FORMULA else ""
            calls[work][frames[-1].name] += uncounted
            layers[work][rows.layers[layer].name if layer >= 0 else NO_LAYERS[layer]] = None
    most_first = sorted(calls, key=lambda work: -calls[work].total())
    operators = [work for work in most_first if work[0] == _NO_FORMULA]
    others = [work for work in most_first if work[0] != _NO_FORMULA]
    for code, name in operators[:_OPERATORS_NAMED]:
        yield _uncounted(code, calls[code, name], [*layers[code, name]])
    if rest := operators[_OPERATORS_NAMED:]:
        yield RunWarning.of("uncounted_more", operators=len(rest), calls=sum(calls[work].total() for work in rest))
    for code, name in others:
        yield _uncounted(code, calls[code, name], [*layers[code, name]])


def _uncounted(code: str, calls: Counter[str], layers: Sequence[str]) -> RunWarning:
    """``calls``: of each operator or kernel by name."""
    return RunWarning.of(code, layers, names=tuple(name for name, _ in calls.most_common()), count=calls.total())


def operators_without_shapes(warnings: Iterable[RunWarning]) -> frozenset[str]:
    """The operators that have a FLOPs formula, but were not counted because their shapes were not recorded."""
    return frozenset(
        name for warning in warnings if warning.code == WITHOUT_SHAPES for name in warning.facts.get("names", ())
    )


def _why_uncounted(frames: Sequence[Frame], without_shapes: Set[str]) -> str:
    """The code of the warning about work with these frames."""
    kind, name, signature = frames[-1]
    if kind == FrameKind.KERNEL:
        if any(frame.kind == FrameKind.KERNELS and frame.name == REPLAY for frame in frames):
            return "uncounted_replayed"
        return "uncounted_no_launch" if _has_no_launch(frames) else "uncounted_no_operator"
    if name in REPLAYS:
        return "uncounted_replay"
    if name == GRAPH:
        return "uncounted_graph"
    if is_generated(name):
        return "uncounted_generated"
    has_shapes = signature is not None and signature.shapes
    return WITHOUT_SHAPES if name in without_shapes and not has_shapes else _NO_FORMULA
