"""Which kernels were launched before a recording began."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

_ENOUGH = 1000  # kernels: where so many have no number of a call, no others will have one


def first_call(calls: Iterable[int], launched: Iterable[int]) -> int:
    """The lowest number of a runtime call in a recording. A kernel without a recorded launch and with a lower number
    was launched before the recording began. 0 if that cannot be known.

    ``calls`` are the numbers of all recorded calls of the runtime. It counts them up over the life of a process (CUPTI
    Activity API, "correlation ID"), and kernels have the number of the call that launched them. ``launched``: these
    numbers of the kernels whose launch was recorded. If none of them is the number of a call, kernels are numbered in
    another way.

    That a kernel comes before all others on its stream is not enough: some launches in a recording are not recorded
    either, such as those of the CUDA driver before torch 2.1.
    """
    first, is_known = 0, False
    numbers = set(islice(launched, _ENOUGH))
    for number in calls:
        if number > 0:
            first = min(first or number, number)
            is_known = is_known or number in numbers
    return first if is_known else 0
