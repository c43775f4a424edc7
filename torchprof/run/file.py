"""A run as JSON: writes the file, reads it, and checks what it reads. The format is in docs/run-file.md."""

from __future__ import annotations

import gzip
import json
import zlib
from array import array
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import astuple, replace
from itertools import chain
from pathlib import Path
from secrets import token_hex
from typing import Any, BinaryIO

from torchprof.errors import TorchprofError
from torchprof.run.cost import Cost
from torchprof.run.layers import Layers
from torchprof.run.meta import Meta
from torchprof.run.part import demand, fields_of, read_list
from torchprof.run.rows import Rows, rows_of_lines
from torchprof.run.run import RUN_PARTS, Run
from torchprof.run.warnings import RunWarning, StoredWarnings
from torchprof.run.words import FORWARD, OUTSIDE, PHASES

SCHEMA = 3
"""The version of the format. It increases when an older reader would misread a newer file."""

_FORMAT = "torchprof-run"
_WITH_IDLE_TIME = 3  # the first schema whose rows have the time in which nothing ran

_json = json.JSONEncoder(separators=(",", ":"), default=array.tolist).encode


def json_of_run(run: Run, *, strip: bool = False, computed: Mapping[str, Any] | None = None) -> str:
    """The text of the file of a run. ``strip`` leaves out the names of files, machines and jobs. ``computed``: more
    keys, for other programs. ``load`` ignores them: their values follow from the run."""
    return "".join(_pieces(run, strip, computed or {}))


def stripped(run: Run) -> Run:
    """The run without the names of files, machines and jobs."""
    return replace(run, metas=tuple(meta.stripped() for meta in run.metas))


def write_json(run: Run, file: BinaryIO, *, strip: bool = False, zipped: bool = False) -> None:
    """Write a run to an open file, gzipped if wanted."""
    opened: Any = gzip.GzipFile("", "wb", fileobj=file, mtime=0) if zipped else nullcontext(file)
    with opened as written:
        for piece in _pieces(run, strip, {}):
            written.write(piece.encode())


def _pieces(run: Run, strip: bool, computed: Mapping[str, Any]) -> Iterator[str]:
    """The text of a run's file in pieces: for a thousand ranks it is too large for memory."""
    before = "{"
    for name, value in chain(_content(run, strip), computed.items()):
        yield f"{before}{_json(name)}:"
        before = ","
        if isinstance(value, Iterator):
            yield "["
            for number, entry in enumerate(value):
                yield f"{',' if number else ''}{_json(entry)}"
            yield "]"
        elif isinstance(value, Mapping):
            for number, (key, entry) in enumerate(value.items()):
                yield f"{',' if number else '{'}{_json(key)}:{_json(entry)}"
            yield "}"
        else:
            yield _json(value)
    yield "}"


def _content(run: Run, strip: bool) -> Iterator[tuple[str, Any]]:
    """The keys of the file and their values. A list that may be very long is an iterator."""
    warnings = StoredWarnings()
    named = "" if strip else "; the names of the machine, the script and the job"
    yield "format", _FORMAT
    yield "schema", SCHEMA
    yield "holds", f"layer paths, operator and kernel names, shapes, costs; no tensor data{named}"
    yield "metas", (meta.to_json(warnings) for meta in (stripped(run) if strip else run).metas)
    yield "stored_warnings", warnings.to_json(run.layers)
    yield "layers", map(fields_of, run.layers)
    yield from run.rows.to_json()
    for name, part in RUN_PARTS.items():
        yield name, part.to_json(getattr(run, name))


def run_of(data: bytes, path: str) -> Run:
    """The run in the JSON of a file, gzipped or not; ``path`` is its name in error messages. Raises TorchprofError like
    ``load``."""
    return run_of_document(document_of(data, path), path)


def comparison_of(data: bytes, path: str) -> Run:
    """``run_of(data, path).to_compare(layers=True)``, but faster: what is not compared is not read, and not checked.
    Raises TorchprofError like ``run_of``."""
    return run_of_document(document_of(data, path), path, _without_what_is_not_compared).to_compare(layers=True)


def _without_what_is_not_compared(document: dict[str, Any]) -> dict[str, Any]:
    """The JSON of a run of which only that is left that is compared. Raises KeyError or TypeError if it is damaged."""
    not_compared = ("frames", "within", "shared", "signatures", "devices", "memory", "device_times")
    return {
        **document,
        **{name: [] for name in not_compared},
        "rows": {name: [] for name in Rows.COLUMNS},
        "timeline": None,
        "samples": [sample for sample in document["samples"] if sample["layer"] == OUTSIDE],
    }


def document_of(data: bytes, path: str) -> dict[str, Any]:
    """The JSON of a file, gzipped or not, as Python values. Raises TorchprofError if it is not that of a run."""
    try:
        document = json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)
    except (ValueError, EOFError, OSError, zlib.error, RecursionError) as error:
        raise TorchprofError(f"{path} is not a saved run: it does not read as JSON ({error}).") from error
    if not isinstance(document, dict) or document.get("format") != _FORMAT:
        if isinstance(document, dict) and "traceEvents" in document:
            raise TorchprofError(
                f"{path} is a trace, not a saved run: torchprof.from_trace(path) reads it, and "
                "`python -m torchprof show FILE -o run.json` makes a saved run of it."
            )
        raise TorchprofError(f"{path} is JSON, but not a saved run: write one with `prof.run.save(path)`.")
    return document


def run_of_document(
    document: dict[str, Any], path: str, part: Callable[[dict[str, Any]], dict[str, Any]] | None = None
) -> Run:
    """The run of the JSON of a file. ``part``: what of it is read, None for all. Raises TorchprofError if it is damaged
    or was written by a newer torchprof."""
    schema = document.get("schema")
    if type(schema) is not int or not 1 <= schema <= SCHEMA:
        raise TorchprofError(
            f"{path} has schema {schema}; this torchprof reads up to {SCHEMA}. Read it with a newer torchprof."
        )
    try:
        run = _run(part(document) if part else document)
        return run if schema >= _WITH_IDLE_TIME else _with_idle_time(run)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError, RecursionError) as error:
        raise TorchprofError(f"{path} is a damaged run file: {type(error).__name__} {error}.") from error


def _run(document: dict[str, Any]) -> Run:
    """The run of a file. Raises as described in ``checked_json`` if the file contradicts itself."""
    document = {"pipelines": [], **document}  # runs of torchprof 2.7 have none
    layers = Layers.from_json(document["layers"])
    names = [layer.name for layer in layers]
    warnings = [RunWarning.from_json(stored, names) for stored in read_list(document["stored_warnings"])]
    metas = tuple(Meta.from_json(stored, warnings) for stored in read_list(document["metas"]))
    ranks = {meta.rank for meta in metas}
    demand(bool(ranks), "no metadata")
    rows = Rows.from_json(document, layers)
    named = {*rows.columns["rank"]}.union(*(layer.ranks for layer in layers))
    demand(named <= ranks, f"no metadata of some of the ranks {named!r:.80}")
    parts = {name: part.from_json(document[name], len(layers), ranks) for name, part in RUN_PARTS.items()}
    return Run(metas, layers, rows, **parts)


def _with_idle_time(run: Run) -> Run:
    """The run of an older file, with the time in which nothing ran in the row outside all layers."""
    idle = {meta.rank: meta.wall_ns - busy for meta in run.metas for device, busy in meta.busy_ns if device == "cpu"}
    lines: dict[tuple[int, ...], tuple[int, ...]] = {
        (OUTSIDE, PHASES.index(FORWARD), 0, 0, 0, 0, rank): (0, *astuple(Cost(cpu_ns=ns)))
        for rank, ns in idle.items()
        if ns > 0
    }
    return replace(run, rows=run.rows.added(rows_of_lines(run.layers, lines, [()], ["cpu"], [()], [()])))


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write, under another name until the block ends: then it replaces ``path``. An error removes it. A pipe
    or a terminal is written directly. Raises OSError like ``open``."""
    if path.exists() and not path.is_file():
        with path.open("wb") as file:
            yield file
        return
    # Processes of other machines, in containers with the same process number, may write a file of this name, too.
    written = path.with_name(f".{path.name}.{token_hex(4)}.part")
    try:
        with written.open("wb") as file:
            yield file
        written.replace(path)
    except BaseException:
        written.unlink(missing_ok=True)
        raise
