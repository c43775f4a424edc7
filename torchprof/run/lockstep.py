"""What ranks do at the same time: work, gaps and collectives, step by step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby
from typing import NamedTuple

from torchprof.run.samples import of_smallest_hash, scrambled
from torchprof.run.words import COMPILING, RANGES

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
    shortest, since it ends for all of them when the last has come, and that one does not wait. Both are empty if
    the counts differ, or if the group of a collective is unknown: then it is unknown which time of one rank belongs
    to which of another.

    Of one rank ``last_ns`` are its own times. Of several, ``medians`` has the median over them for each rank (not for
    collectives), and ``values`` the times themselves, for each rank (only where ``LockstepKey.keeps_values``); both are
    ``()`` if that is unknown.
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


@lru_cache
def _kept(count: int, size: int) -> tuple[int, ...]:
    """Those that are kept of so many times: the same of every layer."""
    return tuple(range(count)) if count <= size else of_smallest_hash(range(count), size)


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
    salt = scrambled(whole)
    share, rest = divmod(size * more, whole)
    share += scrambled(salt) % whole < rest
    return of_smallest_hash(earlier, size - share, salt) + of_smallest_hash(later, share, salt)


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
