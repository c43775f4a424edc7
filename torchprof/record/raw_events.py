"""The events of a session as torch gives them, in the order of start, with the fields that every event has as columns;
and what operators were called on: the shapes, types and scalars of their inputs, numbered.

To call a method of torch by ``map`` takes less time than calling it in a loop.
"""

from __future__ import annotations

import json
import marshal
import operator
from array import array
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

from torchprof.attribute.event_columns import Numbers
from torchprof.attribute.events import Detail
from torchprof.record.torch_internals import needed, optional
from torchprof.run.collectives import signature_of
from torchprof.run.words import Signature

RawEvent = needed("torch._C._autograd._KinetoEvent")
BACKWARD_SCOPE, USER_SCOPE = 1, 7  # that of a function is 0
end_ns: Callable[[Any], int] = getattr(RawEvent, "end_ns", lambda raw: raw.start_ns() + raw.duration_ns())  # torch 2.4
_name, _scope, _start_ns = RawEvent.name, RawEvent.scope, RawEvent.start_ns
_thread, _sequence, _forward_thread = RawEvent.start_thread_id, RawEvent.sequence_nr, RawEvent.fwd_thread_id

# Source lines that are left out: Python's builtins, torch's marks of modules, the functions that every call of a module
# goes through, and the labels and stand-ins of torchprof/record.
_NO_SOURCE = ("<", "nn.Module: ", "torch/nn/modules/module.py(", "torchprof/record/")
_shapes_of_lists: Callable[[Any], list[Any]] | None = optional(
    "torch._C._autograd._KinetoEvent.structured_input_shapes"
)
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


class InputSignatures:
    """The signatures of one session. Equal signatures share one number, which is an index in ``all``; number 0 is the
    empty signature. ``with_stack``: whether signatures have source lines."""

    def __init__(self, with_stack: bool) -> None:
        self.all: list[Signature] = [Signature((), ())]
        self._with_stack = with_stack
        self._of_raw: dict[bytes, int] = {}  # by what torch gives for an event, as bytes
        self._of_signature: dict[Signature, int] = {self.all[0]: 0}
        self._of_pair: dict[tuple[int, int], int] = {}  # see called_from

    def number_of(self, raw: Any, detail: Detail) -> int:
        """The number of the inputs of an event."""
        shapes, dtypes = raw.shapes(), raw.dtypes()
        if "TensorList" in dtypes and _shapes_of_lists is not None:
            shapes = _shapes_of_lists(raw)
        scalars = () if detail is Detail.SHAPES else raw.concrete_inputs()
        if detail is Detail.ONES:  # the counter of a loop must not make a new signature in each iteration
            scalars = [value if value is None or value in (0, 1) else 2 for value in scalars]
        stack = [line for line in raw.stack() if not line.startswith(_NO_SOURCE)] if self._with_stack else []
        if not (shapes or dtypes or stack):
            return 0  # as in a trace: no inputs and inputs that were not recorded look the same
        try:
            # As a key, bytes need half of the memory of nested tuples. Version 2 of the format writes no references
            # between equal parts: the bytes depend on the values alone.
            key = marshal.dumps((shapes, dtypes, scalars, stack), 2)
        except ValueError:  # a scalar that is no plain value
            scalars = [value if isinstance(value, (bool, int, float, str, list)) else None for value in scalars]
            key = marshal.dumps((shapes, dtypes, scalars, stack), 2)
        number = self._of_raw.get(key)
        if number is None:
            known = [
                None if dtype == "TensorList" and _shapes_of_lists is None else shape
                for shape, dtype in zip(shapes, dtypes)
            ]
            # In this order: after Ctrl-C between any two lines, the events can be read again with what is here.
            number = len(self.all)
            self.all.append(Signature(_frozen(known), tuple(dtypes), _frozen(scalars), tuple(stack)))
            self._of_raw[key] = number
        return number

    def number_of_collective(self, raw: Any) -> int:
        """The number of the inputs of a collective, from the metadata that its event has in a trace; 0 if the session
        did not record the metadata. torch gives it as the inside of a JSON object."""
        try:
            signature = signature_of(json.loads("{" + raw.metadata_json() + "}"))
        except ValueError:
            return 0
        return 0 if signature is None else self._number(signature)

    def called_from(self, signature: int, source: int) -> int:
        """The number of a signature like ``signature`` with the source lines of ``source``."""
        number = self._of_pair.get((signature, source))
        if number is None:
            number = self._number(self.all[signature]._replace(stack=self.all[source].stack))
            self._of_pair[signature, source] = number
        return number

    def _number(self, signature: Signature) -> int:
        number = self._of_signature.get(signature)
        if number is None:
            number = len(self.all)
            self.all.append(signature)
            self._of_signature[signature] = number
        return number


def _frozen(value: Any) -> Any:
    """A value with tuples for lists, and None for a number that JSON cannot hold (a complex one)."""
    if isinstance(value, (list, tuple)):
        return tuple(_frozen(item) for item in value)
    return None if isinstance(value, complex) else value
