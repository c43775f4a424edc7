"""Random sessions for Hypothesis: trees of layers, and ranges and operators nested in each other."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

from hypothesis import strategies as st

from torchprof.attribute.events import Event, Kind
from torchprof.run.words import Signature

Paths = tuple[tuple[str, ...], ...]


@st.composite
def layer_trees(draw: st.DrawFn, most: int = 8) -> Paths:
    """The paths of a random model, parents before children, depth first."""
    above = draw(st.lists(st.integers(0, most), max_size=most))
    children: dict[int, list[int]] = {}
    for child, at in enumerate(above, 1):
        children.setdefault(min(at, child - 1), []).append(child)
    paths: list[tuple[str, ...]] = []
    waiting: list[tuple[int, tuple[str, ...]]] = [(0, ("Net",))]
    while waiting:
        number, path = waiting.pop()
        paths.append(path)
        waiting.extend((child, (*path, str(child))) for child in reversed(children.get(number, [])))
    return tuple(paths)


@dataclass
class Span:
    """An event of the forest and what is inside it; ``own`` times lie before, between and after the children."""

    kind: Kind
    name: str
    children: list[Span]
    own: list[int]
    sequence: int = -1
    signature: int = 0
    bytes_inside: list[int] = field(default_factory=list)
    lines_inside: list[str] = field(default_factory=list)  # where Python was seen, at the start

    @property
    def duration(self) -> int:
        return sum(self.own) + sum(child.duration for child in self.children)


KINDS = [Kind.OP, Kind.OP, Kind.LABEL, Kind.LABEL, Kind.USER_LABEL, Kind.NODE, Kind.BACKWARD_FUNCTION]

SIGNATURES = (
    Signature((), ()),
    Signature(((4, 3), (), None), ("float", "Scalar", "TensorList"), (None, 1.5, None)),
    Signature((((2,), (3, 1)), ()), ("TensorList", "ScalarList"), (None, (1, 2)), ("net.py(3): forward", "a.py(1): b")),
)


@st.composite
def spans(draw: st.DrawFn, layers: int, depth: int) -> Span:
    """A random event with random events inside."""
    kind = draw(st.sampled_from(KINDS))
    if kind is Kind.LABEL:
        name = f"label {draw(st.integers(0, layers - 1))}"
    elif kind is Kind.USER_LABEL:
        name = f"user {draw(st.integers(0, 1))}"
    elif kind is Kind.OP:
        name = f"op {draw(st.integers(0, 2))}"
    else:
        name = f"{kind.name} {draw(st.integers(0, 2))}"
    children = draw(st.lists(spans(layers, depth - 1), max_size=3)) if depth else []
    sequence = draw(st.integers(-1, 12)) if kind is not Kind.LABEL and kind is not Kind.USER_LABEL else -1
    signature = draw(st.integers(0, len(SIGNATURES) - 1)) if kind is Kind.OP else 0
    changes = draw(st.lists(st.integers(-64, 64), max_size=2))
    lines = draw(st.lists(st.sampled_from(["net.py(3)", "loss.py(7)"]), max_size=2))
    own = [draw(st.integers(0, 50)) for _ in children]
    own.append(draw(st.integers(1 if children or changes or lines else 0, 50)))  # in no time at all, nothing happens
    return Span(kind, name, children, own, sequence, signature, changes, lines)


@dataclass
class Forest:
    """Everything that one random session recorded."""

    threads: list[list[Span]]
    kernels: list[tuple[int, int]]  # (number of the op that launched it, or of none; duration)

    def events(self) -> list[Event]:
        """As the profiler would give them: in the order of start, an outer one before an inner one; kernels last."""
        found: list[Event] = []
        numbers = itertools.count(1)
        for thread, roots in enumerate(self.threads, 1):
            at = 0
            for root in roots:
                at += 3
                found.extend(self._written(root, at, thread, numbers))
                at += root.duration
        end = max((event.end_ns for event in found), default=0)
        kernels = [
            Event(Kind.KERNEL, f"kernel {number}", end + number, end + number + ns, 0, correlation=op, device="cuda:0")
            for number, (op, ns) in enumerate(self.kernels)
        ]
        return sorted(found, key=lambda event: event.start_ns) + kernels

    def _written(self, span: Span, at: int, thread: int, numbers: Iterator[int]) -> Iterator[Event]:
        end = at + span.duration
        yield Event(
            span.kind,
            span.name,
            at,
            end,
            thread,
            span.sequence,
            1 if span.sequence >= 0 else 0,
            next(numbers),
            "cpu",
            0,
            span.signature,
        )
        for nbytes in span.bytes_inside:
            yield Event(Kind.MEMORY, "[memory]", at, at, thread, nbytes=nbytes)
        for line in span.lines_inside:
            yield Event(Kind.SAMPLE, line, at, at, thread)
        for child, before in zip(span.children, span.own):
            yield from self._written(child, at + before, thread, numbers)
            at += before + child.duration

    def walk(self) -> Iterator[Span]:
        """Every span of every thread."""
        waiting = [root for roots in self.threads for root in roots]
        while waiting:
            span = waiting.pop()
            yield span
            waiting.extend(span.children)


@st.composite
def forests(draw: st.DrawFn, layers: int, depth: int = 4) -> Forest:
    """A random session of a model with so many layers."""
    threads = draw(st.lists(st.lists(spans(layers, depth), max_size=3), min_size=1, max_size=2))
    return Forest(threads, draw(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 500)), max_size=6)))


@st.composite
def sessions(draw: st.DrawFn) -> tuple[Paths, Forest]:
    """A random model and a random session of it."""
    paths = draw(layer_trees())
    return paths, draw(forests(len(paths)))
