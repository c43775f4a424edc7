"""Which kernels were launched before a recording began. Knows no torch."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

_ENOUGH = 1000  # kernels: where so many have no number of a call, no others will have one


def first_call(calls: Iterable[int], launched: Iterable[int]) -> int:
    """The number from which on the device's runtime numbered its calls in a recording: a kernel whose launch was not
    recorded, and has a lower number, was launched before. 0 where that cannot be told.

    ``calls`` are the numbers of all recorded calls of the runtime. It counts them up over the life of a process (CUPTI
    Activity API, "correlation ID"), and kernels have the number of the call that launched them. ``launched``: these
    numbers of the kernels whose launch was recorded. Where none of them is the number of a call, kernels are numbered
    otherwise.

    That a kernel comes before all others on its stream tells less: runtimes of which torch recorded no calls, as the
    driver's before torch 2.1, launch kernels in a recording that look alike.
    """
    first, is_known = 0, False
    numbers = set(islice(launched, _ENOUGH))
    for number in calls:
        if number > 0:
            first = min(first or number, number)
            is_known = is_known or number in numbers
    return first if is_known else 0
