"""The text of trace files in all layouts, valid and broken."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from torchprof import TorchprofError
from torchprof.traces.file import TraceFile

NASTY = [
    "}, {",
    '"}, {"ph": "X',
    "\\",
    '\\"',
    "C:\\work",
    "]}",
    "[{",
    "\n\t\x01",
    "é",
    "漢字",
    "🔥🔥",
    "nan",
    ": inf,",
    "",
]
EVENTS: list[dict[str, Any]] = [
    {"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "ts": 0.5, "args": {"name": "python"}},
    *(
        {"ph": "X", "cat": "cpu_op", "name": name, "pid": 1, "tid": 2, "ts": 1e12 + at / 8, "dur": 1.125, "args": {}}
        for at, name in enumerate(NASTY)
    ),
    {"ph": "X", "name": "dims", "args": {"Input Dims": [[1, 2], []], "of": [{"name": 1}, {"name": 2}], "x": None}},
    {},
    {"ph": "i", "s": "g", "name": "Record Window End", "pid": "", "tid": "", "ts": 9},
]
BEFORE = {
    "schemaVersion": 1,
    "deviceProperties": [{"id": 0, "name": "A100"}, {"id": 1, "name": "}, {"}],
    "with_stack": 1,
}
AFTER = {
    "traceName": "a/trace.json",
    "distributedInfo": {"rank": 0, "pg_config": [{"pg": "0"}, {"pg": "1"}]},
    "end": 12,
}


def as_torch_writes(document: dict[str, Any]) -> str:
    """The layout of torch, which differs from that of json: blank lines, commas at the start of lines."""
    around = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in document.items()]
    place = list(document).index("traceEvents")
    events = ",\n".join(
        "  {\n    "
        + ",\n    ".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in event.items())
        + "\n    \n  }"
        for event in document["traceEvents"]
    )
    around[place] = f'"traceEvents": [\n    \n{events}\n  ]'
    return "\n {\n    " + ",\n    \n    ".join(around) + " }"


LAYOUTS: dict[str, Callable[[Any], str]] = {
    "torch": as_torch_writes,
    "json": json.dumps,
    "compact": lambda document: json.dumps(document, separators=(",", ":")),
    "indented": lambda document: json.dumps(document, indent=1),
    "wide": lambda document: json.dumps(document, indent=60),
    "sorted": lambda document: json.dumps(document, sort_keys=True),
    "unescaped": lambda document: json.dumps(document, ensure_ascii=False),
    "Windows": lambda document: json.dumps(document, indent=2).replace("\n", "\r\n"),
    "BOM": lambda document: "\ufeff" + json.dumps(document) + "\n",
}


def read_file(path: Path) -> tuple[list[dict[str, Any]], dict[str, Any], list[str]]:
    file = TraceFile(path)
    events = [event for piece in file.pieces() for event in piece]
    return events, file.header, [*map(str, file.warnings)]


def write_file(folder: Path, text: str | bytes, name: str = "trace.json") -> Path:
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def trace_text(*events: str) -> str:
    return '{"schemaVersion": 1, "traceEvents": [\n' + ",\n".join(events) + '\n], "traceName": "trace.json"}'


def assert_refused(path: Path, *words: str) -> None:
    with pytest.raises(TorchprofError) as caught:
        read_file(path)
    for word in (*words, str(path)):
        assert word in str(caught.value)


SMALL = {**BEFORE, "traceEvents": EVENTS[:3] + EVENTS[-3:], **AFTER}

BROKEN = [
    '{"ph": "X", "name": "a "quoted" word", "ts": 1}',
    '{"ph": "X", "name": "ends in a backslash\\", "ts": 1}',
    '{"ph": "X", "name" "a", "ts": 1}',
    '{"ph": "X", "name": "a", "ts": 1, "args": {"x": 1}',
    '{"ph": "X", "name": "a", "ts": , "args": {"x": 1}}',
    '{"ph": "X", "name": "a", "ts": ' + "1" * 5000 + "}",
    '{"ph": "X", "name": "a", "args": ' + "[" * 100_000 + "}",
]
