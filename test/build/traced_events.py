"""The events of traces that tests write by hand, read by torchprof."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torchprof.attribute.events import Detail, Event
from torchprof.traces.event_table import EventTable
from torchprof.traces.events import TraceEvents


def read(*events: Any) -> TraceEvents:
    table = EventTable(lambda name: Detail.SCALARS)
    table.add(events)
    table.place_overhead()
    return TraceEvents(table)


def events_of(*events: Any, sites: Iterable[str] = ()) -> list[Event]:
    return list(read(*events).columns(set(sites)).events())


def the(events: Iterable[Event], name: str) -> Event:
    """The only event of this name."""
    (found,) = [event for event in events if event.name == name]
    return found
