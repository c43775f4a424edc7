"""What operators were called on: the shapes, types and scalars of their inputs, numbered."""

from __future__ import annotations

import json
import marshal
from collections.abc import Callable
from typing import Any

from torchprof.attribute.events import Detail
from torchprof.record.torch_internals import optional
from torchprof.run.collectives import signature_of
from torchprof.run.words import Signature

# Source lines that are left out: Python's builtins, torch's marks of modules, the functions that every call of a module
# goes through, and the labels and stand-ins of torchprof/record.
_NO_SOURCE = ("<", "nn.Module: ", "torch/nn/modules/module.py(", "torchprof/record/")
_shapes_of_lists: Callable[[Any], list[Any]] | None = optional(
    "torch._C._autograd._KinetoEvent.structured_input_shapes"
)


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
