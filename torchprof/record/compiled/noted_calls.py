"""The tensors of modules that compiled code was called with."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar
from weakref import ref

from torch import nn

from torchprof.attribute.compiled_graphs import ModuleTensor
from torchprof.attribute.events import COMPILED_INPUTS
from torchprof.record.compiled.dynamo_sources import Taken


class NotedCalls:
    """The tensors of modules that compiled functions were called with, as weak references.

    Calls with the same tensors share one number. After ``MOST`` numbers only parameters are noted, because a forward
    may replace a buffer in each call. After ``2 * MOST`` numbers no tensors are noted: one number for each function.
    """

    MOST: ClassVar[int] = 10_000
    _all_on: ClassVar[list[NotedCalls]] = []

    def __init__(self) -> None:
        self._free = itertools.count()  # atomic: threads that call at the same time get different numbers
        self._tensors: dict[int, list[tuple[Taken, Callable[[], Any]]]] = {}  # by number
        self._numbers: dict[tuple[tuple[Taken, ...], tuple[int, ...]], int] = {}  # by the ids of the tensors

    @classmethod
    def current(cls) -> NotedCalls | None:
        """Where calls are noted now; None if none is on."""
        return cls._all_on[-1] if cls._all_on else None

    def on(self) -> None:
        NotedCalls._all_on.append(self)

    def off(self) -> None:
        NotedCalls._all_on.remove(self)

    def number_of(self, taken: tuple[Taken, ...], inputs: Sequence[Any]) -> int:
        """The number of a call. Raises IndexError or TypeError if the inputs are not those of the compiled graph."""
        tensors = [inputs[place.number] for place in taken]
        noted: list[Any] = tensors
        for most in (NotedCalls.MOST, 2 * NotedCalls.MOST, None):
            key = taken, tuple(map(id, noted))
            number = self._numbers.get(key)
            if number is not None and all(
                known() is tensor for (_, known), tensor in zip(self._tensors[number], noted)
            ):
                return number
            if most is None or len(self._tensors) < most:
                break
            is_full = most > NotedCalls.MOST
            noted = [None if is_full or not isinstance(tensor, nn.Parameter) else tensor for tensor in tensors]
        number = next(self._free)
        self._tensors[number] = [
            (place, _nothing if tensor is None else ref(tensor)) for place, tensor in zip(taken, noted)
        ]
        self._numbers[key] = number
        return number

    def given(self, holders_of: Callable[[Sequence[Any]], Sequence[Any]]) -> dict[str, list[ModuleTensor]]:
        """The tensors taken in each call, by the name of its range. ``holders_of``: see ``Plan``."""
        calls = [*self._tensors.items()]
        tensors = [tensor() for _, call in calls for _, tensor in call]
        holders = iter(holders_of(tensors))
        alive = iter(tensors)
        return {
            f"{COMPILED_INPUTS}{number}": [
                ModuleTensor(place.root, place.path, next(holders), next(alive) is None) for place, _ in call
            ]
            for number, call in calls
        }


def _nothing() -> None:
    """In place of a weak reference, for a tensor that was not noted."""
