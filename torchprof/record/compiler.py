"""Which operators and layers each kernel of torch.compile's graphs was made from: recorded while Inductor compiles.

All private API of the compiler is used in this file alone, and its presence is checked first.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from threading import local
from typing import Any, ClassVar, Protocol
from uuid import uuid4
from weakref import ref

from torch import nn

from torchprof.attribute.compiled_graphs import CompiledGraphs, CompiledKernel, ModuleTensor, ProfiledModule
from torchprof.attribute.events import COMPILED_INPUTS
from torchprof.errors import TorchprofError
from torchprof.record.compiler_graph import Graph, Taken, taken_by
from torchprof.record.session import is_observed, record
from torchprof.run.warnings import Caveat, caveat

_KEY = f"torchprof-{uuid4().hex[:8]}"
"""What the keys of graphs begin with: not as in another process, which may have saved what it compiled."""
_NUMBERS = itertools.count(1)
_RANGE = re.compile(r'RAIIAtenRecordFunctionHandle \S+\("graph_\d+_(\S+)"')
"""How the source of a kernel of C++ begins its range in events."""


class Planned(Protocol):
    """The modules of a profile; see ``Plan``."""

    @property
    def modules(self) -> Mapping[tuple[str, ...], ProfiledModule]: ...

    def is_alone(self, path: tuple[str, ...]) -> bool: ...

    def holders_of(self, tensors: Sequence[Any]) -> list[tuple[tuple[str, ...], ...] | None]: ...


class CompilerUnknown(TorchprofError):
    """This torch's compiler lacks something that finding out the layers of its kernels needs."""

    def __init__(self, reason: str) -> None:
        self.warning: Caveat = caveat("compiler_unknown", reason=reason)
        super().__init__(str(self.warning))


class _Inductor:
    """The private API of Inductor that is used here. Raises TorchprofError where this torch lacks any of it."""

    NODES = "_inductor_triton_kernel_to_post_grad_node_info"

    def __init__(self) -> None:
        try:
            from torch._functorch import config as functorch_config
            from torch._inductor import compile_fx, config, debug
            from torch._inductor.codegen.wrapper import PythonWrapperCodegen
            from torch._inductor.scheduler import Scheduler
            from torch._inductor.virtualized import V

            self.config: Any = config
            self.functorch_config: Any = functorch_config
            self._debug: Any = debug
            self._handlers: Any = V
            self.enter = compile_fx, "compile_fx"
            self.cached = compile_fx, "_compile_fx_inner"
            self.compile = compile_fx, "fx_codegen_and_compile"
            self.write = PythonWrapperCodegen, "write_provenance_debug_handle"
            self.call = Scheduler, "codegen_extern_call"
            for owner, name in (self.enter, self.cached, self.compile, self.write, self.call):
                getattr(owner, name)
            self.nodes_of("", 0)
            with self.uncached(), self.with_provenance():
                pass
        except (ImportError, AttributeError) as missing:
            raise CompilerUnknown(str(missing)) from missing

    def nodes_of(self, kernel: str, handle: int | None) -> Sequence[str]:
        """The names of the nodes that a kernel was made from."""
        return getattr(self._debug, self.NODES).get(f"{kernel}:{handle}", ())  # type: ignore[no-any-return]

    @property
    def lowering(self) -> Any:
        """The graph for which code is written now."""
        return self._handlers.graph

    @property
    def is_ahead_of_time(self) -> bool:
        """Whether what is compiled is for other processes."""
        return bool(getattr(self._handlers, "aot_compilation", False))

    def uncached(self) -> AbstractContextManager[Any]:
        """Without the caches of whole models."""
        names = ("enable_autograd_cache", "enable_remote_autograd_cache", "bundled_autograd_cache")
        return self.functorch_config.patch(dict.fromkeys(names, False))  # type: ignore[no-any-return]

    def with_provenance(self) -> AbstractContextManager[Any]:
        """Without the caches of graphs, and with provenance tracking and a range around each kernel."""
        return self.config.patch(  # type: ignore[no-any-return]
            {
                "fx_graph_cache": False,
                "fx_graph_remote_cache": False,
                "trace.provenance_tracking_level": 1,
                "cpp.enable_kernel_profile": True,
            }
        )


class Provenance:
    """While it is on, what torch.compile compiles is known by its layers: see ``known``.

    Graphs are compiled anew then, not taken from caches, which know none of this; kernels of C++ have ranges of their
    own in the profiler's events, and keep them. An error while the layers of a graph are looked for leaves them
    unknown, and what is compiled unchanged. Raises TorchprofError where this torch lacks what that needs.
    """

    known: ClassVar[dict[str, tuple[CompiledKernel, ...] | str]] = {}
    """The kernels of all graphs that were compiled while any was on, by the key in the name of the range around; the
    reason where they are not known."""

    _all_on: ClassVar[list[Provenance]] = []

    def __init__(self, divisor: str | None = None) -> None:
        """``divisor``: see ``CompiledGraphs``."""
        self._inductor = _Inductor()
        self._divisor = divisor
        self._calls = _Calls()
        self._undo = ExitStack()

    @classmethod
    def if_told(cls, divisor: str | None, notes: list[Caveat]) -> Provenance | None:
        """One, or None where this torch lacks the private API that it needs: then the reason is added to ``notes``."""
        try:
            return cls(divisor)
        except CompilerUnknown as missing:
            notes.append(missing.warning)
            return None

    def on(self) -> None:
        inductor = self._inductor
        forwards: dict[Any, Graph] = {}  # by what torch calls a graph and its backward
        state = local()  # autograd's threads compile, too
        state.graph = None

        def now() -> Graph | None:
            return getattr(state, "graph", None)

        def compile_uncached(original: Callable[..., Any], module: Any, *args: Any, **kwargs: Any) -> Any:
            taken: list[Taken] = []
            if not getattr(state, "is_inside", False) and not inductor.is_ahead_of_time:
                with suppress(Exception):  # as of a graph that cannot be read
                    taken = taken_by(module.graph)
            is_inside, state.is_inside = getattr(state, "is_inside", False), True
            try:
                with inductor.uncached():
                    compiled = original(module, *args, **kwargs)
            finally:
                state.is_inside = is_inside
            return _telling(compiled, taken) if taken and callable(compiled) else compiled

        def compile_with_provenance(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if inductor.is_ahead_of_time:
                return original(*args, **kwargs)
            with inductor.with_provenance():  # here, too: settings are those of a thread, and backward has another
                return original(*args, **kwargs)

        def compile_graph(original: Callable[..., Any], module: Any, *args: Any, **kwargs: Any) -> Any:
            number, is_backward = kwargs.get("graph_id"), kwargs.get("is_backward", False)
            graph = Graph(forwards.get(number) if is_backward else None, is_backward)
            with graph.reading():
                graph.read(module.graph)
            if number is not None and not is_backward:
                forwards[number] = graph
            around, state.graph = now(), graph
            try:
                compiled = original(module, *args, **kwargs)
            finally:
                state.graph = around
                graph.forget_lowering()
            if hasattr(compiled, "_fx_graph_cache_key"):
                key = compiled._fx_graph_cache_key = f"{_KEY}-{next(_NUMBERS)}"
                kernels: tuple[CompiledKernel, ...] = ()
                with graph.reading():
                    kernels = graph.kernels
                Provenance.known[key] = graph.why_unknown or kernels
            return compiled

        def write(original: Callable[..., Any], wrapper: Any, kernel: str, handle: int | None = None) -> Any:
            graph = now()
            if graph is not None:
                with graph.reading():
                    lowering = inductor.lowering
                    nodes = graph.nodes_from(lowering, inductor.nodes_of(kernel, handle))
                    template, prologue = (graph.nodes_from(lowering, names) for names in _template(lowering))
                    graph.add(_range_of(wrapper, kernel, lowering.cpp_wrapper), nodes, template[-1:], prologue)
            return original(wrapper, kernel, handle)

        def call(original: Callable[..., Any], scheduler: Any, node: Any) -> Any:
            graph = now()
            before = 0 if graph is None else graph.written
            called = original(scheduler, node)
            if graph is not None and graph.written == before:  # some ops of libraries are called without a word
                with graph.reading():
                    name = getattr(node.node, "python_kernel_name", None)
                    if name is not None and name.startswith("aten."):
                        graph.add(name, graph.nodes_from(inductor.lowering, map(str, node.node.origins)))
            return called

        with ExitStack() as undo:
            undo.callback(forwards.clear)
            if Provenance._all_on:  # numbers of calls are in the events of all that are on
                self._calls = Provenance._all_on[-1]._calls
            Provenance._all_on.append(self)
            undo.callback(Provenance._all_on.remove, self)
            _replace(undo, inductor.enter, compile_uncached)
            _replace(undo, inductor.cached, compile_with_provenance)
            _replace(undo, inductor.compile, compile_graph)
            _replace(undo, inductor.write, write)
            _replace(undo, inductor.call, call)
            self._undo = undo.pop_all()

    def off(self) -> None:
        self._undo.close()

    def graphs(self, plan: Planned) -> CompiledGraphs:
        """All that is known by now, for the models of a profile."""
        return CompiledGraphs(
            Provenance.known, plan.modules, self._divisor, plan.is_alone, self._calls.given(plan.holders_of)
        )

    @classmethod
    def calls(cls) -> _Calls | None:
        """Where the calls of compiled functions are noted; None while none is on."""
        return next((one._calls for one in cls._all_on[-1:]), None)


class _Calls:
    """Which tensors of modules compiled functions were called with, as weak references.

    Calls with the same tensors have one number. After ``MOST`` numbers only parameters are noted, as a forward may
    replace a buffer in each call, and after twice as many nothing more: one number for each function.
    """

    MOST: ClassVar[int] = 10_000

    def __init__(self) -> None:
        self._free = itertools.count()  # threads that call at once get different numbers
        self._tensors: dict[int, list[tuple[Taken, Callable[[], Any]]]] = {}  # by number
        self._numbers: dict[tuple[tuple[Taken, ...], tuple[int, ...]], int] = {}  # by the ids of the tensors

    def number_of(self, taken: tuple[Taken, ...], inputs: Sequence[Any]) -> int:
        """The number of a call. Raises IndexError and TypeError for other inputs than were compiled for."""
        tensors = [inputs[one.number] for one in taken]
        noted: list[Any] = tensors
        for most in (_Calls.MOST, 2 * _Calls.MOST, None):
            key = taken, tuple(map(id, noted))
            number = self._numbers.get(key)
            if number is not None and all(known() is one for (_, known), one in zip(self._tensors[number], noted)):
                return number
            if most is None or len(self._tensors) < most:
                break
            is_full = most > _Calls.MOST
            noted = [None if is_full or not isinstance(one, nn.Parameter) else one for one in tensors]
        number = next(self._free)
        self._tensors[number] = [
            (one, _nothing if tensor is None else ref(tensor)) for one, tensor in zip(taken, noted)
        ]
        self._numbers[key] = number
        return number

    def given(self, holders_of: Callable[[Sequence[Any]], Sequence[Any]]) -> dict[str, list[ModuleTensor]]:
        """What was taken, by the name of the range of each call; see ``Planned.holders_of``."""
        calls = [*self._tensors.items()]
        tensors = [tensor() for _, call in calls for _, tensor in call]
        holders = iter(holders_of(tensors))
        alive = iter(tensors)
        return {
            f"{COMPILED_INPUTS}{number}": [
                ModuleTensor(one.root, one.path, next(holders), next(alive) is None) for one, _ in call
            ]
            for number, call in calls
        }


def _nothing() -> None:
    """Stands for a reference to a tensor that was not noted."""


def _telling(compiled: Callable[..., Any], taken: Sequence[Taken]) -> Callable[..., Any]:
    """A function that calls another, the graphs of a compiled function, and tells a profiler of ours that is on which
    tensors of modules it was called with: one graph serves all modules for which the guards hold. It stays in what was
    compiled: where none of ours is on, it only calls."""
    taken = tuple(taken)

    @functools.wraps(compiled)
    def noting(*args: Any, **kwargs: Any) -> Any:
        calls = Provenance.calls()
        if calls is None or not is_observed():
            return compiled(*args, **kwargs)
        try:
            number = calls.number_of(taken, args[0] if len(args) == 1 and isinstance(args[0], list) else args)
        except (IndexError, TypeError):  # they are not what it was compiled for: nothing is noted
            return compiled(*args, **kwargs)
        with record(f"{COMPILED_INPUTS}{number}"):
            return compiled(*args, **kwargs)

    # Dynamo would look through a function that bears these marks of the one inside it.
    for name in [name for name in vars(noting) if name.startswith("_torchdynamo")]:
        delattr(noting, name)
    return noting


def _range_of(wrapper: Any, kernel: str, is_called_by_name: bool) -> str:
    """What the range of a kernel is called in events: as the kernel, but for a template's. In its source there are
    still placeholders for what it is called."""
    for source, name in reversed(getattr(wrapper, "src_to_kernel", {}).items()):
        if name == kernel:
            found = _RANGE.search(str(source))
            called = found[1].replace("Placeholder.DESCRIPTIVE_NAME", kernel) if found else kernel
            return called.replace("Placeholder.KERNEL_NAME", kernel if is_called_by_name else "kernel")
    return kernel


def _template(lowering: Any) -> tuple[set[str], set[str]]:
    """Of the kernel for which code is written now, if it is a template's: the nodes that the template is said to be
    made from, which is the last of them, and those of what is computed in it before."""
    scheduled: Any = getattr(getattr(lowering, "scheduler", None), "current_node", None)
    if scheduled is None or not scheduled.is_template():
        return set(), set()
    prologue, template, _ = scheduled.get_prologue_template_epilogue([*scheduled.get_nodes()])
    before = [node for one in prologue if one.node is not None for node in one.node.origins]
    return {node.name for node in template.node.origins}, {node.name for node in before}


def _replace(undo: ExitStack, place: tuple[Any, str], ours: Callable[..., Any]) -> None:
    """Have a function of ours called in place of another, with that as its first argument, until it is undone. Where
    somebody has replaced it since, what they call passes their call on from then."""
    owner, name = place
    original = getattr(owner, name)
    is_on = True

    @functools.wraps(original)
    def stand_in(*args: Any, **kwargs: Any) -> Any:
        return ours(original, *args, **kwargs) if is_on else original(*args, **kwargs)

    def restore() -> None:
        nonlocal is_on
        is_on = False
        if getattr(owner, name, None) is stand_in:
            setattr(owner, name, original)

    setattr(owner, name, stand_in)
    undo.callback(restore)
