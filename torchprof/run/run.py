"""``Run``: all that is known of one profiled run. It is frozen, and every report reads it. Standard library only."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from os import PathLike
from typing import TYPE_CHECKING, Any

from torchprof.errors import TorchprofError
from torchprof.run.cost import FIELDS, Cost
from torchprof.run.layers import Layer, Layers
from torchprof.run.lockstep import Lockstep, LockstepKey, ranks_in_words
from torchprof.run.memory import Memory
from torchprof.run.meta import Meta
from torchprof.run.operators import Op, operators_of_layers
from torchprof.run.outputs import output
from torchprof.run.ranks import of_ranks
from torchprof.run.rows import NO_COST, Rows
from torchprof.run.samples import SampleKey, Spread
from torchprof.run.timeline import DeviceTime, Timeline
from torchprof.run.unfinished import Unfinished
from torchprof.run.warnings import Caveat
from torchprof.run.words import (
    FORWARD,
    NOT_SELECTED,
    OUTSIDE,
    PHASES,
    Frame,
    is_left_over,
    is_optimizer_step,
    number_of_phase,
)

if TYPE_CHECKING:
    import pandas


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


@dataclass(frozen=True, repr=False)
class Run:
    """One profiled run. Made by ``Profile`` or ``torchprof.load``; every report reads it and nothing else."""

    __module__ = "torchprof"  # where users import it from: repr, help, tracebacks and pickles show it

    metas: tuple[Meta, ...]
    layers: Layers
    rows: Rows
    samples: Mapping[SampleKey, Spread]
    memory: tuple[Memory, ...] = ()
    timeline: Timeline | None = None
    device_times: tuple[DeviceTime, ...] = ()
    lockstep: Mapping[LockstepKey, Lockstep] = field(default_factory=dict)
    unfinished: tuple[Unfinished, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", Layers.of(self.layers))  # of any layers that are given

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
        return tuple(self.layers[index] for index in self.layers.roots)

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
        number = PHASES.index(FORWARD) if phase is None else number_of_phase(phase)
        layers, (own, total) = self.layers, self._costs(phase)

        def node(index: int) -> Node:
            calls = self.rows.by_layer.get((index, number), (NO_COST, 0))[1]
            return Node(layers[index], calls, own[index], total[index], [])

        at = layers.roots[root]
        top = node(at)
        waiting = [(at, top)]
        while waiting:
            at, above = waiting.pop()
            for child in layers.children[at]:
                below = node(child)
                above.children.append(below)
                waiting.append((child, below))
        return top

    def _costs(self, phase: str | None) -> tuple[list[Cost], list[Cost]]:
        """Self and total of each layer in one phase, None for all of them."""
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
        """What belongs to no layer: loss, optimizer, data; with ``selected=False``, to layers not selected.

        What was launched before the recording is no part of it: ``left_over`` has that.
        """
        layer = OUTSIDE if selected else NOT_SELECTED
        return self.rows.by_layer.get((layer, number_of_phase(phase)), (Cost(), 0))[0]

    @cached_property
    def left_over(self) -> Cost:
        """The work of devices that was launched before the recording began. It is in no sum of a layer, or of
        ``no_layer``: those, all layers' self and this are Σ over the rows."""
        return self._cost_in(is_left_over)

    @cached_property
    def optimizer_steps(self) -> Cost:
        """The work of the optimizers' steps: of all that ran inside ``torch.optim.Optimizer.step``."""
        return self._cost_in(is_optimizer_step)

    def _cost_in(self, is_wanted: Callable[[Sequence[Frame]], bool]) -> Cost:
        """Σ over the rows whose frames are wanted."""
        rows, columns = self.rows, self.rows.columns
        wanted = [*map(is_wanted, rows.frames)]
        taken = [at for at, chain in enumerate(columns["frames"]) if wanted[chain]] if any(wanted) else ()
        return Cost(*(sum(columns[name][at] for at in taken) for name in FIELDS))

    def ops(self, phase: str = FORWARD) -> dict[int, list[Op]]:
        """The operators and labels of one phase under each layer (by index in ``layers``), in the order of first call.

        Σ self over the ops of a layer, those inside its labels included, is the layer's self: ``(between ops)`` is one
        of them where it has any. The total of a label is all that ran in it in this phase, whatever layer that counts
        for, and whatever phase the label is of itself.
        """
        return operators_of_layers(self.rows, phase)

    def total_params(self) -> dict[tuple[str, ...], int | None]:
        """The parameters of each layer and all below it, by path; None where a lazy layer has not made them yet."""
        totals = self.layers.roll_up([layer.params for layer in self.layers], _sum_if_known)
        return dict(zip(self.layers.index_of, totals))

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


def _sum_if_known(one: int | None, other: int | None) -> int | None:
    return None if one is None or other is None else one + other
