"""The types of tensors: all names that torch has for each, and its size.

Sources: ``c10/core/ScalarType.h`` (``c10::toString``), ``torch/utils/_dtype_abbrs.py``. In the inputs of operators,
the profiler has the compiler's name of the C++ type.
"""

from __future__ import annotations

from typing import NamedTuple


class Dtype(NamedTuple):
    """A type. ``name``: of ``torch.float32``, without "torch.". ``scalar_type``: in the arguments of collectives.
    ``nbytes``: of an element. ``short``: in the text of a graph, "" if unknown. ``recorded``: in the recorded inputs of
    operators. ``others``: what users may write."""

    name: str
    scalar_type: str
    nbytes: int
    short: str
    recorded: tuple[str, ...]
    others: tuple[str, ...] = ()


DTYPES = (
    Dtype("float32", "Float", 4, "f32", ("float",), ("fp32", "float")),
    Dtype("float16", "Half", 2, "f16", ("c10::Half",), ("fp16", "half")),
    Dtype("bfloat16", "BFloat16", 2, "bf16", ("c10::BFloat16",), ("bf16",)),
    Dtype("float64", "Double", 8, "f64", ("double",), ("fp64", "double")),
    Dtype("complex32", "ComplexHalf", 4, "c32", ("c10::complex<c10::Half>",)),
    Dtype("complex64", "ComplexFloat", 8, "c64", ("c10::complex<float>",)),
    Dtype("complex128", "ComplexDouble", 16, "c128", ("c10::complex<double>",)),
    Dtype("int64", "Long", 8, "i64", ("long int", "long")),
    Dtype("int32", "Int", 4, "i32", ("int",)),
    Dtype("int16", "Short", 2, "i16", ("short int", "short")),
    Dtype("int8", "Char", 1, "i8", ("signed char",)),
    Dtype("uint8", "Byte", 1, "u8", ("unsigned char",)),
    Dtype("bool", "Bool", 1, "b8", ("bool",)),
    Dtype("uint16", "UInt16", 2, "u16", ("short unsigned int", "unsigned short")),
    Dtype("uint32", "UInt32", 4, "u32", ("unsigned int",)),
    Dtype("uint64", "UInt64", 8, "u64", ("long unsigned int", "unsigned long")),
    Dtype("float8_e4m3fn", "Float8_e4m3fn", 1, "f8e4m3fn", ("c10::Float8_e4m3fn",)),
    Dtype("float8_e5m2", "Float8_e5m2", 1, "f8e5m2", ("c10::Float8_e5m2",)),
    Dtype("float8_e4m3fnuz", "Float8_e4m3fnuz", 1, "f8e4m3fnuz", ("c10::Float8_e4m3fnuz",)),
    Dtype("float8_e5m2fnuz", "Float8_e5m2fnuz", 1, "f8e5m2fnuz", ("c10::Float8_e5m2fnuz",)),
    Dtype("float8_e8m0fnu", "Float8_e8m0fnu", 1, "f8e8m0fnu", ("c10::Float8_e8m0fnu",)),
    Dtype("qint8", "QInt8", 1, "", ("c10::qint8",)),
    Dtype("quint8", "QUInt8", 1, "", ("c10::quint8",)),
    Dtype("qint32", "QInt32", 4, "", ("c10::qint32",)),
    Dtype("bits8", "Bits8", 1, "", ("c10::bits8",)),
    Dtype("bits16", "Bits16", 2, "", ("c10::bits16",)),
)
"""Without types that pack several elements into a byte."""


def recorded_as(*names: str) -> frozenset[str]:
    """The names that types have in recorded inputs; ``names``: as in torch."""
    return frozenset(recorded for dtype in DTYPES if dtype.name in names for recorded in dtype.recorded)
