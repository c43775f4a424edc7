"""Amounts as users write them: ``24GB``, ``4.2G``, ``10k``, ``12ms``."""

from __future__ import annotations

import re
from fractions import Fraction

from torchprof.run.formats import Unit

UNITS = {
    Unit.TIME: {"ns": 1, "us": 1000, "µs": 1000, "ms": 10**6, "s": 10**9},
    Unit.BYTES: {"": 1, "B": 1, "KB": 2**10, "MB": 2**20, "GB": 2**30, "TB": 2**40},
    Unit.COUNT: {"": 1, "K": 1000, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15},
}
"""How large each unit is: in ns, in bytes, or a count. Bytes go by 1024, counts by 1000."""
EXAMPLES = {Unit.TIME: "12ms", Unit.BYTES: "1.5GB", Unit.COUNT: "4.2G"}
_PREFIXES = {"k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
_OTHER_SPELLINGS = {
    Unit.TIME: {"μs": 1000},  # with the Greek letter; the other one is the micro sign
    Unit.BYTES: _PREFIXES | {f"{prefix}ib": size for prefix, size in _PREFIXES.items()},
    Unit.COUNT: {},
}
_AMOUNT = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-zµμ]*)")


def parse_amount(text: str, unit: Unit) -> Fraction | None:
    """The amount in ns, in bytes, or as a count; None if the text is not such an amount.

    Units of bytes and counts may be written in small letters; those of time are as in ``UNITS``.
    """
    match = _AMOUNT.fullmatch(text.strip())
    if match is None:
        return None
    spelled = str if unit is Unit.TIME else str.lower
    sizes = {spelled(name): size for name, size in (UNITS[unit] | _OTHER_SPELLINGS[unit]).items()}
    size = sizes.get(spelled(match[2]))
    return None if size is None else Fraction(match[1]) * size
