"""Which kernel of a graph each op is that ran in a call of it, by their names."""

from __future__ import annotations

from collections.abc import Sequence

_LARGEST_TABLE = 4_000_000
"""The largest table for matching kernels with ops, in entries: it takes a second or two."""


def kernels_of(kernels: Sequence[str], ran: Sequence[str]) -> list[int | None]:
    """For each op that ran, the number of its kernel; None if that is unknown."""
    both = set(kernels) & set(ran)
    ours = [index for index, name in enumerate(kernels) if name in both]
    theirs = [index for index, name in enumerate(ran) if name in both]
    pairs = _common_pairs([kernels[index] for index in ours], [ran[index] for index in theirs])
    matches: list[int | None] = [None] * len(ran)
    for index, other in pairs:
        matches[theirs[other]] = ours[index]
    return matches


def _common_pairs(ours: Sequence[str], theirs: Sequence[str]) -> list[tuple[int, int]]:
    """The pairs of equal items that are in all longest common subsequences, as pairs of indices.

    A pair has a rank: the number of pairs before it in any longest subsequence that contains it. Each longest
    subsequence has one pair of every rank. So a pair is in all of them if it is the only one of its rank.
    """
    if ours == theirs:
        return [(index, index) for index in range(len(ours))]
    if len(ours) * len(theirs) > _LARGEST_TABLE:
        return []
    before, after = _lengths(ours, theirs), _lengths(ours[::-1], theirs[::-1])
    longest = before[-1][-1]
    of_rank: dict[int, list[tuple[int, int]]] = {}
    for index, name in enumerate(ours):
        for other, called in enumerate(theirs):
            if name == called and before[index][other] + 1 + after[-index - 2][-other - 2] == longest:
                of_rank.setdefault(before[index][other], []).append((index, other))
    return [pairs[0] for pairs in of_rank.values() if len(pairs) == 1]


def _lengths(ours: Sequence[str], theirs: Sequence[str]) -> list[list[int]]:
    """The lengths of the longest common subsequences of the first m items of one and the first n of the other."""
    table = [[0] * (len(theirs) + 1)]
    for name in ours:
        row, above = [0], table[-1]
        for other, called in enumerate(theirs):
            row.append(above[other] + 1 if name == called else max(above[other + 1], row[other]))
        table.append(row)
    return table
