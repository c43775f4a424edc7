"""Work that runs elsewhere than it was requested: that of devices, and collectives on the threads of a backend."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence, Set
from itertools import accumulate, islice
from math import inf, prod
from typing import Any

from torchprof.attribute.events import Attributed, Event, Place, Places
from torchprof.attribute.op_groups import OpGroup
from torchprof.run.collectives import RECORDS_COLLECTIVE, name_of_collective, signature_in_group
from torchprof.run.groups import lists_by_key
from torchprof.run.lockstep import NOT_RECORDED, GroupOfRanks
from torchprof.run.meta import MeshDim
from torchprof.run.torch_names import LAUNCHING
from torchprof.run.words import (
    BEFORE,
    LAUNCH_NOT_RECORDED,
    LAUNCHED_BEFORE,
    REPLAY,
    FrameKind,
    Signature,
    is_host_collective,
)


class Launches:
    """The places of device work: it belongs to the op that launched it. ``outside``: the place of no layer."""

    def __init__(self, places: Places, outside: Place) -> None:
        self._places = places
        self._outside = outside
        self._launched_by: dict[int, Place] = {}  # by the correlation of an op
        self._replayed: dict[Place, Place] = {}  # the launching place → the place of the CUDA graph's kernels
        self._collectives: dict[int, tuple[int, Place]] = {}  # by thread: end of the last collective's op, its place

    def note_op(self, correlation: int, thread: int, place: Place, around: Place | None, end_ns: int) -> None:
        """An op may launch work. A call of the device's runtime has a negative correlation, and its work belongs to the
        range ``around``, which ends at ``end_ns``."""
        launcher = place if correlation > 0 or around is None else self._last_collective(thread, around, end_ns)
        self._launched_by[correlation] = launcher

    def note_group(self, group: OpGroup, correlations: Sequence[int], end_ns: int) -> None:
        """The ops of a group may launch work. ``end_ns``: of the range around them."""
        if not any(correlations):
            return
        places, tree = group.places(), group.tree
        around_all = None if group.outer is None else group.place
        for correlation, path, parent in zip(correlations, tree.path_of, tree.parents):
            if correlation > 0:
                self._launched_by[correlation] = places[path]
            elif correlation and parent >= 0:
                self._launched_by[correlation] = places[tree.path_of[parent]]
            elif correlation:
                self.note_op(correlation, group.thread, places[path], around_all, end_ns)

    def note_replay(self, outer: Place, place: Place) -> None:
        """A call in ``outer`` replays a graph of kernels."""
        self._replayed[outer] = self._replayed[place] = self._places.inside(outer, FrameKind.KERNELS, REPLAY)

    def note_collective(self, event: Event, place: Place, around: Place | None, outer: Attributed | None) -> None:
        """A collective begins. ``around``, ``outer``: the range around it."""
        if event.correlation:
            self._launched_by[event.correlation] = place
        if around is None or outer is None or around.name != RECORDS_COLLECTIVE:
            return
        # The op launches the kernel, and the range that begins in the op names the collective. If two ranges begin in
        # one op, it is unknown which of the two a kernel belongs to.
        end_of_op, other = self._collectives.get(event.thread, (0, place))
        last = place if end_of_op != outer.end_ns or other is place else around
        self._collectives[event.thread] = outer.end_ns, last
        if outer.event.correlation > 0:
            self._launched_by[outer.event.correlation] = last

    def kernel(self, event: Event) -> Attributed:
        if (launcher := self._launched_by.get(event.correlation)) is None:
            reason = LAUNCHED_BEFORE if event.correlation == BEFORE else LAUNCH_NOT_RECORDED
            launcher = self._places.inside(self._outside, FrameKind.LABEL, reason)
        launcher = self._replayed.get(launcher, launcher)
        inner = self._places.inside(launcher, FrameKind.KERNEL, event.name, event.signature)
        return Attributed(event, inner, None, 1, event.end_ns - event.start_ns)

    def _last_collective(self, thread: int, around: Place, end_ns: int) -> Place:
        """In an op that records collectives, the last collective launches the work of all calls."""
        end_of_op, collective = self._collectives.get(thread, (0, around))
        return collective if end_of_op == end_ns and around.name == RECORDS_COLLECTIVE else around


# What the profiler does not record of launches and devices

_ENOUGH_KERNELS = 1000  # if no correlation ID of so many is that of a call, none will be


def launches_of(calls: Iterable[tuple[int, int, str, int]]) -> set[int]:
    """The correlation IDs of the calls that launch a kernel, from start, thread, name and correlation ID of calls.
    While any thread captures a graph, launches may run no kernel: autograd's thread captures what it launches, too. A
    capture without an end does not count; one without a beginning began before all calls."""
    launches: list[tuple[int, int]] = []
    begun: dict[int, int] = {}  # by thread
    captures: list[tuple[float, int]] = []
    for start, thread, name, correlation in sorted(calls):
        if (match := LAUNCHING.fullmatch(name)) is None:
            continue
        if match["launch"]:
            launches.append((start, correlation))
        elif match["captures"]:
            begun[thread] = start
        else:
            captures.append((begun.pop(thread, -inf), start))
    return {correlation for start, correlation in launches if not any(begin < start < end for begin, end in captures)}


def first_correlation_id(calls: Iterable[int], launched: Iterable[int]) -> int:
    """The lowest correlation ID of a runtime call in a recording; 0 if it is unknown. A kernel without a recorded
    launch and with a lower ID was launched before the recording began.

    ``calls``: the IDs of all recorded calls of the CUDA runtime, which counts them up over the life of a process (CUPTI
    Activity API, "correlation ID"); a kernel has the ID of the call that launched it. ``launched``: the IDs of the
    kernels with a recorded launch. If none of them is that of a call, kernels are numbered in another way.

    The order on a stream does not show which kernels were launched before: some launches inside a recording are not
    recorded either, for example those of the CUDA driver before torch 2.1.
    """
    first, is_known = 0, False
    numbers = set(islice(launched, _ENOUGH_KERNELS))
    for number in calls:
        if number > 0:
            first = min(first or number, number)
            is_known = is_known or number in numbers
    return first if is_known else 0


def threads_of_overhead(times: Sequence[int], operators: Iterable[tuple[int, int]]) -> list[int]:
    """For each of some times, in their order: the thread on which the last operator before it started; 0 for none. The
    profiler records its overhead without a thread, or with that of the caller of autograd for what is in a backward
    pass. It is in an operator that launches work: no other operator starts meanwhile on the thread. ``operators``:
    start and thread of each. With (3, thread 1) and (10, thread 2), the times 5 and 12 have threads 1 and 2."""
    last_before = [(-1, 0)] * len(times)
    until = times[-1] if times else -1
    for start, thread in operators:
        if start <= until:
            index = bisect_left(times, start)
            last_before[index] = max(last_before[index], (start, thread))
    return [thread for _, thread in accumulate(last_before, max)]


def numbers_of_devices(of_work: Iterable[int], of_memory: Iterable[int]) -> dict[int, int]:
    """For ROCm: the number of each device in kernel events → its number in torch (``cuda:0``) and in memory events.

    Kernel events count all agents of the machine, CPUs included. Both numberings have the same order. Empty if they do
    not have the same length: then the devices cannot be matched.
    """
    work, memory = sorted(set(of_work)), sorted(set(of_memory))
    return dict(zip(work, memory)) if len(work) == len(memory) else {}


# The owners of collectives

_FSDP = re.compile(r"FSDP::\w+(?: for (?P<next>.*?)| \((?P<own>.*?)\))?(?: \[pg=\d+\])?", re.DOTALL)
"""The names of the ranges of FSDP2 (``torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py``). They contain the
names, relative to the FSDP root, of the modules whose parameters the range is for; no name for the root itself. If a
module has several groups of parameters, the size of their mesh follows: " [pg=2]"."""


class CollectiveOwners:
    """Finds the owners of collectives in one walk over the events of a session.

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
        self._requests: deque[tuple[Event, Place]] = deque()  # of collectives that have not begun
        # By thread: the layer of each gradient, and its size if that was recorded.
        self._ready_gradients: defaultdict[int, list[tuple[int, int | None]]] = defaultdict(list)
        self._names_in_range: dict[str, list[str] | None] = {}  # by the label of a range: the module names in it

    # Requests

    def note_request(self, event: Event, place: Place) -> None:
        self._requests.append((event, place))

    def note_started_inside(self, place: Place) -> None:
        """A collective begins inside this place, on the thread that requested it. So no other thread will run it."""
        last = self._requests[-1][1] if self._requests else None
        outer: Place | None = place
        while outer is not None and last is not None:
            if outer is last:
                self._requests.pop()
                return
            outer = outer.outer

    def requester(self, event: Event) -> Place | None:
        """The op that requested a collective that begins now on a thread of the backend; None if it is unknown. The
        collectives of one group begin in the order of their requests. So it is the first op that requested a collective
        of this name, and of this size if sizes were recorded. With several groups, each group has its own order. Then a
        match counts only if it is the only one, or if sizes were recorded."""
        size, name = self._size(event.signature), name_of_collective(event.name)
        names = (name, "reduce_scatter") if name == "all_reduce" else (name,)  # gloo runs a reduce_scatter as that
        fitting = {
            index: place
            for index, (request, place) in enumerate(self._requests)
            if name_of_collective(request.name) in names
            and (size is None or size in (self._sizes(request.signature) or (size,)))
        }
        if fitting:
            first, requester = next(iter(fitting.items()))
            del self._requests[first]
            if self._is_one_group or size is not None or {*fitting.values()} == {requester}:
                return requester
        self.unmatched += 1
        return None

    def signature_of(self, event: Event) -> int:
        """The number of the inputs of a collective. It contains the group, if it is known and no kernel runs it."""
        if self._group is None or not is_host_collective(event.name):
            return event.signature
        key = event.name, event.signature
        if (number := self._in_group.get(key)) is None:
            self._signatures.append(signature_in_group(event.name, self._signatures[event.signature], self._group))
            number = self._in_group[key] = len(self._signatures) - 1
        return number

    # The layers that a collective works for

    def note_gradient(self, thread: int, layer: int) -> None:
        if self._replicated is None or layer in self._replicated:
            self._ready_gradients[thread].append((layer, None))

    def forget_gradients(self) -> None:
        """A forward begins: gradients that were not exchanged before are never exchanged."""
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
        hooks of the user also exchange gradients when they are ready."""
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
        """The layers whose parameters a range of FSDP2 is for; None for any other range. ``around``: the layer around
        it (negative: none). ``()`` if it names no layer, or layers of another FSDP root than that of ``around``."""
        if label not in self._names_in_range:
            match = _FSDP.fullmatch(label)
            self._names_in_range[label] = match and (match["next"] or match["own"] or "").split(", ")
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


def layers_by_fqn(paths: Iterable[tuple[str, ...]]) -> dict[str, list[int]]:
    """The layers by their names in FSDP, if the FSDP roots are the models."""
    return lists_by_key((".".join(path[1:]), index) for index, path in enumerate(paths))


# The process groups of a rank, from the entries that torch keeps in a job and writes to a trace

_OF_MESH = "mesh_"
"""Prefix of the description of a group that is one dimension of a ``DeviceMesh``. The name of the dimension follows."""


def sole_group(groups: Iterable[Mapping[str, Any]]) -> GroupOfRanks | None:
    """The group that runs the collectives that do not name a group.

    None if there are several groups; ``NOT_RECORDED`` if no group is known. Groups of one rank exchange nothing and do
    not count. Groups of the same ranks count as one.

    ``groups``: the entries of "pg_config" in a trace. An empty list of ranks means all ranks of the job.
    """
    groups = list(groups)
    if not groups:
        return NOT_RECORDED
    described: dict[tuple[int, ...], GroupOfRanks] = {}
    for group in groups:
        size, ranks = group.get("group_size", group.get("pg_size")), _ranks(group)
        if type(size) is int and size > 1:
            name, text = str(group.get("pg_name", "")), str(list(ranks)) if ranks else ""
            described.setdefault(ranks, GroupOfRanks(name, str(group.get("pg_desc", "")), size, text))
    return next(iter(described.values())) if len(described) == 1 else None


def mesh_of_groups(groups: Iterable[Mapping[str, Any]], rank: int) -> tuple[MeshDim, ...]:
    """The dimensions of a ``DeviceMesh`` that groups are named after, with their size and the position of ``rank``."""
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
