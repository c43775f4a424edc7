"""A run as a Parquet file, and the tables that a job folder has of each rank. docs/job-folder.md describes the columns.
pyarrow is optional, so it is imported when it is used."""

from __future__ import annotations

import gzip
from array import array
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from io import BytesIO
from typing import Any, BinaryIO, TypeAlias

from torchprof.errors import TorchprofError
from torchprof.run.cost import FIELDS
from torchprof.run.file import document_of, json_of_run, run_of, run_of_document, write_json
from torchprof.run.lockstep import NOT_RECORDED, WORK
from torchprof.run.rows import Rows
from torchprof.run.run import Run
from torchprof.run.words import (
    BETWEEN_OPS,
    LAUNCHED_BEFORE,
    NOT_SELECTED_NAME,
    OUTSIDE_NAME,
    PHASES,
    FrameKind,
    is_left_over,
    phase_of,
)

PARQUET = b"PAR1"
"""The first bytes of a Parquet file."""

_TEXT, _TEXTS, _INT, _BYTES = "text", "list of texts", "integer", "bytes"

ParquetTable: TypeAlias = Mapping[str, tuple[str, Sequence[Any]]]
"""A table by the names of its columns: the type of each, and its values; None for what is unknown."""

_RUN = b"torchprof-run"
"""The key in the metadata of the file of a run. Its value is a run file without the calls and costs of the rows."""
_VALUES = ("calls", *FIELDS)
_WHOLE = "run"  # the column with the run file of a rank
_STEPS = {
    "rank": _INT,
    "layer": _TEXT,
    "phase": _TEXT,
    "device": _TEXT,
    "what": _TEXT,
    "group_name": _TEXT,
    "group_description": _TEXT,
    "group_size": _INT,
    "group_ranks": _TEXT,
    "number": _INT,
    "ns": _INT,
}
_LEVEL = 6  # of gzip: the highest one takes twice as long for 1 % less
_MEASURED_WITH = {"collective_ns": "cpu_ns"}  # never requested alone
_LONGEST_METADATA = 2**31 - 1  # bytes: a run of many ranks may have more than the 100 MB that pyarrow reads by default


# A run in one file


def write_parquet(run: Run, file: BinaryIO, *, strip: bool = False) -> None:
    """Write a run to an open file: its rows are the columns, everything else is in the metadata of the file. ``strip``
    leaves out the names of files, machines and jobs. Raises TorchprofError without pyarrow."""
    keys = {name: run.rows.columns[name] for name in Rows.KEYS}
    without_values = replace(run, rows=replace(run.rows, columns=keys))
    metadata = BytesIO()
    write_json(without_values, metadata, strip=strip, zipped=True)
    write_table(table_of_rows(run), file, {_RUN: b64encode(metadata.getvalue())})


def run_of_parquet(data: bytes, path: str) -> Run:
    """The run in a file that ``write_parquet`` wrote; ``path`` is its name in error messages. Raises TorchprofError if
    it is not the file of a run, is damaged or was written by a newer torchprof, and without pyarrow."""
    parquet = _pyarrow().parquet
    with _damaged(path):
        file = parquet.ParquetFile(BytesIO(data), thrift_string_size_limit=_LONGEST_METADATA)
        stored = (file.metadata.metadata or {}).get(_RUN)
        if stored is None:
            raise TorchprofError(
                f"{path} is a Parquet file, but not a saved run: write one with `prof.run.save('run.parquet')`."
            )
        document = document_of(b64decode(stored), path)
        values = file.read([*_VALUES]).to_pydict()
        document["rows"].update({name: array("q", [value or 0 for value in values[name]]) for name in _VALUES})
    return run_of_document(document, path)


# The tables of a rank


def table_of_rank(run: Run) -> ParquetTable:
    """How the only rank of a run was recorded, what is compared between ranks, and the whole run, the last two as
    gzipped run files. It has one line."""
    meta = run.meta
    line: dict[str, tuple[str, Any]] = {
        "rank": (_INT, meta.rank),
        "world_size": (_INT, meta.world_size),
        "job": (_TEXT, meta.job or None),
        "host": (_TEXT, meta.machine or None),
        "device": (_TEXT, meta.device or "cpu"),
        "models": (_TEXTS, meta.model),
        "measured": (_TEXTS, meta.measured),
        "cycles": (_INT, meta.cycles),
        "steps": (_INT, meta.steps),
        "wall_ns": (_INT, meta.wall_ns),
        "process_cpu_ns": (_INT, meta.process_cpu_ns),
        "run_delay_ns": (_INT, meta.run_delay_ns),
        "compared": (_BYTES, _zipped(run.to_compare())),
        _WHOLE: (_BYTES, _zipped(run)),
    }
    return {name: (kind, [value]) for name, (kind, value) in line.items()}


def _zipped(run: Run) -> bytes:
    return gzip.compress(json_of_run(run).encode(), _LEVEL, mtime=0)


def run_of_rank(data: bytes, path: str, read: Callable[[bytes, str], Run] = run_of) -> Run:
    """The run that ``table_of_rank`` has, or what ``read`` reads of its file. ``path`` and errors: as of
    ``run_of_parquet``."""
    (whole,) = _values_of_rank(data, path, _WHOLE)
    return read(whole, path)


def job_of_rank(data: bytes, path: str) -> tuple[int, str]:
    """How many ranks the job of this rank has, and its name, "" if unknown, from what ``table_of_rank`` has. ``path``
    and errors: as of ``run_of_parquet``."""
    world_size, job = _values_of_rank(data, path, "world_size", "job")
    return world_size, job or ""


def _values_of_rank(data: bytes, path: str, *names: str) -> list[Any]:
    """The values of these columns in the only line of ``table_of_rank``."""
    parquet = _pyarrow().parquet
    with _damaged(path):
        (line,) = parquet.read_table(BytesIO(data), columns=[*names]).to_pylist()
        return [line[name] for name in names]


def table_of_rows(run: Run) -> ParquetTable:
    """The rows of a run, one line for each. A cost that its rank did not measure is None, as are the costs of a sampled
    line of Python, which has none."""
    rows, columns = run.rows, run.rows.columns
    layers, kinds = _names_of_layers(run)
    frames = [[frame.name for frame in chain] for chain in rows.frames]
    operators = [chain[-1][:2] if chain else (FrameKind.OP, BETWEEN_OPS) for chain in rows.frames]
    left_over = [*map(is_left_over, rows.frames)]
    of_row = [*zip(columns["layer"], columns["phase"], columns["frames"])]
    table: dict[str, tuple[str, Sequence[Any]]] = {
        "rank": (_INT, columns["rank"]),
        "layer": (_TEXT, [LAUNCHED_BEFORE if left_over[chain] else layers[layer] for layer, _, chain in of_row]),
        "kind": (_TEXT, [kinds[layer] for layer, _, _ in of_row]),
        "phase": (_TEXT, [phase_of(layer, PHASES[phase]) for layer, phase, _ in of_row]),
        "frames": (_TEXTS, [frames[chain] for _, _, chain in of_row]),
        "operator": (_TEXT, [operators[chain][1] for _, _, chain in of_row]),
        "operator_kind": (_TEXT, [str(operators[chain][0]) for _, _, chain in of_row]),
        "device": (_TEXT, [rows.devices[device] for device in columns["device"]]),
        "calls": (_INT, columns["calls"]),
    }
    has_cost = [kind != FrameKind.PYTHON for kind, _ in operators]
    for name in FIELDS:
        measured = {meta.rank for meta in run.metas if _MEASURED_WITH.get(name, name) in meta.measured}
        values = zip(columns[name], columns["rank"], columns["frames"])
        table[name] = (
            _INT,
            [value if value or (rank in measured and has_cost[chain]) else None for value, rank, chain in values],
        )
    return table


def table_of_steps(run: Run) -> ParquetTable:
    """The single times in the lockstep of the only rank of a run, one line for each."""
    layers, _ = _names_of_layers(run)
    columns: dict[str, list[Any]] = {name: [] for name in _STEPS}
    for key, lockstep in run.lockstep.items():
        is_of_layer = key.is_collective or key.what == WORK
        group = key.group or NOT_RECORDED
        of_each = (
            run.meta.rank,
            layers[key.layer] if is_of_layer else None,
            phase_of(key.layer, key.phase) if is_of_layer else None,
            key.device,
            key.what,
            group.name or None,
            group.description or None,
            group.size,
            group.ranks or None,
        )
        count = len(lockstep.last_ns)
        for name, value in zip(_STEPS, of_each):
            columns[name] += [value] * count
        columns["number"] += lockstep.times or range(count)
        columns["ns"] += lockstep.last_ns
    return {name: (kind, columns[name]) for name, kind in _STEPS.items()}


def _names_of_layers(run: Run) -> tuple[list[str], list[str | None]]:
    """The names and the classes of the layers, by index. Negative indices, of no layer, count from the end."""
    names = [*(layer.name for layer in run.layers), NOT_SELECTED_NAME, OUTSIDE_NAME]
    return names, [*(layer.kind or None for layer in run.layers), None, None]


# pyarrow


def write_table(table: ParquetTable, file: BinaryIO, metadata: Mapping[bytes, bytes] | None = None) -> None:
    """Write a table to an open file. ``metadata``: of the file. Raises TorchprofError without pyarrow."""
    pyarrow = _pyarrow()
    types = {
        _TEXT: pyarrow.string(),
        _TEXTS: pyarrow.list_(pyarrow.string()),
        _INT: pyarrow.int64(),
        _BYTES: pyarrow.binary(),
    }
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


@contextmanager
def _damaged(path: str) -> Iterator[None]:
    """Errors of pyarrow, and those of values that are not as expected, become a TorchprofError that names the file."""
    try:
        yield
    except TorchprofError:
        raise
    except (_pyarrow().ArrowException, OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise TorchprofError(f"{path} is a damaged Parquet file: {type(error).__name__} {error}.") from error
