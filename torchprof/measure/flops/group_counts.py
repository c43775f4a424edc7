"""The counts of groups of ops: equal groups have equal counts, which are found once and multiplied."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Set

from torchprof.attribute.op_groups import OpGroup, OpTree
from torchprof.attribute.places import Place
from torchprof.measure.flops.graph_calls import Count

_Kind = tuple[OpTree, bytes]


class GroupCounts:
    """``known_places``: the indices of places of groups whose work is known, where there may be kernels in them."""

    def __init__(self) -> None:
        self.known_places: set[int] = set()
        self._counts: dict[_Kind, Mapping[int, Count]] = {}  # by path
        self._known: dict[_Kind, list[int]] = {}  # the paths whose work is known
        self._times: Counter[tuple[Place, _Kind]] = Counter()  # how many groups, by the place around them
        self._places: dict[tuple[Place, OpTree], list[Place]] = {}  # the place of each path

    def has(self, group: OpGroup) -> bool:
        """Whether the counts of such groups are known."""
        return _kind(group) in self._counts

    def learn(self, group: OpGroup, counts: Mapping[int, Count], known: Set[int]) -> None:
        """The counts of such groups: those of this one, by index of a place. ``known``: places whose work is known."""
        paths = {place.index: path for path, place in enumerate(group.places())}
        self._counts[_kind(group)] = {paths[index]: count for index, count in counts.items()}
        self._known[_kind(group)] = [path for index, path in paths.items() if index in known]

    def add(self, group: OpGroup) -> None:
        """Count a group."""
        kind = _kind(group)
        self._times[group.place, kind] += 1
        if group.columns.correlation and self._times[group.place, kind] == 1:  # there may be kernels
            places = self._places[group.place, group.tree] = group.places()
            self.known_places.update(places[path].index for path in self._known[kind])

    def sums(self) -> dict[tuple[Place, OpTree], dict[int, Count]]:
        """By the place around groups and their tree: the sums of all of them, by path."""
        sums: dict[tuple[Place, OpTree], dict[int, Count]] = {}
        for (place, kind), times in self._times.items():
            of_tree = sums.setdefault((place, kind[0]), {})
            for path, count in self._counts[kind].items():
                before = of_tree.get(path, (0, 0, 0))
                of_tree[path] = Count(*(known + times * other for known, other in zip(before, count)))
        return sums

    def uncounted_places(self) -> Iterator[int]:
        """The indices of places of groups with uncounted work, where there may be kernels in them."""
        for (place, kind), _ in self._times.items():
            places = self._places.get((place, kind[0]))
            for path, count in self._counts[kind].items():
                if places is not None and count.uncounted:
                    yield places[path].index


def _kind(group: OpGroup) -> _Kind:
    """What makes the counts of groups equal. A function of the user's counts only if it may have a backward: others
    without a namespace are not operators."""
    sequences, first, functions = group.columns.sequence, group.first, group.tree.functions
    if not functions or sequences is None:
        return group.tree, b""
    return group.tree, bytes(sequences[first + index] >= 0 for index in functions)
