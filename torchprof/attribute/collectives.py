"""Whose the exchanges between ranks are: which op asked for one that another thread carries out, and which layers it
serves. Knows no torch."""

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
"""The op by which torch records what a collective is called on, where it is carried out by kernels."""
ACCUMULATES = "AccumulateGrad"
"""How the name of the node ends at which a gradient arrives, and DistributedDataParallel looks at its buckets."""

_FSDP = re.compile(r"FSDP::\w+(?: for (?P<next>.*)| \((?P<own>.*)\))?", re.DOTALL)
"""What FSDP2 calls its ranges: with the names of the modules whose parameters they are about, as the root has them, and
without one for the root itself (``torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py``)."""


class _Asked(NamedTuple):
    """An exchange that was asked for, and has not begun."""

    name: str
    place: Place
    signature: int


class Exchanges:
    """What the attribution of one session notes of exchanges.

    ``fqns``: the layers by the names that FSDP has for them, of each of its roots; ``signatures``: what ops were called
    on; ``replicated``: the layers whose gradients DistributedDataParallel exchanges, and for each the sizes of those
    that it ignores; empty where there is no such module, None where that is not known;
    ``is_one_group``: whether all exchanges are between the same ranks. ``unmatched`` counts the collectives of which
    nobody knows who asked for them, ``uncertain`` the buckets that have another size than the gradients that came
    before them.
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
        self._names_in: dict[str, tuple[str, ...] | None] = {}  # what labels say, by label

    # Who asked

    def ask(self, name: str, place: Place, signature: int) -> None:
        """An op asks for an exchange."""
        self._asked.append(_Asked(name, place, signature))

    def begun_inside(self, place: Place) -> None:
        """An exchange begins on the thread that asked for it, inside this place: nobody else will."""
        last = self._asked[-1].place if self._asked else None
        outer: Place | None = place
        while outer is not None and last is not None:
            if outer is last:
                self._asked.pop()
                return
            outer = outer.outer

    def asker(self, name: str, signature: int) -> Place | None:
        """The op that asked for an exchange that begins now on a thread of the backend's, None where none is known.

        A group's exchanges begin in the order in which they were asked for: it is the first that asked for one of this
        name, and of this size where sizes were recorded. Of several groups each has an order of its own: there the
        sizes have to tell them apart.
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

    # Whom it serves

    def accumulate(self, thread: int, layer: int) -> None:
        """The gradient of a parameter of a layer is ready."""
        if self._replicated is None or layer in self._replicated:
            self._accumulated[thread].append((layer, None))

    def forget_gradients(self) -> None:
        """A forward begins: gradients that were not exchanged until now will not be exchanged any more."""
        if self._accumulated:
            self._accumulated.clear()

    def accumulated(self, thread: int, signature: int) -> None:
        """How large the last gradient was. One that DistributedDataParallel ignores is in no bucket."""
        gradients = self._accumulated[thread]
        size = self._size(signature)
        if gradients and size is not None:
            layer, _ = gradients.pop()
            if size not in (self._replicated or {}).get(layer, ()):
                gradients.append((layer, size))

    def bucket(self, thread: int, op: str, signature: int) -> tuple[int, ...]:
        """The layers whose gradients are in a bucket that is exchanged now: those that became ready since the last one.

        DistributedDataParallel fills its buckets in that order from its second backward on. ``()`` where the sizes,
        where they were recorded, say that it did not, and for what is no bucket: others exchange a gradient when it is
        there, too, as FullyShardedDataParallel does, which scatters it, and hooks of the user's.
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
        """The layers that a range of FSDP2's is about, which is inside of a layer (negative: none); ``()`` where it
        names none of ours, or where they are of another root than that layer. None for all other ranges."""
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
        """The layer that FSDP calls so: of several roots, below that which is around."""
        layers = self._fqns.get(name, ())
        if len(layers) > 1:
            path = self._paths[around] if around >= 0 else ()
            steps = len(name.split(".")) if name else 0
            roots = {layer: self._paths[layer][: len(self._paths[layer]) - steps] for layer in layers}
            layers = [layer for layer, root in roots.items() if path[: len(root)] == root]
        return layers[0] if len(layers) == 1 else None

    def common(self, layers: Iterable[int]) -> tuple[str, ...]:
        """The path of the nearest common ancestor of some layers; ``()`` where they are of several models."""
        first, *others = (self._paths[layer] for layer in layers)
        steps = len(first)
        for other in others:
            steps = min(steps, len(other), *(at for at, pair in enumerate(zip(first, other)) if pair[0] != pair[1]))
        return first[:steps]

    def _size(self, signature: int) -> int | None:
        """How many elements all inputs of a call have together, None where that was not recorded."""
        sizes = self._sizes(signature)
        return sum(sizes) if sizes else None

    def _sizes(self, signature: int) -> list[int]:
        """How many elements each input of a call has; none where that was not recorded."""
        if not signature:
            return []
        return [size for shape in self._signatures[signature].shapes if (size := _elements(shape)) is not None]


def _elements(shape: object) -> int | None:
    """Of a tensor, or of all tensors of a list; None for what is neither."""
    if not isinstance(shape, tuple) or not shape:
        return None
    if all(type(size) is int for size in shape):
        return prod(shape)
    sizes = [_elements(one) for one in shape]
    return None if None in sizes else sum(size for size in sizes if size is not None)


def _is_for(op: str, collective: str) -> bool:
    """Whether an op asks for collectives of this name. gloo reduces and scatters by reducing for all."""
    asked, begun = name_of_collective(op), name_of_collective(collective)
    return asked == begun or (begun, asked) == ("all_reduce", "reduce_scatter")


def fqns_of(paths: Iterable[tuple[str, ...]]) -> dict[str, list[int]]:
    """The layers by the names that FSDP has for them where its roots are the models."""
    found: dict[str, list[int]] = {}
    for index, path in enumerate(paths):
        found.setdefault(".".join(path[1:]), []).append(index)
    return found
