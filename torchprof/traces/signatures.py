"""The inputs of the operators and collectives in a trace: each signature once, by its number."""

from __future__ import annotations

import ast
import marshal
from collections.abc import Callable, Mapping
from typing import Any

from torchprof.attribute.events import Detail
from torchprof.run.collectives import signature_of
from torchprof.run.words import Signature, is_collective
from torchprof.traces.categories import OP, OP_OR_RANGE, RANGE
from torchprof.traces.values import encodable_text, frozen, parse_shape


class Signatures:
    """The signatures of a trace. ``all`` has them by their number; number 0 is the empty one.

    ``operators``: the numbers of the names of operators, in traces that have one category for operators and ranges.
    """

    def __init__(self, detail: Callable[[str], Detail]) -> None:
        """``detail`` returns for the name of an operator how much of its inputs is kept."""
        self.all: list[Signature] = [Signature((), ())]
        self.operators: set[int] = set()
        self._detail = detail
        self._details: dict[str, Detail] = {}
        self._signature_of: dict[bytes, int] = {}
        self._number_of = {self.all[0]: 0}
        self._scalars: dict[str, Any] = {"": None}

    @property
    def has_shapes(self) -> bool:
        return any(self._signature_of.values())

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
        detail = self._details.get(name)
        if detail is None:
            detail = self._details[name] = Detail.SHAPES if group is RANGE else self._detail(name)
        dtypes = args.get("Input type", ())
        values = args.get("Concrete Inputs", ()) if detail in (Detail.ONES, Detail.SCALARS) else ()
        if detail is Detail.ONES and isinstance(values, list):
            values = [value if value in ("", "0", "1", "True", "False", "0.", "1.") else "2" for value in values]
        key = marshal.dumps((shapes, dtypes, values), 2)  # the same kind of key as in record.raw_events
        number = self._signature_of.get(key)
        if number is None:
            number = self._signature_of[key] = self._intern(self._checked(shapes, dtypes, values))
        return number

    def _checked(self, shapes: Any, dtypes: Any, values: Any) -> Signature | None:
        """The signature from an event's args. Values that torch does not write are unknown.

        ``shapes`` is a list with an entry for each input; so are ``dtypes`` and ``values``, if they are known.
        """
        if not isinstance(shapes, list):
            return None

        def each(entries: Any, read: Callable[[Any], Any]) -> tuple[Any, ...]:
            fits = isinstance(entries, list) and len(entries) == len(shapes)
            return tuple(map(read, entries)) if fits else ()

        return Signature(each(shapes, parse_shape), each(dtypes, encodable_text), each(values, self._scalar))

    def of_collective(self, args: Mapping[str, Any]) -> int:
        """The number of the signature of a collective, from an event's args; 0 if they name no collective."""
        signature = signature_of(args)
        if signature is None:
            return 0
        scalars = tuple(encodable_text(value) if isinstance(value, str) else value for value in signature.scalars)
        return self._intern(signature._replace(dtypes=tuple(map(encodable_text, signature.dtypes)), scalars=scalars))

    def _intern(self, signature: Signature | None) -> int:
        if signature is None:
            return 0
        number = self._number_of.setdefault(signature, len(self.all))
        if number == len(self.all):
            self.all.append(signature)
        return number

    def _scalar(self, text: Any) -> Any:
        """A value from torch's text of it; None if the text has no value."""
        text = encodable_text(text)
        if text not in self._scalars:
            try:
                self._scalars[text] = frozen(ast.literal_eval(text))
            except (ValueError, SyntaxError, MemoryError, RecursionError):
                self._scalars[text] = text
        return self._scalars[text]
