"""The events of a session as torch gives them, in the order of start, with the fields that every event has as columns.

To call a method of torch by ``map`` takes less time than calling it in a loop.
"""

from __future__ import annotations

import operator
from array import array
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

from torchprof.attribute.event_columns import Numbers
from torchprof.record.torch_internals import needed

RawEvent = needed("torch._C._autograd._KinetoEvent")
BACKWARD_SCOPE, USER_SCOPE = 1, 7  # that of a function is 0
end_ns: Callable[[Any], int] = getattr(RawEvent, "end_ns", lambda raw: raw.start_ns() + raw.duration_ns())  # torch 2.4
_name, _scope, _start_ns = RawEvent.name, RawEvent.scope, RawEvent.start_ns
_thread, _sequence, _forward_thread = RawEvent.start_thread_id, RawEvent.sequence_nr, RawEvent.fwd_thread_id

_BLOCK = 1024
"""How many events are read at a time: they fit in the cache of a processor, and the next method finds them there."""


class RawEvents:
    """``all``: the events. By index of an event:

    - ``names_of``: the index of its name in ``names``; ``scopes``.
    - ``starts``, ``ends``, in ns; ``threads``.
    - ``sequences``: autograd sequence numbers, -1 for none; ``forward_threads``, on which these were counted.
    """

    def __init__(self, raws: Sequence[Any]) -> None:
        """``raws``: those of torch. They usually come sorted; of equal starts, the first one stays the first."""
        starts, ends, sequences, forward_threads = (array("q") for _ in range(4))
        threads: list[int] = []  # small numbers, of which Python has one object each
        numbers: Numbers[str] = Numbers()
        scopes, names_of = bytearray(), array("l")
        for first in range(0, len(raws), _BLOCK):
            block = raws[first : first + _BLOCK]
            starts.extend(map(_start_ns, block))
            ends.extend(map(end_ns, block))
            threads.extend(map(_thread, block))
            sequences.extend(map(_sequence, block))
            forward_threads.extend(map(_forward_thread, block))
            scopes.extend(map(_scope, block))
            names_of.extend(map(numbers.__getitem__, map(_name, block)))
        columns: list[Any] = [starts, ends, threads, sequences, forward_threads, names_of, scopes]
        if not all(map(operator.le, starts, islice(starts, 1, None))):
            order = sorted(range(len(starts)), key=starts.__getitem__)
            raws = [*map(raws.__getitem__, order)]
            columns = [_in_order(column, order) for column in columns]
        self.all = raws
        self.starts, self.ends, self.threads, self.sequences, self.forward_threads, self.names_of, self.scopes = columns
        self.names = [*numbers]


def _in_order(column: Any, order: Sequence[int]) -> Any:
    values = map(column.__getitem__, order)
    return array(column.typecode, values) if isinstance(column, array) else type(column)(values)
