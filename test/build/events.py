"""Hand-made events, as the rule of ownership reads them; and a walk over events, with its results by name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torchprof.attribute.compiled_graphs import CompiledGraphs
from torchprof.attribute.event_columns import EventColumns
from torchprof.attribute.event_names import MEMORY, STEP_MARK
from torchprof.attribute.events import PIPELINE, Attributed, Event, Kind, Site
from torchprof.attribute.op_groups import OpGroup
from torchprof.attribute.rule import Attribution
from torchprof.measure.fold import fold
from torchprof.run.layers import Layer
from torchprof.run.meta import Meta
from torchprof.run.run import Run
from torchprof.run.words import NODE_PREFIX

MAIN, ENGINE = 1, 2  # threads


def op(name: str, start: int, end: int, **fields: int) -> Event:
    """An operator, by default on the main thread."""
    return Event(Kind.OP, name, start, end, fields.pop("thread", MAIN), **fields)


def label(name: str, start: int, end: int, thread: int = MAIN) -> Event:
    """The forward range of a labelled module."""
    return Event(Kind.LABEL, name, start, end, thread)


def user_label(name: str, start: int, end: int, thread: int = MAIN) -> Event:
    """A ``record_function`` of the user."""
    return Event(Kind.USER_LABEL, name, start, end, thread)


def step(at: int) -> Event:
    """The mark at the end of a step, where the next one begins."""
    return Event(Kind.STEP, STEP_MARK, at, at, MAIN)


def node(name: str, start: int, end: int, sequence: int = -1, forward_thread: int = MAIN, thread: int = MAIN) -> Event:
    """An autograd node with the engine's work around it."""
    return Event(Kind.NODE, NODE_PREFIX + name, start, end, thread, sequence, forward_thread if sequence >= 0 else 0)


def engine(start: int, end: int, thread: int = MAIN) -> Event:
    """A call of autograd's engine."""
    return Event(Kind.ENGINE, "torchprof:!engine", start, end, thread)


def function(
    name: str, start: int, end: int, sequence: int = -1, forward_thread: int = MAIN, thread: int = MAIN
) -> Event:
    """The autograd node itself."""
    return Event(Kind.BACKWARD_FUNCTION, name, start, end, thread, sequence, forward_thread if sequence >= 0 else 0)


def of_pipeline(name: str, start: int, end: int, thread: int = MAIN) -> Event:
    """A range in a pipeline: ``0F3`` of an action, ``wait``, or ``step Schedule1F1B 2 0,1``."""
    return Event(Kind.PIPELINE, PIPELINE + name, start, end, thread)


def memory(at: int, nbytes: int, device: str = "cpu", thread: int = MAIN, address: int = 0) -> Event:
    """An allocation; or a free, if ``nbytes`` is negative."""
    return Event(Kind.MEMORY, MEMORY, at, at, thread, correlation=address, device=device, nbytes=nbytes)


def kernel(name: str, start: int, end: int, correlation: int, device: str = "cuda:0") -> Event:
    """A kernel on the device, launched by the op with this correlation."""
    return Event(Kind.KERNEL, name, start, end, 0, correlation=correlation, device=device)


def run_of_events(
    events: Sequence[Event],
    sites: Mapping[str, Site],
    layers: Sequence[Layer],
    graphs: CompiledGraphs | None = None,
    **meta: Any,
) -> Run:
    """The run of events of one model. ``sites``: the layers of labels by name."""
    attribution = Attribution(sites, [layer.path for layer in layers], graphs=graphs)
    rows, samples, busy = fold(
        stream_of(attribution, events), attribution.places.all, layers, recorded_ns=meta.get("wall_ns", 0)
    )
    about = Meta((layers[0].path[0],), **{"busy_ns": tuple(sorted(busy.items())), **meta})
    return Run((about,), tuple(layers), rows, samples)


def stream_of(attribution: Attribution, events: EventColumns | Iterable[Event]) -> Iterator[Attributed | OpGroup]:
    """The events with their places, ops in groups. They must be in the order of start."""
    return attribution.attribute(events if isinstance(events, EventColumns) else EventColumns.of(events))


def each_event(stream: Iterable[Attributed | OpGroup]) -> Iterator[Attributed]:
    """All events one by one."""
    for item in stream:
        yield from item.items() if isinstance(item, OpGroup) else (item,)


def walk_of(attribution: Attribution, events: EventColumns | Iterable[Event]) -> Iterator[Attributed]:
    """Each event with its place."""
    return each_event(stream_of(attribution, events))


class Walked:
    """The events of one walk, by name; if a name occurs more than once, by name and number."""

    def __init__(
        self, events: EventColumns | Sequence[Event], sites: dict[str, Site], paths: Sequence[tuple[str, ...]]
    ) -> None:
        self.attribution = Attribution(sites, paths)
        self.all: list[Attributed] = list(walk_of(self.attribution, events))

    def __getitem__(self, key: str | tuple[str, int]) -> Attributed:
        name, number = key if isinstance(key, tuple) else (key, 0)
        return [each for each in self.all if each.event.name == name][number]

    def owner(self, name: str, number: int = 0) -> tuple[int, str]:
        """Layer and phase of an event."""
        place = self[name, number].place
        return place.layer, place.phase

    def frames(self, name: str, number: int = 0) -> list[str]:
        """The names of the frames of an event's place, outer to inner."""
        return [frame.name for frame in self[name, number].place.frames]

    def self_ns(self) -> dict[tuple[int, str, tuple[str, ...]], int]:
        """The self time of each place, by layer, phase and names of the frames."""
        found: dict[tuple[int, str, tuple[str, ...]], int] = {}
        for event, place, around, _, ns, _ in self.all:
            if event.kind in (Kind.MEMORY, Kind.KERNEL):
                continue
            for each, signed in ((place, ns), (around, -ns)):
                if each is not None:
                    key = (each.layer, each.phase, tuple(frame.name for frame in each.frames))
                    found[key] = found.get(key, 0) + signed
        return found
