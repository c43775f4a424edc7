"""Stand-ins for the forwards and the hooks of modules, which label the calls that they pass on.

A stand-in is shared: the first who wants one puts it in place, and the last, in whatever order they leave, takes it
away. Which label a call gets, if any, is looked up at each call by the identity of the module.
"""

from __future__ import annotations

import copy
import functools
import operator
from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any, ClassVar
from weakref import WeakValueDictionary, ref

import torch
from torch import nn

from torchprof.record.session import record


class ByModule(dict[int, Any]):
    """What calls of modules are labelled by, by the identity of the module.

    A class that is pickled as a whole, as cloudpickle does with those of ``__main__``, takes the stand-in for its
    forward along: there it finds no labels and calls the original.
    """

    def __reduce__(self) -> Any:
        return dict, ()


class StandIn:
    """Something in the place of a forward or of a hook, and who uses it.

    ``labels``: of the modules whose calls it labels. ``put_back`` gets the thing, and leaves what stands there now if
    that is another. Only those who use it keep it: the thing keeps its module alive, and is kept by nothing of ours.
    """

    _known: ClassVar[WeakValueDictionary[int, StandIn]] = WeakValueDictionary()  # by the identity of the thing

    def __init__(self, thing: Any, labels: ByModule, put_back: Callable[[Any], None]) -> None:
        self.labels = labels
        self._thing = ref(thing)
        self._put_back = put_back
        self._users: set[int] = set()
        StandIn._known[id(thing)] = self

    @classmethod
    def of(cls, thing: object) -> StandIn | None:
        """The stand-in that this is; None where it is none, or one that is no longer in use."""
        known = cls._known.get(id(thing))
        return known if known is not None and known._thing() is thing else None

    def join(self, user: object) -> None:
        self._users.add(id(user))

    def leave(self, user: object) -> None:
        """Use it no more; the last to do so puts back what was there. A second time nothing happens."""
        self._users.discard(id(user))
        thing = self._thing()
        if not self._users and thing is not None:
            self._put_back(thing)


def on_class(owner: type) -> StandIn | None:
    """The stand-in for the ``forward`` that a class defines; None where the class does not allow to set it."""
    original = owner.__dict__["forward"]
    known = StandIn.of(original)
    if known is not None:
        return known
    labels = ByModule()
    thing: Any
    if hasattr(original, "__code__"):
        thing = _looking_like(original, _labelling(original, labels))
    else:
        thing = _BoundLater(original, labels)
    try:
        owner.forward = thing  # type: ignore[attr-defined]
    except (AttributeError, TypeError):
        return None
    # The answer has to stay yes, see knows_itself.
    knows_itself = [cell for cell in getattr(original, "__closure__", None) or () if _holds(cell, original)]
    for cell in knows_itself:
        cell.cell_contents = thing

    def put_back(ours: Any) -> None:
        for cell in knows_itself:
            cell.cell_contents = original
        if owner.__dict__.get("forward") is ours:
            owner.forward = original  # type: ignore[attr-defined]

    return StandIn(thing, labels, put_back)


def on_instance(module: nn.Module, name: str) -> StandIn:
    """The stand-in for a ``forward``, or what else is called in its place, that an instance carries itself."""
    was_there = name in module.__dict__
    original = getattr(module, name)  # TorchScript keeps it in the instance from the first look on
    known = StandIn.of(original)
    if known is not None:
        return known
    labels = ByModule()
    wrapper = _labelling(lambda _, *args, **kwargs: original(*args, **kwargs), labels)
    thing = _InstanceForward(original, functools.partial(wrapper, module))
    module.__dict__[name] = thing
    of = ref(module)  # not the module, nor what keeps it alive

    def put_back(ours: _InstanceForward) -> None:
        holder = of()
        if holder is None or holder.__dict__.get(name) is not ours:
            return
        if was_there:
            holder.__dict__[name] = ours._original
        else:
            del holder.__dict__[name]

    return StandIn(thing, labels, put_back)


def on_hook(hooks: dict[int, Any], key: int) -> StandIn:
    """The stand-in for a hook of a module, which puts a label around it."""
    original = hooks[key]
    known = StandIn.of(original)
    if known is not None:
        return known
    labels = ByModule()

    @functools.wraps(original)
    def labelled(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        label = labels.get(id(module))
        if label is None or label.is_waiting or torch.compiler.is_compiling():
            return original(module, *args, **kwargs)
        with record(label.of_hooks):
            return original(module, *args, **kwargs)

    hooks[key] = labelled

    def put_back(ours: Any) -> None:
        if hooks.get(key) is ours:
            hooks[key] = original

    return StandIn(labelled, labels, put_back)


def _labelling(original: Callable[..., Any], labels: ByModule) -> Any:
    """A function that calls the original, with a label where the module has one; see ``instrument.Label``.

    It uses no global name, and where there is no label none of what only this process has: it may get the globals of
    the original, and may be pickled with its class.
    """
    identity, is_compiling = id, torch.compiler.is_dynamo_compiling

    @functools.wraps(original)
    def forward(self_: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        if is_compiling():  # torch._dynamo.export forgets what leave_to_eager says
            return original(self_, *args, **kwargs)
        label = labels.get(identity(self_))
        if label is None:
            return original(self_, *args, **kwargs)
        if label.is_waiting and not label.is_due(self_):
            try:
                return original(self_, *args, **kwargs)
            finally:
                label.has_ended(self_)
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

    # torch.compile traces the forward that was there, and compiles it under the wrapper, not the wrapper.
    forward._torchdynamo_inline = original  # type: ignore[attr-defined]
    leave_to_eager(forward)
    return forward


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

    def __init__(self, original: Any, labels: ByModule) -> None:
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


def knows_itself(function: Any) -> bool:
    """Whether a forward may ask whether its class still has it, itself: the checkpointed layers of transformers do so,
    and checkpoint no more where it has not."""
    return any(_holds(cell, function) for cell in getattr(function, "__closure__", None) or ())


def _looking_like(original: Any, wrapper: Any) -> Any:
    """A function that does what the wrapper does, with the globals, the defaults and the closure of the original.

    The guards of torch.compile look at the last two wherever a class has a ``forward``: with others they would fail,
    and it would compile again. ``torch.jit.script`` looks up the names in a forward's source in its globals, and before
    that in its closure: where the original has none, the names of ours are such that no source has.
    """
    if original.__closure__:
        code, closure = _code_that_calls(wrapper, original.__code__.co_freevars), original.__closure__
    else:
        names = tuple(f"torchprof: {name}" for name in wrapper.__code__.co_freevars)
        code, closure = wrapper.__code__.replace(co_freevars=names), wrapper.__closure__
    made: Any = functools.wraps(original)(FunctionType(code, original.__globals__, closure=closure))
    made._torchdynamo_inline = original
    leave_to_eager(made)
    made.__defaults__ = original.__defaults__
    made.__kwdefaults__ = original.__kwdefaults__
    return made


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
