"""The costs of the compiled regions of a run: their overhead, their generated kernels, and other operators in them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import NamedTuple

from torchprof.run.groups import sets_by_key
from torchprof.run.measures import Cost
from torchprof.run.meta import CompiledRegion
from torchprof.run.rows import Rows
from torchprof.run.run import Run
from torchprof.run.words import (
    BETWEEN,
    COMPILING,
    GRAPH,
    GUARDS,
    NOT_ATTRIBUTABLE,
    OTHER_MODULE,
    PHASES,
    Frame,
    FrameKind,
    is_overhead,
)


class RowInRegion(NamedTuple):
    """The sum of the rows of a run that have the same place in compiled regions. ``is_shared``: it is the work of
    several layers. ``frames``: the frames around the work, outermost first, each with its layer."""

    layer: int
    phase: str
    is_shared: bool
    frames: Sequence[tuple[int, Frame]]
    calls: int
    cost: Cost


@dataclass
class PhaseOfRegion:
    """The costs of a region in one phase. ``overhead``: all work before its graph is called, ``guards`` included.
    ``graph``: the calls of the graph with its kernels, whichever layer these belong to. ``beside``: what ran in the
    region uncompiled."""

    overhead: Cost = field(default_factory=Cost)
    guards: Cost = field(default_factory=Cost)
    graph: Cost = field(default_factory=Cost)
    beside: Cost = field(default_factory=Cost)


@dataclass
class RegionUse:
    """A region in the layer (by its index, negative for none) that it was compiled for, over all ranks.

    ``calls``: in forward and recompute. ``known``: the description of the region by the first rank that has one, None
    if no rank has.
    """

    layer: int
    name: str
    known: CompiledRegion | None = None
    calls: int = 0
    phases: dict[str, PhaseOfRegion] = field(default_factory=dict)

    def add(self, row: RowInRegion, inside: Sequence[Frame]) -> None:
        """Add a row of the run. ``inside``: its frames in the region; without any it is the region's own time."""
        part = self.phases.setdefault(row.phase, PhaseOfRegion())
        is_of_layer = row.layer == self.layer
        if not inside and is_of_layer:
            self.calls += row.calls
        if any(frame.name == GRAPH for frame in inside):
            part.graph += row.cost
        elif is_of_layer and all(is_overhead(frame.name) for frame in inside):
            part.overhead += row.cost
            if inside and inside[-1].name == GUARDS:
                part.guards += row.cost
        else:
            part.beside += row.cost


@dataclass
class Shares:
    """The costs of the kernels of compiled graphs in one phase: of one layer, of several layers, and of unknown layers,
    by the reason. Graphs without any information are unknown as a whole."""

    of_one: Cost = field(default_factory=Cost)
    of_several: Cost = field(default_factory=Cost)
    unknown: dict[str, Cost] = field(default_factory=dict)

    def add(self, row: RowInRegion, frames: Sequence[Frame]) -> None:
        """Add the row of a kernel, which has these frames."""
        reason = next(filter(None, map(_why_unknown, frames)), None)
        if reason is not None:
            self.unknown[reason] = self.unknown.get(reason, Cost()) + row.cost
        elif row.is_shared or any(map(_is_between, frames)):
            self.of_several += row.cost
        else:
            self.of_one += row.cost

    def times(self, run: Run) -> tuple[int, int, dict[str, int]]:
        """Of one layer, of several, and unknown by the reason: ns of the device if any ran there, else of the CPU."""
        costs = (self.of_one, self.of_several, *self.unknown.values())
        on_device = "device_ns" in run.meta.measured and any(cost.device_ns for cost in costs)
        of_one, of_several, *unknown = (cost.device_ns if on_device else cost.cpu_ns for cost in costs)
        return of_one, of_several, dict(zip(self.unknown, unknown))


@dataclass
class Compiled:
    """The use of torch.compile in a run.

    ``uses``: every region that ran, in the order of first use; a region excludes the regions nested in it. ``shares``:
    by phase, the costs of the kernels by what is known of their layers; empty if no layer is known. ``compiled``:
    how often torch.compile compiled during the recording, and ``compiling``: the cost of that.
    """

    uses: list[RegionUse] = field(default_factory=list)
    shares: dict[str, Shares] = field(default_factory=dict)
    compiled: int = 0
    compiling: Cost = field(default_factory=Cost)

    def unknown_times(self, run: Run) -> dict[str, tuple[int, float]]:
        """The time of kernels whose layers are unknown, in ns and as a share of that of all kernels, by the reason, the
        largest first."""
        times: Counter[str] = Counter()
        whole = 0
        for shares in self.shares.values():
            of_one, of_several, unknown = shares.times(run)
            times.update(unknown)
            whole += of_one + of_several + sum(unknown.values())
        return {reason: (time, time / whole) for reason, time in times.most_common() if whole}

    @property
    def breaks(self) -> dict[CompiledRegion, list[RegionUse]]:
        """The graph breaks that happened: the uses of the regions that end with each. Versions of one region are merged
        (name, function and line are blank)."""
        breaks: dict[CompiledRegion, list[RegionUse]] = {}
        for use in self.uses:
            if use.calls and use.known is not None and use.known.break_line is not None:
                breaks.setdefault(use.known._replace(name="", function="", line=0), []).append(use)
        return breaks


def compiled_in(run: Run) -> Compiled:
    """The use of torch.compile in a run, from one pass over its rows.

    Example: what rows count for in the use of region ``0/0``, by the frames inside it::

        (none)                              overhead, and its calls
        TorchDynamo Cache Lookup            overhead and guards
        CompiledFxGraph > triton_add_0      graph
        aten::nonzero                       next to the graph
        1/0 > …                             nothing: they are of region 1/0
    """
    usage = Compiled()
    known = _known_regions(run)
    knows_layers = ("compile_layers", True) in run.meta.flags
    knows_layers |= any(frame.kind == FrameKind.KERNELS for chain in run.rows.frames for frame in chain)
    uses: dict[tuple[int, str], RegionUse] = {}
    for row in _rows_in_regions(run):
        frames = [frame for _, frame in row.frames]
        if knows_layers and _is_kernel(frames):
            usage.shares.setdefault(row.phase, Shares()).add(row, frames)
        innermost = max(number for number, frame in enumerate(frames) if frame.kind == FrameKind.REGION)
        layer, region = row.frames[innermost]
        if region.name == COMPILING:
            usage.compiled += row.calls
            usage.compiling += row.cost
            continue
        use = uses.setdefault((layer, region.name), RegionUse(layer, region.name, known.get(region.name)))
        use.add(row, frames[innermost + 1 :])
    usage.uses += uses.values()
    return usage


def _known_regions(run: Run) -> dict[str, CompiledRegion]:
    """The descriptions of regions by name. A name that different processes use for different code is left out."""
    different = sets_by_key(
        (region.name, region._replace(break_reason="")) for meta in run.metas for region in meta.regions
    )
    of_first_rank = {region.name: region for meta in reversed(run.metas) for region in meta.regions}
    return {name: of_first_rank[name] for name, regions in different.items() if len(regions) == 1}


def _rows_in_regions(run: Run) -> Iterator[RowInRegion]:
    is_region = [any(frame.kind == FrameKind.REGION for frame in chain) for chain in run.rows.frames]
    is_within = [
        any(frame.kind == FrameKind.REGION for around in within for frame in around.frames)
        for within in run.rows.within
    ]
    if not any(is_region) and not any(is_within):
        return
    without_signatures = [tuple(frame._replace(signature=None) for frame in chain) for chain in run.rows.frames]
    sums = run.rows.summed(("layer", "phase", "shared", "within", "frames"), Rows.VALUES)
    for (layer, phase, shared, within, chain), (calls, *cost) in sums.items():
        if is_region[chain] or is_within[within]:
            frames = [(around.layer, frame) for around in run.rows.within[within] for frame in around.frames]
            frames += [(layer, frame) for frame in without_signatures[chain]]
            yield RowInRegion(layer, PHASES[phase], bool(run.rows.shared[shared]), frames, calls, Cost(*cost))


def _is_kernel(frames: Sequence[Frame]) -> bool:
    """Whether the innermost of these frames is work of a compiled graph."""
    return any(map(_why_unknown, frames)) or any(frame.name == GRAPH for frame in frames[:-1])


# Kernels of unknown layers


def may_be_of_layers_below(frame: Frame) -> bool:
    """Whether the layers of the kernels in a frame are unknown, and may be profiled layers."""
    return _is_between(frame) or _why_unknown(frame) not in (None, OTHER_MODULE)


def _why_unknown(frame: Frame) -> str | None:
    """Why the layers of the kernels in a frame are unknown; None if they are known."""
    if frame.kind != FrameKind.KERNELS or not frame.name.startswith(NOT_ATTRIBUTABLE):
        return None
    return frame.name.removeprefix(f"{NOT_ATTRIBUTABLE}: ")


def _is_between(frame: Frame) -> bool:
    """Whether only the layers before and after the kernels in a frame are known."""
    return frame.kind == FrameKind.KERNELS and frame.name.startswith(BETWEEN)


# The name of the function of a region

_RESUMED = "torch_dynamo_resume_in_"
"""torch.compile's prefix for the rest of a function after a graph break; the function's name and the line follow."""
WRAPPED = "wrap_inline.<locals>.inner"
"""The function that torch.compile compiles for a module of ``torch.nn`` (``torch/_dynamo/external_utils.py``)."""
OF_TORCH = "the forward of a module of torch.nn"


def python_name(region: CompiledRegion) -> str:
    """The function of a region, with its file and line: "Net.forward (net.py:12)".

    The rest of a function after a graph break has the name of the function: "Net.forward", not
    "Net.torch_dynamo_resume_in_forward_at_15".
    """
    if region.function == WRAPPED:
        return OF_TORCH
    owner, _, name = region.function.rpartition(".")
    if name.startswith(_RESUMED):
        name = name.removeprefix(_RESUMED).rpartition("_at_")[0]
    function = f"{owner}.{name}" if owner else name
    file = PurePath(region.file).name
    return f"{function} ({file}:{region.line})" if file else f"{function} (line {region.line})"
