"""The modules of a model, by path; the arguments they are called with."""

from __future__ import annotations

import copy
import gc
from collections import namedtuple
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.rnn import PackedSequence

from torchprof.errors import TorchprofError
from torchprof.record.torch_internals import needed
from torchprof.run.layers import find, matching
from torchprof.run.torch_names import WRAPPERS

Trace = namedtuple("Trace", ["path", "leaf", "module"])
Trace.__doc__ = (
    "A module of the model: ``path`` (tuple, root class name first), ``leaf`` (has no children), ``module``."
)


def walk_modules(module: nn.Module, name: str = "", path: tuple[str, ...] = ()) -> Iterator[Trace]:
    """This module and all modules below it, depth first, as ``Trace`` tuples.

    ``name`` replaces the class name as the first step of the paths; ``path`` is put before it. A module that is its own
    ancestor is not entered again.
    """
    waiting = [(module, (*path, name or root_name(module)), frozenset[int]())]
    while waiting:
        here, here_path, above = waiting.pop()
        children = [(step, child) for step, child in here._modules.items() if child is not None]
        yield Trace(here_path, not children, here)
        if children:
            above = above | {id(here)}
            waiting += [
                (child, (*here_path, step), above) for step, child in reversed(children) if id(child) not in above
            ]


def all_modules(model: nn.Module) -> Iterator[nn.Module]:
    """All modules of a model, each once, depth first."""
    seen = {id(model)}
    waiting = [model]
    while waiting:
        here = waiting.pop()
        yield here
        for child in reversed(here._modules.values()):
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                waiting.append(child)


def instances_of(kind: type) -> list[Any]:
    """All objects of this process of a class or a subclass: they are among the objects that refer to the class."""
    classes = [kind]
    for cls in classes:
        classes += cls.__subclasses__()
    return [instance for instance in gc.get_referrers(*classes) if type(instance) in classes]


def wrapped_step(module: nn.Module) -> str | None:
    """The attribute in which a wrapper has the wrapped module (``_orig_mod``); None if it is not a wrapper."""
    for cls in type(module).__mro__:
        step = WRAPPERS.get(cls.__name__)
        if step is not None and cls.__module__.startswith("torch."):
            return step
    return None


def with_wrapped(module: nn.Module) -> list[nn.Module]:
    """A module, and if it is a wrapper, what it wraps, the innermost module last."""
    modules = [module]
    while (step := wrapped_step(modules[-1])) is not None:
        modules.append(getattr(modules[-1], step))
    return modules


def user_class_of(module: nn.Module) -> type:
    """The class of a module in the user's code. FSDP2's ``fully_shard`` and similar functions replace it by a subclass
    that has it as the second base (``FSDPNet`` with the bases ``FSDPModule`` and ``Net``)."""
    cls = type(module)
    while len(cls.__bases__) == 2 and cls.__bases__[0].__module__.startswith("torch.distributed."):
        cls = cls.__bases__[1]
    return cls


def class_name(module: nn.Module) -> str:
    """The name of a module's class in the user's code. Of a ScriptModule, it is the class that was scripted."""
    return module.original_name if isinstance(module, torch.jit.ScriptModule) else root_name(module)


def root_name(module: nn.Module) -> str:
    """The name of a model, with which the paths of its layers begin: its class. For a module that
    ``torch.export.unflatten`` made, it is the class of the exported module; for a ScriptModule, torch's class."""
    if type(module).__module__ == "torch.export.unflatten":
        return (getattr(module, "_ty", None) or type(module).__name__).rpartition(".")[2]
    return user_class_of(module).__name__


def is_exported(module: nn.Module) -> bool:
    """Whether a module is a graph of ``torch.export``, which runs the operators of its modules and calls none."""
    return isinstance(module, torch.fx.GraphModule) and any(
        isinstance(node.target, torch._ops.OpOverload) and "nn_module_stack" in node.meta for node in module.graph.nodes
    )


def select(paths: Iterable[Any], known: Sequence[tuple[tuple[str, ...], ...]]) -> set[int]:
    """The numbers of the entries of ``known`` that match some paths (see ``run.paths``).

    Raises TorchprofError, with similar paths, for a path that matches nothing, and for what is not a list of paths.
    """
    one_path = isinstance(paths, tuple) and len(paths) > 1 and all(isinstance(path, str) for path in paths)
    if one_path and matching(tuple(paths), known):
        raise TorchprofError(f"paths={paths!r} is one path, but a list of paths is needed: write paths=[{paths!r}].")
    if isinstance(paths, nn.Module) or not isinstance(paths, Iterable):
        raise TorchprofError(
            f"paths={paths!r:.80} is not a list of paths: write for example paths=['features.3', ('Net', 'head')]."
        )
    chosen: set[int] = set()
    for path in [paths] if isinstance(paths, str) else paths:
        chosen |= find(path, known)
    return chosen


def stages_in(thing: Any) -> list[Any]:
    """The stages (with a ``submod``) of a schedule of torch.distributed.pipelining, or a stage itself; else none."""
    is_module, classes = isinstance(thing, nn.Module), type(thing).__mro__
    if is_module or not any(cls.__module__.startswith("torch.distributed.pipelining.") for cls in classes):
        return []
    stages = getattr(thing, "_stages", None) or [getattr(thing, "_stage", thing)]
    return [stage for stage in stages if hasattr(stage, "submod")]


def checked_models(model: Any) -> list[nn.Module]:
    """The models that a user gave, as a list. A stage of a pipeline stands for its model, a schedule for those of its
    stages. Raises TorchprofError for anything else than these, a module, and a list of them."""
    given = list(model) if isinstance(model, (list, tuple)) else [model]
    models = [of_entry for entry in given for of_entry in [stage.submod for stage in stages_in(entry)] or [entry]]
    if not models:
        raise TorchprofError("Profile needs a model; the list is empty.")
    for entry in models:
        if not isinstance(entry, nn.Module):
            hint = ""
            if hasattr(entry, "_torchdynamo_orig_callable"):
                hint = " A compiled function has no layers: profile the module it calls."
            elif isinstance(entry, torch.export.ExportedProgram):
                hint = " Profile torch.export.unflatten(program): it has the layers of the model."
            elif isinstance(entry, type) and issubclass(entry, nn.Module):
                hint = f" Make one first: {entry.__name__}(...)."
            raise TorchprofError(f"Profile needs a torch.nn.Module or a list of them, not {entry!r:.80}.{hint}")
        for module in all_modules(entry):
            if isinstance(module, nn.DataParallel) and len(module.device_ids) > 1:
                raise TorchprofError(
                    f"nn.DataParallel runs replicas of {type(module.module).__name__} on {len(module.device_ids)} "
                    "devices, on threads that torch's profiler does not record. Profile its `.module` on one device, "
                    "or use DistributedDataParallel."
                )
    return models


def arguments_of(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call: ``inputs`` is a tensor, a tuple or list of arguments, or a dict of keyword arguments.
    Raises TorchprofError for anything else."""
    if isinstance(inputs, torch.Tensor):
        return (inputs,), {}
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    if type(inputs) in (tuple, list):  # a subclass (PackedSequence) is a single argument
        return tuple(inputs), {}
    raise TorchprofError(
        "inputs must be a tensor, a tuple of arguments, or a dict of keyword arguments, not "
        f"{type(inputs).__name__}. Give (x,) for any other x."
    )


# A copy of a model on the meta device, whose tensors have shapes but no data.

_pytree = needed("torch.utils._pytree")
ON_DATA = "Profile it on data: torchprof.Profile(model, with_flops=True)."


def without_data(model: nn.Module) -> nn.Module:
    """A copy of a model, with its tensors on the meta device."""
    model = with_wrapped(model)[-1]
    name = type(model).__name__
    if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
        raise TorchprofError(f"{name} contains TorchScript, which has its own constants: {ON_DATA}")
    if any(is_lazy(tensor) for tensor in model.parameters()):
        raise TorchprofError(f"{name} has lazy parameters without shapes: call the model once before.")
    # deepcopy takes a tensor's copy from the memo if it is there, so no data is copied.
    memo: dict[int, Any] = {}
    try:
        for tensor in {id(tensor): tensor for tensor in _tensors_of(model)}.values():
            memo[id(tensor)] = shape_of(tensor)
        twin = copy.deepcopy(model, memo)
    except Exception as error:  # the user's classes may raise anything when they are copied
        raise TorchprofError(
            f"{name} cannot be copied without its data: {type(error).__name__}: {first_line(error)} {ON_DATA}"
        ) from error
    for module in twin.modules():
        module._compiled_call_impl = None  # run eagerly: torch.compile would compile for the meta device
    return twin


def _tensors_of(model: nn.Module) -> Iterator[torch.Tensor]:
    """Parameters, buffers, and tensors in plain attributes of modules."""
    for _, _, module in walk_modules(model):
        yield from _tensors(module._parameters.values())
        yield from _tensors(module._buffers.values())
        yield from _tensors(value for name, value in vars(module).items() if name not in ("_parameters", "_buffers"))


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple, dict)) and not isinstance(value, nn.Module):
            yield from (leaf for leaf in _pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor))


def shape_of(value: Any) -> Any:
    """A tensor on the meta device with the same shape, strides and dtype; a parameter stays one. Others unchanged."""
    if isinstance(value, PackedSequence):
        return value._replace(data=shape_of(value.data))  # the batch sizes and indices stay on the CPU
    if not isinstance(value, torch.Tensor):
        return value
    empty = torch.empty_like(value, device="meta") if value.is_meta else value.detach().to("meta")
    if isinstance(value, nn.Parameter):
        return nn.Parameter(empty, requires_grad=value.requires_grad)
    return empty.requires_grad_(value.requires_grad)


def first_line(error: BaseException) -> str:
    """The first line of the message of an error, as a sentence."""
    text = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return text if text[-1] in ".!?" else f"{text}."
