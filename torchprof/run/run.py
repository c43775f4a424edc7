"""``Run``: everything known about one profiled run. It is frozen; every report reads it. Then its ``RUN_PARTS``, and
the ``ReportText`` that its reports are. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib import import_module
from itertools import starmap
from os import PathLike
from typing import TYPE_CHECKING, Any

from torchprof.errors import TorchprofError, printable
from torchprof.run.collectives import Unfinished, UnfinishedPart
from torchprof.run.formats import NumberRanges, ranks_in_words
from torchprof.run.groups import sums_by_key
from torchprof.run.layers import Layer, Layers
from torchprof.run.lockstep import Lockstep, LockstepKey, LockstepPart
from torchprof.run.measures import (
    FIELDS,
    NO_COST,
    Cost,
    SampleKey,
    SamplesPart,
    Spread,
    Trial,
    TrialsPart,
    sum_of_costs,
)
from torchprof.run.meta import Meta, RunWarning, sum_if_known
from torchprof.run.operators import Op, operators_of_layers
from torchprof.run.part import PerRank, RunPart, Scale
from torchprof.run.passes import Passes, PassesPart
from torchprof.run.processes import paused_gc
from torchprof.run.rows import Rows, rows_of_lines
from torchprof.run.sentences import RANKS_CHOSEN
from torchprof.run.timeline import DeviceTime, Memory, Pipeline, Timeline, TimelinePart
from torchprof.run.words import FORWARD, NOT_SELECTED, OUTSIDE, PHASES, is_left_over, number_of_phase

if TYPE_CHECKING:
    import pandas


@dataclass
class Node:
    """A layer in the tree of ``Run.tree``: ``total`` = ``self`` + the ``total`` of all ``children``. ``layer`` says
    what it is, ``calls`` how often its forward was called. ``self`` is the cost of its own work, ``total`` includes the
    layers below it. Nothing is counted twice."""

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


@dataclass(frozen=True, repr=False)
class Run:
    """One profiled run. Made by ``Profile`` or ``torchprof.load``; every report reads it and nothing else.

    - ``metas``: how each rank was recorded; ``meta`` is the first. ``layers``: all layers, parents before children.
    - ``rows``: the costs, as the finest table; every other table is a sum over its rows.
    - ``samples``: measures that do not add up, such as the time of each call, as distributions.
    - ``memory``: the peak of each device. ``timeline``: allocations and spans, with ``with_timeline=True``.
    - ``device_times``: how each device used its time. ``lockstep``: what ranks did at the same time.
    - ``unfinished``: where a rank was, if its recording ended in the middle of a step.
    - ``pipelines``: what each rank did for its stages of a pipeline, by device.
    - ``passes``: of a loop of which some passes were recorded: how often each kind ran, and how long. All figures are
      then those of all passes, as estimated from the recorded ones; empty if everything was recorded.
    - ``trials``: remedies of findings that were carried out, with what they gained; see ``Profile.verify``.
    """

    metas: tuple[Meta, ...]
    layers: Layers
    rows: Rows
    samples: Mapping[SampleKey, Spread]
    memory: tuple[Memory, ...] = ()
    timeline: Timeline | None = None
    device_times: tuple[DeviceTime, ...] = ()
    lockstep: Mapping[LockstepKey, Lockstep] = field(default_factory=dict)
    unfinished: tuple[Unfinished, ...] = ()
    pipelines: tuple[Pipeline, ...] = ()
    passes: tuple[Passes, ...] = ()
    trials: tuple[Trial, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", Layers.of(self.layers))  # from any iterable of layers

    def __str__(self) -> str:
        return output("printed")(self)  # type: ignore[no-any-return]

    def __repr__(self) -> str:
        counts = [(len(self.layers), "layer"), (len(self.rows), "row")]
        shown = ", ".join(f"{count} {noun}{'' if count == 1 else 's'}" for count, noun in counts)
        return printable(f"<Run of {', '.join(self.meta.model) or 'a trace'}: {shown}>")

    @property
    def meta(self) -> Meta:
        return self.metas[0]

    @cached_property
    def warnings(self) -> tuple[RunWarning, ...]:
        """All warnings of all ranks, stored or following from the run; those of most ranks come first. Each has a
        ``code``, ``layers``, ``facts`` and the ``ranks`` that it is of; ``str()`` is the sentence."""
        return output("all_warnings")(self)  # type: ignore[no-any-return]

    @cached_property
    def device_use(self) -> tuple[DeviceTime, ...]:
        """``device_times``; of a device without, as in old files, how long it was busy of the recorded time. None of a
        rank whose device times are unknown."""
        known = {(time.device, time.rank) for time in self.device_times}
        others = (
            DeviceTime(device, meta.rank, max(meta.wall_ns, busy), busy, busy, 0, 0, 0, ())
            for meta in self.metas
            for device, busy in meta.busy_devices.items()
            if (device, meta.rank) not in known
        )
        measured = {meta.rank for meta in self.metas if "device_ns" in meta.measured}
        return tuple(time for time in (*self.device_times, *others) if time.rank in measured)

    @property
    def choice(self) -> RunWarning | None:
        """The warning "ranks_chosen", if this run has some ranks of a job that were chosen from a comparison of all:
        its facts have the stragglers of the job. None for other runs."""
        return next((warning for warning in self.meta.warnings if warning.code == RANKS_CHOSEN), None)

    @property
    def missing_ranks(self) -> Sequence[int]:
        """The ranks of the job that are not in this run; empty if the size of the job is unknown."""
        size = max(meta.world_size for meta in self.metas)
        return NumberRanges.below(size, (meta.rank for meta in self.metas)) if size > 1 else ()

    def of_rank(self, rank: int) -> Run:
        """The run of one rank: its layers as they are in this run, its figures, and the timeline if it is of this rank.
        In ``lockstep`` the rank keeps its counts and sums; of single times, only those of whole steps. Raises
        TorchprofError for a rank that is not in this run."""
        known = [meta.rank for meta in self.metas]
        if rank not in known:
            raise TorchprofError(f"This run has no rank {rank!r}. It has {ranks_in_words(known)}.")
        return next(self.of_ranks([rank]))

    def of_ranks(self, ranks: Collection[int]) -> Iterator[Run]:
        """The run of each of these ranks, like ``of_rank``, in one pass over the run; a run of one rank as it is."""
        if len(self.metas) == 1:
            yield self
            return
        parts = {name: part.of_ranks(getattr(self, name), ranks) for name, part in RUN_PARTS.items()}
        metas = {meta.rank: meta for meta in self.metas}
        ranks_of = [frozenset(layer.ranks) for layer in self.layers]  # () for layers on all ranks
        for rank, rows in zip(ranks, self.rows.of_ranks(ranks)):
            run = Run((metas[rank],), self.layers, rows, **{name: of_rank[rank] for name, of_rank in parts.items()})
            its_layers = (layer for layer, on in zip(self.layers, ranks_of) if not on or rank in on)
            yield run.on_layers(replace(layer, ranks=()) if layer.ranks else layer for layer in its_layers)

    def to_compare(self, *, layers: bool = False) -> Run:
        """What finds the slow ranks of a job, once the runs of all ranks are merged: the own work and the exchanges of
        each step, a kilobyte or two. What is not compared counts as not measured. ``layers``: also the layers, with the
        sum and the median of their own work over the steps, the collectives, the parts of a step outside of layers, and
        where the ranks were in an unfinished step."""
        known = self.layers if layers else Layers()
        return Run(
            tuple(meta.of_a_comparison() for meta in self.metas),
            known,
            rows_of_lines(known, {}),
            {
                key: replace(spread, sample=(round(spread.median),), hashes=(0,))
                for key, spread in self.samples.items()
                if key.measure == "step_ns" or (layers and key.layer == OUTSIDE and key.measure.startswith("step_"))
            },
            lockstep={
                key: lockstep if key.keeps_values or key.is_collective else lockstep.without_times()
                for key, lockstep in self.lockstep.items()
                if key.keeps_values or layers
            },
            unfinished=self.unfinished if layers else (),
            pipelines=tuple(pipeline.of_a_comparison() for pipeline in self.pipelines),
        )

    def on_layers(self, layers: Iterable[Layer]) -> Run:
        """The same run with other layers, matched by path. Work of a layer without a match becomes work of no layer."""
        layers = Layers.of(layers)
        if layers is self.layers:
            return self
        return self.renumbered([layers.index_of.get(layer.path, OUTSIDE) for layer in self.layers], layers)

    def scaled(self, scale: Scale) -> Run:
        """The run of all passes of one kind, as estimated from that of some of them."""
        parts = {name: part.scaled(getattr(self, name), scale) for name, part in RUN_PARTS.items()}
        metas = tuple(meta.scaled(scale) for meta in self.metas)
        return replace(self, metas=metas, rows=self.rows.scaled(scale), **parts)

    def renumbered(self, numbers: Sequence[int], layers: Iterable[Layer]) -> Run:
        """The same run with these layers. ``numbers``: for each old layer its index among the new ones."""
        layers = Layers.of(layers)
        if all(number == index for index, number in enumerate(numbers)):
            return replace(self, layers=layers, rows=replace(self.rows, layers=layers))
        to = [*numbers, NOT_SELECTED, OUTSIDE]  # see ``RunPart.renumbered``
        return replace(
            self,
            layers=layers,
            rows=self.rows.renumbered(to, layers),
            **{name: part.renumbered(getattr(self, name), to) for name, part in RUN_PARTS.items()},
        )

    @property
    def roots(self) -> tuple[Layer, ...]:
        """The models, in the order in which they were passed."""
        return tuple(self.layers[index] for index in self.layers.roots)

    def tree(self, phase: str | None = None, root: int = 0) -> Node:
        """The layers of one model, each with self and total costs and calls. ``phase``: "forward", "backward" or
        "recompute"; None for the sum of all. ``calls`` are those of the phase: the forward calls for None, and 0 for
        backward, which has no calls of layers. Raises TorchprofError for an unknown phase or root."""
        if not isinstance(root, int) or not 0 <= root < len(self.roots):
            models = "1 model, number 0" if len(self.roots) == 1 else f"{len(self.roots)} models, numbered from 0"
            raise TorchprofError(f"This run has {models}. It has no root {root!r}.")
        number = PHASES.index(FORWARD) if phase is None else number_of_phase(phase)
        layers, (own, total) = self.layers, self._costs(phase)
        top = layers.roots[root]
        nodes: dict[int, Node] = {}
        indices = [top]
        for index in indices:  # those below follow
            indices += layers.children[index]
            calls = self.rows.by_layer.get((index, number), (NO_COST, 0))[1]
            nodes[index] = Node(layers[index], calls, own[index], total[index], [])
            if index != top:
                nodes[layers.parent[index]].children.append(nodes[index])
        return nodes[top]

    def _costs(self, phase: str | None) -> tuple[list[Cost], list[Cost]]:
        """Self and total costs of each layer in a phase; None for the sum of all phases."""
        if phase not in self._costs_by_phase:
            wanted = PHASES if phase is None else (phase,)
            own = [NO_COST] * len(self.layers)
            for (layer, number), (cost, _) in self.rows.by_layer.items():
                if layer >= 0 and PHASES[number] in wanted:
                    own[layer] = own[layer] + cost
            self._costs_by_phase[phase] = own, self.layers.roll_up(own)
        return self._costs_by_phase[phase]

    @cached_property
    def _costs_by_phase(self) -> dict[str | None, tuple[list[Cost], list[Cost]]]:
        return {}

    def no_layer(self, phase: str, *, selected: bool = True) -> Cost:
        """The cost of work of no layer: loss, optimizer, data. With ``selected=False``: of layers that are not
        selected. "forward" gives that of rows with the phase "other", which tables show with the forward. Device work
        that was launched before the recording is not in it: see ``left_over``."""
        layer = OUTSIDE if selected else NOT_SELECTED
        return self.rows.by_layer.get((layer, number_of_phase(phase)), (Cost(), 0))[0]

    def grad_calls(self, root: int) -> int:
        """How many calls of a model ran with gradients enabled; 0 if that is unknown. Of a loop of which only some
        passes were recorded, as many as its passes tell; else as in those that were looked at."""
        layer, calls = self.layers[root], self.rows.forward_calls(root)
        passes = sums_by_key((each.gradients, each.count) for each in self.passes if each.layer == root)
        if len(passes) > 1:
            return round(calls * passes[True] / passes.total())
        looked_at = layer.noted_calls or calls or 1
        return min(round(calls * (layer.grad_calls or 0) / looked_at), calls)

    @cached_property
    def left_over(self) -> Cost:
        """The cost of device work that was launched before the recording began. It is not in any sum of a layer or of
        ``no_layer``: all layers' self + ``no_layer`` + this = Σ over all rows."""
        return sum_of_costs(starmap(Cost, self.rows.summed("device", FIELDS, frames=is_left_over).values()))

    def ops(self, phase: str | None = None) -> dict[tuple[str, ...], list[Op]]:
        """The operators and labels under each layer, by the layer's path, in the order of first call.

        ``phase`` is as for ``tree``: None for the sum of all. Work of no layer has the path ``("(outside)",)``, work of
        layers that are not selected ``("(not selected)",)``. A layer without operators in the phase has no entry.

        The layer's self is Σ self over its ops, including those inside its labels and ``(between ops)``. The total of a
        label is everything that ran in it in this phase, for any layer, even if the label was opened in another phase.
        Raises TorchprofError for an unknown phase.
        """
        return {self.layers.path_of(layer): ops for layer, ops in operators_of_layers(self.rows, phase).items()}

    def total_params(self) -> dict[tuple[str, ...], int | None]:
        """The parameters of each layer and all layers below it, by path; None if a lazy layer has not made them yet."""
        totals = self.layers.roll_up([layer.params for layer in self.layers], sum_if_known)
        return dict(zip(self.layers.index_of, totals))

    def phases(self) -> tuple[str, ...]:
        """The phases with any recorded work; forward is always one of them."""
        seen = {phase for _, phase in self.rows.by_layer}
        return tuple(phase for number, phase in enumerate(PHASES) if phase == FORWARD or number in seen)

    def report(self, name: str | None = None, **options: Any) -> ReportText:
        """A report as text: ``run.report("tree", depth=2)``; without a name, a list of all. ``run.report("tree").data``
        is the same for other programs. Raises TorchprofError for an unknown name or option."""
        return output("render")(name, self, options)  # type: ignore[no-any-return]

    @property
    def findings(self) -> list[Any]:
        """What could be made faster or smaller, the largest gain first. Each has ``layer``, ``layers``, ``finding``,
        ``remedy``, ``gain_ns``, ``gain_bytes`` (None: unknown), ``rule``, and the ``trial`` of ``Profile.verify`` or
        ``torchprof run --try``, a ``Trial``, or None. docs/advice.md has the rules."""
        return output("advise")(self)  # type: ignore[no-any-return]

    def metrics(self, layers: int | str | Iterable[str | tuple[str, ...]] | None = None) -> dict[str, int | float]:
        """The run as a flat dict of numbers, for W&B, MLflow, Prometheus, TensorBoard: ``time/forward/cpu_ms``.

        docs/metrics.md lists the names, and says how ranks are put together. A name ends in the unit. What is unknown
        is left out. ``lower_bounds/count`` is how many of the numbers are lower bounds (``≥`` in tables).

        ``layers`` adds the time and FLOPs of layers, each with all layers below it: a depth (0: the models), a path, or
        a list of paths, as for ``Profile(paths=…)``. Raises TorchprofError for a path that matches nothing, and for a
        negative depth.
        """
        return output("metrics")(self, layers)  # type: ignore[no-any-return]

    def _repr_html_(self) -> str:
        """The HTML that a notebook shows."""
        return self.report("notebook")

    def show(self, *, height: int = 640) -> None:
        """Show the page of ``export("report.html")`` in a notebook, in a frame of ``height`` pixels. Needs IPython,
        which every notebook has. Raises TorchprofError without it and outside of notebooks."""
        output("show_page")(self.report("html"), height)

    def export(self, path: str | PathLike[str], **options: Any) -> None:
        """Write a report to a file. The suffix chooses the report, see docs/exports.md: ``run.export("report.html")``.
        ``options`` are those of the report. After the suffix, ``.gz`` gzips the file. Raises TorchprofError for an
        unknown suffix or option, and if there is no such folder; OSError like ``open``."""
        output("export")(path, self, options)

    def to_dataframe(self, of: str = "layers") -> pandas.DataFrame:
        """The run as a pandas ``DataFrame``, with one record for each of its "layers", "operators" or "rows". The
        columns are in docs/exports.md; unknown values are ``pandas.NA``. Raises TorchprofError for any other ``of``,
        and if pandas is not installed."""
        return output("dataframe")(self, of)

    def save(self, path: str | PathLike[str], *, strip: bool = False) -> None:
        """Write the run as JSON (see docs/run-file.md), gzipped if the name ends in ``.gz``.

        ``run.parquet`` is a Parquet file: the rows are its columns, and ``load`` reads it, too. ``job/``, with a slash
        at the end, is a job folder, to which the run of this rank is added; several processes can do so at once. For
        these see docs/job-folder.md; they need pyarrow.

        The file has names of layers, ops and the machine, shapes and figures; no tensor data and no source code.
        ``strip=True`` leaves out the names of files, machines and jobs. Raises TorchprofError if there is no such
        folder, without pyarrow, and for a rank that the job folder has already or that is not of its job; OSError like
        ``open``.
        """
        output("write")(self, path, strip=strip)


RUN_PARTS: dict[str, RunPart[Any]] = {
    "samples": SamplesPart(),
    "memory": PerRank(Memory),
    "timeline": TimelinePart(),
    "device_times": PerRank(DeviceTime),
    "lockstep": LockstepPart(),
    "unfinished": UnfinishedPart(Unfinished),
    "pipelines": PerRank(Pipeline),
    "passes": PassesPart(Passes),
    "trials": TrialsPart(Trial),
}
"""The parts of a run by their names in ``Run`` and in the file, where they have this order."""


# What ``Run``, ``ReportText`` and ``profile`` call by name, imported at the first call: no import goes that way.

_CALLED = {
    "torchprof.advise": ["advise"],
    "torchprof.analyze.metrics": ["metrics"],
    "torchprof.analyze.layer_reports": ["benchmark_table"],
    "torchprof.analyze.warnings": ["all_warnings"],
    "torchprof.comparison": ["drift"],
    "torchprof.first_screen.verdict": ["findings_to_try"],
    "torchprof.ranks.sentences": ["chosen_ranks", "verdict_on_ranks", "with_comparison"],
    "torchprof.reports": ["export", "render"],
    "torchprof.reports.documents": ["html_of", "printed", "show_page", "text_of"],
    "torchprof.reports.exports": ["data_of", "dataframe"],
    "torchprof.run.saved": ["write"],
}


def output(name: str) -> Callable[..., Any]:
    """The function of that name."""
    [file] = [file for file, names in _CALLED.items() if name in names]
    with paused_gc():  # with torch imported, one collection takes as long as half of our files
        return getattr(import_module(file), name)  # type: ignore[no-any-return]


class ReportText(str):
    """The text of a report: a ``str`` that also has the report's ``data``. Python's prompt shows the ``repr`` of a
    value, so its ``repr`` is the text. A notebook shows its tables."""

    __slots__ = ("_content", "_name")

    _name: str
    _content: Any

    def __new__(cls, text: str, name: str = "", content: Any = None) -> ReportText:
        """``content``: the report whose text it is, a ``Part`` of ``analyze.report``; None for a file format."""
        self = super().__new__(cls, text)
        self._name, self._content = name, content
        return self

    def __repr__(self) -> str:
        return str(self)

    @property
    def data(self) -> dict[str, Any]:
        """The report for other programs, as values that JSON can store: its ``tables`` and ``sentences``.
        docs/exports.md describes them. Raises TorchprofError for a report that is a file format, such as "csv"."""
        if self._content is None:
            raise TorchprofError(
                f"The report {self._name!r} is a file format: its text is for other programs, and it has no other data."
            )
        return output("data_of")(self._name, self._content)  # type: ignore[no-any-return]

    def _repr_html_(self) -> str | None:
        """The HTML that a notebook shows; None for a file format, of which it shows the text."""
        return None if self._content is None else output("html_of")(self._content)
