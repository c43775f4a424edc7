"""Stand-ins for the forwards and the hooks of modules. They label the calls that they pass on.

All ``Labels`` share a stand-in, from the first user to the last. At each call, it looks the module's label up by id.
"""

from __future__ import annotations

import copy
import functools
import operator
from collections.abc import Callable
from threading import get_ident
from time import perf_counter_ns
from types import CodeType, FunctionType
from typing import Any, ClassVar, TypeVar, cast
from weakref import WeakValueDictionary, ref

import torch
from torch import nn

from torchprof.attribute.events import HOOKS, PREFIX
from torchprof.record.session import record
from torchprof.record.torch_internals import optional, replaced

_Function = TypeVar("_Function", bound=Callable[..., Any])
_frames: Any = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)
backward_task: Callable[[], int] = optional("torch._C._current_graph_task_id", lambda: -1)
"""The number of the backward pass that runs on this thread; -1 outside of backward."""


class LabelsByModule(dict[int, Any]):
    """The labels of modules, by the id of the module. Pickled, it is empty: a class that cloudpickle pickles by value
    takes the stand-in of its forward along, which then calls the original in the other process."""

    def __reduce__(self) -> Any:
        return dict, ()


class StandIn:
    """A function or object that replaces a forward or a hook, and its users. ``thing``: the function or object.
    ``labels``: of the modules whose calls it labels. ``put_back(thing)`` restores the original, unless other code has
    replaced ``thing`` meanwhile. ``label_in_backward()``: if a forward checkpoints what it wraps, that has a label in
    backward, too. ``thing`` may keep a module alive, so this is a weak reference."""

    _known: ClassVar[WeakValueDictionary[int, StandIn]] = WeakValueDictionary()  # by the id of the thing

    def __init__(
        self,
        thing: Any,
        labels: LabelsByModule,
        put_back: Callable[[Any], None],
        label_in_backward: Callable[[], None] = lambda: None,
    ) -> None:
        self.labels = labels
        self.label_in_backward = label_in_backward
        self._thing = ref(thing)
        self._put_back = put_back
        self._users: set[int] = set()
        StandIn._known[id(thing)] = self

    @classmethod
    def of(cls, thing: object) -> StandIn | None:
        """The ``StandIn`` of a function or object; None if it is not one of ours, or is no longer in use."""
        known = cls._known.get(id(thing))
        return known if known is not None and known._thing() is thing else None

    def join(self, user: object) -> None:
        self._users.add(id(user))

    def leave(self, user: object) -> None:
        """Remove a user; the last one restores the original. Does nothing the second time."""
        self._users.discard(id(user))
        if not self._users and (thing := self._thing()) is not None:
            self._put_back(thing)


def on_class(owner: type) -> StandIn | None:
    """The stand-in for the ``forward`` that a class defines; None if the class does not let it be set."""
    original = owner.__dict__["forward"]
    if (known := StandIn.of(original)) is not None:
        return known
    labels = LabelsByModule()
    is_function = hasattr(original, "__code__")
    thing: Any = _labelling_function(original, labels) if is_function else _DescriptorForward(original, labels)
    try:
        owner.forward = thing  # type: ignore[attr-defined]
    except (AttributeError, TypeError):
        return None
    # It has to find itself on the class now, too: see refers_to_itself.
    cells = getattr(original, "__closure__", None) or ()
    own_cells = [(cell, original) for cell in cells if _holds(cell, original)]
    for cell, _ in own_cells:
        cell.cell_contents = thing
    wrapped: Any = getattr(original, "__wrapped__", None)
    inner_cells = [(cell, wrapped) for cell in cells if own_cells and wrapped is not None and _holds(cell, wrapped)]

    def label_in_backward() -> None:
        for cell, content in inner_cells:
            if cell.cell_contents is content:
                cell.cell_contents = _labelling_in_backward(content, labels)

    def put_back(ours: Any) -> None:
        for cell, content in (*own_cells, *inner_cells):
            cell.cell_contents = content
        if owner.__dict__.get("forward") is ours:
            owner.forward = original  # type: ignore[attr-defined]

    return StandIn(thing, labels, put_back, label_in_backward)


def on_instance(module: nn.Module, name: str) -> StandIn:
    """The stand-in for an instance's own ``forward``, or for another attribute that is called instead of it."""
    was_there = name in module.__dict__
    original = getattr(module, name)  # TorchScript puts it into the instance when it is first read
    if (known := StandIn.of(original)) is not None:
        return known
    labels = LabelsByModule()
    wrapper = _labelling(lambda _, *args, **kwargs: original(*args, **kwargs), labels)
    thing = _InstanceForward(original, functools.partial(wrapper, module))
    module.__dict__[name] = thing
    weak_module = ref(module)  # not the module: put_back must not keep it alive

    def put_back(ours: _InstanceForward) -> None:
        holder = weak_module()
        if holder is not None and holder.__dict__.get(name) is ours:
            if was_there:
                holder.__dict__[name] = ours._original
            else:
                del holder.__dict__[name]

    return StandIn(thing, labels, put_back)


def on_hook(hooks: dict[int, Any], key: int) -> StandIn:
    """The stand-in for a hook of a module. It puts a label around the hook."""
    original = hooks[key]
    if (known := StandIn.of(original)) is not None:
        return known
    labels = LabelsByModule()

    @functools.wraps(original)
    def labelled(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        label = labels.get(id(module))
        if label is None or label.is_waiting or torch.compiler.is_compiling():
            return original(module, *args, **kwargs)
        with record(HOOKS + label.name.removeprefix(PREFIX)):
            return original(module, *args, **kwargs)

    hooks[key] = labelled

    def put_back(ours: Any) -> None:
        if hooks.get(key) is ours:
            hooks[key] = original

    return StandIn(labelled, labels, put_back)


def _labelling(original: Callable[..., Any], labels: LabelsByModule) -> Any:
    """A function that calls the original, inside the module's label if it has one; see ``labels.Label``. It uses no
    global names, because it may get the globals of the original. Without a label it uses nothing that exists only in
    this process, because it may be pickled with its class."""
    identity, is_compiling = id, torch.compiler.is_dynamo_compiling

    @leave_to_eager
    @functools.wraps(original)
    def forward(self_: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        if is_compiling():  # torch._dynamo.export ignores leave_to_eager
            return original(self_, *args, **kwargs)
        if (label := labels.get(identity(self_))) is None:
            return original(self_, *args, **kwargs)
        if label.is_waiting and not label.owner.is_due(self_):
            try:
                return original(self_, *args, **kwargs)
            finally:
                label.owner.has_ended(self_)
        if label.home is not None and label.thread() != label.home and not label.is_observed():
            label.note_unobserved()
            return original(self_, *args, **kwargs)
        looks = label.looks_at_calls and label.look_at_inputs(self_, args, kwargs)
        with label.record(label.name):
            try:
                result = original(self_, *args, **kwargs)
            except label.any_error as error:
                with label.record(label.mark_of(error)):
                    raise
        if looks:
            label.look_at_outputs(result)
        return result

    # With this attribute, torch.compile traces and compiles the original forward instead of the wrapper.
    forward._torchdynamo_inline = original  # type: ignore[attr-defined]
    return forward


def _labelling_in_backward(original: Callable[..., Any], labels: LabelsByModule) -> Any:
    """As ``_labelling``, for a call that has its label in forward, but not when backward computes it again."""
    labelled, task = _labelling(original, labels), backward_task

    @leave_to_eager
    @functools.wraps(original)
    def forward(self_: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        return (original if task() < 0 else labelled)(self_, *args, **kwargs)

    forward._torchdynamo_inline = original  # type: ignore[attr-defined]
    return forward


class _InstanceForward:
    """The stand-in for an instance's own ``forward`` (``torch.compile`` and accelerate set one). A copy or a pickle of
    the module that is made meanwhile gets the original."""

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


class _DescriptorForward:
    """The stand-in for a class's ``forward`` that is not a plain function: a staticmethod, or TorchScript's."""

    def __init__(self, original: Any, labels: LabelsByModule) -> None:
        self._original = original
        self._labels = labels

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        bound = self._original.__get__(instance, owner) if hasattr(self._original, "__get__") else self._original
        if instance is None or id(instance) not in self._labels:
            return bound
        labelled = _labelling(lambda _, *args, **kwargs: bound(*args, **kwargs), self._labels)
        return functools.wraps(bound)(lambda *args, **kwargs: labelled(instance, *args, **kwargs))

    def __reduce__(self) -> Any:
        return operator.getitem, ((self._original,), 0)


def refers_to_itself(function: Any) -> bool:
    """Whether a forward has itself in its closure, so that it can check whether its class still has it. The layers of
    transformers do so, and no longer checkpoint if another forward is there."""
    return any(_holds(cell, function) for cell in getattr(function, "__closure__", None) or ())


def _labelling_function(original: Any, labels: LabelsByModule) -> Any:
    """``_labelling``, with the globals, the defaults and the closure of the original. torch.compile has guards on the
    defaults and the closure of a class's ``forward``: if they changed, it would compile again. ``torch.jit.script``
    looks up the names in the source of a forward first in its closure, then in its globals. If the original has no
    closure, the closure of the wrapper stays, under names that cannot occur in source code."""
    wrapper = _labelling(original, labels)
    if original.__closure__:
        code, closure = _code_with_cells(wrapper, original.__code__.co_freevars), original.__closure__
    else:
        names = tuple(f"torchprof: {name}" for name in wrapper.__code__.co_freevars)
        code, closure = wrapper.__code__.replace(co_freevars=names), wrapper.__closure__
    made: Any = leave_to_eager(functools.wraps(original)(FunctionType(code, original.__globals__, closure=closure)))
    made._torchdynamo_inline = original
    made.__defaults__ = original.__defaults__
    made.__kwdefaults__ = original.__kwdefaults__
    return made


def _code_with_cells(wrapper: Callable[..., Any], cells: tuple[str, ...]) -> CodeType:
    """Code of a forward that calls the wrapper and has exactly these closure cells, without using them. The wrapper is
    a constant of the code, because a variable would need one more cell."""
    names = [f"cell{number}" for number in range(len(cells))]
    # The dead `if 0:` line makes it a function with cells: its code then sets up the cells in its first instruction.
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
    constants = tuple(wrapper if constant == "the wrapper" else constant for constant in code.co_consts)
    return code.replace(co_consts=constants, co_freevars=cells)


def _holds(cell: Any, content: Any) -> bool:
    try:
        return cell.cell_contents is content
    except ValueError:  # an empty cell
        return False


def leave_to_eager(wrapper: _Function) -> _Function:
    """The function, which torch.compile will not compile. It may compile those that the function calls."""
    if hasattr(_frames, "set_code_exec_strategy"):
        actions = _frames._FrameAction
        strategy = _frames._FrameExecStrategy(actions.SKIP, actions.DEFAULT)
        _frames.set_code_exec_strategy(wrapper.__code__, strategy)
    elif hasattr(_frames, "skip_code"):
        _frames.skip_code(wrapper.__code__)
    return wrapper


def never_compiled(function: _Function) -> _Function:
    """The function, or one that calls it: torch.compile compiles neither the function nor what it calls."""
    if hasattr(_frames, "set_code_exec_strategy"):
        skip = _frames._FrameAction.SKIP
        _frames.set_code_exec_strategy(function.__code__, _frames._FrameExecStrategy(skip, skip))
        return function
    set_compiler = getattr(_frames, "set_eval_frame", None)  # torch 2.4 to 2.6
    if set_compiler is None:
        return function

    @leave_to_eager
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        before = set_compiler(None)
        try:
            return function(*args, **kwargs)
        finally:
            set_compiler(before)

    return cast(_Function, call)


class OutermostCalls:
    """From ``attach`` to ``detach``, calls ``before(module)`` right before each outermost call of a module on this
    thread, which is not nested in the call of another module, and ``elsewhere(module)`` before each one on another
    thread. If ``before`` returns True, ``after(module, ns)`` gets the time of the call. ``inner``: the number of nested
    calls. ``arguments``: those of the call, positional and by name, while ``before`` is called.

    It replaces ``nn.Module.__call__``, not a hook, because that runs before the forward of the module is looked up: a
    label that ``before`` attaches is already on this call. torch.compile has no guard on it and does not compile again.
    """

    def __init__(
        self,
        before: Callable[[nn.Module], bool],
        after: Callable[[nn.Module, int], None],
        elsewhere: Callable[[nn.Module], bool],
    ) -> None:
        self.inner = 0
        self.arguments: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})
        self._before, self._after, self._elsewhere = before, after, elsewhere
        self._restore: Callable[[], None] = lambda: None

    def attach(self) -> None:
        original = nn.Module.__dict__["__call__"]
        home = get_ident()
        inside: set[int] = set()  # the threads with an open outermost call
        is_compiling, thread, clock = torch.compiler.is_compiling, get_ident, perf_counter_ns

        @leave_to_eager
        @functools.wraps(original)
        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if is_compiling():  # first, so that torch.compile traces nothing else of this
                return original(module, *args, **kwargs)
            here = thread()
            if here in inside:
                self.inner += 1
                return original(module, *args, **kwargs)
            if here == home:
                self.arguments = args, kwargs
                is_timed = self._before(module)
                self.arguments = (), {}  # nothing is kept alive
            else:
                is_timed = self._elsewhere(module)
            inside.add(here)
            began_ns = clock() if is_timed else 0
            try:
                return original(module, *args, **kwargs)
            finally:
                inside.discard(here)
                if began_ns:
                    self._after(module, clock() - began_ns)

        self._before, self._after = never_compiled(self._before), never_compiled(self._after)
        self._elsewhere = never_compiled(self._elsewhere)
        self._restore = replaced(nn.Module, "__call__", call)

    def detach(self) -> None:
        """Restore ``nn.Module``. If other code still calls our function, it passes calls through."""
        self._before = self._elsewhere = lambda module: False
        self._restore()
