"""All operators inside a range as one: how they are nested, and when they ran.

A model runs the same operators in each call of a layer, and in each layer of a class. What is known of one such range
holds for all of them, so most operators need no event of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple


class OpTree:
    """Which operators a range contains, in the order of start, and how they are nested.

    - ``names``: of the operators.
    - ``parents``: for each operator the index of the one around it; their number for the range itself.
    - ``paths``: the distinct chains of operators, each as the index of the outer path and a name. Path 0 is the range.
    - ``path_of``: for each operator the index of its path. An operator directly inside one of the same name has the
      path of that one: it is part of the same call.
    - ``calls``: how often each path is called in one such range.
    """

    __slots__ = ("calls", "names", "parents", "path_of", "paths")

    def __init__(self, around: str, names: Sequence[str], ends: Sequence[int]) -> None:
        """``around``: the name of the range if it is an operator, else "". ``ends``: for each operator the index of the
        first later one that is not inside it."""
        self.names = names
        self.parents: list[int] = []
        self.paths: list[tuple[int, str]] = [(0, around)]
        self.path_of: list[int] = []
        self.calls = [1]
        numbers: dict[tuple[int, str], int] = {}
        inside = [len(names)]  # the operators around this one, outer to inner; first the range
        for number, (name, end) in enumerate(zip(names, ends)):
            while inside[-1] != len(names) and ends[inside[-1]] <= number:
                inside.pop()
            parent = inside[-1]
            outer = 0 if parent == len(names) else self.path_of[parent]
            path = outer
            if name != self.paths[outer][1]:
                path = numbers.setdefault((outer, name), len(self.paths))
                if path == len(self.paths):
                    self.paths.append((outer, name))
                    self.calls.append(0)
                self.calls[path] += 1
            self.parents.append(parent)
            self.path_of.append(path)
            if end > number + 1:
                inside.append(number)

    def ends_of_parents(self, ends: Sequence[int]) -> Iterable[int]:
        """For each operator the end of the range around it. ``ends``: of the operators, and then of the whole range."""
        return map(ends.__getitem__, self.parents)

    def self_ns(self, durations: Sequence[int]) -> list[int]:
        """The self time of each path, from the time of each operator. That of path 0 is what the operators take from
        the range: it is not positive."""
        found = [0] * len(self.paths)
        paths = [*self.path_of, 0]
        for path, parent, ns in zip(self.path_of, self.parents, durations):
            found[path] += ns
            found[paths[parent]] -= ns
        return found


class InnerOps(NamedTuple):
    """The operators inside one range: ``starts``, ``ends`` in ns, and autograd sequence numbers, in the order of start.

    ``sequences`` is empty if no autograd node was recorded.
    """

    tree: OpTree
    starts: Sequence[int]
    ends: Sequence[int]
    sequences: Sequence[int]
