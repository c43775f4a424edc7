"""Layers added up: all of one class, and all with one pattern of their path, as the same layer of every block."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence, Set
from itertools import zip_longest
from typing import NamedTuple

from torchprof.analyze.figures import Figures, figures_of_layers
from torchprof.run.cost import NO_COST, Cost, sum_of_costs
from torchprof.run.run import Run

UNKNOWN_CLASS = "(unknown)"
_Path = tuple[str, ...]


class Group(NamedTuple):
    """Layers that are shown as one.

    ``name``: the class, or the pattern. ``kind``: the class, ``UNKNOWN_CLASS`` for layers of a trace without a model.
    ``figures``: their sum. Self costs add up; a total counts a layer only if no other of the group is above it.
    ``members``: the figures of each layer by its path, in the order of the model.
    """

    name: str
    kind: str
    figures: Figures
    members: Mapping[_Path, Figures]


def by_class(run: Run) -> list[Group]:
    """A group for each class of layers."""
    groups = _grouped(run, [layer.kind for layer in run.layers])
    return [Group(kind, kind, summed_figures([*members.values()], [*members]), members) for kind, members in groups]


def pattern_of(paths: Sequence[_Path]) -> str:
    """The dotted path that fits all of these, which are equally long: ``*`` for a step in which they differ."""
    return ".".join(steps[0] if len(set(steps)) == 1 else "*" for steps in zip(*paths))


def _grouped(run: Run, keys: Sequence[Hashable]) -> list[tuple[str, dict[_Path, Figures]]]:
    """The class and the members of each group, in the order of the model. ``keys``: of each layer."""
    groups: dict[Hashable, dict[_Path, Figures]] = {}
    for path, figures in figures_of_layers(run, run.phases()).items():
        if figures.total:  # blank for layers that were not selected
            groups.setdefault(keys[run.layers.index_of[path]], {})[path] = figures
    kinds = {layer.path: layer.kind or UNKNOWN_CLASS for layer in run.layers}
    return [(kinds[next(iter(members))], members) for members in groups.values()]


def summed_figures(members: Sequence[Figures], paths: Sequence[_Path] = ()) -> Figures:
    """The figures of several layers together. ``paths``: of each, if one may be above another, whose total holds it.

    A layer that was never called adds nothing; if it may have run as a part of a compiled region, the sum is a lower
    bound.
    """
    called = [figures for figures in members if not figures.unknown]
    outermost = _outermost(members, paths)
    ran = _outermost(called, [path for path, figures in zip(paths, members) if not figures.unknown])
    phases = frozenset(phase for figures in members for phase in figures.total)
    may_have_run = any(figures.unknown and figures.inlined for figures in members)
    calls = [figures.calls for figures in members if figures.calls >= 0]  # 0 of a layer that was never called
    return Figures(
        own=_added(figures.own for figures in called) or dict.fromkeys(phases, NO_COST),
        total=_added(figures.total for figures in ran) or dict.fromkeys(phases, NO_COST),
        calls=sum(calls) if calls else -1,
        params=_sum([figures.params for figures in outermost]),
        own_params=_sum([figures.own_params for figures in members]),
        has_params=any(figures.has_params for figures in members),
        unknown=not called,
        inlined=any(figures.inlined for figures in members),
        incomplete=phases if may_have_run else _union(figures.incomplete for figures in ran),
        incomplete_self=phases if may_have_run else _union(figures.incomplete_self for figures in called),
    )


def _outermost(members: Sequence[Figures], paths: Sequence[_Path]) -> list[Figures]:
    """Without those that have another one above them."""
    known = {*paths}
    nested = [any(path[:steps] in known for steps in range(1, len(path))) for path in paths]
    return [figures for figures, is_nested in zip_longest(members, nested) if not is_nested]


def _sum(numbers: Sequence[int | None]) -> int | None:
    """Unknown if any of them is."""
    known = [number for number in numbers if number is not None]
    return sum(known) if len(known) == len(numbers) else None


def _added(costs: Iterable[Mapping[str, Cost]]) -> dict[str, Cost]:
    by_phase: dict[str, list[Cost]] = {}
    for by_part in costs:
        for phase, cost in by_part.items():
            by_phase.setdefault(phase, []).append(cost)
    return {phase: sum_of_costs(of_phase) for phase, of_phase in by_phase.items()}


def _union(sets: Iterable[Set[str]]) -> Set[str]:
    return frozenset[str]().union(*sets)
