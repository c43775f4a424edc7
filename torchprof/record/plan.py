"""Which modules of some models are labelled in a profile, and as which layers they are shown."""

from __future__ import annotations

import gc
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any
from weakref import ref

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from torchprof.attribute.compiled_graphs import ProfiledModule
from torchprof.attribute.events import Site
from torchprof.attribute.launches import layers_by_fqn
from torchprof.measure.recording import LayerPlan
from torchprof.record.compiled.dynamo_code import is_under_compile
from torchprof.record.labels import Target, label_of
from torchprof.record.layers import ModuleAtPath, is_in_train_mode, layers_of, modules_at_paths
from torchprof.record.modules import Owners, Replicas, Trace, select, user_class_of, walk_modules
from torchprof.record.peak import Product, product_of
from torchprof.record.ranges import stages_given
from torchprof.run.layers import Layer
from torchprof.run.words import OUTSIDE

_FEW_PARTS = 8  # layers directly below a model: each of their calls is looked at


class Plan:
    """Which modules are labelled, and as which layers they are shown.

    The plan has weak references to modules only. The layer of a module that was freed keeps the values of the last call
    of ``layers``. ``layer_paths``: for each layer, the path that users see. ``targets``: the modules to label.
    ``sites``: by label, the layers it stands for. ``selected``: the selected layers, None for all.
    ``with_event_lists``: the real paths of the modules whose calls ``raw()`` lists. ``spots``: all modules by path.
    ``real_paths``: by label and layer, the real path of the module that has the label and is shown as the layer.
    ``products``: by path, what a product of matrices needs to be computed again, from the first call of ``layers`` on.
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
        self.products: dict[tuple[str, ...], Product] = {}
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

    def layer_of(self, module: nn.Module) -> int:
        """The layer of a module; negative if it is not labelled."""
        target = self._target(module)
        return OUTSIDE if target is None else self.sites[target.label].layers[0]

    def layer_with_id(self, module_id: int) -> int:
        """The layer of the module with this id; negative if none is labelled."""
        target = self._target_of.get(module_id)
        return OUTSIDE if target is None or target.module() is None else self.sites[target.label].layers[0]

    def label_of(self, module: nn.Module) -> str:
        """The label of a module; "" if it is not labelled."""
        target = self._target(module)
        return "" if target is None else target.label

    def _target(self, module: nn.Module | None) -> Target | None:
        target = self._target_of.get(id(module))
        return target if target is not None and target.module() is module else None

    def _add(self, models: Sequence[nn.Module], paths: Iterable[Any] | None, stages: Mapping[int, int]) -> None:
        first = len(self.spots)
        self.spots = modules_at_paths(models, self.spots, stages)
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
        """Make targets of the modules of the spots from ``first`` on that are selected, or outside every selected one.
        With ``paths=["block"]``, "Net", "Net.block" and "Net.head" have labels, but not "Net.block.fc"."""
        at_or_below_chosen: set[tuple[str, ...]] = set()
        inside_chosen: set[int] = set()  # the ids of modules
        spots_of: defaultdict[int, list[ModuleAtPath]] = defaultdict(list)  # by the id of a module
        for spot in self.spots[first:]:
            key = id(spot.module())
            spots_of[key].append(spot)
            if spot.layer in self._layers_chosen or spot.path[:-1] in at_or_below_chosen:
                at_or_below_chosen.add(spot.path)
                inside_chosen.add(key)
        for key, spots in spots_of.items():
            layers = tuple(dict.fromkeys(spot.layer for spot in spots))
            if self._layers_chosen.isdisjoint(layers) and key in inside_chosen:
                continue
            module = spots[0].module()
            # A label in a ScriptModule is not recorded; on one in compiled code, torch.compile would compile again.
            if module is None or (spots[0].compiled and isinstance(module, torch.jit.ScriptModule)):
                continue
            target = self._target(module) or self._new_target(module, spots[0])
            around = None if spots[0].wrapper is None else self._target(self.spots[spots[0].wrapper].module())
            before = self.sites.get(target.label, Site((), around.label if around else None))
            self.sites[target.label] = before._replace(layers=(*before.layers, *layers))
            self.real_paths.update({(target.label, spot.layer): spot.path for spot in reversed(spots)})

    def _new_target(self, module: nn.Module, spot: ModuleAtPath) -> Target:
        target = Target(ref(module), label_of(spot.path), spot.compiled)
        target.training, target.is_model = is_in_train_mode(module), len(spot.shown) == 1
        is_part = len(spot.shown) == 2 and self._parts_of_models[spot.shown[0]] <= _FEW_PARTS
        target.is_noted = target.is_model or is_part
        self._target_of[id(module)] = target
        self.targets.append(target)
        return target

    @cached_property
    def _parts_of_models(self) -> Counter[str]:
        """How many layers are directly below each model, by its name."""
        return Counter(shown[0] for shown in {spot.shown for spot in self.spots} if len(shown) == 2)

    def _alive(self) -> list[tuple[ModuleAtPath, nn.Module]]:
        """The spots whose modules are alive, each with its module."""
        return [(spot, module) for spot in self.spots if (module := spot.module()) is not None]

    @property
    def modules_by_name(self) -> dict[str, nn.Module]:
        """The modules that are alive, by the names of their layers."""
        return {".".join(spot.shown): module for spot, module in self._alive()}

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

    def layer_plan(self) -> LayerPlan:
        """What measuring needs of the plan, as it is now."""
        return LayerPlan(self.sites, self.layer_paths, self.callable_layers, self.fqns, self.replicated, self.selected)

    def layers(self) -> tuple[Layer, ...]:
        """The layers as they are now, depth first. A layer of a freed module keeps its last values, and what was noted
        of its calls."""
        target_of = {layer: target for target in self.targets for layer in self.sites[target.label].layers}
        new = ((spot.shown, module) for spot, module in self._alive() if spot.shown not in self.products)
        with suppress(Exception):  # a module may hold anything, and what serves a finding must not raise
            self.products |= {path: product for path, module in new if (product := product_of(module)) is not None}
        self._layers = layers_of(self.spots, self._layers, target_of, self._has_changed)
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
