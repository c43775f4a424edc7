"""When torch.compile compiled in this process, how long each part took, and why, from torch's own records."""

from __future__ import annotations

import re
import sys
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from torchprof.run.meta import Compilation
from torchprof.run.words import BACKWARD, FORWARD

_VERSION = re.compile(r"[!\d/]+: ")
"""The version of a region that a reason is about; torch puts it first."""
_ADDRESS = re.compile(r", \d{9,}")
_CACHE_HITS = tuple(
    f"{cache}_{place}_cache_hit_count" for cache in ("inductor_fx", "aotautograd") for place in ("local", "remote")
)


def compilations(step_starts: Sequence[int]) -> tuple[Compilation, ...]:
    """The compilations of this process, in the order of time, as far as torch still has them: it keeps the last 64.

    ``step_starts``: when the recording began, and each of its steps after the first, in ns since 1970. Empty if this
    torch does not tell.
    """
    if "torch._dynamo.convert_frame" not in sys.modules:
        return ()
    compilations: list[Compilation] = []
    with suppress(Exception):  # these are private names of torch, which another version may change
        from torch._dynamo.utils import get_compilation_metrics

        compilations += _read(get_compilation_metrics(), step_starts)
    return tuple(sorted(compilations, key=lambda compilation: compilation.began_ns))


def _read(metrics: Sequence[Any], step_starts: Sequence[int]) -> Iterator[Compilation]:
    functions: dict[str, tuple[str, str, int]] = {}  # by the first number of a compile id
    for metric in metrics:
        began, name = getattr(metric, "start_time", None), str(metric.compile_id)
        if began is None:  # torch 2.4 does not tell it of a backward
            continue
        is_forward = getattr(metric, "is_forward", None) is not False
        of = name.partition("/")[0]
        if metric.co_name is not None:
            functions[of] = str(metric.co_name), str(metric.co_filename), int(metric.co_firstlineno)
        began_ns = round(began * 1e9)
        inner = _ns(metric, "inductor_compile_time_s", 1e9)
        whole = _ns(metric, "entire_frame_compile_time_s", 1e9) or _ns(metric, "duration_us", 1e3) or inner
        backend = min(_ns(metric, "backend_compile_time_s", 1e9), whole) if is_forward else whole
        inductor = min(inner, backend)
        kernels = min(_ns(metric, "triton_compile_time_us", 1e3), inductor)
        step = bisect_right(step_starts, began_ns) - 1
        yield Compilation(
            name,
            FORWARD if is_forward else BACKWARD,
            *functions.get(of, ("", "", 0)),
            None if step < 0 else step,
            _in_short(str(getattr(metric, "recompile_reason", None) or "")),
            _first_line(metric.fail_reason) if metric.fail_type is not None else "",
            whole,
            whole - backend,
            backend - inductor,
            inductor - kernels,
            kernels or None,  # torch does not tell it where they are compiled in the same thread
            _from_cache(metric),
            began_ns,
        )


def _ns(metric: Any, name: str, unit_ns: float) -> int:
    """A time of a compilation; 0 if it has no such part. ``unit_ns``: the unit of the record."""
    return round(unit_ns * (getattr(metric, name, None) or 0))


def _from_cache(metric: Any) -> bool | None:
    """Whether the graph of a compilation was in a cache of torch; None if this torch does not tell."""
    counts = [getattr(metric, name, None) for name in _CACHE_HITS]
    return None if all(count is None for count in counts) else any(counts)


def _in_short(reason: str) -> str:
    """torch's reason without the version that it is about, the line of code, and the addresses of objects."""
    return _ADDRESS.sub("", _VERSION.sub("", " ".join(reason.split()), count=1).partition(" # ")[0])


def _first_line(text: Any) -> str:
    return next((line.strip() for line in str(text).splitlines() if line.strip()), "unknown")
