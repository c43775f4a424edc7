"""The modules of a model: walked, named, selected, and mapped to the layers that users see."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
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
    Owners,
    Replicas,
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
from torchprof.record.ranges import stages_given, stages_of_modules
from torchprof.run.layers import Layer, root_of_stage


class ModuleAtPath(NamedTuple):
    """A module at one path in a model.

    ``path``: the real path. ``shown``: the path that users see, without wrappers; ``layer``: the number of the layer
    with this path. ``module``: a weak reference. ``wrapper``: the number of the spot of the module that only wraps this
    one. ``compiled``: whether it is inside a ScriptModule, a module under torch.compile or a graph of torch.export, so
    that its code may run without a call of its forward. ``callable``: whether it has a forward.
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
    real = Counter(spot.path[0].partition("#")[0] for spot in roots)
    shown = Counter(spot.shown[0].partition("#")[0] for spot in roots)
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
                wrapper = number if wrapped == path[-1] else None
                shown_path = spots[number].shown if wrapped == path[-1] else (*spots[number].shown, path[-1])
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


class Plan:
    """Which modules are labelled, and as which layers they are shown.

    The plan has weak references to modules only. The layer of a module that was freed keeps the values of the last call
    of ``layers``. ``layer_paths``: for each layer, the path that users see. ``targets``: the modules to label.
    ``sites``: by label, the layers it stands for. ``selected``: the selected layers, None for all.
    ``with_event_lists``: the real paths of the modules whose calls ``raw()`` lists. ``spots``: all modules by path.
    ``real_paths``: by label and layer, the real path of the module that has the label and is shown as the layer.
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
        self.real_paths: dict[tuple[str, int], tuple[str, ...]] = {}
        self._layers: tuple[Layer, ...] = ()  # of the last call of layers()
        self._replicas = Replicas()
        self._versions: dict[int, int | None] = {}  # of parameters, by id, when their model was added
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

    def _target(self, module: nn.Module | None) -> Target | None:
        target = self._target_of.get(id(module))
        return target if target is not None and target.module() is module else None

    def _add(self, models: Sequence[nn.Module], paths: Iterable[Any] | None, stages: Mapping[int, int]) -> None:
        first = len(self.spots)
        self.spots = _spots(models, self.spots, stages)
        spots = self.spots[first:]
        for spot in spots:
            module = spot.module()
            for param in () if module is None else module._parameters.values():
                if param is not None and not is_lazy(param):
                    self._versions.setdefault(id(param), _version(param))
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
                target = Target(ref(module), label_of(spot.path), spot.compiled)
                target.training, target.is_model = _trains(module), len(spot.shown) == 1
                self._target_of[key] = target
                self.targets.append(target)
            around = None if spot.wrapper is None else self._target(self.spots[spot.wrapper].module())
            before = self.sites.get(target.label, Site((), around.label if around else None))
            self.sites[target.label] = before._replace(layers=(*before.layers, *layers))
            for place in map(self.spots.__getitem__, reversed(numbers)):
                self.real_paths[target.label, place.layer] = place.path

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
        """For each tensor, the real paths of the modules that have it, see ``Owners``; None for one that was freed."""
        owners = Owners((spot.path, spot.module()) for spot in self.spots)
        return [owners.of(tensor) for tensor in tensors]

    def is_alone(self, path: tuple[str, ...]) -> bool:
        """Whether the module with this real path is the only instance of its class in this process."""
        module = next((module for spot, module in self._alive() if spot.path == path), None)
        kind = type(module)
        return module is not None and sum(type(referrer) is kind for referrer in gc.get_referrers(kind)) == 1

    @property
    def fqns(self) -> dict[str, list[int]]:
        """The layers by their names in FSDP: their real paths, starting below the outermost sharded module."""
        root_of: dict[tuple[str, ...], tuple[str, ...]] = {}  # path → path of the outermost sharded module
        by_fqn: dict[str, list[int]] = {}
        for spot in self.spots:
            module = spot.module()
            is_sharded = module is not None and user_class_of(module) is not type(module)  # by FSDP2's fully_shard
            root = root_of.get(spot.path[:-1], spot.path if is_sharded else None)
            if root is not None:
                root_of[spot.path] = root
                layers = by_fqn.setdefault(".".join(spot.path[len(root) :]), [])
                layers += [] if spot.layer in layers else [spot.layer]
        return by_fqn or layers_by_fqn(self.layer_paths)

    @property
    def replicated(self) -> dict[int, set[int]]:
        """The layers whose gradients DistributedDataParallel exchanges; see ``Replicas.exchanged_layers``."""
        return self._replicas.exchanged_layers(self._shown_modules(), self.models)

    def unordered(self) -> list[str]:
        """The models of ``Replicas.layers_with_unordered_buckets``."""
        layers = self._replicas.layers_with_unordered_buckets(self._shown_modules(), self.models)
        return [".".join(self.layer_paths[layer]) for layer in layers]

    def _shown_modules(self) -> list[tuple[nn.Module | None, int]]:
        """The modules, None for those that were freed, each with the number of its layer."""
        return [(spot.module(), spot.layer) for spot in self.spots]

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
            sizes: Counter[str] = Counter()
            # The packed parameters of a quantized module cannot be counted.
            packed = any("_packed_params" in vars(module) or "_packed_params" in module._modules for module in here)
            unknown = packed or any(map(is_lazy, params))
            numbers = [] if unknown else [(param, param.numel()) for param in params]
            for param, number in numbers:
                sizes[str(param.dtype).removeprefix("torch.")] += number * param.element_size()
            trainable = sum(number for param, number in numbers if param.requires_grad)
            made = [buffer for buffer in buffers if not is_lazy(buffer)]
            layer = Layer(
                path=path,
                kind=class_name(core),
                params=None if unknown else sum(number for _, number in numbers),
                trainable_params=None if unknown else trainable,
                param_bytes=None if unknown else sum(sizes.values()),
                dtype_bytes=tuple(sorted(sizes.items())),
                buffers=sum(buffer.numel() for buffer in made),
                buffer_bytes=sum(buffer.numel() * buffer.element_size() for buffer in made),
                settings=_settings(core),
                tied=tied,
                training=_trains(core),
                compiled=index in compiled,
                shared_with=tuple(self.layer_paths[place] for place in places[id(core)] if place != index),
            )
            target = self._target(core) or self._target(here[0])
            layers.append(layer if target is None else _as_called(layer, target))
            updated[index] = sum(number for param, number in numbers if self._has_changed(param))
        if any(updated.values()):
            layers = [
                replace(layer, updated_params=updated.get(index, layer.updated_params))
                for index, layer in enumerate(layers)
            ]
        self._layers = tuple(layers)
        return self._layers

    def _has_changed(self, parameter: torch.Tensor) -> bool:
        """Whether a parameter changed since its model was added."""
        version = _version(parameter)
        return self._versions.get(id(parameter), version) != version

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


def _version(parameter: torch.Tensor) -> int | None:
    """How often torch counted a change of a parameter in place, by an optimizer or by hand; None if it has no count.
    Compiled code and the fused steps of torch's optimizers may change a parameter without it."""
    return None if parameter.is_inference() else parameter._version


def _as_called(layer: Layer, target: Target) -> Layer:
    """A layer with what was noted at its first call."""
    inputs, outputs = _plain(target.input_shapes), _plain(target.output_shapes)
    return replace(
        layer,
        input_shapes=inputs,
        output_shapes=outputs,
        same_shapes=target.same_shapes if target.is_model else None,
        grad_calls=target.grad_calls if target.same_shapes is not None else None,
        output_bytes=_bytes(outputs, target.output_types),
        training=target.training,
    )


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


def _settings(module: nn.Module) -> str:
    """``extra_repr()`` of a module of torch, "" for others: their text may have any content and length."""
    if not user_class_of(module).__module__.startswith(("torch.nn.", "torch.ao.nn.")):
        return ""
    try:
        return module.extra_repr()
    except Exception:  # a lazy or a broken module
        return ""


def _trains(module: nn.Module) -> bool:
    """Whether a module is in train mode. A frozen ScriptModule has no mode; it was in eval mode when it was frozen."""
    return bool(getattr(module, "training", False))


def _plain(shapes: Iterable[Iterable[Any]]) -> tuple[tuple[int, ...], ...]:
    """Shapes as plain integers, -1 for a size that is not an integer (nested and symbolic tensors)."""
    return tuple([tuple([size if type(size) is int else -1 for size in shape]) for shape in shapes])


def _bytes(shapes: Sequence[Sequence[int]], types: Sequence[torch.dtype]) -> int | None:
    """The bytes of all tensors with these shapes and types; None if there are none or if a size is unknown."""
    is_known = shapes and not any(-1 in shape for shape in shapes)
    return sum(prod(shape) * dtype.itemsize for shape, dtype in zip(shapes, types)) if is_known else None
