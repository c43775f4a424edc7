"""``Layer`` describes one layer, ``Layers`` is the tree of all layers of a run; names of models, and paths of users."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import takewhile
from operator import add
from typing import Any, TypeVar

from torchprof.errors import TorchprofError, suggest
from torchprof.run.part import demand, read_as
from torchprof.run.words import NO_LAYERS, OUTSIDE

_OF_CALLS = ("input_number", "grad_calls", "noted_calls", "repeated_calls", "longer_calls", "grad_inputs")
_OF_STEPS = ("optimizer_steps", "used_gradients")
_COUNTED = (
    "params",
    "trainable_params",
    "param_bytes",
    "buffers",
    "buffer_bytes",
    "updated_params",
    *_OF_CALLS,
    *_OF_STEPS,
)
"""Counts of a layer: kept in the merged layer if equal on all ranks, else None."""
_IF_ANY = ("compiled", "tied", "recursive")
"""True of a merged layer if true on any rank."""


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
    - ``input_number``: a number for the first tensor of the first call: layers with the same one got the same tensor,
      or parts of it. None if that is unknown.
    - ``padding``: of the sequences in its first call, by the ``padding_idx`` of an embedding or by a mask: how many
      positions there are, how many of these are padding, and how many are so in all sequences. ``()`` if unknown.
    - ``same_shapes``: of a model, whether all its forward calls had inputs of these shapes. None if that is unknown,
      and for all layers below a model (see ``varying_calls``).
    - ``updated_params``: those of its own parameters that changed in place, as by an optimizer, since the profile was
      made. None if none of any layer did, and if that is unknown.
    - ``grad_calls``: of a model, how many of its forward calls ran with gradients enabled; of a layer below, whether
      the first did (0 or 1). None if that is unknown.
    - ``noted_calls``: of a model, and of a layer below one with few others, how many of its calls were looked at; of
      these, ``repeated_calls`` had the very tensors of the call before, unchanged, with no step of an optimizer in
      between; in ``longer_calls`` one dimension of an input was longer by one than in the call before;
      ``grad_inputs`` had an input that requires a gradient. None of other layers, and if unknown.
    - ``optimizer_steps``: how many steps were recorded of the one of several optimizers that has its own parameters;
      ``used_gradients``: of how many gradients, which were added up, they made use. None without any.
    - ``output_bytes``: the size of the tensors that the first call returned; None if unknown.
    - ``training``: whether it was in train mode.
    - ``of_torch``: whether its class is one of torch's own; None if that is unknown. ``settings``: of such a layer, its
      ``extra_repr`` ("3, 64, kernel_size=(7, 7)"); empty for other classes.
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
    input_number: int | None = None
    padding: tuple[int, ...] = ()
    same_shapes: bool | None = None
    grad_calls: int | None = None
    updated_params: int | None = None
    noted_calls: int | None = None
    repeated_calls: int | None = None
    longer_calls: int | None = None
    grad_inputs: int | None = None
    optimizer_steps: int | None = None
    used_gradients: int | None = None
    output_bytes: int | None = None
    training: bool | None = True
    of_torch: bool | None = None
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

    def __add__(self, cycle: Layer) -> Layer:
        """The layer as in a later cycle, with the shapes, output size and mode of its first call in any cycle."""
        if cycle == self:
            return self
        cycle = replace(cycle, recursive=self.recursive or cycle.recursive)
        if not self.input_shapes and not self.output_shapes:
            return cycle
        return replace(
            cycle,
            input_shapes=self.input_shapes,
            output_shapes=self.output_shapes,
            padding=self.padding,
            same_shapes=self._same_shapes(cycle) if cycle.input_shapes or cycle.output_shapes else self.same_shapes,
            output_bytes=self.output_bytes,
            training=self.training,
            # Of all cycles so far.
            **{
                name: getattr(self if getattr(cycle, name) is None else cycle, name)
                for name in (*_OF_CALLS, *_OF_STEPS, "updated_params")
            },
        )

    def merged(self, other: Layer) -> Layer:
        """The layer of two ranks: as on this one, which is lower, with what differs left out."""
        if self == other:
            return self
        changes: dict[str, Any] = {name: getattr(self, name) or getattr(other, name) for name in _IF_ANY}
        changes.update((name, None) for name in _COUNTED if getattr(self, name) != getattr(other, name))
        changes["same_shapes"] = self._same_shapes(other)
        if self.dtype_bytes != other.dtype_bytes:
            changes["dtype_bytes"] = ()
        return replace(self, **changes)

    def _same_shapes(self, other: Layer) -> bool | None:
        """``same_shapes`` over the calls of both; None if it is unknown for either."""
        if self.same_shapes is None or other.same_shapes is None:
            return None
        return self.same_shapes and other.same_shapes and self.input_shapes == other.input_shapes


_Value = TypeVar("_Value")
_Key = TypeVar("_Key", bound=Hashable)


class Layers(tuple[Layer, ...]):
    """The layers of a run, parents before children, as a tree. Equal to a tuple of the same layers. Other values refer
    to a layer by its index here; a negative number is not a layer (``OUTSIDE``, ``NOT_SELECTED``)."""

    @classmethod
    def of(cls, layers: Iterable[Layer]) -> Layers:
        """Make ``Layers`` of any layers; ``Layers`` are returned unchanged."""
        return layers if isinstance(layers, cls) else cls(layers)

    @classmethod
    def from_json(cls, stored: Any) -> Layers:
        """The layers of a file. Raises as described in ``run.part``."""
        layers = cls(read_as(tuple[Layer, ...], stored))
        known: set[tuple[str, ...]] = set()
        for layer in layers:
            demand(bool(layer.path) and layer.path not in known, f"the path {layer.path}")
            demand(len(layer.path) == 1 or layer.path[:-1] in known, f"the layer above {layer.name}")
            known.add(layer.path)
        return layers

    def added(self, cycle: Layers) -> Layers:
        """The layers of both cycles, matched by path. Those that only the later one has are at the end."""
        if [layer.path for layer in self] == [layer.path for layer in cycle]:  # as in most loops
            layers = Layers(map(add, self, cycle))
        else:
            later = cycle.index_of
            known = (layer + cycle[later[layer.path]] if layer.path in later else layer for layer in self)
            layers = Layers((*known, *(layer for layer in cycle if layer.path not in self.index_of)))
        return self if layers == self else layers  # it has computed its tree

    @cached_property
    def index_of(self) -> dict[tuple[str, ...], int]:
        """The index of each layer by its path."""
        return {layer.path: index for index, layer in enumerate(self)}

    def path_of(self, index: int) -> tuple[str, ...]:
        """The path of a layer; for a negative index ``("(outside)",)`` or ``("(not selected)",)``."""
        return self[index].path if index >= 0 else (NO_LAYERS[index],)

    def name_of(self, index: int) -> str:
        """The same as a name, with dots."""
        return ".".join(self.path_of(index))

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
        """For each layer the number of its group. Layers of one group differ only in the numbers of their paths, as
        ``blocks.0.mlp`` and ``blocks.1.mlp``: their class, its settings and the types of their parameters are equal."""
        groups: dict[Hashable, int] = {}
        group_of_layer = []
        for layer in self:
            path = tuple("*" if step.isdecimal() else step for step in layer.path)
            key = path, layer.kind, layer.settings, tuple(dtype for dtype, _ in layer.dtype_bytes)
            group_of_layer.append(groups.setdefault(key, len(groups)))
        return group_of_layer

    def at_or_below(self, tops: Collection[int]) -> set[int]:
        """The layers of ``tops`` and all layers below them, by index."""
        chosen: set[int] = set()
        for index, above in enumerate(self.parent):
            if index in tops or above in chosen:
                chosen.add(index)
        return chosen

    def lineage(self, index: int) -> tuple[int, ...]:
        """The indices from the model down to a layer, which is last. For a negative number only that number."""
        indices = [index]
        while index >= 0 and (index := self.parent[index]) >= 0:
            indices.append(index)
        return tuple(reversed(indices))

    def roll_up(self, values: Sequence[_Value], plus: Callable[[_Value, _Value], _Value] = add) -> list[_Value]:
        """For each layer the total: its own value plus those of all layers below it. A model with the value 1 and two
        children with 10 and 20 has the totals 31, 10, 20. ``values`` may be longer than the layers (work of no layer,
        for example): the rest is not changed."""
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
            for index in self.lineage(layer):
                key = index, phase
                totals[key] = plus(totals[key], value) if key in totals else value
        return totals


# Names of models

_ROOT = re.compile(r"(?P<kind>[^#]+?)( \(stage (?P<stage>\d+)\))?(#\d+)?")
"""The name of a model: its class, the stage of a pipeline that calls it, and a number from the second of a name on."""


def root_of_stage(kind: str, stage: int) -> str:
    """The name of the model of this class that a stage of a pipeline calls."""
    return f"{kind} (stage {stage})"


def kind_of_root(name: str) -> str:
    """The class of a model, by its name: "Net" of "Net#2" and of "Net (stage 1)"."""
    match = _ROOT.fullmatch(name)
    return name if match is None else match["kind"]


def stage_of_root(name: str) -> int | None:
    """The stage of a pipeline that calls a model, by the name of the model; None for others."""
    match = _ROOT.fullmatch(name)
    return None if match is None or match["stage"] is None else int(match["stage"])


# Paths of layers, as users write them


def find(path: Any, known: Sequence[tuple[tuple[str, ...], ...]]) -> set[int]:
    """The indices of the entries of ``known`` that a path matches, at least one. An entry holds the paths of one
    module: the real path, and the path that users see. ``path`` is a tuple of steps or a dotted string, with or without
    the root; ``*`` matches one step: "blocks.*.mlp" matches ``("Net", "blocks", "0", "mlp")``. Raises TorchprofError if
    nothing matches (the message has the nearest real paths) or if ``path`` is not a path."""
    steps = tuple(path.split(".")) if isinstance(path, str) else path
    if not isinstance(steps, (tuple, list)) or not steps or not all(isinstance(step, str) for step in steps):
        raise TorchprofError(
            f"{path!r} is not a path of a module. Write a tuple of names, ('Net', 'features', '3'), or a dotted "
            "string, 'features.3'; '*' matches any one step."
        )
    indices = matching(steps, known) or matching(steps, known, without=1)
    if not indices:
        dotted = [".".join(names[-1]) for names in known]
        raise TorchprofError(f"No module of the model matches the path {path!r}. {suggest('.'.join(steps), dotted)}")
    return indices


def matching(steps: Sequence[str], known: Sequence[tuple[tuple[str, ...], ...]], without: int = 0) -> set[int]:
    """The indices of the entries with a path of exactly these steps. Its first ``without`` steps are ignored."""
    return {
        index
        for index, paths in enumerate(known)
        for path in paths
        if len(path) - without == len(steps)
        and all(wanted in ("*", step) for wanted, step in zip(steps, path[without:]))
    }


_Step = TypeVar("_Step")


def common_prefix(paths: Iterable[tuple[_Step, ...]]) -> tuple[_Step, ...]:
    """The steps that all paths begin with: ("a", "b") of ("a", "b", "c") and ("a", "b", "d")."""
    prefix, *others = paths
    for other in others:
        prefix = tuple(step for step, _ in takewhile(lambda pair: pair[0] == pair[1], zip(prefix, other)))
    return prefix
