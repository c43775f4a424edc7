"""Layers for a trace that has none: its operators are aligned with those of the model's forward. Knows no torch.

The operators that make a model what it is (products, convolutions, norms, pooling, attention, activations) come in
the same order in every forward. Each place of the trace where all of them come in this order is a forward of the model.
The others (views, casts, copies, arithmetic) are aligned between them. Where that leaves a choice, an operator has no
layer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from torchprof.attribute.events import Event, Kind
from torchprof.errors import TorchprofError
from torchprof.run.words import OPTIMIZER_STEP, Signature

UNALIGNED = "torchprof:!unaligned"
"""The label around an operator inside a forward whose layer is not known."""


class LayerCall(NamedTuple):
    """A call of a module: its label, and the how-manyth call of the forward it is."""

    label: str
    number: int


class ReferenceOp(NamedTuple):
    """An operator of the model: its name, the shapes of its inputs, and the calls around it, the outermost first."""

    name: str
    shapes: tuple[tuple[int, ...], ...]
    calls: tuple[LayerCall, ...]


class Reference(NamedTuple):
    """The operators of one forward of a model, in their order."""

    ops: tuple[ReferenceOp, ...]


class _Range(NamedTuple):
    start_ns: int
    end_ns: int


class _TracedOp(NamedTuple):
    """An operator of the trace that is in no other one, and the ranges of users around it.

    ``nodes``: how many autograd nodes came before it: between two forwards of training there are some.
    """

    name: str
    start_ns: int
    end_ns: int
    signature: int
    ranges: tuple[_Range, ...]
    nodes: int


class Alignment(NamedTuple):
    """``labels``: the ranges of the layers, in the order of start, outer ones first. ``forwards``: how many forwards
    were found; ``adjacent``: how many of them follow another one with nothing between. ``known_ns``, ``unknown_ns``:
    the time of the operators in them whose layer is known, and of the others."""

    labels: list[Event]
    forwards: int
    adjacent: int
    known_ns: int
    unknown_ns: int


_CLASSES = {
    name: kind
    for kind, names in {
        "convolution": "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d convolution "
        "_convolution _convolution_mode cudnn_convolution miopen_convolution mkldnn_convolution thnn_conv2d",
        "product": "linear addmm mm matmul bmm baddbmm einsum bilinear",
        "batch norm": "batch_norm _batch_norm_impl_index native_batch_norm cudnn_batch_norm sync_batch_norm",
        "instance norm": "instance_norm",
        "layer norm": "layer_norm native_layer_norm",
        "group norm": "group_norm native_group_norm",
        "rms norm": "rms_norm",
        "embedding": "embedding embedding_bag _embedding_bag",
        "attention": "scaled_dot_product_attention _native_multi_head_attention",
        "encoder layer": "_transformer_encoder_layer_fwd",
        "recurrent": "lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell",
        "max pool": "max_pool1d max_pool2d max_pool3d max_pool2d_with_indices adaptive_max_pool2d",
        "average pool": "avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d",
        "relu": "relu clamp_min",
        "gelu": "gelu",
        "silu": "silu",
        "hardswish": "hardswish",
        "softmax": "softmax _softmax log_softmax",
    }.items()
    for name in names.split()
}
"""The operators that make a model what it is, by their names without ``aten::`` and the ``_`` of in-place ones. Those
of one class may replace each other in another version of torch."""

_PARAMETERS = {
    "convolution": (1,),
    "batch norm": (1,),
    "layer norm": (2,),
    "embedding": (0,),
}
"""The inputs that are parameters, whose shapes do not depend on the batch. ``linear`` is looked at by its name."""


def _class_of(name: str) -> str | None:
    bare = name.removeprefix("aten::").removesuffix("_")
    return _CLASSES.get(bare)


def align(
    events: Iterable[Event], references: Sequence[Sequence[Reference]], signatures: Sequence[Signature]
) -> Alignment:
    """The layers of the operators of a trace. ``references``: for each model, the orders that its forward may have.

    Raises TorchprofError if no forward of a model is found, with the place where trace and model part.
    """
    labels: list[Event] = []
    forwards = adjacent = known = unknown = 0
    by_thread = _operators(events)
    taken: set[tuple[int, int]] = set()  # the operators of the models before: thread and start
    for of_model in references:
        searches = [_Search(one, by_thread, signatures) for one in of_model]
        best = max(searches, key=lambda search: (search.forwards, -search.unknown_ns, search.longest))
        if not best.forwards:
            raise TorchprofError(best.why_not())
        if not taken.isdisjoint(best.operators):
            raise TorchprofError("Several of the models fit the same operators: which of them ran is not in the trace.")
        taken |= best.operators
        labels += best.labels
        adjacent += best.adjacent
        forwards += best.forwards
        known += best.known_ns
        unknown += best.unknown_ns
    labels.sort(key=lambda label: (label.start_ns, -label.end_ns))
    return Alignment(labels, forwards, adjacent, known, unknown)


def with_labels(events: Iterable[Event], labels: Sequence[Event]) -> Iterator[Event]:
    """The events with these labels among them, in the order of start; a label comes before what it contains."""
    waiting, at = labels, 0
    for event in events:
        while at < len(waiting) and (event.kind is Kind.KERNEL or waiting[at].start_ns <= event.start_ns):
            yield waiting[at]
            at += 1
        yield event
    yield from waiting[at:]


def _operators(events: Iterable[Event]) -> dict[int, list[_TracedOp]]:
    """The operators of forwards, by thread, without those inside others, in backward and in optimizers."""
    found: defaultdict[int, list[_TracedOp]] = defaultdict(list)
    until: defaultdict[int, int] = defaultdict(int)  # by thread: the end of an op, or of a range that is no forward
    ranges: defaultdict[int, list[_Range]] = defaultdict(list)
    nodes = 0
    for event in events:
        kind, thread, start = event.kind, event.thread, event.start_ns
        if kind is Kind.KERNEL:
            break
        if kind is Kind.NODE or kind is Kind.BACKWARD_FUNCTION:
            nodes += 1
        if start < until[thread]:
            continue
        if kind is Kind.OP:
            if "::" in event.name:
                open_ranges = ranges[thread]
                while open_ranges and open_ranges[-1].end_ns <= start:
                    open_ranges.pop()
                around = tuple(open_ranges)
                found[thread].append(_TracedOp(event.name, start, event.end_ns, event.signature, around, nodes))
            until[thread] = event.end_ns
        elif kind is Kind.USER_LABEL and not event.name.startswith(OPTIMIZER_STEP):
            open_ranges = ranges[thread]
            while open_ranges and open_ranges[-1].end_ns <= start:
                open_ranges.pop()
            open_ranges.append(_Range(start, event.end_ns))
        elif kind not in (Kind.MEMORY, Kind.STEP, Kind.SAMPLE, Kind.COLLECTIVE):
            until[thread] = event.end_ns
    return dict(found)


class _Search:
    """The forwards of one order of operators in a trace."""

    def __init__(
        self, reference: Reference, by_thread: dict[int, list[_TracedOp]], signatures: Sequence[Signature]
    ) -> None:
        self._ops = reference.ops
        self._signatures = signatures
        self._places = [at for at, op in enumerate(self._ops) if _class_of(op.name)]
        self._classes = [_class_of(self._ops[at].name) for at in self._places]
        self._fallback = _borders(self._classes)
        block = len(self._classes) - (self._fallback[-1] if self._classes else 0)
        self._repeats_blocks = block < len(self._classes) and len(self._classes) % block == 0
        self.labels: list[Event] = []
        self.operators: set[tuple[int, int]] = set()  # thread and start of those in forwards
        self.forwards = self.adjacent = self.known_ns = self.unknown_ns = 0
        self.longest = (0, "")  # how much of the order was found at most, and what came instead
        self._other_shape = ""
        self._is_ambiguous = False
        if self._classes:
            for thread, ops in by_thread.items():
                self._search(thread, ops)

    # Where the forwards are

    def _search(self, thread: int, ops: list[_TracedOp]) -> None:
        places = [at for at, op in enumerate(ops) if _class_of(op.name)]
        classes = [_class_of(ops[at].name) for at in places]
        size = len(self._classes)
        ends = self._ends(classes, [ops[at].name for at in places])
        fitting = [end - size + 1 for end in ends]
        fitting = [
            first for first in fitting if self._has_same_parameters([ops[at] for at in places[first : first + size]])
        ]
        starts = self._apart(fitting, [(ops[at].nodes, ops[at].ranges[:1]) for at in places])
        last = -1  # the last operator of the forward before
        for first in starts:
            matched = places[first : first + size]
            before = max(last, places[first - 1] if first else -1) + 1
            self.adjacent += last >= 0 and self._is_adjacent(ops, last, matched[0])
            after = places[first + size] if first + size < len(places) else len(ops)
            last = self._align(thread, ops, matched, before, after)

    def _ends(self, classes: Sequence[str | None], names: Sequence[str]) -> list[int]:
        """Where the whole order ends, by the search of Knuth, Morris and Pratt: each operator is looked at once."""
        ends, matched = [], 0
        for at, one in enumerate(classes):
            while matched and (matched == len(self._classes) or one != self._classes[matched]):
                if matched > self.longest[0] and matched < len(self._classes):
                    self.longest = matched, names[at]
                matched = self._fallback[matched - 1]
            if one == self._classes[matched]:
                matched += 1
            if matched == len(self._classes):
                ends.append(at)
        if matched > self.longest[0] and matched < len(self._classes):
            self.longest = matched, ""
        return ends

    def _apart(self, starts: list[int], spans: Sequence[tuple[int, tuple[_Range, ...]]]) -> list[int]:
        """The starts of forwards that do not overlap. Where several overlap, which are right is known only if they fill
        the time between two backward passes, or a range of the user such as that of a step (``spans``). If the model
        repeats equal blocks and nothing else, several forwards may be one of a deeper model: then only one may fill
        that time."""
        size = len(self._classes)
        kept: list[int] = []
        at = 0
        while at < len(starts):
            group = [starts[at]]
            while at + len(group) < len(starts) and starts[at + len(group)] < group[-1] + size:
                group.append(starts[at + len(group)])
            if len(group) == 1:
                kept += group
            else:
                kept += self._filling(group, spans)
            at += len(group)
        return kept

    def _is_adjacent(self, ops: list[_TracedOp], last: int, first: int) -> bool:
        """Whether a forward follows the one before at once: no backward, no range of users and no other operator is
        between them. If the model is one of several equal blocks, both may be one forward of a deeper model."""
        before, after = ops[last], ops[first]
        lead = self._places[0]
        return first - last - 1 <= lead and before.nodes == after.nodes and before.ranges == after.ranges

    def _filling(self, group: list[int], spans: Sequence[tuple[int, tuple[_Range, ...]]]) -> list[int]:
        size, known = len(self._classes), set(group)
        found: list[int] = []
        segments: list[list[int]] = []
        for place in range(group[0], group[-1] + size):
            if segments and spans[segments[-1][-1]] == spans[place]:
                segments[-1].append(place)
            else:
                segments.append([place])
        for segment in segments:
            first, last = segment[0], segment[-1]
            begins = first == 0 or spans[first - 1] != spans[first]
            ends = last + 1 == len(spans) or spans[last + 1] != spans[last]
            whole = range(first, last + 1, size)
            is_whole = len(segment) % size == 0 and known.issuperset(whole)
            if begins and ends and is_whole and (len(whole) == 1 or not self._repeats_blocks):
                found += whole
            else:
                self._is_ambiguous = True
        return found

    def _has_same_parameters(self, traced: Sequence[_TracedOp]) -> bool:
        """Whether the parameters have the same shapes, as far as the trace has shapes."""
        for at, op in zip(self._places, traced):
            if not op.signature:
                continue
            ours, theirs = self._ops[at].shapes, self._signatures[op.signature].shapes
            inputs = (1,) if op.name == "aten::linear" else _PARAMETERS.get(_class_of(op.name) or "", ())
            for number in inputs:
                if number < min(len(ours), len(theirs)) and op.name == self._ops[at].name:
                    here, there = tuple(ours[number]), tuple(theirs[number])
                    if here and there and here != there:
                        self._other_shape = self._other_shape or (
                            f"{_layer_of(self._ops[at])} has a parameter of shape {[*here]}, and {op.name} in the "
                            f"trace one of {[*there]}"
                        )
                        return False
        return True

    # One forward

    def _align(self, thread: int, ops: list[_TracedOp], matched: list[int], before: int, after: int) -> int:
        """Note the labels of one forward. ``matched``: the places in the trace of the operators of the order. From
        ``before`` to ``after``: what may belong to the forward. Returns the place of its last operator."""
        pairs: dict[int, int] = {}  # place in the trace → place in the model
        last_traced, last_model = before - 1, -1
        for number, (traced, model) in enumerate(zip(matched, self._places)):
            pairs[traced] = model
            self._between(ops, (last_traced + 1, traced), (last_model + 1, model), pairs, is_first=number == 0)
            last_traced, last_model = traced, model
        self._between(ops, (last_traced + 1, after), (last_model + 1, len(self._ops)), pairs, is_last=True)
        self._label(thread, ops, pairs)
        self.forwards += 1
        return max(pairs)

    def _between(
        self,
        ops: list[_TracedOp],
        traced: tuple[int, int],
        model: tuple[int, int],
        pairs: dict[int, int],
        *,
        is_first: bool = False,
        is_last: bool = False,
    ) -> None:
        """Pair the operators between two that are paired: from both ends as long as their names are equal. At the ends
        of the forward, only from the inner end."""
        first, last = traced
        start, stop = model
        if not is_first:
            while first < last and start < stop and ops[first].name == self._ops[start].name:
                pairs[first] = start
                first, start = first + 1, start + 1
        if not is_last:
            while first < last and start < stop and ops[last - 1].name == self._ops[stop - 1].name:
                last, stop = last - 1, stop - 1
                pairs[last] = stop

    def _label(self, thread: int, ops: list[_TracedOp], pairs: dict[int, int]) -> None:
        """The ranges of the calls, from the first to the last operator of each; and of operators without a layer."""
        spans: dict[LayerCall, tuple[int, int]] = {}
        places = sorted(pairs)
        self.operators.update((thread, ops[place].start_ns) for place in places)
        for place in places:
            for call in self._ops[pairs[place]].calls:
                first, _ = spans.get(call, (place, place))
                spans[call] = first, place
        for call, (first, last) in spans.items():
            start, end = _around_ranges(ops[first], ops[last])
            self.labels.append(Event(Kind.LABEL, call.label, start, end, thread))
        for place, following in pairwise(places):
            self.known_ns += ops[place].end_ns - ops[place].start_ns
            if following == place + 1:
                continue
            one, other = self._ops[pairs[place]].calls, self._ops[pairs[following]].calls
            is_inside = one == other and pairs[following] == pairs[place] + 1
            for between in range(place + 1, following):
                op = ops[between]
                if is_inside:
                    self.known_ns += op.end_ns - op.start_ns
                else:
                    self.unknown_ns += op.end_ns - op.start_ns
                    self.labels.append(Event(Kind.LABEL, UNALIGNED, op.start_ns, op.end_ns, thread))
        self.known_ns += ops[places[-1]].end_ns - ops[places[-1]].start_ns

    # If there is none

    def why_not(self) -> str:
        """Where trace and model part."""
        if not self._classes:
            return "The forward of the model calls no operator by which it could be recognized in a trace."
        if self._is_ambiguous:
            return (
                "The operators of the model are in the trace, but its forward could begin at several of them: they are "
                "alike, and more of them are there than its forwards have."
            )
        if self._other_shape:
            return f"The trace is of another model, or of other sizes: {self._other_shape}."
        length, instead = self.longest
        model = self._ops[self._places[length]] if length < len(self._places) else self._ops[-1]
        if not length:
            return (
                "No forward of the model was found in the trace: its first operator "
                f"({model.name} in {_layer_of(model)}) is nowhere followed by the others."
            )
        last = self._ops[self._places[length - 1]]
        goes_on = f"continues with {instead}" if instead else "ends"
        return (
            f"No forward of the model was found in the trace. They are equal for at most {length} operators, up to "
            f"{_layer_of(last)}: then the trace {goes_on}, and the model has {model.name} in {_layer_of(model)}."
        )


def _borders(classes: Sequence[str | None]) -> list[int]:
    """For each beginning of the order: how much of it is also its end. (Knuth, Morris, Pratt, 1977)"""
    found, length = [0] * len(classes), 0
    for at in range(1, len(classes)):
        while length and classes[at] != classes[length]:
            length = found[length - 1]
        length += classes[at] == classes[length]
        found[at] = length
    return found


def _around_ranges(first: _TracedOp, last: _TracedOp) -> tuple[int, int]:
    """From the start of an operator to the end of another one, with the ranges of users that begin or end between."""
    start, end = first.start_ns, last.end_ns
    for one in first.ranges:
        if one.end_ns < end:
            start = min(start, one.start_ns)
    for one in last.ranges:
        if one.start_ns > start:
            end = max(end, one.end_ns)
    return start, end


def _layer_of(op: ReferenceOp) -> str:
    return f"`{op.calls[-1].label.removeprefix('torchprof:')}`"
