"""What in Python keeps memory: a list, a dict or another object, or the graph of one tensor.

Everything is read from the garbage collector's references, and no code of the user's objects runs: no attribute is
looked up on them, none is compared or printed.
"""

from __future__ import annotations

import gc
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from inspect import CO_OPTIMIZED
from pathlib import Path
from types import (
    CellType,
    FrameType,
    FunctionType,
    GeneratorType,
    GetSetDescriptorType,
    MemberDescriptorType,
    ModuleType,
)
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
_NEARLY_ALL = 0.9  # of what a holder has
_LEAST_PART = 0.5  # of the bytes of other tensors, that a holder has
_MOST_NODES = 10_000  # of graphs that are read
_MOST_TENSORS = 200  # whose graphs are read
_MOST_SEARCHED = 64  # objects whose referrers are searched at once: the search compares each with all references
_MOST_INSIDE = 100_000  # objects inside a holder that are read
_LEVELS = 6  # of containers around tensors, and of names around a container
_CONTAINERS = (list, tuple, dict, set, frozenset, deque)
_PACKAGE = str(Path(__file__).parent.parent)
_NO_BLOCK = ("", 0)

Calls = Mapping[tuple[str, int], int]
"""(device, address) of a block that stays → the number of the call that allocated it."""


class _Tensor(NamedTuple):
    """A tensor, its block, and the calls of which it keeps blocks."""

    value: torch.Tensor
    block: tuple[str, int]
    calls: set[int]


_Kept = Mapping[int, _Tensor]
"""By the identity of a tensor."""


def holder_of(calls: Calls) -> Holder | None:
    """The object that keeps the blocks of most calls; None if none keeps those of three, or its name is unknown. What
    only C++ code keeps, and what ``gc.freeze`` has hidden, is not found. Saved tensors of autograd graphs are not
    unpacked: no hook runs."""
    with torch._C.DisableTorchFunctionSubclass(), suppress(Exception):  # a name is not worth a recording
        kept = {id(value): _Tensor(value, block, {calls[block]}) for value, block in _tensors() if block in calls}
        found = _container_of(kept, _calls_of, _FEWEST_CALLS)
        if found is None:
            kept = _with_graphs(calls)
            largest = max(kept.values(), key=lambda each: len(each.calls), default=None)
            if largest is not None and len(largest.calls) >= _FEWEST_CALLS:
                found = largest.value
            else:
                found = _container_of(kept, _calls_of, _FEWEST_CALLS)
        return _named(found, kept, calls)
    return None


def holder_of_others(start: LiveMemory, device: str) -> Holder | None:
    """The object that keeps half or more of the tensors that are not the model's, if they are a large part of what is
    live on a device; None otherwise, and if its name is unknown."""
    sizes = dict(start.sizes[device])
    others = sum(sizes.get(kind, 0) for kind in OTHERS)
    if others < max(_LARGE_PART * sum(sizes.values()), _LARGE_BYTES):
        return None
    least = round(_LEAST_PART * others)
    with torch._C.DisableTorchFunctionSubclass(), suppress(Exception):
        kept = {id(value): _Tensor(value, block, set()) for value, block in _tensors() if block in start.others}
        kept = {key: each for key, each in kept.items() if each.block[0] == device}
        # Of a tensor and its views, the tensor comes first.
        largest = max(kept.values(), key=lambda each: (_bytes_of([each]), each.value.nbytes), default=None)
        if largest is None:
            return None
        for find in (_model_around, lambda value: value, lambda _: _container_of(kept, _bytes_of, least)):
            found = find(largest.value)
            is_enough = found is not None and _bytes_of(_inside(found, kept)) >= least
            if is_enough and (holder := _named(found, kept, {})) is not None:
                return holder
    return None


def _tensors() -> Iterator[tuple[torch.Tensor, tuple[str, int]]]:
    """All tensors of Python code, with their blocks."""
    for value in gc.get_objects():
        if issubclass(type(value), torch.Tensor):
            yield value, block_of(value) or _NO_BLOCK


def _calls_of(tensors: Iterable[_Tensor]) -> int:
    return len({call for each in tensors for call in each.calls})


def _bytes_of(tensors: Iterable[_Tensor]) -> int:
    return sum({each.block: each.value.untyped_storage().nbytes() for each in tensors}.values())


def _with_graphs(calls: Calls) -> dict[int, _Tensor]:
    """Tensors with the calls of which their graphs keep blocks. What several reach counts for the first."""
    with_graph = [each for each in _tensors() if each[0].requires_grad and each[0].grad_fn is not None][:_MOST_TENSORS]
    seen: set[Any] = set()
    found = {}
    for value, block in with_graph:
        blocks = (saved for node in _nodes(value.grad_fn, seen, _MOST_NODES) for saved in _saved_by(node))
        found[id(value)] = _Tensor(value, block, {calls[saved] for saved in blocks if saved in calls})
    return found


def _nodes(last: Any, seen: set[Any], most: int) -> Iterator[Any]:
    """The nodes of a graph from its last one on, but for those that were seen, as long as there are not more."""
    nodes = [] if last in seen else [last]
    seen.add(last)
    for node in nodes:  # those before it follow
        yield node
        for before, _ in node.next_functions:
            if before is not None and before not in seen and len(seen) < most:
                seen.add(before)
                nodes.append(before)


_names_of_saved: dict[type, list[str]] = {}


def _saved_by(node: Any) -> Iterator[tuple[str, int]]:
    """The blocks of the tensors that a node of autograd saved, without those that a hook packed."""
    if (names := _names_of_saved.get(type(node))) is None:
        names = _names_of_saved[type(node)] = [name for name in dir(node) if name.startswith("_raw_saved_")]
    for name in names:
        raw = getattr(node, name)
        for saved in raw if isinstance(raw, (list, tuple)) else (raw,):
            data: Any = getattr(saved, "data", None)
            if issubclass(type(data), torch.Tensor):
                yield block_of(data) or _NO_BLOCK


def _container_of(kept: _Kept, weight: Callable[[Iterable[_Tensor]], int], least: int) -> Any:
    """The object of the largest weight that refers to tensors: directly, or its items do, which may be tuples, dicts,
    …; None if none has the least weight."""
    tensors = [each.value for each in kept.values()]
    objects: list[Any] = tensors[:: max(len(tensors) // _MOST_SEARCHED, 1)][:_MOST_SEARCHED]
    of_modules = {id(_attributes(module)) for module in [*sys.modules.values()]}
    found, most = None, 0
    for _ in range(_LEVELS):
        around = _around(objects)
        objects = [each for each in around if each is not tensors and id(each) not in of_modules][:_MOST_SEARCHED]
        del around  # the next search would find it
        for each in objects:
            if (heavy := weight(_inside(each, kept))) >= max(least, most + 1):
                found, most = each, heavy
        if found is not None:
            break
    for _ in range(_LEVELS):  # it may be an object with other attributes: find what of it has the tensors
        items = gc.get_referents(found) if found is not None else []
        items = [each for each in items if issubclass(type(each), _CONTAINERS)][:_MOST_SEARCHED]
        found = next((each for each in items if weight(_inside(each, kept)) >= _NEARLY_ALL * most), found)
    return found


def _around(objects: list[Any]) -> list[Any]:
    """What refers to some objects, but for this search with the tuples of arguments of the call below, and for frames
    and modules, which hold all sorts of things."""
    left_out, mark = (FrameType, ModuleType, _Tensor, _Path), object()
    around = gc.get_referrers(*objects, mark) if objects else []
    return [
        each
        for each in around
        if each is not objects
        and not issubclass(type(each), left_out)
        and not (type(each) is tuple and each and each[-1] is mark)
    ]


def _inside(value: Any, kept: _Kept) -> list[_Tensor]:
    """Which of the tensors an object is or has, through containers, modules and the attributes of the object."""
    if id(value) in kept:
        return [kept[id(value)]]
    followed = (*_CONTAINERS, nn.Module)
    waiting, seen, found = [value], {id(value)}, []
    for outer in waiting:
        for inner in gc.get_referents(outer):
            if id(inner) in seen or len(seen) >= _MOST_INSIDE:
                continue
            seen.add(id(inner))
            if id(inner) in kept:
                found.append(kept[id(inner)])
            elif issubclass(type(inner), followed):
                waiting.append(inner)
    return found


def _model_around(param: torch.Tensor) -> nn.Module | None:
    """The outermost module that has a parameter; None for other tensors."""
    around: dict[int, nn.Module] = {}
    model: nn.Module | None = None
    for module in instances_of(nn.Module) if issubclass(type(param), nn.Parameter) else ():
        around.update((id(inner), module) for inner in _attributes(module).get("_modules", {}).values())
        if _key_of(param, _attributes(module).get("_parameters", {})) is not None:
            model = module
    seen = set[int]()
    while id(model) in around and id(model) not in seen:  # modules may refer to one another
        seen.add(id(model))
        model = around[id(model)]
    return model


def _named(value: Any, kept: _Kept, calls: Calls) -> Holder | None:
    """An object with its name; None if it has none."""
    if value is None or (named := _name_of(value)) is None:
        return None
    held = _inside(value, kept)
    kind = "tensor" if issubclass(type(value), torch.Tensor) else type(value).__name__
    dtypes = sums_by_key((str(each.value.dtype).removeprefix("torch."), each.value.nbytes) for each in held)
    [(dtype, _)] = dtypes.most_common(1)
    last = (each.value.grad_fn for each in held[:_FEWEST_CALLS] if each.value.requires_grad)
    nodes = (node for node_of_held in last if node_of_held is not None for node in _nodes(node_of_held, set(), 200))
    with_graph = any(block in calls for node in nodes for block in _saved_by(node))
    are_numbers = all(each.value.numel() == 1 for each in held)
    return Holder(*named, kind, len(held), _bytes_of(held), dtype, with_graph, are_numbers)


# Names


class _Path(NamedTuple):
    """An object around a value: ``inner``, the object in it that leads there, its ``key`` if this is a dict, and the
    ``rest`` of the way in words."""

    value: Any
    inner: Any = None
    key: Any = None
    rest: str = ""

    @property
    def suffix(self) -> str:
        """The way to the value, as after the name of this object."""
        return f"[{self.key!r:.40}]{self.rest}" if type(self.key) in (str, int) else self.rest


def _name_of(value: Any) -> tuple[str, str] | None:
    """What the user's code calls an object: a variable of a module, a function that runs now, a generator or a closure,
    an attribute, or an item of one of these; and the file, function or module that has it."""
    names = _variables()
    paths = {id(value): _Path(value)}
    for _ in range(_LEVELS):
        for path in paths.values():
            if (known := names.get(id(path.value))) is not None:
                return f"{known[0]}{path.suffix}", known[1]
        searched = [path.value for path in paths.values()]
        outer_paths = {}
        for outer in _around(searched)[:_MOST_SEARCHED]:
            if (
                outer is names
                or (reached := next((id(each) for each in gc.get_referents(outer) if id(each) in paths), 0)) == 0
            ):
                continue
            path = paths[reached]
            if (found := _owned(outer, path)) is not None:
                return found
            if issubclass(type(outer), (*_CONTAINERS, CellType)):
                key = _key_of(path.value, outer) if issubclass(type(outer), dict) else None
                outer_paths[id(outer)] = _Path(outer, path.value, key, path.suffix)
        paths = outer_paths
    return None


def _owned(outer: Any, path: _Path) -> tuple[str, str] | None:
    """The name of a value that an object has as an attribute, a generator as a variable, or a function in a closure."""
    if issubclass(type(outer), FunctionType):
        cells = outer.__closure__ or ()
        names = dict(zip(outer.__code__.co_freevars, cells)) if path.value is cells else {}
        key = _key_of(path.inner, names)
        return None if key is None else (f"{key}{path.rest}", outer.__qualname__)
    if issubclass(type(outer), GeneratorType):
        key = None if outer.gi_frame is None else _key_of(path.value, _locals_of(outer.gi_frame))
        return None if key is None else (f"{key}{path.suffix}", outer.__qualname__)
    if issubclass(type(outer), _CONTAINERS):
        return None
    cls, attributes = outer if issubclass(type(outer), type) else type(outer), _attributes(outer)
    where = str(_attributes(cls).get("__module__", ""))
    if type(path.key) is str and path.inner is not None and attributes.get(path.key) is path.inner:
        return f"{cls.__name__}.{path.key}{path.rest}", where  # the dict of its attributes was reached
    key = _key_of(path.value, attributes)
    return None if key is None else (f"{cls.__name__}.{key}{path.suffix}", where)


def _attributes(owner: Any) -> Mapping[str, Any]:
    """The attributes of an object or a class, without its own code: a class may have a property ``__dict__``."""
    if issubclass(type(owner), type):
        return dict(_DICT_OF_CLASS.__get__(owner))
    for base in type(owner).__mro__:
        if (getter := _DICT_OF_CLASS.__get__(base).get("__dict__")) is not None:
            is_pythons = type(getter) in (GetSetDescriptorType, MemberDescriptorType)
            return getter.__get__(owner) if is_pythons else {}
    return {}


_DICT_OF_CLASS: Any = type.__dict__["__dict__"]


def _variables() -> dict[int, tuple[str, str]]:
    """By the identity of a value the name of a variable of a module, or of a function that runs now in any thread, and
    the file or the function that has it."""
    found: dict[int, tuple[str, str]] = {}
    for innermost in sys._current_frames().values():
        frame: FrameType | None = innermost
        del innermost  # a frame that stays referenced would keep what its function has
        while frame is not None:
            code = frame.f_code
            may_have_dict = sys.version_info < (3, 13) and not _OF_LOCALS.isdisjoint(code.co_names)
            if not (code.co_filename.startswith(_PACKAGE) or may_have_dict) and code.co_flags & CO_OPTIMIZED:
                found.update((id(value), (name, code.co_name)) for name, value in _locals_of(frame).items())
            frame = frame.f_back
    for module in [*sys.modules.values()]:
        names = _attributes(module)
        where = Path(str(names.get("__file__") or names.get("__name__", ""))).name
        for name, value in [*names.items()]:
            found.setdefault(id(value), (name, where))
    return found


def _locals_of(frame: FrameType) -> dict[str, Any]:
    """The variables of a frame. Before Python 3.13 a frame keeps the dict of them, and so their values, once it was
    asked for: it is emptied again, unless other code has it."""
    names = frame.f_locals
    copied = dict(names)
    if sys.version_info < (3, 13) and sys.getrefcount(names) == _OF_FRAME_ALONE:
        names.clear()
    return copied


_OF_LOCALS = frozenset(["locals", "vars", "dir", "eval", "exec"])
"""What gives a function's code the dict of its variables, which it may keep (``config = locals()``). Before Python
3.13, asking for the variables of such a function would add later ones to that dict."""
_OF_FRAME_ALONE = 3  # references to the dict: of the frame, of the variable, and of the argument


def _key_of(value: Any, names: Mapping[Any, Any]) -> Any:
    """The first name of a value; None if it has none."""
    items = dict.items(names) if issubclass(type(names), dict) else names.items()  # type: ignore[arg-type]
    return next((name for name, other in [*items] if other is value), None)
