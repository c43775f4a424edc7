"""Labels on the forwards of modules: put on for a while, and taken off again.

``forward`` is wrapped where it is defined, on the class, and the wrapper looks its label up by the identity of the
module. So copies, pickles and replicas made meanwhile run their own weights, ``type(module)`` and the instance's
``__dict__`` stay as they are, and a module that is not ours passes through.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from threading import RLock, get_ident
from typing import Any, ClassVar
from urllib.parse import quote
from weakref import ref

import torch
from torch import nn

from torchprof.attribute.event_names import RAISED, STOPPED
from torchprof.attribute.events import HOOKS, PREFIX
from torchprof.record.compiled_code import has_code
from torchprof.record.forwards import StandIn, knows_itself, leave_to_eager, on_class, on_hook, on_instance
from torchprof.record.garbage_collection import CollectionRanges, mark_collection
from torchprof.record.session import is_observed, record

_is_traced: Callable[[], Any] = torch._C._get_tracing_state
_PARALLEL = ("torch.distributed.tensor.", "torch.distributed._tensor.", "torch.distributed.fsdp._fully_shard.")
"""Where the hooks of ``parallelize_module``, ``distribute_module`` and ``fully_shard`` come from."""
_ENOUGH = "_StopRecomputationError"
"""What torch.utils.checkpoint raises, inside an op, when it has computed again all that backward needs."""
_MOST_RECURSION = 2**31 - 1  # a C int


@dataclass
class Target:
    """A module to be labelled: what it is called in a trace, and what was seen at its first call. The reference is
    weak.

    ``inlined``: it is inside a compiled module, whose code runs in place of its own. ``is_model``: its later calls are
    looked at, too: ``same_shapes`` says whether all had inputs of the shapes of the first, None before there is one.
    """

    module: ref[nn.Module]
    label: str
    inlined: bool = False
    input_shapes: tuple[tuple[int, ...], ...] = ()
    output_shapes: tuple[tuple[int, ...], ...] = ()
    output_types: tuple[torch.dtype, ...] = ()
    training: bool = True
    is_model: bool = False
    same_shapes: bool | None = None


def label_of(path: Iterable[str]) -> str:
    """The label of a path, in plain ASCII, so that a trace carries it whole."""
    return PREFIX + ".".join(quote(step, safe="#()") for step in path)


class Label:
    """The label of one module, from one ``Labels``: what the stand-ins in ``forwards`` ask at a call.

    ``home``: the thread whose calls are labelled whatever is recorded, None for those of all threads. ``is_waiting``:
    calls are not labelled yet. ``looks_at_calls``: the shapes of the next call are to be noted.
    """

    __slots__ = (
        "_alive",
        "_stand_ins",
        "_target",
        "gives_way",
        "home",
        "is_waiting",
        "key",
        "looks_at_calls",
        "name",
        "owner",
    )

    record = record
    thread = get_ident
    is_observed = is_observed
    any_error = BaseException

    _all: ClassVar[dict[int, list[Label]]] = {}  # of each module, in the order in which they came

    def __init__(self, module: nn.Module, target: Target, owner: Labels, stand_ins: Sequence[StandIn]) -> None:
        self.name = target.label
        self.owner = owner
        self.home = None if owner.gives_way else owner.home  # theirs may be a profiler that records all threads
        self.gives_way = owner.gives_way
        self.is_waiting = owner.is_waiting
        self.looks_at_calls = True
        self.key = id(module)
        self._target = target
        self._stand_ins = stand_ins
        self._alive: Any = ref(module, self._forget)  # when it is gone its number may become another object's
        Label._all.setdefault(self.key, []).append(self)
        Label._elect(self.key)

    def withdraw(self) -> None:
        """Give the module to the next label that it has, if any. A second time nothing happens."""
        with _lock:
            labels = Label._all.get(self.key, [])
            if self in labels:
                labels.remove(self)
                self._let_go()
                self._alive = None
                Label._elect(self.key)

    def _forget(self, _: object) -> None:
        self.withdraw()

    def _let_go(self) -> None:
        for stand_in in self._stand_ins:
            if stand_in.labels.get(self.key) is self:
                del stand_in.labels[self.key]

    @classmethod
    def _elect(cls, key: int) -> None:
        """Of several labels on a module the first counts that does not give way; if all do, the first."""
        labels = cls._all.get(key)
        if not labels:
            cls._all.pop(key, None)
            return
        elected = next((label for label in labels if not label.gives_way), labels[0])
        for label in labels:
            if label is not elected:
                label._let_go()
        for stand_in in elected._stand_ins:
            stand_in.labels[key] = elected

    # What a call asks

    @property
    def of_hooks(self) -> str:
        return HOOKS + self.name.removeprefix(PREFIX)

    def is_due(self, module: nn.Module) -> bool:
        return self.owner.is_due(module)

    def has_ended(self, module: nn.Module) -> None:
        self.owner.has_ended(module)

    def note_unobserved(self) -> None:
        self.owner.unobserved[self.name] += 1

    def look_at_inputs(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Note the mode and the shapes of the first call that is recorded, and whether a model's later ones have the
        same shapes. Returns whether the outputs of the call are to be looked at, too."""
        target = self._target
        if not is_observed():  # a schedule leaves calls out
            return False
        is_first = target.same_shapes is None
        if is_first:
            target.training = getattr(module, "training", False)  # a frozen ScriptModule has no mode left
        if _is_traced():
            return False  # TorchScript's tracer would record our looking at shapes
        shapes, _ = _shapes_and_types((*args, *kwargs.values()) if kwargs else args)
        if is_first:
            target.input_shapes = shapes
        else:
            target.same_shapes = target.same_shapes and _are_same(target.input_shapes, shapes)
        return is_first

    def look_at_outputs(self, result: Any) -> None:
        target = self._target
        target.output_shapes, target.output_types = _shapes_and_types((result,))
        if target.input_shapes or target.output_shapes:  # not so where torch.fx traces with stand-ins
            target.same_shapes = True
            self.looks_at_calls = target.is_model

    def mark_of(self, error: BaseException) -> str:
        return STOPPED if type(error).__name__ == _ENOUGH else RAISED


_lock = RLock()
"""Whoever attaches or detaches labels holds it. A module may be gone meanwhile, on the same thread: it is reentrant."""


@dataclass(eq=False)
class Labels:
    """The labels on some modules, and on garbage collections, from ``attach`` to ``detach``. Several may be attached,
    and leave in any order, on any threads.

    A module has one label at a time: labels with ``gives_way`` leave it to others that are on, and others take it from
    them. They are for a profiler of the user's, which may record all threads: so they are on all threads.
    ``unobserved`` counts the calls on threads that the profiler does not record, by label; ``unlabelled`` lists the
    labels of modules whose forward could not be wrapped. ``before_first``, where given, is called before every call of
    ``trigger`` until it returns True: only from then on are calls labelled.
    """

    targets: Sequence[Target]
    gives_way: bool = False
    trigger: Sequence[nn.Module] = ()
    before_first: Callable[[], bool] | None = None
    unobserved: Counter[str] = field(default_factory=Counter)
    unlabelled: list[str] = field(default_factory=list)
    _collections: CollectionRanges = field(default_factory=CollectionRanges)
    home: int = field(default=0, init=False)
    is_waiting: bool = field(default=False, init=False)
    _labels: list[Label] = field(default_factory=list, init=False)
    _stand_ins: dict[int, StandIn] = field(default_factory=dict, init=False)
    _open_triggers: int = field(default=0, init=False)

    def attach(self) -> None:
        self.home = get_ident()
        self._may_be_guarded = any(target.inlined or _has_code(target.module()) for target in self.targets)
        self.is_waiting = self.before_first is not None
        if self.before_first is not None:
            leave_to_eager(self.before_first, with_calls=True)
        self._triggers = {id(module) for module in self.trigger}
        with _lock:
            _recursion.join(self)
            self._collections.on()
        try:
            self.add(self.targets)
        except BaseException:
            self.detach()
            raise

    def add(self, targets: Iterable[Target]) -> None:
        """Label more modules, between ``attach`` and ``detach``."""
        with _lock:
            for target in targets:
                module = target.module()
                if module is not None:
                    self._labels.append(Label(module, target, self, self._joined(target, module)))

    def detach(self) -> None:
        """Leave every class and instance as it was, but for those that other labels are on. A wrapper that somebody has
        wrapped since passes calls through. A second time nothing happens."""
        with _lock:
            while self._labels:
                self._labels[-1].withdraw()
                self._labels.pop()
            while self._stand_ins:
                last = next(reversed(self._stand_ins))
                self._stand_ins[last].leave(self)
                del self._stand_ins[last]
            self.before_first = None
            self._collections.off()
            _recursion.leave(self)

    def _joined(self, target: Target, module: nn.Module) -> list[StandIn]:
        """The stand-ins that the calls of a module come through, put in place where they are not."""
        stand_ins = []
        for stand_in in self._places(target, module):
            stand_in.join(self)
            self._stand_ins[id(stand_in)] = stand_in
            stand_ins.append(stand_in)
        return stand_ins

    def _places(self, target: Target, module: nn.Module) -> Iterator[StandIn]:
        for hooks, key in _exchanging_hooks(module):
            yield on_hook(hooks, key)
        own = "_compiled_call_impl" if getattr(module, "_compiled_call_impl", None) is not None else "forward"
        if own in module.__dict__ or isinstance(module, torch.jit.ScriptModule):
            yield on_instance(module, own)
        else:
            yield from self._on_classes(target, module)

    def _on_classes(self, target: Target, module: nn.Module) -> Iterator[StandIn]:
        # A lazy module becomes another class in its first call, before its forward is looked up there again.
        for cls in (type(module), getattr(type(module), "cls_to_become", None)):
            owner = next((base for base in getattr(cls, "__mro__", ()) if "forward" in base.__dict__), None)
            if owner is None or owner is nn.Module:
                continue  # a container without a forward cannot be called
            # The guards of torch.compile look at the answer.
            is_guarded = self._may_be_guarded and knows_itself(owner.__dict__["forward"])
            stand_in = None if is_guarded else on_class(owner)
            if stand_in is not None:
                yield stand_in
            elif not (is_guarded and target.inlined):
                self.unlabelled.append(target.label)

    def is_due(self, module: nn.Module) -> bool:
        """Whether calls are labelled from this one on. A trigger's call decides, unless it is part of another's.
        Where they are not, ``has_ended`` is to be called after the call."""
        if not self._is_trigger(module):
            return False
        if not self._open_triggers and (self.before_first is None or self.before_first()):
            self.is_waiting = False
            for label in self._labels:
                label.is_waiting = False
            return True
        self._open_triggers += 1
        return False

    def has_ended(self, module: nn.Module) -> None:
        if self._is_trigger(module):
            self._open_triggers -= 1

    def _is_trigger(self, module: nn.Module) -> bool:
        return get_ident() == self.home and id(module) in self._triggers


class _Recursion:
    """Python's recursion limit while labels are on: of four frames that a nested call costs, one is ours, and what
    fitted in the limit before must still fit. Raised once, by the first, and restored by the last, if it is still the
    one that was set."""

    def __init__(self) -> None:
        self._users: set[int] = set()
        self._before = self._raised = 0

    def join(self, user: object) -> None:
        with _lock:
            if not self._users:
                self._before = sys.getrecursionlimit()
                self._raised = min(2 * self._before, _MOST_RECURSION)
                sys.setrecursionlimit(self._raised)
            self._users.add(id(user))

    def leave(self, user: object) -> None:
        with _lock:
            was_last = self._users == {id(user)}
            self._users.discard(id(user))
            if was_last and sys.getrecursionlimit() == self._raised:
                sys.setrecursionlimit(self._before)


_recursion = _Recursion()


def _exchanging_hooks(module: nn.Module) -> list[tuple[dict[int, Any], int]]:
    """The hooks by which tensor parallelism moves what a module is given, and what it gives, and by which FSDP2 gathers
    its parameters: they run outside of its forward, and exchange data for it."""
    return [
        (hooks, key)
        for hooks in (module._forward_pre_hooks, module._forward_hooks)
        for key, hook in hooks.items()
        if getattr(hook, "__module__", "").startswith(_PARALLEL)
    ]


def _has_code(module: nn.Module | None) -> bool:
    return module is not None and bool(has_code(module))


def _shapes_and_types(values: Sequence[Any]) -> tuple[tuple[tuple[int, ...], ...], tuple[torch.dtype, ...]]:
    """Of the tensors in some arguments or results, through tuples, lists and dicts of up to 1,000 items."""
    if len(values) == 1 and isinstance(values[0], torch.Tensor):
        return (_shape(values[0]),), (values[0].dtype,)
    found: list[torch.Tensor] = []
    seen = set()
    waiting = list(reversed(values))
    while waiting:
        value = waiting.pop()
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (tuple, list, dict)) and id(value) not in seen and len(value) <= 1000:
            seen.add(id(value))
            waiting.extend(reversed(value.values() if isinstance(value, dict) else value))
    return tuple(map(_shape, found)), tuple(tensor.dtype for tensor in found)


def _shape(tensor: torch.Tensor) -> tuple[int, ...]:
    try:
        return tensor.shape
    except RuntimeError:  # a nested tensor in strided layout has none
        return (-1,) * tensor.dim()


def _are_same(first: tuple[tuple[int, ...], ...], now: tuple[tuple[int, ...], ...]) -> bool:
    """Whether two calls are known to have had inputs of equal shapes: those of nested tensors are not known.

    A call with symbols for sizes (torch.export) says nothing: to compare them would add a guard to what is exported.
    """
    is_known = True
    for shape in (*first, *now):
        for size in shape:
            if type(size) is not int:
                return True
            is_known = is_known and size >= 0
    return is_known and first == now


_CALLED_BY_WRAPPERS: tuple[Callable[..., Any], ...] = (
    Label.is_due,
    Label.has_ended,
    Label.note_unobserved,
    Label.look_at_inputs,
    Label.look_at_outputs,
    Label.mark_of,
    mark_collection,
)
for _called in _CALLED_BY_WRAPPERS:
    leave_to_eager(_called, with_calls=True)
