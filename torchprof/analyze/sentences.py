"""The sentences below the figures of a report: warnings, and what sums over ranks or steps mean."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence, Set
from dataclasses import replace
from pathlib import PurePath

from torchprof.analyze.compiled_regions import compiled_in
from torchprof.analyze.figures import varying_calls
from torchprof.analyze.report import Section, printable
from torchprof.run.formats import ranks_in_words
from torchprof.run.meta import Meta, RunWarning
from torchprof.run.rows import Rows
from torchprof.run.run import Run
from torchprof.run.sentences import WITHOUT_SHAPES
from torchprof.run.words import (
    BETWEEN_OPS,
    FORWARD,
    GRAPH,
    LAUNCH_NOT_RECORDED,
    LAYERS_NOT_RECORDED,
    NOT_SELECTED_NAME,
    OUTSIDE,
    OUTSIDE_NAME,
    REPLAY,
    REPLAYS,
    Frame,
    FrameKind,
    is_generated,
    is_left_over,
)

# All warnings of a run

_MUCH_OF_THE_DEVICE = 0.05  # of its time
_SLOW_START = 2  # the first call over the mean of the later calls: above this it is a warning
_SHARE_UNKNOWN = 0.01  # the share of the kernels' time with unknown layers: above this it is a warning
_TOO_BUSY = 0.05  # the share of the time for which a thread waits for a processor: above this it is a warning
_AT_THE_END = ("label_cost", "backward_incomplete")
_OPERATOR = "uncounted_operator"

_OPERATORS = 8  # the most operators that have a warning of their own


def all_warnings(run: Run) -> tuple[RunWarning, ...]:
    """``Run.warnings``: those stored in it, and those computed from its figures. Each warning is there once, with the
    ranks that have it; warnings of most ranks first."""
    of_one = [run] if len(run.metas) == 1 else run.of_ranks([meta.rank for meta in run.metas])
    ranks_of: dict[RunWarning, list[int]] = {}
    for of_rank in of_one:
        stored = [warning for warning in of_rank.meta.warnings if warning.code != WITHOUT_SHAPES]
        last = [warning for warning in stored if warning.code in _AT_THE_END and not warning.added]
        first = (warning for warning in stored if warning not in last)
        for warning in dict.fromkeys([*first, *following_from(of_rank, len(run.metas) > 1), *last]):
            ranks_of.setdefault(warning, []).append(of_rank.meta.rank)
    most_first = sorted(ranks_of.items(), key=lambda item: -len(item[1]))
    return tuple(replace(warning, ranks=tuple(ranks)) for warning, ranks in most_first)


def following_from(run: Run, is_merged: bool = False) -> Iterator[RunWarning]:
    """The warnings that are computed from the run of one rank. For a sum of cycles they hold for the whole sum.

    ``is_merged``: the run was taken out of a run of several ranks, and has the layers of all ranks.
    """
    yield from about_start(run, is_merged)
    if kernels := run.rows.total("calls", frames=is_left_over):
        device, left, whole = run.meta.device_heading, run.left_over.device_ns, run.rows.total("device_ns")
        yield RunWarning.of("launched_before", kernels=kernels, device=device, device_ns=left, all_ns=whole)
    if ns := run.rows.total("device_ns", frames=_has_no_launch):
        inner = [frame for frames in run.rows.frames for frame in frames if frame.kind == FrameKind.OP]
        has_operators = any("::" in frame.name for frame in inner)
        whole = run.rows.of_recording.total("device_ns")
        if has_operators and ns >= _MUCH_OF_THE_DEVICE * whole:  # a trace of the device alone has no launches
            device = run.meta.device_heading
            yield RunWarning.of("launch_not_recorded", device=device, device_ns=ns, all_ns=whole)
    yield from about_compiled(run)
    if "flops" in run.meta.measured:
        yield from about_uncounted(run.rows, operators_without_shapes(run.meta.warnings))
    yield from about_processors(run.meta)


def operators_without_shapes(warnings: Iterable[RunWarning]) -> frozenset[str]:
    """The operators that have a FLOPs formula, but were not counted because their shapes were not recorded."""
    return frozenset(
        name for warning in warnings if warning.code == WITHOUT_SHAPES for name in warning.facts.get("names", ())
    )


def about_processors(meta: Meta) -> Iterator[RunWarning]:
    """A machine that was too busy: times are elapsed times, so they include waiting for a processor."""
    if waited_share(meta):
        yield RunWarning.of("machine_busy", delay_ns=meta.run_delay_ns or 0, wall_ns=meta.wall_ns)


def waited_share(meta: Meta) -> float:
    """The share of the recorded time for which the main thread waited for a processor, if it is large enough to matter,
    else 0."""
    waited, wall = meta.run_delay_ns, meta.wall_ns
    is_busy = waited is not None and "cpu_ns" in meta.measured and waited > _TOO_BUSY * wall > 0
    return (waited or 0) / wall if is_busy else 0.0


def about_start(run: Run, is_merged: bool = False) -> Iterator[RunWarning]:
    """Models whose first call took much longer than the later ones. That is start-up, if all had the same shapes.

    In a merged run shapes may vary only between ranks: then it is unknown whether they vary on this rank.
    """
    for key, spread in run.samples.items():
        if key.measure != "cpu_ns" or key.phase != FORWARD or len(run.layers[key.layer].path) > 1:
            continue
        later = (spread.sum - spread.first) / (spread.count - 1) if spread.count > 1 else 0
        if 0 < later * _SLOW_START < spread.first:
            layer = run.layers[key.layer]
            varies = varying_calls(run, of_model=True)[layer.path]
            shapes = "same" if varies is False else "varying" if varies and not is_merged else ""
            yield RunWarning.of("slow_start", [layer.name], first_ns=spread.first, later_ns=later, shapes=shapes)


def about_compiled(run: Run) -> Iterator[RunWarning]:
    """Graph breaks, compilation during the recording, and kernels of unknown layers."""
    usage = compiled_in(run)
    files = [(PurePath(region.file).name, region.break_line) for region in usage.breaks]
    places = [f"{name}:{line}" if name else f"line {line}" for name, line in files]  # a stripped run has no names
    if places:
        yield RunWarning.of("graph_breaks", places=tuple(places))
    by_layers = ("compile_layers", True) in run.meta.flags
    if usage.compiled:
        yield RunWarning.of("compiled_meanwhile", cpu_ns=usage.compiling.cpu_ns, by_layers=by_layers)
    is_told = any(warning.code == "compiler_unknown" for warning in run.meta.warnings)
    for reason, (ns, share) in usage.unknown_times(run).items():
        if share > _SHARE_UNKNOWN and not (reason == LAYERS_NOT_RECORDED and is_told):
            yield RunWarning.of("not_attributable", reason=reason, share=share, ns=ns)
    if not by_layers and not usage.shares and usage.has_graphs:
        called = {layer for (layer, _), (_, calls) in run.rows.by_layer.items() if calls}
        if any(layer.compiled and index not in called for index, layer in enumerate(run.layers)):
            yield RunWarning.of("inside_compiled")


def about_uncounted(rows: Rows, without_shapes: Set[str]) -> Iterator[RunWarning]:
    """Work that is missing from the MACs and FLOPs: a warning for each operator without a formula, most calls first,
    and one for each other reason why work is not counted.

    ``without_shapes``: the operators that have a formula, but were recorded without shapes.
    """
    calls: defaultdict[tuple[str, str], Counter[str]] = defaultdict(Counter)  # by the reason and the operator
    layers: defaultdict[tuple[str, str], dict[str, None]] = defaultdict(dict)
    for (layer, chain), uncounted in rows.of_recording.summed(("layer", "frames"), "uncounted").items():
        frames = rows.frames[chain]
        if frames and uncounted:  # rows without frames are Python's time: no FLOPs
            reason = _reason(frames, without_shapes)
            work = reason, frames[-1].name if reason == _OPERATOR else ""
            calls[work][frames[-1].name] += uncounted
            nowhere = OUTSIDE_NAME if layer == OUTSIDE else NOT_SELECTED_NAME
            layers[work][rows.layers[layer].name if layer >= 0 else nowhere] = None
    most_first = sorted(calls, key=lambda work: -calls[work].total())
    operators = [work for work in most_first if work[0] == _OPERATOR]
    others = [work for work in most_first if work[0] != _OPERATOR]
    for work in operators[:_OPERATORS]:
        yield _uncounted(work[0], calls[work], [*layers[work]])
    if rest := operators[_OPERATORS:]:
        yield RunWarning.of("uncounted_more", operators=len(rest), calls=sum(calls[work].total() for work in rest))
    for work in others:
        yield _uncounted(work[0], calls[work], [*layers[work]])


def _uncounted(code: str, calls: Counter[str], layers: Sequence[str]) -> RunWarning:
    return RunWarning.of(code, layers, names=tuple(name for name, _ in calls.most_common()), count=calls.total())


def _has_no_launch(frames: Sequence[Frame]) -> bool:
    return bool(frames) and frames[0].kind == FrameKind.LABEL and frames[0].name == LAUNCH_NOT_RECORDED


def _reason(frames: Sequence[Frame], without_shapes: Set[str]) -> str:
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
    return WITHOUT_SHAPES if name in without_shapes and not has_shapes else _OPERATOR


# Signs, warnings and sums in words

LEGEND = {
    "–": "unknown: not measured, or not attributed to this place",
    "≥": "lower bound: a part of it could not be counted",
    OUTSIDE_NAME: "work outside of all layers",
    BETWEEN_OPS: "no operator ran: Python, other libraries, or waiting",
}
"""The signs in place of figures and of names, in every table. ``legend`` writes them, and so does the page."""

_WARNINGS_SHOWN = 10  # if there are several ranks: a job may have a thousand, with different figures in each warning
_BUSY = "machine_busy"
_ABOUT_TIMES = ("no_compiled_code", "start_up", "slow_start", _BUSY)
"""The codes of the warnings about all times of a run, or about code that was to be compiled. Views that begin with a
headline show them directly below it."""


def legend(text: str) -> list[str]:
    """A line for each sign of ``LEGEND`` that is alone in a printed text, and that the text does not explain.

    A dash in a range, as in "0–9", is not a sign.
    """
    width = max(map(len, LEGEND))
    return [
        f"  {sign:<{width}}  {meaning}"
        for sign, meaning in LEGEND.items()
        if re.search(rf"(?<!\S){re.escape(sign)}(?!\S)", text) and not re.search(rf"(?m)^{re.escape(sign)}: ", text)
    ]


def warnings_of(run: Run, without: Collection[str] = ()) -> list[str]:
    """The warnings of a run as sentences: which ranks are missing, then each warning once. A warning that does not come
    from all ranks names its ranks. ``without``: codes of warnings to leave out."""
    ranks_of: dict[str, set[int]] = {}
    for warning in run.warnings:
        is_once_for_all = len(run.metas) > 1 and warning.code == _BUSY
        if not is_once_for_all and warning.code not in without:
            ranks_of.setdefault(str(warning), set()).update(warning.ranks)
    warnings = [
        sentence if len(ranks) == len(run.metas) else f"{ranks_in_words(ranks).capitalize()}: {sentence}"
        for sentence, ranks in sorted(ranks_of.items(), key=lambda item: -len(item[1]))
    ]
    hidden = len(warnings) - _WARNINGS_SHOWN
    if len(run.metas) > 1 and hidden > 0:
        more = f"{hidden} more warnings of single ranks are hidden. run.of_rank(N) has those of rank N."
        warnings[_WARNINGS_SHOWN:] = [more]
    return [*about_missing_ranks(run), *warnings, *_about_busy_machines(run)]


def warnings_below(run: Run, without: Collection[str] = ()) -> Section:
    """The last part of a report: the warnings of a run, as in ``warnings_of``."""
    return Section([*map(printable, warnings_of(run, without))], has_warnings=True)


def about_times(run: Run) -> Iterator[str]:
    """What makes all times of a run less certain than they look: a sentence each."""
    calls = sum(map(run.rows.forward_calls, run.layers.roots))
    if "cpu_ns" in run.meta.measured and calls == 1:
        yield "One call was recorded: it has no spread, and if it was the first, start-up work is in its times."
    if len(run.metas) == 1:
        yield from (str(warning) for warning in run.warnings if warning.code in _ABOUT_TIMES)


def other_warnings_of(run: Run) -> list[str]:
    """The warnings that are not in ``about_times``: all of them in a run of several ranks, whose figures differ."""
    return warnings_of(run, without=_ABOUT_TIMES if len(run.metas) == 1 else ())


def lacks_ranks(run: Run) -> bool:
    """Whether the warnings begin with a sentence on missing ranks. Not for a run of one rank, which was not merged yet
    or was taken out of a merged run, and not for chosen ranks, which another warning is about."""
    return bool(run.missing_ranks) and len(run.metas) > 1 and run.choice is None


def about_missing_ranks(run: Run) -> Iterator[str]:
    """A sentence that names the ranks of the job that are missing in a run, if any are."""
    if lacks_ranks(run):
        missing = run.missing_ranks
        words, size = ranks_in_words(missing).capitalize(), len(run.metas) + len(missing)
        yield f"{words} of {size} {'is' if len(missing) == 1 else 'are'} missing in this run."


def count_of_ranks(run: Run) -> str:
    """How many ranks a run has, and of how many they were chosen: "8", "3 of 1,024"."""
    count = f"{len(run.metas):,}"
    return count if run.choice is None else f"{count} of {run.choice.facts['count']:,}"


def about_sums(run: Run) -> Iterator[str]:
    """What the figures mean in a run of several ranks: which are sums, means and maxima over ranks."""
    if len(run.metas) > 1:
        ranks = ranks_in_words(meta.rank for meta in run.metas)
        yield (
            f"Times, calls, memory and FLOPs are sums over {ranks}. Rates are means of the ranks, peaks the maximum. "
            'The report "ranks" compares ranks.'
        )


def from_to(least: str, most: str) -> str:
    """Two figures as a range, with their unit once if both have it: "81–95.2ms"."""
    unit = most.lstrip("0123456789.")
    return f"{least.removesuffix(unit) if least.lstrip('0123456789.') == unit else least}–{most}"


def summed_over(run: Run) -> str:
    """What the sums of a run are over, in words: its steps, or the calls of its models if it has no steps; "" for a
    single call."""
    steps = max(meta.marked_steps for meta in run.metas)
    if steps > 1:
        return f"{steps} steps"
    roots = run.layers.roots
    calls = sum(map(run.rows.forward_calls, roots))
    models = run.layers[roots[0]].name if len(roots) == 1 else "the models"
    return f"{calls} calls of {models}" if calls > 1 else ""


def about_flops(run: Run) -> Iterator[str]:
    """A sentence if MACs and FLOPs in tables are sums over several calls or steps."""
    over = summed_over(run)
    if over and "flops" in run.rows.nonzero:
        yield f"MACs and FLOPs are summed over {over}."


def _about_busy_machines(run: Run) -> Iterator[str]:
    """One sentence for all ranks: a warning for each rank, with different figures, would hide other warnings."""
    shares = {meta.rank: share for meta in run.metas if (share := waited_share(meta))}
    if shares and len(run.metas) > 1:
        most = max(shares, key=shares.__getitem__)
        yield (
            f"The machine was busy on {len(shares)} of {len(run.metas)} ranks: the main thread waited for a processor "
            f"for up to {shares[most]:.0%} of the time (rank {most}). Times include this. Measure again on an idle "
            "machine."
        )
