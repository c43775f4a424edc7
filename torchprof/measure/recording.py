"""What ``assemble`` works with: a recording with its CPU time, the plan of its layers, the options, the protocol of
observers, and the step that is open where a cycle ends."""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, TypeVar

from torchprof.attribute.compiled_graphs import CompiledGraphs
from torchprof.attribute.event_columns import EventColumns
from torchprof.attribute.events import Attributed, Event, Site
from torchprof.attribute.loop import Loop
from torchprof.attribute.op_groups import OpGroup
from torchprof.measure.memory import HolderOf
from torchprof.measure.memory_blocks import NOT_MEASURED, LiveBlocks, LiveMemory
from torchprof.run.layers import Layer, Layers
from torchprof.run.lockstep import GroupOfRanks, LockstepKey
from torchprof.run.measures import SampleKey
from torchprof.run.meta import Compilation, CompiledRegion, Meta, RunWarning
from torchprof.run.words import NOT_SELECTED, OUTSIDE, Signature, SourceLine

# One recording, and what it was made with


@dataclass(frozen=True)
class Recording:
    """One recording: its events, and the state of the process and the model at its start and end.

    - ``columns``: makes the events of ``source`` with the inputs that ``wanted_detail`` wants; nothing else keeps them.
    - ``layers``: those of the plan, as they were at the end. ``origin``: the process that was recorded.
    - ``observations``: those made so far; ``assemble`` adds its own.
    - ``start``, ``end``: the live memory at these times.
    - ``has_steps``: whether the events contain our marks of steps. ``from_first_mark``: whether a step began with the
      recording. ``before``: the end of the cycle right before this one; None without one.
    - ``group``: the group of the collectives that do not name one, see ``sole_group``.
    - ``graphs``: the compiled graphs whose layers are known. ``called``: those that were called, by their keys.
    - ``regions``: all compiled code of the process, and ``compilations`` when it was compiled. ``under_compile``: what
      was to be compiled of the models.
    - ``python_samples``: (time, source line, number of sampling intervals) of each; None if Python was not sampled.
    - ``holder_of``: finds what keeps blocks of memory, as in ``Allocations``; None for a recording of another process.

    ``began_ns``: the end of the recording's first mark. This time, the samples, and the frees noted in ``start`` are
    on the clock of ``time.perf_counter_ns``, which never jumps. Events may be on another clock.
    """

    source: EventSource
    columns: Callable[[], EventColumns]
    layers: tuple[Layer, ...]
    origin: Meta
    observations: Observations
    start: LiveMemory = NOT_MEASURED
    end: LiveMemory = NOT_MEASURED
    has_steps: bool = False
    from_first_mark: bool = True
    group: GroupOfRanks | None = None
    graphs: CompiledGraphs | None = None
    called: Mapping[str, CalledGraph] = field(default_factory=dict)
    regions: Iterable[CompiledRegion] = ()
    compilations: Iterable[Compilation] = ()
    under_compile: Sequence[CompiledForward] = ()
    before: CycleEnd | None = None
    python_samples: Iterable[tuple[int, SourceLine, int, int]] | None = None
    began_ns: int = 0
    holder_of: HolderOf | None = None


class EventSource(Protocol):
    """The source of events: a session of ours, a ``torch.profiler.profile``, or a trace file.

    ``device``: the kind of device whose work was recorded, None for the CPU alone. ``signatures``: the inputs of ops,
    by number. ``start_ns``, ``ended_ns``: when the recording began and ended, on the clock of the events; None
    if this is unknown.
    ``torchs_steps``: the number of ranges of steps of ``torch.profiler.profile``. ``loop``: valid after the events were
    asked for. ``cpu_time``: of the process during the recording, None if unknown. ``called_from``: see ``Attribution``.
    """

    device: str | None
    signatures: list[Signature]

    @property
    def wall_ns(self) -> int: ...

    @property
    def start_ns(self) -> int | None: ...

    @property
    def ended_ns(self) -> int | None: ...

    @property
    def torchs_steps(self) -> int: ...

    @property
    def loop(self) -> Loop: ...

    @property
    def cpu_time(self) -> CpuTime | None: ...

    def called_from(self, signature: int, source: int) -> int: ...


class CalledGraph(NamedTuple):
    """A graph of Inductor that was called: its ``text``, with the operators that are in it. ``calls``: the inputs of
    each call, in order: the shape of a tensor, else the value; only for a graph whose sizes differ between calls."""

    text: str
    calls: list[tuple[Any, ...]]

    @property
    def has_symbols(self) -> bool:
        return "Sym(" in self.text


class CompiledForward(NamedTuple):
    """The function that torch.compile compiles for the calls of a layer, which is in ``file`` from ``line`` on."""

    layer: int
    function: str
    file: str
    line: int


@dataclass(frozen=True)
class Options:
    """The measures that the user requested. ``device``: the kind of device, None for the CPU alone. ``timed``: whether
    times are measured. ``on_cpu``: whether the CPU was recorded; False only for a trace of a device alone."""

    device: str | None = None
    profile_memory: bool = False
    with_flops: bool = False
    record_shapes: bool = False
    with_stack: bool = False
    with_timeline: bool = False
    compile_layers: bool = False
    timed: bool = True
    on_cpu: bool = True

    def measures(self, field_of_cost: str) -> bool:
        """Whether a field of ``Cost`` was requested. Never ``collective_ns``: no table of layers shows it."""
        if field_of_cost == "collective_ns":
            return False
        if field_of_cost.endswith("_ns"):
            return self.timed and (self.on_cpu or field_of_cost != "cpu_ns")
        if field_of_cost in ("macs", "flops", "uncounted"):
            return self.with_flops
        return self.profile_memory


@dataclass(frozen=True)
class LayerPlan:
    """The layers of the models, and the modules that labels stand for. ``fqns``, ``replicated``: as in
    ``CollectiveOwners``. ``labels``: of layers that a trace does not name."""

    sites: Mapping[str, Site]
    layer_paths: Sequence[tuple[str, ...]]
    callable_layers: Set[int]
    fqns: Mapping[str, Sequence[int]]
    replicated: Mapping[int, Set[int]] | None = None
    selected: Set[int] | None = None
    labels: Sequence[Event] = ()


@dataclass
class Observations:
    """Facts of one or more cycles from which warnings are made, next to those in the run.

    ``callers``: ns of calls by (calling layer, called layer). ``callable_layers``: as in ``LayerPlan``. ``labels``: how
    many labels were recorded; ``label_ns``: what one costs. ``unobserved``: by layer, its calls that the profiler did
    not record. ``unlabelled``: the layers that could not be labeled. ``added``, ``removed``: the names of modules.
    ``warnings``: all others; they come first. ``nothing``: why nothing was recorded. ``unmatched``: the number of
    collectives without a known caller. ``uncertain``: the number of buckets of gradients whose layers are unknown.
    ``threads``: by the line of another thread, its processor time (``cpu_ns``) in the time in which it was looked at
    (``over_ns``). ``end``: of a single cycle, in a recording without gaps.
    """

    callers: Counter[tuple[int, int]] = field(default_factory=Counter)
    callable_layers: Set[int] = frozenset()
    labels: int = 0
    unobserved: Counter[int] = field(default_factory=Counter)
    unlabelled: set[int] = field(default_factory=set)
    added: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    label_ns: float | None = None
    warnings: list[RunWarning] = field(default_factory=list)
    nothing: RunWarning | None = None
    unmatched: int = 0
    uncertain: int = 0
    threads: defaultdict[SourceLine, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    end: CycleEnd | None = None

    def add(self, cycle: Observations, new_index: Sequence[int] | None = None) -> None:
        """Add one more cycle, equal warnings once. ``new_index``: by layer its index in the sum; None if the same."""
        # NOT_SELECTED and OUTSIDE are negative indices: they stay the same.
        to = None if new_index is None else [*new_index, NOT_SELECTED, OUTSIDE]
        for (outer, inner), ns in cycle.callers.items():
            self.callers[(to[outer], to[inner]) if to else (outer, inner)] += ns
        self.callable_layers |= {to[layer] if to else layer for layer in cycle.callable_layers}
        self.labels += cycle.labels
        self.warnings = [*dict.fromkeys((*self.warnings, *cycle.warnings))]
        self.unmatched += cycle.unmatched
        self.uncertain += cycle.uncertain
        for line, use in cycle.threads.items():
            self.threads[line] += use

    def copy_labels(self, total: Observations, unobserved_before: Counter[int]) -> None:
        """Copy what the observations of all cycles say of labels; of the calls, those since ``unobserved_before``."""
        self.unobserved = total.unobserved - unobserved_before
        self.unlabelled, self.added, self.removed = total.unlabelled, total.added, total.removed


class Observer(Protocol):
    """One walk over the attributed events of one session: for memory, steps, timeline, devices or lockstep. ``observe``
    reads every event, and passes it on, unchanged and in order. ``assemble`` lists the observers of a run."""

    def observe(self, stream: Iterable[Attributed | OpGroup]) -> Iterator[Attributed | OpGroup]: ...

    def result(self) -> Mapping[str, Any]:
        """Fields of ``Run`` (and ``steps`` of ``Meta``), after the last event. ``|`` joins those of observers."""


# The step that is open where a cycle of a recording ends: the next cycle has the rest of it

_Key = TypeVar("_Key", SampleKey, LockstepKey)
_Value = TypeVar("_Value")


@dataclass(frozen=True)
class OpenStep:
    """The part of a step that was recorded so far.

    ``layers``: those that the keys number. ``samples``: its time by sample; ``work`` that by key of the lockstep.
    ``calls``: of each collective, the time of each call, and how much of that another one was running, too. ``steps``:
    how many whole steps the lockstep has before this one, and ``counts`` how many calls of each collective in them.
    """

    layers: Layers
    samples: Mapping[SampleKey, int] = field(default_factory=dict)
    work: Mapping[LockstepKey, int] = field(default_factory=dict)
    calls: Mapping[LockstepKey, Sequence[tuple[int, int]]] = field(default_factory=dict)
    steps: int = 0
    counts: Mapping[LockstepKey, int] = field(default_factory=dict)

    def on_layers(self, layers: Layers) -> OpenStep:
        """The same with the numbers of these layers, which are matched by path. A layer that is gone is left out: the
        layers above have its time, too."""
        to = [*(layers.index_of.get(layer.path) for layer in self.layers), NOT_SELECTED, OUTSIDE]

        def renumbered(keys: Mapping[_Key, _Value]) -> dict[_Key, _Value]:
            numbers = ((key, to[key.layer], value) for key, value in keys.items())
            return {key._replace(layer=layer): value for key, layer, value in numbers if layer is not None}

        samples, work, calls = renumbered(self.samples), renumbered(self.work), renumbered(self.calls)
        return replace(self, layers=layers, samples=samples, work=work, calls=calls, counts=renumbered(self.counts))


class CycleEnd(NamedTuple):
    """Where a cycle of a recording without gaps ends: the ``loop`` so far, the ``step`` that is open, if any, and the
    ``live`` blocks of memory that were recorded. The default is the start of the recording."""

    loop: Loop = Loop()
    step: OpenStep | None = None
    live: LiveBlocks = MappingProxyType({})


@dataclass(frozen=True)
class Pieces:
    """A cycle of a recording without gaps, cut where steps end, into ``count`` pieces. The first is the rest of the
    step that was open at its start, if ``goes_on``, else of no whole step; the last is open at its end.

    Example: a cycle has the pieces [rest of step 4 | step 5 | begin of step 6]. With the begin of step 4, which the
    cycle before kept, steps 4 and 5 are whole; step 6 is open.
    """

    count: int
    goes_on: bool

    @property
    def whole(self) -> slice:
        """The pieces that are whole steps, once the first has what was recorded of it before."""
        return slice(0 if self.goes_on else 1, max(self.count - 1, 0))

    def cut(
        self, values: Mapping[_Key, Sequence[int]], before: Mapping[_Key, int]
    ) -> tuple[dict[_Key, list[int]], dict[_Key, int]]:
        """Of values for each piece: those of the whole steps (without keys that have none), and that of the last piece.
        ``before``: what was recorded of the first step before."""
        pieces = {key: list(of_pieces) for key, of_pieces in values.items()}
        for key, value in before.items():
            pieces.setdefault(key, [0] * self.count)[0] += value
        of_whole = {key: of_pieces[self.whole] for key, of_pieces in pieces.items()}
        whole = {key: of_steps for key, of_steps in of_whole.items() if any(of_steps)}
        return whole, {key: of_pieces[-1] for key, of_pieces in pieces.items()}

    @property
    def has_open(self) -> bool:
        """Whether the last piece is of a step that has begun."""
        return self.goes_on or self.count > 1


# The CPU time of this process

_SCHEDSTAT = Path("/proc/thread-self/schedstat")


class CpuTime(NamedTuple):
    """``process_ns``: the CPU time of all threads of this process. ``run_delay_ns``: how long ``thread``, the calling
    one, was ready to run without a processor; None if the system does not count it."""

    process_ns: int
    run_delay_ns: int | None
    thread: int

    @classmethod
    def now(cls) -> CpuTime:
        """The times since the start of the process and of the thread."""
        return cls(time.process_time_ns(), _run_delay_ns(), threading.get_ident())

    def since(self, before: CpuTime) -> CpuTime:
        """The difference to an earlier value. The run delay is unknown if that is of another thread."""
        known = self.run_delay_ns is not None and before.run_delay_ns is not None and self.thread == before.thread
        delay = (self.run_delay_ns or 0) - (before.run_delay_ns or 0) if known else None
        return CpuTime(self.process_ns - before.process_ns, delay, self.thread)

    def without_delay_of(self, ns: int) -> CpuTime:
        """The same with a run delay that is shorter by ``ns``, but not negative: a lower bound."""
        delay = None if self.run_delay_ns is None else max(0, self.run_delay_ns - ns)
        return self._replace(run_delay_ns=delay)


def _run_delay_ns() -> int | None:
    """The run delay of this thread. Linux writes, in ns, how long a thread ran and how long it waited on a run queue
    (Documentation/scheduler/sched-stats.rst). Both are 0 if the kernel was built without these statistics."""
    try:
        ran, waited, _ = map(int, _SCHEDSTAT.read_text(encoding="ascii").split())
    except (OSError, ValueError):
        return None
    return waited if ran else None
