"""The groups of gloo's threads: cases by hand, simulated queues, and torch's flight recorder itself."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from build.events import op
from build.exchanges import exchange
from build.libraries import RELEASE
from torch import distributed as dist

from torchprof.attribute.event_columns import EventColumns
from torchprof.attribute.events import Event
from torchprof.attribute.gloo_queues import Queued, Queues
from torchprof.record.this_process import Job, queued_collectives
from torchprof.run.lockstep import GroupOfRanks

ROW, COLUMN, ALL = (GroupOfRanks(str(number), name, 2) for number, name in enumerate(("row", "column", "all")))
REDUCE, GATHER = "gloo:all_reduce", "gloo:all_gather"
US = 1_000


def queued(*entries: tuple[int, str, GroupOfRanks]) -> list[Queued]:
    return [Queued(at * US, name, group) for at, name, group in entries]


def begun(at: int, thread: int, name: str = REDUCE, until: int | None = None) -> Event:
    return exchange(name, at * US, (at + 100 if until is None else until) * US, thread=thread)


def of_threads(entries: Sequence[Queued], *events: Event) -> dict[int, GroupOfRanks]:
    return Queues(entries).of_threads(EventColumns.of(events))


def test_a_thread_works_for_the_only_group_that_has_such_a_collective_in_its_queue() -> None:
    entries = queued((0, GATHER, COLUMN), (5, REDUCE, ROW), (1000, REDUCE, COLUMN))
    events = [begun(10, 7, GATHER), begun(20, 8), begun(1010, 7)]
    assert of_threads(entries, *events) == {7: COLUMN, 8: ROW}


def test_a_thread_that_is_found_out_later_makes_others_known() -> None:
    """Either thread may have begun either of the first two. The third is of one group, and all others follow."""
    entries = queued((0, REDUCE, ROW), (1, REDUCE, COLUMN), (1000, REDUCE, ROW))
    assert of_threads(entries, begun(100, 7), begun(110, 8)) == {}
    assert of_threads(entries, begun(100, 7), begun(110, 8), begun(1100, 7)) == {7: ROW, 8: COLUMN}


def test_what_began_elsewhere_is_in_no_queue_once_all_are_empty() -> None:
    """Threads 7 and 8 empty both queues. Then thread 9 takes the only one."""
    entries = queued((0, REDUCE, ROW), (1, REDUCE, COLUMN), (1000, REDUCE, ROW))
    assert of_threads(entries, begun(100, 7), begun(110, 8), begun(1100, 9)) == {9: ROW}


def test_a_collective_that_was_in_no_queue_makes_all_unknown() -> None:
    entries = queued((0, REDUCE, ROW), (1000, REDUCE, COLUMN))
    assert of_threads(entries, begun(100, 7), begun(200, 7), begun(1100, 8)) == {}


def test_sends_and_receives_go_through_no_queue() -> None:
    entries = queued((0, REDUCE, ROW))
    assert of_threads(entries, begun(5, 1, "gloo:send"), begun(60, 7)) == {7: ROW}
    assert of_threads([], begun(60, 7)) == of_threads(entries) == {}


def test_what_the_recorder_lost_is_in_a_queue_until_no_collective_runs() -> None:
    """The recorder lost those before 400 us, one of them of a row, which thread 8 begins at 500 us. Between 700 and
    2000 us nothing runs."""
    entries = queued((400, REDUCE, COLUMN), (2000, REDUCE, ROW))
    events = [begun(300, 7), begun(500, 8), begun(600, 7)]
    assert of_threads(entries, *events) == {}
    assert of_threads(entries, *events, begun(2010, 9)) == {9: ROW}


def test_the_group_of_a_request_is_that_of_what_it_put_into_a_queue() -> None:
    queues = Queues(queued((10, REDUCE, ROW), (20, REDUCE, COLUMN)))
    assert queues.group_between(9 * US, 11 * US) == ROW
    assert queues.group_between(15 * US, 30 * US) == COLUMN
    assert queues.group_between(11 * US, 19 * US) is None
    assert queues.group_between(0, 30 * US) is None  # another thread requested one meanwhile


class _Rank:
    """A rank with two threads for each group. ``random``: what it does, and how long each collective takes."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.entries: list[Queued] = []
        self.events: list[Event] = []
        self.group_of: dict[int, GroupOfRanks] = {}
        self._free: dict[GroupOfRanks, dict[int, int]] = {}  # when each thread of a group is free
        for number, group in enumerate((ROW, COLUMN, ALL)):
            threads = range(10 + 2 * number, 12 + 2 * number)
            self._free[group] = dict.fromkeys(threads, 0)
            self.group_of.update(dict.fromkeys(threads, group))

    def exchange(self, now: int) -> int:
        """Put one collective into a queue; returns when it ends."""
        group, name = self.random.choice([*self._free]), self.random.choice([REDUCE, REDUCE, GATHER])
        self.entries.append(Queued(now, name, group))
        free = self._free[group]
        thread = min(free, key=lambda number: (max(free[number], now), self.random.random()))
        start = max(free[thread], now) + self.random.randint(1, 40) * US
        free[thread] = start + self.random.randint(10, 3000) * US
        self.events.append(exchange(name, start, free[thread], thread=thread))
        return free[thread]


@pytest.mark.parametrize(("lost", "known"), [(0, 1), (0.3, 0.9), (0.9, 0.9)])
def test_simulated_queues(lost: float, known: float) -> None:
    """Bursts of collectives in three groups, some waited for. No thread is wrong. If the recorder lost nothing, all are
    known, else most of them."""
    correct = 0
    for seed in range(20):
        rank = _simulated(seed)
        found = of_threads(rank.entries[round(lost * len(rank.entries)) :], *rank.events)
        assert found.items() <= rank.group_of.items()
        correct += len(found)
    assert correct >= known * 20 * len(rank.group_of)


def _simulated(seed: int) -> _Rank:
    rank = _Rank(seed)
    now = 0
    for _ in range(150):
        ends = []
        for _ in range(rank.random.randint(1, 6)):
            now += rank.random.randint(20, 200) * US
            ends.append(rank.exchange(now))
            now = ends.pop() if rank.random.random() < 0.5 else now
        now = max(now, *ends) if ends else now
        now += rank.random.randint(0, 2000) * US
    rank.events.sort(key=lambda event: event.start_ns)
    return rank


# The flight recorder


@pytest.fixture
def world_of_one(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("world_of_one")
@pytest.mark.skipif(RELEASE < (2, 9), reason="the recorder of this torch knows nothing of gloo")
def test_the_flight_recorder_notes_collectives_with_their_groups() -> None:
    world = GroupOfRanks(dist.group.WORLD.group_name, "default_pg", 1)
    job = Job(groups=(world, COLUMN))
    times = [time.time_ns()]
    for reduce in (dist.all_reduce, dist.broadcast):
        reduce(torch.ones(3), **({"src": 0} if reduce is dist.broadcast else {}))
        times.append(time.time_ns())
    noted = queued_collectives(job, times[0])
    assert [(each.name, each.group) for each in noted] == [(REDUCE, world), ("gloo:broadcast", world)]
    assert all(before <= each.time_ns <= after for before, each, after in zip(times, noted, times[1:]))
    assert [each.name for each in queued_collectives(job, times[1])] == ["gloo:broadcast"]
    assert queued_collectives(Job(groups=(COLUMN,)), times[0]) == []  # of another group
    assert queued_collectives(job._replace(group=world), times[0]) == []  # not needed
    assert queued_collectives(job, None) == []


def test_ops_and_kernels_are_no_exchanges() -> None:
    assert of_threads(queued((0, REDUCE, ROW)), op(REDUCE, 10 * US, 20 * US)) == {}
