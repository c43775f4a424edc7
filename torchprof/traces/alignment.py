"""Layers for a trace without labels: its operators are aligned with those of the model's forward.

The operators that make a model what it is (products, convolutions, norms, pooling, attention, activations) come in
the same order in every forward: each place of the trace where all of them do is a forward of the model. The others
(views, casts, copies, arithmetic) are aligned between them. Where that leaves a choice, an operator has no layer.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Sequence
from itertools import groupby

from torchprof.attribute.events import Event
from torchprof.errors import TorchprofError
from torchprof.run.torch_names import INSIDE_LAYERS, OF_LAYERS, aten
from torchprof.run.words import Signature
from torchprof.traces import aligned_calls
from torchprof.traces.aligned_calls import AlignedCalls, AlignedForward, ComputedAgain, ReferenceOp, TracedOp, TracedOps

Reference = tuple[ReferenceOp, ...]  # the operators of one forward of a model, in their order

_CLASSES = {name: kind for table in (OF_LAYERS, INSIDE_LAYERS) for kind, names in table.items() for name in names}
"""The operators that make a model what it is, by their names without the ``_`` of in-place ones. Those of one class may
replace each other in another version of torch."""
_PARAMETERS = {"convolution": (1,), "batch norm": (1,), "layer norm": (2,), "embedding": (0,)}
"""The inputs that are parameters, whose shapes do not depend on the batch. ``linear`` is looked at by its name."""

_OF_ATTENTION = frozenset(
    {name for name, kind in _CLASSES.items() if kind in ("attention", "softmax")} | aten("matmul bmm baddbmm einsum")
)
"""The operators that one way to compute attention has, and another has not."""


def _class_of(name: str) -> str | None:
    return _CLASSES.get(name.removesuffix("_"))


def align(
    events: Iterable[Event], references: Sequence[Sequence[Reference]], signatures: Sequence[Signature]
) -> list[AlignedCalls]:
    """The calls of the layers of each model in a trace. ``references``: for each model, the orders of operators that
    its forward may have. Raises TorchprofError if no forward of a model is found."""
    traced = aligned_calls.traced_ops(events)
    of_models: list[AlignedCalls] = []
    taken: set[tuple[int, int]] = set()  # the operators of the models before: thread and start
    for of_model in references:
        calls = _best(of_model, traced, signatures).calls
        if not taken.isdisjoint(calls.operators):
            raise TorchprofError("Several of the models fit the same operators: which of them ran is not in the trace.")
        taken |= calls.operators
        of_models.append(calls)
    return of_models


def _best(references: Sequence[Reference], traced: TracedOps, signatures: Sequence[Signature]) -> _Search:
    """The search that finds most forwards of a model: first with all operators that are compared; if there is none,
    without those of attention, which may be computed in another way."""
    searches = [_Search(reference, traced, signatures) for reference in references]
    if not any(search.calls.forwards for search in searches):
        why_not = max(searches, key=lambda search: search.longest).why_not()
        if not any(search.is_ambiguous or search.other_shape for search in searches):
            searches = [_Search(reference, traced, signatures, replaced=_OF_ATTENTION) for reference in references]
        if not any(search.calls.forwards for search in searches):
            raise TorchprofError(why_not)
    return max(searches, key=lambda search: (search.calls.forwards, -search.calls.unknown_ns.total(), search.longest))


class _Search:
    """The forwards of one order of operators in a trace. ``replaced``: the names of operators that are not compared."""

    def __init__(
        self,
        reference: Reference,
        traced: TracedOps,
        signatures: Sequence[Signature],
        replaced: Collection[str] = frozenset(),
    ) -> None:
        self._ops = reference
        self._signatures = signatures
        self._replaced = replaced
        self._places = self._compared(self._ops)
        self._classes = [_class_of(self._ops[place].name) for place in self._places]
        self._fallback = _borders(self._classes)
        block = len(self._classes) - (self._fallback[-1] if self._classes else 0)
        self._repeats_blocks = block < len(self._classes) and len(self._classes) % block == 0
        self.calls = AlignedCalls(self._ops, replaced)
        self.longest = (0, "")  # how much of the order was found at most, and what came instead
        self.other_shape, self.is_ambiguous = "", False  # why an order that is there was not accepted
        if self._classes:
            forwards = {thread: self._search(thread, on.ops) for thread, on in traced.by_thread.items()}
            for again in traced.again:
                self._add_computed_again(again, traced, forwards.get(again.forward_thread, []))

    def _compared(self, ops: Iterable[TracedOp | ReferenceOp]) -> list[int]:
        return [place for place, op in enumerate(ops) if _class_of(op.name) and op.name not in self._replaced]

    def _search(self, thread: int, ops: list[TracedOp]) -> list[AlignedForward]:
        places = self._compared(ops)
        size = len(self._classes)
        starts = (end - size + 1 for end in self._ends([ops[place].name for place in places]))
        fitting = [
            first
            for first in starts
            if self._has_same_parameters([ops[place] for place in places[first : first + size]])
        ]
        forwards: list[AlignedForward] = []
        for first in self._apart(fitting, [ops[place].span for place in places]):
            matched = places[first : first + size]
            last = forwards[-1].last if forwards else -1
            before = max(last, places[first - 1] if first else -1) + 1
            self.calls.adjacent += last >= 0 and self._is_adjacent(ops, last, matched[0])
            after = places[first + size] if first + size < len(places) else len(ops)
            forwards.append(self.calls.add_forward(thread, ops, matched, self._places, range(before, after)))
        return forwards

    def _add_computed_again(self, again: ComputedAgain, traced: TracedOps, forwards: Sequence[AlignedForward]) -> None:
        on = traced.by_thread.get(again.forward_thread)
        compared = self._compared(again.ops)
        if on is None or not compared:
            return
        maker = on.maker_of(again.sequence)
        number = bisect_right(forwards, maker, key=lambda forward: forward.first) - 1
        if number >= 0 and maker <= forwards[number].last:
            self.calls.add_computed_again(again, compared, on, maker, forwards[number])

    def _ends(self, names: Sequence[str]) -> list[int]:
        """Where the whole order ends, by the search of Knuth, Morris and Pratt: each operator is looked at once. For
        example, the order ``a b a`` ends in ``a b a b a`` at 2 and at 4."""
        ends, matched = [], 0
        for index, kind in enumerate(map(_class_of, names)):
            while matched and (matched == len(self._classes) or kind != self._classes[matched]):
                if matched > self.longest[0] and matched < len(self._classes):
                    self.longest = matched, names[index]
                matched = self._fallback[matched - 1]
            if kind == self._classes[matched]:
                matched += 1
            if matched == len(self._classes):
                ends.append(index)
        if matched > self.longest[0] and matched < len(self._classes):
            self.longest = matched, ""
        return ends

    def _apart(self, starts: list[int], spans: Sequence[aligned_calls.OpSpan]) -> list[int]:
        """The starts of forwards that do not overlap. Where several overlap, which are right is known only if they fill
        the time between two backward passes, a range of the user such as that of a step, or an outermost call of a
        module (``spans``). If the model repeats equal blocks and nothing else, several forwards may be one of a deeper
        model: then only one may fill that time. Of ``a a a a``, ``a a`` fills both halves if backward is between."""
        size = len(self._classes)
        kept: list[int] = []
        start = 0
        while start < len(starts):
            overlapping = [starts[start]]
            while start + len(overlapping) < len(starts) and starts[start + len(overlapping)] < overlapping[-1] + size:
                overlapping.append(starts[start + len(overlapping)])
            kept += overlapping if len(overlapping) == 1 else self._filling(overlapping, spans)
            start += len(overlapping)
        return kept

    def _filling(self, overlapping: list[int], spans: Sequence[aligned_calls.OpSpan]) -> list[int]:
        """The starts of those of overlapping forwards that fill a span. Notes whether some fill none."""
        starts, fill_all = self._filled(overlapping, spans)
        if not fill_all:  # where the layers of a model are called one by one, each is an outermost call
            starts, fill_all = self._filled(overlapping, [(nodes, ranges, None) for nodes, ranges, _ in spans])
        self.is_ambiguous |= not fill_all
        return starts

    def _filled(self, overlapping: list[int], spans: Sequence[aligned_calls.OpSpan]) -> tuple[list[int], bool]:
        """The starts of forwards that fill a span, and whether forwards fill all spans."""
        size, possible = len(self._classes), set(overlapping)
        starts: list[int] = []
        fill_all = True
        for _, of_span in groupby(range(overlapping[0], overlapping[-1] + size), spans.__getitem__):
            ops = [*of_span]
            first, last = ops[0], ops[-1]
            begins = first == 0 or spans[first - 1] != spans[first]
            ends = last + 1 == len(spans) or spans[last + 1] != spans[last]
            forwards = range(first, last + 1, size)
            are_forwards = len(ops) % size == 0 and possible.issuperset(forwards)
            if begins and ends and are_forwards and (len(forwards) == 1 or not self._repeats_blocks):
                starts += forwards
            else:
                fill_all = False
        return starts, fill_all

    def _is_adjacent(self, ops: list[TracedOp], last: int, first: int) -> bool:
        """Whether a forward follows the one before at once: in the same call of a module, and without a backward, a
        range of users and another operator between. Both may be one forward of a deeper model."""
        before, after = ops[last], ops[first]
        lead = self._places[0]
        return first - last - 1 <= lead and (before.span, before.ranges) == (after.span, after.ranges)

    def _has_same_parameters(self, traced: Sequence[TracedOp]) -> bool:
        for place, op in zip(self._places, traced):
            if not op.signature:
                continue
            ours, theirs = self._ops[place].shapes, self._signatures[op.signature].shapes
            inputs = (1,) if op.name == "aten::linear" else _PARAMETERS.get(_class_of(op.name) or "", ())
            for number in inputs:
                if number < min(len(ours), len(theirs)) and op.name == self._ops[place].name:
                    here, there = tuple(ours[number]), tuple(theirs[number])
                    if here and there and here != there:
                        self.other_shape = self.other_shape or (
                            f"`{self._ops[place].layer}` has a parameter of shape {[*here]}, and {op.name} in the "
                            f"trace one of {[*there]}"
                        )
                        return False
        return True

    def why_not(self) -> str:
        if not self._classes:
            return "The forward of the model calls no operator by which it could be recognized in a trace."
        if self.is_ambiguous:
            return (
                "The operators of the model are in the trace, but its forward could begin at several of them: they are "
                "alike, and more of them are there than its forwards have."
            )
        if self.other_shape:
            return f"The trace is of another model, or of other sizes: {self.other_shape}."
        length, instead = self.longest
        model = self._ops[self._places[length]] if length < len(self._places) else self._ops[-1]
        if not length:
            return (
                "No forward of the model was found in the trace: its first operator "
                f"({model.name} in `{model.layer}`) is nowhere followed by the others."
            )
        last = self._ops[self._places[length - 1]]
        goes_on = f"continues with {instead}" if instead else "ends"
        return (
            f"No forward of the model was found in the trace. They are equal for at most {length} operators, up to "
            f"`{last.layer}`: then the trace {goes_on}, and the model has {model.name} in `{model.layer}`."
        )


def _borders(classes: Sequence[str | None]) -> list[int]:
    """For each beginning of the order, how much of it is also its end: for ``a b a c``, 0, 0, 1 and 0."""
    borders, length = [0] * len(classes), 0
    for index in range(1, len(classes)):
        while length and classes[index] != classes[length]:
            length = borders[length - 1]
        length += classes[index] == classes[length]
        borders[index] = length
    return borders
