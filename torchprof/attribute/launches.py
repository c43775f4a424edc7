"""Find the kernels that were launched before a recording began."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

_ENOUGH = 1000  # kernels to look at: if no correlation ID of these is that of a call, none will be


def first_correlation_id(calls: Iterable[int], launched: Iterable[int]) -> int:
    """The lowest correlation ID of a runtime call in a recording; 0 if it is unknown.

    A kernel without a recorded launch and with a lower ID was launched before the recording began.

    ``calls``: the IDs of all recorded calls of the CUDA runtime. The runtime counts them up over the life of a process
    (CUPTI Activity API, "correlation ID"), and a kernel has the ID of the call that launched it. ``launched``: the IDs
    of the kernels with a recorded launch. If none of them is the ID of a call, kernels are numbered in another way, and
    the result is 0.

    The order on a stream does not show which kernels were launched before: some launches inside a recording are not
    recorded either, for example those of the CUDA driver before torch 2.1.
    """
    first, is_known = 0, False
    numbers = set(islice(launched, _ENOUGH))
    for number in calls:
        if number > 0:
            first = min(first or number, number)
            is_known = is_known or number in numbers
    return first if is_known else 0
