"""Numbers as text in flops-profiler's format; None becomes ``–``."""

from __future__ import annotations

from torchprof.integrations.figures import UNKNOWN_TEXT, scaled

_NUMBERS = {"G": 1e9, "M": 1e6, "K": 1e3, "": 1.0}
_MACS = {"GMACs": 1e9, "MMACs": 1e6, "KMACs": 1e3, "MACs": 1.0}
_PARAMS = {"M": 1e6, "k": 1e3, "": 1.0}
_RATES = {"TFLOPS": 1e12, "GFLOPS": 1e9, "MFLOPS": 1e6, "KFLOPS": 1e3, "FLOPS": 1.0}


def number_text(number: int | None) -> str:
    return scaled(number, _NUMBERS)


def macs_text(number: int | None) -> str:
    return scaled(number, _MACS)


def params_text(number: int | None) -> str:
    return scaled(number, _PARAMS)


def duration_text(ns: float | None) -> str:
    if ns is None:
        return UNKNOWN_TEXT
    for size, unit in ((1e9, "s"), (1e6, "ms")):
        if ns > size:  # 1 s is 1000 ms
            return f"{round(ns / size, 2)} {unit}"
    return f"{round(ns / 1e3, 2)} us" if ns else "0.0"


def rate_text(flops: float | None, ns: float | None) -> str:
    """Floating-point operations per second."""
    if flops is None or ns is None or (flops and not ns):
        return UNKNOWN_TEXT
    return scaled(flops / ns * 1e9 if ns else 0.0, _RATES)
