"""For ``alignment``: the operators of a trace without labels, and the calls of layers among them, once it is known
where the forwards of the model are."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from torchprof.attribute.event_names import STOPPED
from torchprof.attribute.events import PREFIX, Event, Kind, OpenRanges
from torchprof.run.words import FSDP_RANGE, OPTIMIZER_STEP, is_runtime_call

# The operators of forwards, and those that backward computes again

_NO_FORWARD = (OPTIMIZER_STEP, FSDP_RANGE)
"""The beginnings of the names of ranges that contain nothing of a forward."""
OpSpan = tuple[int, tuple[Event, ...], int | None]  # ``nodes``, outermost of ``ranges`` and ``call`` of a ``TracedOp``


@dataclass(slots=True)
class TracedOp:
    """An operator of the trace that is in no other one, or a function of autograd in Python. ``own_ns``: its time,
    without that of operators inside a function of autograd. ``ranges``: those of users around it. ``call``: when the
    outermost call of a module around it began, where the trace has modules. ``nodes``: how many autograd nodes came
    before it: between two forwards of training there are some."""

    name: str
    start_ns: int
    end_ns: int
    own_ns: int
    signature: int
    ranges: tuple[Event, ...]
    call: int | None
    nodes: int

    @property
    def span(self) -> OpSpan:
        """What it shares with the other operators of a forward, and perhaps with those of other forwards."""
        return self.nodes, self.ranges[:1], self.call


@dataclass(slots=True)
class ComputedAgain:
    """The operators directly in an autograd node that record a graph, as those of a checkpoint. ``sequence``,
    ``forward_thread``: of the node. ``has_own_ops``: whether there are operators in it that record none."""

    end_ns: int
    thread: int
    sequence: int
    forward_thread: int
    ops: list[TracedOp] = field(default_factory=list)
    has_own_ops: bool = False

    def add(self, op: TracedOp, sequence: int) -> None:
        if sequence >= 0:
            self.ops.append(op)
        else:
            self.has_own_ops = True


@dataclass(slots=True)
class OpsOfThread:
    """The operators of forwards on a thread, in their order. ``sequences``, ``makers``: the autograd sequence numbers,
    and the places in ``ops`` of the operators that have them."""

    ops: list[TracedOp] = field(default_factory=list)
    sequences: list[int] = field(default_factory=list)
    makers: list[int] = field(default_factory=list)

    def add(self, op: TracedOp, sequence: int) -> None:
        if sequence >= 0 and (not self.sequences or sequence >= self.sequences[-1]):
            self.sequences.append(sequence)
            self.makers.append(len(self.ops))
        self.ops.append(op)

    def maker_of(self, sequence: int) -> int:
        """The place of the operator that created an autograd node; -1 if it is not there."""
        index = bisect_right(self.sequences, sequence) - 1
        return self.makers[index] if index >= 0 else -1


class TracedOps(NamedTuple):
    by_thread: Mapping[int, OpsOfThread]
    again: list[ComputedAgain]


def traced_ops(events: Iterable[Event]) -> TracedOps:
    """The operators of forwards, without those inside others, in backward and in optimizers; and those that autograd
    nodes compute again. The labels among the events are calls of modules."""
    by_thread: defaultdict[int, OpsOfThread] = defaultdict(OpsOfThread)
    again: list[ComputedAgain] = []
    ranges: OpenRanges[Event] = OpenRanges()
    calls: OpenRanges[Event] = OpenRanges()
    functions: OpenRanges[TracedOp] = OpenRanges()  # functions of autograd in Python
    open_nodes: OpenRanges[ComputedAgain] = OpenRanges()
    hidden_until: Counter[int] = Counter()  # by thread: the end of a range that is no forward, or of an operator
    nodes = 0
    for event in events:
        kind, start, end, thread = event.kind, event.start_ns, event.end_ns, event.thread
        if kind is Kind.KERNEL:
            break
        is_node = kind is Kind.NODE or kind is Kind.BACKWARD_FUNCTION
        nodes += is_node
        if start < hidden_until[thread] and not is_node:
            continue
        around = open_nodes.at(thread, start)
        if kind is Kind.OP:
            if is_runtime_call(event.name):
                continue
            inside, call = tuple(ranges.at(thread, start)), next(iter(calls.at(thread, start)), None)
            began = None if call is None else call.start_ns
            op = TracedOp(event.name, start, end, end - start, event.signature, inside, began, nodes)
            of_python = functions.at(thread, start)
            if of_python:
                of_python[-1].own_ns -= op.own_ns
            if "::" in op.name:
                hidden_until[thread] = end
            else:
                of_python.append(op)
            (around[-1] if around else by_thread[thread]).add(op, event.sequence)
        elif kind is Kind.USER_LABEL and not event.name.startswith(_NO_FORWARD):
            ranges.at(thread, start).append(event)
        elif kind is Kind.LABEL:
            calls.at(thread, start).append(event)
        elif is_node:
            if kind is Kind.NODE or not around:
                around.append(ComputedAgain(end, thread, event.sequence, event.forward_thread))
                again.append(around[-1])
        elif kind not in (Kind.MEMORY, Kind.STEP, Kind.SAMPLE, Kind.COLLECTIVE, Kind.STOPPED):
            hidden_until[thread] = end
    return TracedOps(by_thread, [node for node in again if node.ops])


# The calls of layers

UNALIGNED = PREFIX + "!unaligned"
"""The label around an operator inside a forward whose layer is not known."""

_OF_CHECKPOINT = ("aten::empty", "_NoopSaveInputs")
"""What torch.utils.checkpoint itself runs in forward, before the function that it will compute again."""


class LayerCall(NamedTuple):
    """A call of a module: its label, and the how-manyth call of the forward it is."""

    label: str
    number: int


class ReferenceOp(NamedTuple):
    """An operator of the model: its name, the shapes of its inputs, and the calls around it, the outermost first."""

    name: str
    shapes: tuple[tuple[int, ...], ...]
    calls: tuple[LayerCall, ...]

    @property
    def layer(self) -> str:
        return self.calls[-1].label.removeprefix(PREFIX)


class AlignedForward(NamedTuple):
    """A forward of a model in a trace. ``pairs``: the place in the trace and in the model of each operator whose
    counterpart is known, from ``first`` to ``last``. ``matched``: the places in the trace of those that are compared.
    """

    pairs: Mapping[int, int]
    matched: Sequence[int]
    first: int
    last: int


def _extended(
    pairs: Mapping[int, int],
    traced: Sequence[TracedOp],
    model: Sequence[TracedOp | ReferenceOp],
    before: tuple[int, int],
    after: tuple[int, int],
) -> dict[int, int]:
    """Pairs of equal operators, and the pairs next to them, in both directions as long as the names are equal.
    ``before``, ``after``: the places right before and right after all that may have a counterpart. For example, if the
    two ``mm`` are pairs, ``view`` and ``add`` are found, and ``cast`` has no counterpart::

        traced   view  mm  add  cast  mm
        model    view  mm  add        mm
    """
    extended = dict(pairs)
    # Left between two pairs: from ``first`` up to ``last`` in the trace, from ``start`` up to ``stop`` in the model.
    for number, ((first, start), (last, stop)) in enumerate(pairwise([before, *pairs.items(), after])):
        first, start = first + 1, start + 1
        while number > 0 and first < last and start < stop and traced[first].name == model[start].name:
            extended[first] = start
            first, start = first + 1, start + 1
        while number < len(pairs) and first < last and start < stop and traced[last - 1].name == model[stop - 1].name:
            last, stop = last - 1, stop - 1
            extended[last] = stop
    return extended


class AlignedCalls:
    """The labels of the calls of one model, collected forward by forward. ``forwards``: how many forwards there are;
    ``adjacent``: how many of them follow another one with nothing between. ``labels``: also those around operators
    without a layer. ``operators``: thread and start of all that are paired. ``total_ns``: the time of the operators in
    forwards, and in what backward computes again. ``unknown_ns``: that without a layer, by the layer before it."""

    def __init__(self, model: Sequence[ReferenceOp], replaced: Collection[str]) -> None:
        """``replaced``: the names of operators of which others may take the place."""
        self._model = model
        self._replaced = replaced
        self._spans: dict[LayerCall, tuple[int, int]] = {}  # of each call: its first and last operator
        for index, op in enumerate(model):
            for call in op.calls:
                self._spans[call] = self._spans.get(call, (index, index))[0], index
        self.forwards = self.adjacent = 0
        self.labels: list[Event] = []
        self.operators: set[tuple[int, int]] = set()
        self.total_ns = 0
        self.unknown_ns: Counter[str] = Counter()

    def add_forward(
        self, thread: int, ops: Sequence[TracedOp], matched: Sequence[int], places: Sequence[int], around: range
    ) -> AlignedForward:
        """``matched``: where the operators at ``places`` of the model are in the trace. ``around``: what may belong to
        the forward."""
        self.forwards += 1
        before, after = (around.start - 1, -1), (around.stop, len(self._model))
        pairs = _extended(dict(zip(matched, places)), ops, self._model, before, after)
        self._label(thread, ops, pairs, {place: self._model[model].calls for place, model in pairs.items()})
        return AlignedForward(pairs, matched, min(pairs), max(pairs))

    def add_computed_again(
        self, again: ComputedAgain, compared: Sequence[int], on: OpsOfThread, maker: int, forward: AlignedForward
    ) -> None:
        """What an autograd node computes again: a part of the forward that ends with the operator that created the
        node (``maker``), or the inside of it if it is a function of autograd. For example, of a forward ``norm mm add
        gelu mm``, the node of ``gelu`` computes ``mm add gelu`` again. What does not fit there has no layer.
        ``compared``: the places in ``again.ops`` of the operators that are compared."""
        after = bisect_right(forward.matched, maker)
        first = after if "::" not in on.ops[maker].name else after - len(compared)
        matched = forward.matched[max(first, 0) : max(first, 0) + len(compared)]
        if [on.ops[place].name for place in matched] != [again.ops[place].name for place in compared]:
            if again.has_own_ops:  # else a graph of backward is recorded: these are the operators of the node
                layer = self._model[forward.pairs[max(forward.pairs.keys() & range(maker + 1))]].layer
                self.total_ns += sum(op.own_ns for op in again.ops)
                self._label_unknown(again.thread, again.ops, layer)
            return
        # place in what is computed again → place in the forward
        copies = _extended(
            dict(zip(compared, matched)), again.ops, on.ops, (-1, forward.first - 1), (len(again.ops), forward.last + 1)
        )
        pairs = {place: forward.pairs[copy] for place, copy in copies.items() if copy in forward.pairs}
        first_copy, last_compared = min(copies.values()), forward.pairs[matched[-1]]
        begin = 1 + max((pair for place, pair in forward.pairs.items() if place < first_copy), default=-1)
        while begin and self._model[begin - 1].name in _OF_CHECKPOINT:
            begin -= 1
        later = [pair for pair in (forward.pairs[place] for place in forward.matched) if pair > last_compared][:1]

        def is_whole(call: LayerCall) -> bool:
            """Whether the call is computed again from its beginning, and up to its last operator that is compared."""
            first, last = self._spans[call]
            return first >= begin and not (later and last >= later[0])

        calls = {place: tuple(filter(is_whole, self._model[model].calls[1:])) for place, model in pairs.items()}
        self._label(again.thread, again.ops, pairs, calls)
        if copies.get(len(again.ops) - 1) == maker:
            # torch stops there, in general before it executes the operator.
            last = again.ops[-1]
            self.labels.append(Event(Kind.STOPPED, STOPPED, last.end_ns, last.end_ns, again.thread))

    def _label(
        self, thread: int, ops: Sequence[TracedOp], pairs: Mapping[int, int], calls: Mapping[int, tuple[LayerCall, ...]]
    ) -> None:
        """Note the range of each call, and of each operator without a layer. ``pairs``, ``calls``: of the operators
        with a counterpart, its place in the model, and the calls around them."""
        spans: dict[LayerCall, tuple[TracedOp, TracedOp, int]] = {}
        places = sorted(pairs)
        for place in places:
            op = ops[place]
            self.operators.add((thread, op.start_ns))
            self.total_ns += op.own_ns
            for call in calls[place]:
                first, _, end = spans.get(call, (op, op, 0))
                spans[call] = first, op, max(end, op.end_ns)
        for call, (first, last, end) in spans.items():
            # With the ranges of users that begin or end between.
            start = min([first.start_ns, *(around.start_ns for around in first.ranges if around.end_ns < end)])
            end = max([end, *(around.end_ns for around in last.ranges if around.start_ns > start)])
            self.labels.append(Event(Kind.LABEL, call.label, start, end, thread))
        for place, following in pairwise(places):
            if between := ops[place + 1 : following]:
                before, after = pairs[place], pairs[following]
                self.total_ns += sum(op.own_ns for op in between)
                self._label_unknown(thread, self._unknown_between(between, before, after), self._model[before].layer)

    def _unknown_between(self, ops: Sequence[TracedOp], before: int, after: int) -> list[TracedOp]:
        """Those of the operators between two in the model whose layer is not known. Where operators are missing that
        others may replace, those that take their place are in the same call."""
        around = tuple(
            call for call, other in zip(self._model[before].calls, self._model[after].calls) if call == other
        )
        if not (missing := self._model[before + 1 : after]):
            return [] if self._model[before].calls == self._model[after].calls else [*ops]
        replaced = [op for op in missing if op.name in self._replaced]
        if replaced and all(op.calls == around for op in replaced):
            return [op for op in ops if op.name not in self._replaced]
        return [*ops]

    def _label_unknown(self, thread: int, ops: Sequence[TracedOp], after: str) -> None:
        for op in ops:
            self.labels.append(Event(Kind.LABEL, UNALIGNED, op.start_ns, op.end_ns, thread))
            self.unknown_ns[after] += op.own_ns
