"""The modules of a model: walked, named, selected, and mapped to the layers that users see."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from math import prod
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from torchprof.attribute.compiled_graphs import ProfiledModule
from torchprof.attribute.events import Site
from torchprof.attribute.launches import layers_by_fqn
from torchprof.record.compiled.dynamo_code import is_under_compile
from torchprof.record.labels import Target, label_of
from torchprof.record.modules import (
    Trace,
    class_name,
    is_exported,
    root_name,
    select,
    user_class_of,
    walk_modules,
    with_wrapped,
    wrapped_step,
)
from torchprof.record.parameters import Owners, Replicas, Updates
from torchprof.record.ranges import stages_given, stages_of_modules
from torchprof.run.layers import Layer, root_of_stage


class ModuleAtPath(NamedTuple):
    """A module at one path in a model.

    ``path``: the real path. ``shown``: the path that users see, without wrappers; ``layer``: the number of the layer
    with this path. ``module``: a weak reference, so that the plan does not keep the module alive. ``wrapper``: the
    number of the spot of the module that only wraps this one. ``compiled``: whether it is inside a ScriptModule, a
    module under torch.compile or a graph of torch.export, so that its code may run without a call of its forward.
    ``callable``: whether it has a forward.
    """

    path: tuple[str, ...]
    leaf: bool
    module: ref[nn.Module]
    shown: tuple[str, ...]
    layer: int
    wrapper: int | None
    compiled: bool
    callable: bool


def _spots(
    models: Sequence[nn.Module], before: Sequence[ModuleAtPath], stages: Mapping[int, int]
) -> list[ModuleAtPath]:
    """The spots ``before``, then all modules of some models: model after model, depth first. A second model of a class
    is called ``Net#2``, and one that a stage of a pipeline calls, ``Net (stage 3)``: each rank has others. ``stages``:
    by the id of a model, the number of its stage, where that is known; for other models, stages are searched."""
    spots = list(before)
    layers = {spot.shown: spot.layer for spot in spots}
    if any(id(model) not in stages for model in models):
        stages = {**stages_of_modules(), **stages}
    roots = [spot for spot in spots if len(spot.path) == 1]
    real = Counter(_unnumbered(spot.path[0]) for spot in roots)
    shown = Counter(_unnumbered(spot.shown[0]) for spot in roots)
    no_forward = nn.Module.forward
    for model in models:
        stage = stages.get(id(model))
        root = _numbered(_root_name(with_wrapped(model)[-1], stage), shown)
        above: dict[tuple[str, ...], tuple[int, str | None, bool]] = {}
        for path, leaf, module in walk_modules(model, name=_numbered(_root_name(model, stage), real)):
            shown_path: tuple[str, ...] = (root,)
            wrapper, compiled = None, False
            if len(path) > 1:
                number, wrapped, compiled = above[path[:-1]]
                shown_path = spots[number].shown
                if wrapped == path[-1]:
                    wrapper = number
                else:
                    shown_path = (*shown_path, path[-1])
            if not leaf:
                is_script = isinstance(module, torch.jit.ScriptModule)
                may_inline = compiled or is_script or is_under_compile(module) or is_exported(module)
                above[path] = len(spots), wrapped_step(module), may_inline
            has_forward = getattr(type(module), "forward", None) is not no_forward or "forward" in vars(module)
            layer = layers.setdefault(shown_path, len(layers))
            spots.append(ModuleAtPath(path, leaf, ref(module), shown_path, layer, wrapper, compiled, has_forward))
    return spots


def _root_name(model: nn.Module, stage: int | None) -> str:
    return root_name(model) if stage is None else root_of_stage(root_name(model), stage)


def _numbered(name: str, taken: Counter[str]) -> str:
    taken[name] += 1
    return name if taken[name] == 1 else f"{name}#{taken[name]}"


def _unnumbered(name: str) -> str:
    return name.partition("#")[0]


class Plan:
    """Which modules are labelled, and as which layers they are shown.

    The plan has weak references to modules only. The layer of a module that was freed keeps the values of the last call
    of ``layers``. ``layer_paths``: for each layer, the path that users see. ``targets``: the modules to label.
    ``sites``: by label, the layers it stands for. ``selected``: the selected layers, None for all.
    ``with_event_lists``: the real paths of the modules whose calls ``raw()`` lists. ``spots``: all modules by path.
    """

    def __init__(self, models: Sequence[nn.Module], paths: Iterable[Any] | None, given: Any = None) -> None:
        """``given``: what the user gave. The stages in it need no search."""
        self.targets: list[Target] = []
        self.sites: dict[str, Site] = {}
        self.layer_paths: list[tuple[str, ...]] = []
        self.selected: set[int] | None = None
        self.with_event_lists: set[tuple[str, ...]] = set()
        self.spots: list[ModuleAtPath] = []
        self._layers_chosen: set[int] = set()
        self._target_of: dict[int, Target] = {}  # by the id of a module, valid while that is alive
        self._real_paths: dict[tuple[str, int], tuple[str, ...]] = {}
        self._layers: tuple[Layer, ...] = ()  # of the last call of layers()
        self._replicas = Replicas()
        self._updates = Updates()
        self._add(models, paths, stages_given(given))

    def add(self, model: nn.Module) -> list[Target]:
        """Add all modules of one more model; returns the new targets. The plan of the other models stays."""
        known = len(self.targets)
        self._add([model], None, {})
        _ = self.layers(), self.replicated  # now, because the model may be freed before the next call
        return self.targets[known:]

    def knows(self, module: nn.Module) -> bool:
        """Whether a module is labelled."""
        return self._target(module) is not None

    def _target(self, module: nn.Module) -> Target | None:
        target = self._target_of.get(id(module))
        return target if target is not None and target.module() is module else None

    def _add(self, models: Sequence[nn.Module], paths: Iterable[Any] | None, stages: Mapping[int, int]) -> None:
        first = len(self.spots)
        self.spots = _spots(models, self.spots, stages)
        spots = self.spots[first:]
        for spot in spots:
            module = spot.module()
            own = {} if module is None else module.__dict__.get("_parameters", {})
            self._updates.look(param for param in own.values() if param is not None and not is_lazy(param))
            if spot.layer == len(self.layer_paths):
                self.layer_paths.append(spot.shown)
        chosen = set(range(first, len(self.spots)))
        if paths is not None:
            chosen = select(paths, [(spot.path, spot.shown) for spot in spots])
        self.with_event_lists |= {
            spot.path for index, spot in enumerate(spots, first) if (spot.leaf if paths is None else index in chosen)
        }
        # A wrapper and the module it wraps are one layer: to select one of them selects both.
        self._layers_chosen |= {self.spots[index].layer for index in chosen}
        self.selected = None if paths is None else self._layers_chosen
        self._label(first)

    def _label(self, first: int) -> None:
        """Make targets of the selected modules, and of those outside every selected one: they are shown separately."""
        at_or_below_chosen: set[tuple[str, ...]] = set()
        inside_chosen: set[int] = set()
        spots_of: dict[int, list[int]] = {}  # id of a module → its spots
        for index, spot in enumerate(self.spots[first:], first):
            key = id(spot.module())
            spots_of.setdefault(key, []).append(index)
            if spot.layer in self._layers_chosen or spot.path[:-1] in at_or_below_chosen:
                at_or_below_chosen.add(spot.path)
                inside_chosen.add(key)
        for key, numbers in spots_of.items():
            layers = tuple(dict.fromkeys(self.spots[index].layer for index in numbers))
            if self._layers_chosen.isdisjoint(layers) and key in inside_chosen:
                continue
            spot = self.spots[numbers[0]]
            module = spot.module()
            if module is None or (spot.compiled and isinstance(module, torch.jit.ScriptModule)):
                continue  # the ScriptModule around it runs it: Python does not call its forward
            target = self._target(module)
            if target is None:
                target = self._target_of[key] = Target(
                    ref(module),
                    label_of(spot.path),
                    spot.compiled,
                    training=_trains(module),
                    is_model=len(spot.shown) == 1,
                )
                self.targets.append(target)
            around = self._around(spot)
            before = self.sites.get(target.label, Site((), around.label if around else None))
            self.sites[target.label] = before._replace(layers=(*before.layers, *layers))
            for place in map(self.spots.__getitem__, reversed(numbers)):
                self._real_paths[target.label, place.layer] = place.path

    def _around(self, spot: ModuleAtPath) -> Target | None:
        """The target of the module that only wraps this one."""
        wrapper = self.spots[spot.wrapper].module() if spot.wrapper is not None else None
        return self._target(wrapper) if wrapper is not None else None

    def _alive(self) -> list[tuple[ModuleAtPath, nn.Module]]:
        """The spots whose modules are alive, each with its module."""
        return [(spot, module) for spot in self.spots if (module := spot.module()) is not None]

    @property
    def models(self) -> list[nn.Module]:
        """The models that are alive."""
        return [module for spot, module in self._alive() if len(spot.path) == 1]

    @property
    def traces(self) -> tuple[Trace, ...]:
        """All modules that are alive."""
        return tuple(Trace(spot.path, spot.leaf, module) for spot, module in self._alive())

    @property
    def names(self) -> list[str]:
        """The names of the models that users see."""
        return [path[0] for path in self.layer_paths if len(path) == 1]

    @property
    def callable_layers(self) -> set[int]:
        """The selected layers that run only if their forward is called: compiled code may inline the others."""
        callable_spots = [spot for spot in self.spots if spot.callable and not spot.compiled]
        return {spot.layer for spot in callable_spots if spot.layer in self._layers_chosen}

    @property
    def modules(self) -> dict[tuple[str, ...], ProfiledModule]:
        """The layer and the class of each module that is alive, by its real path."""
        return {spot.path: ProfiledModule(spot.layer, type(module).__name__) for spot, module in self._alive()}

    @property
    def under_compile(self) -> list[tuple[int, nn.Module]]:
        """The layers whose calls go through torch.compile, with their modules."""
        return [(spot.layer, module) for spot, module in self._alive() if is_under_compile(module)]

    def holders_of(self, tensors: Sequence[torch.Tensor | None]) -> list[tuple[tuple[str, ...], ...] | None]:
        """For each tensor, the real paths of the modules that have it as their own parameter or buffer; ``()`` if only
        other modules of the process have it. None if no module has it (a buffer that was replaced since), or if the
        tensor was freed (None). A parameter that FSDP2 gathered is that of its module; a tensor of a graph with
        ``torch._inductor.config.freezing`` may have the memory of a parameter."""
        owners = Owners((spot.path, spot.module()) for spot in self.spots)
        return [owners.of(tensor) for tensor in tensors]

    def is_alone(self, path: tuple[str, ...]) -> bool:
        """Whether the module with this real path is the only instance of its class in this process."""
        module = next((module for spot, module in self._alive() if spot.path == path), None)
        return (
            module is not None
            and sum(type(referrer) is type(module) for referrer in gc.get_referrers(type(module))) == 1
        )

    @property
    def fqns(self) -> dict[str, list[int]]:
        """The layers by their names in FSDP: their real paths, starting below the outermost sharded module."""
        root_of: dict[tuple[str, ...], tuple[str, ...]] = {}  # path → path of the outermost sharded module
        by_fqn: dict[str, list[int]] = {}
        for spot in self.spots:
            root = root_of.get(spot.path[:-1], spot.path if _is_sharded(spot.module()) else None)
            if root is not None:
                root_of[spot.path] = root
                layers = by_fqn.setdefault(".".join(spot.path[len(root) :]), [])
                layers += [] if spot.layer in layers else [spot.layer]
        return by_fqn or layers_by_fqn(self.layer_paths)

    @property
    def replicated(self) -> dict[int, set[int]]:
        """The layers whose gradients DistributedDataParallel exchanges; see ``Replicas.exchanged_layers``. Those of a
        freed module keep their last values."""
        return self._replicas.exchanged_layers(self._shown_modules(), self.models)

    def unordered(self) -> list[str]:
        """The models whose buckets of gradients are not in the order in which the gradients become ready; see
        ``Replicas.layers_with_unordered_buckets``."""
        layers = self._replicas.layers_with_unordered_buckets(self._shown_modules(), self.models)
        return [".".join(self.layer_paths[layer]) for layer in layers]

    def _shown_modules(self) -> list[tuple[nn.Module | None, int]]:
        """The modules, None for those that were freed, each with the number of its layer."""
        return [(spot.module(), spot.layer) for spot in self.spots]

    def real_path(self, label: str, layer: int) -> tuple[str, ...] | None:
        """The real path of the module that has a label, as this layer; None if it is not shown as this layer."""
        return self._real_paths.get((label, layer))

    @property
    def selected_paths(self) -> tuple[tuple[str, ...], ...] | None:
        """The paths of the layers that were selected, None for all."""
        return None if self.selected is None else tuple(self.layer_paths[layer] for layer in sorted(self.selected))

    def layers(self) -> tuple[Layer, ...]:
        """The layers as they are now, depth first. A layer of a freed module keeps its last values."""
        modules: dict[int, list[nn.Module | None]] = {}  # by layer: wrappers first, the wrapped module last
        places: dict[int, list[int]] = {}  # id of a module → its layers
        for spot in self.spots:
            module = spot.module()
            modules.setdefault(spot.layer, []).append(module)
            places.setdefault(id(module), []).append(spot.layer)
        compiled = {spot.layer for spot in self.spots if spot.compiled and spot.wrapper is None}
        counted: set[int] = set()
        layers = []
        updated: dict[int, int] = {}  # by layer: the elements of parameters that changed in a recording
        for index, path in enumerate(self.layer_paths):
            here = [module for module in modules[index] if module is not None]
            if len(here) < len(modules[index]):
                layers.append(self._layers[index])
                continue
            core = here[-1]
            params, buffers, tied = _uncounted_tensors(here, counted)
            sizes: dict[torch.dtype, int] = {}
            unknown = any(map(is_lazy, params)) or any(map(_is_packed, here))
            numbers = [] if unknown else [param.numel() for param in params]
            for param, number in zip(params, numbers):
                sizes[param.dtype] = sizes.get(param.dtype, 0) + number * param.element_size()
            made = [buffer for buffer in buffers if not is_lazy(buffer)]
            target = self._target(core) or self._target(here[0])
            inputs, outputs = (_plain(target.input_shapes), _plain(target.output_shapes)) if target else ((), ())
            layers.append(
                Layer(
                    path=path,
                    kind=class_name(core),
                    params=None if unknown else sum(numbers),
                    trainable_params=None
                    if unknown
                    else sum(number for param, number in zip(params, numbers) if param.requires_grad),
                    param_bytes=None if unknown else sum(sizes.values()),
                    dtype_bytes=tuple(sorted((_name_of(dtype), size) for dtype, size in sizes.items())),
                    buffers=sum(buffer.numel() for buffer in made),
                    buffer_bytes=sum(buffer.numel() * buffer.element_size() for buffer in made),
                    input_shapes=inputs,
                    output_shapes=outputs,
                    same_shapes=target.same_shapes if target and target.is_model else None,
                    grad_calls=target.grad_calls if target and target.same_shapes is not None else None,
                    settings=_settings(core),
                    tied=tied,
                    output_bytes=_bytes(outputs, target.output_types) if target else None,
                    training=target.training if target else _trains(core),
                    compiled=index in compiled,
                    shared_with=tuple(self.layer_paths[place] for place in places[id(core)] if place != index),
                )
            )
            updated[index] = sum(number for param, number in zip(params, numbers) if self._updates.changed(param))
        if any(updated.values()):
            layers = [
                replace(layer, updated_params=updated.get(index, layer.updated_params))
                for index, layer in enumerate(layers)
            ]
        self._layers = tuple(layers)
        return self._layers

    def changes(self) -> tuple[list[str], list[str]]:
        """The paths of modules that were added or replaced, and of those that were removed, since the plan was made."""
        before = {spot.path: spot.module() for spot in self.spots}
        now = {
            trace.path: trace.module
            for path, root in before.items()
            if len(path) == 1 and root is not None
            for trace in walk_modules(root, name=path[0])
        }
        added = [".".join(path) for path, module in now.items() if before.get(path) is not module]
        roots = {path[0] for path in now}
        return added, [".".join(path) for path in before if path not in now and path[0] in roots]


def _uncounted_tensors(
    modules: Iterable[nn.Module], counted: set[int]
) -> tuple[list[torch.Tensor], list[torch.Tensor], bool]:
    """The own parameters and the own buffers of some modules that no layer has counted yet, and whether one of their
    parameters was counted before (tied). Adds the ids of the new ones to ``counted``."""
    params: list[torch.Tensor] = []
    buffers: list[torch.Tensor] = []
    tied = False
    for module in modules:
        for of_kind, tensors in ((params, module._parameters), (buffers, module._buffers)):
            for tensor in tensors.values():
                if tensor is not None and id(tensor) not in counted:
                    counted.add(id(tensor))
                    of_kind.append(tensor)
                elif tensor is not None and of_kind is params:
                    tied = True
    return params, buffers, tied


def _is_sharded(module: nn.Module | None) -> bool:
    """Whether FSDP2's ``fully_shard`` or a similar function was applied to a module."""
    return module is not None and user_class_of(module) is not type(module)


def _settings(module: nn.Module) -> str:
    """``extra_repr()`` of a module of torch, "" for others: their text may have any content and length."""
    if not user_class_of(module).__module__.startswith(("torch.nn.", "torch.ao.nn.")):
        return ""
    try:
        return module.extra_repr()
    except Exception:  # a lazy or a broken module
        return ""


def _is_packed(module: nn.Module) -> bool:
    """Whether a quantized module has packed parameters, which cannot be counted."""
    return "_packed_params" in vars(module) or "_packed_params" in module._modules


@cache
def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _trains(module: nn.Module) -> bool:
    """Whether a module is in train mode. A frozen ScriptModule has no mode; it was in eval mode when it was frozen."""
    return bool(getattr(module, "training", False))


def _plain(shapes: Iterable[Iterable[Any]]) -> tuple[tuple[int, ...], ...]:
    """Shapes as plain integers, -1 for a size that is not an integer (nested and symbolic tensors)."""
    return tuple([tuple([size if type(size) is int else -1 for size in shape]) for shape in shapes])


def _bytes(shapes: Sequence[Sequence[int]], types: Sequence[torch.dtype]) -> int | None:
    """The bytes of all tensors with these shapes and types; None if there are none or if a size is unknown."""
    if not shapes or any(-1 in shape for shape in shapes):
        return None
    return sum(prod(shape) * dtype.itemsize for shape, dtype in zip(shapes, types))
