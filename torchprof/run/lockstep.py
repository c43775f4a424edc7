"""What ranks do at the same time: work, gaps and collectives, step by step."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import compress
from operator import ge, le
from statistics import median_low
from typing import Any, NamedTuple

from torchprof.run.measures import of_smallest_hash, scrambled
from torchprof.run.part import RunPart, Scale, demand, demand_layer, fields_of, read_as
from torchprof.run.words import FORWARD, OUTSIDE

WORK = "work"
GAP = "gap"
STEP = "step"
EXCHANGES = "exchanges"
NO_LAST_RANK = -1
"""In place of a rank number if several ranks took equally long, so none of them was the last."""


class GroupOfRanks(NamedTuple):
    """A process group: torch's ``name`` of it, its ``description`` ("default_pg", "mesh_tp"), its ``size``, and its
    ``ranks`` as text ("[0, 1]"). None and "" mean unknown."""

    name: str
    description: str = ""
    size: int | None = None
    ranks: str = ""


NOT_RECORDED = GroupOfRanks("")
"""The group of a collective whose group was not recorded, as in traces of torch before 2.2. It may be all ranks of the
job: ``balance_of`` checks that in a merged run."""


class LockstepKey(NamedTuple):
    """Which time of the ranks is compared. ``layer`` is an index, negative for no layer. ``device`` is "cpu" or
    "device": where the time was measured. ``what`` is one of

    - ``WORK``: the work of the layer and all layers below it in a step and this phase, without communication;
    - ``GAP`` (no layer): how long a rank was in no operator and no range, and did not wait for a collective: Python
      code of the training loop, such as loading data;
    - ``STEP`` (no layer): all work of a rank in a step, in layers or not, without communication;
    - ``EXCHANGES`` (no layer): how long any collective of ``group`` was running in a step;
    - the name of a collective ("all_reduce") that the layer called, between the ranks of ``group``. ``group`` is None
      if the rank is in several groups and it is unknown which one it was, ``NOT_RECORDED`` if no groups were recorded.
      The times of a call can then be matched only if it was between all ranks (``balance_of`` checks that).

    Without steps, each cycle counts as one step.
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
        """Whether the single times of every rank are kept, not only those of the last rank."""
        return self.what in (STEP, EXCHANGES)


@dataclass(frozen=True)
class Lockstep:
    """Times of something that several ranks do equally often: the first time of one rank belongs to the first of the
    others, and so on. Two ranks with the work of three steps::

        rank 0: 5, 9, 4     ranks (0, 1), counts (3, 3), ns (18, 14)
        rank 1: 7, 3, 4     last_ns (7, 9, 4), last_rank (1, 0, NO_LAST_RANK)

    For each of ``ranks``, which ascend: how often (``counts``), the sum of the times (``ns``), and during how much of
    that sum a collective that had started earlier was running, too (``beside_ns``).

    At most ``Lockstep.SIZE`` single times are kept, the same ones on every rank: those whose numbers, from 0 on, have
    the smallest hashes. The sum of cycles keeps these, too, if each cycle has them: it kept all its times, or knew how
    many came before. Else each side keeps a share in proportion to its count (``_kept_of_both``). Which ones are kept
    then depends on the order of the additions: cycles are added from left to right.

    - ``times``: the numbers of the times that are kept; ``()`` if all are.
    - ``kept_ns``: for each rank the sum over the times that are kept; ``()`` if that is ``ns``.
    - ``last_rank``: for each kept time the rank that the others waited for, ``NO_LAST_RANK`` if there were several.
    - ``last_ns``: for each kept time how long that rank took. This is the longest work. Of a collective it is the
      shortest time: a collective ends on all ranks together, and the rank that came last did not wait.

    ``last_ns`` and ``last_rank`` are empty if the counts differ or if the group of a collective is unknown: the times
    of different ranks cannot be matched then.

    A single rank is always the last, so ``last_ns`` are its own times (``own_ns``). With several ranks, ``medians`` is
    for each rank the median of the kept times (not for collectives), and ``values`` for each rank the kept times (only
    with ``LockstepKey.keeps_values``); both are ``()`` if unknown.
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
    def of(cls, rank: int, times: Sequence[int], beside_ns: int = 0, first: int = 0) -> Lockstep:
        """The lockstep of one rank, from its times, in ns. ``first``: how many were in earlier cycles."""
        kept = _kept_from(first, len(times), cls.SIZE)
        return cls(
            ranks=(rank,),
            counts=(len(times),),
            ns=(sum(times),),
            beside_ns=(beside_ns,),
            last_ns=tuple(times[number] for number in kept),
            last_rank=(rank,) * len(kept),
            times=kept if len(kept) < len(times) else (),
        )

    @property
    def own_ns(self) -> tuple[int, ...]:
        """The kept times of a single rank; ``()`` if they are unknown, and for several ranks."""
        return self.last_ns if len(self.ranks) == 1 else ()

    def __add__(self, later: Lockstep) -> Lockstep:
        """The sum of earlier and later cycles of one rank. More than ``SIZE`` single times are sampled."""
        (count,), (more,) = self.counts, later.counts
        summed = replace(
            later,
            counts=(count + more,),
            ns=(self.ns[0] + later.ns[0],),
            beside_ns=(self.beside_ns[0] + later.beside_ns[0],),
            medians=(),  # computed from the single times, or unknown
        )
        if not self.own_ns or not later.own_ns:
            return replace(summed, last_ns=(), last_rank=(), times=())
        before, after = self.times or range(count), later.times or range(more)
        ns_by_number = dict(zip(before, self.own_ns))
        ns_by_number.update(zip((count + number for number in after), later.own_ns))
        is_short = count + more <= _MOST_NUMBERS
        if is_short and (self.times, later.times) == (_sampled(0, count, self.SIZE), _sampled(count, more, self.SIZE)):
            kept = _kept(count + more, self.SIZE)  # each side has all of its times that are kept of the sum
        else:
            kept = _kept_of_both(count, self.times, more, later.times, self.SIZE)
        last_ns = tuple(ns_by_number[number] for number in kept)
        times = kept if len(kept) < count + more else ()
        return replace(summed, last_ns=last_ns, last_rank=later.ranks * len(kept), times=times)

    def of_one(self, index: int) -> Lockstep:
        """The part of the rank at ``index``. It has single times only if they are kept for every rank."""
        if len(self.ranks) == 1:
            return self
        own_ns = self.values[index] if self.values else ()
        return Lockstep(
            ranks=(self.ranks[index],),
            counts=(self.counts[index],),
            ns=(self.ns[index],),
            beside_ns=(self.beside_ns[index],),
            last_ns=own_ns,
            last_rank=(self.ranks[index],) * len(own_ns),
            times=self.times if self.values else (),
            medians=() if self.values else self.medians[index : index + 1],
        )

    def of_some(self, ranks: Collection[int]) -> Lockstep:
        """The part of some ranks of the lockstep of all work (``STEP``)."""
        parts = [self.of_one(index) for index, rank in enumerate(self.ranks) if rank in ranks]
        if not parts:
            return NO_LOCKSTEP
        merging = _Merging(LockstepKey(OUTSIDE, FORWARD, "cpu", STEP), parts[0])
        for part in parts[1:]:
            merging.add(part)
        return merging.lockstep({})

    def scaled(self, scale: Scale) -> Lockstep:
        """The lockstep of all passes of one rank, as estimated from some: of the others, no single times are kept."""
        single = tuple(map(scale.single, self.last_ns))
        return replace(
            self,
            counts=tuple(map(scale.number, self.counts)),
            ns=tuple(map(scale.total, self.ns)),
            beside_ns=tuple(map(scale.total, self.beside_ns)),
            last_ns=single,
            times=self.times or tuple(range(len(single))),
            kept_ns=(),
            medians=tuple(map(scale.single, self.medians)),
        )

    def without_times(self) -> Lockstep:
        """The counts, the sums, and for each rank the median of its times; not for a collective, which has none."""
        medians = (median_low(self.own_ns),) if self.own_ns else self.medians
        return replace(self, last_ns=(), last_rank=(), times=(), kept_ns=(), medians=medians, values=())

    @property
    def is_valid(self) -> bool:
        """Whether all parts have the right lengths."""
        ranks, counts, kept = self.ranks, self.counts, len(self.last_ns)
        return (
            len(ranks) == len(counts) == len(self.ns) == len(self.beside_ns) > 0
            and list(ranks) == sorted(set(ranks))
            and (self.is_paired or not (self.last_ns or self.times or self.kept_ns or self.values))
            and kept == len(self.last_rank)
            and set(self.last_rank) <= {*ranks, NO_LAST_RANK}
            and list(self.times) == sorted(set(self.times))
            and all(0 <= number < min(counts) for number in self.times)
            and all(len(each) in (0, len(ranks)) for each in (self.kept_ns, self.medians, self.values))
            and all(len(values) == kept for values in self.values)
        )

    @property
    def is_paired(self) -> bool:
        """Whether the single times of the ranks can be matched with each other."""
        return len(set(self.counts)) == 1 and len(self.last_ns) == len(self.times or range(self.counts[0]))

    def waiting_ns(self, rank: int) -> int | None:
        """How long a rank waited in a collective for the last rank, over all calls; None if unknown. If not all times
        are kept, this is extrapolated from those that are."""
        if not self.is_paired or rank not in self.ranks:
            return None
        index = self.ranks.index(rank)
        if not self.times:
            return self.ns[index] - sum(self.last_ns)
        kept_ns = self.kept_ns or (sum(self.last_ns),)
        return round((kept_ns[index] - sum(self.last_ns)) * self.counts[index] / len(self.times))


NO_LOCKSTEP = Lockstep(ranks=(), counts=(), ns=(), beside_ns=(), last_ns=(), last_rank=())

# Which of the single times are kept, by their numbers

_known: dict[tuple[int, int], tuple[int, ...]] = {}  # the last results of ``_kept``, by count and size
_MOST_KNOWN = 64
_MOST_NUMBERS = 2**22  # of times, up to which their hashes are computed: a second


def _kept(count: int, size: int) -> tuple[int, ...]:
    """The numbers of the times that are kept of ``count`` times: those with the smallest hashes. Every layer has the
    same ones. A long recording asks for larger and larger counts. What is not kept of a smaller count is not kept of a
    larger one either, so its result is enough to begin with."""
    if count <= size:
        return tuple(range(count))
    if (count, size) not in _known:
        before = max((smaller for smaller, of_size in _known if of_size == size and smaller < count), default=0)
        if len(_known) >= _MOST_KNOWN:
            _known.pop(next(iter(_known)), None)
        _known[count, size] = of_smallest_hash((*_known.get((before, size), ()), *range(before, count)), size)
    return _known[count, size]


@lru_cache
def _kept_from(first: int, count: int, size: int) -> tuple[int, ...]:
    """The numbers of the times that are kept of ``count`` times that come after ``first`` others."""
    if not first or count <= size:
        return _kept(count, size)
    return tuple(number - first for number in of_smallest_hash(range(first, first + count), size))


def _sampled(first: int, count: int, size: int) -> tuple[int, ...]:
    """The same in the form of ``Lockstep.times``: empty if all are kept."""
    return _kept_from(first, count, size) if count > size else ()


@lru_cache
def _kept_of_both(count: int, before: tuple[int, ...], more: int, after: tuple[int, ...], size: int) -> tuple[int, ...]:
    """The numbers of the times that are kept of ``count`` times and ``more`` after them. ``before`` and ``after`` are
    the numbers that each side had kept so far, ``()`` for all.

    Each side keeps ``size`` times its share of the whole. The fractional part of that is the probability of one more:
    if it were always rounded the same way, the last of many short cycles would keep too many times, or none. Each
    addition uses another salt, or times that were kept for their small hash would be kept for it again.

    With ``size`` 4, of 8 times of which (0, 2, 5, 7) are kept and of 4 more, all kept: the later ones are a third of
    the whole, so they keep 4/3 times: 1, or 2 with a probability of 1/3. The result may be (0, 5, 7, 9).
    """
    earlier, later = before or range(count), [count + number for number in after or range(more)]
    whole = count + more
    if whole <= size:
        return (*earlier, *later)
    salt = scrambled(whole)
    share, rest = divmod(size * more, whole)
    share += scrambled(salt) % whole < rest
    return of_smallest_hash(earlier, size - share, salt) + of_smallest_hash(later, share, salt)


_Together = Mapping[LockstepKey, Lockstep]
_IF_ANY = ("times", "kept_ns", "medians", "values")
"""The fields of ``Lockstep`` that a file does not have if they are empty."""


class LockstepPart(RunPart[_Together]):
    def of_ranks(self, value: _Together, ranks: Collection[int]) -> dict[int, _Together]:
        parts: dict[int, dict[LockstepKey, Lockstep]] = {rank: {} for rank in ranks}
        for key, lockstep in value.items():
            for index, rank in enumerate(lockstep.ranks):
                if rank in parts:
                    parts[rank][key] = lockstep.of_one(index)
        return {**parts}

    def renumbered(self, value: _Together, to: Sequence[int]) -> _Together:
        return {key._replace(layer=to[key.layer]): lockstep for key, lockstep in value.items()}

    def added(self, before: _Together, cycle: _Together) -> _Together:
        """What one side did not record took 0 in each of its steps."""
        sums = {}
        for key in dict.fromkeys((*before, *cycle)):
            earlier = before.get(key) or _zero_in_each_step(key, before)
            later = cycle.get(key) or _zero_in_each_step(key, cycle)
            sums[key] = earlier + later if earlier and later else earlier or later
        return {key: lockstep for key, lockstep in sums.items() if lockstep is not None}

    def scaled(self, value: _Together, scale: Scale) -> _Together:
        return {key: lockstep.scaled(scale.on(key.device)) for key, lockstep in value.items()}

    def merge(self, so_far: Any, value: _Together) -> Any:
        so_far = {} if so_far is None else so_far
        for key, lockstep in value.items():
            if key in so_far:
                so_far[key].add(lockstep)
            else:
                so_far[key] = _Merging(key, lockstep)
        return so_far

    def merged(self, so_far: Any) -> _Together:
        tuples: dict[Any, Any] = {}
        return {key: merging.lockstep(tuples) for key, merging in so_far.items()}

    def to_json(self, value: _Together) -> Any:
        for key, lockstep in value.items():
            fields = fields_of(lockstep)
            yield {**key._asdict(), **{name: fields[name] for name in fields if fields[name] or name not in _IF_ANY}}

    def from_json(self, stored: Any, layers: int, ranks: Set[int]) -> _Together:
        locksteps = {}
        for entry in stored:
            key = read_as(LockstepKey, [entry.pop(name) for name in LockstepKey._fields])
            locksteps[key] = read_as(Lockstep, entry)
            demand_layer(key, layers)
            demand(locksteps[key].is_valid and ranks >= {*locksteps[key].ranks}, f"the ranks of lockstep {tuple(key)}")
        return locksteps


def _zero_in_each_step(key: LockstepKey, cycles: _Together) -> Lockstep | None:
    """0 for each step of these cycles. None for collectives (counted by calls), and if steps or groups are unknown."""
    steps = cycles.get(LockstepKey(OUTSIDE, FORWARD, "cpu", STEP))  # the device has the same steps
    if steps is None or key.is_collective or key.group == NOT_RECORDED:
        return None
    return replace(steps, ns=(0,), beside_ns=(0,), last_ns=(0,) * len(steps.last_ns), medians=())


class _Merging:
    """The lockstep of the ranks so far, in the order in which they come. ``by_rank``: the fields of ``Lockstep`` that
    have an entry for each rank, by name; None for a field that some rank lacks."""

    __slots__ = ("by_rank", "counts", "first", "is_paired", "key", "last_ns", "last_rank", "ranks", "times")

    def __init__(self, key: LockstepKey, first: Lockstep) -> None:
        self.key = key
        self.first = first
        self.ranks = [*first.ranks]
        self.counts = [*first.counts]
        self.times = first.times
        self.by_rank = self._fields_by_rank(first)
        self.is_paired = first.is_paired
        self.last_ns = [*first.last_ns]
        self.last_rank = [*first.last_rank]

    def add(self, other: Lockstep) -> None:
        self.is_paired &= other.is_paired and self.counts[0] == other.counts[0] and self.times == other.times
        if self.is_paired:
            # in a collective the last rank has the shortest time, else the longest
            is_later = le if self.key.is_collective else ge
            later = map(is_later, other.last_ns, self.last_ns)
            for index in compress(range(len(self.last_ns)), later):  # few times, if there are many ranks
                is_equal = other.last_ns[index] == self.last_ns[index]
                self.last_ns[index] = other.last_ns[index]
                self.last_rank[index] = NO_LAST_RANK if is_equal else other.last_rank[index]
        self.ranks += other.ranks
        self.counts += other.counts
        for name, theirs in self._fields_by_rank(other).items():
            so_far = self.by_rank[name]
            if so_far is None or theirs is None:
                self.by_rank[name] = None
            else:
                so_far += theirs

    def _fields_by_rank(self, lockstep: Lockstep) -> dict[str, list[Any] | None]:
        kept_ns, medians, values = lockstep.kept_ns, lockstep.medians, lockstep.values
        if own_ns := lockstep.own_ns:
            kept_ns, medians, values = (sum(own_ns),), (median_low(own_ns),), (own_ns,)
        return {
            "ns": [*lockstep.ns],
            "beside_ns": [*lockstep.beside_ns],
            "kept_ns": [*kept_ns] if kept_ns and lockstep.times else None,
            "medians": [*medians] if medians and not self.key.is_collective else None,
            "values": [*values] if values and self.key.keeps_values else None,
        }

    def lockstep(self, known: dict[Any, Any]) -> Lockstep:
        """The ``Lockstep`` of all ranks. ``known`` has the tuples made so far: equal tuples are one object."""
        if len(self.ranks) == 1:
            return self.first
        order = sorted(range(len(self.ranks)), key=self.ranks.__getitem__)

        def sorted_by_rank(entries: Sequence[Any] | None) -> tuple[Any, ...]:
            ordered = () if entries is None else tuple(entries[index] for index in order)
            return known.setdefault(ordered, ordered)  # type: ignore[no-any-return]

        merged = Lockstep(
            ranks=sorted_by_rank(self.ranks),
            counts=sorted_by_rank(self.counts),
            last_ns=tuple(self.last_ns),
            last_rank=tuple(self.last_rank),
            times=known.setdefault(self.times, self.times),
            **{name: sorted_by_rank(entries) for name, entries in self.by_rank.items()},
        )
        return merged if self.is_paired else replace(merged, last_ns=(), last_rank=(), times=(), kept_ns=(), values=())
