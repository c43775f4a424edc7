"""What the compiled regions of a run took, where: their own overhead, their kernels, and what ran beside these."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from torchprof.attribute import PHASES, Frame
from torchprof.compiled import COMPILING, GRAPH, GUARDS, NOT_ATTRIBUTABLE, is_overhead
from torchprof.cost import FIELDS, Cost
from torchprof.run import CompiledRegion, Run

RESUMED = "torch_dynamo_resume_in_"
"""How torch.compile calls the rest of a function after a graph break; the function's name and the line follow."""


@dataclass
class PhaseOfRegion:
    """What a region took in one phase. ``overhead``: all that leads to its graph, ``guards`` among it; ``graph``: the
    calls of that, its kernels among it, whatever layer they belong to; ``beside``: what ran in the region as it would
    without torch.compile."""

    overhead: Cost = field(default_factory=Cost)
    guards: Cost = field(default_factory=Cost)
    graph: Cost = field(default_factory=Cost)
    beside: Cost = field(default_factory=Cost)


@dataclass
class RegionUse:
    """A region in the layer (by its index, negative for none) that it was compiled for, over all ranks.

    ``calls`` are those in forward and recompute. ``known`` is what the first rank that has it says of it, None where
    none does.
    """

    layer: int
    name: str
    known: CompiledRegion | None = None
    calls: int = 0
    phases: dict[str, PhaseOfRegion] = field(default_factory=dict)


@dataclass
class Shares:
    """The kernels of compiled graphs in one phase: what of them is of one layer, of several, and of unknown ones."""

    of_one: Cost = field(default_factory=Cost)
    of_several: Cost = field(default_factory=Cost)
    unknown: Cost = field(default_factory=Cost)

    @property
    def whole(self) -> Cost:
        return self.of_one + self.of_several + self.unknown


def region_uses(run: Run) -> list[RegionUse]:
    """Every region that ran, in the order of first use; of nested ones each has what is not in those inside it."""
    known: dict[str, CompiledRegion] = {}
    for meta in run.metas:
        for region in meta.regions:
            known.setdefault(region.name, region)
    uses: dict[tuple[int, str], RegionUse] = {}
    for at, steps, cost in _rows_in_regions(run):
        numbers = [number for number, (_, frame) in enumerate(steps) if frame.kind == "region"]
        layer, frame = steps[numbers[-1]]
        if frame.name == COMPILING:
            continue
        use = uses.setdefault((layer, frame.name), RegionUse(layer, frame.name, known.get(frame.name)))
        phase = PHASES[run.rows.columns["phase"][at]]
        part = use.phases.setdefault(phase, PhaseOfRegion())
        inside = [frame for _, frame in steps[numbers[-1] + 1 :]]
        if not inside and run.rows.columns["layer"][at] == layer:
            use.calls += run.rows.columns["calls"][at]
        if any(one.name == GRAPH for one in inside):
            part.graph += cost
        elif all(is_overhead(one.name) for one in inside) and run.rows.columns["layer"][at] == layer:
            part.overhead += cost
            if inside and inside[-1].name == GUARDS:
                part.guards += cost
        else:
            part.beside += cost
    return [*uses.values()]


def kernel_shares(run: Run) -> dict[str, Shares]:
    """By phase, how the kernels of compiled graphs divide; nothing where layers were not asked for."""
    shares: dict[str, Shares] = {}
    columns = run.rows.columns
    for at, steps, cost in _rows_in_regions(run):
        inside = [frame for _, frame in steps]
        if not _is_kernel(inside):
            continue
        part = shares.setdefault(PHASES[columns["phase"][at]], Shares())
        if any(frame.kind == "kernels" and frame.name == NOT_ATTRIBUTABLE for frame in inside):
            part.unknown += cost
        elif run.rows.shared[columns["shared"][at]]:
            part.of_several += cost
        else:
            part.of_one += cost
    return shares


def compiling(run: Run) -> tuple[int, Cost]:
    """How often torch.compile was at work while this was recorded, and what that took."""
    calls, whole = 0, Cost()
    for at, steps, cost in _rows_in_regions(run):
        if steps[-1][1] == Frame("region", COMPILING):
            calls += run.rows.columns["calls"][at]
            whole += cost
    return calls, whole


def _rows_in_regions(run: Run) -> Iterator[tuple[int, list[tuple[int, Frame]], Cost]]:
    """Each row inside any region: its index, the frames on the way to it, each with its layer, and its cost."""
    columns = run.rows.columns
    bare = [tuple(frame._replace(signature=None) for frame in chain) for chain in run.rows.frames]
    is_region = [_has_region(chain) for chain in bare]
    is_within = [any(_has_region(around.frames) for around in within) for within in run.rows.within]
    for at, (layer, within, chain) in enumerate(zip(columns["layer"], columns["within"], columns["frames"])):
        if is_region[chain] or is_within[within]:
            steps = [(around.layer, frame) for around in run.rows.within[within] for frame in around.frames]
            steps += [(layer, frame) for frame in bare[chain]]
            yield at, steps, Cost(*(columns[name][at] for name in FIELDS))


def _has_region(frames: Sequence[Frame]) -> bool:
    return any(frame.kind == "region" for frame in frames)


def _is_kernel(inside: Sequence[Frame]) -> bool:
    """Whether what is inside these frames is inside a call of a compiled graph."""
    names = [frame.name for frame in inside]
    return GRAPH in names[:-1] or (bool(names) and inside[-1].kind == "kernel" and GRAPH in names)
