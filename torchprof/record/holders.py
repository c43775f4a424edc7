"""What in Python keeps memory that grows: a list, a dict or another object, or the graph of one tensor."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from inspect import CO_OPTIMIZED
from itertools import islice
from pathlib import Path
from types import CellType, FrameType, FunctionType, GeneratorType, MappingProxyType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn

from torchprof.measure.memory_blocks import OTHERS, LiveMemory
from torchprof.record.modules import instances_of
from torchprof.record.this_process import block_of
from torchprof.run.groups import sums_by_key
from torchprof.run.timeline import Holder

_FEWEST_CALLS = 3  # of which a holder has memory
_LARGE_PART, _LARGE_BYTES = 0.1, 2**20  # of the live memory: other tensors that are less have no name
_LEAST_PART = 0.5  # of the bytes of other tensors, that a holder has
_MOST_NODES = 10_000  # of one graph that are read
_MOST_TENSORS = 200  # whose graphs are read
_MOST_SEARCHED = 64  # objects whose referrers are searched at once: the search compares each with all references
_LEVELS = 8  # of containers around tensors
_LEVELS_OF_NAMES = 3  # around a container
_PACKAGE = str(Path(__file__).parent.parent)
_NO_BLOCK = ("", 0)

Calls = Mapping[tuple[str, int], int]
"""(device, address) of a block that stays → the number of the call that allocated it."""


class _Named(NamedTuple):
    """The name of an object, and the file, function or module that has it."""

    name: str
    where: str


class _Held(NamedTuple):
    """An object, the calls of which it keeps blocks, and the tensors in it."""

    value: Any
    calls: set[int]
    tensors: list[torch.Tensor]

    @property
    def nbytes(self) -> int:
        return sum({block_of(tensor): tensor.untyped_storage().nbytes() for tensor in self.tensors}.values())


def holder_of(calls: Calls) -> Holder | None:
    """The object that keeps the blocks of most calls; None if none keeps those of three, or its name is unknown.

    It is read from the garbage collector's references (``gc.get_referrers``) and from the saved tensors of autograd
    graphs, which are not unpacked: no hook runs. What only C++ code keeps, and what ``gc.freeze`` has hidden, is not
    found.
    """
    held = _tensors_with(calls)
    found = _container_of(held, _calls, _FEWEST_CALLS)
    if found is None:
        tensors = (value for value in gc.get_objects() if issubclass(type(value), torch.Tensor) and _has_graph(value))
        held = [_Held(value, _in_graph(value, calls), [value]) for value in islice(tensors, _MOST_TENSORS)]
        largest = max(held, key=_calls, default=None)
        is_enough = largest is not None and _calls(largest) >= _FEWEST_CALLS
        found = largest if is_enough else _container_of(held, _calls, _FEWEST_CALLS)
    with suppress(Exception):  # objects of the user's code may raise anything when they are looked at
        return _named(found, held, calls)
    return None


def holder_of_others(start: LiveMemory, device: str) -> Holder | None:
    """The object that keeps half or more of the tensors that are not the model's, if they are a large part of what is
    live on a device; None otherwise, and if its name is unknown."""
    sizes = dict(start.sizes[device])
    others = sum(sizes.get(kind, 0) for kind in OTHERS)
    if others < max(_LARGE_PART * sum(sizes.values()), _LARGE_BYTES):
        return None
    held = _tensors_with({block: number for number, block in enumerate(start.others) if block[0] == device})
    held.sort(key=lambda each: (-each.nbytes, each.value._base is not None))
    least = round(_LEAST_PART * others)
    ways = (_model_around, lambda held: held[0], lambda held: _container_of(held, lambda each: each.nbytes, least))
    for way in ways if held else ():
        with suppress(Exception):  # objects of the user's code may raise anything when they are looked at
            found = way(held)
            if found is not None and found.nbytes >= least and (named := _named(found, held, {})) is not None:
                return named
    return None


def _model_around(held: list[_Held]) -> _Held | None:
    """The outermost module that has the first tensor as a parameter, with all its parameters; None for others."""
    param = held[0].value
    modules = instances_of(nn.Module) if isinstance(param, nn.Parameter) else []
    around = {id(inner): module for module in modules for inner in module._modules.values()}
    model = next((module for module in modules if any(param is each for each in module._parameters.values())), None)
    while id(model) in around:
        model = around[id(model)]
    return None if model is None else _Held(model, set(), [*model.parameters()])


def _tensors_with(calls: Calls) -> list[_Held]:
    """The tensors at these blocks."""
    tensors = (value for value in gc.get_objects() if issubclass(type(value), torch.Tensor))
    blocks = ((tensor, block_of(tensor) or _NO_BLOCK) for tensor in tensors)
    return [_Held(tensor, {calls[block]}, [tensor]) for tensor, block in blocks if block in calls]


def _calls(held: _Held) -> int:
    return len(held.calls)


def _named(found: _Held | None, held: list[_Held], calls: Calls) -> Holder | None:
    """An object with its name; None if it has none. ``held``: of this search."""
    if found is None or (named := _name_of(found.value, held)) is None:
        return None
    kind = "tensor" if isinstance(found.value, torch.Tensor) else type(found.value).__name__
    with_graph = any(_in_graph(tensor, calls) for tensor in found.tensors[:_FEWEST_CALLS] if _has_graph(tensor))
    are_numbers = all(tensor.numel() == 1 for tensor in found.tensors)
    dtypes = sums_by_key((str(tensor.dtype).removeprefix("torch."), tensor.nbytes) for tensor in found.tensors)
    [(dtype, _)] = dtypes.most_common(1)
    return Holder(*named, kind, len(found.tensors), found.nbytes, dtype, with_graph, are_numbers)


def _has_graph(tensor: torch.Tensor) -> bool:
    return tensor.requires_grad and tensor.grad_fn is not None


def _in_graph(tensor: torch.Tensor, calls: Calls) -> set[int]:
    """The calls of which the graph of a tensor keeps blocks, as far as its first nodes say."""
    nodes: list[Any] = [tensor.grad_fn]
    seen, found = {tensor.grad_fn}, set()
    for node in nodes:  # those before it follow
        found |= {calls[block] for saved in _saved_by(node) if (block := block_of(saved) or _NO_BLOCK) in calls}
        for before, _ in node.next_functions:
            if before is not None and before not in seen and len(nodes) < _MOST_NODES:
                seen.add(before)
                nodes.append(before)
    return found


def _saved_by(node: Any) -> Iterator[torch.Tensor]:
    """The tensors that a node of autograd saved, without those that a hook packed."""
    for name in dir(node):
        if name.startswith("_raw_saved_"):
            raw = getattr(node, name)
            for saved in raw if isinstance(raw, (list, tuple)) else (raw,):
                if isinstance(data := getattr(saved, "data", None), torch.Tensor):
                    yield data


def _container_of(held: list[_Held], weight: Callable[[_Held], int], least: float) -> _Held | None:
    """The object of the largest weight that refers to tensors: directly, or its items do, which may be tuples, dicts,
    …; None if none has the least weight."""
    for _ in range(_LEVELS):
        inner = {id(each.value): each for each in held}
        values = [each.value for each in held[:_MOST_SEARCHED]]
        outer = {}
        for container in gc.get_referrers(*values):
            if container is values or isinstance(container, (_Held, FrameType, ModuleType)) or id(container) in inner:
                continue
            items = {id(item): inner[id(item)] for item in gc.get_referents(container) if id(item) in inner}
            tensors = [tensor for item in items.values() for tensor in item.tensors]
            calls = set[int]().union(*(item.calls for item in items.values()))
            outer[id(container)] = _Held(container, calls, tensors)
        held = sorted(outer.values(), key=weight, reverse=True)
        if not held or weight(held[0]) >= least:
            return held[0] if held else None
    return None


# Names


def _name_of(value: Any, held: list[_Held], levels: int = _LEVELS_OF_NAMES) -> _Named | None:
    """What the user's code calls an object: a variable, an attribute, or an item of one of these. ``held``: of this
    search."""
    for names, prefix, where in _scopes(value):
        if (name := _key_of(value, names)) is not None:
            return _Named(f"{prefix}{name}", where)
    for around in gc.get_referrers(value) if levels else ():
        if not isinstance(around, (dict, list, tuple)) or around is held or isinstance(around, _Held):
            continue
        if (outer := _name_of(around, held, levels - 1)) is not None:
            key = f"[{_key_of(value, around)!r:.30}]" if isinstance(around, dict) else ""
            return outer._replace(name=f"{outer.name}{key}")
    return None


def _scopes(value: Any) -> Iterator[tuple[Mapping[Any, Any], str, str]]:
    """Names with their values, among them perhaps this one: what comes before such a name, and the file, function or
    module that has them. Those of modules, of functions that run now, of closures, and attributes."""
    for module in [*sys.modules.values()]:
        if isinstance(names := getattr(module, "__dict__", None), dict):
            yield names, "", Path(str(names.get("__file__") or module.__name__)).name
    for names, function in _variables_of_functions():
        yield names, "", function
    for around in gc.get_referrers(value):
        if isinstance(around, CellType):
            for cells in gc.get_referrers(around):
                for function in gc.get_referrers(cells) if isinstance(cells, tuple) else ():
                    if isinstance(function, FunctionType) and function.__closure__ is cells is not None:
                        names = dict(zip(function.__code__.co_freevars, function.__closure__))
                        yield {name: value for name, cell in names.items() if cell is around}, "", function.__qualname__
        if isinstance(around, GeneratorType) and around.gi_frame is not None:
            yield _locals_of(around.gi_frame), "", around.__qualname__
        owners = gc.get_referrers(around) if isinstance(around, dict) else [around]
        for owner in owners:
            if isinstance(names := getattr(owner, "__dict__", None), (dict, MappingProxyType)):
                cls = owner if isinstance(owner, type) else type(owner)
                yield names, f"{cls.__name__}.", cls.__module__


def _variables_of_functions() -> list[tuple[Mapping[str, Any], str]]:
    """The variables of the functions that run now in any thread, but for those of this package, and their names. No
    frame stays referenced: it would keep what its function has."""
    found: list[tuple[Mapping[str, Any], str]] = []
    for innermost in sys._current_frames().values():
        frame: FrameType | None = innermost
        del innermost
        while frame is not None:
            if not frame.f_code.co_filename.startswith(_PACKAGE):
                found.append((_locals_of(frame), frame.f_code.co_name))
            frame = frame.f_back
    return found


def _locals_of(frame: FrameType) -> dict[str, Any]:
    """The variables of a frame. Before Python 3.13 a frame keeps the dict of them, and so their values, once it was
    asked for; a function's is made anew each time."""
    names = frame.f_locals
    copied = dict(names)
    if sys.version_info < (3, 13) and frame.f_code.co_flags & CO_OPTIMIZED:
        names.clear()
    return copied


def _key_of(value: Any, names: Mapping[Any, Any]) -> Any:
    """The first name of a value; None if it has none."""
    return next((name for name, other in [*names.items()] if other is value), None)
