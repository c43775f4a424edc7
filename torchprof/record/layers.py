"""The modules of models at their paths, and the layers that they are shown as: class, parameters, shapes and mode."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from torchprof.record.compiled.dynamo_code import is_under_compile
from torchprof.record.labels import Target
from torchprof.record.modules import (
    class_name,
    inner_tensors,
    is_exported,
    root_name,
    user_class_of,
    walk_modules,
    with_wrapped,
    wrapped_step,
)
from torchprof.record.ranges import OptimizerMarks, stages_of_modules
from torchprof.run.groups import sums_by_key
from torchprof.run.layers import Layer, root_of_stage


class ModuleAtPath(NamedTuple):
    """A module at one path in a model: a spot.

    ``path``: the real path. ``leaf``: it has no children. ``module``: a weak reference. ``shown``: the path that users
    see, without wrappers: "Net.fc" for the path "OptimizedModule._orig_mod.fc". ``layer``: the number of the layer with
    this path. ``wrapper``: the number of the spot of the module that only wraps this one. ``compiled``: whether it is
    inside a ScriptModule, a module under torch.compile or a graph of torch.export, so that its code may run without a
    call of its forward. ``callable``: whether it has a forward.
    """

    path: tuple[str, ...]
    leaf: bool
    module: ref[nn.Module]
    shown: tuple[str, ...]
    layer: int
    wrapper: int | None
    compiled: bool
    callable: bool


def modules_at_paths(
    models: Sequence[nn.Module], before: Sequence[ModuleAtPath], stages: Mapping[int, int]
) -> list[ModuleAtPath]:
    """The spots ``before``, then those of all modules of some models: model after model, depth first. A second model of
    a class is called ``Net#2``, and one that a stage of a pipeline calls, ``Net (stage 3)``: each rank has others.
    ``stages``: by the id of a model, the number of its stage, where that is known; for other models, it is searched."""
    spots = list(before)
    layers = {spot.shown: spot.layer for spot in spots}
    if any(id(model) not in stages for model in models):
        stages = {**stages_of_modules(), **stages}
    roots = [spot for spot in spots if len(spot.path) == 1]
    real_names = Counter(spot.path[0].partition("#")[0] for spot in roots)
    shown_names = Counter(spot.shown[0].partition("#")[0] for spot in roots)
    for model in models:
        stage = stages.get(id(model))
        shown_root = _new_name(with_wrapped(model)[-1], stage, shown_names)
        parents: dict[tuple[str, ...], _Parent] = {}
        for path, leaf, module in walk_modules(model, name=_new_name(model, stage, real_names)):
            shown: tuple[str, ...] = (shown_root,)
            wrapper, compiled = None, False
            if len(path) > 1:
                parent = parents[path[:-1]]
                compiled = parent.compiles
                is_wrapped = parent.wrapped_step == path[-1]
                wrapper = parent.number if is_wrapped else None
                shown = spots[parent.number].shown if is_wrapped else (*spots[parent.number].shown, path[-1])
            if not leaf:
                parents[path] = _Parent(len(spots), wrapped_step(module), compiled or _may_inline(module))
            layer = layers.setdefault(shown, len(layers))
            spots.append(ModuleAtPath(path, leaf, ref(module), shown, layer, wrapper, compiled, _has_forward(module)))
    return spots


class _Parent(NamedTuple):
    """A module with children: its spot's number, the attribute of what it wraps, whether its children are compiled."""

    number: int
    wrapped_step: str | None
    compiles: bool


def _new_name(model: nn.Module, stage: int | None, taken: Counter[str]) -> str:
    name = root_name(model) if stage is None else root_of_stage(root_name(model), stage)
    taken[name] += 1
    return name if taken[name] == 1 else f"{name}#{taken[name]}"


def _may_inline(module: nn.Module) -> bool:
    return isinstance(module, torch.jit.ScriptModule) or is_under_compile(module) or is_exported(module)


def _has_forward(module: nn.Module) -> bool:
    return getattr(type(module), "forward", None) is not nn.Module.forward or "forward" in vars(module)


# Layers


def layers_of(
    spots: Sequence[ModuleAtPath],
    before: Sequence[Layer],
    target_of: Mapping[int, Target],
    has_changed: Callable[[torch.Tensor], bool],
) -> tuple[Layer, ...]:
    """The layers as they are now, depth first. A layer of a freed module is as in ``before``. ``target_of``: what was
    noted of the calls of a layer. ``has_changed``: whether a parameter changed in a recording."""
    paths = {spot.layer: spot.shown for spot in spots}
    modules: defaultdict[int, list[nn.Module | None]] = defaultdict(list)  # wrappers first, the wrapped module last
    layers_with: defaultdict[int, list[int]] = defaultdict(list)  # by the id of a module
    for spot in spots:
        module = spot.module()
        modules[spot.layer].append(module)
        layers_with[id(module)].append(spot.layer)
    compiled = {spot.layer for spot in spots if spot.compiled and spot.wrapper is None}
    counted: set[int] = set()
    updated: dict[int, int] = {}  # by layer: the elements of parameters that changed
    layers = []
    for number, path in paths.items():
        alive = [module for module in modules[number] if module is not None]
        target = target_of.get(number)
        if len(alive) < len(modules[number]):
            layers.append(before[number] if target is None else _as_called(before[number], target))
            continue
        core = alive[-1]
        params, buffers, tied = _uncounted_tensors(alive, counted)
        layer = Layer(
            path,
            class_name(core),
            **_sizes(alive, params),
            buffers=sum(buffer.numel() for buffer in buffers),
            buffer_bytes=sum(_bytes_of(part) for buffer in buffers for part in _stored(buffer)),
            of_torch=_is_of_torch(core),
            settings=_settings(core),
            tied=tied,
            training=is_in_train_mode(core),
            compiled=number in compiled,
            shared_with=tuple(paths[other] for other in layers_with[id(core)] if other != number),
        )
        steps, gradients = OptimizerMarks.steps_of(params)
        layer = replace(layer, optimizer_steps=steps, used_gradients=gradients)
        layers.append(layer if target is None else _as_called(layer, target))
        is_known = layer.params is not None
        updated[number] = sum(param.numel() for param in params if is_known and has_changed(param))
    if any(updated.values()):
        layers = [
            replace(layer, updated_params=updated.get(number, layer.updated_params))
            for number, layer in enumerate(layers)
        ]
    return tuple(layers)


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
    return params, [buffer for buffer in buffers if not is_lazy(buffer)], tied


def _sizes(modules: Sequence[nn.Module], params: Sequence[torch.Tensor]) -> dict[str, Any]:
    """The fields of a layer about its parameters; None if they are lazy, or packed so that their sizes are unknown."""
    packed = [_packed_in(module) for module in modules if _has_packed(module)]
    if None in packed or any(map(is_lazy, params)):
        return {"params": None, "trainable_params": None, "param_bytes": None}
    tensors = [*params, *(tensor for of_module in packed for tensor in of_module or ())]
    parts = (part for tensor in tensors for part in _stored(tensor))
    by_type = sums_by_key(
        (str(part.dtype).removeprefix("torch."), part.numel() * part.element_size()) for part in parts
    )
    return {
        "params": sum(tensor.numel() for tensor in tensors),
        "trainable_params": sum(param.numel() for param in params if param.requires_grad),
        "param_bytes": sum(by_type.values()),
        "dtype_bytes": tuple(sorted(by_type.items())),
    }


def _has_packed(module: nn.Module) -> bool:
    """Whether a module has an object of C++ code, as quantized ones have for their weights."""
    return not isinstance(module, torch.jit.ScriptModule) and any(
        issubclass(type(value), torch.ScriptObject) for value in vars(module).values()
    )


def _packed_in(module: nn.Module) -> list[torch.Tensor] | None:
    """The weight and the bias that a quantized module of torch packed; None if it does not tell them."""
    try:
        return [tensor for tensor in module._weight_bias() if isinstance(tensor, torch.Tensor)]  # type: ignore[operator]
    except Exception:  # a recurrent module has no such method; a packed object may be of any kind
        return None


def _bytes_of(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _stored(tensor: torch.Tensor) -> Iterable[torch.Tensor]:
    """The tensors in which a tensor is stored; itself for a DTensor, of which all ranks have parts."""
    return (tensor,) if hasattr(type(tensor), "_local_tensor") else inner_tensors(tensor)


def _is_of_torch(module: nn.Module) -> bool:
    return user_class_of(module).__module__.startswith(("torch.nn.", "torch.ao.nn."))


def _settings(module: nn.Module) -> str:
    """``extra_repr()`` of a module of torch, "" for others: their text may have any content and length."""
    if not _is_of_torch(module):
        return ""
    try:
        return module.extra_repr()
    except Exception:  # a lazy or a broken module
        return ""


def is_in_train_mode(module: nn.Module) -> bool:
    """Whether a module is in train mode. A frozen ScriptModule has no mode; it was in eval mode when it was frozen."""
    return bool(getattr(module, "training", False))


def _as_called(layer: Layer, target: Target) -> Layer:
    """A layer with what was noted at its first call."""
    inputs, outputs = _plain(target.input_shapes), _plain(target.output_shapes)
    output_bytes = None
    if outputs and not any(-1 in shape for shape in outputs):
        output_bytes = sum(prod(shape) * dtype.itemsize for shape, dtype in zip(outputs, target.output_types))
    return replace(
        layer,
        input_shapes=inputs,
        output_shapes=outputs,
        same_shapes=target.same_shapes if target.is_model else None,
        grad_calls=target.grad_calls if target.same_shapes is not None else None,
        noted_calls=target.noted_calls if target.is_noted else None,
        repeated_calls=target.repeated_calls if target.is_noted else None,
        longer_calls=target.longer_calls if target.is_noted else None,
        grad_inputs=target.grad_inputs if target.is_noted else None,
        input_number=target.input_number,
        padding=target.padding,
        output_bytes=output_bytes,
        training=target.training,
    )


def _plain(shapes: Iterable[Iterable[Any]]) -> tuple[tuple[int, ...], ...]:
    """Shapes as plain integers, -1 for a size that is not an integer (nested and symbolic tensors)."""
    return tuple([tuple([size if type(size) is int else -1 for size in shape]) for shape in shapes])
