"""What torch's own parser makes of a whole recording, our labels included: the truth that sums are held against."""

from typing import Any

from torch.autograd.profiler_util import EventList

from torchprof import Profile


def torchs_list(prof: Profile) -> Any:
    """``function_events`` of the profiler that recorded; torch 2.4 makes it only at the stop, so made anew there."""
    profiler = prof._session._profiler
    if profiler.function_events:
        return profiler.function_events
    events = EventList(
        profiler._parse_kineto_results(profiler.kineto_results),
        use_device=profiler.use_device,
        profile_memory=profiler.profile_memory,
    )
    events._build_tree()
    return events
