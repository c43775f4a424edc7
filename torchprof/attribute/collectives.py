"""The owners of collectives: which op asked for one that another thread runs, and which layers it is for."""

from __future__ import annotations

import re
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence, Set
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from torchprof.run.collectives import name_of_collective

if TYPE_CHECKING:
    from torchprof.attribute.places import Place
    from torchprof.run.words import Signature

RECORDS_COLLECTIVE = "record_param_comms"
"""The op by which torch records the inputs of a collective that runs as kernels."""
ACCUMULATES = "AccumulateGrad"
"""Suffix of the name of the node at which a gradient is ready, and DistributedDataParallel fills its buckets."""

_FSDP = re.compile(r"FSDP::\w+(?: for (?P<next>.*)| \((?P<own>.*)\))?", re.DOTALL)
"""The names of FSDP2's ranges: with the names, below its root, of the modules whose parameters they are about; without
one for the root itself (``torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py``)."""


class _Asked(NamedTuple):
    """A collective that an op asked for and that has not begun."""

    name: str
    place: Place
    signature: int


class Exchanges:
    """The collectives of one session: those that were asked for, and the gradients that wait to be exchanged.

    ``fqns``: the layers by their names in FSDP, for each of its roots. ``signatures``: the inputs of ops, by number.
    ``replicated``: the layers whose gradients DistributedDataParallel exchanges, each with the sizes of the gradients
    that it ignores; empty if there is no such module, None if that is unknown. ``is_one_group``: whether all
    collectives are between the same ranks.

    ``unmatched`` counts the collectives without a known caller; ``uncertain`` the buckets whose size differs from that
    of the gradients that became ready before them.
    """

    def __init__(
        self,
        fqns: Mapping[str, Sequence[int]],
        paths: Sequence[tuple[str, ...]],
        signatures: Sequence[Signature],
        replicated: Mapping[int, Set[int]] | None = None,
        is_one_group: bool = True,
    ) -> None:
        self.unmatched = 0
        self.uncertain = 0
        self._fqns = fqns
        self._paths = paths
        self._signatures = signatures
        self._replicated = replicated
        self._is_one_group = is_one_group
        self._asked: deque[_Asked] = deque()
        self._accumulated: defaultdict[int, list[tuple[int, int | None]]] = defaultdict(list)
        self._names_in: dict[str, tuple[str, ...] | None] = {}  # by label: the module names in it

    # Callers

    def ask(self, name: str, place: Place, signature: int) -> None:
        """An op asks for a collective."""
        self._asked.append(_Asked(name, place, signature))

    def begun_inside(self, place: Place) -> None:
        """A collective begins on the thread that asked for it, inside this place: it is not one of another thread's."""
        last = self._asked[-1].place if self._asked else None
        outer: Place | None = place
        while outer is not None and last is not None:
            if outer is last:
                self._asked.pop()
                return
            outer = outer.outer

    def asker(self, name: str, signature: int) -> Place | None:
        """The op that asked for a collective that begins now on a thread of the backend, None if it is unknown.

        The collectives of one group begin in the order in which they were asked for: so it is the first op that asked
        for one of this name, and of this size if sizes were recorded. Each of several groups has its own order: there
        the match counts only if it is unique or if sizes were recorded.
        """
        size = self._size(signature)
        found = [
            at
            for at, asked in enumerate(self._asked)
            if _is_for(asked.name, name) and (size is None or size in (self._sizes(asked.signature) or (size,)))
        ]
        asker = self._asked[found[0]].place if found else None
        if found:
            is_sure = self._is_one_group or size is not None or {self._asked[at].place for at in found} == {asker}
            del self._asked[found[0]]
            if is_sure:
                return asker
        self.unmatched += 1
        return None

    # The layers that a collective is for

    def accumulate(self, thread: int, layer: int) -> None:
        """The gradient of a parameter of a layer is ready."""
        if self._replicated is None or layer in self._replicated:
            self._accumulated[thread].append((layer, None))

    def forget_gradients(self) -> None:
        """A forward begins: gradients that were not exchanged until now will not be."""
        if self._accumulated:
            self._accumulated.clear()

    def accumulated(self, thread: int, signature: int) -> None:
        """The size of the last gradient is recorded. One that DistributedDataParallel ignores is in no bucket."""
        gradients = self._accumulated[thread]
        size = self._size(signature)
        if gradients and size is not None:
            layer, _ = gradients.pop()
            if size not in (self._replicated or {}).get(layer, ()):
                gradients.append((layer, size))

    def bucket(self, thread: int, op: str, signature: int) -> tuple[int, ...]:
        """The layers whose gradients are in a bucket that is exchanged now: those that became ready since the last one.

        DistributedDataParallel fills its buckets in that order from its second backward on. ``()`` if recorded sizes
        contradict that, and if it is no bucket: FullyShardedDataParallel and hooks of the user's exchange a gradient
        when it is ready, too.
        """
        gradients = self._accumulated.pop(thread, [])
        if self._replicated is not None and not self._replicated:
            return ()
        sizes = self._sizes(signature)
        known = [size for _, size in gradients if size is not None]
        if not gradients or (sizes and len(known) == len(gradients) and sum(known) not in sizes):
            self.uncertain += name_of_collective(op) == "all_reduce"
            return ()
        return tuple(dict.fromkeys(layer for layer, _ in gradients if layer >= 0))

    def named_by(self, label: str, around: int) -> tuple[int, ...] | None:
        """The layers that a range of FSDP2's is about; ``around``: the layer around it (negative: none). ``()`` if it
        names no layer, or layers of another root than that of ``around``. None for all other ranges."""
        if label not in self._names_in:
            found = _FSDP.fullmatch(label)
            names = None if found is None else tuple((found["next"] or found["own"] or "").split(", "))
            self._names_in[label] = names
        names = self._names_in[label]
        if names is None:
            return None
        layers = [self._called(name, around) for name in names]
        return () if None in layers else tuple(layer for layer in layers if layer is not None)

    def _called(self, name: str, around: int) -> int | None:
        """The layer with this name in FSDP; of several roots, the one that ``around`` is below."""
        layers = self._fqns.get(name, ())
        if len(layers) > 1:
            path = self._paths[around] if around >= 0 else ()
            steps = len(name.split(".")) if name else 0
            roots = {layer: self._paths[layer][: len(self._paths[layer]) - steps] for layer in layers}
            layers = [layer for layer, root in roots.items() if path[: len(root)] == root]
        return layers[0] if len(layers) == 1 else None

    def common(self, layers: Iterable[int]) -> tuple[str, ...]:
        """The path of the nearest common ancestor of some layers; ``()`` if they are of several models."""
        first, *others = (self._paths[layer] for layer in layers)
        steps = len(first)
        for other in others:
            steps = min(steps, len(other), *(at for at, pair in enumerate(zip(first, other)) if pair[0] != pair[1]))
        return first[:steps]

    def _size(self, signature: int) -> int | None:
        """The number of elements of all inputs of a call together, None if it was not recorded."""
        sizes = self._sizes(signature)
        return sum(sizes) if sizes else None

    def _sizes(self, signature: int) -> list[int]:
        """The number of elements of each input of a call; empty if it was not recorded."""
        if not signature:
            return []
        return [size for shape in self._signatures[signature].shapes if (size := _elements(shape)) is not None]


def _elements(shape: object) -> int | None:
    """The number of elements of a tensor, or of all tensors of a list; None for other inputs."""
    if not isinstance(shape, tuple) or not shape:
        return None
    if all(type(size) is int for size in shape):
        return prod(shape)
    sizes = [_elements(one) for one in shape]
    return None if None in sizes else sum(size for size in sizes if size is not None)


def _is_for(op: str, collective: str) -> bool:
    """Whether an op asks for collectives of this name. gloo runs a reduce_scatter as an all_reduce."""
    asked, begun = name_of_collective(op), name_of_collective(collective)
    return asked == begun or (begun, asked) == ("all_reduce", "reduce_scatter")


def fqns_of(paths: Iterable[tuple[str, ...]]) -> dict[str, list[int]]:
    """The layers by their names in FSDP, if its roots are the models."""
    found: dict[str, list[int]] = {}
    for index, path in enumerate(paths):
        found.setdefault(".".join(path[1:]), []).append(index)
    return found
