"""Group-by: the values, or their sums, by key. Keys and values keep the order in which they come."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable
from typing import TypeVar

_Key = TypeVar("_Key", bound=Hashable)
_Value = TypeVar("_Value")
_What = TypeVar("_What", bound=Hashable)


def lists_by_key(pairs: Iterable[tuple[_Key, _Value]]) -> defaultdict[_Key, list[_Value]]:
    """The values of each key, in a list."""
    lists: defaultdict[_Key, list[_Value]] = defaultdict(list)
    for key, value in pairs:
        lists[key].append(value)
    return lists


def sets_by_key(pairs: Iterable[tuple[_Key, _What]]) -> defaultdict[_Key, set[_What]]:
    """The different values of each key."""
    sets: defaultdict[_Key, set[_What]] = defaultdict(set)
    for key, value in pairs:
        sets[key].add(value)
    return sets


def sums_by_key(pairs: Iterable[tuple[_Key, int]]) -> Counter[_Key]:
    """The sum of the values of each key; 0 for other keys."""
    sums: Counter[_Key] = Counter()
    for key, value in pairs:
        sums[key] += value
    return sums
