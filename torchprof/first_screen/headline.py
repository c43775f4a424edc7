"""The headline: where the time goes, in one or two sentences."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from torchprof.analyze.report import report, shortened
from torchprof.analyze.sentences import count_of_ranks, summed_over
from torchprof.analyze.top import KindOfWork, Parts, most_sampled, parts_of, source_lines
from torchprof.errors import printable
from torchprof.run.groups import lists_by_key
from torchprof.run.layers import Layer, Layers
from torchprof.run.run import Run
from torchprof.run.words import (
    AUTOGRAD_ENGINE,
    BACKWARD,
    BETWEEN_OPS,
    FORWARD,
    LAUNCH_NOT_RECORDED,
    NOT_SELECTED,
    OUTSIDE,
    PHASES,
    RECOMPUTE,
    WAITS_FOR_AUTOGRAD,
    WAITS_IN_WORDS,
    FrameKind,
    SourceLine,
    range_in_words,
    torchs_range,
)

_NEARLY_ALL_OF_PART = 0.995  # of the part before: both would have the same share
_NEARLY_ALL_OF_TOTAL = 0.95  # a phase with this share of the total is treated as all of it
_MOSTLY_IDLE = 0.5  # a device that is idle for more than this share of the time waits for the CPU

_PHASES = {FORWARD: "the forward", BACKWARD: "the backward", RECOMPUTE: "the recomputation"}
_PHASES_OF_RANGES = {
    FORWARD: "the ranges",
    BACKWARD: "the backward of the ranges",
    RECOMPUTE: "the recomputation in the ranges",
}
"""For traces without modules: a range need not be a forward call."""
_NO_LAYER = {OUTSIDE: "outside of all layers", NOT_SELECTED: "in layers that were not selected"}
_WAITS = {range_in_words(FrameKind.WAIT, name): phrase for name, phrase in WAITS_IN_WORDS.items()}
_PHRASES = {AUTOGRAD_ENGINE: "in autograd's engine", **_WAITS}
_NAMES_OF_KINDS = {
    "Linear": "linear layer",
    "LayerNorm": "layer norm",
    "RMSNorm": "RMS norm",
    "GroupNorm": "group norm",
    "BatchNorm1d": "batch norm",
    "BatchNorm2d": "batch norm",
    "BatchNorm3d": "batch norm",
    "Embedding": "embedding",
}
_CONVOLUTION = re.compile(r"Conv(Transpose)?([123])d")
_KERNEL_SIZE = re.compile(r"kernel_size=\((\d+(?:, \d+)*),?\)")


class _Measured(NamedTuple):
    """The measure of the headline: a field of ``Cost``, and its name. ``plain``: the sentence leaves the name out."""

    field: str
    name: str
    plain: bool = False


class _Clause(NamedTuple):
    """A part of the work: its amount, and a phrase for its place. ``layer``: the layer, if the part is exactly one."""

    amount: int
    where: str
    layer: int | None = None


@report("headline", "in one or two sentences, the part of the model that takes most", answers="time")
def headline(run: Run) -> str:
    """Where the time goes: "62% of the forward is in `layer3`, 44% in its 3×3 convolutions."

    The headline is about the largest of four parts: forward, backward (also of no layer), recomputation, and other work
    outside of all layers. It gives the part's share of the total if that is less than 95 %. From the model it descends
    into any layer with more than half of the part, and names the kind of layers there with the largest self ("directly
    in", if layers below them took time as well), or the largest operator if there are no layers below. If it cannot
    descend, a second sentence names the largest layer.

    It uses the device's time if that was measured. A device that was idle for more than half of the time waits for the
    CPU: then the headline says so, and uses the time on the CPU. In a run without times it uses FLOPs. 100 % is the
    same as in ``top``; sums are over all ranks.
    """
    before, measured = _subject(run)
    parts = parts_of(run, measured.field)
    if not parts or measured.field not in run.rows.nonzero:
        return f"{before}No {'FLOPs were counted' if measured.field == 'flops' else f'{measured.name} was recorded'}."
    is_empty = all((layer, work.label, work.name) == (OUTSIDE, "", BETWEEN_OPS) for layer, work in parts)
    if is_empty and measured.field == "cpu_ns" and not source_lines(run):
        return f"{before}No operator ran, and no layer was called."
    by_phase = _by_phase(run, parts)
    largest = max(by_phase, key=lambda phase: sum(by_phase[phase].values()))
    parts_of_largest, everything = by_phase[largest], sum(parts.values())
    if largest >= 0:
        first, *more = _about_phase(run, measured, PHASES[largest], parts_of_largest, everything)
        return before + first if before else " ".join([first, *more])
    clauses = [_Clause(sum(parts_of_largest.values()), _NO_LAYER[largest])]
    clauses += _largest_work(run, measured, parts_of_largest)
    return before + _sentence(run, measured, f"the {measured.name}", everything, clauses)


def _by_phase(run: Run, parts: Parts) -> dict[int, Parts]:
    """The parts by the number of their phase, or by OUTSIDE or NOT_SELECTED.

    Backward work of no layer, such as that of autograd's engine and of the loss, is in the backward, unless the
    sentence is about selected layers. While a thread waits for backward, the backward is a part itself.
    """
    in_backward = PHASES.index(BACKWARD) if run.meta.paths is None else None
    by_phase: defaultdict[int, Parts] = defaultdict(dict)
    for part, amount in parts.items():
        layer, work = part
        if layer == OUTSIDE and _WAITS.get(work.name) == WAITS_IN_WORDS[WAITS_FOR_AUTOGRAD]:
            continue
        is_of_phase = layer >= 0 or (layer == OUTSIDE and work.phase == in_backward)
        by_phase[work.phase if is_of_phase else layer][part] = amount
    return by_phase


def _about_phase(run: Run, measured: _Measured, phase: str, parts: Parts, everything: int) -> Iterator[str]:
    """The sentence about the parts of a phase of layers; and one on the largest layer, if the first names none."""
    name = (_PHASES if run.meta.model else _PHASES_OF_RANGES)[phase]
    name += " of the selected layers" if run.meta.paths is not None else ""
    whole = sum(parts.values())
    subject, total, clauses = name if measured.plain else f"the {measured.name} of {name}", whole, []
    if whole < _NEARLY_ALL_OF_TOTAL * everything:
        subject, total, clauses = f"the {measured.name}", everything, [_Clause(whole, f"in {name}")]
    tree = _Tree.of(run.layers, parts)
    deepest = tree.deepest_with_most_of(whole)
    is_named = deepest is not None and (len(run.layers[deepest].path) > 1 or len(run.roots) > 1)
    if deepest is not None and is_named:
        clauses.append(_Clause(tree.totals[deepest], f"in `{_name(run, deepest)}`", deepest))
    clauses += _largest_within(run, measured, tree, parts, layer=deepest, is_named=is_named)
    yield _sentence(run, measured, subject, total, clauses)
    candidates = [] if is_named else [child for child in tree.children(deepest) if tree.totals[child]]
    largest = max(candidates, key=tree.totals.__getitem__, default=None)
    if largest is not None and len(candidates) > 1 and clauses[-1].layer != largest:
        which = f"layer of {_PHASES[phase]}" if deepest is not None else "model" if run.meta.model else "range"
        yield f"The largest {which} is `{_name(run, largest)}`, with {_share(tree.totals[largest], whole)}."


def main_field(run: Run) -> str:
    """The field of ``Cost`` of which the headline speaks."""
    return _subject(run)[1].field


def _subject(run: Run) -> tuple[str, _Measured]:
    """A first sentence about an idle device, or "", and the measure for the other sentences."""
    meta = run.meta
    if "device_ns" in meta.measured:
        device = meta.device_heading
        used = [time for time in run.device_use if time.span_ns]
        idle = min((time.idle_ns / time.span_ns for time in used), default=0.0)
        on_device = _Measured("device_ns", f"{device} time")
        cpu = _Measured("cpu_ns", "time on the CPU") if "cpu_ns" in meta.measured else on_device
        if "device_ns" not in run.rows.nonzero:
            return f"Nothing ran on {device}. ", cpu
        if not parts_of(run, "device_ns"):
            return f"Nothing that was recorded launched any work on {device}. ", cpu
        which = f"`{printable(used[0].device)}`" if len(used) == 1 else "Every device"
        recorded = max(of_rank.wall_ns for of_rank in run.metas)
        if idle > _MOSTLY_IDLE:
            least = "" if len(used) == 1 else "at least "
            share = _share(idle, 1) if len(used) == 1 else f"{int(100 * idle)}%"
            extent = "from its first to its last work" if all(time.streams for time in used) else "that was recorded"
            return f"{which} was idle for {least}{share} of the time {extent}. ", cpu
        if used and max(time.span_ns for time in used) < (1 - _MOSTLY_IDLE) * recorded:
            return f"{which} had all of its work within less than half of the recorded time. ", cpu
        return "", on_device
    if "cpu_ns" in meta.measured or "flops" not in meta.measured:
        return "", _Measured("cpu_ns", "time", plain=True)
    name = "counted FLOPs" if "uncounted" in run.rows.nonzero else "FLOPs"
    over = summed_over(run)
    return "", _Measured("flops", f"{name} (summed over {over})" if over else name)


class _Tree(NamedTuple):
    """The layers of a run, with their self and total in one phase."""

    layers: Layers
    own: list[int]
    totals: list[int]

    @classmethod
    def of(cls, layers: Layers, parts: Parts) -> _Tree:
        own = [0] * len(layers)
        for (layer, _), amount in parts.items():
            if layer >= 0:
                own[layer] += amount
        return cls(layers, own, layers.roll_up(own))

    def children(self, layer: int | None) -> Sequence[int]:
        """The layers directly below a layer; the models for None."""
        return self.layers.roots if layer is None else self.layers.children[layer]

    def below(self, layer: int | None) -> Iterable[int]:
        """All layers below a layer, at any depth, without the layer itself; all layers for None."""
        return range(len(self.own)) if layer is None else sorted(self.layers.at_or_below({layer}) - {layer})

    def deepest_with_most_of(self, whole: int) -> int | None:
        """The deepest layer with more than half of the whole; None if no model has more than half."""
        deepest = None
        while larger := [layer for layer in self.children(deepest) if 2 * self.totals[layer] > whole]:
            [deepest] = larger
        return deepest


def _largest_within(
    run: Run, measured: _Measured, tree: _Tree, parts: Parts, *, layer: int | None, is_named: bool
) -> list[_Clause]:
    """The largest part in a layer (None: in no model): a kind of layers below it, or its own work.

    ``is_named``: the sentence has named the layer before: "its linear layers", not "linear layers".
    """
    kinds = lists_by_key(
        (_kind(run.layers[index], bool(run.meta.model)), index) for index in tree.below(layer) if tree.own[index]
    )
    sums = {kind: sum(tree.own[index] for index in indices) for kind, indices in kinds.items()}
    largest = max(sums, key=sums.__getitem__, default=None)
    own = {part: amount for part, amount in parts.items() if (part[0] == layer if layer is not None else part[0] < 0)}
    if largest is None or (own and sum(own.values()) > sums[largest]):
        if layer is None or largest is None:
            return _largest_work(run, measured, own)
        return _own_work(run, measured, own, layer, "it" if is_named else f"`{_name(run, layer)}`")
    singular, plural = largest
    layers = kinds[largest]
    has_more_below = any(tree.totals[index] > tree.own[index] for index in layers)
    within = "directly in" if has_more_below else "in"
    if len(layers) == 1:
        the_layer = None if has_more_below else layers[0]
        return [_Clause(sums[largest], f"{within} the {singular} `{_name(run, layers[0])}`", the_layer)]
    return [_Clause(sums[largest], f"{within} {'its ' if is_named else ''}{plural}")]


def _own_work(run: Run, measured: _Measured, own: Parts, layer: int, name: str) -> list[_Clause]:
    """The work of a layer itself, where layers below it have work, too."""
    whole = sum(own.values())
    if 2 * sum(amount for (_, work), amount in own.items() if work.may_be_below) > whole:
        return [_Clause(whole, f"in compiled kernels of {name} or of layers below", layer)]
    largest, *line = _largest_work(run, measured, own)
    return [_Clause(whole, f"directly in {name}, not in layers below, above all {largest.where}", layer), *line]


def _largest_work(run: Run, measured: _Measured, parts: Parts) -> list[_Clause]:
    """The largest of operators, labels, kernels, and time between operators; then the source line that takes most of it
    between operators, if there was a sampling thread."""
    by_phrase: defaultdict[str, Parts] = defaultdict(dict)
    for part, amount in parts.items():
        by_phrase[_in_work(measured, part[1])][part] = amount
    amounts = {phrase: sum(same.values()) for phrase, same in by_phrase.items()}
    largest = max(amounts, key=amounts.__getitem__)
    clauses = [_Clause(amounts[largest], largest)]
    lines = source_lines(run) if measured.field == "cpu_ns" else {}
    sampled = {
        work.at(layer): amount
        for (layer, work), amount in by_phrase[largest].items()
        if work.has_lines and work.at(layer) in lines
    }
    line = most_sampled(sum((lines[where] for where in sampled), Counter[SourceLine]()))
    if line is not None:
        text, share = line
        clauses.append(_Clause(min(round(sum(sampled.values()) * share), amounts[largest]), f"at `{shortened(text)}`"))
    return clauses


def _in_work(measured: _Measured, kind: KindOfWork) -> str:
    """The phrase for a kind of work: "in `aten::mm`"."""
    _, label, work = kind
    if label == LAUNCH_NOT_RECORDED:
        return f"in the kernel `{shortened(work)}`"
    if label:
        known = torchs_range(label)
        return f"in {known}" if known else f"in the label `{shortened(label)}`"
    if work == BETWEEN_OPS:
        return "where no operator ran" if measured.field == "cpu_ns" else "in work that no operator launched"
    return _PHRASES.get(work) or f"in `{shortened(work)}`"


def _kind(layer: Layer, is_of_model: bool) -> tuple[str, str]:
    """The singular and the plural name of a layer's kind: its class, for convolutions with the size of the kernel.

    A layer of unknown class is a kind of its own.
    """
    if not layer.kind:  # in a trace: a module of unknown class, or a range of record_function
        return "layer" if is_of_model else "range", printable(layer.name)
    if (convolution := _CONVOLUTION.fullmatch(layer.kind)) is None:
        singular = _NAMES_OF_KINDS.get(layer.kind, f"`{printable(layer.kind)}` layer")
    else:
        sizes = _KERNEL_SIZE.search(layer.settings)
        size = f"{convolution[2]}D" if sizes is None else sizes[1].replace(", ", "×")
        size = f"width-{size}" if size.isdecimal() else size
        singular = f"{size} {'transposed ' if convolution[1] else ''}convolution"
    return singular, f"{singular}s"


def _name(run: Run, index: int) -> str:
    """The path of a layer, without the name of the model if the run has only one model, unless only a number is left:
    "Sequential.6", not "6"."""
    path = run.layers[index].path
    below = ".".join(path[1:])
    return printable(below if len(run.roots) == 1 and below and not below.isdecimal() else ".".join(path))


def _sentence(run: Run, measured: _Measured, subject: str, whole: int, clauses: Sequence[_Clause]) -> str:
    """Each part is inside the one before, and has its share of the whole: "62% of the forward is in …, 44% in …".
    ``subject``: the name of the whole."""
    verb = "are" if measured.field == "flops" else "is"
    texts = [f"{_share(clauses[0].amount, whole)} of {subject} {verb} {clauses[0].where}"]
    for (before, *_), clause in pairwise(clauses):
        share = _share(clause.amount, whole)
        if clause.amount >= _NEARLY_ALL_OF_PART * before:
            share = "all of it" if clause.amount == before else "nearly all of it"
        texts.append(f"{share} {clause.where}")
    if len(texts) > 2:
        texts[-1] = f"and {texts[-1]}"
    ranks = f"over {'all ' if run.choice is None else ''}{count_of_ranks(run)} ranks, " if len(run.metas) > 1 else ""
    text = f"{ranks}{', '.join(texts)}."
    return text[0].upper() + text[1:] + _about_waiting(run, measured, clauses[-1].amount)


def _about_waiting(run: Run, measured: _Measured, amount: int) -> str:
    """A sentence if the last part waited for most of its time: all threads of the process together ran for less than
    half as long, and so they did with the time in which the main thread had no processor, as far as it is known."""
    meta = run.meta
    if len(run.metas) > 1 or measured.field != "cpu_ns" or meta.process_cpu_ns is None:
        return ""
    if 2 * (meta.process_cpu_ns + (meta.run_delay_ns or 0)) > amount:
        return ""
    share = _share(meta.process_cpu_ns, max(meta.wall_ns, amount))
    return f" Most of that is waiting: the process ran on a processor for {share} of the time."


def _share(part: float, whole: float) -> str:
    """In whole percent: "less than 1%" in place of 0 %, "more than 99%" in place of 100 %, "all" for the whole."""
    if part == whole:
        return "all"
    text = f"{part / whole:.0%}"
    return {"0%": "less than 1%", "100%": "more than 99%"}.get(text, text)
