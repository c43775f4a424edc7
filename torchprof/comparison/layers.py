"""Matches the layers of two runs: by path, and where paths differ, by content."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Sequence
from operator import or_
from typing import NamedTuple

from torchprof.run.layers import Layers

UNCHANGED, MOVED, RENAMED, ADDED, REMOVED = "same", "moved", "renamed", "added", "removed"
"""How a layer after is related to the layer before."""

_LEVELS = 3  # how items of lists are compared, strictest first: by content; by kind and settings; by kind


class Match(NamedTuple):
    """A layer before and after, by index. ``before`` is None for an added layer, ``after`` for a removed one."""

    before: int | None
    after: int | None
    how: str


def match_layers(before: Layers, after: Layers) -> list[Match]:
    """Every layer of both runs once: the layers after in their order, then the removed layers in theirs.

    docs/compare.md says which layers match. An ambiguous layer is not matched.
    """
    matching = _Matching(before, after)
    matching.by_path()
    matching.by_content()
    return matching.result()


class _LayerTree:
    """The layers of one run, with the size of the subtree of each, whether it has parameters, and its content."""

    def __init__(self, layers: Layers) -> None:
        self.layers = layers
        self.size = layers.roll_up([1] * len(layers))
        self.has_params = layers.roll_up([bool(layer.params) for layer in layers], or_)
        self.content = [0] * len(layers)

    def name(self, index: int) -> str:
        return self.layers[index].path[-1]

    def key(self, index: int, level: int) -> Hashable:
        """What must be equal for a layer to match at a level of ``_LEVELS``."""
        layer = self.layers[index]
        return (self.content[index], (layer.kind, layer.settings), layer.kind)[level]

    def number_contents(self, numbers: dict[Hashable, int], with_settings: bool, with_shapes: bool) -> None:
        """Number the content of each layer; equal contents get equal numbers."""
        for index in range(len(self.layers) - 1, -1, -1):
            layer = self.layers[index]
            key = (
                layer.kind,
                layer.settings if with_settings else "",
                layer.params,
                (layer.input_shapes, layer.output_shapes) if with_shapes else (),
                tuple((self.name(child), self.content[child]) for child in self.layers.children[index]),
            )
            self.content[index] = numbers.setdefault(key, len(numbers))


class _Matching:
    """The matches found so far between the layers before and after."""

    def __init__(self, before: Layers, after: Layers) -> None:
        self.before, self.after = _LayerTree(before), _LayerTree(after)
        self.match_of_new: dict[int, Match] = {}
        self.new_of_old: dict[int, int] = {}
        roots = self._roots()
        numbers: dict[Hashable, int] = {}
        with_settings = all(any(layer.settings for layer in layers) for layers in (before, after))
        with_shapes = all(before[old].input_shapes == after[new].input_shapes for old, new in roots)
        for tree in (self.before, self.after):
            tree.number_contents(numbers, with_settings, with_shapes)
        for old, new in roots:
            self._match(old, new, UNCHANGED)

    def _match(self, old: int, new: int, how: str) -> None:
        self.match_of_new[new], self.new_of_old[old] = Match(old, new, how), new

    def _roots(self) -> list[tuple[int, int]]:
        """The models that match: those with the same name, and the rest in order if the classes are known."""
        pairs = self._same_names(self.before.layers.roots, self.after.layers.roots)
        named_before, named_after = {old for old, _ in pairs}, {new for _, new in pairs}
        old = [index for index in self.before.layers.roots if index not in named_before]
        new = [index for index in self.after.layers.roots if index not in named_after]
        left = [*(self.before.layers[index] for index in old), *(self.after.layers[index] for index in new)]
        return pairs + list(zip(old, new)) if len(old) == len(new) and all(layer.kind for layer in left) else pairs

    def _same_names(self, old: Sequence[int], new: Sequence[int]) -> list[tuple[int, int]]:
        named = {self.after.name(index): index for index in new}
        return [(index, named[name]) for index in old if (name := self.before.name(index)) in named]

    def by_path(self) -> None:
        """Match the children of matched layers, by name or by their place in a list."""
        waiting = list(self.new_of_old.items())
        while waiting:
            above_old, above_new = waiting.pop()
            old, new = self.before.layers.children[above_old], self.after.layers.children[above_new]
            names = [*map(self.before.name, old), *map(self.after.name, new)]
            if all(map(str.isdecimal, names)) and old and new and len(old) != len(new):
                pairs = self._aligned(old, new)
            else:
                pairs = self._same_names(old, new)
            for child, other in pairs:
                self._match(child, other, UNCHANGED if self.before.name(child) == self.after.name(other) else RENAMED)
            waiting += pairs

    def _aligned(self, old: Sequence[int], new: Sequence[int]) -> list[tuple[int, int]]:
        """The matching items of two lists, in the same order on both sides: items with equal content, between these
        items with equal kind and settings, between those items of one kind.

        Example: items with the contents A, B, C, D before and A, X, Y, C, D after. A matches at the start, C and D at
        the end. Between them B matches X if X has its kind and settings, because both are item 1, or Y if only Y has
        them. If neither has, the same by kind.
        """
        pairs = []
        waiting = [(old, new, 0)]
        while waiting:
            old, new, level = waiting.pop()
            keys = [self.before.key(index, level) for index in old], [self.after.key(index, level) for index in new]
            if level:  # similar is not equal: match from the start by name too, and from the end only single candidates
                start = _common([*zip(map(self.before.name, old), keys[0])], [*zip(map(self.after.name, new), keys[1])])
                end = 0
            else:
                start = _common(*keys)
                end = _common(keys[0][start:][::-1], keys[1][start:][::-1])
            stops = len(old) - end, len(new) - end
            pairs += [*zip(old[:start], new[:start]), *zip(old[stops[0] :], new[stops[1] :])]
            in_between = _anchors(keys[0][start : stops[0]], keys[1][start : stops[1]])
            anchors = [(start + position, start + other) for position, other in in_between]
            pairs += [(old[position], new[other]) for position, other in anchors]
            # The gaps between anchors again, at the same level: fewer of their items are ambiguous.
            for (a, b), (c, d) in zip([(start - 1, start - 1), *anchors], [*anchors, stops]):
                if a + 1 < c and b + 1 < d and (anchors or level < _LEVELS - 1):
                    waiting.append((old[a + 1 : c], new[b + 1 : d], level if anchors else level + 1))
        return pairs

    def by_content(self) -> None:
        """Match the largest equal subtrees among the unmatched layers, wherever they are."""
        left: defaultdict[int, tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
        for side, tree, done in ((0, self.before, self.new_of_old), (1, self.after, self.match_of_new)):
            for index, content in enumerate(tree.content):
                if index not in done:
                    left[content][side].append(index)
        groups = [group for group in left.values() if group[0] and group[1]]
        for group in sorted(groups, key=lambda group: -self.before.size[group[0][0]]):
            old = [index for index in group[0] if index not in self.new_of_old]
            new = [index for index in group[1] if index not in self.match_of_new]
            for layer, other in self._unambiguous(old, new):
                above = self.before.layers.parent[layer]
                is_below_the_same = above >= 0 and self.new_of_old.get(above) == self.after.layers.parent[other]
                self._match(layer, other, RENAMED if is_below_the_same else MOVED)
                waiting = [(layer, other)]
                while waiting:  # equal content: the children have the same names in the same order
                    layer, other = waiting.pop()
                    pairs = list(zip(self.before.layers.children[layer], self.after.layers.children[other]))
                    for pair in pairs:
                        self._match(*pair, UNCHANGED)
                    waiting += pairs

    def _unambiguous(self, old: Sequence[int], new: Sequence[int]) -> Iterator[tuple[int, int]]:
        """The pairs of layers with equal content that are unambiguous."""
        if len(old) == len(new) == 1 and self.before.has_params[old[0]]:
            yield old[0], new[0]
            return
        names: dict[Hashable, tuple[list[int], list[int]]] = {}
        parents: dict[Hashable, tuple[list[int], list[int]]] = {}
        for side, tree, items in ((0, self.before, old), (1, self.after, new)):
            for index in items:
                name, above = tree.name(index), tree.layers.parent[index]
                if tree.has_params[index] or not name.isdecimal():
                    names.setdefault(name, ([], []))[side].append(index)
                parent = above if side or above < 0 else self.new_of_old.get(above)
                if parent is not None and above >= 0:
                    parents.setdefault(parent, ([], []))[side].append(index)
        done: set[int] = set()
        for ones, others in (*names.values(), *parents.values()):
            if len(ones) == len(others) == 1 and others[0] not in done and ones[0] not in self.new_of_old:
                done.add(others[0])
                yield ones[0], others[0]

    def result(self) -> list[Match]:
        matches = [self.match_of_new.get(new, Match(None, new, ADDED)) for new in range(len(self.after.layers))]
        removed = [Match(old, None, REMOVED) for old in range(len(self.before.layers)) if old not in self.new_of_old]
        return matches + removed


def _common(old: Sequence[Hashable], new: Sequence[Hashable]) -> int:
    """The length of the common prefix."""
    ends = min(len(old), len(new))
    return next((position for position in range(ends) if old[position] != new[position]), ends)


def _anchors(old: Sequence[Hashable], new: Sequence[Hashable]) -> list[tuple[int, int]]:
    """The positions of keys that occur once on each side: the longest chain that is in order on both.

    Example: A, B, C before and C, A, B after: A (0, 1) and B (1, 2).
    """
    once = [{key for key, count in Counter(side).items() if count == 1} for side in (old, new)]
    positions = {key: position for position, key in enumerate(new)}
    common = [(position, positions[key]) for position, key in enumerate(old) if key in once[0] & once[1]]
    # The longest increasing subsequence of the positions in ``new``, by patience sorting.
    piles: list[int] = []
    tops: list[int] = []
    previous: list[int | None] = []
    for number, (_, position) in enumerate(common):
        pile = bisect_left(tops, position)
        previous.append(piles[pile - 1] if pile else None)
        piles[pile:], tops[pile:] = [number, *piles[pile + 1 :]], [position, *tops[pile + 1 :]]
    chain = []
    last = piles[-1] if piles else None
    while last is not None:
        chain.append(common[last])
        last = previous[last]
    return chain[::-1]
