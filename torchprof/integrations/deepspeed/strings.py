"""Numbers as text, as DeepSpeed writes them."""

from __future__ import annotations

from collections.abc import Mapping

from torchprof import TorchprofError
from torchprof.integrations.deepspeed.arguments import choose, is_number
from torchprof.integrations.figures import UNKNOWN_TEXT, scaled

_MACS = {"GMac": 1e9, "MMac": 1e6, "KMac": 1e3, "Mac": 1.0}
_FLOPS = {"TFLOPS": 1e12, "GFLOPS": 1e9, "MFLOPS": 1e6, "KFLOPS": 1e3, "FLOPS": 1.0}
_PARAMS = {"M": 1e6, "k": 1e3, "": 1.0}
_NUMBERS = {"G": 1e9, "M": 1e6, "K": 1e3, "": 1.0}
_TIMES = {"s": 1.0, "ms": 1e-3, "us": 1e-6}


def macs_to_string(macs: float | None, units: str | None = None, precision: int = 2) -> str:
    """Multiply-adds as ``429.25 KMac``. ``units``: GMac, MMac, KMac or Mac; None selects the largest that fits.

    In all functions of this file, the number None is written as ``–``, and ``precision`` is the maximum number of
    decimals. They raise TorchprofError for other units.
    """
    return _text(macs, units, precision, _MACS)


def flops_to_string(flops: float | None, units: str | None = None, precision: int = 2) -> str:
    """The same as ``macs_to_string``: this tool's "flops" are multiply-adds. With ``units`` TFLOPS, GFLOPS, MFLOPS,
    KFLOPS or FLOPS, the number is in operations per second; it is not doubled."""
    return _text(flops, units, precision, _MACS, _FLOPS)


def params_to_string(params_num: float | None, units: str | None = None, precision: int = 2) -> str:
    """A number of parameters as ``61.71 k`` or ``850``. ``units``: M, k (or K) or the empty string."""
    return _text(params_num, units, precision, _PARAMS, {"K": 1e3})


def duration_to_string(duration: float | None, units: str | None = None, precision: int = 2) -> str:
    """Seconds as ``984.67 us``. ``units``: s, ms or us."""
    return _text(duration, units, precision, _TIMES)


def number_to_string(num: float | None, units: str | None = None, precision: int = 2) -> str:
    """Any number as ``61.71 K``. ``units``: G, M, K or the empty string."""
    return _text(num, units, precision, _NUMBERS)


def _text(
    value: float | None,
    units: str | None,
    precision: int,
    choices: Mapping[str, float],
    more: Mapping[str, float] | None = None,
) -> str:
    """A value in ``units``; if they are None, in one of ``choices`` as ``scaled`` has it."""
    if value is None:
        return UNKNOWN_TEXT
    if not is_number(value):
        raise TorchprofError(f"{value!r} is not a number: give one that get_model_profile(as_strings=False) returns.")
    if units is None:
        return scaled(value, choices, precision)
    known = {**choices, **(more or {})}
    if units not in known:
        raise TorchprofError(f"units={units!r} are not known here. {choose(str(units), known)}")
    return scaled(value, {units: known[units]}, precision)
