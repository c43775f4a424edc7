"""Names that Dynamo gives to modules while it traces a function, parsed into paths of modules.

Dynamo calls such a name a source: an expression that starts at a variable of the compiled function
(``torch/_dynamo/source.py``).
"""

from __future__ import annotations

import re
from types import CodeType
from typing import Any, NamedTuple

from torchprof.attribute.compiled_graphs import SELF, TracedModule

_SOURCE = re.compile(r"([LG]\['[^']*'\])(.*)")
"""A source: a local or a global variable of the compiled function, and the steps from there."""
_STEP = re.compile(r"""\.(\w+)|\[(\d+)\]|\[(?:'([^']*)'|"([^"]*)")\]""")
"""A step of a source: an attribute, an index or a key."""
_OWN_TENSOR = re.compile(r".*(\._|\['_)(parameters|buffers)('\])?\['[^']*'\]")
"""A source that ends with a module's own parameter or buffer."""
_NO_STEPS = frozenset({"__dict__", "_modules", "_parameters", "_buffers"})
"""Steps that are not part of a module's path. Dynamo writes some of them; for a class that defines ``__getattr__`` it
writes all."""


class Taken(NamedTuple):
    """A graph input of a compiled function that is a tensor of a module: the number of the input, and the function's
    name for the module (see ``TracedModule``)."""

    number: int
    root: str
    path: tuple[str, ...]


def taken_by(graph: Any) -> list[Taken]:
    """The tensors that a compiled function takes from modules, one for each module that it names and for each child of
    such a module.

    A parameter is preferred to a buffer, because a forward may replace a buffer. The module to which the compiled
    forward belongs is left out: its label is known from the range around the call.
    """
    called = called_module()
    tensors: dict[str, dict[tuple[str, tuple[str, ...]], Taken]] = {"parameters": {}, "buffers": {}}
    for number, node in enumerate(node for node in graph.nodes if node.op == "placeholder"):
        name = getattr(getattr(node, "_dynamo_source", None), "name", "")
        source = str(name() if callable(name) else name)
        if own := _OWN_TENSOR.fullmatch(source):
            step = step_of(source, "")
            taken = Taken(number, root_of(step.root, called), step.path[:-1])
            if taken.root != SELF:
                tensors[own[2]].setdefault((taken.root, taken.path[:1]), taken)
    return [*{**tensors["buffers"], **tensors["parameters"]}.values()]


def step_of(source: str, cls: Any) -> TracedModule:
    """The module of a source, such as ``L['self'].layers.0``, ``L['self']._modules['fc']`` or
    ``L['self'].__dict__['_modules']['fc']``. A source of another form is a root without a path. ``cls``: the class of
    the module, or its qualified name."""
    kind = (cls if isinstance(cls, str) else getattr(cls, "__name__", "")).rpartition(".")[2]
    match = _SOURCE.fullmatch(source)
    if match is None or _STEP.sub("", match[2]):
        return TracedModule(source, (), kind)
    path = (next(filter(None, step), "") for step in _STEP.findall(match[2]))
    return TracedModule(match[1], tuple(step for step in path if step not in _NO_STEPS), kind)


def root_of(root: str, called: str | None) -> str:
    """``SELF`` if ``root`` is ``called``, the variable of the module whose forward is compiled. No other root stays
    equal to ``SELF``: ``self`` may also be the argument of a function that is not the forward of a module."""
    return SELF if root == called else f"{SELF} of a function" if root == SELF else root


def called_module() -> str | None:
    """The variable that holds the module whose forward is being compiled (``L['self']``); None if the function that is
    being compiled is not the forward of exactly one of its variables."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    function = InstructionTranslator.current_tx().output.root_tx
    names = [
        name
        for name, value in function.f_locals.items()
        if hasattr(type(value), "forward") and _is_forward_of(value, function.f_code)
    ]
    return f"L['{names[0]}']" if len(names) == 1 else None


def _is_forward_of(module: Any, code: CodeType) -> bool:
    """Whether code belongs to a module's forward: to the forward itself, to a function that it decorates, or to the
    part of it after a graph break."""
    waiting = [cls.__dict__.get("forward") for cls in type(module).__mro__]
    waiting.append(vars(module).get("forward"))
    while waiting:
        function = waiting.pop()
        own = getattr(function, "__code__", None)
        if own is not None and own.co_filename == code.co_filename:
            last = max((line for _, _, line in own.co_lines() if line), default=0)
            if own.co_firstlineno <= code.co_firstlineno <= last:
                return True
        if function is not None:
            waiting.append(getattr(function, "__wrapped__", None))
    return False
