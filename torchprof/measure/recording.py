"""The inputs of ``assemble``: one recording, live or from a trace file; the plan of a model; the options."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from torchprof.attribute.compiled_graphs import CompiledGraphs
from torchprof.attribute.events import Event, Site
from torchprof.measure.live_memory import NOT_MEASURED, LiveMemory
from torchprof.run.layers import Layer
from torchprof.run.lockstep import GroupOfRanks
from torchprof.run.meta import CompiledRegion, Meta
from torchprof.run.warnings import Caveat
from torchprof.run.words import Signature

if TYPE_CHECKING:
    from torchprof.record.cpu_time import CpuTime


@dataclass(frozen=True)
class Options:
    """What is measured. ``device``: the kind of device that was asked for, None for the CPU alone. ``timed``: whether
    times are measured. ``on_cpu``: whether the CPU was recorded, as always but for traces of devices alone."""

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
        """Whether a field of Cost was asked for. Collectives are in no table of layers: a run without any has 0."""
        if field_of_cost == "collective_ns":
            return False
        if field_of_cost.endswith("_ns"):
            return self.timed and (self.on_cpu or field_of_cost != "cpu_ns")
        if field_of_cost in ("macs", "flops", "uncounted"):
            return self.with_flops
        return self.profile_memory


@dataclass
class Observations:
    """Observations of one or more cycles, from which warnings are made."""

    callers: set[tuple[int, int]] = field(default_factory=set)
    labels: int = 0
    unobserved: Counter[str] = field(default_factory=Counter)  # calls by label
    unlabelled: set[str] = field(default_factory=set)
    added: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    label_ns: float | None = None
    notes: list[Caveat] = field(default_factory=list)  # what else there is to say, first of all
    nothing: Caveat | None = None  # why nothing was recorded
    unmatched: int = 0  # collectives without a known caller
    uncertain: int = 0  # buckets of gradients whose layers are unknown

    def add(self, cycle: Observations) -> None:
        """Add what was seen in one cycle more, and in no other."""
        self.callers |= cycle.callers
        self.labels += cycle.labels
        self.notes += cycle.notes
        self.unmatched += cycle.unmatched
        self.uncertain += cycle.uncertain


class EventSource(Protocol):
    """Where events come from: a profiler session, a recording of torch's, or a trace file.

    ``device``: the kind of device whose work was recorded, None for the CPU alone. ``start_ns``: when it began, on the
    clock of the events, None if that is unknown. ``signatures``: the inputs of ops, by their number. ``cpu_time``: the
    processor time of the process meanwhile, None if that is unknown. ``called_from(signature, source)``: the number of
    a signature like the first, with the source lines of the second. ``torchs_steps``: how many of the events are ranges
    of steps of ``torch.profiler.profile``.
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
    def cpu_time(self) -> CpuTime | None: ...

    def called_from(self, signature: int, source: int) -> int: ...


@dataclass(frozen=True)
class RecordedCycle:
    """One recording: its events, and what was known of the process and the model when it began and ended.

    ``events`` are those of ``source``, with what ``wanted_detail`` says of their inputs. ``layers`` are those of the
    plan, as they were at the end. ``origin``: the process that was recorded. ``seen``: the observations so far;
    ``assemble`` adds its own. ``start`` and ``end``: the memory that was allocated then. ``has_steps``: whether our own
    marks of steps are among the events; ``from_first_mark``: whether a step began with the recording. ``group``: the
    group of the collectives that do not name one, see ``sole_group``. ``graphs``: the compiled graphs that are known;
    ``regions``: all compiled code of the process. ``python_samples``: (time, source line, number of sampling intervals)
    of each sample of Python, None if it was not sampled.

    ``began_ns``: when the recording's first mark was made. That, the samples, and the frees noted in ``start`` are on
    the clock of ``time.perf_counter_ns``, which never jumps; events may be on another.
    """

    source: EventSource
    events: Iterable[Event]
    layers: tuple[Layer, ...]
    origin: Meta
    seen: Observations
    start: LiveMemory = NOT_MEASURED
    end: LiveMemory = NOT_MEASURED
    has_steps: bool = False
    from_first_mark: bool = True
    group: GroupOfRanks | None = None
    graphs: CompiledGraphs | None = None
    regions: Iterable[CompiledRegion] = ()
    python_samples: Iterable[tuple[int, str, int]] | None = None
    began_ns: int = 0


class LayerPlan(Protocol):
    """The layers of the models, and what each label stands for. ``Plan`` implements it for modules.

    ``fqns``: the layers by their names in FSDP. ``replicated``: the layers whose gradients DistributedDataParallel
    exchanges, each with the sizes of the gradients that it ignores; None if that is unknown.
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
