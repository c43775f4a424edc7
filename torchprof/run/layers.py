"""What a layer is, and the layers of a run as a tree."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import add
from typing import TypeVar

from torchprof.run.words import OUTSIDE


@dataclass(frozen=True)
class Layer:
    """What a layer is, not what it did.

    ``path``: root class name, then attribute names. ``kind``: class name. ``params``, ``trainable_params`` and
    ``param_bytes`` count the parameters that the layer itself holds (not its children), each at the first layer that
    holds it; None where a lazy layer has not made them yet, or a quantised one has packed them. ``dtype_bytes`` are the
    same bytes by type ("float32"), ``buffers`` and ``buffer_bytes`` the elements and bytes of its buffers. Shapes are
    those of the first forward call: one tuple for each tensor, with -1 for a size that is no number (nested tensors);
    ``()`` where it was not called. ``same_shapes``: of a model, whether all its forward calls had inputs of these
    shapes, None where that is not known, and for the layers below it (see ``analyze.varying``). ``output_bytes`` is
    how large the tensors are that the first call returned, None where that is not known. ``settings`` are what a layer
    of torch's own says of itself, as ``print(model)`` has it ("3, 64, kernel_size=(7, 7), stride=(2, 2)"); empty for
    other classes, whose ``extra_repr`` is not known.
    A trace that was read without the model does not describe the layers: ``kind`` may be empty then, and what the layer
    holds, its buffers and whether it was in ``training`` mode are None.
    ``compiled``: inside a ScriptModule or a module under torch.compile, where it may run without being called.
    ``tied``: it holds parameters that count at another layer. ``recursive``: it was called inside of its own calls, so
    that not each of them is one by itself.
    ``shared_with``: the other paths of the same module. ``ranks``: those that have it, ascending; ``()`` for all that
    are in the run.
    """

    path: tuple[str, ...]
    kind: str
    params: int | None = 0
    trainable_params: int | None = 0
    param_bytes: int | None = 0
    dtype_bytes: tuple[tuple[str, int], ...] = ()
    buffers: int | None = 0
    buffer_bytes: int | None = 0
    input_shapes: tuple[tuple[int, ...], ...] = ()
    output_shapes: tuple[tuple[int, ...], ...] = ()
    same_shapes: bool | None = None
    output_bytes: int | None = None
    training: bool | None = True
    settings: str = ""
    compiled: bool = False
    tied: bool = False
    recursive: bool = False
    shared_with: tuple[tuple[str, ...], ...] = ()
    ranks: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """The path as a dotted string."""
        return ".".join(self.path)


_Value = TypeVar("_Value")
_Key = TypeVar("_Key", bound=Hashable)


class Layers(tuple[Layer, ...]):
    """The layers of a run, parents before children, and how they lie in the tree. Equal to a tuple of the same layers.

    Other values refer to a layer by its index here; a negative number is no layer (``OUTSIDE``, ``NOT_SELECTED``). What
    a property returns is computed when it is first asked for, and kept.
    """

    @classmethod
    def of(cls, layers: Iterable[Layer]) -> Layers:
        """These layers, as they are where they are ``Layers`` already."""
        return layers if isinstance(layers, cls) else cls(layers)

    @cached_property
    def index_of(self) -> dict[tuple[str, ...], int]:
        """The index of each layer by its path."""
        return {layer.path: index for index, layer in enumerate(self)}

    @cached_property
    def parent(self) -> tuple[int, ...]:
        """For each layer the index of the one above it, ``OUTSIDE`` for a model."""
        index_of = self.index_of
        return tuple(index_of.get(layer.path[:-1], OUTSIDE) for layer in self)

    @cached_property
    def children(self) -> tuple[list[int], ...]:
        """For each layer the indices of those directly below it, in the model's order."""
        children: tuple[list[int], ...] = tuple([] for _ in self)
        for index, above in enumerate(self.parent):
            if above >= 0:
                children[above].append(index)
        return children

    @cached_property
    def roots(self) -> tuple[int, ...]:
        """The indices of the models."""
        return tuple(index for index, above in enumerate(self.parent) if above < 0)

    def lineage(self, index: int) -> tuple[int, ...]:
        """The indices on the way from the model to a layer, the layer itself last; a negative number stands alone."""
        found = [index]
        while index >= 0 and (index := self.parent[index]) >= 0:
            found.append(index)
        return tuple(reversed(found))

    def roll_up(self, values: Sequence[_Value], plus: Callable[[_Value, _Value], _Value] = add) -> list[_Value]:
        """For each layer the sum of its value and those of all layers below it: totals, from what each has itself.

        Values after those of the layers, as of work of no layer, stay as they are.
        """
        totals = list(values)
        for index in range(len(self) - 1, -1, -1):  # children come after their parents
            above = self.parent[index]
            if above >= 0:
                totals[above] = plus(totals[above], totals[index])
        return totals

    def roll_up_by_phase(
        self, values: Mapping[tuple[int, _Key], _Value], plus: Callable[[_Value, _Value], _Value] = add
    ) -> dict[tuple[int, _Key], _Value]:
        """The same of values by layer and phase, where most layers have none."""
        totals: dict[tuple[int, _Key], _Value] = {}
        for (layer, phase), value in values.items():
            for at in self.lineage(layer):
                key = at, phase
                totals[key] = plus(totals[key], value) if key in totals else value
        return totals
