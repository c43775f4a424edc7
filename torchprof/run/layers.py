"""``Layer`` describes one layer; ``Layers`` is the tree of all layers of a run."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import add
from typing import TypeVar

from torchprof.run.words import NO_LAYERS, OUTSIDE


@dataclass(frozen=True)
class Layer:
    """What a layer is: class, parameters, shapes, mode. What it did is in ``Rows`` and ``Run.samples``.

    - ``path``: root class name, then attribute names. ``kind``: class name.
    - ``params``, ``trainable_params``, ``param_bytes``: the layer's own parameters (not its children's). A shared
      parameter counts at the first layer that has it. None if a lazy layer has not made them yet, or if a quantized
      layer has packed them. ``dtype_bytes``: the same bytes by type ("float32").
    - ``buffers``, ``buffer_bytes``: elements and bytes of its buffers.
    - ``input_shapes``, ``output_shapes``: of the first forward call, one tuple for each tensor; -1 for a size that is
      not a number (nested tensors). ``()`` if it was not called.
    - ``same_shapes``: of a model, whether all its forward calls had inputs of these shapes. None if that is unknown,
      and for all layers below a model (see ``analyze.varying``).
    - ``updated_params``: those of its own parameters that changed in place, as by an optimizer, since the profile was
      made. None if none of any layer did, and if that is unknown.
    - ``grad_calls``: of a model, how many of its forward calls ran with gradients enabled; of a layer below, whether
      the first did (0 or 1). None if that is unknown.
    - ``output_bytes``: the size of the tensors that the first call returned; None if unknown.
    - ``training``: whether it was in train mode.
    - ``settings``: the ``extra_repr`` of a layer class of torch ("3, 64, kernel_size=(7, 7), stride=(2, 2)"); empty for
      other classes.
    - ``compiled``: inside a ScriptModule or a module under torch.compile, where it may run without being called.
    - ``tied``: it has parameters that count at another layer.
    - ``recursive``: it was called inside its own calls, so its calls overlap.
    - ``shared_with``: the other paths of the same module.
    - ``ranks``: the ranks that have it, ascending; ``()`` for all ranks of the run.

    A trace that was read without the model does not describe its layers: ``kind`` may be empty, and the counts and
    bytes of parameters and buffers and ``training`` are None.
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
    grad_calls: int | None = None
    updated_params: int | None = None
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
    """The layers of a run, parents before children, as a tree. Equal to a tuple of the same layers.

    Other values refer to a layer by its index here; a negative number is not a layer (``OUTSIDE``, ``NOT_SELECTED``).
    Properties are computed at first use and cached.
    """

    @classmethod
    def of(cls, layers: Iterable[Layer]) -> Layers:
        """Make ``Layers`` of any layers; ``Layers`` are returned unchanged."""
        return layers if isinstance(layers, cls) else cls(layers)

    @cached_property
    def index_of(self) -> dict[tuple[str, ...], int]:
        """The index of each layer by its path."""
        return {layer.path: index for index, layer in enumerate(self)}

    def path_of(self, index: int) -> tuple[str, ...]:
        """The path of a layer; for a negative index ``("(outside)",)`` or ``("(not selected)",)``."""
        return self[index].path if index >= 0 else (NO_LAYERS[index],)

    @cached_property
    def parent(self) -> tuple[int, ...]:
        """For each layer the index of its parent, ``OUTSIDE`` for a model."""
        index_of = self.index_of
        return tuple(index_of.get(layer.path[:-1], OUTSIDE) for layer in self)

    @cached_property
    def children(self) -> tuple[list[int], ...]:
        """For each layer the indices of its children, in the model's order."""
        children: tuple[list[int], ...] = tuple([] for _ in self)
        for index, above in enumerate(self.parent):
            if above >= 0:
                children[above].append(index)
        return children

    @cached_property
    def roots(self) -> tuple[int, ...]:
        """The indices of the models."""
        return tuple(index for index, above in enumerate(self.parent) if above < 0)

    @cached_property
    def alike(self) -> list[int]:
        """For each layer a number, equal for layers that differ only in the numbers of their paths, as the same layer
        of every block: equal are their class, its settings and the types of their parameters."""
        numbers: dict[Hashable, int] = {}
        group_of_layer = []
        for layer in self:
            path = tuple("*" if step.isdecimal() else step for step in layer.path)
            key = path, layer.kind, layer.settings, tuple(dtype for dtype, _ in layer.dtype_bytes)
            group_of_layer.append(numbers.setdefault(key, len(numbers)))
        return group_of_layer

    def lineage(self, index: int) -> tuple[int, ...]:
        """The indices from the model down to a layer, which is last. For a negative number only that number."""
        found = [index]
        while index >= 0 and (index := self.parent[index]) >= 0:
            found.append(index)
        return tuple(reversed(found))

    def roll_up(self, values: Sequence[_Value], plus: Callable[[_Value, _Value], _Value] = add) -> list[_Value]:
        """For each layer the total: its own value plus those of all layers below it.

        ``values`` may be longer than the layers (work of no layer, for example): the rest is not changed.
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
        """The same for values by (layer, phase), of which most layers have none."""
        totals: dict[tuple[int, _Key], _Value] = {}
        for (layer, phase), value in values.items():
            for at in self.lineage(layer):
                key = at, phase
                totals[key] = plus(totals[key], value) if key in totals else value
        return totals
