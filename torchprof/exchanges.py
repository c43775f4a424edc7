"""Whose the exchanges between ranks are: which op asked for one that another thread carries out, and which layers it
serves. Knows no torch."""

from __future__ import annotations

import re
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torchprof.attribute import Place, Signature

ASKS = "c10d::"
"""How the names of torch's ops begin that ask for an exchange (``torch/csrc/distributed/c10d/Ops.cpp``)."""
ACCUMULATES = "torch::autograd::AccumulateGrad"
"""The autograd node that ends the way of a gradient, and after which DistributedDataParallel looks at its buckets."""

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

    ``fqns``: the layers by the names that FSDP has for them; ``signatures``: what ops were called on. ``unmatched``
    counts the collectives of which nobody knows who asked for them, ``uncertain`` the buckets that have another size
    than the gradients that came before them.
    """

    def __init__(
        self,
        fqns: Mapping[str, int],
        paths: Sequence[tuple[str, ...]],
        signatures: Sequence[Signature],
    ) -> None:
        self.unmatched = 0
        self.uncertain = 0
        self._fqns = fqns
        self._paths = paths
        self._signatures = signatures
        self._asked: deque[_Asked] = deque()
        self._accumulated: defaultdict[int, list[tuple[int, int | None]]] = defaultdict(list)
        self._of_label: dict[str, tuple[int, ...]] = {}

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
        name, and of this size where sizes were recorded.
        """
        size = self._size(signature)
        for at, asked in enumerate(self._asked):
            if _is_for(asked.name, name) and (size is None or size in (self._sizes(asked.signature) or (size,))):
                del self._asked[at]
                return asked.place
        self.unmatched += 1
        return None

    # Whom it serves

    def accumulate(self, thread: int, layer: int) -> None:
        """The gradient of a parameter of a layer is ready."""
        self._accumulated[thread].append((layer, None))

    def accumulated(self, thread: int, signature: int) -> None:
        """How large the last gradient was."""
        gradients = self._accumulated[thread]
        size = self._size(signature)
        if gradients and size is not None:
            gradients[-1] = gradients[-1][0], size

    def bucket(self, thread: int, signature: int) -> tuple[int, ...]:
        """The layers whose gradients are in a bucket that is exchanged now: those that became ready since the last one.

        DistributedDataParallel fills its buckets in that order from its second backward on. ``()`` where the sizes,
        where they were recorded, say that it did not.
        """
        gradients = self._accumulated.pop(thread, [])
        sizes = self._sizes(signature)
        known = [size for _, size in gradients if size is not None]
        if not gradients or (sizes and len(known) == len(gradients) and sum(known) not in sizes):
            self.uncertain += 1
            return ()
        return tuple(dict.fromkeys(layer for layer, _ in gradients if layer >= 0))

    def named_by(self, label: str) -> tuple[int, ...]:
        """The layers that a range of FSDP2's is about; ``()`` for all other ranges, and where it names none of ours."""
        layers = self._of_label.get(label)
        if layers is None:
            found = _FSDP.fullmatch(label)
            layers = ()
            if found is not None:
                names = (found["next"] or found["own"] or "").split(", ")
                numbers = [self._fqns.get(name) for name in names]
                if None not in numbers:
                    layers = tuple(number for number in numbers if number is not None)
            self._of_label[label] = layers
        return layers

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
    asked = op.removeprefix(ASKS).replace("_", "")
    begun = collective.partition(":")[2].replace("_", "")
    if begun == "reduce":
        return asked == begun
    return asked.startswith(begun) or (begun == "allreduce" and asked.startswith("reducescatter"))


def fqns_of(paths: Iterable[tuple[str, ...]]) -> dict[str, int]:
    """The layers by the names that FSDP has for them where its root is the model: those that several models have are
    left out."""
    found: dict[str, int] = {}
    several: set[str] = set()
    for index, path in enumerate(paths):
        name = ".".join(path[1:])
        if name in found:
            several.add(name)
        found[name] = index
    return {name: index for name, index in found.items() if name not in several}
