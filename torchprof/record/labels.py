"""Labels: ranges around the forward calls of modules, for the duration of a profile.

``forward`` is wrapped on the class that defines it, and the wrapper looks up the label of a module by its identity. So
copies, pickles and replicas that are made meanwhile use their own weights, ``type(module)`` and the ``__dict__`` of the
instance stay as they are, and calls of other modules pass through.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from threading import RLock, get_ident
from typing import Any, ClassVar
from urllib.parse import quote
from weakref import ref

import torch
from torch import nn

from torchprof.attribute.event_names import RAISED, STOPPED
from torchprof.attribute.events import PREFIX
from torchprof.record.compiled.dynamo_code import has_code, unwrapped
from torchprof.record.forwards import (
    StandIn,
    backward_task,
    never_compiled,
    on_class,
    on_hook,
    on_instance,
    refers_to_itself,
)
from torchprof.record.modules import padding_of
from torchprof.record.ranges import CollectionRanges, EngineRanges, OptimizerMarks, PipelineRanges, WaitRanges
from torchprof.record.session import is_observed, record
from torchprof.record.torch_internals import SharedChange, optional

_is_traced: Callable[[], Any] = optional("torch._C._get_tracing_state", lambda: None)
_PARALLEL = ("torch.distributed.tensor.", "torch.distributed._tensor.", "torch.distributed.fsdp._fully_shard.")
"""The Python modules with the hooks of ``parallelize_module``, ``distribute_module`` and ``fully_shard``. They
exchange inputs, outputs and parameters outside of forwards."""
_STOP_RECOMPUTATION = "_StopRecomputationError"
"""The exception with which torch.utils.checkpoint stops a recomputation when backward has all tensors it needs."""
_MOST_RECURSION = 2**31 - 1  # a C int
_lock = RLock()
"""Locked while labels are attached or detached. Reentrant: a module may be freed meanwhile on the same thread."""
_OfClass = dict[tuple[type, bool], tuple[list[StandIn], bool]]
"""By the class of a module and ``Target.inlined``: what its calls go through, and whether a forward has no label."""


@dataclass
class Target:
    """A module to be labelled, as a weak reference: its label, and its mode and shapes at its first call.

    ``inlined``: it is inside a compiled module, so that compiled code may run instead of its forward. ``is_model``: the
    inputs of its later calls are compared, too. ``same_shapes``: whether all calls had inputs of the same shapes; None
    before the first call. ``grad_calls``: how many calls ran with gradients enabled; below a model, of the first one.
    Of a model, and of a layer below one with few others (``is_noted``), ``noted_calls``: how many calls were looked at;
    of these, ``repeated_calls``, ``longer_calls`` and ``grad_inputs`` as in ``Layer``. ``last_inputs``: the tensors of
    the call before, which are not kept alive, and their versions. ``input_number``: see ``Labels.number_of``;
    ``padding``: ``padding_of``.
    """

    module: ref[nn.Module]
    label: str
    inlined: bool = False
    input_shapes: tuple[tuple[int, ...], ...] = ()
    output_shapes: tuple[tuple[int, ...], ...] = ()
    output_types: tuple[torch.dtype, ...] = ()
    input_number: int | None = None
    padding: tuple[int, ...] = ()
    training: bool = True
    is_model: bool = False
    is_noted: bool = False
    same_shapes: bool | None = None
    grad_calls: int = 0
    noted_calls: int = 0
    repeated_calls: int = 0
    longer_calls: int = 0
    grad_inputs: int = 0
    last_shapes: tuple[tuple[int, ...], ...] = ()
    last_inputs: tuple[Any, ...] = ()
    weight: tuple[ref[nn.Module], str] | None = None  # the first trainable parameter, once it was asked for
    autocast_calls: ClassVar[int] = 0  # of all models, under autocast of the CPU

    def note_inputs(
        self, tensors: Sequence[torch.Tensor], shapes: tuple[tuple[int, ...], ...], others: Sequence[Any]
    ) -> None:
        """Note a call of a model with these tensors and ``others`` as its inputs."""
        if backward_task() != -1:
            return  # a recomputation
        Target.autocast_calls += torch.is_autocast_enabled("cpu")
        values = [_values_of(tensor) for tensor in tensors]
        owners = [value[0] for value in values if value is not None]
        how = [value[1:] for value in values if value is not None]
        needs_gradient = any(tensor.requires_grad for tensor in tensors)
        same = *map(id, others), *how, *map(id, owners)
        key = shapes, needs_gradient, getattr(self.module(), "training", None), *self._weights_now(), *same
        last, *references = self.last_inputs or (None,)
        self.noted_calls += 1
        self.grad_inputs += needs_gradient
        is_known = bool(owners) and len(owners) == len(tensors)
        self.repeated_calls += is_known and key == last and all(reference() is not None for reference in references)
        self.longer_calls += _is_longer(self.last_shapes, shapes)
        self.last_inputs, self.last_shapes = (key, *map(ref, owners)), shapes

    def _weights_now(self) -> tuple[int, int, int]:
        """What is different if the weights of the module are: how many steps optimizers have made, of which a fused one
        changes no version; which tensor the first trainable parameter is, since ``functional_call`` puts other ones
        into a module; and its version."""
        if self.weight is None:
            self.weight = self._first_trainable()
        of, name = self.weight[0](), self.weight[1]
        weight = None if of is None else of._parameters.get(name)
        return OptimizerMarks.steps, id(weight), 0 if weight is None or weight.is_inference() else weight._version

    def _first_trainable(self) -> tuple[ref[nn.Module], str]:
        module = self.module()
        for part in () if module is None else module.modules():
            for name, parameter in part._parameters.items():
                if parameter is not None and parameter.requires_grad:
                    return ref(part), name
        return self.module, ""


def label_of(path: Iterable[str]) -> str:
    """The label of a path. It is ASCII, because a trace may change other characters."""
    return PREFIX + ".".join(step if step.isalnum() and step.isascii() else quote(step, safe="#()") for step in path)


class Label:
    """The label of one module, from one ``Labels``. The stand-ins in ``forwards`` read it at each call.

    ``home``: the thread of which all calls are labelled; calls on another thread are labelled only if a profiler
    records it. None: the calls of all threads are labelled. ``is_waiting``: calls are not labelled yet.
    ``looks_at_calls``: the shapes of the next call are to be noted.
    """

    __slots__ = ("_alive", "_stand_ins", "_target", "home", "is_waiting", "key", "looks_at_calls", "name", "owner")

    record = record
    thread = get_ident
    is_observed = is_observed
    any_error = BaseException

    _all: ClassVar[dict[int, list[Label]]] = {}  # by the id of a module, in the order of creation

    def __init__(self, module: nn.Module, target: Target, owner: Labels, stand_ins: Sequence[StandIn]) -> None:
        self.name = target.label
        self.owner = owner
        self.home = None if owner.gives_way else owner.home  # a user's profiler may record all threads
        self.is_waiting = owner.is_waiting
        self.looks_at_calls = target.is_noted or target.same_shapes is None
        self.key = id(module)
        self._target = target
        self._stand_ins = stand_ins
        self._alive: Any = ref(module, self.withdraw)  # after its end, another object may get its id
        Label._all.setdefault(self.key, []).append(self)
        Label._choose(self.key)

    def withdraw(self, _: object = None) -> None:
        """Remove this label; the module's next label, if any, takes its place. Does nothing the second time."""
        with _lock:
            labels = Label._all.get(self.key, [])
            if self in labels:
                labels.remove(self)
                self._leave_stand_ins()
                self._alive = None
                Label._choose(self.key)

    def _leave_stand_ins(self) -> None:
        for stand_in in self._stand_ins:
            if stand_in.labels.get(self.key) is self:
                del stand_in.labels[self.key]

    @classmethod
    def _choose(cls, key: int) -> None:
        """Choose the label that is used: the first without ``gives_way``; if all have it, the first."""
        if not (labels := cls._all.get(key)):
            cls._all.pop(key, None)
            return
        chosen = next((label for label in labels if not label.owner.gives_way), labels[0])
        for label in labels:
            if label is not chosen:
                label._leave_stand_ins()
        for stand_in in chosen._stand_ins:
            stand_in.labels[key] = chosen

    # The stand-ins call what follows.

    @never_compiled
    def note_unobserved(self) -> None:
        self.owner.unobserved[self.name] += 1

    @never_compiled
    def look_at_inputs(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Note the mode and the input shapes of the first recorded call, and whether later calls of a model have the
        same shapes. Returns whether the outputs of the call are to be noted, too."""
        target = self._target
        if not is_observed():  # the profiler's schedule does not record this call
            return False
        is_first = target.same_shapes is None
        if is_first or target.is_model:
            target.grad_calls += torch.is_grad_enabled()
        if is_first:
            target.training = getattr(module, "training", False)  # a frozen ScriptModule has no mode
        if _is_traced():
            return False  # TorchScript's tracer would record that we read shapes
        inputs = (*args, *kwargs.values()) if kwargs else args
        tensors = _tensors_in(inputs)
        shapes = tuple(map(_shape, tensors))
        if target.is_noted:
            others = [value for value in inputs if not isinstance(value, torch.Tensor)]
            with suppress(Exception):  # an unknown kind of tensor or module: what serves a finding must not raise
                target.note_inputs(tensors, shapes, others)
        if is_first:
            target.input_shapes = shapes
            target.input_number = self.owner.number_of(tensors)
            with suppress(Exception):  # as above
                target.padding = padding_of(module, args, kwargs if target.is_noted else {})
        else:
            target.same_shapes = target.same_shapes and _are_same(target.input_shapes, shapes)
        return is_first

    @never_compiled
    def look_at_outputs(self, result: Any) -> None:
        target = self._target
        target.output_shapes, target.output_types = _shapes_and_types((result,))
        if target.input_shapes or target.output_shapes:  # torch.fx traces with proxies, which have no shapes
            target.same_shapes = True
            self.looks_at_calls = target.is_noted

    @never_compiled
    def mark_of(self, error: BaseException) -> str:
        return STOPPED if type(error).__name__ == _STOP_RECOMPUTATION else RAISED


class RecursionLimit(SharedChange):
    """Python's recursion limit while labels are attached. One of four frames of a nested call is ours, and calls that
    fitted into the limit before must still fit."""

    def _make(self) -> None:
        raised = min(2 * sys.getrecursionlimit(), _MOST_RECURSION)
        self._set(sys.getrecursionlimit, sys.setrecursionlimit, raised)


@dataclass(eq=False)
class Labels:
    """The labels on some modules, and on garbage collections, from ``attach`` to ``detach``. Several ``Labels`` may be
    attached at the same time. They may be detached in any order and on any thread.

    A module has one label at a time. ``gives_way``: a label of another ``Labels`` without it is used instead. That is
    for the profiler of a user, which may record all threads; calls on all threads are labelled then.
    ``unobserved``: the number of calls on threads that the profiler does not record, by label. ``unlabelled``: the
    labels of modules whose forward could not be wrapped. ``before_first``: if given, it is called before each call of a
    module of ``trigger`` until it returns True, and calls are labelled only from then on.
    """

    targets: Sequence[Target]
    gives_way: bool = False
    trigger: Sequence[nn.Module] = ()
    before_first: Callable[[], bool] | None = None
    unobserved: Counter[str] = field(default_factory=Counter)
    unlabelled: list[str] = field(default_factory=list)
    home: int = field(default=0, init=False)
    is_waiting: bool = field(default=False, init=False)
    _labels: list[Label] = field(default_factory=list, init=False)
    _stand_ins: dict[int, StandIn] = field(default_factory=dict, init=False)
    _open_triggers: int = field(default=0, init=False)
    _inputs: dict[tuple[int, int], tuple[Any, int]] = field(default_factory=dict, init=False)
    _numbers: Iterator[int] = field(default_factory=count, init=False)

    def __post_init__(self) -> None:
        changes = RecursionLimit, CollectionRanges, EngineRanges, OptimizerMarks, PipelineRanges, WaitRanges
        self._changes: list[SharedChange] = [change() for change in changes]

    def attach(self) -> None:
        self.home = get_ident()
        self._may_be_guarded = self.are_compiled
        self.is_waiting = self.before_first is not None
        if self.before_first is not None:
            self.before_first = never_compiled(self.before_first)
        self._triggers = {id(module) for module in self.trigger}
        try:
            self.add(self.targets)
        except BaseException:
            self.detach()
            raise

    def add(self, targets: Iterable[Target]) -> None:
        """Label more modules, between ``attach`` and ``detach``."""
        of_class: _OfClass = {}
        with _lock:
            for change in self._changes:
                change.on()
            for target in targets:
                if (module := target.module()) is not None:
                    self._labels.append(Label(module, target, self, self._joined(target, module, of_class)))

    @property
    def is_attached(self) -> bool:
        return bool(self._labels or self._stand_ins)

    @property
    def are_compiled(self) -> bool:
        """Whether torch.compile compiles any of the modules, or has compiled it."""
        modules = [module for target in self.targets if (module := target.module()) is not None]
        one_of_each = {type(unwrapped(module)): module for module in modules}  # compiled code is that of a class
        return any(target.inlined for target in self.targets) or any(map(has_code, one_of_each.values()))

    def number_of(self, tensors: Sequence[torch.Tensor]) -> int | None:
        """A number for the first of these tensors, the same for all views of a tensor that was not changed meanwhile.
        None if that is unknown. The tensors are not kept alive."""
        values = _values_of(tensors[0]) if tensors else None
        if values is None:
            return None
        owner, key = values[0], (id(values[0]), values[-1])
        reference, number = self._inputs.get(key, (None, 0))
        if reference is None or reference() is not owner:  # another tensor may have got its id
            number = next(self._numbers)
            self._inputs[key] = ref(owner), number
        return number

    def detach(self) -> None:
        """Restore every class and instance that no other ``Labels`` use. If other code has wrapped one of our wrappers
        meanwhile, the wrapper stays and passes calls through. Does nothing the second time."""
        with _lock:
            while self._labels:
                self._labels[-1].withdraw()
                self._labels.pop()
            while self._stand_ins:
                last = next(reversed(self._stand_ins))
                self._stand_ins[last].leave(self)
                del self._stand_ins[last]
            self.before_first = None
            for change in reversed(self._changes):
                change.off()

    def _joined(self, target: Target, module: nn.Module, of_class: _OfClass) -> list[StandIn]:
        """The stand-ins that the calls of a module go through; missing ones are put in place."""
        stand_ins = []
        for stand_in in self._stand_ins_for(target, module, of_class):
            stand_in.join(self)
            self._stand_ins[id(stand_in)] = stand_in
            stand_ins.append(stand_in)
        return stand_ins

    def _stand_ins_for(self, target: Target, module: nn.Module, of_class: _OfClass) -> Iterator[StandIn]:
        """Those for its hooks that exchange tensors between ranks, then the one for its forward."""
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for number, hook in [*hooks.items()]:
                if getattr(hook, "__module__", "").startswith(_PARALLEL):
                    yield on_hook(hooks, number)
        own = "_compiled_call_impl" if getattr(module, "_compiled_call_impl", None) is not None else "forward"
        if own in module.__dict__ or isinstance(module, torch.jit.ScriptModule):
            yield on_instance(module, own)
            return
        key = type(module), target.inlined
        if key in of_class:
            stand_ins, is_unlabelled = of_class[key]
            self.unlabelled += [target.label] * is_unlabelled
            yield from stand_ins
        else:
            stand_ins, before = [], len(self.unlabelled)
            for stand_in in self._on_classes(target, module):
                stand_ins.append(stand_in)
                yield stand_in
            of_class[key] = stand_ins, len(self.unlabelled) > before
        if getattr(module, "gradient_checkpointing", False):  # of transformers
            for stand_in in stand_ins:
                stand_in.label_in_backward()

    def _on_classes(self, target: Target, module: nn.Module) -> Iterator[StandIn]:
        # A lazy module changes its class in its first call, before its forward is looked up a second time.
        for cls in (type(module), getattr(type(module), "cls_to_become", None)):
            owner = next((base for base in getattr(cls, "__mro__", ()) if "forward" in base.__dict__), None)
            if owner is None or owner is nn.Module:
                continue  # a container without a forward cannot be called
            # Such a forward checks whether its class still has it, and torch.compile has guards on the result.
            is_guarded = self._may_be_guarded and refers_to_itself(owner.__dict__["forward"])
            stand_in = None if is_guarded else on_class(owner)
            if stand_in is not None:
                yield stand_in
            elif not (is_guarded and target.inlined):
                self.unlabelled.append(target.label)

    @never_compiled
    def is_due(self, module: nn.Module) -> bool:
        """Whether calls are labelled from this call on. Only a trigger's call that is not nested in another one's can
        start that. If the result is False, ``has_ended`` has to be called after the call."""
        if not self._is_trigger(module):
            return False
        if not self._open_triggers and (self.before_first is None or self.before_first()):
            self.is_waiting = False
            for label in self._labels:
                label.is_waiting = False
            return True
        self._open_triggers += 1
        return False

    @never_compiled
    def has_ended(self, module: nn.Module) -> None:
        if self._is_trigger(module):
            self._open_triggers -= 1

    def _is_trigger(self, module: nn.Module) -> bool:
        return get_ident() == self.home and id(module) in self._triggers


def _shapes_and_types(values: Sequence[Any]) -> tuple[tuple[tuple[int, ...], ...], tuple[torch.dtype, ...]]:
    """The shapes and types of the tensors in some values."""
    tensors = _tensors_in(values)
    return tuple(map(_shape, tensors)), tuple(tensor.dtype for tensor in tensors)


def _tensors_in(values: Sequence[Any]) -> list[torch.Tensor]:
    """The tensors in some values, and in tuples, lists and dicts of at most 1,000 items."""
    if len(values) == 1 and isinstance(values[0], torch.Tensor):
        return [values[0]]
    tensors: list[torch.Tensor] = []
    seen = set()
    waiting = list(reversed(values))
    while waiting:
        value = waiting.pop()
        if isinstance(value, torch.Tensor):
            tensors.append(value)
        elif isinstance(value, (tuple, list, dict)) and id(value) not in seen and len(value) <= 1000:
            seen.add(id(value))
            waiting.extend(reversed(value.values() if isinstance(value, dict) else value))
    return tensors


def _values_of(tensor: torch.Tensor) -> tuple[Any, ...] | None:
    """The tensor that owns the values of a tensor, which may be a view, how they lie in it, and how often they were
    changed in place. None if that is unknown, as for tensors of ``inference_mode``, of other classes, and for memory
    that others may change, such as NumPy."""
    if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.is_inference() or tensor.layout != torch.strided:
        return None
    try:
        if not tensor.untyped_storage().resizable():
            return None
        owner = tensor if tensor._base is None else tensor._base
        return owner, int(tensor.storage_offset()), tensor.stride(), tensor.dtype, tensor._version
    except RuntimeError:  # inside functorch's transforms, and nested tensors
        return None


def _is_longer(before: Sequence[Sequence[int]], now: Sequence[Sequence[int]]) -> bool:
    """Whether all inputs of which the shape has changed are longer by one in a dimension other than that of the batch:
    sequences with one more item. Not next to an input of one item, which is all that a model with a cache gets."""
    changed = [(old, new) for old, new in zip(before, now) if old != new]
    if len(before) != len(now) or not changed or any(len(shape) > 1 and shape[1] == 1 for shape in now):
        return False
    return all(_is_one_more(old, new) for old, new in changed)


def _is_one_more(old: Sequence[int], new: Sequence[int]) -> bool:
    if not new or len(old) != len(new) or any(type(size) is not int for size in new):
        return False
    first, *others = differences = [after - size for size, after in zip(old, new)]
    return not (others and first) and sum(differences) == sum(map(abs, differences)) == 1


def _shape(tensor: torch.Tensor) -> tuple[int, ...]:
    try:
        return tensor.shape
    except RuntimeError:  # a nested tensor in strided layout has none
        return (-1,) * tensor.dim()


def _are_same(first: tuple[tuple[int, ...], ...], now: tuple[tuple[int, ...], ...]) -> bool:
    """Whether the inputs of two calls have equal shapes; False if some are unknown, as those of nested tensors. True
    for symbolic sizes (torch.export): to compare them would add a guard to the exported program."""
    sizes = [size for shape in (*first, *now) for size in shape]
    if any(type(size) is not int for size in sizes):
        return True
    return min(sizes, default=0) >= 0 and first == now
