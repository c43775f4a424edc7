"""What the operators and collectives of a trace were called on, each kind once, by its number."""

from __future__ import annotations

import ast
import marshal
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torchprof.attribute.events import Detail
from torchprof.run.collectives import signature_of
from torchprof.run.words import Signature, is_collective
from torchprof.traces.categories import OP, OP_OR_RANGE, RANGE
from torchprof.traces.values import frozen, shape_of, text_of


class Signatures:
    """The signatures of a trace; ``all`` has them by their number. Number 0 is the empty one.

    ``operators``: the numbers of the names that are of operators, in traces that do not distinguish these from ranges.
    """

    def __init__(self, detail: Callable[[str], Detail]) -> None:
        """``detail`` says for the name of an op what is kept of its inputs."""
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
        """The number of what an op, or a collective's range, was called on; equal ones have one number."""
        shapes = args["Input Dims"] if "Input Dims" in args else args["Input dims"]  # as torch 1.8 spelled it
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
        key = marshal.dumps((shapes, dtypes, values), 2)  # as in a Recording
        number = self._signature_of.get(key)
        if number is None:
            number = self._signature_of[key] = self._intern(self._checked(shapes, dtypes, values))
        return number

    def _checked(self, shapes: Any, dtypes: Any, values: Any) -> Signature | None:
        """The signature from what an event's args say; what is not as torch writes it is unknown.

        ``shapes`` is a list with an entry for each input, and so are ``dtypes`` and ``values`` where they are known.
        """
        if not isinstance(shapes, list):
            return None

        def each(entries: Any, read: Callable[[Any], Any]) -> tuple[Any, ...]:
            fits = isinstance(entries, list) and len(entries) == len(shapes)
            return tuple(map(read, entries)) if fits else ()

        return Signature(each(shapes, shape_of), each(dtypes, text_of), each(values, self._scalar))

    def of_collective(self, args: Mapping[str, Any]) -> int:
        """The number of what an event's args say of a collective; 0 where they name none."""
        signature = signature_of(args)
        if signature is None:
            return 0
        scalars = tuple(text_of(value) if isinstance(value, str) else value for value in signature.scalars)
        return self._intern(signature._replace(dtypes=tuple(map(text_of, signature.dtypes)), scalars=scalars))

    def _intern(self, signature: Signature | None) -> int:
        if signature is None:
            return 0
        number = self._number_of.setdefault(signature, len(self.all))
        if number == len(self.all):
            self.all.append(signature)
        return number

    def _scalar(self, text: Any) -> Any:
        """A value from how torch wrote it; None for what it does not say."""
        text = text_of(text)
        try:
            return self._scalars[text]
        except KeyError:
            try:
                value = frozen(ast.literal_eval(text))
            except (ValueError, SyntaxError, MemoryError, RecursionError):
                value = text
            self._scalars[text] = value
            return value


def shapes_in(signatures: Iterable[Signature]) -> Iterator[tuple[int, ...]]:
    """Of all tensors, those in lists included."""
    waiting = [shape for signature in signatures for shape in signature.shapes if shape]
    while waiting:
        shape = waiting.pop()
        if all(type(size) is int for size in shape):
            yield shape
        else:
            waiting.extend(one for one in shape if type(one) is tuple and one)
