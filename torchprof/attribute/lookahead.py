"""Complete events with facts that only later events contain."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import chain, repeat

from torchprof.attribute.collectives import ACCUMULATES
from torchprof.attribute.compiled_graphs import CompiledGraphs, graph_of
from torchprof.attribute.events import Event, Kind


class LookAhead:
    """Passes events on in their order. For three kinds it first reads the events that follow:

    - NODE: torch omits the sequence number from the engine's range around an autograd node if a hook of the user or of
      FSDP runs an op or a range before the node. The BACKWARD_FUNCTION inside has the number, except for
      AccumulateGrad.
    - GUARDS belong to the compiled region right after them. They get the name of that region.
    - GRAPH: all ops in one call of a compiled graph are matched with the kernels of the graph. ``kernels`` is the
      result: (thread, start, end) of an op → the key of the graph and the number of the kernel (None: unknown).
    """

    def __init__(self, graphs: CompiledGraphs) -> None:
        self.kernels: dict[tuple[int, int, int], tuple[str, int | None]] = {}
        self._graphs = graphs
        self._ahead: deque[Event] = deque()  # read already, but not passed on yet
        self._later: Iterator[Event] = iter(())

    def pass_on(self, events: Iterable[Event]) -> Iterator[Event]:
        self._later = iter(events)
        ahead, later = self._ahead, self._later
        node, guards, graph = Kind.NODE, Kind.GUARDS, Kind.GRAPH
        while True:
            event = ahead.popleft() if ahead else next(later, None)
            if event is None:
                return
            kind = event[0]
            if kind is node:
                if event[5] < 0 and not event[1].endswith(ACCUMULATES):
                    event = self._with_number(event)
            elif kind is guards:
                event = self._of_region(event)
            elif kind is graph and not self._graphs.why_unknown(graph_of(event.name)):
                self._find_kernels(event)
            yield event

    def open_up(self, around: Event) -> Event:
        """Pass the ops inside this event on next, each as an event, and return the event without them."""
        inside = around.inside
        if inside is not None:
            each = zip(inside.tree.names, inside.starts, inside.ends, inside.sequences or repeat(-1))
            ops = [Event(Kind.OP, name, start, end, around.thread, number) for name, start, end, number in each]
            self._ahead.extendleft(reversed(ops))
        return around._replace(inside=None)

    def _coming(self, thread: int) -> Iterator[Event]:
        """Read ahead: the next events on a thread, up to the first kernel. They are passed on later."""
        looked: list[Event] = []
        try:
            for event in chain(self._ahead, self._later):
                looked.append(event)
                if event.kind is Kind.KERNEL:  # device work comes after all other events
                    return
                if event.thread == thread:
                    yield event
        finally:
            self._ahead.extend(looked[len(self._ahead) :])

    def _with_number(self, node: Event) -> Event:
        for inner in self._coming(node.thread):
            if inner.start_ns >= node.end_ns:
                break
            if inner.kind is Kind.BACKWARD_FUNCTION and node.name.endswith(inner.name):
                return node._replace(sequence=inner.sequence, forward_thread=inner.forward_thread)
        return node

    def _of_region(self, guards: Event) -> Event:
        for after in self._coming(guards.thread):
            if after.start_ns >= guards.end_ns and after.kind not in (Kind.MEMORY, Kind.SAMPLE, Kind.GARBAGE):
                return guards._replace(name=after.name) if after.kind is Kind.REGION else guards
        return guards

    def _find_kernels(self, call: Event) -> None:
        inside: list[Event] = []
        until = call.start_ns
        for event in self._coming(call.thread):
            if event.start_ns >= call.end_ns:
                break
            if event.start_ns >= until and event.kind in (Kind.OP, Kind.GARBAGE):
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
