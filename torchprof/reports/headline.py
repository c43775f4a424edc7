"""The headline: where the time goes, in a sentence or two of plain words."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from torchprof.reports import report
from torchprof.reports.notes import summed_over
from torchprof.reports.ranking import shortened
from torchprof.reports.text import printable
from torchprof.reports.top import Part, parts_of, source_lines
from torchprof.run.layers import Layer
from torchprof.run.run import Run
from torchprof.run.words import (
    BACKWARD,
    BETWEEN_OPS,
    FORWARD,
    LAUNCH_NOT_RECORDED,
    NOT_SELECTED,
    OUTSIDE,
    PHASES,
    RECOMPUTE,
)

_NEARLY_ALL = 0.95  # of everything: the rest is worth no word
_MOSTLY_IDLE = 0.5  # a device that rests for more than this part of the time waits for the CPU

_PHASES = {FORWARD: "the forward", BACKWARD: "the backward", RECOMPUTE: "the recomputation"}
_OF_RANGES = {
    FORWARD: "the ranges",
    BACKWARD: "the backward of the ranges",
    RECOMPUTE: "the recomputation in the ranges",
}
"""Where a trace tells of no model: a range may as well be around what is no forward."""
_NO_LAYER = {OUTSIDE: "outside of all layers", NOT_SELECTED: "in layers that were not selected"}
_PLAIN = {
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
    """What the headline speaks of: a field of ``Cost``, and its name. ``plain``: it goes without saying."""

    field: str
    name: str
    plain: bool = False


class _Within(NamedTuple):
    """A part of the work: how much it is, and where, in words. ``layer``: the one layer that it is."""

    amount: int
    where: str
    layer: int | None = None


@report("headline")
def headline(run: Run) -> str:
    """Where the time goes: "62% of the forward is in `layer3`, 71% of that in its 3×3 convolutions."

    It speaks of the largest of four: forward, backward, recomputation, and the work outside of all layers; and says
    which share of everything that is, where it is less than 95 %. From there it goes down as long as there is a layer
    that holds more than half of it, and names the kind of layers there that took most by themselves ("directly in",
    where layers below them took time as well); or the operator, where there are no layers below. Where no layer holds
    so much, a second sentence names the largest.

    It speaks of the device's time where that was measured; but a device that was idle for more than half of the time
    waits for the CPU: then it says so, and speaks of the CPU's. In a run that only counted, FLOPs take the place of
    time. What is 100 % is the same as in ``top``, sums are over all ranks.
    """
    before, measured = _subject(run)
    parts = parts_of(run, measured.field)
    buckets: Counter[int] = Counter()  # phases of layers by their numbers, work of no layer by OUTSIDE, NOT_SELECTED
    for part, amount in parts.items():
        buckets[_bucket(part)] += amount
    if not buckets or not any(run.rows.columns[measured.field]):
        return f"{before}No {'FLOPs were counted' if measured.field == 'flops' else f'{measured.name} was recorded'}."
    [(largest, whole)] = buckets.most_common(1)
    here = {part: amount for part, amount in parts.items() if _bucket(part) == largest}
    everything = sum(buckets.values())
    if largest < 0:
        steps = [_Within(whole, _NO_LAYER[largest]), _largest_work(run, measured, here)]
        return before + _sentence(run, measured, f"the {measured.name}", everything, steps)
    phases = _PHASES if run.meta.model else _OF_RANGES
    phase = phases[PHASES[largest]] + (" of the selected layers" if run.meta.paths is not None else "")
    steps = []
    if whole < _NEARLY_ALL * everything:
        of, total = f"the {measured.name}", everything
        steps.append(_Within(whole, f"in {phase}"))
    else:
        of, total = phase if measured.plain else f"the {measured.name} of {phase}", whole
    tree = _Tree.of(run.layers, here)
    at = tree.down_from_the_top(whole)
    named = at is not None and (len(run.layers[at].path) > 1 or len(run.roots) > 1)
    if at is not None and named:
        steps.append(_Within(tree.totals[at], f"in `{_name(run, at)}`", at))
    steps.append(_largest_within(run, measured, tree, here, at, "its " if named else ""))
    sentence = before + _sentence(run, measured, of, total, steps)
    parts_of_model = [] if named else [one for one in tree.children[at] if tree.totals[one]]
    if before or len(parts_of_model) < 2:
        return sentence
    first = max(parts_of_model, key=tree.totals.__getitem__)
    if steps[-1].layer == first:
        return sentence
    which = f"layer of {_PHASES[PHASES[largest]]}" if at is not None else "model" if run.meta.model else "range"
    return f"{sentence} The largest {which} is `{_name(run, first)}`, with {_share(tree.totals[first], whole)}."


def _subject(run: Run) -> tuple[str, _Measured]:
    """What to say before anything else, and what the rest is about."""
    meta = run.meta
    if "device_ns" in meta.measured:
        device = (meta.device or "device").upper()
        busy = [
            (name, ns / one.wall_ns) for one in run.metas for name, ns in one.busy_ns if name != "cpu" and one.wall_ns
        ]
        idle = 1 - max((share for _, share in busy), default=1.0)
        on_device = _Measured("device_ns", f"{device} time")
        cpu = _Measured("cpu_ns", "CPU time") if "cpu_ns" in meta.measured else on_device
        if not any(run.rows.columns["device_ns"]):
            return f"Nothing ran on {device}. ", cpu
        if not parts_of(run, "device_ns"):
            return f"Nothing that was recorded launched any work on {device}. ", cpu
        if idle > _MOSTLY_IDLE:
            if len(busy) == 1:
                return f"`{printable(busy[0][0])}` was idle for {_share(idle, 1)} of the time. ", cpu
            return f"Every device was idle for at least {int(100 * idle)}% of the time. ", cpu
        return "", on_device
    if "cpu_ns" in meta.measured or "flops" not in meta.measured:
        return "", _Measured("cpu_ns", "CPU time", plain=True)
    name = "counted FLOPs" if any(run.rows.columns["uncounted"]) else "FLOPs"
    over = summed_over(run)
    return "", _Measured("flops", f"{name} (summed over {over})" if over else name)


def _bucket(part: Part) -> int:
    return part.where.phase if part.where.layer >= 0 else part.where.layer


class _Tree(NamedTuple):
    """What the layers took in one phase: by themselves, and with all below them. ``children[None]`` are the models."""

    own: list[int]
    totals: list[int]
    children: dict[int | None, list[int]]

    @classmethod
    def of(cls, layers: Sequence[Layer], parts: Mapping[Part, int]) -> _Tree:
        own = [0] * len(layers)
        for part, amount in parts.items():
            own[part.where.layer] += amount
        totals = list(own)
        number = {layer.path: index for index, layer in enumerate(layers)}
        children: dict[int | None, list[int]] = {None: [], **{index: [] for index in range(len(layers))}}
        above = [number.get(layer.path[:-1]) for layer in layers]
        for index, one in enumerate(above):
            children[one].append(index)
        for index, one in reversed([*enumerate(above)]):  # those below come after those above
            if one is not None:
                totals[one] += totals[index]
        return cls(own, totals, children)

    def down_from_the_top(self, whole: int) -> int | None:
        """The deepest layer that holds more than half of the whole; None where not even a model does."""
        at = None
        while True:
            found = [one for one in self.children[at] if 2 * self.totals[one] > whole]
            if not found:
                return at
            [at] = found

    def below(self, at: int | None) -> Iterator[int]:
        """All layers below one, without itself."""
        waiting = [*self.children[at]]
        while waiting:
            index = waiting.pop()
            yield index
            waiting.extend(self.children[index])


def _largest_within(
    run: Run, measured: _Measured, tree: _Tree, parts: Mapping[Part, int], at: int | None, its: str
) -> _Within:
    """What took most there: one kind of layers below, or the work that the layer does itself."""
    kinds: dict[tuple[str, str], list[int]] = {}
    for index in sorted(tree.below(at)):
        if tree.own[index]:
            kinds.setdefault(_kind(run.layers[index], bool(run.meta.model)), []).append(index)
    sums = {kind: sum(tree.own[index] for index in found) for kind, found in kinds.items()}
    largest = max(sums, key=sums.__getitem__, default=None)
    if at is not None and (largest is None or tree.own[at] > sums[largest]):
        work = _largest_work(run, measured, {part: parts[part] for part in parts if part.where.layer == at})
        if largest is None:
            return work
        itself = "directly in it" if its else f"directly in `{_name(run, at)}`"
        return _Within(tree.own[at], f"{itself}, not in layers below, above all {work.where}", at)
    assert largest is not None  # there is work, and it is of layers
    one, several = largest
    found = kinds[largest]
    holds_more = any(tree.totals[index] > tree.own[index] for index in found)
    within = "directly in" if holds_more else "in"
    if len(found) == 1:
        the_layer = None if holds_more else found[0]
        return _Within(sums[largest], f"{within} the {one} `{_name(run, found[0])}`", the_layer)
    return _Within(sums[largest], f"{within} {its}{several}")


def _largest_work(run: Run, measured: _Measured, parts: Mapping[Part, int]) -> _Within:
    """The operator, or the label, that took most, or the time between operators, with the source line that a sampling
    thread saw most often then, where there was one."""
    between = "where no operator ran" if measured.field == "cpu_ns" else "in work that no operator launched"
    works: Counter[str] = Counter()
    for part, amount in parts.items():
        if part.where.label == LAUNCH_NOT_RECORDED:
            works[f"in the kernel `{shortened(part.work)}`"] += amount
        elif part.where.label:
            works[f"in the label `{shortened(part.where.label)}`"] += amount
        elif part.work == BETWEEN_OPS:
            works[between] += amount
        else:
            works[f"in `{shortened(part.work)}`"] += amount
    [(where, amount)] = works.most_common(1)
    if where == between and measured.field == "cpu_ns":
        seen: Counter[str] = Counter()
        lines = source_lines(run)
        for place in {part.where for part in parts if part.work == BETWEEN_OPS and not part.where.label}:
            seen.update(lines.get(place, {}))
        for line, _ in seen.most_common(1):
            where += f", most often at `{shortened(line)}`"
    return _Within(amount, where)


def _kind(layer: Layer, is_of_model: bool) -> tuple[str, str]:
    """What one and several layers of this kind are called; convolutions are told apart by the size of their kernel.

    Where the class is not known, nobody knows which layers are alike: each is of a kind of its own.
    """
    if not layer.kind:  # of a trace: a module whose class it does not tell, or a range of record_function
        return "layer" if is_of_model else "range", printable(layer.name)
    convolution = _CONVOLUTION.fullmatch(layer.kind)
    if convolution is None:
        one = _PLAIN.get(layer.kind, f"`{printable(layer.kind)}` layer")
    else:
        sizes = _KERNEL_SIZE.search(layer.settings)
        size = f"{convolution[2]}D" if sizes is None else sizes[1].replace(", ", "×")
        size = f"width-{size}" if size.isdecimal() else size
        one = f"{size} {'transposed ' if convolution[1] else ''}convolution"
    return one, f"{one}s"


def _name(run: Run, index: int) -> str:
    """The path of a layer, without the model's own name where there is but one."""
    path = run.layers[index].path
    return printable(".".join(path[1:] if len(run.roots) == 1 and len(path) > 1 else path))


def _sentence(run: Run, measured: _Measured, of: str, whole: int, steps: Sequence[_Within]) -> str:
    """Each step as a share of the step before: "62% of the forward is in …, 71% of that in …"."""
    clauses = []
    for number, step in enumerate(steps):
        if number == 0:
            verb = "are" if measured.field == "flops" else "is"
            clauses.append(f"{_share(step.amount, whole)} of {of} {verb} {step.where}")
        else:
            clauses.append(f"{_share(step.amount, whole)} of that {step.where}")
        whole = step.amount
    if len(clauses) > 2:
        clauses[-1] = f"and {clauses[-1]}"
    ranks = f"over all {len(run.metas)} ranks, " if len(run.metas) > 1 else ""
    text = f"{ranks}{', '.join(clauses)}."
    return text[0].upper() + text[1:]


def _share(part: float, whole: float) -> str:
    """Rounded to whole percents; what is not nothing is not called 0 %, and what is not all is not called 100 %."""
    if part == whole:
        return "all"
    text = f"{part / whole:.0%}"
    return {"0%": "less than 1%", "100%": "more than 99%"}.get(text, text)
