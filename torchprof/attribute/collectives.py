"""The owners of collectives: the op that requested each one, and the layers that it works for."""

from __future__ import annotations

import re
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence, Set
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from torchprof.run.collectives import name_of_collective, signature_in_group
from torchprof.run.lockstep import NOT_RECORDED, GroupOfRanks
from torchprof.run.meta import MeshDim
from torchprof.run.words import is_host_collective

if TYPE_CHECKING:
    from torchprof.attribute.events import Event, Place
    from torchprof.run.words import Signature


ACCUMULATES = "AccumulateGrad"
"""Suffix of the name of the autograd node that makes a gradient ready. There DistributedDataParallel fills its
buckets."""

_FSDP = re.compile(r"FSDP::\w+(?: for (?P<next>.*?)| \((?P<own>.*?)\))?(?: \[pg=\d+\])?", re.DOTALL)
"""The names of the ranges of FSDP2 (``torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py``). They contain the
names, relative to the FSDP root, of the modules whose parameters the range is for; no name for the root itself. If a
module has several groups of parameters, the size of their mesh follows: " [pg=2]"."""


class _Request(NamedTuple):
    """A collective that an op requested and that has not begun yet."""

    name: str
    place: Place
    signature: int


class CollectiveOwners:
    """Finds the owners of collectives in one walk over the events of a session.

    It keeps the requested collectives that have not begun, and the gradients that are ready and not exchanged yet.

    ``fqns``: the layers by their names in FSDP, over all FSDP roots. ``signatures``: the inputs of ops, by number.
    ``replicated``: the layers whose gradients DistributedDataParallel exchanges, each with the sizes of the gradients
    that it ignores; empty if there is no such module, None if this is unknown. ``group``: that of all collectives that
    name none; None if it is unknown, or if there are several: then ``is_one_group`` is false.

    ``unmatched``: the number of collectives without a known caller. ``uncertain``: the number of buckets that do not
    have the size of the gradients that became ready before them.
    """

    def __init__(
        self,
        fqns: Mapping[str, Sequence[int]],
        paths: Sequence[tuple[str, ...]],
        signatures: list[Signature],
        replicated: Mapping[int, Set[int]] | None = None,
        group: GroupOfRanks | None = None,
        is_one_group: bool = True,
    ) -> None:
        self.unmatched = 0
        self.uncertain = 0
        self._fqns = fqns
        self._paths = paths
        self._signatures = signatures
        self._replicated = replicated
        self._group = group
        self._is_one_group = is_one_group
        self._in_group: dict[tuple[str, int], int] = {}  # see ``signature_of``
        self._requests: deque[_Request] = deque()
        # By thread: the layer of each gradient, and its size if that was recorded.
        self._ready_gradients: defaultdict[int, list[tuple[int, int | None]]] = defaultdict(list)
        # By the label of a range: the module names in it.
        self._names_in_range: dict[str, tuple[str, ...] | None] = {}

    # Requests

    def note_request(self, event: Event, place: Place) -> None:
        """An op requests a collective."""
        self._requests.append(_Request(event.name, place, event.signature))

    def note_started_inside(self, place: Place) -> None:
        """A collective begins inside this place, on the thread that requested it. So no other thread will run it."""
        last = self._requests[-1].place if self._requests else None
        outer: Place | None = place
        while outer is not None and last is not None:
            if outer is last:
                self._requests.pop()
                return
            outer = outer.outer

    def requester(self, event: Event) -> Place | None:
        """The op that requested a collective that begins now on a thread of the backend; None if it is unknown.

        The collectives of one group begin in the order of their requests. So it is the first op that requested a
        collective of this name, and of this size if sizes were recorded. With several groups, each group has its own
        order. Then a match counts only if it is the only one, or if sizes were recorded.
        """
        size = self._size(event.signature)
        fitting = [
            index
            for index, request in enumerate(self._requests)
            if _requests_collective(request.name, event.name)
            and (size is None or size in (self._sizes(request.signature) or (size,)))
        ]
        if fitting:
            requester = self._requests[fitting[0]].place
            is_certain = (
                self._is_one_group
                or size is not None
                or {self._requests[index].place for index in fitting} == {requester}
            )
            del self._requests[fitting[0]]
            if is_certain:
                return requester
        self.unmatched += 1
        return None

    def signature_of(self, event: Event) -> int:
        """The number of the inputs of a collective. It contains the group, if it is known and no kernel runs it."""
        if self._group is None or not is_host_collective(event.name):
            return event.signature
        key = event.name, event.signature
        number = self._in_group.get(key)
        if number is None:
            self._signatures.append(signature_in_group(event.name, self._signatures[event.signature], self._group))
            number = self._in_group[key] = len(self._signatures) - 1
        return number

    # The layers that a collective works for

    def note_gradient(self, thread: int, layer: int) -> None:
        """The gradient of a parameter of a layer is ready."""
        if self._replicated is None or layer in self._replicated:
            self._ready_gradients[thread].append((layer, None))

    def forget_gradients(self) -> None:
        """A forward begins: gradients that were not exchanged before are never exchanged."""
        if self._ready_gradients:
            self._ready_gradients.clear()

    def note_gradient_size(self, thread: int, signature: int) -> None:
        """Note the size of the last gradient. A gradient that DistributedDataParallel ignores is in no bucket."""
        gradients = self._ready_gradients[thread]
        size = self._size(signature)
        if gradients and size is not None:
            layer, _ = gradients.pop()
            if size not in (self._replicated or {}).get(layer, ()):
                gradients.append((layer, size))

    def layers_of_bucket(self, thread: int, op: str, signature: int) -> tuple[int, ...]:
        """The layers whose gradients are in the bucket that is exchanged now: those that became ready since the last.

        From its second backward on, DistributedDataParallel fills its buckets in the order in which gradients become
        ready. ``()`` if the recorded sizes contradict this, or if it is not a bucket: FullyShardedDataParallel and
        hooks of the user also exchange gradients when they are ready.
        """
        gradients = self._ready_gradients.pop(thread, [])
        if self._replicated is not None and not self._replicated:
            return ()
        sizes = self._sizes(signature)
        known = [size for _, size in gradients if size is not None]
        if not gradients or (sizes and len(known) == len(gradients) and sum(known) not in sizes):
            self.uncertain += name_of_collective(op) == "all_reduce"
            return ()
        return tuple(dict.fromkeys(layer for layer, _ in gradients if layer >= 0))

    def layers_of_range(self, label: str, around: int) -> tuple[int, ...] | None:
        """The layers whose parameters a range of FSDP2 is for. ``around``: the layer around it (negative: none).

        ``()`` if the range names no layer, or layers of another FSDP root than that of ``around``. None for a range
        that is not from FSDP2.
        """
        if label not in self._names_in_range:
            match = _FSDP.fullmatch(label)
            names = None if match is None else tuple((match["next"] or match["own"] or "").split(", "))
            self._names_in_range[label] = names
        names = self._names_in_range[label]
        if names is None:
            return None
        layers = [self._layer_named(name, around) for name in names]
        return () if None in layers else tuple(layer for layer in layers if layer is not None)

    def _layer_named(self, name: str, around: int) -> int | None:
        """The layer with this name in FSDP. If several roots have it, the layer of the root above ``around``."""
        layers = self._fqns.get(name, ())
        if len(layers) > 1:
            path = self._paths[around] if around >= 0 else ()
            steps = len(name.split(".")) if name else 0
            roots = {layer: self._paths[layer][: len(self._paths[layer]) - steps] for layer in layers}
            layers = [layer for layer, root in roots.items() if path[: len(root)] == root]
        return layers[0] if len(layers) == 1 else None

    def _size(self, signature: int) -> int | None:
        """The number of elements of all inputs of a call together; None if it was not recorded."""
        sizes = self._sizes(signature)
        return sum(sizes) if sizes else None

    def _sizes(self, signature: int) -> list[int]:
        """The number of elements of each input of a call; empty if it was not recorded."""
        if not signature:
            return []
        return [size for shape in self._signatures[signature].shapes if (size := _elements(shape)) is not None]


def _elements(shape: object) -> int | None:
    """The number of elements of a tensor, or of all tensors in a list; None for other inputs."""
    if not isinstance(shape, tuple) or not shape:
        return None
    if all(type(size) is int for size in shape):
        return prod(shape)
    sizes = [_elements(part) for part in shape]
    return None if None in sizes else sum(size for size in sizes if size is not None)


def _requests_collective(op: str, collective: str) -> bool:
    """Whether an op requests collectives of this name. gloo runs a reduce_scatter as an all_reduce."""
    requested, begun = name_of_collective(op), name_of_collective(collective)
    return requested == begun or (begun, requested) == ("all_reduce", "reduce_scatter")


def layers_by_fqn(paths: Iterable[tuple[str, ...]]) -> dict[str, list[int]]:
    """The layers by their names in FSDP, if the FSDP roots are the models."""
    by_name: dict[str, list[int]] = {}
    for index, path in enumerate(paths):
        by_name.setdefault(".".join(path[1:]), []).append(index)
    return by_name


# The process groups of a rank, read from the entries that torch keeps in a job and writes to a trace.

_OF_MESH = "mesh_"
"""Prefix of the description of a group that is one dimension of a ``DeviceMesh``. The name of the dimension follows."""


def sole_group(groups: Iterable[Mapping[str, Any]]) -> GroupOfRanks | None:
    """The group that runs the collectives that do not name a group.

    None if there are several groups; ``NOT_RECORDED`` if no group is known. Groups of one rank exchange nothing and do
    not count. Groups of the same ranks count as one.

    ``groups``: the entries of "pg_config" in a trace, each with name, description and ranks. An empty list of ranks
    means all ranks of the job.
    """
    groups = list(groups)
    if not groups:
        return NOT_RECORDED
    described: dict[tuple[int, ...], GroupOfRanks] = {}
    for group in groups:
        known = _group_of_ranks(group)
        if known is not None:
            described.setdefault(_ranks(group), known)
    return next(iter(described.values())) if len(described) == 1 else None


def _group_of_ranks(group: Mapping[str, Any]) -> GroupOfRanks | None:
    """The group that an entry describes; None if it has one rank, which exchanges nothing, or an unknown size."""
    size, ranks = group.get("group_size", group.get("pg_size")), _ranks(group)
    if type(size) is not int or size <= 1:
        return None
    text = str(list(ranks)) if ranks else ""
    return GroupOfRanks(str(group.get("pg_name", "")), str(group.get("pg_desc", "")), size, text)


def mesh_of_groups(groups: Iterable[Mapping[str, Any]], rank: int) -> tuple[MeshDim, ...]:
    """The dimensions of a ``DeviceMesh`` that the groups are named after, each with its size and the position of
    ``rank`` in it."""
    dims: dict[str, MeshDim] = {}
    for group in groups:
        name, ranks = str(group.get("pg_desc", "")), _ranks(group)
        if name.startswith(_OF_MESH) and rank in ranks:
            name = name.removeprefix(_OF_MESH)
            dims.setdefault(name, MeshDim(name, len(ranks), ranks.index(rank)))
    return tuple(dims.values())


def _ranks(group: Mapping[str, Any]) -> tuple[int, ...]:
    ranks = group.get("ranks")
    return tuple(rank for rank in ranks if type(rank) is int) if isinstance(ranks, list) else ()
