"""Complete events with facts that only later events contain."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator

from torchprof.attribute.collectives import ACCUMULATES
from torchprof.attribute.compiled_graphs import CompiledGraphs, graph_of
from torchprof.attribute.event_columns import EventColumns
from torchprof.attribute.events import Event, Kind


class LookAhead:
    """Reads the events that follow three kinds of events:

    - NODE: torch omits the sequence number from the engine's range around an autograd node if a hook of the user or of
      FSDP runs an op or a range before the node. The BACKWARD_FUNCTION inside has the number, except for
      AccumulateGrad.
    - GUARDS belong to the compiled region right after them. They get the name of that region.
    - GRAPH: all ops in one call of a compiled graph are matched with the kernels of the graph. ``kernels`` is the
      result: (thread, start, end) of an op → the key of the graph and the number of the kernel (None: unknown).
    """

    def __init__(self, columns: EventColumns, graphs: CompiledGraphs) -> None:
        self.kernels: dict[tuple[int, int, int], tuple[str, int | None]] = {}
        self._graphs = graphs
        self._columns = columns
        self._after = {lane.thread: lane.after for lane in columns.threads}
        self._work_of: dict[int, tuple[list[int], list[int]]] = {}  # by thread: starts and ends of its outermost ranges

    def completed(self, event: Event, index: int) -> Event:
        """The event with this index, with what later ones say of it."""
        if event.kind is Kind.NODE:
            return event if event.name.endswith(ACCUMULATES) else self._with_number(event, index)
        if event.kind is Kind.GUARDS:
            return self._of_region(event, index)
        if not self._graphs.why_unknown(graph_of(event.name)):
            self._find_kernels(event, index)
        return event

    def others_work(self, event: Event) -> bool:
        """Whether another thread is inside a range when an event begins."""
        for thread, first, after in self._columns.threads:
            if thread == event.thread:
                continue
            if thread not in self._work_of:
                self._work_of[thread] = self._outermost(first, after)
            starts, ends = self._work_of[thread]
            last = bisect_right(starts, event.start_ns) - 1
            if last >= 0 and ends[last] > event.start_ns:
                return True
        return False

    def _outermost(self, first: int, after: int) -> tuple[list[int], list[int]]:
        columns = self._columns
        starts, ends = [], []
        index = first
        while index < after:
            kind = columns.kinds[columns.number[index]].kind
            if kind in (Kind.COLLECTIVE, Kind.COMPILED_INPUTS):  # no work of the thread
                index += 1
                continue
            starts.append(columns.start[index])
            ends.append(columns.end[index])
            index += columns.size[index]
        return starts, ends

    def _later(self, index: int, thread: int) -> Iterator[Event]:
        """The events of a thread after this one."""
        return (self._columns.event(later, thread) for later in range(index + 1, self._after[thread]))

    def _with_number(self, node: Event, index: int) -> Event:
        for inner in self._later(index, node.thread):
            if inner.start_ns >= node.end_ns:
                break
            if inner.kind is Kind.BACKWARD_FUNCTION and node.name.endswith(inner.name):
                return node._replace(sequence=inner.sequence, forward_thread=inner.forward_thread)
        return node

    def _of_region(self, guards: Event, index: int) -> Event:
        for later in self._later(index, guards.thread):
            if later.start_ns >= guards.end_ns and later.kind not in (Kind.MEMORY, Kind.SAMPLE, Kind.INTERRUPTION):
                return guards._replace(name=later.name) if later.kind is Kind.REGION else guards
        return guards

    def _find_kernels(self, call: Event, index: int) -> None:
        inside: list[Event] = []
        until = call.start_ns
        for event in self._later(index, call.thread):
            if event.start_ns >= call.end_ns:
                break
            if event.start_ns >= until and event.kind in (Kind.OP, Kind.INTERRUPTION):
                until = event.end_ns  # events inside this one are not calls of the graph
                if event.kind is Kind.OP:
                    inside.append(event)
        graph = graph_of(call.name)
        kernels = self._graphs.called(graph, [event.name for event in inside])
        has_all = self._graphs.has_all(graph, kernels)
        for event, kernel in zip(inside, kernels):
            # If all kernels are found, the other ops are no kernels, but copies of inputs.
            if kernel is not None or not has_all:
                self.kernels[event.thread, event.start_ns, event.end_ns] = graph, kernel
