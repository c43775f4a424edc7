"""torch's own lists of events, one for each call of a module: the result of ``Profile.raw``."""

from __future__ import annotations

from collections import defaultdict

from torch.autograd.profiler_util import EventList

from torchprof.attribute.events import Kind
from torchprof.attribute.places import Attributed
from torchprof.measure.assemble import attribution_of
from torchprof.record.plan import Plan
from torchprof.record.session import Session


def event_lists_by_path(session: Session, plan: Plan) -> defaultdict[tuple[str, ...], list[EventList]]:
    """For each module, by its real path: a list for each of its finished calls, in the order in which they ended."""
    lists: defaultdict[tuple[str, ...], list[EventList]] = defaultdict(list)
    paths = {}
    for item in attribution_of(plan).attribute(session.columns()):
        if isinstance(item, Attributed) and item.event.kind is Kind.LABEL:
            path = plan.real_path(item.event.name, item.place.layer)
            if path is not None and path in plan.with_event_lists:
                paths[item.event.thread, item.event.start_ns] = path
    calls = [call for call in session.calls() if call.finished and (call.thread, call.start_ns) in paths]
    for call, events in zip(calls, session.event_lists(calls)):
        lists[paths[call.thread, call.start_ns]].append(events)
    return lists
