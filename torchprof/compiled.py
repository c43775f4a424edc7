"""Whose the kernels of compiled graphs are: from what each was made of to the layers of a model. Knows no torch."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

REGION = "Torch-Compiled Region"
"""What the name of the range begins with in which code of torch.compile's runs; its compile id (``: 0/1``: the second
version of the first function) follows (``torch/_dynamo/convert_frame.py``)."""
GUARDS = "TorchDynamo Cache Lookup"
"""The range right before that, in which the guards of all versions are tried until those of one hold."""
CALL = "## Call CompiledFxGraph "
"""What the name of the range begins with in which Inductor's kernels run; the key of their graph follows
(``torch/_inductor/output_code.py``)."""
GRAPH = "CompiledFxGraph"
"""What that is called here, whatever the key."""
COMPILES = frozenset({"dynamo", "entire_frame_compile", "entire_backward_compile"})
"""The ranges in which torch.compile is at work."""
COMPILES_TOO = "(dynamo_timed)"
"""How the names of the steps of that end, which older versions of torch show without a range around them."""
COMPILING = "compiling"
"""What all of them are called here, as a region."""
REPLAYS = frozenset({"cudaGraphLaunch", "hipGraphLaunch"})
"""The calls of a device's runtime that replay a graph of kernels."""

NOT_ATTRIBUTABLE = "not attributable"
REPLAY = "CUDA graph replay"

DIVISORS = ("flops", "bytes")
"""By what the time of a kernel of several layers can be divided."""

_OVERHEAD = re.compile(
    rf"{GUARDS}|Pregraph bytecode|AOTDispatcher Runtime Wrapper Prologue"
    r"|(autograd::engine::evaluate_function: )?CompiledFunction(Backward)?\d*"
)
SELF = "L['self']"
"""The root of what was traced from the module whose forward was compiled, whatever the forward calls it."""
_GENERATED = re.compile(r"(graph_\d+_)?(cpp|triton)_\w+")
_PREFIX = re.compile(r"graph_\d+_")


class Step(NamedTuple):
    """A module that an operation was traced in: the compiled function's name for what it comes from ("L['self']"), the
    steps from there, and the name of its class."""

    root: str
    path: tuple[str, ...]
    kind: str


Owner = tuple[Step, ...]
"""The modules that an operation was traced in, outer to inner; ``()`` is the compiled function's own code."""


class Part(NamedTuple):
    """What a kernel does for one owner (None: nobody knows whom): so many FLOPs, and bytes read and written."""

    owner: Owner | None
    flops: int
    nbytes: int

    def weight(self, divisor: str) -> int:
        return self.flops if divisor == "flops" else self.nbytes


class CompiledKernel(NamedTuple):
    """A kernel that a graph calls: its name, and what it does."""

    name: str
    parts: tuple[Part, ...]


class Module(NamedTuple):
    """A module of the models that are profiled: the layer it is shown as, and the name of its class."""

    layer: int
    kind: str


class CompiledGraphs:
    """The kernels of compiled graphs, and the layers of the models that are profiled.

    ``graphs``: the kernels of each graph in the order in which it calls them, by its key; None where nobody asked for
    layers. ``modules``: by real path. ``divisor``: by which of ``DIVISORS`` a kernel of several layers is divided among
    them, None: not at all. ``is_alone``: whether the module with a path is the only one of its class that there is.
    """

    def __init__(
        self,
        graphs: Mapping[str, Sequence[CompiledKernel]] | None = None,
        modules: Mapping[tuple[str, ...], Module] | None = None,
        divisor: str | None = None,
        is_alone: Callable[[tuple[str, ...]], bool] = lambda path: True,
    ) -> None:
        self._is_alone = is_alone
        self.is_asked = graphs is not None
        self.divisor = divisor
        self._graphs = graphs or {}
        self._modules = {_unwrapped(path): module for path, module in (modules or {}).items()}  # inner ones come last
        self._path_of: dict[int, tuple[str, ...]] = {}  # of what a layer's wrappers wrap
        for path, module in self._modules.items():
            if len(path) > len(self._path_of.get(module.layer, ())):
                self._path_of[module.layer] = path
        self._bases: dict[tuple[str, int], dict[str, tuple[str, ...] | None]] = {}
        self._layers: dict[tuple[str, int, int], tuple[tuple[int, int], ...] | None] = {}

    def knows(self, graph: str) -> bool:
        """Whether anything is known of the kernels of a graph."""
        return bool(self._graphs.get(graph))

    def called(self, graph: str, names: Sequence[str]) -> list[int | None]:
        """Which kernel of a graph each of the ops is that ran in one call of it; None for those of which nobody knows.

        Ops that are called as no kernel is are none, as copies of inputs. The others have to be all kernels of the
        graph in their order: else nothing is known of any.
        """
        kernels = [kernel.name for kernel in self._graphs.get(graph, ())]
        known = set(kernels)
        plain = [_plain(name) for name in names]
        if not kernels or [name for name in plain if name in known] != kernels:
            return [None] * len(names)
        numbers = iter(range(len(kernels)))
        return [next(numbers) if name in known else None for name in plain]

    def layers_of(self, graph: str, kernel: int, around: int) -> tuple[tuple[int, int], ...] | None:
        """The layers that a kernel works for where its graph runs in a layer, each with its weight; None where that is
        not known of all that it does. A negative layer is the compiled function's own code, outside of all layers.
        """
        key = (graph, kernel, around)
        if key not in self._layers:
            self._layers[key] = self._found(graph, kernel, around)
        return self._layers[key]

    def _found(self, graph: str, kernel: int, around: int) -> tuple[tuple[int, int], ...] | None:
        weights: dict[int, int] = {}
        bases = self._bases_of(graph, around)
        for part in self._graphs[graph][kernel].parts:
            if part.owner is None:
                return None
            layer = around
            if part.owner:
                inner = part.owner[-1]
                base = bases[inner.root]
                if base is None:
                    return None
                layer = self._modules[base + _unwrapped(inner.path)].layer
            weights[layer] = weights.get(layer, 0) + (part.weight(self.divisor) if self.divisor else 0)
        return tuple(sorted(weights.items())) or None

    def _bases_of(self, graph: str, around: int) -> dict[str, tuple[str, ...] | None]:
        """By root, the real path of what it is where the graph runs in a layer; None where that is not known.

        ``SELF`` is the module whose forward it is: its label has to be around, and all that was traced below it. Any
        other has to be the only place in all models of which that is true, and the only module of its class: a
        function may be called with another.
        """
        key = (graph, around)
        if key not in self._bases:
            traced: dict[str, set[tuple[tuple[str, ...], str]]] = {}
            for kernel in self._graphs[graph]:
                for part in kernel.parts:
                    for step in part.owner or ():
                        traced.setdefault(step.root, set()).add((_unwrapped(step.path), step.kind))
            here = self._path_of.get(around)
            self._bases[key] = {
                root: self._only(steps) if root != SELF else here if here and self._fits(here, steps) else None
                for root, steps in traced.items()
            }
        return self._bases[key]

    def _fits(self, path: tuple[str, ...], steps: set[tuple[tuple[str, ...], str]]) -> bool:
        return all(path + below in self._modules and self._modules[path + below].kind == kind for below, kind in steps)

    def _only(self, steps: set[tuple[tuple[str, ...], str]]) -> tuple[str, ...] | None:
        fitting = [path for path in self._modules if self._fits(path, steps)]
        return fitting[0] if len(fitting) == 1 and self._is_alone(fitting[0]) else None


def _unwrapped(path: tuple[str, ...]) -> tuple[str, ...]:
    """A path without the steps into compiled modules: torch names some, and leaves others out."""
    return tuple(step for step in path if step != "_orig_mod")


def region_of(name: str) -> str:
    """The compile id of a region, from the name of its range."""
    return name.removeprefix(REGION).removeprefix(": ") or "?"


def graph_of(name: str) -> str:
    """The key of a compiled graph, from the name of a range in which its kernels run."""
    return name.removeprefix(CALL).removesuffix(" ##")


def is_overhead(op: str) -> bool:
    """Whether an op in a region leads to its graph: it is no kernel, nor what runs as it would without torch.compile.

    The calls of the graph itself are not: kernels of C++ that have no ranges of their own are in their time.
    """
    return _OVERHEAD.fullmatch(op) is not None


def is_generated(kernel: str) -> bool:
    """Whether Inductor has made a kernel; the others are those of libraries."""
    return _GENERATED.fullmatch(kernel) is not None


def _plain(name: str) -> str:
    """The name of a kernel in an event without what tells of its graph, or of the library that it is from."""
    return _PREFIX.sub("", name, count=1).rpartition("::")[2]


def pieces(start: int, end: int, weights: Sequence[int]) -> list[tuple[int, int]]:
    """A stretch of time cut in proportion to weights, at least one of which is not 0."""
    whole, before = sum(weights), 0
    found = []
    for weight in weights:
        cut = start + (end - start) * before // whole
        before += weight
        found.append((cut, start + (end - start) * before // whole))
    return found
