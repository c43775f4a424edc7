"""Figures as text, in the units that flops-profiler and DeepSpeed print. An unknown figure is None, and ``–`` as text.

The functions ``…_to_string`` are DeepSpeed's. ``units``: one of the units that the function knows; None selects the
largest that fits. ``precision``: the maximum number of decimals. They raise TorchprofError for other units.
"""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Real
from typing import Any

from torchprof.errors import TorchprofError, suggest

UNKNOWN_TEXT = "–"

# Largest first.
_NUMBERS = {"G": 1e9, "M": 1e6, "K": 1e3, "": 1.0}
_PARAMS = {"M": 1e6, "k": 1e3, "": 1.0}
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
_MULTIPLY_ADDS = {f"{prefix}Mac": size for prefix, size in _NUMBERS.items()}  # DeepSpeed's
MACS = {f"{prefix}MACs": size for prefix, size in _NUMBERS.items()}  # flops-profiler's
RATES = {"TFLOPS": 1e12, **{f"{prefix}FLOPS": size for prefix, size in _NUMBERS.items()}}


def macs_to_string(macs: float | None, units: str | None = None, precision: int = 2) -> str:
    """Multiply-adds as ``429.25 KMac``. ``units``: GMac, MMac, KMac or Mac."""
    return text_in_units(macs, _MULTIPLY_ADDS, units, precision)


def flops_to_string(flops: float | None, units: str | None = None, precision: int = 2) -> str:
    """The same as ``macs_to_string``: this tool's "flops" are multiply-adds. With ``units`` TFLOPS, GFLOPS, MFLOPS,
    KFLOPS or FLOPS, the number is in operations per second; it is not doubled."""
    return text_in_units(flops, _MULTIPLY_ADDS if units is None else _MULTIPLY_ADDS | RATES, units, precision)


def params_to_string(params_num: float | None, units: str | None = None, precision: int = 2) -> str:
    """A number of parameters as ``61.71 k`` or ``850``. ``units``: M, k (or K) or the empty string."""
    return text_in_units(params_num, _PARAMS if units is None else _PARAMS | {"K": 1e3}, units, precision)


def duration_to_string(duration: float | None, units: str | None = None, precision: int = 2) -> str:
    """Seconds as ``984.67 us``. ``units``: s, ms or us."""
    return text_in_units(duration, _SECONDS, units, precision)


def number_to_string(num: float | None, units: str | None = None, precision: int = 2) -> str:
    """Any number as ``61.71 K``. ``units``: G, M, K or the empty string."""
    return text_in_units(num, _NUMBERS, units, precision)


def text_in_units(value: float | None, sizes: Mapping[str, float], units: str | None = None, precision: int = 2) -> str:
    """A value in one of the units; if none is given, in the first one that is not larger than it, or else in the last.
    A whole number in a unit of 1 stays as it is."""
    if value is None:
        return UNKNOWN_TEXT
    if not is_number(value):
        raise TorchprofError(f"{value!r} is not a number: give one that get_model_profile(as_strings=False) returns.")
    if units is None:
        units = next((unit for unit, size in sizes.items() if abs(value) >= size), [*sizes][-1])
    elif units not in sizes:
        raise TorchprofError(f"units={units!r} are not known here. {suggest(str(units), sizes)}")
    number = value if sizes[units] == 1 and isinstance(value, int) else round(value / sizes[units], precision)
    return f"{number} {units}".rstrip()


def is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def share_text(part: float | None, whole: float | None, decimals: int = 2) -> str:
    """``part / whole`` in percent; 0 if the whole is 0."""
    if part is None or whole is None:
        return UNKNOWN_TEXT
    return f"{part / whole if whole else 0:.{decimals}%}"


def at_least(text: str, is_lower_bound: bool) -> str:
    """Put ``≥`` before a figure that is a lower bound; an unknown figure stays ``–``."""
    return f"≥ {text}" if is_lower_bound and text != UNKNOWN_TEXT else text


def per_second(work: float | None, seconds: float | None) -> float | None:
    """``work / seconds``; None if it is unknown, or if no time was measured for some work."""
    if work is None or seconds is None or (work and not seconds):
        return None
    return work / seconds if seconds else 0.0
