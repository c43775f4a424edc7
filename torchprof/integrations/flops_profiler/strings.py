"""Numbers as text in flops-profiler's format; None becomes ``–``."""

from __future__ import annotations

from torchprof.integrations.figures import UNKNOWN_TEXT


def _scaled(number: float, *units: tuple[float, str]) -> str | None:
    """The number with two decimals, in the first unit that is not larger than it; None if all units are larger."""
    for size, unit in units:
        if number >= size:
            return f"{round(number / size, 2)} {unit}"
    return None


def number_text(number: int | None) -> str:
    if number is None:
        return UNKNOWN_TEXT
    return _scaled(number, (1e9, "G"), (1e6, "M"), (1e3, "K")) or str(number)


def macs_text(number: int | None) -> str:
    if number is None:
        return UNKNOWN_TEXT
    return _scaled(number, (1e9, "GMACs"), (1e6, "MMACs"), (1e3, "KMACs")) or f"{number} MACs"


def params_text(number: int | None) -> str:
    if number is None:
        return UNKNOWN_TEXT
    return _scaled(number, (1e6, "M"), (1e3, "k")) or str(number)


def duration_text(ns: float | None) -> str:
    if ns is None:
        return UNKNOWN_TEXT
    for size, unit in ((1e9, "s"), (1e6, "ms")):
        if ns > size:
            return f"{round(ns / size, 2)} {unit}"
    return f"{round(ns / 1e3, 2)} us" if ns else "0.0"


def rate_text(flops: float | None, ns: float | None) -> str:
    """Floating-point operations per second."""
    if flops is None or ns is None or (flops and not ns):
        return UNKNOWN_TEXT
    rate = flops / ns * 1e9 if ns else 0.0
    units = ((1e12, "TFLOPS"), (1e9, "GFLOPS"), (1e6, "MFLOPS"), (1e3, "KFLOPS"))
    return _scaled(rate, *units) or f"{round(rate, 2)} FLOPS"


def at_least(text: str, is_lower_bound: bool) -> str:
    """Put ``≥`` before a figure that is a lower bound; an unknown figure stays ``–``."""
    return f"≥ {text}" if is_lower_bound and text != UNKNOWN_TEXT else text
