"""Which op created an autograd node."""

from __future__ import annotations

from bisect import bisect_right, insort

from torchprof.attribute.places import Place


class NodeMakers:
    """The places of the ops that made the autograd nodes of one forward thread, by sequence number.

    Several ops can have one number: the one that started last made the node. An in-place write to a view gives a node a
    number that no op has, so the maker is the last op at or below the number. TorchScript numbers the node of a whole
    graph before it runs the graph's ops: there the maker is the first op above the number.
    """

    def __init__(self) -> None:
        self._numbers: list[int] = []
        self._first: dict[int, Place] = {}  # if it is not the same place as the last
        self._last: dict[int, Place] = {}

    def add(self, number: int, place: Place) -> None:
        before = self._last.get(number)
        if before is None:
            if not self._numbers or number > self._numbers[-1]:
                self._numbers.append(number)
            else:
                insort(self._numbers, number)
        elif before is not place:
            self._first.setdefault(number, before)
        self._last[number] = place

    def find(self, number: int, of_graph: bool = False) -> Place | None:
        """The place of the maker of a node, None if it was not recorded. ``of_graph``: a node of TorchScript."""
        at = bisect_right(self._numbers, number)
        if of_graph:
            if at == len(self._numbers):
                return None
            above = self._numbers[at]
            return self._first.get(above) or self._last[above]
        return self._last[self._numbers[at - 1]] if at else None
