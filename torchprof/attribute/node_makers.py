"""Find the op that created an autograd node."""

from __future__ import annotations

from bisect import bisect_right, insort

from torchprof.attribute.places import Place


class NodeMakers:
    """The places of the ops that created the autograd nodes of one forward thread, by sequence number.

    - Several ops can have the same number: the one that started last created the node.
    - An in-place write to a view gives its node a number that no op has. So the op with the largest number that is at
      most the number of the node created it.
    - TorchScript numbers the node of a whole graph before it runs the ops of the graph. For such a node it is the first
      op with a larger number.
    """

    def __init__(self) -> None:
        self._numbers: list[int] = []
        self._first: dict[int, Place] = {}  # only if it differs from the last
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
        """The place of the op that created a node; None if it was not recorded. ``of_graph``: whether the node is that
        of a TorchScript graph."""
        at = bisect_right(self._numbers, number)
        if of_graph:
            if at == len(self._numbers):
                return None
            above = self._numbers[at]
            return self._first.get(above) or self._last[above]
        return self._last[self._numbers[at - 1]] if at else None
