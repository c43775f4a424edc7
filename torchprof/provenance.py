"""What the kernels of torch.compile's graphs are made of, asked of Inductor while it compiles.

All of torch that this needs and that is not public is used in this file alone, and looked for first.
"""

from __future__ import annotations

import functools
import itertools
import operator
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from math import prod
from types import CodeType
from typing import Any, ClassVar, NamedTuple

from torchprof.compiled import CompiledGraphs, CompiledKernel, Module, Owner, Part, Step
from torchprof.errors import TorchprofError
from torchprof.run import CompiledRegion

_GRADIENT_SUM = "Gradient addition node"
"""How torch explains a sum of the gradients of a tensor with several uses (``torch/fx/traceback.py``)."""
_RESUME = re.compile(r"__resume_at_(\d+)_\d+")
_NUMBERS = itertools.count(1)


class _Node(NamedTuple):
    """A node of a graph before Inductor's own passes. ``hands_on``: it adds the gradients of the several uses of one
    tensor, or puts a new value into an input of the graph; ``is_given``: it is such an input."""

    inputs: tuple[str, ...]
    users: tuple[str, ...]
    owner: Owner | None
    hands_on: bool
    is_given: bool


class _Graph:
    """A graph that is being compiled, as it was before Inductor's own passes, and the kernels that it got since."""

    def __init__(self, graph: Any) -> None:
        self.kernels: list[CompiledKernel] = []
        self.is_whole = True  # not so where some of its kernels are in functions of their own
        self._nodes = {
            node.name: _Node(
                tuple(one.name for one in node.all_input_nodes),
                tuple(one.name for one in node.users if one.op != "output"),
                _owner(node),
                _GRADIENT_SUM in str(node.meta.get("stack_trace", "")) or _writes_back(node),
                node.op in ("placeholder", "get_attr"),
            )
            for node in graph.nodes
        }

    def add(self, name: str, nodes: Sequence[Any]) -> None:
        """A kernel that was made from some nodes of the graph; views and constants among them are no work."""
        parts = []
        called = [node for node in nodes if "." in name and _is_op(node, name)]  # of a library: that op alone
        working = called or [node for node in nodes if not _is_view(node)] or nodes
        for node in [node for node in working if node.all_input_nodes] or working:
            owners = self._owners_of(node)
            flops, nbytes = _flops(node), _nbytes(node)
            parts += [Part(owner, flops // len(owners), nbytes // len(owners)) for owner in owners]
        self.kernels.append(CompiledKernel(_plain(name), tuple(parts) or (Part(None, 0, 0),)))

    def _owners_of(self, node: Any) -> list[Owner | None]:
        """For whom a node works, of the graph that kernels are made from."""
        if node.name in self._nodes:
            return self._owners(node.name)
        replaced = self._replaced_by(node)
        if replaced is None:
            return [_owner(node)]
        return list(dict.fromkeys(owner for name in sorted(replaced) for owner in self._owners(name)))

    def _owners(self, name: str) -> list[Owner | None]:
        node = self._nodes[name]
        if node.hands_on:
            return [self._of_all_inputs(name)]
        if node.owner is None and not node.inputs:  # for those that use it: a parameter, the seed of random numbers
            users = [user for user in node.users if not self._nodes[user].hands_on]
            return list(dict.fromkeys(self._nodes[user].owner for user in users)) or [None]
        return [node.owner]

    def _of_all_inputs(self, name: str) -> Owner | None:
        """The innermost module that all inputs of a node come from."""
        common: Owner | None = None
        seen, waiting = {name}, [name]
        while waiting:
            for inner in self._nodes[waiting.pop()].inputs:
                node = self._nodes[inner]
                if inner in seen or node.is_given:
                    continue
                seen.add(inner)
                if node.hands_on:
                    waiting.append(inner)
                elif node.owner is None:
                    return None
                else:
                    common = node.owner if common is None else _common(common, node.owner)
        return common

    def _replaced_by(self, node: Any) -> set[str] | None:
        """The nodes that a pass put another in the place of: all between what that takes and what it gives. None where
        torch does not say what it gives, or they take something else."""
        gives, sources = None, node.meta.get("from_node", ())
        while sources and gives is None:  # a pass may have replaced what another put there
            replaced = [one for one in sources if any(action.name == "REPLACE" for action in one.action)]
            if replaced and replaced[-1].name in self._nodes:
                gives = replaced[-1].name
            sources = replaced[-1].from_node if replaced else ()
        takes = {one.name for one in node.all_input_nodes}
        found: set[str] = set()
        waiting = [] if gives is None else [gives]
        while waiting:
            name = waiting.pop()
            if name in takes or name in found:
                continue
            if name not in self._nodes or self._nodes[name].is_given:
                return None
            found.add(name)
            waiting.extend(self._nodes[name].inputs)
        return found or None


def _is_op(node: Any, kernel: str) -> bool:
    """Whether a node is the op that a kernel of a library is named after."""
    return str(getattr(node.target, "overloadpacket", "")).rpartition(".")[2] == _plain(kernel)


def _writes_back(node: Any) -> bool:
    """Whether a node puts a new value into an input of its graph, as that of a buffer."""
    return str(node.target) == "aten.copy_.default" and node.args[0].op == "placeholder"


def _is_view(node: Any) -> bool:
    """Whether a node gives what it takes, or a part of it, in another shape."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return node.target is operator.getitem
    of_result = schema.returns[0].alias_info if schema.returns else None
    return of_result is not None and not of_result.is_write


def _plain(kernel: str) -> str:
    """The name of a kernel as events have it, from ``extern_kernels.addmm``, ``torch.ops.aten.addmm.default`` and the
    like; one of Inductor's own has no dots."""
    steps = kernel.split(".")
    if steps[0] in ("extern_kernels", "inductor_extern_kernels"):
        return steps[-1]
    if steps[:2] == ["torch", "ops"]:
        return steps[3]
    return steps[1] if len(steps) > 2 or steps[0] == "aten" else steps[-1]


def _sizes(node: Any) -> list[tuple[int, int]]:
    """Elements and bytes of each tensor that a node gives; a size that is no number yet counts as its hint."""
    value = node.meta.get("val")
    found = []
    for one in value if isinstance(value, (tuple, list)) else [value]:
        if hasattr(one, "dtype") and hasattr(one, "shape"):
            elements = prod(_number(size) for size in one.shape)
            found.append((elements, elements * one.dtype.itemsize))
    return found


def _number(size: Any) -> int:
    if isinstance(size, int):
        return size
    hint = getattr(getattr(size, "node", None), "hint", None)
    return hint if isinstance(hint, int) else 1


def _flops(node: Any) -> int:
    """As ``torch.utils.flop_counter`` counts matrix products; else one for each element of the largest tensor."""
    from torch.utils.flop_counter import flop_registry

    formula = flop_registry.get(getattr(node.target, "overloadpacket", None))
    if formula is not None:
        try:
            args = [one.meta["val"] if hasattr(one, "meta") else one for one in node.args]
            return int(formula(*args, **node.kwargs, out_val=node.meta["val"]))
        except Exception:  # sizes that are no numbers
            pass
    elements = [size for one in (node, *node.all_input_nodes) for size, _ in _sizes(one)]
    return max(elements, default=0)


def _nbytes(node: Any) -> int:
    """What a node takes and gives, each once."""
    return sum(size for one in (node, *node.all_input_nodes) for _, size in _sizes(one))


def _owner(node: Any) -> Owner | None:
    """The modules that a node was traced in; None where that is not known."""
    meta = node.meta
    stack = meta.get("nn_module_stack") or meta.get("fwd_nn_module_stack")
    if stack:
        return tuple(_step(path, cls) for path, cls in stack.values())
    return () if meta.get("source_fn_stack") or meta.get("fwd_source_fn_stack") else None


def _step(path: str, cls: Any) -> Step:
    """From how torch writes the way to a module: ``L['self'].layers.0``, ``L['self']._modules['fc']``."""
    root, _, rest = path.partition("]")
    for bracket in ("._modules[", "["):
        rest = rest.replace(bracket, ".")
    rest = rest.replace("]", "").replace("'", "").replace('"', "")
    kind = cls if isinstance(cls, str) else getattr(cls, "__name__", "")
    return Step(f"{root}]", tuple(step for step in rest.split(".") if step), kind.rpartition(".")[2])


def _common(one: Owner, other: Owner) -> Owner:
    return tuple(ours for ours, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other)))


class _Inductor:
    """What of Inductor is used here. Raises TorchprofError where this torch has it not."""

    CACHED, COMPILE, WRITE = "_compile_fx_inner", "fx_codegen_and_compile", "write_provenance_debug_handle"
    NODES = "_inductor_triton_kernel_to_post_grad_node_info"

    def __init__(self) -> None:
        try:
            from torch._functorch import config as functorch_config
            from torch._inductor import compile_fx, config, debug
            from torch._inductor.codegen.wrapper import PythonWrapperCodegen
            from torch._inductor.virtualized import V

            self.compile_fx: Any = compile_fx
            self.debug: Any = debug
            self.wrapper: Any = PythonWrapperCodegen
            self.graphs: Any = V
            self.config: Any = config
            self.functorch_config: Any = functorch_config
            for room, name in ((compile_fx, self.CACHED), (compile_fx, self.COMPILE), (self.wrapper, self.WRITE)):
                getattr(room, name)
            getattr(debug, self.NODES)
            with self.uncached(), self.told():
                pass
        except (ImportError, AttributeError) as missing:
            raise TorchprofError(
                f"This torch's compiler does not tell which layers its kernels are of ({missing}): regions are shown "
                "whole. torch 2.13 is known to tell it."
            ) from missing

    def uncached(self) -> AbstractContextManager[Any]:
        """Without the caches of whole models."""
        names = ("enable_autograd_cache", "enable_remote_autograd_cache", "bundled_autograd_cache")
        return self.functorch_config.patch(dict.fromkeys(names, False))  # type: ignore[no-any-return]

    def told(self) -> AbstractContextManager[Any]:
        """Without the caches of graphs, and with all that is to be known of kernels."""
        return self.config.patch(  # type: ignore[no-any-return]
            {
                "fx_graph_cache": False,
                "fx_graph_remote_cache": False,
                "trace.provenance_tracking_level": 1,
                "cpp.enable_kernel_profile": True,
            }
        )


def compiled_regions() -> tuple[CompiledRegion, ...]:
    """All code that torch.compile has made in this process and still has; empty where it made none, and where this
    torch does not tell."""
    if "torch._dynamo.convert_frame" not in sys.modules:
        return ()
    try:
        from torch._dynamo.convert_frame import input_codes
        from torch._dynamo.eval_frame import _debug_get_cache_entry_list
        from torch._dynamo.utils import get_compilation_metrics

        reasons = {one.compile_id: one.restart_reasons for one in get_compilation_metrics() if one.restart_reasons}
        return tuple(
            _region(code, version.code, str(version.compile_id), reasons.get(str(version.compile_id), ()))
            for code in (seen() for seen in input_codes.seen)
            if code is not None
            for version in _debug_get_cache_entry_list(code)
        )
    except (ImportError, AttributeError, TypeError):
        return ()


def _region(code: CodeType, compiled: CodeType, name: str, reasons: Iterable[str]) -> CompiledRegion:
    """``compiled`` is what torch.compile made of the code of a function; where it breaks, it calls functions for the
    rest, named after the instruction that they go on with."""
    resumes = [int(match[1]) for match in map(_RESUME.match, compiled.co_names) if match]
    lines = [line for start, end, line in code.co_lines() if line and any(start <= at < end for at in resumes)]
    return CompiledRegion(
        name,
        getattr(code, "co_qualname", code.co_name),
        code.co_filename,
        code.co_firstlineno,
        min(lines) if lines else None,
        "; ".join(map(_in_short, sorted(reasons))) if lines else "",
    )


def _in_short(reason: str) -> str:
    """Of how torch explains a graph break: what happened, and why."""
    lines = [line.strip() for line in reason.splitlines() if line.strip()]
    told = [line.removeprefix("Explanation: ") for line in lines[1:] if line.startswith("Explanation: ")]
    return ": ".join([*lines[:1], *told[:1]])


class Provenance:
    """While it is on, what torch.compile compiles is known by its layers: see ``known``.

    Graphs are compiled anew then, not taken from caches, which know none of this; kernels of C++ have ranges of their
    own in the profiler's events, and keep them. Raises TorchprofError where this torch has not what that needs.
    """

    known: ClassVar[dict[str, tuple[CompiledKernel, ...]]] = {}
    """The kernels of all graphs that were compiled while any was on, by the key in the name of the range around."""

    def __init__(self, divisor: str | None = None) -> None:
        """``divisor``: see ``CompiledGraphs``."""
        self._inductor = _Inductor()
        self._divisor = divisor
        self._undo = ExitStack()

    @classmethod
    def if_told(cls, divisor: str | None, notes: list[str]) -> Provenance | None:
        """One where this torch tells what that needs; where not None, and why as one of the ``notes``."""
        try:
            return cls(divisor)
        except TorchprofError as missing:
            notes.append(str(missing))
            return None

    def on(self) -> None:
        inductor = self._inductor
        compiling: list[_Graph] = []
        cached = getattr(inductor.compile_fx, inductor.CACHED)
        compiles = getattr(inductor.compile_fx, inductor.COMPILE)
        writes = getattr(inductor.wrapper, inductor.WRITE)

        @functools.wraps(cached)
        def compile_uncached(*args: Any, **kwargs: Any) -> Any:
            with inductor.told():  # in here: settings are those of a thread, and backward is compiled on autograd's
                return cached(*args, **kwargs)

        @functools.wraps(compiles)
        def compile_and_tell(module: Any, *args: Any, **kwargs: Any) -> Any:
            graph = _Graph(module.graph)
            compiling.append(graph)
            try:
                compiled = compiles(module, *args, **kwargs)
            finally:
                compiling.remove(graph)
            if hasattr(compiled, "_fx_graph_cache_key"):
                key = compiled._fx_graph_cache_key = f"torchprof-{next(_NUMBERS)}"
                Provenance.known[key] = tuple(graph.kernels) if graph.is_whole else ()
            return compiled

        @functools.wraps(writes)
        def write_and_tell(wrapper: Any, kernel: str, handle: int | None = None) -> Any:
            if compiling:
                self._tell(compiling[-1], kernel, handle)
            return writes(wrapper, kernel, handle)

        with ExitStack() as undo:
            undo.enter_context(inductor.uncached())
            for room, name, ours in (
                (inductor.compile_fx, inductor.CACHED, compile_uncached),
                (inductor.compile_fx, inductor.COMPILE, compile_and_tell),
                (inductor.wrapper, inductor.WRITE, write_and_tell),
            ):
                undo.callback(setattr, room, name, getattr(room, name))
                setattr(room, name, ours)
            self._undo = undo.pop_all()

    def off(self) -> None:
        self._undo.close()

    def graphs(self, modules: Mapping[tuple[str, ...], Module]) -> CompiledGraphs:
        """All that is known by now, for the models of a profile."""
        return CompiledGraphs(Provenance.known, modules, self._divisor)

    def _tell(self, graph: _Graph, kernel: str, handle: int | None) -> None:
        """Inductor has just written a call of a kernel."""
        lowering = self._inductor.graphs.graph
        if hasattr(lowering, "parent"):
            graph.is_whole = False
        nodes = {node.name: node for node in lowering.module.graph.nodes}
        names = getattr(self._inductor.debug, self._inductor.NODES).get(f"{kernel}:{handle}", ())
        graph.add(kernel, [nodes[name] for name in names if name in nodes])
