"""Finds the thread of an autograd node's forward, which the node gives by a number of another kind than thread IDs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from torchprof.traces.columns import Columns

_MANY_ARROWS = 1 << 16


class Arrows:
    """The arrows from operators to the autograd nodes that they made.

    A trace numbers threads in two ways: each event has the number of its thread, and a node has another number for the
    thread of its forward. An arrow starts at an operator on the thread and ends at the node, so it connects the two
    numbers. Only arrows with one end are kept. If they are many, some are enough: a part of them is dropped.
    """

    def __init__(self) -> None:
        self._from: dict[int, int] = {}  # number of an arrow → the thread of the operator
        self._to: dict[int, int] = {}  # number of an arrow → the node's number of its forward thread
        self._votes: Counter[tuple[int, int]] = Counter()  # (node's number, thread) → how many arrows connect them
        self._dropped_bits = 0  # an arrow is dropped if its number has any of these bits

    def wants(self, number: int) -> bool:
        """Whether the arrow of this number is kept."""
        return not number & self._dropped_bits

    def add_start(self, number: int, thread: int) -> None:
        forward = self._to.pop(number, None)
        if forward is not None:
            self._votes[forward, thread] += 1
            return
        self._from[number] = thread
        self._limit(self._from)

    def add_end(self, number: int, forward: int) -> None:
        thread = self._from.pop(number, None)
        if thread is not None:
            self._votes[forward, thread] += 1
            return
        self._to[number] = forward
        self._limit(self._to)

    def _limit(self, grown: Mapping[int, int]) -> None:
        if len(grown) > _MANY_ARROWS:
            self._dropped_bits = self._dropped_bits * 2 + 1
            for arrows in (self._from, self._to):
                for one in [one for one in arrows if one & self._dropped_bits]:
                    del arrows[one]

    def forward_threads(self, lanes: Sequence[tuple[int, int]], cpu: Columns) -> dict[int, int]:
        """The thread for each number of a forward thread.

        ``lanes``: the thread, and the number of the forward thread or 0, by the number of the lane. For a number
        without arrows, it is the thread with most operators that have the sequence numbers of its nodes.
        """
        numbers = {forward for _, forward in lanes if forward}
        votes = Counter(self._votes)
        if unknown := numbers - {forward for forward, _ in votes}:
            wanted: dict[int, set[int]] = {}  # sequence number → numbers of forward threads in nodes that have it
            for lane, sequence in zip(cpu.lane, cpu.sequence):
                if sequence >= 0 and lanes[lane][1] in unknown:
                    wanted.setdefault(sequence, set()).add(lanes[lane][1])
            for lane, sequence in zip(cpu.lane, cpu.sequence):
                if sequence in wanted and not lanes[lane][1]:
                    votes.update((forward, lanes[lane][0]) for forward in wanted[sequence])
        return {forward: thread for (forward, thread), _ in reversed(votes.most_common())}
