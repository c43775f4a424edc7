"""What a collective was called on: how many bytes, and between which ranks, from what a trace says of its kernels."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

from torchprof.run.words import Frame, Signature

COLLECTIVE_ARGS = (
    "Collective name",
    "In msg nelems",
    "Out msg nelems",
    "dtype",
    "Process Group Name",
    "Process Group Description",
    "Group size",
    "Process Group Ranks",
)
"""The keys of a trace event's ``args`` that are read here.

Written by torch for the op ``record_param_comms``, and by Kineto for the kernels that it launches
(``torch/csrc/profiler/util.h``, ``libkineto/src/output_json.cpp``); older versions write fewer of them. What differs
from call to call of one collective (``Seq``, addresses of tensors) is left out: each call would be a row of its own.
"""

_MARK = "collective"
_NO_TENSORS = ("", "Scalar", "ScalarList")  # what torch calls the types of inputs that are none
_NO_COLLECTIVES = ("wait", "init")  # recorded in the same way: waiting for one, and making a group

_ELEMENT_BYTES = {
    **dict.fromkeys(("Byte", "Char", "Bool", "QInt8", "QUInt8", "Bits8"), 1),
    **dict.fromkeys(("Float8_e5m2", "Float8_e4m3fn", "Float8_e5m2fnuz", "Float8_e4m3fnuz", "Float8_e8m0fnu"), 1),
    **dict.fromkeys(("Short", "Half", "BFloat16", "UInt16", "Bits16"), 2),
    **dict.fromkeys(("Int", "Float", "ComplexHalf", "UInt32", "QInt32"), 4),
    **dict.fromkeys(("Long", "Double", "ComplexFloat", "UInt64"), 8),
    "ComplexDouble": 16,
}
"""By the names that ``c10::toString`` gives the types (``c10/core/ScalarType.h``); those that pack several elements
into one byte are not among them."""

_SPELLED_IN_C = {
    "unsigned char": "Byte",
    "signed char": "Char",
    "bool": "Bool",
    "short": "Short",
    "short int": "Short",
    "int": "Int",
    "long": "Long",
    "long int": "Long",
    "float": "Float",
    "double": "Double",
    "complex<c10::Half>": "ComplexHalf",
    "complex<float>": "ComplexFloat",
    "complex<double>": "ComplexDouble",
    "unsigned short": "UInt16",
    "short unsigned int": "UInt16",
    "unsigned int": "UInt32",
    "unsigned long": "UInt64",
    "long unsigned int": "UInt64",
}
"""The same types as an op's dims have them; all others are spelled alike there, after ``c10::``."""

_NCCL_KERNEL = re.compile(r"nccl(?:Dev)?(?:Kernel_)?(AllReduce|AllGather|ReduceScatter|Broadcast|Reduce)(?![a-z])")
"""The names of NCCL's kernels, and of RCCL's, that carry out one collective alone ("ncclDevKernel_AllReduce_Sum_f32_…",
"ncclAllReduceRingLLKernel_sum_f32" before NCCL 2.9). "SendRecv" and "Generic" may be any."""

_GIVES_AS_MUCH = ("all_reduce", "broadcast", "reduce", "send", "recv")  # what comes out is as large as what goes in


class Collective(NamedTuple):
    """One exchange between ranks.

    ``name`` is the same wherever it was read ("all_reduce", see ``name_of_collective``), ``elements_in`` and
    ``elements_out`` of type ``dtype`` ("Float") are what this rank gave and got. ``group`` is the name of the group of
    ranks ("0"), ``description`` what it is for ("default_pg"), ``size`` how many ranks it has, ``ranks`` which, as text
    ("[0, 1]"; long lists have "..." in them). None, and "" of a text: not known.
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
    def element_bytes(self) -> int | None:
        return _ELEMENT_BYTES.get(self.dtype)

    @property
    def bytes_in(self) -> int | None:
        return self._nbytes(self.elements_in)

    @property
    def bytes_out(self) -> int | None:
        return self._nbytes(self.elements_out)

    def _nbytes(self, elements: int | None) -> int | None:
        if elements == 0:
            return 0
        size = self.element_bytes
        return None if elements is None or size is None else elements * size


def signature_of(args: Mapping[str, Any]) -> Signature | None:
    """What the ``args`` of a trace's event say of a collective, as the ``Signature`` of its frame: an event is a kernel
    or the op ``record_param_comms``. None where they name none.

    Only ``collective_of`` knows how it is laid out: shapes ``((elements in,), (elements out,))``, the type twice, and
    the scalars ``("collective", name, group, description, size, ranks)``. An op's signature has as many scalars as
    shapes, or none: so the two cannot be taken for each other.
    """
    name = args.get("Collective name")
    if not isinstance(name, str) or not name or name in _NO_COLLECTIVES:
        return None
    shapes = tuple(
        None if number is None else (number,) for number in _numbers(args, "In msg nelems", "Out msg nelems")
    )
    (size,) = _numbers(args, "Group size")
    dtype, group, description, ranks = (
        _text(args, key) for key in ("dtype", "Process Group Name", "Process Group Description", "Process Group Ranks")
    )
    return Signature(shapes, (dtype, dtype), (_MARK, name, group, description, size, ranks))


def _numbers(args: Mapping[str, Any], *keys: str) -> list[int | None]:
    """Whole numbers from 0 on; None for what is missing or something else."""
    values = [args.get(key) for key in keys]
    return [value if type(value) is int and value >= 0 else None for value in values]


def _text(args: Mapping[str, Any], key: str) -> str:
    value = args.get(key)
    return value if isinstance(value, str) else ""


def collective_of(frames: Sequence[Frame]) -> Collective | None:
    """Which collective the innermost of these frames, outer to inner, is of: None where it is of none.

    A kernel's own signature says it, else that of the nearest ``record_param_comms`` around it, else the nearest range
    of a backend (``nccl:all_reduce``), where the tensors in its dims are what went in. Where there is none of these, a
    kernel is of the collective that torch's op around it asks for, or that NCCL's name for it says: its name alone is
    known then.
    """
    for frame in reversed(frames):
        found = _recorded(frame)
        if found is not None:
            return found
    for frame in reversed(frames):
        if _is_range(frame):
            return _of_range(frame)
    return _named(frames) if frames and frames[-1].kind == "kernel" else None


def _named(frames: Sequence[Frame]) -> Collective | None:
    """What the names around a kernel say, and its own."""
    for frame in reversed(frames):
        if frame.kind == "op" and frame.name.startswith(ASKS):
            return Collective(name_of_collective(frame.name))
    found = _NCCL_KERNEL.match(frames[-1].name)
    return Collective(name_of_collective(found[1].lower())) if found else None


def tells_collective(frame: Frame) -> bool:
    """Whether a frame by itself says that it is a collective: a kernel or the op ``record_param_comms`` by what it was
    called on, the range of a backend by its name."""
    return _is_range(frame) or _recorded(frame) is not None


def _is_range(frame: Frame) -> bool:
    return frame.kind == "collective"


def _recorded(frame: Frame) -> Collective | None:
    """What ``signature_of`` laid out; None where the frame has another's signature, or none."""
    signature = frame.signature
    if signature is None or len(signature.shapes) != 2 or len(signature.scalars) != 6:
        return None
    mark, name, group, description, size, ranks = signature.scalars
    if mark != _MARK:
        return None
    elements_in, elements_out = (None if shape is None else shape[0] for shape in signature.shapes)
    return Collective(
        name_of_collective(name), signature.dtypes[0], elements_in, elements_out, group, description, size, ranks
    )


def _of_range(frame: Frame) -> Collective:
    """What the range of a backend says: ``nccl:all_reduce``, and which tensors went in where dims were recorded."""
    name = name_of_collective(frame.name)
    signature = frame.signature or Signature((), ())
    tensors = [(shape, dtype) for shape, dtype in zip(signature.shapes, signature.dtypes) if dtype not in _NO_TENSORS]
    dtypes = {dtype for _, dtype in tensors}
    if len(dtypes) != 1 or not all(_is_known(shape) for shape, _ in tensors):
        return Collective(name)
    (dtype,) = dtypes
    elements = sum(prod(shape) for shape, _ in tensors)
    dtype = dtype.removeprefix("c10::")
    return Collective(name, _SPELLED_IN_C.get(dtype, dtype), elements, elements if name in _GIVES_AS_MUCH else None)


def _is_known(shape: Any) -> bool:
    return shape is not None and all(type(size) is int and size >= 0 for size in shape)


ASKS = "c10d::"
"""How the names of torch's ops begin that ask for an exchange (``torch/csrc/distributed/c10d/Ops.cpp``)."""

COLLECTIVES = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "barrier",
    "send",
    "recv",
)
"""The names of collectives, and of the two halves of a point-to-point exchange, as ``torch.distributed`` has them."""
COLLECTIVE_OP = re.compile("|".join(name.replace("_", "_?") for name in COLLECTIVES))
_NAMES = {name.replace("_", ""): name for name in COLLECTIVES}


def name_of_collective(name: str) -> str:
    """The one name that a collective has in all reports: "all_reduce" for "allreduce_coalesced", "nccl:all_reduce",
    "c10d::allreduce_" and "gloo:sparse_all_reduce". Names of anything else stay as they are, without the backend's.

    torch has a name of its own for each way to pass the tensors ("_allgather_base", "all_gather_into_tensor"), and
    others in its ops (``torch/csrc/distributed/c10d/Ops.cpp``), its ranges and its records (``ProcessGroupNCCL.cpp``).
    A barrier that NCCL carries out as "all_reduce_barrier" is a barrier.
    """
    found = COLLECTIVE_OP.search("barrier" if "barrier" in name else name)
    return _NAMES[found[0].replace("_", "")] if found else name.rpartition(":")[2]
