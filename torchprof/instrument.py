"""Labels on the forwards of modules: put on for a while, and taken off again.

``forward`` is wrapped where it is defined, on the class, and the wrapper looks its label up by the identity of the
module. So copies, pickles and replicas made meanwhile run their own weights, ``type(module)`` and the instance's
``__dict__`` stay as they are, and a module that is not ours passes through.
"""

from __future__ import annotations

import copy
import functools
import operator
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from threading import get_ident
from types import CodeType, FunctionType
from typing import Any, ClassVar
from urllib.parse import quote
from weakref import ref

import torch
from torch import nn

from torchprof.attribute import HOOKS, PREFIX
from torchprof.collect import is_observed, record
from torchprof.event_names import RAISED, STOPPED

_is_traced: Callable[[], Any] = torch._C._get_tracing_state
_PARALLEL = ("torch.distributed.tensor.", "torch.distributed._tensor.", "torch.distributed.fsdp._fully_shard.")
"""Where the hooks of ``parallelize_module``, ``distribute_module`` and ``fully_shard`` come from."""
_ENOUGH = "_StopRecomputationError"
"""What torch.utils.checkpoint raises, inside an op, when it has computed again all that backward needs."""


@dataclass
class Target:
    """A module to be labelled: what it is called in a trace, and what was seen at its first call. It is held weakly.

    ``inlined``: it is inside a compiled module, whose code runs in place of its own.
    """

    module: ref[nn.Module]
    label: str
    inlined: bool = False
    input_shapes: tuple[tuple[int, ...], ...] = ()
    output_shapes: tuple[tuple[int, ...], ...] = ()
    output_types: tuple[torch.dtype, ...] = ()
    training: bool = True


def label_of(path: Iterable[str]) -> str:
    """The label of a path, in plain ASCII, so that a trace carries it whole."""
    return PREFIX + ".".join(quote(step, safe="#()") for step in path)


class _InstanceForward:
    """The stand-in for a ``forward`` that an instance carries itself (``torch.compile``, accelerate do that).

    A copy or a pickle of the module made meanwhile gets what was there before.
    """

    def __init__(self, original: Callable[..., Any], call: Callable[..., Any]) -> None:
        functools.update_wrapper(self, original)
        self._original = original
        self._call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_original"], name)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self._original, memo)

    def __reduce__(self) -> Any:
        return operator.getitem, ((self._original,), 0)


class _BoundLater:
    """The stand-in for a ``forward`` on a class that is no plain function: a staticmethod, or TorchScript's own."""

    def __init__(self, original: Any, wrap: Callable[[Callable[..., Any], Any], Callable[..., Any]]) -> None:
        self._original = original
        self._wrap = wrap

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        bound = self._original.__get__(instance, owner) if hasattr(self._original, "__get__") else self._original
        return bound if instance is None else self._wrap(bound, instance)


@dataclass
class Labels:
    """The labels on some modules, from ``attach`` to ``detach``.

    A module has one label at a time: labels with ``gives_way`` leave it to others that are on, and others take it from
    them; whose profiler they are for is not ours to know, so they are put on all threads. ``unobserved`` counts the
    calls on threads that the profiler does not record, by label; ``unlabelled`` lists the labels of modules whose
    forward could not be wrapped. ``before_first``, where given, is called before every call of ``trigger`` until it
    returns True: only from then on are calls labelled.
    """

    targets: Sequence[Target]
    gives_way: bool = False
    trigger: Sequence[nn.Module] = ()
    before_first: Callable[[], bool] | None = None
    unobserved: Counter[str] = field(default_factory=Counter)
    unlabelled: list[str] = field(default_factory=list)

    _attached: ClassVar[list[Labels]] = []

    def attach(self) -> None:
        Labels._attached.append(self)
        self._home = get_ident()
        self._restore: list[Callable[[], None]] = []
        self._seen: list[dict[int, str]] = []  # the labels of the modules that were called, by class that has forward
        self._unseen: list[dict[int, Target]] = []
        self._on_class: dict[type, tuple[dict[int, str], dict[int, Target]]] = {}
        self._alive: list[ref[nn.Module]] = []  # of the labelled modules: they tell when one is gone
        self._may_be_guarded = any(target.inlined or _is_compiled(target.module()) for target in self.targets)
        self._waiting = self.before_first is not None
        if self.before_first is not None:
            leave_to_eager(self.before_first, with_calls=True)
        self._inside_trigger = False
        self._triggers = {id(module) for module in self.trigger}
        self._limit = sys.getrecursionlimit()
        # Of four frames that a nested call costs, one is ours: what fitted in the limit before must still fit.
        self._raised_limit = self._limit * 2
        sys.setrecursionlimit(self._raised_limit)
        try:
            self.add(self.targets)
        except BaseException:
            self.detach()
            raise

    def add(self, targets: Iterable[Target]) -> None:
        """Label more modules, between ``attach`` and ``detach``."""
        others = [other for other in Labels._attached if other is not self]
        for target in targets:
            key = id(target.module())
            if self.gives_way and any(other._labels_of(key) for other in others):
                continue
            for other in others:
                self._restore.extend(other._leave_to_another(key) if other.gives_way else ())
            self._attach(target)

    def _labels_of(self, key: int) -> list[tuple[dict[int, Any], Any]]:
        """Where a module is in our tables, by its number, and what there is about it."""
        tables: list[dict[int, Any]] = [*self._seen, *self._unseen]
        return [(table, table[key]) for table in tables if key in table]

    def _leave_to_another(self, key: int) -> list[Callable[[], None]]:
        """Label a module no more; returns how to do so again."""
        entries = self._labels_of(key)
        for table, _ in entries:
            del table[key]

        def again() -> None:
            if self in Labels._attached:
                for table, entry in entries:
                    table[key] = entry

        return [again] if entries else []

    def detach(self) -> None:
        """Leave every class and instance as it was. A wrapper that somebody has wrapped since passes calls through."""
        if self in Labels._attached:
            Labels._attached.remove(self)
        for restore in reversed(self._restore):
            restore()
        # The collector does not look into code, and that of some wrappers holds what leads here: end the circle.
        self._restore.clear()
        self._on_class.clear()
        self.before_first = None
        for labels in self._seen:
            labels.clear()
        for targets in self._unseen:
            targets.clear()
        if sys.getrecursionlimit() == self._raised_limit:
            sys.setrecursionlimit(self._limit)

    def _attach(self, target: Target) -> None:
        module = target.module()
        if module is None:
            return
        self._label_hooks(target, module)
        own = "_compiled_call_impl" if getattr(module, "_compiled_call_impl", None) is not None else "forward"
        if own in module.__dict__ or isinstance(module, torch.jit.ScriptModule):
            self._attach_to_instance(target, module, own)
            return
        # A lazy module becomes another class in its first call, before its forward is looked up there again.
        classes = [type(module)] + [cls for cls in [getattr(type(module), "cls_to_become", None)] if cls is not None]
        for cls in classes:
            owner = next((base for base in cls.__mro__ if "forward" in base.__dict__), None)
            if owner is None or owner is nn.Module:
                continue  # a container without a forward: nobody can call it
            if owner not in self._on_class:
                if self._may_be_guarded and _knows_itself(owner.__dict__["forward"]):
                    if not target.inlined:
                        self.unlabelled.append(target.label)
                    continue  # the guards of torch.compile look at the answer
                if not self._wrap_class(owner):
                    self.unlabelled.append(target.label)
                    continue
            self._await(module, target, *self._on_class[owner])

    def _label_hooks(self, target: Target, module: nn.Module) -> None:
        """Label the hooks by which tensor parallelism moves what a module is given, and what it gives, and by which
        FSDP2 gathers its parameters: they run outside of its forward, and exchange data for it."""
        label = HOOKS + target.label.removeprefix(PREFIX)
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key, hook in hooks.items():
                if getattr(hook, "__module__", "").startswith(_PARALLEL):
                    hooks[key] = stand_in = self._labelled_hook(hook, label)
                    self._restore.append(functools.partial(_put_back, hooks, key, stand_in, hook))

    def _labelled_hook(self, hook: Callable[..., Any], label: str) -> Callable[..., Any]:
        @functools.wraps(hook)
        def labelled(*args: Any, **kwargs: Any) -> Any:
            # A copy of the module made meanwhile keeps this for good.
            if self._waiting or self not in Labels._attached or torch.compiler.is_compiling():
                return hook(*args, **kwargs)
            with record(label):
                return hook(*args, **kwargs)

        return labelled

    def _wrap_class(self, owner: type) -> bool:
        original = owner.__dict__["forward"]
        labels, unseen = self._tables()
        stand_in: Any
        if hasattr(original, "__code__"):
            stand_in = _looking_like(original, self._wrapper(original, labels, unseen))
        else:

            def wrap(bound: Callable[..., Any], instance: Any) -> Callable[..., Any]:
                if id(instance) not in labels and id(instance) not in unseen:
                    return bound
                labelled = self._wrapper(lambda _, *args, **kwargs: bound(*args, **kwargs), labels, unseen)
                return functools.wraps(bound)(lambda *args, **kwargs: labelled(instance, *args, **kwargs))

            stand_in = _BoundLater(original, wrap)
        try:
            owner.forward = stand_in  # type: ignore[attr-defined]
        except (AttributeError, TypeError):
            return False
        self._on_class[owner] = labels, unseen
        # The answer has to stay yes, see _knows_itself.
        knows_itself = [cell for cell in getattr(original, "__closure__", None) or () if _holds(cell, original)]
        for cell in knows_itself:
            cell.cell_contents = stand_in

        def restore() -> None:
            for cell in knows_itself:
                cell.cell_contents = original
            if owner.__dict__.get("forward") is stand_in:
                owner.forward = original  # type: ignore[attr-defined]

        self._restore.append(restore)
        return True

    def _await(self, module: nn.Module, target: Target, labels: dict[int, str], unseen: dict[int, Target]) -> None:
        """Label a module from its next call on. When it is gone its number may become another object's."""
        key = id(module)

        def forget(_: object) -> None:
            labels.pop(key, None)
            unseen.pop(key, None)

        unseen[key] = target
        self._alive.append(ref(module, forget))

    def _attach_to_instance(self, target: Target, module: nn.Module, name: str) -> None:
        was_there = name in module.__dict__
        original = getattr(module, name)  # TorchScript keeps it in the instance from the first look on
        labels, unseen = self._tables()
        self._await(module, target, labels, unseen)
        wrapper = self._wrapper(lambda _, *args, **kwargs: original(*args, **kwargs), labels, unseen)
        stand_in = _InstanceForward(original, functools.partial(wrapper, module))
        module.__dict__[name] = stand_in
        of, put = ref(module), ref(stand_in)  # not the module, nor what holds it

        def restore() -> None:
            module, ours = of(), put()
            if module is None or ours is None:
                return
            before = ours._original
            if module.__dict__.get(name) is ours:
                if was_there:
                    module.__dict__[name] = before
                else:
                    del module.__dict__[name]

        self._restore.append(restore)

    def _tables(self) -> tuple[dict[int, str], dict[int, Target]]:
        labels: dict[int, str] = {}
        unseen: dict[int, Target] = {}
        self._seen.append(labels)
        self._unseen.append(unseen)
        return labels, unseen

    def _wrapper(
        self, original: Callable[..., Any], labels: dict[int, str], unseen: dict[int, Target]
    ) -> Callable[..., Any]:
        home = None if self.gives_way else self._home  # theirs may be a profiler that records all threads
        enter, observed, is_traced, thread = record, is_observed, _is_traced, get_ident

        @functools.wraps(original)
        def forward(self_: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            label = labels.get(id(self_))
            target = None
            if label is None:
                target = unseen.get(id(self_))
                if target is None:
                    return original(self_, *args, **kwargs)
                if self._waiting:
                    return self._wait(self_, forward, original, args, kwargs)
                label = target.label
            if home is not None and thread() != home and not observed():
                self.unobserved[label] += 1
                return original(self_, *args, **kwargs)
            if target is not None:
                target.training = getattr(self_, "training", False)  # a frozen ScriptModule has no mode left
                if is_traced():
                    target = None  # TorchScript's tracer would record our looking at shapes
                else:
                    target.input_shapes, _ = _shapes_and_types((*args, *kwargs.values()) if kwargs else args)
            with enter(label):
                try:
                    result = original(self_, *args, **kwargs)
                except BaseException as error:
                    with enter(STOPPED if type(error).__name__ == _ENOUGH else RAISED):
                        raise
            if target is not None:
                target.output_shapes, target.output_types = _shapes_and_types((result,))
                if target.input_shapes or target.output_shapes:  # not so where torch.fx traces with stand-ins
                    unseen.pop(id(self_), None)
                    labels[id(self_)] = label
            return result

        # torch.compile traces the forward that was there, and compiles it under the wrapper, not the wrapper.
        forward._torchdynamo_inline = original  # type: ignore[attr-defined]
        leave_to_eager(forward)
        return forward

    def _wait(
        self, module: nn.Module, labelled: Callable[..., Any], original: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """A call that comes before labels are due. A trigger's call decides, unless it is part of another's."""
        if id(module) not in self._triggers or self._inside_trigger or get_ident() != self._home:
            return original(module, *args, **kwargs)
        if self.before_first is None or self.before_first():
            self._waiting = False
            return labelled(module, *args, **kwargs)
        self._inside_trigger = True
        try:
            return original(module, *args, **kwargs)
        finally:
            self._inside_trigger = False


def _is_compiled(module: nn.Module | None) -> bool:
    """Whether torch.compile has made anything of the forward of a module's class."""
    frames = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)
    code = getattr(getattr(type(module), "forward", None), "__code__", None)
    entries: Any = getattr(frames, "_debug_get_cache_entry_list", None)
    return code is not None and entries is not None and bool(entries(code))


def _knows_itself(function: Any) -> bool:
    """Whether a forward may ask whether its class still has it, itself: the checkpointed layers of transformers do so,
    and checkpoint no more where it has not."""
    return any(_holds(cell, function) for cell in getattr(function, "__closure__", None) or ())


def _looking_like(original: Any, wrapper: Any) -> Any:
    """A function that does what the wrapper does, with the defaults and the closure of the original.

    The guards of torch.compile look at these wherever a class has a ``forward``: with others they would fail, and it
    would compile again.
    """
    if original.__closure__:
        code = _code_that_calls(wrapper, original.__code__.co_freevars)
        wrapper = functools.wraps(original)(FunctionType(code, globals(), closure=original.__closure__))
        wrapper._torchdynamo_inline = original
        leave_to_eager(wrapper)
    wrapper.__defaults__ = original.__defaults__
    wrapper.__kwdefaults__ = original.__kwdefaults__
    return wrapper


def _code_that_calls(wrapper: Callable[..., Any], cells: tuple[str, ...]) -> CodeType:
    """Code of a forward that calls the wrapper, and knows it as a constant: as a variable it would be one more cell
    than these, which it has and does not use."""
    names = [f"cell{number}" for number in range(len(cells))]
    # What is never reached makes it a function with cells from its first instruction on, as its frame has to be.
    source = (
        f"def make({', '.join(names)}):\n"
        "    def forward(self, /, *args, **kwargs):\n"
        f"        if 0: {', '.join(names)}\n"
        "        call = 'the wrapper'\n"
        "        return call(self, *args, **kwargs)\n"
        "    return forward\n"
    )
    made: dict[str, Any] = {}
    exec(compile(source, __file__, "exec"), made)
    code: CodeType = made["make"](*names).__code__
    constants = tuple(wrapper if one == "the wrapper" else one for one in code.co_consts)
    return code.replace(co_consts=constants, co_freevars=cells)


def _put_back(hooks: dict[int, Any], key: int, ours: object, hook: Any) -> None:
    if hooks.get(key) is ours:
        hooks[key] = hook


def _holds(cell: Any, content: Any) -> bool:
    try:
        return cell.cell_contents is content
    except ValueError:  # an empty cell
        return False


def leave_to_eager(wrapper: Callable[..., Any], with_calls: bool = False) -> None:
    """Have torch.compile run this very frame as it is and look at the calls inside it again, or not at these either."""
    frames: Any = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)
    if hasattr(frames, "set_code_exec_strategy"):
        inside = frames._FrameAction.SKIP if with_calls else frames._FrameAction.DEFAULT
        strategy = frames._FrameExecStrategy(frames._FrameAction.SKIP, inside)
        frames.set_code_exec_strategy(wrapper.__code__, strategy)
    elif hasattr(frames, "skip_code"):
        frames.skip_code(wrapper.__code__)


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


leave_to_eager(_shapes_and_types, with_calls=True)
leave_to_eager(Labels._wait)
