"""Which collective an event is, with its bytes and its ranks; and in which one a rank was when its recording ended."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, NamedTuple

from torchprof.run.groups import sums_by_key
from torchprof.run.lockstep import GroupOfRanks
from torchprof.run.part import PerRank, Scale, demand_layer
from torchprof.run.torch_names import DTYPES, NO_TENSORS
from torchprof.run.words import Frame, FrameKind, Signature

C10D_OPS = "c10d::"
"""Prefix of the names of torch's ops that call a collective (``torch/csrc/distributed/c10d/Ops.cpp``)."""
RECORDS_COLLECTIVE = "record_param_comms"
"""The op in which torch records the inputs of a collective that runs as kernels."""

COLLECTIVES = (
    *("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "gather", "scatter"),
    *("barrier", "send", "recv"),
)
"""The names of collectives and of the two halves of a point-to-point exchange, as in ``torch.distributed``."""
POINT_TO_POINT = ("send", "recv", "coalesced")
"""Prefixes of the names of operations between two ranks, which do different things in it."""
COLLECTIVE_OP = re.compile("|".join(name.replace("_", "_?") for name in COLLECTIVES))
_NAMES = {name.replace("_", ""): name for name in COLLECTIVES}


def name_of_collective(name: str) -> str:
    """The name that a collective has in all reports: "all_reduce" for "allreduce_coalesced", "nccl:all_reduce",
    "c10d::allreduce_" and "gloo:sparse_all_reduce". From any other name only the backend is removed. torch has
    different names for each way to pass the tensors ("_allgather_base", "all_gather_into_tensor"), and in ops, ranges
    and records (``ProcessGroupNCCL.cpp``). "all_reduce_barrier", as which NCCL runs a barrier, is a barrier."""
    match = COLLECTIVE_OP.search("barrier" if "barrier" in name else name)
    return _NAMES[match[0].replace("_", "")] if match else name.rpartition(":")[2]


# The collective of an event

_MARK = "collective"
_NO_COLLECTIVES = ("wait", "init")  # recorded like collectives: waiting for one, making a group
_ELEMENT_BYTES = {dtype.scalar_type: dtype.nbytes for dtype in DTYPES}
_SCALAR_TYPES = {recorded: dtype.scalar_type for dtype in DTYPES for recorded in dtype.recorded}

_NCCL_KERNEL = re.compile(r"nccl(?:Dev)?(?:Kernel_)?(AllReduce|AllGather|ReduceScatter|Broadcast|Reduce)(?![a-z])")
"""Names of kernels of NCCL and RCCL that run only one collective ("ncclDevKernel_AllReduce_Sum_f32_…",
"ncclAllReduceRingLLKernel_sum_f32" before NCCL 2.9). "SendRecv" and "Generic" may run any collective."""

_OUTPUT_AS_LARGE = ("all_reduce", "broadcast", "reduce", "send", "recv")  # the output is as large as the input


class Collective(NamedTuple):
    """A collective, or one half of a point-to-point exchange, on one rank.

    - ``name``: as ``name_of_collective`` gives it ("all_reduce"), wherever it was read.
    - ``elements_in``, ``elements_out``: how many elements of type ``dtype`` ("Float") this rank sent and received.
    - ``group``: the name of the process group ("0"); ``description``: its description ("default_pg"); ``size``: how
      many ranks it has; ``ranks``: its ranks as text ("[0, 1]"; a long list contains "...").

    None and "" mean unknown.
    """

    name: str
    dtype: str = ""
    elements_in: int | None = None
    elements_out: int | None = None
    group: str = ""
    description: str = ""
    size: int | None = None
    ranks: str = ""

    @property
    def bytes_in(self) -> int | None:
        return self._nbytes(self.elements_in)

    @property
    def bytes_out(self) -> int | None:
        return self._nbytes(self.elements_out)

    def _nbytes(self, elements: int | None) -> int | None:
        if elements == 0:
            return 0
        size = _ELEMENT_BYTES.get(self.dtype)
        return None if elements is None or size is None else elements * size


def signature_of(args: Mapping[str, Any]) -> Signature | None:
    """The collective in the ``args`` of a kernel or of the op ``record_param_comms``, packed into a ``Signature``.

    None if they name no collective. Only ``collective_of`` unpacks it. The shapes have the elements in and out, the
    dtypes the type twice, and the scalars the mark, the name and the group (its name, description, size and ranks). The
    signature of an op has as many scalars as shapes, or none, so it cannot be mistaken for this.

    torch writes the ``args`` for that op (``torch/csrc/profiler/util.h``), and Kineto for the kernels that it launches
    (``libkineto/src/output_json.cpp``); older versions write fewer. Those that differ in each call (``Seq``, addresses
    of tensors) are not read: each call would get a row of its own.
    """
    name = args.get("Collective name")
    if not isinstance(name, str) or not name or name in _NO_COLLECTIVES:
        return None
    elements_in, elements_out, size = (
        number if type(number) is int and 0 <= number < 2**62 else None
        for number in map(args.get, ("In msg nelems", "Out msg nelems", "Group size"))
    )
    dtype, group, description, ranks = (
        text if isinstance(text, str) else ""
        for text in map(args.get, ("dtype", "Process Group Name", "Process Group Description", "Process Group Ranks"))
    )
    return _packed(name, dtype, elements_in, elements_out, GroupOfRanks(group, description, size, ranks))


def _packed(name: str, dtype: str, elements_in: int | None, elements_out: int | None, group: GroupOfRanks) -> Signature:
    """The signature that is described in ``signature_of``."""
    shapes = tuple(None if count is None else (count,) for count in (elements_in, elements_out))
    return Signature(shapes, (dtype, dtype), (_MARK, name, *group))


def signature_in_group(name: str, inputs: Signature, group: GroupOfRanks) -> Signature:
    """The collective of a backend's range between the ranks of a group, packed like ``signature_of``. ``name``: of the
    range; ``inputs``: the recorded ones. The group's size gives the output of an all-gather and of a reduce-scatter."""
    collective = _of_range(Frame(FrameKind.COLLECTIVE, name, inputs))
    elements, elements_out = collective.elements_in, collective.elements_out
    if elements is not None and group.size:
        if collective.name == "all_gather":
            elements_out = elements * group.size
        elif collective.name == "reduce_scatter":
            elements_out = elements // group.size
    return _packed(collective.name, collective.dtype, elements, elements_out, group)


def collective_of(frames: Sequence[Frame]) -> Collective | None:
    """The collective of the innermost of these frames, which go from outer to inner; None if it is not of one.

    The sources, in this order:

    1. the signature of the kernel, or of the nearest ``record_param_comms`` around it;
    2. the nearest range of a backend (``nccl:all_reduce``), whose recorded inputs are the tensors that were sent;
    3. for a kernel, the name of torch's op around it, or the name of the NCCL kernel. Then only the name is known.
    """
    for frame in reversed(frames):
        if (collective := _of_signature(frame.signature)) is not None:
            return collective
    for frame in reversed(frames):
        if frame.kind == FrameKind.COLLECTIVE:
            return _of_range(frame)
    return _by_names(frames) if frames and frames[-1].kind == FrameKind.KERNEL else None


def _by_names(frames: Sequence[Frame]) -> Collective | None:
    """The collective by the names of the ops around a kernel, or by the name of the kernel."""
    for frame in reversed(frames):
        if frame.kind == FrameKind.OP and frame.name.startswith(C10D_OPS):
            return Collective(name_of_collective(frame.name))
    match = _NCCL_KERNEL.match(frames[-1].name)
    return Collective(name_of_collective(match[1].lower())) if match else None


def shows_collective(frame: Frame) -> bool:
    """Whether a frame alone shows that it is a collective: the range of a backend by its name, a kernel or the op
    ``record_param_comms`` by its signature."""
    return frame.kind == FrameKind.COLLECTIVE or _of_signature(frame.signature) is not None


def _of_signature(signature: Signature | None) -> Collective | None:
    """Unpack what ``signature_of`` packed; None for the signature of an op, and for none."""
    if signature is None or len(signature.shapes) != 2 or len(signature.scalars) != 6:
        return None
    mark, name, *group = signature.scalars
    if mark != _MARK:
        return None
    elements_in, elements_out = (None if shape is None else shape[0] for shape in signature.shapes)
    return Collective(name_of_collective(name), signature.dtypes[0], elements_in, elements_out, *group)


def _of_range(frame: Frame) -> Collective:
    """The collective of the range of a backend (``nccl:all_reduce``), with its size if the inputs were recorded."""
    name = name_of_collective(frame.name)
    signature = frame.signature or Signature((), ())
    tensors = [(shape, dtype) for shape, dtype in zip(signature.shapes, signature.dtypes) if dtype not in NO_TENSORS]
    dtypes = {dtype for _, dtype in tensors}
    shapes = [shape for shape, _ in tensors]
    are_known = all(shape is not None and all(type(size) is int and size >= 0 for size in shape) for shape in shapes)
    if len(dtypes) != 1 or not are_known:
        return Collective(name)
    (dtype,) = dtypes
    elements = sum(map(prod, shapes))
    dtype = _SCALAR_TYPES.get(dtype, dtype.removeprefix("c10::"))
    return Collective(name, dtype, elements, elements if name in _OUTPUT_AS_LARGE else None)


# The collective in which a recording ended


class Entered(NamedTuple):
    """How many ``times`` a layer (by its index, negative for none) called the collective ``name`` in a phase."""

    layer: int
    phase: str
    name: str
    times: int


@dataclass(frozen=True)
class Unfinished:
    """Where a rank was when its recording ended in the middle of a step.

    - ``ns``: how long the step had lasted by then. For the last ``since_ns`` the rank was in ``layer`` (by its index,
      negative for none), in ``phase``: in the operator ``name``, or between operators ("").
    - ``waits``: it waited in the collective ``name`` that the layer had called.
    - ``entered``: the collectives that the rank called in the step, in the order of their first calls.
    - ``began_before``: the step had begun before this recording, in the cycle before it, if there was one.
    """

    rank: int
    ns: int
    since_ns: int
    layer: int
    phase: str
    name: str = ""
    waits: bool = False
    entered: tuple[Entered, ...] = ()
    began_before: bool = False

    def __add__(self, cycle: Unfinished) -> Unfinished:
        """The step at the end of the next cycle: if it had begun before that, it is this one."""
        if not cycle.began_before:
            return cycle
        times = sums_by_key((call[:3], call.times) for call in (*self.entered, *cycle.entered))
        entered = tuple(Entered(*key, count) for key, count in times.items())
        return replace(cycle, ns=self.ns + cycle.ns, entered=entered, began_before=self.began_before)

    def renumbered(self, to: Sequence[int]) -> Unfinished:
        entered = tuple(call._replace(layer=to[call.layer]) for call in self.entered)
        return replace(self, layer=to[self.layer], entered=entered)

    def check(self, layers: int) -> None:
        demand_layer(self, layers)
        for call in self.entered:
            demand_layer(call, layers)


class UnfinishedPart(PerRank):
    """The unfinished steps as a part of a run. A step that is in several cycles is one."""

    def scaled(self, value: tuple[Unfinished, ...], scale: Scale) -> tuple[Unfinished, ...]:
        return value

    def added(self, before: tuple[Unfinished, ...], cycle: tuple[Unfinished, ...]) -> tuple[Unfinished, ...]:
        earlier = {step.rank: step for step in before}
        return tuple(earlier[step.rank] + step if step.rank in earlier else step for step in cycle)
