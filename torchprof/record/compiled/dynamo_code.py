"""What torch.compile will compile in this process, and what it has compiled, when and why; its names for modules."""

from __future__ import annotations

import re
import sys
import warnings
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from types import CodeType
from typing import Any, NamedTuple

from torch import nn

from torchprof.attribute.compiled_graphs import SELF, TracedModule
from torchprof.measure.recording import CompiledForward
from torchprof.record.torch_internals import optional
from torchprof.run.meta import Compilation, CompiledRegion, RunWarning
from torchprof.run.sentences import TOO_MUCH_FOR_STACKS
from torchprof.run.words import BACKWARD, FORWARD

# Modules under torch.compile


def awaiting_compilation(models: Iterable[nn.Module]) -> list[nn.Module]:
    """The modules of some models that torch.compile will compile at their next call, without those that it leaves."""
    modules = dict.fromkeys(module for model in models for module in model.modules())
    given_up: Any = getattr(sys.modules.get("torch._dynamo.convert_frame"), "input_codes", ())
    return [
        module
        for module in modules
        if is_under_compile(module)
        and has_code(module) is False
        and not _is_disabled(module)
        and _code_of(module) not in given_up  # torch found nothing to compile in it before
    ]


def is_under_compile(module: nn.Module) -> bool:
    """Whether calls of a module go through torch.compile: it is the result of ``torch.compile``, or was compiled in
    place. False if torch.compile was disabled for it."""
    optimized: Any = getattr(sys.modules.get("torch._dynamo.eval_frame"), "OptimizedModule", ())
    if isinstance(module, optimized):
        return type(getattr(module, "dynamo_ctx", None)).__name__ != "DisableContext"
    in_place = getattr(module, "_compiled_call_impl", None)
    return in_place is not None and in_place != getattr(module, "_call_impl", None)


def has_code(module: nn.Module) -> bool | None:
    """Whether torch.compile has compiled code for the forward of a module's class; None if this torch hides that."""
    entries = optional("torch._C._dynamo.eval_frame._debug_get_cache_entry_list")
    code = _code_of(module)
    return None if code is None or entries is None else bool(entries(code))


def forwards_under_compile(modules: Iterable[tuple[int, nn.Module]]) -> tuple[CompiledForward, ...]:
    """The functions that torch.compile compiles for these layers."""
    regions = []
    for layer, module in modules:
        code = _code_of(module)
        if code is not None and not _is_disabled(module):
            name = getattr(code, "co_qualname", code.co_name)
            regions.append(CompiledForward(layer, name, code.co_filename, code.co_firstlineno))
    return tuple(regions)


def _is_disabled(module: nn.Module) -> bool:
    own = vars(unwrapped(module)).get("forward")
    return any(getattr(forward, "_torchdynamo_disable", False) for forward in (*_forwards(module), own))


def _code_of(module: nn.Module) -> Any:
    """The code that torch.compile compiles for a module; None if it has none in Python."""
    return getattr(_forwards(module)[-1], "__code__", None)


def _forwards(module: nn.Module) -> list[Any]:
    """The forward of a module's class, and those that torch.compile compiles instead: a stand-in names its original."""
    forwards: list[Any] = [getattr(type(unwrapped(module)), "forward", None)]
    while hasattr(forwards[-1], "_torchdynamo_inline"):
        forwards.append(forwards[-1]._torchdynamo_inline)
    return forwards


def unwrapped(module: nn.Module) -> nn.Module:
    """The module that torch.compile wrapped in this one, else this one."""
    if "_orig_mod" not in module._modules:  # that of a ScriptModule has no `get`
        return module
    wrapped = module._modules["_orig_mod"]
    return wrapped if isinstance(wrapped, nn.Module) else module


def about_left_out_stacks(modules: Sequence[nn.Module]) -> RunWarning:
    """The warning that source lines are not recorded, because these modules will be compiled meanwhile."""
    names = dict.fromkeys(type(unwrapped(module)).__name__ for module in modules)
    return RunWarning.of("stacks_left_out", modules=tuple(names))


class StackWarning:
    """From ``on`` to ``off``, one warning when torch.compile compiles; none if it was not used before ``on``."""

    def __init__(self) -> None:
        self._handler: Any = None
        self._has_warned = False

    def on(self) -> None:
        self._has_warned = False
        self._handler = getattr(sys.modules.get("torch._dynamo.callback"), "callback_handler", None)
        with suppress(AttributeError):
            self._handler.register_start_callback(self._warn)

    def off(self) -> None:
        with suppress(AttributeError, ValueError):  # torch._dynamo.reset() removes it, too
            self._handler.remove_start_callback(self._warn)
        self._handler = None

    def _warn(self, *args: Any) -> None:
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"torch.compile compiles while source lines are recorded. {TOO_MUCH_FOR_STACKS}", stacklevel=2
            )


# Compiled code

_RESUME = re.compile(r"__resume_at_(\d+)_\d+")
"""The function that a compiled one calls after a graph break, with the offset at which it continues."""
_BRANCH = "generic_jump "
"""The start of the reason of ``torch/_dynamo/symbolic_convert.py`` for an ``if`` or a loop on the value of a tensor."""
_ON_A_VALUE = """Data-dependent branching
  Explanation: which code runs depends on the value of a tensor
  Hint: Compute both branches, and select with `torch.where`; or use `torch.cond`."""


def compiled_regions() -> tuple[CompiledRegion, ...]:
    """All code that torch.compile has compiled in this process and still has; empty if this torch does not give it."""
    if "torch._dynamo.convert_frame" not in sys.modules:
        return ()
    try:
        from torch._dynamo.convert_frame import input_codes
        from torch._dynamo.eval_frame import _debug_get_cache_entry_list
        from torch._dynamo.utils import graph_break_reasons

        # Compile IDs start again after torch.compiler.reset(), which forgets these reasons, too.
        breaks = {
            (frame.filename, frame.name, frame.lineno or 0): reason.reason
            for reason in graph_break_reasons
            for frame in reason.user_stack
        }
        return tuple(
            _region(code, version.code, str(version.compile_id), breaks)
            for code in (seen() for seen in input_codes.seen)
            if code is not None
            for version in _debug_get_cache_entry_list(code)
        )
    except Exception:  # these are private names of torch, which another version may change
        return ()


def _region(
    code: CodeType, compiled: CodeType, name: str, breaks: Mapping[tuple[str, str, int], str]
) -> CompiledRegion:
    """The region of a function's code. ``compiled``: its compiled code. After a graph break, that calls functions for
    the rest, and their names have the offset of the instruction with which they continue. ``breaks``: by file,
    function and line, the reasons of graph breaks, in torch's words."""
    resumes = [int(match[1]) for match in map(_RESUME.match, compiled.co_names) if match]
    lines = [line for start, end, line in code.co_lines() if line and any(start <= offset < end for offset in resumes)]
    line, reason = min(lines, default=None), ""
    for number in sorted({number for _, _, number in code.co_lines() if number}) if lines else ():
        if (code.co_filename, code.co_name, number) in breaks:
            line, reason = number, breaks[code.co_filename, code.co_name, number]
    if reason.startswith(_BRANCH):
        reason = _ON_A_VALUE
    function = getattr(code, "co_qualname", code.co_name)
    return CompiledRegion(name, function, code.co_filename, code.co_firstlineno, line, *_reason_and_hint(reason))


def _reason_and_hint(message: str) -> tuple[str, str]:
    """Of torch's message about a graph break, the first line with the first explanation, and the first hint; one to
    report it to torch's authors only if there is no other. "" for what it does not have."""
    lines = _lines(message)
    explanations, hints = (
        [line.removeprefix(start) for line in lines if line.startswith(start)] for start in ("Explanation: ", "Hint: ")
    )
    hint = next((hint for hint in hints if "file an issue" not in hint), next(iter(hints), ""))
    return ": ".join([*lines[:1], *explanations[:1]]).rstrip("."), hint


# Compilations

_VERSION = re.compile(r"[!\d/]+: ")  # the version of a region that a reason is about; torch puts it first
_ADDRESS = re.compile(r", \d{9,}")
_CACHE_HITS = tuple(
    f"{cache}_{place}_cache_hit_count" for cache in ("inductor_fx", "aotautograd") for place in ("local", "remote")
)


def compilations(step_starts: Sequence[int]) -> tuple[Compilation, ...]:
    """The compilations of this process, in the order of time, as far as torch has them: it keeps the last 64. Empty if
    it does not tell. ``step_starts``: when the recording, and each step after the first, began, in ns since 1970."""
    if "torch._dynamo.convert_frame" not in sys.modules:
        return ()
    known: list[Compilation] = []
    with suppress(Exception):  # these are private names of torch, which another version may change
        from torch._dynamo.utils import get_compilation_metrics

        known += _compilations_of(get_compilation_metrics(), step_starts)
    return tuple(sorted(known, key=lambda compilation: compilation.began_ns))


def _compilations_of(metrics: Sequence[Any], step_starts: Sequence[int]) -> Iterator[Compilation]:
    functions: dict[str, tuple[str, str, int]] = {}  # by the first number of a compile id
    for metric in metrics:
        began, name = getattr(metric, "start_time", None), str(metric.compile_id)
        if began is None:  # torch 2.4 does not tell it of a backward
            continue
        is_forward = getattr(metric, "is_forward", None) is not False
        number = name.partition("/")[0]
        if metric.co_name is not None:
            functions[number] = str(metric.co_name), str(metric.co_filename), int(metric.co_firstlineno)
        function, file, line = functions.get(number, ("", "", 0))
        began_ns = round(began * 1e9)
        step = bisect_right(step_starts, began_ns) - 1
        cache_hits = [getattr(metric, count, None) for count in _CACHE_HITS]  # each None if this torch does not tell
        yield Compilation(
            name=name,
            phase=FORWARD if is_forward else BACKWARD,
            function=function,
            file=file,
            line=line,
            step=None if step < 0 else step,
            reason=_without_addresses(str(getattr(metric, "recompile_reason", None) or "")),
            failure=next(iter(_lines(str(metric.fail_reason))), "unknown") if metric.fail_type is not None else "",
            **_durations(metric, is_forward),
            from_cache=None if all(hits is None for hits in cache_hits) else any(cache_hits),
            began_ns=began_ns,
        )


def _durations(metric: Any, is_forward: bool) -> dict[str, Any]:
    """How long a compilation and its parts took, from torch's times. Each of these contains the next ones, if torch has
    them; a backward is all of its backend::

        frame               |----------------------- ns ----------------------|
        backend                          |------------------------------------|
        Inductor                                       |----------------------|
        Triton and C++                                               |--------|
                            | tracing_ns | autograd_ns | lowering_ns | kernels_ns
    """
    in_inductor = _ns(metric, "inductor_compile_time_s", 1e9)
    frame = _ns(metric, "entire_frame_compile_time_s", 1e9) or _ns(metric, "duration_us", 1e3) or in_inductor
    backend = min(_ns(metric, "backend_compile_time_s", 1e9), frame) if is_forward else frame
    inductor = min(in_inductor, backend)
    kernels = min(_ns(metric, "triton_compile_time_us", 1e3), inductor)
    return {
        "ns": frame,
        "tracing_ns": frame - backend,
        "autograd_ns": backend - inductor,
        "lowering_ns": inductor - kernels,
        "kernels_ns": kernels or None,  # torch does not tell it where they are compiled in the same thread
    }


def _ns(metric: Any, name: str, unit_ns: float) -> int:
    """A time of a compilation; 0 if it has no such part. ``unit_ns``: the unit of the record."""
    return round(unit_ns * (getattr(metric, name, None) or 0))


def _without_addresses(reason: str) -> str:
    """torch's reason without the version that it is about, the line of code, and the addresses of objects."""
    return _ADDRESS.sub("", _VERSION.sub("", " ".join(reason.split()), count=1).partition(" # ")[0])


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip()]


# Dynamo's names of modules
# Such a name is a source: an expression that starts at a variable of the compiled function (torch/_dynamo/source.py).

_SOURCE = re.compile(r"([LG]\['[^']*'\])(.*)")
"""A source: a local or a global variable of the compiled function, and the steps from there."""
_STEP = re.compile(r"""\.(\w+)|\[(\d+)\]|\[(?:'([^']*)'|"([^"]*)")\]""")
"""A step of a source: an attribute, an index or a key."""
_OWN_TENSOR = re.compile(r".*(\._|\['_)(parameters|buffers)('\])?\['[^']*'\]")
"""A source that ends with a module's own parameter or buffer."""
_NO_STEPS = frozenset({"__dict__", "_modules", "_parameters", "_buffers"})
"""Steps that are not part of a module's path; Dynamo writes all for a class that defines ``__getattr__``."""


class TakenTensor(NamedTuple):
    """A graph input that is a tensor of a module: its number, and Dynamo's name for the module (``TracedModule``)."""

    number: int
    root: str
    path: tuple[str, ...]


def taken_by(graph: Any) -> list[TakenTensor]:
    """The tensors that a compiled function takes from modules, one for each module that it names and for each child of
    such a module: a parameter rather than a buffer, which a forward may replace. The module to which the compiled
    forward belongs is left out: its label is known from the range around the call."""
    called = called_module()
    tensors: dict[str, dict[tuple[str, tuple[str, ...]], TakenTensor]] = {"parameters": {}, "buffers": {}}
    for number, node in enumerate(node for node in graph.nodes if node.op == "placeholder"):
        name = getattr(getattr(node, "_dynamo_source", None), "name", "")
        source = str(name() if callable(name) else name)
        if own := _OWN_TENSOR.fullmatch(source):
            step = module_of_source(source, "")
            taken = TakenTensor(number, root_of(step.root, called), step.path[:-1])
            if taken.root != SELF:
                tensors[own[2]].setdefault((taken.root, taken.path[:1]), taken)
    return [*{**tensors["buffers"], **tensors["parameters"]}.values()]


def module_of_source(source: str, cls: Any) -> TracedModule:
    """The module of a source, such as ``L['self'].layers.0`` or ``L['self'].__dict__['_modules']['fc']``. A source of
    another form is a root without a path. ``cls``: the class of the module, or its qualified name."""
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
    """Whether code belongs to a module's forward, to a function that it decorates, or to a part after a graph break."""
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
