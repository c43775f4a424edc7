"""Trace files written by hand, and their events as torch's profiler writes them.

Keyword arguments are the args of an event, with _ for each blank in a key.
"""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path
from typing import Any


def write(path: Path, trace: dict[str, Any]) -> Path:
    path.write_text(json.dumps(trace, default=float))
    return path


def session(start: float, lasted: float) -> dict[str, Any]:
    """The event of the profiler's session."""
    return trace_event("Trace", "PyTorch Profiler (0)", start, lasted, pid="Spans", tid="PyTorch Profiler")


def trace_event(
    category: str, name: str, start: Any, lasted: Any, *, pid: Any = 1, tid: Any = 1, **args: Any
) -> dict[str, Any]:
    """An event with a duration; times in us."""
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "pid": pid,
        "tid": tid,
        "ts": start,
        "dur": lasted,
        "args": _with_blanks(args),
    }


def op(name: str, start: Any, lasted: Any, **more: Any) -> dict[str, Any]:
    """An operator."""
    return trace_event("cpu_op", name, start, lasted, **more)


def kernel(name: str, start: Any, lasted: Any, *, category: str = "kernel", **args: Any) -> dict[str, Any]:
    """Work of a device."""
    return trace_event(category, name, start, lasted, **{"pid": 0, "tid": 7, **args})


def memory_event(start: Any, nbytes: Any, *, tid: Any = 1, **args: Any) -> dict[str, Any]:
    """An allocation, or a deallocation if ``nbytes`` is negative."""
    about = {"Bytes": nbytes, **_with_blanks(args)}
    return {"ph": "i", "s": "t", "name": "[memory]", "pid": 1, "tid": tid, "ts": start, "args": about}


def arrow(number: int, which: str, start: Any, *, category: str = "fwdbwd", tid: Any = 1) -> dict[str, Any]:
    """One end of an arrow from an operator ("s") to the autograd node that it made ("f")."""
    return {"ph": which, "id": number, "pid": 1, "tid": tid, "ts": start, "cat": category, "name": "fwdbwd"}


def node(name: str, start: Any, lasted: Any, sequence: int, forward: int, **more: Any) -> list[dict[str, Any]]:
    """The engine's range around an autograd node, and the node."""
    about = {"Sequence_number": sequence, "Fwd_thread_id": forward} if sequence >= 0 else {}
    outer = op(f"autograd::engine::evaluate_function: {name}", start, lasted, **about, **more)
    return [outer, op(name, start + 1, lasted - 2, **about, **more)]


def exact_ns(microseconds: Any) -> int:
    """Exact for text and for ``Decimal``."""
    return int(Decimal(microseconds) * 1000)


def _with_blanks(args: dict[str, Any]) -> dict[str, Any]:
    return {key.replace("_", " "): value for key, value in args.items()}
