"""The operators of a trace that names no layers: those of forwards, and those that backward computes again."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from torchprof.attribute.events import Event, Kind
from torchprof.run.words import FSDP_RANGE, OPTIMIZER_STEP, is_runtime_call

_NO_FORWARD = (OPTIMIZER_STEP, FSDP_RANGE)
"""The beginnings of the names of ranges that contain nothing of a forward. FSDP's hooks name their layers."""


class RangeAround(NamedTuple):
    start_ns: int
    end_ns: int


@dataclass(slots=True)
class TracedOp:
    """An operator of the trace that is in no other one, or a function of autograd in Python.

    ``own_ns``: its time, without that of operators inside a function of autograd. ``ranges``: those of users around it.
    ``nodes``: how many autograd nodes came before it: between two forwards of training there are some.
    """

    name: str
    start_ns: int
    end_ns: int
    own_ns: int
    signature: int
    ranges: tuple[RangeAround, ...]
    nodes: int


@dataclass(slots=True)
class ComputedAgain:
    """The operators directly in an autograd node that record a graph, as those of a checkpoint. ``sequence``,
    ``forward_thread``: of the node. ``has_own_ops``: whether there are operators in it that record none."""

    thread: int
    sequence: int
    forward_thread: int
    ops: list[TracedOp] = field(default_factory=list)
    has_own_ops: bool = False


class OpsOfThread(NamedTuple):
    """The operators of forwards on a thread, in their order. ``sequences``, ``makers``: the autograd sequence numbers,
    and the places in ``ops`` of the operators that have them."""

    ops: list[TracedOp]
    sequences: list[int]
    makers: list[int]

    def maker_of(self, sequence: int) -> int:
        """The place of the operator that created an autograd node; -1 if it is not there."""
        index = bisect_right(self.sequences, sequence) - 1
        return self.makers[index] if index >= 0 else -1


class TracedOps(NamedTuple):
    by_thread: dict[int, OpsOfThread]
    again: list[ComputedAgain]


class _Thread:
    """What is open on a thread."""

    def __init__(self) -> None:
        self.forward = OpsOfThread([], [], [])
        self.functions: list[TracedOp] = []  # functions of autograd in Python
        self.ranges: list[RangeAround] = []
        self.nodes: list[tuple[int, ComputedAgain]] = []  # end, and what is computed again in it
        self.hidden_until = 0  # end of a range that is no forward, or of an operator

    def close(self, start_ns: int) -> None:
        """Leave what ended before."""
        for open_ranges in (self.ranges, self.functions):
            while open_ranges and open_ranges[-1].end_ns <= start_ns:
                open_ranges.pop()
        while self.nodes and self.nodes[-1][0] <= start_ns:
            self.nodes.pop()


def traced_ops(events: Iterable[Event]) -> TracedOps:
    """The operators of forwards, without those inside others, in backward and in optimizers; and those that autograd
    nodes compute again."""
    threads: defaultdict[int, _Thread] = defaultdict(_Thread)
    again: list[ComputedAgain] = []
    nodes = 0
    for event in events:
        kind, start, end = event.kind, event.start_ns, event.end_ns
        if kind is Kind.KERNEL:
            break
        thread = threads[event.thread]
        is_node = kind is Kind.NODE or kind is Kind.BACKWARD_FUNCTION
        nodes += is_node
        if start < thread.hidden_until and not is_node:
            continue
        thread.close(start)
        if kind is Kind.OP:
            if not is_runtime_call(event.name):
                _add(thread, event, nodes)
        elif kind is Kind.USER_LABEL and not event.name.startswith(_NO_FORWARD):
            thread.ranges.append(RangeAround(start, end))
        elif is_node:
            if kind is Kind.NODE or not thread.nodes:
                thread.nodes.append((end, ComputedAgain(event.thread, event.sequence, event.forward_thread)))
                again.append(thread.nodes[-1][1])
        elif kind not in (Kind.MEMORY, Kind.STEP, Kind.SAMPLE, Kind.COLLECTIVE, Kind.STOPPED):
            thread.hidden_until = end
    return TracedOps(
        {number: thread.forward for number, thread in threads.items()}, [thread for thread in again if thread.ops]
    )


def _add(thread: _Thread, event: Event, nodes: int) -> None:
    """Note an operator that is in no other one."""
    op = TracedOp(
        event.name,
        event.start_ns,
        event.end_ns,
        event.end_ns - event.start_ns,
        event.signature,
        tuple(thread.ranges),
        nodes,
    )
    if thread.functions:
        thread.functions[-1].own_ns -= op.own_ns
    if "::" in event.name:
        thread.hidden_until = event.end_ns
    else:
        thread.functions.append(op)
    if thread.nodes:
        again = thread.nodes[-1][1]
        if event.sequence >= 0:
            again.ops.append(op)
        else:
            again.has_own_ops = True
        return
    ops, sequences, makers = thread.forward
    if event.sequence >= 0 and (not sequences or event.sequence >= sequences[-1]):
        sequences.append(event.sequence)
        makers.append(len(ops))
    ops.append(op)
