"""A run as a file: JSON (docs/run-file.md) or Parquet (docs/job-folder.md). Files are checked when they are read.
pyarrow is optional, so it is imported when it is used. ``whole_file`` writes files that are whole at any time."""

from __future__ import annotations

import glob
import gzip
import json
import os
import platform
import re
import shutil
import zlib
from array import array
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import astuple, replace
from functools import cache
from importlib.util import find_spec
from io import BytesIO
from itertools import chain
from pathlib import Path
from secrets import token_hex
from typing import Any, BinaryIO, TypeAlias

from torchprof.errors import TorchprofError
from torchprof.run.formats import format_memory
from torchprof.run.layers import Layers
from torchprof.run.measures import FIELDS, Cost
from torchprof.run.meta import Meta, RunWarning, StoredWarnings
from torchprof.run.part import demand, fields_of, read_list
from torchprof.run.rows import Rows, rows_of_lines
from torchprof.run.run import RUN_PARTS, Run
from torchprof.run.words import (
    BETWEEN_OPS,
    FORWARD,
    LAUNCHED_BEFORE,
    NOT_SELECTED_NAME,
    OUTSIDE,
    OUTSIDE_NAME,
    PHASES,
    FrameKind,
    is_left_over,
    phase_of,
)

SCHEMA = 4
"""The version of the format. It increases when an older reader would misread a newer file."""
_FORMAT = "torchprof-run"
_WITH_IDLE_TIME = 3  # the first schema whose rows have the time in which nothing ran
_OF_DAMAGE = (LookupError, TypeError, ValueError, AttributeError, OverflowError, RecursionError)
"""What reading a damaged file may raise."""
_json = json.JSONEncoder(separators=(",", ":"), default=array.tolist).encode


def json_of_run(run: Run, *, strip: bool = False, computed: Mapping[str, Any] | None = None) -> str:
    """The text of the file of a run. ``strip`` leaves out the names of files, machines and jobs. ``computed``: more
    keys, for other programs. ``run_of`` ignores them: their values follow from the run."""
    return "".join(_pieces(run, strip, computed or {}))


def stripped(run: Run) -> Run:
    """The run without the names of files, machines, jobs and variables, and without source lines."""
    return replace(
        run,
        metas=tuple(meta.stripped() for meta in run.metas),
        memory=tuple(memory.stripped() for memory in run.memory),
        passes=tuple(passes.stripped() for passes in run.passes),
        rows=run.rows.without_source(),
    )


def write_json(run: Run, file: BinaryIO, *, strip: bool = False, zipped: bool = False) -> None:
    """Write the text of ``json_of_run`` to an open file, in pieces."""
    maybe_zipped: Any = gzip.GzipFile("", "wb", fileobj=file, mtime=0) if zipped else nullcontext(file)
    with maybe_zipped as stream:
        for piece in _pieces(run, strip, {}):
            stream.write(piece.encode())


def zipped_json(run: Run, level: int) -> bytes:
    """The gzipped file of a run. ``level``: of compression, 1 to 9."""
    return gzip.compress(json_of_run(run).encode(), level, mtime=0)


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
    run = stripped(run) if strip else run
    yield "metas", (meta.to_json(warnings) for meta in run.metas)
    yield "stored_warnings", warnings.to_json(run.layers)
    yield "layers", map(fields_of, run.layers)
    yield from run.rows.to_json()
    for name, part in RUN_PARTS.items():
        yield name, part.to_json(getattr(run, name))


def run_of(data: bytes, path: str) -> Run:
    """The run in the JSON of a file, gzipped or not; ``path`` is its name in error messages. Raises TorchprofError
    if it is not the file of a run, is damaged or was written by a newer torchprof."""
    return _run_of_document(_document_of(data, path), path)


def comparison_of(data: bytes, path: str) -> Run:
    """``run_of(data, path).to_compare(layers=True)``, but faster: what is not compared is not read, and not checked.
    Raises TorchprofError like ``run_of``."""
    return _run_of_document(_document_of(data, path), path, _without_uncompared).to_compare(layers=True)


def _without_uncompared(document: dict[str, Any]) -> dict[str, Any]:
    """The JSON of a run without what is not compared between ranks. Raises KeyError or TypeError if it is damaged."""
    not_compared = ("frames", "within", "shared", "signatures", "devices", "memory", "device_times")
    return {
        **document,
        **{name: [] for name in not_compared},
        "rows": {name: [] for name in Rows.COLUMNS},
        "timeline": None,
        "samples": [sample for sample in document["samples"] if sample["layer"] == OUTSIDE],
    }


MOST_UNPACKED = "TORCHPROF_MOST_UNPACKED"
"""The environment variable with the most bytes that a file may have when it is unpacked."""
_MOST_BYTES = 8 * 2**30
_BYTES_AT = {b",": 48, b"[": 64, b"{": 232}
"""Bytes of memory for each such character of JSON, without the text: for a value of a list, a list, and an object."""
BYTES_OF_JSON = 32
"""Bytes of memory for a character of JSON that is mostly lists and objects."""
_PIECE = 1 << 20


def most_unpacked() -> int:
    """The most bytes that a file may have when it is unpacked: 8 GiB, and no more than half of the free memory, or what
    the environment variable says. Raises TorchprofError if that is not a number."""
    if stated := os.environ.get(MOST_UNPACKED):
        if not stated.isdecimal():
            raise TorchprofError(f"{MOST_UNPACKED}={stated} is not a number of bytes, such as {_MOST_BYTES}.")
        return int(stated)
    return min([_MOST_BYTES, *(free // 2 for free in free_bytes())])


def free_bytes(machine: Path = Path("/proc/meminfo"), container: Path = Path("/sys/fs/cgroup")) -> Iterator[int]:
    """The bytes that this machine has free, and those that its container has, as far as Linux tells: the files are
    described in proc_meminfo(5), and in the kernel's "Control Group v2", "Memory Interface Files"."""
    with suppress(OSError, LookupError, ValueError):
        [available] = re.findall(r"^MemAvailable: +(\d+) kB$", machine.read_text(), re.MULTILINE)
        yield int(available) * 1024
    with suppress(OSError, LookupError, ValueError):
        most, used = (int((container / f"memory.{name}").read_text()) for name in ("max", "current"))
        [cached] = re.findall(r"^inactive_file (\d+)$", (container / "memory.stat").read_text(), re.MULTILINE)
        yield max(most - used + int(cached), 0)


def refuse_unpacked(path: object, size: int, most: int) -> None:
    """Raises TorchprofError if the content of a file is larger than ``most``."""
    if size > most:
        raise TorchprofError(
            f"{path} has {format_memory(size)} or more when it is unpacked, and the limit is {format_memory(most)}: "
            f"half of the free memory, and at most {format_memory(_MOST_BYTES)}. If you trust the file, set "
            f"{MOST_UNPACKED} to a larger number of bytes."
        )


def unzipped(data: bytes, path: str) -> bytes:
    """The content of a gzipped file. Raises TorchprofError if it is too large, and like ``gzip.decompress``."""
    pieces, size, most = [], 0, most_unpacked()
    with gzip.GzipFile(fileobj=BytesIO(data)) as file:
        while piece := file.read(_PIECE):
            pieces.append(piece)
            size += len(piece)
            refuse_unpacked(path, size, most)
    return b"".join(pieces)


def _document_of(data: bytes, path: str) -> dict[str, Any]:
    """The JSON of a file, gzipped or not, as Python values. Raises TorchprofError if it is not that of a run."""
    try:
        text = unzipped(data, path) if data[:2] == b"\x1f\x8b" else data
        values = sum(size * text.count(sign) for sign, size in _BYTES_AT.items())
        refuse_unpacked(path, len(text) + values, most_unpacked())
        document = json.loads(text)
    except (ValueError, EOFError, OSError, zlib.error, RecursionError) as error:
        raise TorchprofError(f"{path} is not a saved run: it does not read as JSON ({error!s:.300}).") from error
    if isinstance(document, dict) and document.get("format") == _FORMAT:
        return document
    if isinstance(document, dict) and "traceEvents" in document:
        raise TorchprofError(
            f"{path} is a trace, not a saved run: torchprof.from_trace(path) reads it, and "
            "`python -m torchprof show FILE -o run.json` makes a saved run of it."
        )
    raise TorchprofError(f"{path} is JSON, but not a saved run: write one with `prof.run.save(path)`.")


def _run_of_document(
    document: dict[str, Any], path: str, reduced: Callable[[dict[str, Any]], dict[str, Any]] | None = None
) -> Run:
    """The run of the JSON of a file. Raises TorchprofError if it is damaged or was written by a newer torchprof.
    ``reduced``: leaves out of it what is not read. It is called here because it fails for a damaged document, too."""
    schema = document.get("schema")
    if type(schema) is not int or not 1 <= schema <= SCHEMA:
        raise TorchprofError(
            f"{path} has schema {schema!s:.80}; this torchprof reads up to {SCHEMA}. Read it with a newer torchprof."
        )
    try:
        run = _checked_run(reduced(document) if reduced else document)
        return run if schema >= _WITH_IDLE_TIME else _with_idle_time(run)
    except _OF_DAMAGE as error:
        why = f"{type(error).__name__} {error!s:.300}"
        raise TorchprofError(f"{path} is a damaged run file: {why}.") from error


def _checked_run(document: dict[str, Any]) -> Run:
    """The run of a document. Raises as described in ``run.part`` if the document is damaged or contradicts itself."""
    document = {"pipelines": [], "passes": [], "trials": [], **document}  # older runs have none
    layers = Layers.from_json(document["layers"])
    names = [layer.name for layer in layers]
    warnings = [RunWarning.from_json(stored, names) for stored in read_list(document["stored_warnings"])]
    metas = tuple(Meta.from_json(stored, warnings) for stored in read_list(document["metas"]))
    ranks = {meta.rank for meta in metas}
    demand(bool(ranks) and len(ranks) == len(metas), f"metadata of {len(metas)} runs of {len(ranks)} ranks")
    rows = Rows.from_json(document, layers)
    named = {*rows.columns["rank"]}.union(*(layer.ranks for layer in layers))
    demand(named <= ranks, f"no metadata of some of the ranks {named!r:.80}")
    parts = {name: part.from_json(document[name], len(layers), ranks) for name, part in RUN_PARTS.items()}
    devices = [(memory.rank, memory.device) for memory in parts["memory"]]
    demand(len({*devices}) == len(devices), "two memories of one device of a rank")
    return Run(metas, layers, rows, **parts)


def _with_idle_time(run: Run) -> Run:
    """The run of an older file, with the time in which nothing ran in the row outside all layers."""
    lines: dict[tuple[int, ...], tuple[int, ...]] = {
        (OUTSIDE, PHASES.index(FORWARD), 0, 0, 0, 0, meta.rank): (0, *astuple(Cost(cpu_ns=meta.wall_ns - busy)))
        for meta in run.metas
        for device, busy in meta.busy_ns
        if device == "cpu" and meta.wall_ns > busy
    }
    return replace(run, rows=run.rows.added(rows_of_lines(run.layers, lines, devices=["cpu"])))


# Parquet

PARQUET = b"PAR1"
"""The first bytes of a Parquet file."""

_RUN = b"torchprof-run"
"""The key in the metadata of the file of a run. Its value is a run file without the calls and costs of the rows."""
_MEASURED_WITH = {"collective_ns": "cpu_ns"}  # never requested alone
_LONGEST_METADATA = 2**31 - 1  # bytes: a run of many ranks may have more than the 100 MB that pyarrow reads by default

TEXT, TEXTS, INT, BYTES = "text", "list of texts", "integer", "bytes"
"""The types of columns."""
ParquetTable: TypeAlias = Mapping[str, tuple[str, Sequence[Any]]]
"""A table by the names of its columns: the type of each, and its values; None for what is unknown."""


def write_parquet(run: Run, file: BinaryIO, *, strip: bool = False) -> None:
    """Write a run to an open file: its rows are the columns, everything else is in the metadata of the file. ``strip``
    leaves out the names of files, machines and jobs. Raises TorchprofError without pyarrow."""
    run = stripped(run) if strip else run
    keys = {name: run.rows.columns[name] for name in Rows.KEYS}
    metadata = BytesIO()
    write_json(replace(run, rows=replace(run.rows, columns=keys)), metadata, strip=strip, zipped=True)
    write_table(table_of_rows(run), file, {_RUN: b64encode(metadata.getvalue())})


def run_of_parquet(data: bytes, path: str) -> Run:
    """The run in a file that ``write_parquet`` wrote; ``path`` is its name in error messages. Raises TorchprofError if
    it is not the file of a run, is damaged or was written by a newer torchprof, and without pyarrow."""
    parquet = _pyarrow().parquet
    with _damaged(path):
        file = parquet.ParquetFile(BytesIO(data), thrift_string_size_limit=_LONGEST_METADATA)
        if (stored := (file.metadata.metadata or {}).get(_RUN)) is None:
            raise TorchprofError(
                f"{path} is a Parquet file, but not a saved run: write one with `prof.run.save('run.parquet')`."
            )
        refuse_unpacked(path, _size_of(file), most_unpacked())
        document = _document_of(b64decode(stored), path)
        lines = len(document["rows"][Rows.KEYS[0]])
        demand(file.metadata.num_rows == lines, f"{file.metadata.num_rows} rows of costs for {lines} rows")
        types = {str(column.type) for column in file.schema_arrow if column.name in Rows.VALUES}
        demand(types <= {"int64"}, f"costs of the types {types}")
        values = file.read([*Rows.VALUES]).to_pydict()
        document["rows"].update({name: array("q", [value or 0 for value in values[name]]) for name in Rows.VALUES})
    return _run_of_document(document, path)


def table_of_rows(run: Run) -> ParquetTable:
    """The rows of a run, one line for each. A cost that its rank did not measure is None, as are the costs of a sampled
    line of Python, which has none."""
    rows, columns = run.rows, run.rows.columns
    layers, classes = names_of_layers(run)
    # By the number of a chain of frames:
    frame_names = [[frame.name for frame in frames] for frames in rows.frames]
    operators = [frames[-1][:2] if frames else (FrameKind.OP, BETWEEN_OPS) for frames in rows.frames]
    left_over = [*map(is_left_over, rows.frames)]
    has_cost = [kind != FrameKind.PYTHON for kind, _ in operators]
    layer_and_chain = [*zip(columns["layer"], columns["frames"])]
    table: dict[str, tuple[str, Sequence[Any]]] = {
        "rank": (INT, columns["rank"]),
        "layer": (TEXT, [LAUNCHED_BEFORE if left_over[number] else layers[layer] for layer, number in layer_and_chain]),
        "kind": (TEXT, [classes[layer] for layer in columns["layer"]]),
        "phase": (TEXT, [phase_of(layer, PHASES[phase]) for layer, phase in zip(columns["layer"], columns["phase"])]),
        "frames": (TEXTS, [frame_names[number] for number in columns["frames"]]),
        "operator": (TEXT, [operators[number][1] for number in columns["frames"]]),
        "operator_kind": (TEXT, [str(operators[number][0]) for number in columns["frames"]]),
        "device": (TEXT, [rows.devices[device] for device in columns["device"]]),
        "calls": (INT, columns["calls"]),
    }
    for name in FIELDS:
        measured = {meta.rank for meta in run.metas if _MEASURED_WITH.get(name, name) in meta.measured}
        values = zip(columns[name], columns["rank"], columns["frames"])
        table[name] = (
            INT,
            [value if value or (rank in measured and has_cost[number]) else None for value, rank, number in values],
        )
    return table


def names_of_layers(run: Run) -> tuple[list[str], list[str | None]]:
    """The names and the classes of the layers, by index. Negative indices, of no layer, count from the end."""
    names = [*(layer.name for layer in run.layers), NOT_SELECTED_NAME, OUTSIDE_NAME]
    return names, [*(layer.kind or None for layer in run.layers), None, None]


def write_table(table: ParquetTable, file: BinaryIO, metadata: Mapping[bytes, bytes] | None = None) -> None:
    """Write a table to an open file. ``metadata``: of the file. Raises TorchprofError without pyarrow."""
    pyarrow = _pyarrow()
    text = pyarrow.string()
    types = {TEXT: text, TEXTS: pyarrow.list_(text), INT: pyarrow.int64(), BYTES: pyarrow.binary()}
    columns = []
    for kind, values in table.values():
        try:
            columns.append(pyarrow.array(values, types[kind]))
        except UnicodeEncodeError:  # an undecodable byte in the name of a file, of which Python makes a lone surrogate
            columns.append(pyarrow.array(_in_unicode(values), types[kind]))
    whole = pyarrow.Table.from_arrays(columns, names=[*table])
    # pyarrow would write the metadata of a schema twice: as it is, and in its own copy of the schema.
    with pyarrow.parquet.ParquetWriter(file, whole.schema, compression="zstd", store_schema=False) as writer:
        writer.write_table(whole)
        writer.add_key_value_metadata(metadata or {})


def _in_unicode(value: Any) -> Any:
    """Texts, in lists of any depth, with escapes in place of lone surrogates."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    return value if value is None else [*map(_in_unicode, value)]


def check_pyarrow() -> None:
    """Raises TorchprofError if pyarrow is not installed. Does not import it."""
    if find_spec("pyarrow") is None:
        raise TorchprofError(
            'Parquet needs pyarrow, which is not installed here: pip install pyarrow, or pip install "torchprof[job]".'
        )


def _pyarrow() -> Any:
    check_pyarrow()
    import pyarrow
    import pyarrow.parquet

    return pyarrow


def read_line(data: bytes, path: str, names: Sequence[str]) -> list[Any]:
    """The values of some columns of a Parquet file with one line; ``path`` and errors: as of ``run_of_parquet``."""
    parquet = _pyarrow().parquet
    with _damaged(path):
        file = parquet.ParquetFile(BytesIO(data))
        demand(file.metadata.num_rows == 1, f"{file.metadata.num_rows} lines in place of one")
        refuse_unpacked(path, _size_of(file), most_unpacked())
        (line,) = file.read([*names]).to_pylist()
        return [line[name] for name in names]


def _size_of(file: Any) -> int:
    """The bytes of the columns of a Parquet file before they were compressed, as its metadata says."""
    return sum(file.metadata.row_group(number).total_byte_size for number in range(file.metadata.num_row_groups))


@contextmanager
def _damaged(path: str) -> Iterator[None]:
    """Errors of pyarrow, and those of values that are not as expected, become a TorchprofError that names the file."""
    try:
        yield
    except TorchprofError:
        raise
    except (_pyarrow().ArrowException, OSError, *_OF_DAMAGE) as error:
        why = f"{type(error).__name__} {error!s:.300}"
        raise TorchprofError(f"{path} is a damaged Parquet file: {why}.") from error


# Files that are whole at any time: the old content, or the new one

_LONGEST = 100  # characters of the names in it
_PART = re.compile(r"\.(?P<name>.+)\.(?P<host>[\w-]+)-(?P<process>\d+)-[0-9a-f]{8}\.part")
"""The names of files that are being written: the final name, the machine, the process, and a random number."""


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write, under another name until the block ends: then it replaces ``path``, which is the old file or the
    new one at any time. An error removes it. Those that a process of this machine left when it was killed are removed.
    A pipe or a terminal is written directly. Raises OSError like ``open``."""
    path = Path(os.path.realpath(path))  # write to the target of a link
    if path.exists() and not path.is_file():
        with path.open("wb") as file:
            yield file
        return
    _remove_parts(path)
    written = path.with_name(f".{path.name[:_LONGEST]}.{host()}-{os.getpid()}-{token_hex(4)}.part")
    try:
        with written.open("wb") as file:
            yield file
        with suppress(OSError):
            shutil.copymode(path, written)
        written.replace(path)
    except BaseException:
        written.unlink(missing_ok=True)
        raise


@cache
def host() -> str:
    """The name of this machine, and of the space of process numbers on it, as a part of the name of a file: containers
    of one name may have processes of one number."""
    space = ""
    with suppress(OSError, AttributeError):
        space = str(Path("/proc/self/ns/pid").readlink())
    return re.sub(r"[^\w-]", "_", f"{platform.node()[:_LONGEST]}{space.removeprefix('pid:')}") or "_"


def _remove_parts(path: Path) -> None:
    """Remove what processes of this machine that no longer exist have left of this file."""
    with suppress(OSError):
        name = path.name[:_LONGEST]
        for file in path.parent.glob(f".{glob.escape(name)}.*.part"):
            match = _PART.fullmatch(file.name)
            if match and (match["name"], match["host"]) == (name, host()) and not exists(int(match["process"])):
                file.unlink(missing_ok=True)


def exists(process: int) -> bool:
    """Whether there is a process with this number on this machine; True if it cannot be known."""
    if os.name == "nt":  # there, this signal is Ctrl-C
        return True
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):  # of another user, or no such number: leave its file alone
        return True
    return True
