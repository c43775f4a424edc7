"""Find the op that created an autograd node."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right

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
        # Sorted columns take a tenth of the memory of dicts: a long recording has millions of numbers.
        self._numbers = array("q")
        self._first: list[Place] = []
        self._last: list[Place] = []

    def add(self, number: int, place: Place) -> None:
        numbers = self._numbers
        if not numbers or number > numbers[-1]:
            index = len(numbers)
        elif number == numbers[-1]:
            self._last[-1] = place
            return
        else:
            index = bisect_left(numbers, number)
            if numbers[index] == number:
                self._last[index] = place
                return
        numbers.insert(index, number)
        self._first.insert(index, place)
        self._last.insert(index, place)

    def find(self, number: int, of_graph: bool = False) -> Place | None:
        """The place of the op that created a node; None if it was not recorded. ``of_graph``: whether the node is that
        of a TorchScript graph."""
        index = bisect_right(self._numbers, number)
        if of_graph:
            return self._first[index] if index < len(self._numbers) else None
        return self._last[index - 1] if index else None
