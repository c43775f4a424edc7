"""Which operators and layers each kernel of torch.compile's graphs was made from: recorded while Inductor compiles. And
the graphs that are called while a session records: their texts, the sizes of their inputs, the layers of their kernels.
"""

from __future__ import annotations

import functools
import itertools
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from threading import local
from typing import Any, ClassVar
from uuid import uuid4

import torch

from torchprof.attribute.compiled_graphs import CompiledGraphs, CompiledKernel
from torchprof.attribute.events import COMPILED_INPUTS
from torchprof.measure.recording import CalledGraph
from torchprof.record.compiled.dynamo_code import TakenTensor, taken_by
from torchprof.record.compiled.kept_graph import KeptGraph, NotedCalls
from torchprof.record.compiled.traced_graph import TracedGraph
from torchprof.record.plan import Plan
from torchprof.record.session import is_observed, record
from torchprof.record.torch_internals import optional, replaced
from torchprof.run.meta import RunWarning
from torchprof.run.words import COMPILED_BEFORE, LAYERS_NOT_RECORDED

_KEY = f"torchprof-{uuid4().hex[:8]}"
"""The prefix of the keys of graphs. It differs between processes, because a cache may bring graphs of another one."""
_NUMBERS = itertools.count(1)
_GRAPHS = "torch._inductor.output_code.CompiledFxGraph"
_RANGE = re.compile(r'RAIIAtenRecordFunctionHandle \S+\("graph_\d+_(\S+)"')
"""The line in the source of a C++ kernel that opens its range in the profiler's events."""


class _Inductor:
    """All private API of Inductor that is used here. Raises ImportError or AttributeError if this torch lacks any."""

    def __init__(self) -> None:
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

    def nodes_of(self, kernel: str, handle: int | None) -> Sequence[str]:
        """The names of the nodes that a kernel was made from."""
        nodes = self._debug._inductor_triton_kernel_to_post_grad_node_info
        return nodes.get(f"{kernel}:{handle}", ())  # type: ignore[no-any-return]

    @property
    def lowering(self) -> Any:
        """The graph for which Inductor generates code now."""
        return self._handlers.graph

    @property
    def is_ahead_of_time(self) -> bool:
        """Whether the code is compiled for other processes."""
        return bool(getattr(self._handlers, "aot_compilation", False))

    def uncached(self) -> Any:
        """A context without the caches of whole models."""
        names = ("enable_autograd_cache", "enable_remote_autograd_cache", "bundled_autograd_cache")
        return self.functorch_config.patch(dict.fromkeys(names, False))

    def with_provenance(self) -> Any:
        """A context without the caches of graphs, with provenance tracking and with a range around each C++ kernel."""
        caches = {"fx_graph_cache": False, "fx_graph_remote_cache": False}
        return self.config.patch({**caches, "trace.provenance_tracking_level": 1, "cpp.enable_kernel_profile": True})


class _State(local):
    """What a thread compiles now: autograd's threads compile, too."""

    graph: TracedGraph | None = None
    is_in_function = False


class Provenance:
    """From ``on`` to ``off``, records which operators and layers each kernel was made from that torch.compile compiles.
    Graphs are then compiled and not taken from caches, because a cached graph has no provenance. C++ kernels get ranges
    in the profiler's events, and keep them afterwards. An error while a graph is read leaves its layers unknown and the
    compiled code unchanged. Raises ImportError or AttributeError if this torch lacks the private API that is needed."""

    known: ClassVar[dict[str, tuple[CompiledKernel, ...] | str]] = {}
    """The kernels of all graphs that were compiled while any ``Provenance`` was on, or the reason why they are unknown.
    The key is in the name of the range around a graph."""

    def __init__(self) -> None:
        self._inductor = _Inductor()
        self._undo = ExitStack()
        self._forwards: dict[Any, TracedGraph] = {}  # by the ID that torch gives to a graph and its backward
        self._state = _State()

    @classmethod
    def if_supported(cls, warnings: list[RunWarning]) -> Provenance | None:
        """A new object; None if this torch lacks the private API: the reason is added to ``warnings``."""
        try:
            return cls()
        except (ImportError, AttributeError) as missing:
            warnings.append(RunWarning.of("compiler_unknown", reason=str(missing)))
            return None

    def on(self) -> None:
        inductor = self._inductor
        with ExitStack() as undo:
            undo.callback(self._forwards.clear)
            replace(undo, inductor.enter, self._compile_function)
            replace(undo, inductor.cached, self._compile_with_provenance)
            replace(undo, inductor.compile, self._compile_graph)
            replace(undo, inductor.write, self._write_kernel)
            replace(undo, inductor.call, self._call_library)
            self._undo = undo.pop_all()

    def off(self) -> None:
        self._undo.close()

    # Each of these runs in place of a function of Inductor, which it gets first, and calls it.

    def _compile_function(self, original: Callable[..., Any], module: Any, *args: Any, **kwargs: Any) -> Any:
        """Compile a function without the caches of whole models; its calls are noted if it takes tensors of modules."""
        taken: list[TakenTensor] = []
        around, self._state.is_in_function = self._state.is_in_function, True
        if not around and not self._inductor.is_ahead_of_time:
            with suppress(Exception):  # a graph that cannot be read is no error of the user's program
                taken = taken_by(module.graph)
        try:
            with self._inductor.uncached():
                compiled = original(module, *args, **kwargs)
        finally:
            self._state.is_in_function = around
        return _noting_calls(compiled, tuple(taken)) if taken and callable(compiled) else compiled

    def _compile_with_provenance(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Compile a graph without the caches of graphs and with provenance tracking."""
        if self._inductor.is_ahead_of_time:
            return original(*args, **kwargs)
        with self._inductor.with_provenance():  # not once in ``on``: settings hold for one thread, backward has another
            return original(*args, **kwargs)

    def _compile_graph(self, original: Callable[..., Any], module: Any, *args: Any, **kwargs: Any) -> Any:
        """Read a graph, compile it, and keep its kernels under a key that the range around it shows."""
        number, is_backward = kwargs.get("graph_id"), kwargs.get("is_backward", False)
        graph = TracedGraph(self._forwards.get(number) if is_backward else None, is_backward)
        with graph.reading():
            graph.read(module.graph)
        if number is not None and not is_backward:
            self._forwards[number] = graph
        around, self._state.graph = self._state.graph, graph
        try:
            compiled = original(module, *args, **kwargs)
        finally:
            self._state.graph = around
            graph.forget_lowering()
        if hasattr(compiled, "_fx_graph_cache_key"):
            key = compiled._fx_graph_cache_key = f"{_KEY}-{next(_NUMBERS)}"
            kernels: tuple[CompiledKernel, ...] = ()
            with graph.reading():
                kernels = graph.kernels
            Provenance.known[key] = graph.why_unknown or kernels
        return compiled

    def _write_kernel(self, original: Callable[..., Any], wrapper: Any, kernel: str, handle: int | None = None) -> Any:
        """Note the nodes of a kernel for which Inductor writes the provenance."""
        if (graph := self._state.graph) is not None:
            with graph.reading():
                lowering = self._inductor.lowering
                nodes = graph.nodes_from(lowering, self._inductor.nodes_of(kernel, handle))
                template, prologue = (graph.nodes_from(lowering, names) for names in _template(lowering))
                graph.add(_range_of(wrapper, kernel, lowering.cpp_wrapper), nodes, template[-1:], prologue)
        return original(wrapper, kernel, handle)

    def _call_library(self, original: Callable[..., Any], scheduler: Any, node: Any) -> Any:
        """Note a library op, for some of which Inductor writes no provenance."""
        graph = self._state.graph
        before = 0 if graph is None else len(graph.written)
        called = original(scheduler, node)
        if graph is not None and len(graph.written) == before:
            with graph.reading():
                name = getattr(node.node, "python_kernel_name", None) or ""
                if name.startswith("aten."):
                    graph.add(name, graph.nodes_from(self._inductor.lowering, map(str, node.node.origins)))
        return called


def _noting_calls(compiled: Callable[..., Any], taken: tuple[TakenTensor, ...]) -> Callable[..., Any]:
    """A function that calls the graphs of a compiled function and notes which tensors of modules it was called with:
    one graph serves all modules for which the guards hold. It stays in the compiled code after the recording."""

    @functools.wraps(compiled)
    def noted(*args: Any, **kwargs: Any) -> Any:
        noting = CalledGraphs.current
        if noting is None or not is_observed():
            return compiled(*args, **kwargs)
        try:
            number = noting.calls.number_of(taken, args[0] if len(args) == 1 and isinstance(args[0], list) else args)
        except (IndexError, TypeError):  # not the inputs of the compiled graph: nothing is noted
            return compiled(*args, **kwargs)
        with record(f"{COMPILED_INPUTS}{number}"):
            return compiled(*args, **kwargs)

    # With these attributes, copied from the inner function, Dynamo would trace through this one.
    for name in [name for name in vars(noted) if name.startswith("_torchdynamo")]:
        delattr(noted, name)
    return noted


def _range_of(wrapper: Any, kernel: str, is_called_by_name: bool) -> str:
    """The name of a kernel's range in the profiler's events: its own. The source of a template has placeholders."""
    for source, name in reversed(getattr(wrapper, "src_to_kernel", {}).items()):
        if name == kernel:
            match = _RANGE.search(str(source))
            label = match[1].replace("Placeholder.DESCRIPTIVE_NAME", kernel) if match else kernel
            return label.replace("Placeholder.KERNEL_NAME", kernel if is_called_by_name else "kernel")
    return kernel


def _template(lowering: Any) -> tuple[set[str], set[str]]:
    """The nodes of the template for which Inductor generates code now, and the nodes of its prologue; both empty if the
    kernel is not a template. Of the template's nodes, the last is its op; the others made its inputs."""
    scheduled: Any = getattr(getattr(lowering, "scheduler", None), "current_node", None)
    if scheduled is None or not scheduled.is_template():
        return set(), set()
    prologue, template, _ = scheduled.get_prologue_template_epilogue([*scheduled.get_nodes()])
    before = [node for entry in prologue if entry.node is not None for node in entry.node.origins]
    return {node.name for node in template.node.origins}, {node.name for node in before}


def replace(undo: ExitStack, place: tuple[Any, str], ours: Callable[..., Any]) -> None:
    """Replace a function by one of ours, which gets the original first, until ``undo`` is closed. If other code has
    replaced it meanwhile, that stays, and ours passes calls on to the original."""
    owner, name = place
    original = getattr(owner, name)
    is_on = True

    @functools.wraps(original)
    def stand_in(*args: Any, **kwargs: Any) -> Any:
        return ours(original, *args, **kwargs) if is_on else original(*args, **kwargs)

    restore = replaced(owner, name, stand_in)

    def switch_off() -> None:
        nonlocal is_on
        is_on = False
        restore()

    undo.callback(switch_off)


class CalledGraphs:
    """From ``on`` to ``off``, notes each call of a graph of Inductor, whenever it was compiled. A range around the call
    tells with which parameters it was called, unless a ``Provenance`` knows the layers of the graph. A method of
    Inductor's class of graphs is replaced for that. A process that did not use torch.compile before ``on`` is left as
    it is. ``by_key``: the graphs by the key in the profiler's range around each call."""

    current: ClassVar[CalledGraphs | None] = None  # the one that is on: a process has one session at a time

    def __init__(self) -> None:
        self._undo = ExitStack()
        self.by_key: dict[str, CalledGraph] = {}
        self.calls = NotedCalls()
        self._kept: dict[str, KeptGraph] = {}  # by key, read when their kernels are asked for

    def on(self) -> None:
        # A process without this module has compiled nothing: torch.compile imports it.
        graphs: Any = optional(_GRAPHS) if _GRAPHS.rpartition(".")[0] in sys.modules else None
        if graphs is not None and "__call__" in vars(graphs):
            replace(self._undo, (graphs, "__call__"), self._call)
        CalledGraphs.current = self

    def off(self) -> None:
        """Note no more calls. Does nothing the second time."""
        self._undo.close()
        if CalledGraphs.current is self:
            CalledGraphs.current = None

    @property
    def knows_parameters(self) -> bool:
        """Whether graphs that no ``Provenance`` knows were called with parameters."""
        return any(graph.taken for graph in self._kept.values())

    def layers(self, plan: Plan, provenance: Provenance | None) -> CompiledGraphs | None:
        """The layers of all graphs for these models; None if nothing is known and no ``provenance`` was on."""
        is_known = self.knows_parameters or any(key in Provenance.known for key in self.by_key)
        if provenance is None and not is_known:
            return None
        # It imports all formulas of FLOPs: not for a run without compiled code.
        from torchprof.record.compiled.graph_flow import kernels_by_parameters

        why_unknown = LAYERS_NOT_RECORDED if provenance is None else COMPILED_BEFORE
        kernels, hiding = kernels_by_parameters(self._kept, why_unknown)
        kernels |= Provenance.known
        given = self.calls.given(plan.holders_of)
        return CompiledGraphs(kernels, plan.modules, plan.is_alone, given, hiding, why_unknown)

    def _call(self, original: Callable[..., Any], graph: Any, inputs: Sequence[Any]) -> Any:
        """Call a graph, and note the call."""
        key = getattr(graph, "_fx_graph_cache_key", "")
        if key is None:  # no cache has it; the range around the call needs a key
            key = graph._fx_graph_cache_key = f"torchprof-called-{next(_NUMBERS)}"
        number = self._note(key, graph, inputs) if isinstance(key, str) else None
        if number is None:
            return original(graph, inputs)
        with record(f"{COMPILED_INPUTS}{number}"):
            return original(graph, inputs)

    def _note(self, key: str, graph: Any, inputs: Sequence[Any]) -> int | None:
        """Note a call. Its number, for the range around it; None if the graph is known, or has no parameters."""
        text = getattr(graph, "inductor_post_grad_graph_str", None)
        if isinstance(text, str):
            called = self.by_key.setdefault(key, CalledGraph(text, []))
            if called.has_symbols and is_observed():
                sizes = (tuple(value.shape) if isinstance(value, torch.Tensor) else value for value in inputs)
                called.calls.append(tuple(sizes))
        if key in Provenance.known or not is_observed():
            return None
        if key not in self._kept:
            self._kept[key] = KeptGraph.of(graph, inputs)
        return self._kept[key].number_of(graph, inputs, self.calls)
