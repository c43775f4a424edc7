"""``Run``: everything one profiled run knows, frozen, and read by every report. Knows only the standard library."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from heapq import nsmallest
from itertools import groupby
from os import PathLike
from typing import TYPE_CHECKING, Any, NamedTuple

from torchprof.attribute import FORWARD, LAUNCHED_BEFORE, NOT_SELECTED, OUTSIDE, PHASES, RANGES, Frame, Signature
from torchprof.compiled import COMPILING
from torchprof.cost import FIELDS, Cost
from torchprof.errors import TorchprofError, suggest

if TYPE_CHECKING:
    import pandas

OUTSIDE_NAME = "(outside)"
NOT_SELECTED_NAME = "(not selected)"


@dataclass(frozen=True)
class Layer:
    """What a layer is, not what it did.

    ``path``: root class name, then attribute names. ``kind``: class name. ``params``, ``trainable_params`` and
    ``param_bytes`` count the parameters that the layer itself holds (not its children), each at the first layer that
    holds it; None where a lazy layer has not made them yet, or a quantised one has packed them. ``dtype_bytes`` are the
    same bytes by type ("float32"), ``buffers`` and ``buffer_bytes`` the elements and bytes of its buffers. Shapes are
    those of the first forward call: one tuple for each tensor, with -1 for a size that is no number (nested tensors);
    ``()`` where it was not called. ``same_shapes``: of a model, whether all its forward calls had inputs of these
    shapes, None where that is not known, and for the layers below it (see ``torchprof.varying``). ``output_bytes`` is
    how large the tensors are that the first call returned, None where that is not known. ``settings`` are what a layer
    of torch's own says of itself, as ``print(model)`` has it ("3, 64, kernel_size=(7, 7), stride=(2, 2)"); empty for
    classes of others, of which nobody knows what they say.
    A trace that was read without the model tells what ran, not what on: ``kind`` may be empty then, and what the layer
    holds, its buffers and whether it was in ``training`` mode are None.
    ``compiled``: inside a ScriptModule or a module under torch.compile, where it may run without being called.
    ``tied``: it holds parameters that count at another layer. ``recursive``: it was called inside of its own calls, so
    that not each of them is one by itself.
    ``shared_with``: the other paths of the same module. ``ranks``: those that have it, ascending; ``()`` for all that
    are in the run.
    """

    path: tuple[str, ...]
    kind: str
    params: int | None = 0
    trainable_params: int | None = 0
    param_bytes: int | None = 0
    dtype_bytes: tuple[tuple[str, int], ...] = ()
    buffers: int | None = 0
    buffer_bytes: int | None = 0
    input_shapes: tuple[tuple[int, ...], ...] = ()
    output_shapes: tuple[tuple[int, ...], ...] = ()
    same_shapes: bool | None = None
    output_bytes: int | None = None
    training: bool | None = True
    settings: str = ""
    compiled: bool = False
    tied: bool = False
    recursive: bool = False
    shared_with: tuple[tuple[str, ...], ...] = ()
    ranks: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """The path as a dotted string."""
        return ".".join(self.path)


class Peak(NamedTuple):
    """The most that a device was seen to do: ``flops_per_s`` in a product of matrices of this ``dtype`` ("float32"),
    ``bytes_per_s`` read and written in a copy. ``threads`` is 0 for what is not the CPU."""

    device: str
    dtype: str
    threads: int
    flops_per_s: float
    bytes_per_s: float


class MeshDim(NamedTuple):
    """A dimension of the ``DeviceMesh`` that a job's ranks form: its ``name`` ("dp", "tp"), how many ranks it has, and
    at which ``position`` in it, from 0 on, this rank is."""

    name: str
    size: int
    position: int


class CompiledRegion(NamedTuple):
    """Code that torch.compile made: its compile id ``name`` ("0/1": the second version of the first function), and the
    ``function`` that it is of, in ``file`` from ``line`` on. Where torch.compile could go no further, it ends in a
    graph break, at ``break_line``, for ``break_reason`` ("" where that is not known): the rest of the function is a
    region of its own."""

    name: str
    function: str
    file: str
    line: int
    break_line: int | None = None
    break_reason: str = ""


@dataclass(frozen=True)
class Meta:
    """How a run came about; one per rank.

    ``requested`` and ``measured`` name fields of ``Cost``: what was asked for and not measured is shown as unknown.
    ``device`` is the kind of device that was asked for (``cuda``, ``xpu``, ``mps``), None for the CPU alone. ``paths``
    are the selected layers, None for all. ``wall_ns`` is how long it was recorded, in so many ``cycles``, and ``steps``
    how many steps ended in that time. ``process_cpu_ns`` is the CPU time of all threads of the process in that time,
    and ``run_delay_ns`` for how long the thread that began the recording was ready to run and had no processor; None:
    not known. ``busy_ns`` is for each device how long anything ran on it, for the CPU how long any thread that was
    recorded was inside any op or range. ``peaks`` are what ``torchprof.peak`` had measured by then.
    ``warnings`` are sentences for the user. ``environment`` says in words what it ran on, as (name, value),
    ``switches`` how torch's own were set at the end, those that make it faster or slower. ``machine`` and ``script``
    are names that ``save(strip=True)`` leaves out. ``regions``: what is known of the compiled regions that ran, by
    their names in frames of that kind. ``world_size``: how many ranks the job has, this one among them; ``job``: its
    name, where torchrun or Slurm gave it one; ``mesh``: what ranks are for one another, as far as that is known.
    """

    model: tuple[str, ...]
    rank: int = 0
    world_size: int = 1
    job: str = ""
    mesh: tuple[MeshDim, ...] = ()
    device: str | None = None
    requested: tuple[str, ...] = ("cpu_ns",)
    measured: tuple[str, ...] = ("cpu_ns",)
    paths: tuple[tuple[str, ...], ...] | None = None
    wall_ns: int = 0
    cycles: int = 1
    steps: int = 0
    process_cpu_ns: int | None = None
    run_delay_ns: int | None = None
    busy_ns: tuple[tuple[str, int], ...] = ()
    peaks: tuple[Peak, ...] = ()
    warnings: tuple[str, ...] = ()
    versions: tuple[tuple[str, str], ...] = ()
    flags: tuple[tuple[str, bool], ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    switches: tuple[tuple[str, str], ...] = ()
    regions: tuple[CompiledRegion, ...] = ()
    machine: str = ""
    script: str = ""


class Around(NamedTuple):
    """An op or a label that a layer's range is inside of: the ``frames`` down to it, in the layer (by its index,
    negative for none) and the phase it runs in. Nearly all layers are called by a layer itself, not by an op of it."""

    layer: int
    phase: str
    frames: tuple[Frame, ...]


class Row(NamedTuple):
    """One line of the finest table there is: every other table is a group-by over rows.

    ``layer`` is None for work of no layer; ``selected`` is then False where the work belongs to layers that ``paths=``
    did not select. Work that served several layers at once names them in ``shared_by``, and ``layer`` is their nearest
    common ancestor. ``within`` are the ops and labels that the layer's range is inside of, outer to inner. ``frames``
    lead from the layer inward, ``()`` is the layer's own time between ops. ``cost`` is self. The calls of a row whose
    last frame is of kind python are how often Python was seen there.
    """

    layer: Layer | None
    selected: bool
    phase: str
    within: tuple[Around, ...]
    frames: tuple[Frame, ...]
    device: str
    rank: int
    calls: int
    cost: Cost
    shared_by: tuple[Layer, ...] = ()

    @property
    def signature(self) -> Signature | None:
        """What the innermost op was called on, None where that was not recorded."""
        return self.frames[-1].signature if self.frames else None


Way = tuple[tuple[int, ...], int]
"""What the cost of a row counts for, by numbers: the totals of these, and the self of that one (negative: of none)."""

NO_COST = Cost()


@dataclass(frozen=True)
class Rows(Sequence[Row]):
    """The rows as columns of integers; a ``Row`` is a view of one line."""

    layers: tuple[Layer, ...] = field(repr=False)
    frames: tuple[tuple[Frame, ...], ...] = field(repr=False)
    devices: tuple[str, ...]
    columns: Mapping[str, array[int]] = field(repr=False)
    within: tuple[tuple[Around, ...], ...] = field(repr=False, default=((),))
    shared: tuple[tuple[int, ...], ...] = field(repr=False, default=((),))

    COLUMNS = ("layer", "phase", "shared", "within", "frames", "device", "rank", "calls", *FIELDS)

    def __len__(self) -> int:
        return len(self.columns["layer"])

    def __getitem__(self, index: int) -> Row:  # type: ignore[override]
        if isinstance(index, slice):
            raise TypeError("rows have no slices: take list(run.rows)[a:b]")
        layer, phase, shared, within, frames, device, rank, calls, *cost = (
            self.columns[name][index] for name in self.COLUMNS
        )
        return Row(
            self.layers[layer] if layer >= 0 else None,
            layer != NOT_SELECTED,
            PHASES[phase],
            self.within[within],
            self.frames[frames],
            self.devices[device],
            rank,
            calls,
            Cost(*cost),
            tuple(self.layers[number] for number in self.shared[shared]),
        )

    def __iter__(self) -> Iterator[Row]:
        return (self[index] for index in range(len(self)))

    def summed(self, taken: Iterable[tuple[int, Way]], size: int) -> tuple[list[Cost], list[Cost]]:
        """Self and total of so many numbered things: sums over the rows with these indices, each with its way."""
        taken = list(taken)
        nothing = [0] * size
        own: list[list[int]] = []
        totals: list[list[int]] = []
        for name in FIELDS:
            column = self.columns[name]
            if not any(column):
                own.append(nothing)
                totals.append(nothing)
                continue
            selves, sums = [0] * size, [0] * size
            for at, (touched, last) in taken:
                value = column[at]
                if value:
                    for number in touched:
                        sums[number] += value
                    if last >= 0:
                        selves[last] += value
            own.append(selves)
            totals.append(sums)
        costs = [(mine, Cost(*mine) if any(mine) else NO_COST) for mine in zip(*own)]
        return (
            [cost for _, cost in costs],
            [cost if values == mine else Cost(*values) for (mine, cost), values in zip(costs, zip(*totals))],
        )

    @cached_property
    def by_layer(self) -> dict[tuple[int, int], tuple[Cost, int]]:
        """Self cost and calls of each (layer index, phase number), in one pass over the columns.

        What was launched before the recording is in none of them: it is no work of what was recorded.
        """
        own_time = [not frames for frames in self.frames]
        left_over = [*map(is_left_over, self.frames)]
        keys: list[tuple[int, int] | None] = list(zip(self.columns["layer"], self.columns["phase"]))
        if any(left_over):
            keys = [None if left_over[chain] else key for key, chain in zip(keys, self.columns["frames"])]
        calls = dict.fromkeys(keys, 0)
        for key, frames, count in zip(keys, self.columns["frames"], self.columns["calls"]):
            if own_time[frames]:
                calls[key] += count
        sums = {key: [0] * len(FIELDS) for key in calls}
        for number, name in enumerate(FIELDS):
            if any(self.columns[name]):
                for key, value in zip(keys, self.columns[name]):
                    sums[key][number] += value
        return {key: (Cost(*total), calls[key]) for key, total in sums.items() if key is not None}


@dataclass(frozen=True, slots=True)
class Spread:
    """How a measure that does not add up was distributed over the calls.

    ``first`` is the first call's. ``sample`` holds at most ``Spread.SIZE`` values, those of which a hash of the time of
    start, in ``hashes``, is the smallest: so it is the same whatever the order they come in, and in whatever groups.
    It holds all values where there are no more. Both are in the order of the values.
    """

    count: int
    sum: int
    min: int
    max: int
    first: int
    sample: tuple[int, ...]
    hashes: tuple[int, ...]

    SIZE = 256

    @classmethod
    def of(cls, calls: Sequence[tuple[int, int]]) -> Spread:
        """From (start in ns, value), in any order, at least one."""
        values = [value for _, value in calls]
        sample = cls._by_value(nsmallest(cls.SIZE, ((_scrambled(start), value) for start, value in calls)))
        return cls(len(values), sum(values), min(values), max(values), min(calls)[1], *sample)

    def __add__(self, later: Spread) -> Spread:
        """The spread of the calls of both."""
        sample = self.sample, self.hashes
        entering = [*zip(later.hashes, later.sample)]
        if len(self.sample) == self.SIZE:  # in a long loop hardly any value enters the sample
            highest = max(self.hashes)
            entering = [one for one in entering if one[0] <= highest]
        if entering:
            sample = self._by_value(sorted([*zip(self.hashes, self.sample), *entering])[: self.SIZE])
        return Spread(
            self.count + later.count,
            self.sum + later.sum,
            min(self.min, later.min),
            max(self.max, later.max),
            self.first,
            *sample,
        )

    @staticmethod
    def _by_value(chosen: Iterable[tuple[int, int]]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        values = sorted((value, number) for number, value in chosen)
        return tuple(value for value, _ in values), tuple(number for _, number in values)

    def quantile(self, q: float) -> float:
        """The value below which the share ``q`` (0 to 1) of the sample lies, linear between two neighbours."""
        at = q * (len(self.sample) - 1)
        low = math.floor(at)
        high = min(low + 1, len(self.sample) - 1)
        return self.sample[low] + (self.sample[high] - self.sample[low]) * (at - low)

    @property
    def median(self) -> float:
        return self.quantile(0.5)


def _scrambled(number: int) -> int:
    """A hash of 63 bits that is the same in every process: the finaliser of SplitMix64 (Steele et al., 2014)."""
    mask = 2**64 - 1
    number = (number ^ (number >> 30)) * 0xBF58476D1CE4E5B9 & mask
    number = (number ^ (number >> 27)) * 0x94D049BB133111EB & mask
    return (number ^ (number >> 31)) >> 1


class SampleKey(NamedTuple):
    """What a ``Spread`` is of. ``layer`` is an index, negative for what belongs to no layer. ``measure`` is one of

    - ``cpu_ns``: the duration of a forward range, one value a call, its child layers included, and garbage collections
      not;
    - ``peak_bytes``: how far memory rose inside a call, or a stretch of backward, above what there was at its start;
    - ``kept_bytes``: what was allocated directly in a forward call and left for backward (docs/memory.md);
    - ``device_peak_bytes``: the peak of the device, under the layer and phase where it was reached, one value a cycle;
    - ``step_cpu_ns``, ``step_device_ns``: what one step took in the layer and all below it (of no layer: in what
      belongs to none), one value a step;
    - ``step_ns`` (of no layer): how long a step lasted; and outside all layers ``step_data_ns`` for loading data,
      ``step_optimizer_ns`` in the optimizer, ``step_copy_ns`` for copies between host and device, ``step_wait_ns``
      waiting for the device, ``step_gc_ns`` in garbage collections, ``step_other_ns`` in other ops, whatever the phase;
      ``step_gap_ns`` in no op, no layer and no range of torch's; ``step_overlap_ns``: how much of all this several
      threads did at the same time. A step is the sum of its models, of what was not selected, and of these, the overlap
      taken off. On a device (data, optimizer, copy, other): what was launched there. Where ranges of a trace are the
      layers, waiting and copies count inside of them, too, and are in the overlap once more.
    """

    layer: int
    phase: str
    rank: int
    device: str
    measure: str


WORK = "work"
GAP = "gap"
STEP = "step"
EXCHANGES = "exchanges"
NOBODY = -1
"""Where a rank stands: of several ranks that took equally long none was the last."""


class GroupOfRanks(NamedTuple):
    """Ranks that exchange data with each other: torch's ``name`` for their group, what it is for ("default_pg",
    "mesh_tp"), of how many ranks it is, and which, as text ("[0, 1]"). None, and "" of a text: not known."""

    name: str
    description: str = ""
    size: int | None = None
    ranks: str = ""


NOT_RECORDED = GroupOfRanks("")
"""The group of a collective where nothing says which groups there are, as in traces that torch wrote before 2.2. It may
be all ranks of the job; whether their runs agree with that, ``balance_of`` tells of a merged run."""


class LockstepKey(NamedTuple):
    """What ranks do in lockstep. ``layer`` is an index, negative for what belongs to no layer; ``device`` is "cpu" or
    "device": whose time it is. ``what`` is one of

    - ``WORK``: what the layer and all below it did in a step, in this phase, communication left out;
    - ``GAP`` (of no layer): how long a rank was in no operator and in no range, and did not wait for an exchange:
      Python of the loop's own, as for loading data;
    - ``STEP`` (of no layer): all that a rank did in a step, in layers or not, communication left out;
    - ``EXCHANGES`` (of no layer): how long any collective of ``group`` was under way in a step;
    - the name of a collective ("all_reduce") that the layer asked for, between the ranks of ``group``: None where a
      rank is in several and it is not known which of them it was, ``NOT_RECORDED`` where nothing is known of groups.
      Then the times of one call belong together only if it was between all ranks (``balance_of`` looks).

    Without steps all that was recorded is one, in each cycle.
    """

    layer: int
    phase: str
    device: str
    what: str
    group: GroupOfRanks | None = None

    @property
    def is_collective(self) -> bool:
        return self.what not in (WORK, GAP, STEP, EXCHANGES)

    @property
    def keeps_values(self) -> bool:
        """Whether the times of every rank are kept, and not those of the last rank alone."""
        return self.what in (STEP, EXCHANGES)


@dataclass(frozen=True)
class Lockstep:
    """What several ranks do equally often, so that the first time of one is the first time of the others.

    ``ranks``, ascending; for each of them how often (``counts``) and for how long altogether (``ns``), and during how
    much of that an exchange that had begun before was under way, too (``beside_ns``).

    Of the single times at most ``Lockstep.SIZE`` are kept, the same on every rank: those whose number, from 0 on, has
    the smallest hash. Where cycles are added, each side keeps a share in proportion to its count, drawn by a hash of
    numbers and counts alone, so that every time is as likely to be kept as every other. Which ones these are depends on
    the order of the additions: cycles are added from left to right.

    ``times`` are the numbers of those that are kept, ``()`` where all are; ``kept_ns`` is the sum over them for each
    rank, ``()`` where that is ``ns``. ``last_rank`` is for each of them the rank that the others waited for,
    ``NOBODY`` where several took equally long, and ``last_ns`` how long it took: the longest work; of a collective the
    shortest, since it ends for all of them when the last has come, and that one waits for nobody. Both are empty where
    the counts differ, and where it is not known between which ranks a collective was: then nobody knows which time of
    one belongs to which of another.

    Of one rank ``last_ns`` are its own times. Of several, ``medians`` has the median over them for each rank (not for
    collectives), and ``values`` the times themselves, for each rank (only where ``LockstepKey.keeps_values``); both are
    ``()`` where that is not known, as in runs of torchprof 2.6.
    """

    ranks: tuple[int, ...]
    counts: tuple[int, ...]
    ns: tuple[int, ...]
    beside_ns: tuple[int, ...]
    last_ns: tuple[int, ...]
    last_rank: tuple[int, ...]
    times: tuple[int, ...] = ()
    kept_ns: tuple[int, ...] = ()
    medians: tuple[int, ...] = ()
    values: tuple[tuple[int, ...], ...] = ()

    SIZE = 256

    @classmethod
    def of(cls, rank: int, times: Sequence[int], beside_ns: int = 0) -> Lockstep:
        """Of one rank, from how long each time took."""
        kept = _kept(len(times), cls.SIZE)
        last = tuple(times[at] for at in kept)
        numbers = kept if len(kept) < len(times) else ()
        return cls((rank,), (len(times),), (sum(times),), (beside_ns,), last, (rank,) * len(last), numbers)

    def __add__(self, later: Lockstep) -> Lockstep:
        """What one rank did in some cycles, and then in those after. More than ``SIZE`` single times are sampled: see
        the class."""
        (count,), (more,) = self.counts, later.counts
        whole = replace(
            later,
            counts=(count + more,),
            ns=(self.ns[0] + later.ns[0],),
            beside_ns=(self.beside_ns[0] + later.beside_ns[0],),
            medians=(),  # those of the single times, or unknown
        )
        if not self.last_ns or not later.last_ns:
            return replace(whole, last_ns=(), last_rank=(), times=())
        before, after = self.times or range(count), later.times or range(more)
        known = dict(zip((*before, *(count + at for at in after)), (*self.last_ns, *later.last_ns)))
        kept = _kept_of_both(count, self.times, more, later.times, self.SIZE)
        last_ns = tuple(known[at] for at in kept)
        times = kept if len(kept) < count + more else ()
        return replace(whole, last_ns=last_ns, last_rank=later.ranks * len(kept), times=times)

    @property
    def is_paired(self) -> bool:
        """Whether it is known which time of one rank belongs to which of another."""
        return len(set(self.counts)) == 1 and len(self.last_ns) == len(self.times or range(self.counts[0]))

    def waiting_ns(self, rank: int) -> int | None:
        """Of a collective: how long a rank waited in it for the last, altogether; None where that is not known. Where
        not all times are kept, as long as those that are say."""
        if not self.is_paired or rank not in self.ranks:
            return None
        at = self.ranks.index(rank)
        if not self.times:
            return self.ns[at] - sum(self.last_ns)
        kept_ns = self.kept_ns or (sum(self.last_ns),)
        return round((kept_ns[at] - sum(self.last_ns)) * self.counts[at] / len(self.times))


def _of_smallest_hash(numbers: Iterable[int], size: int, salt: int = 0) -> tuple[int, ...]:
    return tuple(sorted(nsmallest(size, numbers, key=lambda number: _scrambled(number ^ salt))))


@lru_cache
def _kept(count: int, size: int) -> tuple[int, ...]:
    """Those that are kept of so many times: the same of every layer."""
    return tuple(range(count)) if count <= size else _of_smallest_hash(range(count), size)


@lru_cache
def _kept_of_both(count: int, before: tuple[int, ...], more: int, after: tuple[int, ...], size: int) -> tuple[int, ...]:
    """Those that are kept of ``count`` times and ``more`` after them, of which only these were kept, ``()`` for all.

    Each side keeps ``size`` times its part of all. What that exceeds a whole number by is how likely one more is:
    rounded the same way each time, of many short cycles the last would have too many times, or none. Each addition has
    a salt of its own: times that were kept for their small hash would otherwise be kept for it again.
    """
    earlier, later = before or range(count), [count + at for at in after or range(more)]
    whole = count + more
    if whole <= size:
        return (*earlier, *later)
    salt = _scrambled(whole)
    share, rest = divmod(size * more, whole)
    share += _scrambled(salt) % whole < rest
    return _of_smallest_hash(earlier, size - share, salt) + _of_smallest_hash(later, share, salt)


class Entered(NamedTuple):
    """How often a collective was asked for, by a layer (by its index, negative for none) in a phase."""

    layer: int
    phase: str
    name: str
    times: int


@dataclass(frozen=True)
class Unfinished:
    """Where a rank was when its recording ended in the middle of a step.

    The step had lasted ``ns`` by then, and for the last ``since_ns`` the rank was in ``layer`` (by its index, negative
    for none), in ``phase``: in the operator ``name``, or between operators (""). ``waits``: in a collective of that
    name, that the layer had asked for. ``entered``: the collectives that the rank asked for in this step,
    in the order in which it first did.
    """

    rank: int
    ns: int
    since_ns: int
    layer: int
    phase: str
    name: str = ""
    waits: bool = False
    entered: tuple[Entered, ...] = ()


class Held(NamedTuple):
    """Bytes that were alive at a peak: so many ``blocks``, allocated for a layer (by its index, negative for none) in a
    phase. ``kind`` is one of ``KINDS``, or "unknown" where torch gave no addresses; that is negative where what was
    there before had been freed."""

    layer: int
    phase: str
    kind: str
    nbytes: int
    blocks: int


KINDS = ("parameters", "gradients", "activations", "optimizer state", "inputs", "temporaries")
"""What memory is held for. Activations: made in forward and kept when the model's call has ended."""


@dataclass(frozen=True)
class Memory:
    """The memory of one device of one rank.

    ``peak_bytes``: by how much it rose above what there was at the start, at most; ``peak_ns``: when that was, after
    the start; ``held``: what of it was alive then, the largest first. ``before``: (kind, bytes) of what the model had
    on this device when the recording began. ``allocator``: (name, bytes at the start, bytes at the end) of what torch's
    own allocator of the device counts.
    """

    device: str
    rank: int = 0
    peak_bytes: int = 0
    peak_ns: int = 0
    held: tuple[Held, ...] = ()
    before: tuple[tuple[str, int], ...] | None = None
    allocator: tuple[tuple[str, int, int], ...] = ()


class StreamTime(NamedTuple):
    """What one stream of a device did: how many ``kernels`` (copies and sets among them), and for how long it ran any,
    and any of a kind. On one stream they hardly ever overlap, but they may."""

    stream: int
    kernels: int
    busy_ns: int
    compute_ns: int
    communication_ns: int
    copy_ns: int


@dataclass(frozen=True)
class DeviceTime:
    """What one device of one rank did with its time, from the start of its first work to the end of its last.

    Each time is that of a union: what runs on several streams at once counts once. ``busy_ns``: anything ran;
    ``communication_ns``: a collective or another transfer between ranks (see ``torchprof.device_times``); ``copy_ns``:
    a copy or a set; ``compute_ns``: anything else. ``overlap_ns`` is how long it communicated and computed at once.
    In a run of several cycles all this is summed, and what lies between two cycles is in none of it.
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
        """How long nothing ran, between the first work and the last."""
        return self.span_ns - self.busy_ns

    @property
    def exposed_ns(self) -> int:
        """How long it communicated while it computed nothing: what more overlap could save, at most."""
        return self.communication_ns - self.overlap_ns

    @property
    def copy_alone_ns(self) -> int:
        """How long it copied, and neither computed nor communicated."""
        return self.busy_ns - self.compute_ns - self.exposed_ns


class Lane(NamedTuple):
    """Where one thing runs at a time, with what it calls inside of it: a thread (``device`` is "cpu"); or a ``stream``
    of a device, which has as many lanes as it ran kernels at once. ``number`` counts the threads, or the lanes of one
    stream, from 1 on. ``stream`` is None for a thread, on a device that used one stream alone, and in a run of
    torchprof 2.3, which told none apart."""

    device: str
    number: int
    stream: int | None = None


@dataclass(frozen=True)
class Spans:
    """What ran when, in the last cycle, as columns: on each lane, of two spans one is inside the other, or they lie
    apart. The outer one comes first; kernels come last.

    ``start_ns`` and ``end_ns`` are after the start; ``lane`` is a number in ``lanes``, ``layer`` in the run's layers
    (negative: none), ``phase`` in ``PHASES``, and ``name`` in ``names``: of a label, on a device of a kernel. It is -1
    where the span is the layer's: a call, in backward an unbroken stretch of work of the layer and those below it (see
    ``torchprof.spans``). ``steps`` are the times when steps began, and last when the last one ended; empty where none
    did. ``dropped``: how many came after the first ``Spans.LIMIT`` and are not here.
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


@dataclass(frozen=True)
class Timeline:
    """The last cycle over time: every allocation and free, in their order, as columns, and the ``spans`` of what ran.

    ``time_ns`` after the start, signed ``nbytes``, and numbers in ``devices``, in the run's layers (negative: none), in
    ``PHASES`` and in ``KINDS`` (-1: not known). ``dropped``: how many came after the first ``Timeline.LIMIT`` and are
    not here. Without ``profile_memory`` there are none, and the length, which counts them, is 0. ``spans`` is None in a
    run of torchprof 2.2. ``rank``: whose time it is; a run of several ranks has the timeline of one.
    """

    devices: tuple[str, ...]
    columns: Mapping[str, array[int]] = field(repr=False)
    dropped: int = 0
    spans: Spans | None = None
    rank: int = 0

    COLUMNS = ("time_ns", "nbytes", "device", "layer", "phase", "kind")
    LIMIT = 1_000_000

    def __len__(self) -> int:
        return len(self.columns["time_ns"])


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


BETWEEN_OPS = "(between ops)"


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
        from torchprof.merging import of_ranks

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
        from torchprof.reports import render

        return render(name, self, options)

    def _repr_html_(self) -> str:
        """What a notebook shows of a run."""
        return self.report("notebook")

    def show(self, *, height: int = 640) -> None:
        """Show the page that ``export("report.html")`` writes, in a notebook, in a frame so many pixels high.

        Needs IPython, which every notebook has. Raises TorchprofError where there is none, and outside of notebooks.
        """
        from torchprof.reports.notebook import show_page

        show_page(self.report("html"), height)

    def export(self, path: str | PathLike[str], **options: Any) -> None:
        """Write a report into a file, chosen by how its name ends: ``run.export("report.html")``. See docs/exports.md.

        ``options`` are the report's; a name that ends in ``.gz`` besides is gzipped. Raises TorchprofError for a name
        that ends otherwise and for an unknown option, OSError as ``open`` does.
        """
        from torchprof.reports import export

        export(path, self, options)

    def to_dataframe(self, of: str = "layers") -> pandas.DataFrame:
        """The run as a pandas ``DataFrame``, a record for each of its "layers", its "operators" or its "rows".

        The columns are those of docs/exports.md; what is not known is ``pandas.NA``. Raises TorchprofError for other
        records, and where pandas is not installed.
        """
        from torchprof.dataframe import dataframe

        return dataframe(self, of)

    def save(self, path: str | PathLike[str], *, strip: bool = False) -> None:
        """Write the run as JSON (see docs/run-file.md), gzipped where the name ends in ``.gz``.

        The file holds names of layers, ops and the machine, shapes and figures; no tensor data and no source.
        ``strip=True`` leaves the names of files and machines out. Raises OSError as ``open`` does.
        """
        from torchprof.run_file import write

        write(self, path, strip=strip)


def _names(frames: Sequence[Frame]) -> list[tuple[str, str]]:
    """Kind and name of each op and label; a kernel counts for what launched it."""
    return [(frame.kind, frame.name) for frame in frames if frame.kind != "kernel"]


def is_left_over(frames: Sequence[Frame]) -> bool:
    """Whether a row with these frames is work of a device that was launched before the recording began."""
    return bool(frames) and frames[0].name == LAUNCHED_BEFORE and frames[0].kind == "label"


def range_in_words(kind: str, name: str) -> str:
    """What a range is called in tables: what the user said, or what torch.compile made. An op as it is."""
    if kind == "label":
        return f"{name} (label)"
    if kind not in RANGES:
        return name
    return f"(region {name})" if kind == "region" and name != COMPILING else f"({name})"


def ranks_in_words(ranks: Iterable[int]) -> str:
    """As in "rank 2", "ranks 2 and 5" and "ranks 0 to 3, 5 and 7"."""
    ranks = sorted(set(ranks))
    words: list[str] = []
    for _, group in groupby(enumerate(ranks), lambda numbered: numbered[1] - numbered[0]):
        row = [rank for _, rank in group]
        words += [f"{row[0]} to {row[-1]}"] if len(row) > 2 else map(str, row)
    listed = ", ".join(words[:-1]) + " and " + words[-1] if len(words) > 1 else "".join(words)
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {listed}"


def number_of_phase(phase: str) -> int:
    """Its index in ``PHASES``. Raises TorchprofError for what is no phase."""
    if phase not in PHASES:
        raise TorchprofError(f"There is no phase {phase!r}. {suggest(str(phase), PHASES)}")
    return PHASES.index(phase)
