"""Trace files written by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def write(path: Path, trace: dict[str, Any]) -> Path:
    path.write_text(json.dumps(trace, default=float))
    return path


def session(start: float, lasted: float) -> dict[str, Any]:
    return {**trace_event("Trace", "PyTorch Profiler (0)", start, lasted), "pid": "Spans", "tid": "PyTorch Profiler"}


def trace_event(category: str, name: str, start: float, lasted: float, thread: int = 1, **args: Any) -> dict[str, Any]:
    about = {key.replace("_", " "): value for key, value in args.items()}
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "pid": 1,
        "tid": thread,
        "ts": start,
        "dur": lasted,
        "args": about,
    }
