"""What ``assemble`` works with: one recording, the plan of its layers, the options, and the protocol of observers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from torchprof.attribute.compiled_graphs import CompiledGraphs
from torchprof.attribute.event_columns import EventColumns
from torchprof.attribute.events import Site
from torchprof.attribute.loops import Loop
from torchprof.attribute.op_groups import OpGroup
from torchprof.attribute.places import Attributed
from torchprof.measure.cpu_time import CpuTime
from torchprof.measure.live_memory import NOT_MEASURED, LiveMemory
from torchprof.measure.open_step import CycleEnd
from torchprof.run.layers import Layer
from torchprof.run.lockstep import GroupOfRanks
from torchprof.run.meta import Compilation, CompiledRegion, Meta
from torchprof.run.warnings import RunWarning
from torchprof.run.words import NOT_SELECTED, OUTSIDE, Signature, SourceLine


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


@dataclass
class Observations:
    """Facts of one or more cycles from which warnings are made, and which are not in the run itself."""

    callers: Counter[tuple[int, int]] = field(default_factory=Counter)  # ns of calls by (calling, called layer)
    callable_layers: Set[int] = frozenset()  # as in the plan
    labels: int = 0
    unobserved: Counter[int] = field(default_factory=Counter)  # calls by layer
    unlabelled: set[int] = field(default_factory=set)
    added: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    label_ns: float | None = None
    warnings: list[RunWarning] = field(default_factory=list)  # other warnings; they come first
    nothing: RunWarning | None = None  # why nothing was recorded
    unmatched: int = 0  # collectives without a known caller
    uncertain: int = 0  # buckets of gradients whose layers are unknown
    end: CycleEnd | None = None  # of a single cycle, in a recording without gaps

    def add(self, cycle: Observations, number: Sequence[int] | None = None) -> None:
        """Add the observations of one more cycle, equal warnings once. ``number``: for each of its layers the index in
        the sum; None if it is the same."""
        to = None if number is None else [*number, NOT_SELECTED, OUTSIDE]
        for (outer, inner), ns in cycle.callers.items():
            self.callers[(to[outer], to[inner]) if to else (outer, inner)] += ns
        self.callable_layers |= {to[layer] if to else layer for layer in cycle.callable_layers}
        self.labels += cycle.labels
        self.warnings = [*dict.fromkeys((*self.warnings, *cycle.warnings))]
        self.unmatched += cycle.unmatched
        self.uncertain += cycle.uncertain


class EventSource(Protocol):
    """The source of events: a session of ours, a ``torch.profiler.profile``, or a trace file.

    ``device``: the kind of device whose work was recorded, None for the CPU alone. ``start_ns``: when the recording
    began, on the clock of the events; None if this is unknown. ``signatures``: the inputs of ops, by number.
    ``cpu_time``: the processor time of the process during the recording, None if it is unknown.
    ``called_from(signature, source)``: the number of a signature like the first, with the source lines of the second.
    ``torchs_steps``: the number of events that are ranges of steps of ``torch.profiler.profile``. ``loop``: valid
    after the events were asked for.
    """

    device: str | None
    signatures: list[Signature]

    @property
    def wall_ns(self) -> int: ...

    @property
    def start_ns(self) -> int | None: ...

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
class Recording:
    """One recording: its events, and the state of the process and the model at its start and end.

    ``columns``: makes the events of ``source``, with the inputs that ``wanted_detail`` requests; nothing else keeps
    them. ``layers``: those of the plan, as they were at the end. ``origin``: the process that was recorded.
    ``observations``: those made so far; ``assemble`` adds its own. ``start`` and ``end``: the live memory at these
    times. ``has_steps``: whether the events contain our marks of steps. ``from_first_mark``: whether a step began with
    the recording. ``group``: the group of the collectives that do not name one, see ``sole_group``. ``graphs``: the
    compiled graphs whose layers are known. ``called``: the compiled graphs that were called, by the key in the range
    around each call. ``regions``: all compiled code of the process, and ``compilations`` when it was compiled;
    ``under_compile``: what was to be compiled of the models. ``before``: the end of the cycle right before this one;
    None without one. ``python_samples``: (time, source line, number of sampling intervals) of each sample of Python;
    None if Python was not sampled.

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
    python_samples: Iterable[tuple[int, SourceLine, int]] | None = None
    began_ns: int = 0


class LayerPlan(Protocol):
    """The layers of the models, and the modules that labels stand for. ``Plan`` implements it for live modules.

    ``fqns``: the layers by their names in FSDP. ``replicated``: the layers whose gradients DistributedDataParallel
    exchanges, each with the sizes of the gradients that it ignores; None if this is unknown.
    """

    @property
    def sites(self) -> Mapping[str, Site]: ...

    @property
    def layer_paths(self) -> Sequence[tuple[str, ...]]: ...

    @property
    def selected(self) -> Set[int] | None: ...

    @property
    def selected_paths(self) -> tuple[tuple[str, ...], ...] | None: ...

    @property
    def callable_layers(self) -> Set[int]: ...

    @property
    def fqns(self) -> Mapping[str, Sequence[int]]: ...

    @property
    def replicated(self) -> Mapping[int, Set[int]] | None: ...


class Observer(Protocol):
    """One walk over the attributed events of one session: for memory, steps, timeline, devices or lockstep.

    ``observe`` passes every event on, unchanged and in order, and reads it. ``assemble`` lists the observers of a run.
    """

    def observe(self, stream: Iterable[Attributed | OpGroup]) -> Iterator[Attributed | OpGroup]: ...

    def result(self) -> Mapping[str, Any]:
        """Fields of ``Run`` (and ``steps`` of ``Meta``), after the last event. If several observers have a field, ``|``
        joins what they have."""
