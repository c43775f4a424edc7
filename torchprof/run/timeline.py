"""What a run has of each device and over time: the peak of memory, the busy time, the timeline; a rank's pipeline."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from operator import add, le
from typing import Any, NamedTuple

from torchprof.run.part import RunPart, Scale, demand, demand_layer, fields_of, read_as, read_columns
from torchprof.run.words import NOT_SELECTED

# The peak of memory of each device, and what was live at it


class Held(NamedTuple):
    """Memory that was live at a peak: ``nbytes`` in ``blocks``, allocated for a layer (by its index, negative for none)
    in a phase. ``kind`` is one of ``KINDS``, or "unknown" if torch recorded no addresses. The bytes of "unknown" are
    negative if memory from before the recording had been freed by then."""

    layer: int
    phase: str
    kind: str
    nbytes: int
    blocks: int


KINDS = (
    *("parameters", "gradients", "activations", "optimizer state", "inputs", "temporaries"),
    *("optimizer temporaries", "weight casts"),
)
"""What memory is used for. Activations are made in forward and still live when the call of the model has ended."""


class Growth(NamedTuple):
    """Memory that stays call by call: after the first two calls of models, ``calls`` more in a row allocated ``nbytes``
    for a layer, in a phase, of a kind, that were not freed after them; between ``least`` and ``most`` in one call."""

    layer: int
    phase: str
    kind: str
    nbytes: int
    calls: int
    least: int
    most: int

    def __add__(self, cycle: Growth) -> Growth:  # type: ignore[override]
        nbytes, calls = self.nbytes + cycle.nbytes, self.calls + cycle.calls
        least, most = min(self.least, cycle.least), max(self.most, cycle.most)
        return self._replace(nbytes=nbytes, calls=calls, least=least, most=most)


class Holder(NamedTuple):
    """What keeps memory: a variable, an attribute or an item of the name ``name`` in ``where``, a file, a function or a
    module. ``kind``: its class, or "tensor". ``tensors``: how many of the tensors in question are in it, of ``nbytes``,
    most of them of ``dtype``; ``with_graph``: whether they keep autograd graphs; ``are_numbers``: whether each has one
    element."""

    name: str
    where: str
    kind: str
    tensors: int
    nbytes: int
    dtype: str
    with_graph: bool = False
    are_numbers: bool = False


@dataclass(frozen=True)
class Memory:
    """The memory of one device of one rank.

    - ``peak_bytes``: the peak above the start of the recording; ``peak_ns``: when it was, in ns after the start.
    - ``held``: what was live at the peak, the largest first.
    - ``before``: (kind, bytes) of what the model had on this device when the recording began.
    - ``allocator``: (name, bytes at the start, bytes at the end) of each counter of torch's allocator of the device.
    - ``growth``: what stays call by call, the most first; None if there were too few calls to know. ``holder``: what
      keeps it, if that was found.
    - ``others``: what keeps most of the "other tensors" and "other parameters" in ``before``, if they are a large part
      and that was found.
    """

    device: str
    rank: int = 0
    peak_bytes: int = 0
    peak_ns: int = 0
    held: tuple[Held, ...] = ()
    before: tuple[tuple[str, int], ...] | None = None
    allocator: tuple[tuple[str, int, int], ...] = ()
    growth: tuple[Growth, ...] | None = None
    holder: Holder | None = None
    others: Holder | None = None

    @property
    def bytes_at_peak(self) -> int:
        """All that was live at the peak, with what was live at the start, as far as it is known."""
        return self.peak_bytes + sum(nbytes for _, nbytes in self.before or ())

    @property
    def growth_per_call(self) -> float | None:
        """The bytes that stay of a call, in the mean; None if unknown."""
        return None if self.growth is None else sum(growth.nbytes / growth.calls for growth in self.growth)

    def __add__(self, cycle: Memory) -> Memory:
        """The higher peak of two cycles of a device, with what was live at it; and what grew in both."""
        grown: dict[tuple[Any, ...], Growth] = {}
        for growth in (*(self.growth or ()), *(cycle.growth or ())):
            known = grown.get(growth[:3])
            grown[growth[:3]] = growth if known is None else known + growth
        is_known = self.growth is not None or cycle.growth is not None
        higher = cycle if cycle.peak_bytes > self.peak_bytes else self
        growths = tuple(sorted(grown.values(), key=lambda growth: -growth.nbytes)) if is_known else None
        others = higher.others or self.others or cycle.others
        return replace(higher, growth=growths, holder=cycle.holder or self.holder, others=others)

    def renumbered(self, to: Sequence[int]) -> Memory:
        held = tuple(storage._replace(layer=to[storage.layer]) for storage in self.held)
        growth = self.growth and tuple(each._replace(layer=to[each.layer]) for each in self.growth)
        return replace(self, held=held, growth=growth)

    def scaled(self, scale: Scale) -> Memory:
        """Peaks, and growth by call, are what they are."""
        return self

    def stripped(self) -> Memory:
        """The same without the names of what keeps memory."""
        holder, others = (
            each and each._replace(name="(left out)", where="left out") for each in (self.holder, self.others)
        )
        return replace(self, holder=holder, others=others)

    def check(self, layers: int) -> None:
        storages: tuple[Held | Growth, ...] = (*self.held, *(self.growth or ()))
        for storage in storages:
            demand_layer(storage, layers)
            demand(storage.kind in (*KINDS, "unknown"), f"{storage.kind!r} instead of a kind of memory")
        for growth in self.growth or ():
            demand(growth.calls > 0 <= growth.least <= growth.most, f"{growth!r:.200}")
        demand(len({each[:3] for each in self.growth or ()}) == len(self.growth or ()), "growth that is there twice")
        demand(all(nbytes >= 0 for _, nbytes in self.before or ()), "negative memory at the start")
        holders = (holder for holder in (self.holder, self.others) if holder is not None)
        demand(all(min(holder.tensors, holder.nbytes) >= 0 for holder in holders), "a negative number of tensors")


# The busy time of each device


class StreamTime(NamedTuple):
    """The work of one ``stream`` of a device: the number of ``kernels`` (including copies and sets), how long any ran
    (``busy_ns``), and how long any of a kind ran (``compute_ns``, ``communication_ns``, ``copy_ns``). Kernels of one
    stream may overlap, but rarely do."""

    stream: int
    kernels: int
    busy_ns: int
    compute_ns: int
    communication_ns: int
    copy_ns: int


@dataclass(frozen=True)
class DeviceTime:
    """How one device of one rank used its time. ``span_ns`` is from the start of its first work to the end of its last.

    Each time is the length of a union of intervals: work on several streams at once counts once.

    - ``busy_ns``: any work ran. ``streams``: the same for each stream.
    - ``communication_ns``: a collective or another transfer between ranks (see ``torchprof.measure.busy``).
    - ``copy_ns``: a copy or a set. ``compute_ns``: any other work.
    - ``overlap_ns``: it communicated and computed at the same time.

    Over several cycles all times are added up; the time between two cycles is not included.
    """

    device: str
    rank: int
    span_ns: int
    busy_ns: int
    compute_ns: int
    communication_ns: int
    copy_ns: int
    overlap_ns: int
    streams: tuple[StreamTime, ...]

    @property
    def idle_ns(self) -> int:
        """How long nothing ran between the first and the last work."""
        return self.span_ns - self.busy_ns

    @property
    def exposed_ns(self) -> int:
        """How long it communicated without computing: the most that more overlap could save."""
        return self.communication_ns - self.overlap_ns

    @property
    def copy_alone_ns(self) -> int:
        """How long it copied without computing or communicating."""
        return self.busy_ns - self.compute_ns - self.exposed_ns

    def __add__(self, cycle: DeviceTime) -> DeviceTime:
        streams = {stream.stream: stream for stream in self.streams}
        for stream in cycle.streams:
            known = streams.get(stream.stream, (0,) * len(stream))
            streams[stream.stream] = StreamTime(stream.stream, *map(add, known[1:], stream[1:]))
        names = [name for name in fields_of(self) if name.endswith("_ns")]
        sums = {name: getattr(self, name) + getattr(cycle, name) for name in names}
        return replace(self, **sums, streams=tuple(streams[number] for number in sorted(streams)))

    def renumbered(self, to: Sequence[int]) -> DeviceTime:
        return self

    def scaled(self, scale: Scale) -> DeviceTime:
        scale = scale.on(self.device)
        streams = tuple(
            StreamTime(stream.stream, scale.number(stream.kernels), *map(scale.total, stream[2:]))
            for stream in self.streams
        )
        times: dict[str, Any] = {
            name: scale.total(value) for name, value in fields_of(self).items() if name.endswith("_ns")
        }
        return replace(self, **times, streams=streams)

    def check(self, layers: int) -> None:
        """No part is longer than the whole, and none is negative."""
        parts = (self.idle_ns, self.compute_ns - self.overlap_ns, self.overlap_ns, self.exposed_ns, self.copy_alone_ns)
        least = min(*parts, self.copy_ns - self.copy_alone_ns, *(min(stream[1:]) for stream in self.streams))
        demand(least >= 0, f"the times of {self.device}")


# The timeline, recorded on request: allocations, frees and spans


class Lane(NamedTuple):
    """One line of the timeline, in which spans are nested and never cross. It is a thread (``device`` is "cpu") or a
    part of a ``stream`` of a device: a stream has as many lanes as kernels ran on it at once. ``number`` counts the
    threads, or the lanes of a stream, from 1 on. ``stream`` is None for a thread, and on a device with one stream."""

    device: str
    number: int
    stream: int | None = None


@dataclass(frozen=True)
class Spans:
    """What ran when, in the last cycle, as columns. Spans of a lane are nested or apart; outer spans come before inner
    ones, kernels last.

    - ``start_ns``, ``end_ns``: in ns after the start of the recording.
    - ``lane``: index in ``lanes``. ``layer``: index in the run's, negative for none. ``phase``: index in ``PHASES``.
    - ``name``: index in ``names``, which has the names of labels and kernels. It is -1 for a span of a layer: a call,
      or in backward an unbroken stretch of work of the layer and those below it (see ``torchprof.measure.timeline``).
    - ``steps``: when each step began, and last when the last one ended; empty without steps.
    - ``dropped``: how many spans came after the first ``Spans.LIMIT``; they are left out.
    """

    lanes: tuple[Lane, ...]
    names: tuple[str, ...]
    columns: Mapping[str, array[int]] = field(repr=False)
    steps: tuple[int, ...] = ()
    dropped: int = 0

    COLUMNS = ("start_ns", "end_ns", "lane", "layer", "phase", "name")
    LIMIT = 1_000_000

    def __len__(self) -> int:
        return len(self.columns["start_ns"])

    def renumbered(self, to: Sequence[int]) -> Spans:
        return replace(self, columns={**self.columns, "layer": array("q", map(to.__getitem__, self.columns["layer"]))})

    def to_json(self) -> dict[str, Any]:
        fields = {"lanes": self.lanes, "names": self.names, "steps": self.steps, "dropped": self.dropped}
        return {**fields, **self.columns}

    @classmethod
    def from_json(cls, stored: Any, layers: int) -> Spans:
        lanes = read_as(tuple[Lane, ...], stored["lanes"])
        names, steps = read_as(tuple[str, ...], stored["names"]), read_as(tuple[int, ...], stored["steps"])
        limits = {"lane": (0, len(lanes)), "name": (-1, len(names))}
        columns = read_columns(stored, cls.COLUMNS, layers, limits, "spans")
        demand(all(map(le, columns["start_ns"], columns["end_ns"])), "a span that ends before it begins")
        demand(all(map(le, steps, steps[1:])), "a step that ends before it begins")
        return cls(lanes, names, columns, steps, read_as(int, stored["dropped"]))


@dataclass(frozen=True)
class Timeline:
    """The last cycle over time: every allocation and free, in their order, as columns; and the ``spans`` of what ran.

    - ``time_ns``: in ns after the start of the recording. ``nbytes``: negative for a free.
    - ``device``, ``layer``, ``phase``, ``kind``: indices in ``devices``, in the run's layers (negative: none), in
      ``PHASES`` and in ``KINDS`` (-1: unknown).
    - ``dropped``: how many allocations and frees came after the first ``Timeline.LIMIT``; they are left out.
    - ``spans``: None if they were not recorded.
    - ``rank``: the rank that was recorded; a run of several ranks has the timeline of one.

    The length is the number of allocations and frees. It is 0 without ``profile_memory``.
    """

    devices: tuple[str, ...]
    columns: Mapping[str, array[int]] = field(repr=False)
    dropped: int = 0
    spans: Spans | None = None
    rank: int = 0

    COLUMNS = ("time_ns", "nbytes", "device", "layer", "phase", "kind")
    LIMIT = 1_000_000

    @classmethod
    def of_spans(cls, spans: Spans, rank: int) -> Timeline:
        """A timeline without allocations."""
        return cls((), {name: array("q") for name in cls.COLUMNS}, 0, spans, rank)

    def __or__(self, other: Timeline) -> Timeline:
        """The allocations of this timeline with the spans of the other."""
        return replace(self, spans=other.spans)

    def __len__(self) -> int:
        return len(self.columns["time_ns"])

    def renumbered(self, to: Sequence[int]) -> Timeline:
        columns = {**self.columns, "layer": array("q", map(to.__getitem__, self.columns["layer"]))}
        return replace(self, columns=columns, spans=None if self.spans is None else self.spans.renumbered(to))

    def to_json(self) -> dict[str, Any]:
        fields = {"devices": self.devices, "dropped": self.dropped, "rank": self.rank}
        return {**fields, **self.columns, "spans": None if self.spans is None else self.spans.to_json()}

    @classmethod
    def from_json(cls, stored: Any, layers: int) -> Timeline:
        devices = read_as(tuple[str, ...], stored["devices"])
        limits = {"device": (0, len(devices)), "kind": (-1, len(KINDS))}
        columns = read_columns(stored, cls.COLUMNS, layers, limits, "timeline")
        spans = None if stored["spans"] is None else Spans.from_json(stored["spans"], layers)
        return cls(devices, columns, read_as(int, stored["dropped"]), spans, read_as(int, stored["rank"]))


class TimelinePart(RunPart[Timeline | None]):
    """The timeline as a part of a run: of the last cycle, and of the lowest rank that has one."""

    def of_ranks(self, value: Timeline | None, ranks: Collection[int]) -> dict[int, Timeline | None]:
        return {rank: value if value is not None and value.rank == rank else None for rank in ranks}

    def renumbered(self, value: Timeline | None, to: Sequence[int]) -> Timeline | None:
        return None if value is None else value.renumbered(to)

    def merge(self, so_far: Any, value: Timeline | None) -> Any:
        return value if so_far is None or (value is not None and value.rank < so_far.rank) else so_far

    def to_json(self, value: Timeline | None) -> Any:
        return None if value is None else value.to_json()

    def from_json(self, stored: Any, layers: int, ranks: Set[int]) -> Timeline | None:
        timeline = None if stored is None else Timeline.from_json(stored, layers)
        demand(timeline is None or timeline.rank in ranks, "no metadata of the rank of the timeline")
        return timeline


# The pipeline of a rank: each forward and backward of a microbatch in a stage, and the waiting before it

KEPT_STEPS = 100
"""Of so many steps, the last ones, a ``Pipeline`` has the times."""


class StageAction(NamedTuple):
    """One microbatch in one stage. ``what`` is as in torch's schedules: "F" forward, "B" backward, or its parts "I",
    the gradients of the inputs, and "W", those of the weights. For each of the steps that are kept: ``took_ns``, its
    time, and ``waited_ns``, the waiting since the end of the action before it, or since the start of the step: on the
    CPU for something to receive, on a device the time in which communication ran, and nothing else."""

    stage: int
    what: str
    microbatch: int
    took_ns: tuple[int, ...]
    waited_ns: tuple[int, ...]


ACTIONS = ("F", "B", "I", "W")


@dataclass(frozen=True)
class Pipeline:
    """What a rank did for its stages of a pipeline, in the time of one device.

    - ``schedule``: the class of torch's schedule, "" if unknown.
    - ``stages``: the number of stages of the whole pipeline; 0 if unknown.
    - ``group``: the ranks of the pipeline, in their order in it; empty if unknown.
    - ``roots``: (stage, layer) for each stage of this rank: the index of the model that the stage calls, negative if
      it was not profiled, or only parts of it.
    - ``steps``: how many steps had exactly these ``actions``, which are in the order in which they began. If steps
      differ, as with an evaluation between them, these are the actions of most steps. On a device, steps of whose
      actions no kernel was recorded do not count.
    - ``step_ns``: the duration of the schedule's step in each of the last ``KEPT_STEPS`` of them.
    """

    device: str
    rank: int
    schedule: str
    stages: int
    group: tuple[int, ...]
    roots: tuple[tuple[int, int], ...]
    steps: int
    step_ns: tuple[int, ...]
    actions: tuple[StageAction, ...]

    def __add__(self, cycle: Pipeline) -> Pipeline:
        """The steps of two cycles; if their actions differ, of the one with more steps, or else with more actions: a
        cycle may begin or end inside a step."""
        if [action[:3] for action in self.actions] != [action[:3] for action in cycle.actions]:
            return max(cycle, self, key=lambda pipeline: (pipeline.steps, len(pipeline.actions)))
        actions = (
            before._replace(
                took_ns=(before.took_ns + after.took_ns)[-KEPT_STEPS:],
                waited_ns=(before.waited_ns + after.waited_ns)[-KEPT_STEPS:],
            )
            for before, after in zip(self.actions, cycle.actions)
        )
        step_ns = (self.step_ns + cycle.step_ns)[-KEPT_STEPS:]
        return replace(cycle, steps=self.steps + cycle.steps, step_ns=step_ns, actions=tuple(actions))

    @property
    def waited_ns(self) -> int:
        """The waiting in all its steps; of those that are not kept, as long as in the others."""
        kept = sum(sum(action.waited_ns) for action in self.actions)
        return kept * self.steps // len(self.step_ns)

    def of_a_comparison(self) -> Pipeline:
        """Which stages the rank has, and nothing else: ranks with other stages are not compared with it."""
        roots = tuple((stage, NOT_SELECTED) for stage, _ in self.roots)
        return replace(self, roots=roots, step_ns=self.step_ns[-1:], actions=())

    def renumbered(self, to: Sequence[int]) -> Pipeline:
        return replace(self, roots=tuple((stage, to[layer]) for stage, layer in self.roots))

    def scaled(self, scale: Scale) -> Pipeline:
        scale = scale.on(self.device)
        actions = tuple(
            action._replace(
                took_ns=tuple(map(scale.single, action.took_ns)), waited_ns=tuple(map(scale.single, action.waited_ns))
            )
            for action in self.actions
        )
        step_ns = tuple(map(scale.single, self.step_ns))
        return replace(self, steps=scale.number(self.steps), step_ns=step_ns, actions=actions)

    def check(self, layers: int) -> None:
        for _, layer in self.roots:
            demand(NOT_SELECTED <= layer < layers, f"layer {layer} of a stage")
        kept, stages = len(self.step_ns), {stage for stage, _ in self.roots}
        demand(0 < kept <= self.steps, "the number of steps of a pipeline")
        for action in self.actions:
            demand(action.what in ACTIONS and action.stage in stages, f"{action[:3]!r} instead of a stage's action")
            demand(len(action.took_ns) == len(action.waited_ns) == kept, "the times of a stage's action")
