"""The inputs of the operators and collectives in a trace, read from its JSON, in which any value may be malformed."""

from __future__ import annotations

import ast
import marshal
from collections.abc import Callable, Iterable, Mapping
from math import isfinite
from typing import Any

from torchprof.attribute.event_columns import BEYOND
from torchprof.attribute.events import Detail, SignatureTable
from torchprof.run.collectives import signature_of
from torchprof.run.words import Signature, is_collective
from torchprof.traces.columns import OP, OP_OR_RANGE, RANGE


class TraceSignatures(SignatureTable):
    """The inputs of the operators and collectives of a trace: ``record.session_columns.InputSignatures`` are those of a
    live session. For example, the args ::

        {"Input Dims": [[8, 4], []], "Input type": ["float", "Scalar"], "Concrete Inputs": ["", "2.5"]}

    are ``Signature(shapes=((8, 4), ()), dtypes=("float", "Scalar"), scalars=(None, 2.5))``.

    ``operators``: the numbers of the names of operators, in traces that have one category for operators and ranges.
    """

    def __init__(self, detail: Callable[[str], Detail]) -> None:
        """``detail``: for the name of an operator, how much of its inputs is kept."""
        super().__init__()
        self.operators: set[int] = set()
        self._detail = detail
        self._details: dict[str, Detail] = {}
        self._scalars: dict[str, Any] = {"": None}

    @property
    def has_shapes(self) -> bool:
        return any(self._number_of_bytes.values())

    def of_operator(self, name: str, group: str, name_number: int, args: Mapping[str, Any]) -> int:
        """The number of the signature of an operator, or of a collective's range; equal signatures have one number."""
        shapes = args["Input Dims"] if "Input Dims" in args else args["Input dims"]  # the spelling of torch 1.8
        if not shapes:
            return 0
        if group is not OP:
            if group is OP_OR_RANGE:
                self.operators.add(name_number)
            if group is RANGE and not is_collective(name):
                return 0
        if "Collective name" in args:
            return self.of_collective(args)
        if (detail := self._details.get(name)) is None:
            detail = self._details[name] = Detail.SHAPES if group is RANGE else self._detail(name)
        dtypes = args.get("Input type", ())
        values = args.get("Concrete Inputs", ()) if detail in (Detail.ONES, Detail.SCALARS) else ()
        if detail is Detail.ONES and isinstance(values, list):
            values = [value if value in ("", "0", "1", "True", "False", "0.", "1.") else "2" for value in values]
        key = marshal.dumps((shapes, dtypes, values), 2)
        if (number := self._number_of_bytes.get(key)) is None:
            number = self._number_of_bytes[key] = self._number(self._checked(shapes, dtypes, values))
        return number

    def _checked(self, shapes: Any, dtypes: Any, values: Any) -> Signature:
        """The signature from an event's args, with an entry for each input; what torch would not write is unknown."""
        if not isinstance(shapes, list):
            return self.all[0]

        def each(entries: Any, read: Callable[[Any], Any]) -> tuple[Any, ...]:
            fits = isinstance(entries, list) and len(entries) == len(shapes)
            return tuple(map(read, entries)) if fits else ()

        return Signature(each(shapes, _parsed_shape), each(dtypes, encodable_text), each(values, self._scalar))

    def of_collective(self, args: Mapping[str, Any]) -> int:
        """The number of the signature of a collective, from an event's args; 0 if they name no collective."""
        if (signature := signature_of(args)) is None:
            return 0
        scalars = tuple(encodable_text(value) if isinstance(value, str) else value for value in signature.scalars)
        return self._number(signature._replace(dtypes=tuple(map(encodable_text, signature.dtypes)), scalars=scalars))

    def _scalar(self, text: Any) -> Any:
        """A value from torch's text of it; None if the text has no value."""
        text = encodable_text(text)
        if text not in self._scalars:
            try:
                self._scalars[text] = _frozen(ast.literal_eval(text))
            except (ValueError, SyntaxError, MemoryError, RecursionError):
                self._scalars[text] = text
        return self._scalars[text]


# Values in the JSON


def encodable_text(value: Any) -> str:
    """A string that UTF-8 can encode; "" for other values. Half of a surrogate pair, which JSON can escape, is "?"."""
    return value.encode(errors="replace").decode() if isinstance(value, str) else ""


def _parsed_shape(value: Any) -> Any:
    """The sizes of a tensor as a tuple, or a tuple of these for a list of tensors; None for other values."""
    if not isinstance(value, list):
        return None
    if value and all(isinstance(part, list) for part in value):
        tensors = tuple(map(_sizes, value))
        return None if None in tensors else tensors
    return _sizes(value)


def _sizes(value: Iterable[Any]) -> tuple[int, ...] | None:
    sizes = tuple(value)
    return sizes if all(type(size) is int and 0 <= size < BEYOND for size in sizes) else None


def _frozen(value: Any) -> Any:
    """The value with tuples in place of lists, and None in place of values that JSON cannot hold (complex numbers)."""
    if isinstance(value, (list, tuple)):
        return tuple(map(_frozen, value))
    known = value is None or isinstance(value, (bool, int, str)) or (isinstance(value, float) and isfinite(value))
    return value if known else None
