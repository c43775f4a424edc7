"""The operators of a trace without labels: those of forwards, and those that backward computes again."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from torchprof.attribute.events import Event, Kind
from torchprof.attribute.nesting import OpenRanges
from torchprof.run.words import FSDP_RANGE, OPTIMIZER_STEP, is_runtime_call

_NO_FORWARD = (OPTIMIZER_STEP, FSDP_RANGE)
"""The beginnings of the names of ranges that contain nothing of a forward. FSDP's hooks name their layers."""

Span = tuple[int, tuple[Event, ...], int | None]


@dataclass(slots=True)
class TracedOp:
    """An operator of the trace that is in no other one, or a function of autograd in Python.

    ``own_ns``: its time, without that of operators inside a function of autograd. ``ranges``: those of users around it.
    ``call``: when the outermost call of a module around it began, where the trace has modules. ``nodes``: how many
    autograd nodes came before it: between two forwards of training there are some.
    """

    name: str
    start_ns: int
    end_ns: int
    own_ns: int
    signature: int
    ranges: tuple[Event, ...]
    call: int | None
    nodes: int

    @property
    def span(self) -> Span:
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
