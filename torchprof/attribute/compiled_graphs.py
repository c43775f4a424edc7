"""Find the layers that the kernels of compiled graphs work for, by the modules that each kernel was traced in."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import NamedTuple

from torchprof.run.layers import common_prefix
from torchprof.run.torch_names import PRODUCTS, without_aten
from torchprof.run.words import (
    AMBIGUOUS_MODULE,
    COMPILED_BEFORE,
    FROZEN_PARAMETER,
    OTHER_MODULE,
    REPLACED_PARAMETER,
    SHARED_PARAMETER,
    UNKNOWN_MODULE,
)

SELF = "L['self']"
"""The root of what was traced from the module that owns the compiled forward, whatever its argument is called."""
FROZEN = "frozen "
"""Prefix of the root of a tensor that is a part of its graph. It counts only if it has the memory of a parameter."""
_CONTAINERS = frozenset({"ParameterList", "ParameterDict", "NonDynamicallyQuantizableLinear"})
"""Modules that are never called: those around them use their parameters. The last is in ``MultiheadAttention``."""
_NEVER_CALLED = frozenset({"ModuleList", "ModuleDict", "ParameterList", "ParameterDict"})
_LOOKUPS = frozenset({"Embedding", "EmbeddingBag"})
"""Modules that call no products: if their parameter is in one, another module uses it, as for tied weights."""
_PRODUCTS = without_aten(PRODUCTS)
_PREFIX = re.compile(r"graph_\d+_")
_LARGEST_TABLE = 4_000_000  # entries, for matching kernels with ops: it takes a second or two


class TracedModule(NamedTuple):
    """A module that an operation was traced in. ``root``: the variable of the compiled function through which it was
    reached ("L['self']"). ``path``: the attribute names from there to it. ``kind``: the name of its class; "" if that
    is unknown: then the root is a parameter of the module."""

    root: str
    path: tuple[str, ...]
    kind: str


Owner = tuple[TracedModule, ...]
"""The modules that an operation was traced in, outer to inner. ``()``: the code of the compiled function itself."""
RealPaths = dict[tuple[str, tuple[str, ...]], tuple[str, ...] | str]
"""The real path of each module that a graph was traced in, or the reason why it is unknown; by root and path."""


class Span(NamedTuple):
    """The roots of the parameters of the layers that work before and after a value of a graph. ``is_own``: it is made
    of these parameters themselves."""

    before: frozenset[str]
    after: frozenset[str]
    is_own: bool = False


class CompiledKernel(NamedTuple):
    """A kernel that a graph calls. ``owners``: those that it works for (None: unknown). ``recomputes``: whether it is
    in a backward graph only to repeat work of the forward. ``nodes``: those of the graph that it computes, by name.
    ``why_unknown``: why its modules are unknown; then ``between`` tells where they are, as far as known. ``repeated``:
    the roots of the parameters that the graph uses several times."""

    name: str
    owners: tuple[Owner | None, ...]
    recomputes: bool = False
    nodes: tuple[str, ...] = ()
    why_unknown: str = UNKNOWN_MODULE
    between: frozenset[Span] = frozenset()
    repeated: frozenset[str] = frozenset()


class ModuleTensor(NamedTuple):
    """A tensor that a compiled function took from a module, ``root`` and ``path`` as in ``TracedModule``. ``holders``:
    the real paths of the profiled modules that have it: ``()`` if only other modules do, None if they are unknown.
    ``is_gone``: whether the tensor was freed meanwhile, perhaps with its module."""

    root: str
    path: tuple[str, ...]
    holders: tuple[tuple[str, ...], ...] | None
    is_gone: bool = False


class ProfiledModule(NamedTuple):
    """A module of the profiled models: the layer that it is shown as, and the name of its class."""

    layer: int
    kind: str


class Block(NamedTuple):
    """The layer that a kernel of unknown layers ran in or below, and the layers that work before and after it.
    ``is_own``: all of it is computed of parameters of the layer itself."""

    layer: int
    neighbors: tuple[int, ...]
    is_own: bool = False


KernelLayers = tuple[int, ...] | Block | str
"""The layers that a kernel works for; if not all are known, the block that it ran in; else why that is unknown."""


class CompiledGraphs:
    """The kernels of compiled graphs, and the modules of the profiled models.

    - ``graphs``: by key, the kernels in the order of their calls, or why they are unknown; None if not looked for.
    - ``modules``: by real path. ``is_alone(path)``: whether no other module of its class is in the process.
    - ``inputs``: by the name of the COMPILED_INPUTS range of a call, the tensors that it took from modules.
    - ``hiding``: the keys of graphs in which some kernels have no events, so that their time is in that of the call.
    - ``why_missing``: why the other graphs are unknown.
    """

    def __init__(
        self,
        graphs: Mapping[str, Sequence[CompiledKernel] | str] | None = None,
        modules: Mapping[tuple[str, ...], ProfiledModule] | None = None,
        is_alone: Callable[[tuple[str, ...]], bool] = lambda path: True,
        inputs: Mapping[str, Sequence[ModuleTensor]] | None = None,
        hiding: Set[str] = frozenset(),
        why_missing: str = COMPILED_BEFORE,
    ) -> None:
        self._is_alone = is_alone
        self.is_asked = graphs is not None
        known = graphs or {}
        self._graphs = {key: kernels for key, kernels in known.items() if not isinstance(kernels, str)}
        self._unknown = {key: reason for key, reason in known.items() if isinstance(reason, str)}
        self._inputs = inputs or {}
        self._hiding = hiding
        self._why_missing = why_missing
        # A wrapper comes before the module inside it, which has the same path here and replaces it.
        self._modules = {_unwrapped(path): module for path, module in (modules or {}).items()}
        self._path_of: dict[int, tuple[str, ...]] = {}  # by layer: the path of the innermost module that is shown as it
        for path, module in self._modules.items():
            if len(path) > len(self._path_of.get(module.layer, ())):
                self._path_of[module.layer] = path
        self._called: dict[tuple[str, tuple[str, ...]], list[int | None]] = {}
        self._places: dict[tuple[str, int, str], RealPaths] = {}
        self._layers: dict[tuple[str, int, int, str], KernelLayers] = {}

    def why_unknown(self, graph: str) -> str:
        """Why the kernels of a graph are unknown; "" if they are known."""
        return "" if graph in self._graphs else self._unknown.get(graph, self._why_missing)

    def why_call_is_unknown(self, graph: str) -> str:
        """Why the time of a call of a graph, without its known kernels, may be of layers; "" if it is not."""
        return self.why_unknown(graph) or (self._why_missing if graph in self._hiding else "")

    def called(self, graph: str, names: Sequence[str]) -> list[int | None]:
        """For each op that ran in one call of a graph: the number of its kernel, or None if it is unknown."""
        plain = tuple(map(_plain, names))
        if (graph, plain) not in self._called:
            self._called[graph, plain] = _kernels_of([kernel.name for kernel in self._graphs.get(graph, ())], plain)
        return self._called[graph, plain]

    def has_all(self, graph: str, kernels: Sequence[int | None]) -> bool:
        return len(self._graphs[graph]) == len(kernels) - kernels.count(None)

    def kernel(self, graph: str, number: int) -> CompiledKernel:
        return self._graphs[graph][number]

    def layers_of(self, graph: str, kernel: int, around: int, inputs: str = "") -> KernelLayers:
        """The layers that a kernel works for. ``around``: the layer in which the graph runs; negative for code outside
        all layers, also in the result. ``inputs``: the name of the COMPILED_INPUTS range around the call, if any."""
        key = (graph, kernel, around, inputs)
        if key not in self._layers:
            of_graph = self.kernel(graph, kernel), self._places_in(graph, around, inputs), around
            layers: KernelLayers = self._layers_of(*of_graph, inputs)
            if isinstance(layers, str):
                layers = self._block(*of_graph) or layers
            self._layers[key] = layers
        return self._layers[key]

    def _layers_of(self, kernel: CompiledKernel, places: RealPaths, around: int, inputs: str) -> tuple[int, ...] | str:
        layers: set[int] = set()
        unknown = UNKNOWN_MODULE
        for owner in kernel.owners:
            if owner is None:
                return kernel.why_unknown
            layer = around
            if owner:
                module = owner[-1]
                place = places[module.root, _unwrapped(module.path)]
                if not module.kind and kernel.name in _PRODUCTS:
                    place = self._that_multiplies(module.root, inputs, place)
                if isinstance(place, str) and not module.root.startswith(FROZEN):
                    return place
                if isinstance(place, str):
                    unknown = FROZEN_PARAMETER
                    continue
                layer = self._modules[place if module.kind else self._that_calls(place)].layer
            layers.add(layer)
        return tuple(sorted(layers)) or unknown

    def _block(self, kernel: CompiledKernel, places: RealPaths, around: int) -> Block | None:
        """The module that a kernel of unknown layers ran in, or in a module inside it; None if nothing is known.

        A value is computed in the innermost of the modules around any layer before it and any after it. If both are one
        layer, the kernel may be between two calls of it: the module around it counts. The same holds for a module all
        of whose parameters are used several times. The module that runs the graph is never left. For example, a kernel
        between ``net.blocks.0.linear`` and ``net.blocks.1.linear`` is in ``net``, as the list ``net.blocks`` is never
        called; one between two calls of ``net.blocks.0.linear``, in ``net.blocks.0``.
        """
        top = self._path_of.get(around)
        blocks: list[tuple[str, ...]] = []
        neighbors: set[int] = set()
        for span in kernel.between:
            looked_up = frozenset() if span.is_own else kernel.repeated
            before, after = (self._known(side, places, looked_up) for side in (span.before, span.after))
            neighbors |= {self._modules[path].layer for path in (*before, *after)}
            if span.is_own and before:
                blocks += map(self._that_calls, before)
            elif before and after:
                blocks.append(max(itertools.starmap(_around, itertools.product(before, after)), key=len))
            elif top is not None:
                blocks.append(top)
            else:
                return None
        path = common_prefix(blocks) if neighbors else ()
        is_own = all(span.is_own for span in kernel.between)
        while path and path != top:
            module = self._modules.get(path)
            is_called = module is not None and module.kind not in _NEVER_CALLED
            if is_called and (is_own or not _are_all_in(path, places, kernel.repeated)):
                break
            path = path[:-1]
        if not path:
            return None
        layer = self._modules[path].layer
        return Block(layer, tuple(sorted(neighbors)), is_own and neighbors == {layer})

    def _known(self, roots: Iterable[str], places: RealPaths, looked_up: Set[str]) -> list[tuple[str, ...]]:
        """The known real paths of the modules of some parameters, but for modules that only look up ``looked_up``."""
        known = [(root, place) for root in roots if not isinstance(place := places[root, ()], str)]
        return [path for root, path in known if root not in looked_up or self._modules[path].kind not in _LOOKUPS]

    def _that_multiplies(self, root: str, inputs: str, place: tuple[str, ...] | str) -> tuple[str, ...] | str:
        """The module that multiplies with a parameter, which is at this place: not one that only looks it up."""
        if not isinstance(place, str):
            return SHARED_PARAMETER if self._modules[place].kind in _LOOKUPS else place
        taken = (tensor for tensor in self._inputs.get(inputs, ()) if tensor.root == root)
        holders = {path for tensor in taken for path in tensor.holders or ()}
        known = {_unwrapped(path): self._modules.get(_unwrapped(path)) for path in holders}
        computing = [path for path, module in known.items() if module is not None and module.kind not in _LOOKUPS]
        return computing[0] if len(computing) == 1 else place

    def _that_calls(self, path: tuple[str, ...]) -> tuple[str, ...]:
        """The module that works with the parameters of a module: itself, unless it is only a container."""
        while len(path) > 1 and path[:-1] in self._modules and self._modules[path].kind in _CONTAINERS:
            path = path[:-1]
        return path

    def _places_in(self, graph: str, around: int, inputs: str) -> RealPaths:
        """The real paths of all modules that a graph was traced in. ``around``: the layer in which the graph runs."""
        key = (graph, around, inputs)
        if key in self._places:
            return self._places[key]
        places = self._places[key] = {}
        traced: dict[str, set[tuple[tuple[str, ...], str]]] = {}
        for kernel in self._graphs[graph]:
            for owner in kernel.owners:
                for step in owner or ():
                    traced.setdefault(step.root, set()).add((_unwrapped(step.path), step.kind))
            for parameter in {root for span in kernel.between for root in span.before | span.after}:
                traced.setdefault(parameter, set()).add(((), ""))
        for root, steps in traced.items():
            taken = [tensor for tensor in self._inputs.get(inputs, ()) if tensor.root == root]
            has_holders = any(tensor.holders is not None for tensor in taken)
            for top in _outermost(path for path, _ in steps) if has_holders else [()]:
                below = {(rest, kind) for path, kind in steps if (rest := _below(top, path)) is not None}
                inside = [(rest, tensor) for tensor in taken if (rest := _below(top, tensor.path)) is not None]
                held = [(rest, tensor.holders) for rest, tensor in inside if tensor.holders is not None]
                may_be_gone = any(tensor.is_gone for _, tensor in inside)
                place = self._place_of(root, below, around, held, may_be_gone)
                places |= {(root, top + rest): place if isinstance(place, str) else place + rest for rest, _ in below}
        return places

    def _place_of(
        self,
        root: str,
        steps: set[tuple[tuple[str, ...], str]],
        around: int,
        held: Sequence[tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]],
        may_be_gone: bool,
    ) -> tuple[str, ...] | str:
        """The real path of a module with these traced ``steps`` below it, or the reason why it is unknown. ``SELF`` is
        the module that owns the compiled forward: the layer ``around``. Any other module is identified by the tensors
        ``held`` in it: (path below it, real paths of the modules that have the tensor). Without such tensors, it must
        be the only module of all models that fits, and the only one of its class in the process, because a function can
        be called with other modules. If another one ``may_be_gone``, this proves nothing."""
        if root == SELF:
            fitting = {self._path_of[around]} if around in self._path_of else set()
        elif not held and any(not kind for _, kind in steps):
            return REPLACED_PARAMETER
        elif held:
            fitting = set.intersection(*({_above(rest, _unwrapped(path)) for path in paths} for rest, paths in held))
        else:
            fitting = set(self._modules)
        fitting = {path for path in fitting if path and self._fits(path, steps)}
        if not fitting:
            return OTHER_MODULE
        if len(fitting) > 1:
            return AMBIGUOUS_MODULE if all(kind for _, kind in steps) else SHARED_PARAMETER
        (place,) = fitting
        is_known = root == SELF or held or (not may_be_gone and self._is_alone(place))
        return place if is_known else AMBIGUOUS_MODULE

    def _fits(self, path: tuple[str, ...], steps: set[tuple[tuple[str, ...], str]]) -> bool:
        known = [(self._modules.get(path + below), kind) for below, kind in steps]
        return all(module is not None and kind in (module.kind, "") for module, kind in known)


def _outermost(paths: Iterable[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """The paths that are below no other of these paths."""
    unwrapped: list[tuple[str, ...]] = []
    for path in sorted(paths):
        if not unwrapped or _below(unwrapped[-1], path) is None:
            unwrapped.append(path)
    return unwrapped


def _below(top: tuple[str, ...], path: tuple[str, ...]) -> tuple[str, ...] | None:
    """The steps from ``top`` to a path below it; None if it is not below."""
    return path[len(top) :] if path[: len(top)] == top else None


def _above(rest: tuple[str, ...], path: tuple[str, ...]) -> tuple[str, ...]:
    """A path without these last steps. ``()``, which is the path of no module, if it does not end in them."""
    start = len(path) - len(rest)
    return path[:start] if start > 0 and path[start:] == rest else ()


def _are_all_in(path: tuple[str, ...], places: RealPaths, repeated: Set[str]) -> bool:
    """Whether all parameters in a module are used several times: it may be called several times."""
    if not repeated or len(path) == 1:
        return False
    inside = {root for (root, _), place in places.items() if not isinstance(place, str) and place[: len(path)] == path}
    return bool(inside) and inside <= repeated


def _around(first: tuple[str, ...], other: tuple[str, ...]) -> tuple[str, ...]:
    """The module around two modules; around one if they are the same."""
    return first[:-1] if first == other and len(first) > 1 else common_prefix((first, other))


def _unwrapped(path: tuple[str, ...]) -> tuple[str, ...]:
    """A path without the steps into compiled modules: torch's names contain some of these steps and omit others."""
    return tuple(step for step in path if step != "_orig_mod")


def _plain(name: str) -> str:
    """The name of a kernel in an event, without the parts that depend on its graph or library."""
    return _PREFIX.sub("", name, count=1).rpartition("::")[2]


# Which kernel of a graph each op is that ran in a call of it: by name, as in a diff


def _kernels_of(kernels: Sequence[str], ran: Sequence[str]) -> list[int | None]:
    """For each op that ran, the number of its kernel; None if that is unknown. Both are in the order of their calls."""
    both = set(kernels) & set(ran)
    ours = [index for index, name in enumerate(kernels) if name in both]
    theirs = [index for index, name in enumerate(ran) if name in both]
    matches: list[int | None] = [None] * len(ran)
    for index, other in _common_pairs([kernels[index] for index in ours], [ran[index] for index in theirs]):
        matches[theirs[other]] = ours[index]
    return matches


def _common_pairs(ours: Sequence[str], theirs: Sequence[str]) -> list[tuple[int, int]]:
    """The pairs of equal items that are in all longest common subsequences, by their indices. The rank of a pair is the
    number of pairs before it in a longest subsequence, which has one pair of every rank: a pair is in all of them if it
    is the only one of its rank. For example, ``a b`` and ``a c b`` have two such pairs; ``a a`` and ``a`` have none."""
    if ours == theirs:
        return [(index, index) for index in range(len(ours))]
    if len(ours) * len(theirs) > _LARGEST_TABLE:
        return []
    before, after = _lengths(ours, theirs), _lengths(ours[::-1], theirs[::-1])
    longest = before[-1][-1]
    of_rank: dict[int, list[tuple[int, int]]] = {}
    for index, name in enumerate(ours):
        for other, called in enumerate(theirs):
            if name == called and before[index][other] + 1 + after[-index - 2][-other - 2] == longest:
                of_rank.setdefault(before[index][other], []).append((index, other))
    return [pairs[0] for pairs in of_rank.values() if len(pairs) == 1]


def _lengths(ours: Sequence[str], theirs: Sequence[str]) -> list[list[int]]:
    """The lengths of the longest common subsequences of the first m items of one and the first n of the other."""
    table = [[0] * (len(theirs) + 1)]
    for name in ours:
        row, above = [0], table[-1]
        for other, called in enumerate(theirs):
            row.append(above[other] + 1 if name == called else max(above[other + 1], row[other]))
        table.append(row)
    return table
