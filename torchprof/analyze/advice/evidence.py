"""The evidence that rules read: the rows of a run, indexed by their frames and summed by layer; shared by all rules."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import add
from typing import NamedTuple

from torchprof.analyze.pipeline.splits import Judged, judged_pipelines
from torchprof.analyze.records import layer_name
from torchprof.run.run import Run
from torchprof.run.samples import SampleKey, Spread
from torchprof.run.words import (
    BACKWARD,
    LAUNCH_NOT_RECORDED,
    OPTIMIZER_RANGE,
    PHASES,
    Frame,
    FrameKind,
    is_left_over,
)

_GENERATES = 10
Holds = Callable[[Sequence[Frame]], bool]
"""A predicate of a rule on the frames of a row, outer to inner. It is called once for each distinct chain of frames."""


class Took(NamedTuple):
    """The sums of the matching rows of a layer: self costs, and the ``calls`` of the outermost matches."""

    calls: int = 0
    cpu_ns: int = 0
    device_ns: int = 0
    allocated: int = 0


class Evidence:
    """A run, and the indexes over its rows that rules share. Each index is made when a rule first needs it.

    A run may have 200,000 rows, so a rule must not loop over all of them or make ``Row`` objects. It selects chains of
    frames with a predicate (there are few chains), and gets their rows, or the sums of these rows by layer.
    """

    def __init__(self, run: Run) -> None:
        self.run = run

    @cached_property
    def recorded_ns(self) -> int:
        """The elapsed time of the recording, summed over ranks. All shares and thresholds of time are relative to it,
        for every device and any number of threads and streams."""
        return sum(meta.wall_ns for meta in self.run.metas)

    @cached_property
    def steps(self) -> int:
        """The number of steps of all ranks: those that were marked, or of a loop that trains; 0 without any."""
        marked = sum(meta.marked_steps for meta in self.run.metas)
        if marked or BACKWARD not in self.run.phases():
            return marked
        return sum(spread.count for _, spread in self.samples("step_ns"))

    def per_step(self, ns: int) -> float | None:
        """A part of the recorded time per step, as the same share of a step; None with fewer than two steps.

        In a loop that marks no steps, the pass in which the recording begins is in no step. It counts by its length, as
        one step at most: what is longer is work before or after the loop.
        """
        if self.steps < 2:
            return None
        passes: float = self.steps
        unmarked = {meta.rank: meta.wall_ns for meta in self.run.metas if not meta.marked_steps}
        for key, spread in self.samples("step_ns"):
            if key.rank in unmarked and spread.sum:
                passes += min(max(unmarked[key.rank] / spread.sum - 1, 0) * spread.count, 1)
        return ns / passes

    @cached_property
    def pipelines(self) -> list[Judged]:
        """The pipelines of the run, with what is known of their stages."""
        return judged_pipelines(self.run)

    @cached_property
    def ops_recorded(self) -> bool:
        """Whether operators on the CPU were recorded: a trace of device activity alone has none."""
        return any(
            frame.kind == FrameKind.OP and "::" in frame.name for chain in self.run.rows.frames for frame in chain
        )

    @cached_property
    def peak_bytes(self) -> int:
        """The live bytes at the peaks, over all devices and ranks, including what the model had allocated before, if
        that is known; 0 if memory was not recorded. Gains in memory are shares of it."""
        before = sum(size for memory in self.run.memory for _, size in memory.before or ())
        return before + sum(memory.peak_bytes for memory in self.run.memory)

    @cached_property
    def starts_known(self) -> bool:
        """Whether the bytes of the model before the recording are known for every device, so that the peak is
        complete."""
        return all(memory.before is not None for memory in self.run.memory)

    @cached_property
    def device(self) -> str:
        """The kind of device whose time was measured, such as "cuda"; "cpu" without one."""
        meta = self.run.meta
        return meta.device if meta.device is not None and "device_ns" in meta.measured else "cpu"

    @cached_property
    def switches(self) -> dict[str, str]:
        """The settings of torch's switches, by name; empty if the run did not record them."""
        return dict(self.run.meta.switches)

    @cached_property
    def shapes_recorded(self) -> bool:
        """Whether the shapes and dtypes of the inputs of ops were recorded."""
        return any(on for meta in self.run.metas for name, on in meta.flags if name == "record_shapes")

    @cached_property
    def compute_capability(self) -> tuple[int, ...]:
        """The compute capability of the CUDA device, such as (8, 0); () if unknown."""
        numbers = self.switches.get("compute_capability", "").split(".")
        return tuple(map(int, numbers)) if all(number.isdecimal() for number in numbers) else ()

    @cached_property
    def called_above(self) -> list[int]:
        """For each layer the nearest layer above that was called, -1 for none: a ModuleList between them is not
        called."""
        parent, calls = self.run.layers.parent, self.run.rows.forward_calls
        nearest = []
        for number in range(len(parent)):
            above = parent[number]
            while above >= 0 and not calls(above):
                above = parent[above]
            nearest.append(above)
        return nearest

    @cached_property
    def calls_below(self) -> Counter[int]:
        """By layer, the forward calls of layers for which it is the nearest layer above that was called."""
        below: Counter[int] = Counter()
        for number, above in enumerate(self.called_above):
            below[above] += self.run.rows.forward_calls(number)
        return below

    @cached_property
    def _rows_of_chain(self) -> list[list[int]]:
        rows: list[list[int]] = [[] for _ in self.run.rows.frames]
        left_over = [*map(is_left_over, self.run.rows.frames)]
        for row, chain in enumerate(self.run.rows.columns["frames"]):
            if not left_over[chain]:
                rows[chain].append(row)
        return rows

    @cached_property
    def _samples_of_measure(self) -> dict[str, list[tuple[SampleKey, Spread]]]:
        of_measure: defaultdict[str, list[tuple[SampleKey, Spread]]] = defaultdict(list)
        for key, spread in self.run.samples.items():
            of_measure[key.measure].append((key, spread))
        return of_measure

    def samples(self, measure: str) -> list[tuple[SampleKey, Spread]]:
        """The samples of one measure, over all layers, phases, ranks and devices."""
        return self._samples_of_measure.get(measure, [])

    def rows(self, holds: Holds, *, phases: Iterable[str] = PHASES) -> Iterator[int]:
        """The numbers of the rows whose frames match. Work that was launched before the recording never matches, here
        and in ``took``."""
        for _, rows in self.rows_of_chains(holds, phases=phases):
            yield from rows

    def rows_of_chains(
        self, holds: Holds, *, phases: Iterable[str] = PHASES
    ) -> Iterator[tuple[Sequence[Frame], list[int]]]:
        """The same for each chain of frames that matches: the chain, and the numbers of its rows, at least one."""
        wanted = {PHASES.index(phase) for phase in phases}
        of_phase = self.run.rows.columns["phase"]
        for chain, _ in self._matching(holds):
            rows = [row for row in self._rows_of_chain[chain] if of_phase[row] in wanted]
            if rows:
                yield self.run.rows.frames[chain], rows

    def took(self, holds: Holds, *, phases: Iterable[str] = PHASES) -> Mapping[int, Took]:
        """The sums of the rows whose frames match, by the number of their layer (negative: no layer).

        ``calls`` counts a row only if its frames without the innermost do not match. For "an ``aten::softmax`` is among
        the frames" it is the number of calls of softmax, and the times are those of these calls with all ops inside
        them, but without layers that they call.
        """
        wanted = frozenset(map(PHASES.index, phases))
        matching = None if holds is always else self._matching(holds)
        if (matching, wanted) not in self._sums:  # many rules ask for the same rows
            sums = self._sums_of_layers(wanted) if matching is None else self._sums_of(matching, wanted)
            self._sums[matching, wanted] = sums
        return self._sums[matching, wanted]

    def _matching(self, holds: Holds) -> tuple[tuple[int, bool], ...]:
        """The chains of frames that match and have rows: their numbers, and whether the frames without the innermost do
        not match."""
        if holds not in self._matches:  # many rules ask for the same
            chains: Iterable[int] = range(len(self.run.rows.frames))
            if isinstance(holds, Inside):  # most rules ask for operators that few runs have
                chains = sorted({chain for name in holds.names for chain in self._chains_of_op.get(name, ())})
            self._matches[holds] = tuple(
                (chain, not frames or not holds(frames[:-1]))
                for chain, frames in ((chain, self.run.rows.frames[chain]) for chain in chains)
                if self._rows_of_chain[chain] and holds(frames)
            )
        return self._matches[holds]

    @cached_property
    def _chains_of_op(self) -> dict[str, list[int]]:
        """By the name of an operator: the chains of frames that it is in."""
        chains: dict[str, list[int]] = {}
        for chain, frames in enumerate(self.run.rows.frames):
            for name in {frame.name for frame in frames if frame.kind == FrameKind.OP}:
                chains.setdefault(name, []).append(chain)
        return chains

    @cached_property
    def _matches(self) -> dict[Holds, tuple[tuple[int, bool], ...]]:
        return {}

    @cached_property
    def _phases(self) -> frozenset[int]:
        """The numbers of the phases of rows."""
        return frozenset(self.run.rows.columns["phase"])

    @cached_property
    def _not_zero(self) -> frozenset[str]:
        """The names of the columns of rows that have a value."""
        return frozenset(name for name, column in self.run.rows.columns.items() if any(column))

    @cached_property
    def _sums(self) -> dict[tuple[tuple[tuple[int, bool], ...] | None, frozenset[int]], Mapping[int, Took]]:
        return {}

    def _sums_of_layers(self, wanted: frozenset[int]) -> Mapping[int, Took]:
        """The sums of all rows, by layer, from those that the run has by layer and phase."""
        sums: dict[int, Took] = {}
        for (layer, phase), (cost, calls) in self.run.rows.by_layer.items():
            if phase in wanted:
                took = Took(calls, cost.cpu_ns, cost.device_ns, cost.cpu_allocated + cost.device_allocated)
                before = sums.get(layer)
                sums[layer] = took if before is None else Took(*map(add, before, took))
        return sums

    def _sums_of(self, matching: Iterable[tuple[int, bool]], wanted: frozenset[int]) -> Mapping[int, Took]:
        """The sums of the rows of chains, by layer. ``matching``: the number of each chain, and whether its calls
        count."""
        columns = self.run.rows.columns
        layers, of_phase = columns["layer"], columns["phase"]
        taken: list[int] = []
        counted: list[int] = []
        for chain, outermost in matching:
            rows = self._rows_of_chain[chain]
            if not self._phases <= wanted:
                rows = [row for row in rows if of_phase[row] in wanted]
            taken += rows
            counted += rows if outermost else []
        numbers = {layer: number for number, layer in enumerate(dict.fromkeys(layers[row] for row in taken))}
        nothing = [0] * len(numbers)

        def sums(name: str, rows: Sequence[int], places: Sequence[int]) -> Sequence[int]:
            if name not in self._not_zero:
                return nothing
            column, summed = columns[name], nothing.copy()
            for row, place in zip(rows, places):
                summed[place] += column[row]
            return summed

        places = [numbers[layers[row]] for row in taken]
        calls = sums("calls", counted, [numbers[layers[row]] for row in counted])
        times = (sums(name, taken, places) for name in ("cpu_ns", "device_ns"))
        allocated = map(add, *(sums(name, taken, places) for name in ("cpu_allocated", "device_allocated")))
        return dict(zip(numbers, map(Took, calls, *times, allocated)))

    def time_of(self, took: Took) -> int:
        """The time that counts: that of the device if it was measured, else that of the CPU."""
        return took.cpu_ns if self.device == "cpu" else took.device_ns

    def gets_one_token(self, layer: int) -> bool:
        """Whether the model of a layer was called with one token ten times or more: its first input has two or three
        dimensions, the second of size 1."""
        root = self.run.layers.lineage(layer)[0]
        shapes = self.run.layers[root].input_shapes
        many = self.run.rows.forward_calls(root) >= _GENERATES
        is_sound = any(other.kind == "Conv1d" for other in self.run.layers)  # (batch, channel, time)
        return many and not is_sound and bool(shapes) and len(shapes[0]) in (2, 3) and shapes[0][1] == 1

    def name_of(self, layer: int) -> str:
        """The dotted path of a layer by its number, or the name for work of no layer."""
        return layer_name(self.run, layer)


def always(frames: Sequence[Frame]) -> bool:
    """A predicate: all rows."""
    return True


def no_frames(frames: Sequence[Frame]) -> bool:
    """A predicate: the own time of layers, outside ops and labels. Its calls are those of the layers."""
    return not frames


@dataclass(frozen=True)
class Inside:
    """A predicate: an op of one of these names is among the frames."""

    names: frozenset[str]

    def __call__(self, frames: Sequence[Frame]) -> bool:
        return any(frame.kind == FrameKind.OP and frame.name in self.names for frame in frames)


def inside(*names: str) -> Inside:
    """The predicate for ops of these names."""
    return Inside(frozenset(names))


def has_no_launch(frames: Sequence[Frame]) -> bool:
    """Whether it is device work whose launch is missing from the recording."""
    return bool(frames) and frames[0].kind == FrameKind.LABEL and frames[0].name == LAUNCH_NOT_RECORDED


def is_optimizer(frames: Sequence[Frame]) -> bool:
    """Whether it is in a range of an optimizer."""
    return any(frame.kind == FrameKind.LABEL and frame.name.startswith(OPTIMIZER_RANGE) for frame in frames)


def is_collection(frames: Sequence[Frame]) -> bool:
    """Whether it is a collection of Python's garbage collector."""
    return bool(frames) and frames[0].kind == FrameKind.GC


def shape_of_input(frame: Frame, index: int) -> tuple[int, ...]:
    """The shape of one input of an op; ``()`` if it was not recorded, is not a tensor, or has no dimension."""
    shapes = frame.signature.shapes if frame.signature is not None else ()
    shape = shapes[index] if index < len(shapes) else None
    return tuple(shape) if shape and all(type(size) is int for size in shape) else ()
