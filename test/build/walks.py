"""The expected totals of ops and labels, from a walk over a forest of events, without stacks and clocks."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Set
from dataclasses import dataclass
from typing import NamedTuple

from build.forests import Forest, Span

from torchprof.attribute.events import Kind
from torchprof.run.cost import Cost
from torchprof.run.words import BACKWARD, FORWARD, NOT_SELECTED, OUTSIDE, RECOMPUTE


class Spot(NamedTuple):
    """What identifies an ``Op``: where it is, the labels around it there, its kind and its name."""

    layer: int
    phase: str
    labels: tuple[str, ...]
    kind: str
    name: str


ANY = "any phase"


class Where(NamedTuple):
    """A position in a walk over the forest: the layer and phase, the labels, and the op or label directly around it."""

    layer: int = OUTSIDE
    phase: str = FORWARD
    labels: tuple[str, ...] = ()
    inner: tuple[str, str] | None = None
    is_node: bool = False
    open: frozenset[Spot] = frozenset()


@dataclass
class Walked:
    """The results of a walk over the forest, without stacks and clocks."""

    totals: dict[Spot, Cost]
    calls: Counter[Spot]
    lines: Counter[tuple[int, str, str]]


def walked(forest: Forest, selected: Set[int] | None = None) -> Walked:
    """Totals and calls of all ops and labels. Nodes must have no sequence numbers, so they belong to no layer."""
    found = Walked({}, Counter(), Counter())
    costs = costs_of(forest)
    waiting = [(root, Where()) for roots in forest.threads for root in roots]
    while waiting:
        span, at = waiting.pop()
        spot = None
        call = True
        if span.kind is Kind.LABEL:
            layer = int(span.name.split()[1])
            phase = FORWARD if at.phase == FORWARD else RECOMPUTE
            if selected is None or layer in selected:
                at = Where(layer, phase, open=at.open)
            elif at.layer < 0:
                at = Where(NOT_SELECTED, phase, open=at.open)
        elif span.kind is Kind.NODE or (span.kind is Kind.BACKWARD_FUNCTION and not at.is_node):
            spot = Spot(OUTSIDE, BACKWARD, (), "op", span.name)
            at = Where(OUTSIDE, BACKWARD, (), ("op", span.name), True, at.open)
        else:
            kind = "label" if span.kind is Kind.USER_LABEL else "op"
            # A label holds work of any phase: each counts in its own.
            spot = Spot(at.layer, at.phase if kind == "op" else ANY, at.labels, kind, span.name)
            call = span.kind is not Kind.OP or at.inner != (kind, span.name)
            labels = (*at.labels, span.name) if kind == "label" else at.labels
            at = Where(at.layer, at.phase, labels, (kind, span.name), False, at.open)
        if spot is not None:
            found.calls[spot] += call
            if spot not in at.open:
                found.totals[spot] = found.totals.get(spot, Cost()) + costs[id(span)]
            at = at._replace(open=at.open | {spot})
        if at.inner is None or at.inner[0] == "label" or at.phase == FORWARD:
            for line in span.lines_inside:
                found.lines[at.layer, at.phase, line] += 1
        waiting.extend((child, at) for child in span.children)
    return found


def costs_of(forest: Forest) -> dict[int, Cost]:
    """The cost of each span (by ``id``), including everything inside it."""
    numbers = itertools.count(1)
    device = Counter[int]()
    for op, ns in forest.kernels:
        device[op] += ns
    costs: dict[int, Cost] = {}

    def cost_of(span: Span) -> Cost:
        number = next(numbers)
        allocated = sum(nbytes for nbytes in span.bytes_inside if nbytes > 0)
        freed = -sum(nbytes for nbytes in span.bytes_inside if nbytes < 0)
        cost = Cost(sum(span.own), device[number], cpu_allocated=allocated, cpu_freed=freed)
        for child in span.children:
            cost = cost + cost_of(child)
        costs[id(span)] = cost
        assert cost.cpu_ns == span.duration
        return cost

    for roots in forest.threads:
        for root in roots:
            cost_of(root)
    return costs
