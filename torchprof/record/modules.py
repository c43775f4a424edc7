"""Modules of models: their paths and names, and what users give for them; copies without data; and the tensors of
modules: which modules have one, and which gradients DistributedDataParallel exchanges."""

from __future__ import annotations

import copy
import gc
from collections import defaultdict, namedtuple
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from ctypes import c_char
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.nn.utils.rnn import PackedSequence

from torchprof.errors import TorchprofError
from torchprof.record.torch_internals import needed, optional
from torchprof.run.layers import find, matching
from torchprof.run.torch_names import WRAPPERS

ON_DATA = "Profile it on data: torchprof.Profile(model, with_flops=True)."
_Path = tuple[str, ...]
_pytree = needed("torch.utils._pytree")

Trace = namedtuple("Trace", ["path", "leaf", "module"])
Trace.__doc__ = "A module of a model: ``path`` (tuple, root class name first), ``leaf`` (has no children), ``module``."


def walk_modules(module: nn.Module, name: str = "", path: tuple[str, ...] = ()) -> Iterator[Trace]:
    """This module and all modules below it, depth first, as ``Trace`` tuples. ``name`` replaces the class name as the
    first step of the paths; ``path`` is put before it. A module that is its own ancestor is not entered again."""
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


def instances_of(kind: type) -> list[Any]:
    """All objects of this process of a class or a subclass: they are among the objects that refer to the class."""
    classes = [kind]
    for cls in classes:
        classes += cls.__subclasses__()
    return [instance for instance in gc.get_referrers(*classes) if type(instance) in classes]


def inner_tensors(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """What a tensor consists of: itself, or the tensors in a subclass that says which they are (quantized weights of
    torchao; of a DTensor, the part that is on this rank)."""
    inside: list[Any] = []
    with suppress(Exception):  # code of the subclass may raise anything
        names = tensor.__tensor_flatten__()[0] if hasattr(type(tensor), "__tensor_flatten__") else ()  # type: ignore[attr-defined]
        inside = [getattr(tensor, name) for name in names]
    parts = [part for part in inside if isinstance(part, torch.Tensor)]
    if not parts:
        yield tensor
    for part in parts:
        yield from inner_tensors(part)


def wrapped_step(module: nn.Module) -> str | None:
    """The attribute in which a wrapper has the wrapped module (``_orig_mod``); None if it is not a wrapper."""
    steps = (WRAPPERS.get(cls.__name__) for cls in type(module).__mro__ if cls.__module__.startswith("torch."))
    return next(filter(None, steps), None)


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


# What users give


def select(paths: Iterable[Any], known: Sequence[tuple[tuple[str, ...], ...]]) -> set[int]:
    """The numbers of the entries of ``known`` that match some paths. Raises TorchprofError, with similar paths, for a
    path that matches nothing, and for what is not a list of paths."""
    one_path = isinstance(paths, tuple) and len(paths) > 1 and all(isinstance(path, str) for path in paths)
    if one_path and matching(tuple(paths), known):
        raise TorchprofError(f"paths={paths!r} is one path, but a list of paths is needed: write paths=[{paths!r}].")
    if isinstance(paths, nn.Module) or not isinstance(paths, Iterable):
        raise TorchprofError(
            f"paths={paths!r:.80} is not a list of paths: write for example paths=['features.3', ('Net', 'head')]."
        )
    return set[int]().union(*(find(path, known) for path in ([paths] if isinstance(paths, str) else paths)))


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
    models = [module for entry in given for module in [stage.submod for stage in stages_in(entry)] or [entry]]
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
        for _, _, module in walk_modules(entry):
            if isinstance(module, nn.DataParallel) and len(module.device_ids) > 1:
                raise TorchprofError(
                    f"nn.DataParallel runs replicas of {type(module.module).__name__} on {len(module.device_ids)} "
                    "devices, on threads that torch's profiler does not record. Profile its `.module` on one device, "
                    "or use DistributedDataParallel."
                )
    return models


def arguments_of(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call, from a tensor, a tuple or list of arguments, or a dict of keyword arguments."""
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


# Copies on the meta device, whose tensors have shapes but no data


_PADDING_MASKS = {"key_padding_mask": 1, "src_key_padding_mask": 1, "tgt_key_padding_mask": 1, "attention_mask": 0}
"""Arguments that say which positions are padding, and their value there: of torch's layers, and of transformers."""
_READABLE: dict[torch.dtype, Any] = {torch.bool: "B", torch.int32: "i", torch.int64: "q"}  # by Python's struct
_MOST_POSITIONS, _FEWEST_POSITIONS = 2**14, 8  # of a batch, and of a sequence


def padding_of(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[int, ...]:
    """See ``Layer.padding``. On the CPU, of the first sequences, with up to 16,384 positions: they are read in a
    millisecond, and without an operator, which would be recorded."""
    found = [(kwargs[name], value) for name, value in _PADDING_MASKS.items() if name in kwargs]
    if args and type(index := vars(module).get("padding_idx")) is int:
        found.append((args[0], index))
    for tensor, padding in found:
        if type(tensor) is not Tensor or tensor.layout != torch.strided or tensor.device.type != "cpu":
            continue
        is_plain = tensor.dim() == 2 and tensor.dtype in _READABLE and tensor.is_contiguous()
        if not is_plain or not 0 < tensor.shape[1] <= _MOST_POSITIONS or not _has_memory(tensor):
            continue
        if tensor is kwargs.get("attention_mask") and not _is_of_sequences(tensor, args, kwargs):
            continue
        columns = tensor.shape[1]
        read = min(len(tensor), _MOST_POSITIONS // columns)
        memory = (c_char * (read * columns * tensor.element_size())).from_address(tensor.data_ptr())
        values = memoryview(memory).cast("B").cast(_READABLE[tensor.dtype]).tolist()
        rows = [values[start : start + columns] for start in range(0, len(values), columns)]
        by_column = [values[column::columns] for column in range(columns)] if read == len(tensor) else []
        for sequences in (rows, by_column):  # the batch may come second
            if (padded := _padded_at_one_end(sequences, padding)) is not None:
                return len(values), sum(padded), min(padded) * len(padded)
    return ()


def _is_of_sequences(mask: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a mask has a row for each sequence of another input. One of (time, time) says what may attend to what."""
    others = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor) and value is not mask]
    return any(tuple(other.shape[:2]) == tuple(mask.shape) for other in others)


def _padded_at_one_end(sequences: Sequence[list[int]], padding: int) -> list[int] | None:
    """How many positions of each sequence are padding; None if they cannot be padded sequences: few positions,
    nothing but padding, padding that is not at the same end of all, or lengths of 1, 2, 3, … (a causal mask)."""
    if len(sequences) < 2 or len(sequences[0]) < _FEWEST_POSITIONS:
        return None
    padded = [sequence.count(padding) for sequence in sequences]
    pairs = [*zip(sequences, padded)]
    pairs = [*zip(sequences, padded)]
    at_end = all(sequence[len(sequence) - count :].count(padding) == count for sequence, count in pairs)
    at_start = all(sequence[:count].count(padding) == count for sequence, count in pairs)
    is_causal = len(padded) == len(sequences[0]) and sorted(padded) == [*range(min(padded), min(padded) + len(padded))]
    is_sound = max(padded) < len(sequences[0]) and not is_causal
    return padded if (at_end or at_start) and is_sound else None


_is_copied_on_write: Callable[[Tensor], bool] = optional("torch._C._is_cow_tensor", lambda _: False)


def _has_memory(tensor: Tensor) -> bool:
    """Whether the values of a tensor can be read at its address. A wrapper of torch.func, a tensor of zeros that takes
    no memory, and one whose storage was freed (FSDP) are of the usual class, too."""
    end = (tensor.storage_offset() + tensor.numel()) * tensor.element_size()
    if len(tensor) == 0 or _is_copied_on_write(tensor):  # asking for its address would copy it
        return False
    return tensor.data_ptr() != 0 and tensor.untyped_storage().nbytes() >= end


def without_data(model: nn.Module) -> nn.Module:
    """A copy of a model, with its tensors on the meta device."""
    model = with_wrapped(model)[-1]
    name = type(model).__name__
    if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
        raise TorchprofError(f"{name} contains TorchScript, which has its own constants: {ON_DATA}")
    if any(is_lazy(tensor) for tensor in model.parameters()):
        raise TorchprofError(f"{name} has lazy parameters without shapes: call the model once before.")
    # deepcopy takes a tensor's copy from the memo if it is there, so no data is copied.
    try:
        tensors = {id(tensor): tensor for tensor in _tensors_of(model)}
        twin = copy.deepcopy(model, {key: shape_of(tensor) for key, tensor in tensors.items()})
    except Exception as error:  # the user's classes may raise anything when they are copied
        raise TorchprofError(
            f"{name} cannot be copied without its data: {type(error).__name__}: {first_line(error)} {ON_DATA}"
        ) from error
    for module in twin.modules():
        module._compiled_call_impl = None  # run eagerly: torch.compile would compile for the meta device
    return twin


def _tensors_of(model: nn.Module) -> Iterator[Tensor]:
    """Parameters, buffers, and tensors in plain attributes of modules."""
    for _, _, module in walk_modules(model):
        others = [value for name, value in vars(module).items() if name not in ("_parameters", "_buffers")]
        for value in (*module._parameters.values(), *module._buffers.values(), *others):
            if isinstance(value, (list, tuple, dict)):
                yield from (leaf for leaf in _pytree.tree_leaves(value) if isinstance(leaf, Tensor))
            elif isinstance(value, Tensor):
                yield value


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


# The tensors of modules


class Owners:
    """The modules of a profile by their own tensors. ``modules``: their real paths; None for one that was freed."""

    def __init__(self, modules: Iterable[tuple[_Path, nn.Module | None]]) -> None:
        self._by_tensor: defaultdict[int, list[_Path]] = defaultdict(list)
        self._by_memory: defaultdict[tuple[int, int], list[_Path]] = defaultdict(list)
        alive = [(path, module) for path, module in modules if module is not None]
        path_of = {id(module): path for path, module in alive}
        for path, module in alive:
            for tensor in _own_tensors(module):
                self._by_tensor[id(tensor)].append(path)
                if memory := _memory_of(tensor):
                    self._by_memory[memory].append(path)
        for _, module in alive:
            for holder, tensor in _gathered_in(module):
                if id(holder) in path_of:
                    self._by_tensor[id(tensor)].append(path_of[id(holder)])
        self._elsewhere: set[int] | None = None  # the tensors of all modules of the process

    def of(self, tensor: Tensor | None) -> tuple[_Path, ...] | None:
        """The paths of the modules that have a tensor as their own parameter or buffer; ``()`` if only other modules of
        the process have it, None if none has it (a buffer that was replaced since). A parameter that FSDP2 gathered is
        that of its module; a tensor of a graph with ``torch._inductor.config.freezing`` may have the memory of one."""
        if tensor is None or id(tensor) in self._by_tensor:
            return None if tensor is None else tuple(self._by_tensor[id(tensor)])
        if self._elsewhere is None:
            # torch.compile's own modules have the tensors that freezing made parts of graphs.
            every = (value for value in gc.get_objects() if issubclass(type(value), nn.Module))
            modules = [module for module in every if not issubclass(type(module), torch.fx.GraphModule)]
            self._elsewhere = {id(tensor) for module in modules for tensor in _own_tensors(module)}
        if id(tensor) in self._elsewhere:
            return ()
        return tuple(self._by_memory.get(_memory_of(tensor) or (0, 0), ())) or None


def _own_tensors(module: nn.Module) -> Iterator[Tensor]:
    """A module's own parameters and buffers, without those of its children."""
    for name in ("_parameters", "_buffers"):
        yield from (value for value in module.__dict__.get(name, {}).values() if value is not None)


def _memory_of(tensor: Tensor) -> tuple[int, int] | None:
    """Where the elements of a tensor begin, and their count; None if they are nowhere."""
    try:
        return (tensor.data_ptr(), tensor.numel()) if tensor.numel() and tensor.data_ptr() else None
    except Exception:  # a lazy parameter, a layout or a subclass without memory of its own
        return None


def _gathered_in(module: nn.Module) -> Iterator[tuple[nn.Module, Tensor]]:
    """The whole parameters that FSDP2 makes for calls of a sharded module, each with the module that it is of, by the
    private names of ``torch/distributed/fsdp/_fully_shard/_fsdp_param.py``; without these, none."""
    with suppress(Exception):
        state: Any = getattr(module, "_get_fsdp_state", lambda: None)()
        groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
        for param in (param for group in groups for param in getattr(group, "fsdp_params", ())):
            if hasattr(param, "_unsharded_param"):
                yield param._module_info.module, param._unsharded_param


_Modules = Sequence[tuple[nn.Module | None, int]]  # each with the number of its layer; None for one that was freed


class Replicas:
    """The ``DistributedDataParallel`` modules among some modules or around them. A model may be the module inside of a
    DistributedDataParallel, because training loops give that to callbacks. The one around it is then searched among all
    objects of the process, until each model is in one that was found."""

    def __init__(self) -> None:
        self._found: list[ref[DistributedDataParallel]] = []
        self._exchanged: dict[int, set[int]] = {}  # what ``exchanged_layers`` gave last

    def exchanged_layers(self, modules: _Modules, models: Sequence[nn.Module]) -> dict[int, set[int]]:
        """The layers whose gradients are exchanged. The value: the numbers of elements of those own parameters that
        DistributedDataParallel ignores, without sizes that an exchanged parameter of the layer has, too. A layer is
        left out if all its own parameters are ignored. A layer of a freed module keeps its last value."""
        exchanged: dict[int, set[int]] = {}  # by the id of a module
        for replica in self._replicas(modules, models):
            exchanged[id(replica)] = set()
            ignored: set[str] = set(getattr(replica, "parameters_to_ignore", ()))  # not public
            for name, module in replica.module.named_modules():
                params = {f"{name}.{key}": param for key, param in module._parameters.items() if param is not None}
                sizes = {param.numel() for key, param in params.items() if key not in ignored}
                if sizes or not params:
                    exchanged[id(module)] = {param.numel() for param in params.values()} - sizes
        freed = self._exchanged.keys() & {layer for module, layer in modules if module is None}
        self._exchanged = {layer: self._exchanged[layer] for layer in freed}
        self._exchanged.update((layer, exchanged[id(module)]) for module, layer in modules if id(module) in exchanged)
        return self._exchanged

    def layers_with_unordered_buckets(self, modules: _Modules, models: Sequence[nn.Module]) -> list[int]:
        """The layers that are replicated models with several buckets of gradients, not in the order in which these
        become ready. DistributedDataParallel rebuilds buckets in that order before its second forward, if at all."""
        layer_of = {id(module): layer for module, layer in reversed(modules)}
        ids: set[int] = set()
        for replica in self._replicas(modules, models):
            recorded: dict[str, Any] = {}
            with suppress(AttributeError, AssertionError, RuntimeError):  # this torch or this module has none
                recorded = replica._get_ddp_logging_data()  # not public
            if not recorded.get("has_rebuilt_buckets") and "," in str(recorded.get("bucket_sizes", "")):
                ids.add(next(layer_of[id(module)] for module in replica.modules() if id(module) in layer_of))
        return sorted(ids)

    def _replicas(self, modules: _Modules, models: Sequence[nn.Module]) -> list[DistributedDataParallel]:
        known = [replica for alive in self._found if (replica := alive()) is not None]
        inside = {id(module) for model in known for module in model.modules()}
        if not known or any(id(model) not in inside for model in models):
            known = [module for module, _ in modules if isinstance(module, DistributedDataParallel)]
            if torch.distributed.is_available() and torch.distributed.is_initialized():
                known += instances_of(DistributedDataParallel)
            ours = {id(module) for module, _ in modules}
            built = {id(model): model for model in known if _is_built(model)}.values()
            known = [model for model in built if any(id(module) in ours for module in model.modules())]
            self._found = [ref(model) for model in known]
        return known


def _is_built(replica: DistributedDataParallel) -> bool:
    """Whether its ``__init__`` ended without an error. After an error, the object may live on with the exception, but
    exchanges nothing. ``__init__`` sets ``logger`` last, unless a hook does all of the exchange (neither is public)."""
    is_by_hook: bool = getattr(replica, "_delay_all_reduce_all_params", False)
    return is_by_hook or getattr(replica, "logger", None) is not None
