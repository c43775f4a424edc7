"""``Run``: everything one profiled run knows, frozen, and read by every report. Knows only the standard library."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby, product
from os import PathLike
from typing import TYPE_CHECKING, Any

from torchprof.errors import TorchprofError
from torchprof.run.cost import FIELDS, Cost
from torchprof.run.layers import Layer
from torchprof.run.lockstep import Lockstep, LockstepKey, ranks_in_words
from torchprof.run.memory import Memory
from torchprof.run.meta import Meta
from torchprof.run.outputs import output
from torchprof.run.rows import NO_COST, Around, Rows, Way, tidy
from torchprof.run.samples import SampleKey, Spread
from torchprof.run.timeline import DeviceTime, Timeline
from torchprof.run.unfinished import Unfinished
from torchprof.run.warnings import Caveat
from torchprof.run.words import (
    BETWEEN_OPS,
    FORWARD,
    NOT_SELECTED,
    OUTSIDE,
    PHASES,
    RANGES,
    Frame,
    is_left_over,
    number_of_phase,
)

if TYPE_CHECKING:
    import pandas


def stretches_of(ranks: Iterable[int]) -> list[tuple[int, int, int]]:
    """The stretches of rows of one rank: the rank, the first of them, the one after the last."""
    stretches = []
    start = 0
    for rank, same in groupby(ranks):
        stop = start + sum(1 for _ in same)
        stretches.append((rank, start, stop))
        start = stop
    return stretches


def of_ranks(run: Run, ranks: Collection[int]) -> Iterator[Run]:
    """What ``Run.of_rank`` gives, of several ranks, in one pass over the run."""
    if len(run.metas) == 1:
        yield run
        return
    samples: dict[int, dict[SampleKey, Spread]] = {rank: {} for rank in ranks}
    for sample, spread in run.samples.items():
        if sample.rank in samples:
            samples[sample.rank][sample] = spread
    lockstep: dict[int, dict[LockstepKey, Lockstep]] = {rank: {} for rank in ranks}
    for key, together in run.lockstep.items():
        for at, rank in enumerate(together.ranks):
            if rank in lockstep:
                lockstep[rank][key] = _of_one_rank(together, at)
    places: dict[int, list[tuple[int, int]]] = {rank: [] for rank in ranks}
    for rank, start, stop in stretches_of(run.rows.columns["rank"]):
        if rank in places:
            places[rank].append((start, stop))
    tables = {
        "shared": run.rows.shared,
        "within": run.rows.within,
        "frames": run.rows.frames,
        "device": run.rows.devices,
    }
    for rank in ranks:
        columns = {name: array("q") for name in Rows.COLUMNS}
        for (name, column), (start, stop) in product(columns.items(), places[rank]):
            column.extend(run.rows.columns[name][start:stop])
        timeline = run.timeline
        part = Run(
            tuple(meta for meta in run.metas if meta.rank == rank),
            run.layers,
            tidy(run.layers, columns, tables),
            samples[rank],
            tuple(memory for memory in run.memory if memory.rank == rank),
            timeline if timeline is not None and timeline.rank == rank else None,
            tuple(time for time in run.device_times if time.rank == rank),
            lockstep[rank],
            tuple(one for one in run.unfinished if one.rank == rank),
        )
        its_layers = (layer for layer in run.layers if not layer.ranks or rank in layer.ranks)
        yield on_layers(part, tuple(replace(layer, ranks=()) for layer in its_layers))


def _of_one_rank(together: Lockstep, at: int) -> Lockstep:
    """What the rank with this number did: how long each time took only where that is kept of every rank."""
    if len(together.ranks) == 1:
        return together
    rank = together.ranks[at]
    alone = Lockstep((rank,), (together.counts[at],), (together.ns[at],), (together.beside_ns[at],), (), ())
    if together.values:
        values = together.values[at]
        return replace(alone, last_ns=values, last_rank=(rank,) * len(values), times=together.times)
    return replace(alone, medians=together.medians[at : at + 1])


def on_layers(run: Run, layers: tuple[Layer, ...]) -> Run:
    """The same run with its layers among others: those of ``layers`` that have their paths. What it knows of a layer
    whose path they have not is outside of all."""
    number = {layer.path: index for index, layer in enumerate(layers)}
    return renumbered(run, [number.get(layer.path, OUTSIDE) for layer in run.layers], layers)


def renumbered(run: Run, numbers: Sequence[int], layers: tuple[Layer, ...]) -> Run:
    """The same run on these layers: of each of its own, which number it has among them."""
    run = replace(run, layers=layers, rows=replace(run.rows, layers=layers))
    if all(number == index for index, number in enumerate(numbers)):
        return run
    to = [*numbers, NOT_SELECTED, OUTSIDE]  # negative numbers stay: Python counts them from the end

    def column(columns: Mapping[str, array[int]]) -> dict[str, array[int]]:
        return {**columns, "layer": array("q", map(to.__getitem__, columns["layer"]))}

    within = tuple(tuple(around._replace(layer=to[around.layer]) for around in chain) for chain in run.rows.within)
    shared = tuple(tuple(to[layer] for layer in by) for by in run.rows.shared)
    timeline = run.timeline
    if timeline is not None:
        spans = timeline.spans
        if spans is not None:
            spans = replace(spans, columns=column(spans.columns))
        timeline = replace(timeline, columns=column(timeline.columns), spans=spans)
    return replace(
        run,
        rows=replace(run.rows, columns=column(run.rows.columns), within=within, shared=shared),
        samples={key._replace(layer=to[key.layer]): spread for key, spread in run.samples.items()},
        memory=tuple(
            replace(memory, held=tuple(held._replace(layer=to[held.layer]) for held in memory.held))
            for memory in run.memory
        ),
        timeline=timeline,
        lockstep={key._replace(layer=to[key.layer]): lockstep for key, lockstep in run.lockstep.items()},
        unfinished=tuple(
            replace(
                one, layer=to[one.layer], entered=tuple(each._replace(layer=to[each.layer]) for each in one.entered)
            )
            for one in run.unfinished
        ),
    )


@dataclass
class Node:
    """A layer in the tree: ``total`` = ``self`` + the ``total`` of the children. Nothing is counted twice."""

    layer: Layer
    calls: int
    self: Cost
    total: Cost
    children: list[Node]

    def walk(self) -> Iterator[Node]:
        """This node and all below, depth first, without recursion: models are deeper than Python's limit."""
        waiting = [self]
        while waiting:
            node = waiting.pop()
            yield node
            waiting.extend(reversed(node.children))


@dataclass
class Op:
    """An operator under a layer, in one phase: what runs directly in the layer, not in its child layers.

    ``self`` is what no op inside it took, ``total`` what its outermost occurrences took, layers that it calls included.
    A kernel counts for the op that launched it. ``kind`` is op, or one of ``RANGES``: label for a range of the user's,
    region for code of torch.compile's, kernels for some of its kernels. Then ``inside`` are the ops and ranges directly
    in it. The layer's own time between ops has the name ``(between ops)``.
    """

    name: str
    kind: str = "op"
    calls: int = 0
    self: Cost = field(default_factory=Cost)
    total: Cost = field(default_factory=Cost)
    inside: list[Op] = field(default_factory=list)


@dataclass(frozen=True, repr=False)
class Run:
    """One profiled run. Made by ``Profile`` or ``torchprof.load``; every report reads it and nothing else."""

    metas: tuple[Meta, ...]
    layers: tuple[Layer, ...]
    rows: Rows
    samples: Mapping[SampleKey, Spread]
    memory: tuple[Memory, ...] = ()
    timeline: Timeline | None = None
    device_times: tuple[DeviceTime, ...] = ()
    lockstep: Mapping[LockstepKey, Lockstep] = field(default_factory=dict)
    unfinished: tuple[Unfinished, ...] = ()

    def __str__(self) -> str:
        return self.report("tree")

    def __repr__(self) -> str:
        of = ", ".join(self.meta.model) or "a trace"
        return f"<Run of {of}: {len(self.layers)} layers, {len(self.rows)} rows>"

    @property
    def meta(self) -> Meta:
        return self.metas[0]

    @cached_property
    def warnings(self) -> tuple[Caveat, ...]:
        """What to know before its figures are believed: those that were stored and those that follow from the run, of
        all ranks. Each has a ``code``, ``layers``, ``facts`` and the ``ranks`` that say it; ``str()`` is the sentence.
        Those of most ranks come first."""
        return output("all_warnings")(self)  # type: ignore[no-any-return]

    @property
    def missing_ranks(self) -> tuple[int, ...]:
        """The ranks of the job that are not in this run; none where it is not known how large the job is."""
        size = max(meta.world_size for meta in self.metas)
        return tuple(sorted({*range(size)} - {meta.rank for meta in self.metas})) if size > 1 else ()

    def of_rank(self, rank: int) -> Run:
        """The run of one rank alone: its layers, its figures, and the timeline where that is its own.

        What a layer is, is what the run of all ranks says. Of what it did in lockstep with others its own counts and
        sums stay, and of single times those of whole steps. Raises TorchprofError for a rank that is not here.
        """
        known = [meta.rank for meta in self.metas]
        if rank not in known:
            raise TorchprofError(f"This run has no rank {rank!r}. It has {ranks_in_words(known)}.")
        return next(of_ranks(self, [rank]))

    @property
    def roots(self) -> tuple[Layer, ...]:
        """The models, in the order they were given."""
        return tuple(layer for layer in self.layers if len(layer.path) == 1)

    def tree(self, phase: str | None = None, root: int = 0) -> Node:
        """The layers of one model, each with self and total costs and calls.

        ``phase``: "forward", "backward" or "recompute"; None adds them up. ``calls`` counts the calls of that phase
        (the forward calls for None; backward has no ranges of its own: 0). Raises TorchprofError for an unknown phase
        or root.
        """
        if not isinstance(root, int) or not 0 <= root < len(self.roots):
            raise TorchprofError(
                f"This run has {len(self.roots)} model(s), numbered from 0: there is no root {root!r}."
            )
        wanted = range(len(PHASES)) if phase is None else [number_of_phase(phase)]
        counted = PHASES.index(phase or FORWARD)
        nothing = (Cost(), 0)
        sums = self.rows.by_layer
        nodes: dict[tuple[str, ...], Node] = {}
        top = self.roots[root].path[0]
        for index, layer in enumerate(self.layers):
            if layer.path[0] != top:
                continue
            own = Cost()
            for number in wanted:
                own = own + sums.get((index, number), nothing)[0]
            node = Node(layer, sums.get((index, counted), nothing)[1], own, own, [])
            nodes[layer.path] = node
            if len(layer.path) > 1:
                nodes[layer.path[:-1]].children.append(node)
        for path, node in reversed(nodes.items()):
            if len(path) > 1:
                above = nodes[path[:-1]]
                above.total = above.total + node.total
        return nodes[(top,)]

    def no_layer(self, phase: str, *, selected: bool = True) -> Cost:
        """What belongs to no layer: loss, optimizer, data; with ``selected=False``, to layers not selected.

        What was launched before the recording is no part of it: ``left_over`` has that.
        """
        layer = OUTSIDE if selected else NOT_SELECTED
        return self.rows.by_layer.get((layer, number_of_phase(phase)), (Cost(), 0))[0]

    @cached_property
    def left_over(self) -> Cost:
        """The work of devices that was launched before the recording began. It is in no sum of a layer, or of
        ``no_layer``: those, all layers' self and this are Σ over the rows."""
        rows, columns = self.rows, self.rows.columns
        wanted = [*map(is_left_over, rows.frames)]
        taken = [at for at, chain in enumerate(columns["frames"]) if wanted[chain]] if any(wanted) else ()
        return Cost(*(sum(columns[name][at] for at in taken) for name in FIELDS))

    def ops(self, phase: str = FORWARD) -> dict[int, list[Op]]:
        """The operators and labels of one phase under each layer (by index in ``layers``), in the order of first call.

        Σ self over the ops of a layer, those inside its labels included, is the layer's self: ``(between ops)`` is one
        of them where it has any. The total of a label is all that ran in it in this phase, whatever layer that counts
        for, and whatever phase the label is of itself.
        """
        wanted = number_of_phase(phase)
        rows, columns = self.rows, self.rows.columns
        made: list[Op] = []
        calls: list[int] = []
        found: dict[int, dict[tuple[str, str], int]] = {}  # the numbers of ops in ``made``, by layer, kind and name
        levels: dict[int, dict[tuple[str, str], int]] = {}  # of those inside a label, by the number of that

        def steps(layer: int, names: Sequence[tuple[str, str]]) -> list[int]:
            """The ops on the way in, made where they are new."""
            level = found.setdefault(layer, {})
            siblings: list[Op] | None = None
            numbers = []
            for name in names:
                number = level.get(name)
                if number is None:
                    number = level[name] = len(made)
                    made.append(Op(name[1], name[0], 0, NO_COST, NO_COST))
                    calls.append(0)
                    if siblings is not None:
                        siblings.append(made[number])
                numbers.append(number)
                if name[0] in RANGES:
                    level, siblings = levels.setdefault(number, {}), made[number].inside
            return numbers

        def around_it(here: bool, within: Sequence[Around]) -> Iterator[int]:
            """What of other layers a row's layer is inside of, and counts for; a label holds work of every phase."""
            for around in within:
                names = _names(around.frames)
                if around.phase != phase:
                    names = [name for name in names if here and name[0] == "label"]
                for number in steps(around.layer, names):
                    if here or made[number].kind not in RANGES:
                        yield number

        ways: dict[tuple[int, int, int, int], Way] = {}
        taken: list[tuple[int, Way]] = []
        names = [_names(frames) or [("op", BETWEEN_OPS)] for frames in rows.frames]
        is_call = [bool(frames) and frames[-1].kind != "kernel" for frames in rows.frames]
        is_work = [not frames or frames[-1].kind != "python" for frames in rows.frames]
        is_inside = [bool(within) for within in rows.within]
        keys = zip(columns["layer"], columns["phase"], columns["within"], columns["frames"])
        for at, key in enumerate(keys):
            layer, of_phase, within, chain = key
            here = of_phase == wanted
            if not (here or is_inside[within]) or not is_work[chain]:
                continue
            way = ways.get(key)
            if way is None:
                outer = [*around_it(here, rows.within[within])] if is_inside[within] else []
                inner = steps(layer, names[chain]) if here else []
                way = ways[key] = tuple(dict.fromkeys(outer + inner)), inner[-1] if here else -1
            taken.append((at, way))
            if here and is_call[chain]:
                calls[way[1]] += columns["calls"][at]
        for op, called, own, total in zip(made, calls, *rows.summed(taken, len(made))):
            op.calls, op.self, op.total = called, own, total
        return {layer: [made[number] for number in level.values()] for layer, level in found.items()}

    def total_params(self) -> dict[tuple[str, ...], int | None]:
        """The parameters of each layer and all below it, by path; None where a lazy layer has not made them yet."""
        totals: dict[tuple[str, ...], int | None] = {layer.path: layer.params for layer in self.layers}
        for path in reversed(totals):  # those below come after those above
            if len(path) > 1:
                above, own = totals[path[:-1]], totals[path]
                totals[path[:-1]] = None if above is None or own is None else above + own
        return totals

    def phases(self) -> tuple[str, ...]:
        """The phases in which any work was recorded, and always forward."""
        seen = set(self.rows.columns["phase"])
        return tuple(phase for number, phase in enumerate(PHASES) if phase == FORWARD or number in seen)

    def report(self, name: str, **options: Any) -> str:
        """A report as text: ``run.report("tree", depth=2)``. Raises TorchprofError for an unknown name or option."""
        text: str = output("render")(name, self, options)
        return text

    def _repr_html_(self) -> str:
        """What a notebook shows of a run."""
        return self.report("notebook")

    def show(self, *, height: int = 640) -> None:
        """Show the page that ``export("report.html")`` writes, in a notebook, in a frame so many pixels high.

        Needs IPython, which every notebook has. Raises TorchprofError where there is none, and outside of notebooks.
        """
        output("show_page")(self.report("html"), height)

    def export(self, path: str | PathLike[str], **options: Any) -> None:
        """Write a report into a file, chosen by how its name ends: ``run.export("report.html")``. See docs/exports.md.

        ``options`` are the report's; a name that ends in ``.gz`` besides is gzipped. Raises TorchprofError for a name
        that ends otherwise and for an unknown option, OSError as ``open`` does.
        """
        output("export")(path, self, options)

    def to_dataframe(self, of: str = "layers") -> pandas.DataFrame:
        """The run as a pandas ``DataFrame``, a record for each of its "layers", its "operators" or its "rows".

        The columns are those of docs/exports.md; what is not known is ``pandas.NA``. Raises TorchprofError for other
        records, and where pandas is not installed.
        """
        return output("dataframe")(self, of)

    def save(self, path: str | PathLike[str], *, strip: bool = False) -> None:
        """Write the run as JSON (see docs/run-file.md), gzipped where the name ends in ``.gz``.

        The file holds names of layers, ops and the machine, shapes and figures; no tensor data and no source.
        ``strip=True`` leaves the names of files and machines out. Raises OSError as ``open`` does.
        """
        from torchprof.run.file_write import write

        write(self, path, strip=strip)


def _names(frames: Sequence[Frame]) -> list[tuple[str, str]]:
    """Kind and name of each op and label; a kernel counts for what launched it."""
    return [(frame.kind, frame.name) for frame in frames if frame.kind != "kernel"]
