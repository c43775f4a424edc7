"""The kernels of compiled graphs, and the layers they work for, found by the modules that each kernel was traced in."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from torchprof.run.words import AMBIGUOUS_MODULE, COMPILED_BEFORE, OTHER_MODULE, UNKNOWN_MODULE

REGION = "Torch-Compiled Region"
"""Prefix of the range in which code of torch.compile's runs; its compile id (``: 0/1``: the second version of the first
function) follows (``torch/_dynamo/convert_frame.py``)."""
CALL = "## Call CompiledFxGraph "
"""Prefix of the range in which Inductor's kernels run; the key of their graph follows
(``torch/_inductor/output_code.py``)."""
COMPILES_BACKWARD = "compiled_autograd"
"""The range in which compiled autograd makes a graph of a whole backward (``torch/_dynamo/compiled_autograd.py``)."""
COMPILES = frozenset({"dynamo", "entire_frame_compile", "entire_backward_compile", COMPILES_BACKWARD})
"""The ranges in which torch.compile compiles."""
COMPILES_TOO = "(dynamo_timed)"
"""Suffix of the names of single steps of compilation, which older versions of torch record without a range around."""

OF_BACKWARD = "!"
"""Prefix of the compile id of a region that compiled autograd made of the backward of a whole model
(``torch/_guards.py``, ``CompileId``)."""
SELF = "L['self']"
"""The root of all that was traced from the module whose forward was compiled, whatever its first argument is named."""
_LARGEST_TABLE = 4_000_000
"""So many entries the table for matching kernels with ops may have; it takes a second or two."""
_PREFIX = re.compile(r"graph_\d+_")


class Step(NamedTuple):
    """A module that an operation was traced in: ``root``, the variable of the compiled function that it was reached
    from ("L['self']"); the attribute names from there; and the name of its class."""

    root: str
    path: tuple[str, ...]
    kind: str


Owner = tuple[Step, ...]
"""The modules that an operation was traced in, outer to inner; ``()`` is the compiled function's own code."""


class Part(NamedTuple):
    """The work of a kernel for one owner (None: unknown): FLOPs, and bytes read and written."""

    owner: Owner | None
    flops: int
    nbytes: int

    def weight(self, divisor: str) -> int:
        return self.flops if divisor == "flops" else self.nbytes


class CompiledKernel(NamedTuple):
    """A kernel that a graph calls. ``recomputes``: whether a backward graph has it only to repeat work of the forward
    inside a checkpoint."""

    name: str
    parts: tuple[Part, ...]
    recomputes: bool = False


class Given(NamedTuple):
    """A tensor that a compiled function took from a module. ``root`` and ``path``: the function's name for that module
    (see ``Step``). ``holders``: the real paths of the profiled modules that have this tensor; ``()`` if only other
    modules have it, None if that is unknown. ``is_gone``: the tensor was freed meanwhile, perhaps with its module."""

    root: str
    path: tuple[str, ...]
    holders: tuple[tuple[str, ...], ...] | None
    is_gone: bool = False


class Module(NamedTuple):
    """A module of the profiled models: the layer it is shown as, and the name of its class."""

    layer: int
    kind: str


class CompiledGraphs:
    """The kernels of compiled graphs, and the layers of the models that are profiled.

    ``graphs``: by key, the kernels of each graph in the order of their calls, or the reason why they are unknown; None
    if layers of compiled code were not asked for. ``modules``: by real path. ``divisor``: by which of ``DIVISORS`` the
    time of a kernel of several layers is divided among them, None: not at all. ``is_alone``: whether the module with a
    path is the only one of its class in the process. ``given``: by the name of the GIVEN range of a call, the tensors
    that the compiled function took from modules.
    """

    def __init__(
        self,
        graphs: Mapping[str, Sequence[CompiledKernel] | str] | None = None,
        modules: Mapping[tuple[str, ...], Module] | None = None,
        divisor: str | None = None,
        is_alone: Callable[[tuple[str, ...]], bool] = lambda path: True,
        given: Mapping[str, Sequence[Given]] | None = None,
    ) -> None:
        self._is_alone = is_alone
        self.is_asked = graphs is not None
        self.divisor = divisor
        known = graphs or {}
        self._graphs = {key: kernels for key, kernels in known.items() if not isinstance(kernels, str)}
        self._unknown = {key: reason for key, reason in known.items() if isinstance(reason, str)}
        self._given = given or {}
        self._modules = {_unwrapped(path): module for path, module in (modules or {}).items()}  # inner ones come last
        self._path_of: dict[int, tuple[str, ...]] = {}  # of what a layer's wrappers wrap
        for path, module in self._modules.items():
            if len(path) > len(self._path_of.get(module.layer, ())):
                self._path_of[module.layer] = path
        self._called: dict[tuple[str, tuple[str, ...]], list[int | None]] = {}
        self._places: dict[tuple[str, int, str], dict[tuple[str, tuple[str, ...]], tuple[str, ...] | str]] = {}
        self._layers: dict[tuple[str, int, int, str], tuple[tuple[int, int], ...] | str] = {}

    def why_unknown(self, graph: str) -> str:
        """Why the kernels of a graph are unknown; "" if they are known."""
        return "" if graph in self._graphs else self._unknown.get(graph, COMPILED_BEFORE)

    def called(self, graph: str, names: Sequence[str]) -> list[int | None]:
        """For each of the ops that ran in one call of a graph, the number of its kernel; None if it is unknown.

        Both are in the order of their calls. They are matched by name so that as many as possible have a partner (a
        longest common subsequence, as in a diff); if that can be done in several ways, only the pairs that all of them
        have in common count. So an op with a name of no kernel, and a kernel that ran under another name, do not spoil
        the match of the others.
        """
        plain = tuple(map(_plain, names))
        if (graph, plain) not in self._called:
            self._called[graph, plain] = _aligned([kernel.name for kernel in self._graphs.get(graph, ())], plain)
        return self._called[graph, plain]

    def has_all(self, graph: str, kernels: Sequence[int | None]) -> bool:
        """Whether all kernels of a graph are among these."""
        return len(self._graphs[graph]) == sum(kernel is not None for kernel in kernels)

    def recomputes(self, graph: str, kernel: int) -> bool:
        return self._graphs[graph][kernel].recomputes

    def layers_of(self, graph: str, kernel: int, around: int, given: str = "") -> tuple[tuple[int, int], ...] | str:
        """The layers that a kernel works for, each with its weight; the reason if not all of them are known.

        ``around``: the layer in which the graph runs; negative, also in the result, for code outside all layers.
        ``given``: the name of the GIVEN range around the call, "" if there is none.
        """
        key = (graph, kernel, around, given)
        if key not in self._layers:
            self._layers[key] = self._found(graph, kernel, around, given)
        return self._layers[key]

    def _found(self, graph: str, kernel: int, around: int, given: str) -> tuple[tuple[int, int], ...] | str:
        weights: dict[int, int] = {}
        places = self._places_in(graph, around, given)
        for part in self._graphs[graph][kernel].parts:
            if part.owner is None:
                return UNKNOWN_MODULE
            layer = around
            if part.owner:
                place = places[part.owner[-1].root, _unwrapped(part.owner[-1].path)]
                if isinstance(place, str):
                    return place
                layer = self._modules[place].layer
            weights[layer] = weights.get(layer, 0) + (part.weight(self.divisor) if self.divisor else 0)
        return tuple(sorted(weights.items())) or UNKNOWN_MODULE

    def _places_in(
        self, graph: str, around: int, given: str
    ) -> dict[tuple[str, tuple[str, ...]], tuple[str, ...] | str]:
        """By root and path, the real path of each module that a graph was traced in, or the reason why it is unknown.
        ``around``: the layer in which the graph runs."""
        key = (graph, around, given)
        if key in self._places:
            return self._places[key]
        found = self._places[key] = {}
        traced: dict[str, set[tuple[tuple[str, ...], str]]] = {}
        for kernel in self._graphs[graph]:
            for part in kernel.parts:
                for step in part.owner or ():
                    traced.setdefault(step.root, set()).add((_unwrapped(step.path), step.kind))
        for root, steps in traced.items():
            taken = [one for one in self._given.get(given, ()) if one.root == root]
            is_told = any(one.holders is not None for one in taken)
            for top in _outermost(path for path, _ in steps) if is_told else [()]:
                below = {(rest, kind) for path, kind in steps if (rest := _below(top, path)) is not None}
                inside = [(rest, one) for one in taken if (rest := _below(top, one.path)) is not None]
                held = [(rest, one.holders) for rest, one in inside if one.holders is not None]
                may_be_gone = any(one.is_gone for _, one in inside)
                place = self._place_of(root, below, around, held, may_be_gone)
                found |= {(root, top + rest): place if isinstance(place, str) else place + rest for rest, _ in below}
        return found

    def _place_of(
        self,
        root: str,
        steps: set[tuple[tuple[str, ...], str]],
        around: int,
        held: Sequence[tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]],
        may_be_gone: bool,
    ) -> tuple[str, ...] | str:
        """The real path of a module with these traced ``steps`` below it, or the reason why it is unknown.

        ``SELF`` is the module whose forward the graph is: its label must be around. Any other module is identified by
        the tensors ``held`` in it: (path below it, real paths of the modules that have the tensor). Without such
        tensors it must be the only module in all models that fits, and the only one of its class in the process,
        because a function can be called with other modules. If such another one ``may_be_gone``, this proves nothing.
        """
        if root == SELF:
            fitting = {self._path_of[around]} if around in self._path_of else set()
        elif held:
            fitting = set.intersection(*({_above(rest, _unwrapped(one)) for one in paths} for rest, paths in held))
        else:
            fitting = set(self._modules)
        fitting = {path for path in fitting if path and self._fits(path, steps)}
        if not fitting:
            return OTHER_MODULE
        if len(fitting) > 1:
            return AMBIGUOUS_MODULE
        (place,) = fitting
        is_known = root == SELF or held or (not may_be_gone and self._is_alone(place))
        return place if is_known else AMBIGUOUS_MODULE

    def _fits(self, path: tuple[str, ...], steps: set[tuple[tuple[str, ...], str]]) -> bool:
        return all(path + below in self._modules and self._modules[path + below].kind == kind for below, kind in steps)


def _aligned(kernels: Sequence[str], ran: Sequence[str]) -> list[int | None]:
    """For each op that ran, the number of its kernel; see ``CompiledGraphs.called``."""
    both = set(kernels) & set(ran)
    ours = [at for at, name in enumerate(kernels) if name in both]
    theirs = [at for at, name in enumerate(ran) if name in both]
    pairs = _common_pairs([kernels[at] for at in ours], [ran[at] for at in theirs])
    found: list[int | None] = [None] * len(ran)
    for at, other in pairs:
        found[theirs[other]] = ours[at]
    return found


def _common_pairs(ours: Sequence[str], theirs: Sequence[str]) -> list[tuple[int, int]]:
    """The pairs of equal items that are in all longest common subsequences, by their numbers.

    A pair has a rank: how many pairs come before it in any longest one that it is in. Each longest one has one pair of
    every rank, so that a pair is in all of them where there is no other of its rank.
    """
    if ours == theirs:
        return [(at, at) for at in range(len(ours))]
    if len(ours) * len(theirs) > _LARGEST_TABLE:
        return []
    before, after = _lengths(ours, theirs), _lengths(ours[::-1], theirs[::-1])
    longest = before[-1][-1]
    of_rank: dict[int, list[tuple[int, int]]] = {}
    for at, name in enumerate(ours):
        for other, called in enumerate(theirs):
            if name == called and before[at][other] + 1 + after[-at - 2][-other - 2] == longest:
                of_rank.setdefault(before[at][other], []).append((at, other))
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


def _outermost(paths: Iterable[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Of some paths, those that are below no other."""
    found: list[tuple[str, ...]] = []
    for path in sorted(paths):
        if not found or _below(found[-1], path) is None:
            found.append(path)
    return found


def _below(top: tuple[str, ...], path: tuple[str, ...]) -> tuple[str, ...] | None:
    """The steps from one path to another below it; None where that is not below it."""
    return path[len(top) :] if path[: len(top)] == top else None


def _above(rest: tuple[str, ...], path: tuple[str, ...]) -> tuple[str, ...]:
    """A path without these last steps; ``()``, which is no module's, if it does not end in them."""
    start = len(path) - len(rest)
    return path[:start] if start > 0 and path[start:] == rest else ()


def _unwrapped(path: tuple[str, ...]) -> tuple[str, ...]:
    """A path without the steps into compiled modules: torch's names contain some of them and not others."""
    return tuple(step for step in path if step != "_orig_mod")


def region_of(name: str) -> str:
    """The compile id of a region, from the name of its range."""
    return name.removeprefix(REGION).removeprefix(": ") or "?"


def graph_of(name: str) -> str:
    """The key of a compiled graph, from the name of a range in which its kernels run."""
    return name.removeprefix(CALL).removesuffix(" ##")


def _plain(name: str) -> str:
    """The name of a kernel in an event, without the parts that depend on its graph or its library."""
    return _PREFIX.sub("", name, count=1).rpartition("::")[2]


def pieces(start: int, end: int, weights: Sequence[int]) -> list[tuple[int, int]]:
    """An interval of time cut in proportion to weights, at least one of which is not 0: (start, end) of each piece."""
    whole, before = sum(weights), 0
    found = []
    for weight in weights:
        cut = start + (end - start) * before // whole
        before += weight
        found.append((cut, start + (end - start) * before // whole))
    return found
