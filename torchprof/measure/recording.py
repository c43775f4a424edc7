"""What measuring needs to know of a recording, live or from a trace file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from torchprof.attribute.events import Site
from torchprof.run.warnings import Caveat
from torchprof.run.words import Signature

if TYPE_CHECKING:
    from torchprof.record.cpu_time import CpuTime


@dataclass(frozen=True)
class Asked:
    """What the figures of a run are to be: ``device`` is the kind that was asked for, None for the CPU alone.
    ``on_cpu``: whether the CPU was recorded, as it is but in traces of devices alone."""

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
class Seen:
    """What was seen beside the figures, and tells how far to believe them. It adds up over cycles."""

    callers: set[tuple[int, int]] = field(default_factory=set)
    labels: int = 0
    unobserved: Counter[str] = field(default_factory=Counter)  # calls by label
    unlabelled: set[str] = field(default_factory=set)
    added: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    label_ns: float | None = None
    notes: list[Caveat] = field(default_factory=list)  # what else there is to say, first of all
    nothing: Caveat | None = None  # why nothing was recorded
    unmatched: int = 0  # collectives of which nobody knows who asked for them
    uncertain: int = 0  # buckets of gradients of which nobody knows whose they are

    def add(self, cycle: Seen) -> None:
        """Add what was seen in one cycle more, and in no other."""
        self.callers |= cycle.callers
        self.labels += cycle.labels
        self.notes += cycle.notes
        self.unmatched += cycle.unmatched
        self.uncertain += cycle.uncertain


class Recorded(Protocol):
    """What is known of all events that were recorded, here or elsewhere.

    ``device`` is the kind of device whose work was recorded, None for the CPU alone; ``start_ns`` when it began, on
    the clock of the events, None where that is not known; ``signatures`` what ops were called on, by their number;
    ``cpu_time``: how much processor time the process had meanwhile, None where that is not known;
    ``called_from`` gives the number of one that is like the first and has the source lines of the second;
    ``torchs_steps``: how many of the events are ranges of steps of ``torch.profiler.profile``.
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


class Planned(Protocol):
    """Which layers there are, and what each label stands for. See ``Plan``, which knows the modules. ``fqns``: the
    layers by the names that FSDP has for them; ``replicated``: those whose gradients DistributedDataParallel exchanges,
    and the sizes of those that it ignores, None where that is not known."""

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
