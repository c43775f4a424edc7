"""Saves and loads runs: in one file, whose name chooses its format, or in a job folder with a table for each rank."""

from __future__ import annotations

import glob
import gzip
import json
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from os import PathLike
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING, Any

from torchprof.errors import TorchprofError, some
from torchprof.run.file import (
    BYTES,
    INT,
    PARQUET,
    TEXT,
    TEXTS,
    ParquetTable,
    check_pyarrow,
    comparison_of,
    exists,
    host,
    names_of_layers,
    read_line,
    run_of,
    run_of_parquet,
    stripped,
    table_of_rows,
    whole_file,
    write_json,
    write_parquet,
    write_table,
    zipped_json,
)
from torchprof.run.formats import ranks_in_words
from torchprof.run.lockstep import NOT_RECORDED, WORK, LockstepKey
from torchprof.run.merge import merge
from torchprof.run.processes import check_processes, in_processes, paused_gc
from torchprof.run.run import Run
from torchprof.run.words import phase_of

if TYPE_CHECKING:
    import duckdb


def write(run: Run, path: str | PathLike[str], *, strip: bool = False) -> None:
    """Save a run as ``Run.save`` describes. The old contents of the file stay until the new ones are complete."""
    if names_job_folder(path):
        _add_to_job(stripped(run) if strip else run, Path(path))
        return
    path = Path(path)
    if not path.parent.is_dir():
        raise TorchprofError(f"{path} cannot be written: the folder {path.parent} does not exist. Make it first.")
    with whole_file(path) as file:
        if path.suffix == ".parquet":
            write_parquet(run, file, strip=strip)
        else:
            write_json(run, file, strip=strip, zipped=path.suffix == ".gz")


def _content_of(path: str | PathLike[str]) -> bytes:
    """Raises TorchprofError for anything but a file: reading a device or a pipe may never end."""
    if (path := Path(path)).exists() and not (path.is_file() or path.is_dir()):
        raise TorchprofError(f"{path} is not a file: a run is read from a file that `run.save` wrote.")
    return path.read_bytes()


@paused_gc()
def load(path: str | PathLike[str] | Iterable[str | PathLike[str]], *, processes: int = 1) -> Run:
    """Read a run that ``Run.save`` wrote; of a job folder, all ranks in one run. Does not import torch.

    Several paths, as those of the ranks of a job, make one run, which is what ``torchprof.merge`` makes of their runs.
    So many ``processes`` read them; one reads a single file, or a job folder. They are spawned, so a script that uses
    several must call this function below ``if __name__ == "__main__":``.

    Raises OSError if the file cannot be read; TorchprofError if it is not a run file, is damaged, or was written by a
    newer torchprof, for a Parquet file if pyarrow is not installed, and for runs that cannot be merged.
    """
    check_processes(processes)
    if not isinstance(path, (str, PathLike)):
        return merge(in_processes(load, [*path], processes))
    if is_job_folder(path):
        return open_job(path).run()
    data = _content_of(path)
    return (run_of_parquet if data.startswith(PARQUET) else run_of)(data, str(path))


@paused_gc()
def load_to_compare(path: str | PathLike[str]) -> Run:
    """``load(path).to_compare(layers=True)`` of a file, but faster. Raises TorchprofError and OSError like ``load``."""
    data = _content_of(path)
    if data.startswith(PARQUET):
        return run_of_parquet(data, str(path)).to_compare(layers=True)
    return comparison_of(data, str(path))


_START = 256  # bytes: the format of a run is named in the first of them


def is_run_file(path: str | PathLike[str]) -> bool:
    """Whether a file is a saved run, by its first bytes; any Parquet file may be one. Raises OSError like ``open``."""
    if not Path(path).is_file() and Path(path).exists():
        return False  # a pipe would wait for its writer
    with Path(path).open("rb") as file:
        start = file.read(len(PARQUET))
        if start == PARQUET:
            return True
        file.seek(0)
        try:
            start = (gzip.GzipFile(fileobj=file) if start[:2] == b"\x1f\x8b" else file).read(_START)
        except (OSError, EOFError, zlib.error):  # damaged: reading the file reports it
            return False
    return re.match(rb'(?:\xef\xbb\xbf)?\s*{\s*"format"\s*:\s*"torchprof-run"', start) is not None


# Job folders: a Parquet file for each rank and table

_MARK = "torchprof-job.json"  # the file by which a folder is known as a job folder
_FORMAT = "torchprof-job"
_SCHEMA = 1
_RANKS = "ranks"  # the table with a line for each rank
_FILE = re.compile(r"rank-(\d{6,})\.parquet")


class JobFolder:
    """The runs of the ranks of a job, in a folder of Parquet files, one for each rank and table: see
    docs/job-folder.md. ``torchprof.open_job`` opens one."""

    def __init__(self, path: str | PathLike[str]) -> None:
        self._path = Path(path)
        self._databases: dict[bool, duckdb.DuckDBPyConnection] = {}  # by whether queries reach other files
        _check(self._path)

    def __repr__(self) -> str:
        return f"<JobFolder {str(self._path)!r} of {len(self.ranks)} ranks>"

    @property
    def ranks(self) -> tuple[int, ...]:
        """The numbers of the ranks that are in the folder now, ascending."""
        return tuple(sorted(_ranks_in(self._path)))

    def run(self, ranks: Iterable[int] | None = None, *, left_out: LeftOut | None = None) -> Run:
        """One run of these ranks, of all without ``ranks``: what ``torchprof.merge`` makes of the runs as they were
        saved. They are read one at a time. With ``left_out``, damaged files are left out, and this function gets the
        error. Raises TorchprofError for a rank that is not in the folder, for none at all, and for a damaged file."""
        known = self.ranks
        wanted = known if ranks is None else tuple(ranks)
        missing = {*wanted} - {*known}
        if missing or not wanted:
            which = ranks_in_words(missing) if missing else "ranks to read"
            raise TorchprofError(f"{self._path} has no {which}. It has {ranks_in_words(known) if known else 'none'}.")
        return self._merged(wanted, _read_rank, 1, left_out)

    def comparison(self, *, layers: bool = False, processes: int = 1, left_out: LeftOut | None = None) -> Run:
        """What is compared between ranks, ``Run.to_compare`` of all of them, merged: its report "ranks" names the
        stragglers of the job. Layers have figures in it only with ``layers``: then the whole runs are read, by so many
        ``processes``, as of ``torchprof.load``, which takes some 20 ms a rank. ``left_out``: as for ``run``. Raises
        TorchprofError if ``processes`` is not a number of processes, for a damaged file, and if the folder has no
        rank."""
        check_processes(processes)
        if not self.ranks:
            raise TorchprofError(f"{self._path} has no rank yet: `torchprof show RUNS -o {self._path}/` adds some.")
        read = partial(_read_rank, read=comparison_of) if layers else partial(_read_rank, column=_COMPARED)
        return self._merged(self.ranks, read, processes, left_out)

    def _merged(
        self, ranks: Iterable[int], read: Callable[[Path], Run], processes: int, left_out: LeftOut | None
    ) -> Run:
        def readable() -> Iterator[Run]:
            count, files = 0, [_file_of(self._path, _RANKS, rank) for rank in ranks]
            read_one = partial(_run_or_error, read)
            for run in in_processes(read_one, files, processes) if processes > 1 else map(read_one, files):
                if isinstance(run, Run):
                    count += 1
                    yield run
                elif left_out is None or (count == 0 and len(files) == 1):
                    raise run
                else:
                    left_out(run)
            if not count:
                raise TorchprofError(f"{self._path} has no rank that can be read.")

        return merge(readable())

    def sql(self, query: str, *, external: bool = False) -> duckdb.DuckDBPyRelation:
        """The answer of DuckDB to a query over the tables ``ranks``, ``rows`` and ``steps``, as its relation:
        ``.fetchall()``, ``.df()``, or print it. The query reads and writes files in this folder alone; with
        ``external``, anywhere, and it may load extensions. Raises TorchprofError if DuckDB is not installed and if the
        folder has no rank; errors of the query are those of DuckDB."""
        if external not in self._databases:
            self._databases[external] = self._database(external)
        return self._databases[external].sql(query)

    def _database(self, external: bool) -> duckdb.DuckDBPyConnection:
        """A database in memory, with a view for each table."""
        try:
            import duckdb
        except ImportError as error:
            raise TorchprofError(
                'SQL needs DuckDB, which is not installed here: pip install duckdb, or pip install "torchprof[job]".'
            ) from error
        if not self.ranks:
            raise TorchprofError(f"{self._path} has no rank yet: `torchprof show RUNS -o {self._path}/` adds some.")
        database = duckdb.connect()
        if not external:
            folder = os.path.realpath(self._path)
            escaped = (name.replace("'", "''") for name in (folder, glob.escape(folder)))
            names = ", ".join(f"'{name}/'" for name in escaped)
            database.execute(f"SET allowed_directories = [{names}]")
            database.execute("SET enable_external_access = false; SET lock_configuration = true")
        for name in reversed(_TABLES):  # first the table of ranks: those that are there
            files = f"{glob.escape(os.path.realpath(self._path / name))}/rank-*.parquet".replace("'", "''")
            of_whole_ranks = "" if name == _RANKS else f" WHERE rank IN (SELECT rank FROM {_RANKS})"
            database.execute(f"CREATE VIEW {name} AS SELECT * FROM read_parquet('{files}'){of_whole_ranks}")
        return database


LeftOut = Callable[[TorchprofError], object]


@paused_gc()
def _run_or_error(read: Callable[[Path], Run], file: Path) -> Run | TorchprofError:
    try:
        run = read(file)
    except TorchprofError as error:
        return error
    except OSError as error:  # a folder, or a link to nothing
        return TorchprofError(f"{file} cannot be read: {error.strerror or error}.")
    if (match := _FILE.fullmatch(file.name)) and run.meta.rank != int(match[1]):
        return TorchprofError(f"{file} has the run of rank {run.meta.rank}: it was copied to another name.")
    return run


def open_job(path: str | PathLike[str]) -> JobFolder:
    """Open a job folder, which ``run.save("job/")`` and ``torchprof show RUNS -o job/`` write. Raises TorchprofError if
    it is not a job folder, and if a newer torchprof wrote it."""
    return JobFolder(path)


def is_job_folder(path: str | PathLike[str]) -> bool:
    """Whether there is a job folder at this path."""
    return (Path(path) / _MARK).is_file()


def names_job_folder(path: str | PathLike[str]) -> bool:
    """Whether a run that is saved to this path goes into a job folder: it ends in a slash, or there is one."""
    return os.fspath(path).endswith(("/", os.sep)) or is_job_folder(path)


def _add_to_job(run: Run, folder: Path) -> None:
    """Write the run of a rank into a job folder, which is made if it does not exist. Its files appear when they are
    complete. Raises TorchprofError for a run of several ranks, and like ``make_room``."""
    if len(run.metas) > 1:
        raise TorchprofError(
            f"This run is of {ranks_in_words(meta.rank for meta in run.metas)}, and {folder} is for the run of each "
            "rank, as it was recorded. Save those, or this one as a file: run.parquet or run.json.gz."
        )
    rank, size, job = run.meta.rank, run.meta.world_size, run.meta.job
    make_room(folder, rank, size, job)
    with ExitStack() as stack:  # which closes the last one first: the files get their names in the order of the tables
        demand_claim = stack.enter_context(_claimed(_file_of(folder, _RANKS, rank), rank))
        make_room(folder, rank, size, job)  # again: another process may have saved the rank meanwhile
        for name, table_of in reversed(_TABLES.items()):
            write_table(table_of(run), stack.enter_context(whole_file(_file_of(folder, name, run.meta.rank))))
        demand_claim()


def make_room(folder: Path, rank: int, world_size: int = 1, job: str = "") -> None:
    """Make a job folder, if there is none, in which a rank can be saved. ``world_size`` and ``job``: how many ranks its
    job has, and its name; 1 and "" if they are unknown. Raises TorchprofError for a rank that is there already, for a
    folder that has ranks of another job or other files, if there is no folder to make it in, and without pyarrow."""
    check_pyarrow()
    _make(folder)
    _check_job(folder, rank, world_size, job)
    if _file_of(folder, _RANKS, rank).exists():
        raise TorchprofError(
            f"{folder} has rank {rank} already. Save another job to another folder; to replace the rank, remove "
            f"{_file_of(folder, _RANKS, rank)} first."
        )


@contextmanager
def _claimed(file: Path, rank: int) -> Iterator[Callable[[], None]]:
    """The rank is this process's to save until the block ends. Raises TorchprofError if another process has it, here,
    and when the result is called, which is to be done before anything gets its name."""
    claim, mine = file.with_suffix(".claim"), f"{host()}-{os.getpid()}-{token_hex(4)}"

    def demand_claim() -> None:
        if claim.read_text() != mine:
            raise TorchprofError(
                f"Another process saves rank {rank} to {file.parent.parent} just now. If none does, remove {claim}."
            )

    with suppress(OSError, ValueError):  # of a process that was killed
        machine, process, _ = claim.read_text().rsplit("-", 2)
        if machine == host() and process.isdecimal() and not exists(int(process)):
            claim.unlink(missing_ok=True)
    try:
        with suppress(FileExistsError), claim.open("x") as opened:
            opened.write(mine)
        demand_claim()
        yield demand_claim
    finally:
        with suppress(OSError):
            if claim.read_text() in ("", mine):
                claim.unlink(missing_ok=True)


def _check_job(folder: Path, rank: int, world_size: int, job: str) -> None:
    """Refuse a rank that is not of the job whose ranks are in the folder. These are of one job, so one of them is read,
    which is not damaged. Like ``merge``, it refuses nothing for a size or a name that is unknown."""
    known_rank, its_size, its_job = 0, 1, None
    for known_rank in _ranks_in(folder):
        file = _file_of(folder, _RANKS, known_rank)
        with suppress(TorchprofError, OSError):  # a damaged file is not that of another job
            its_size, its_job = read_line(_content_of(file), str(file), ["world_size", "job"])
            break
    its_size = its_size if type(its_size) is int else 1
    if world_size > 1 and its_size > 1 and world_size != its_size:
        its, this = f"a job of {its_size} ranks", f"of a job of {world_size} ranks"
    elif job and its_job and job != its_job:
        its, this = f"the job {its_job!r}", f"of the job {job!r}"
    else:
        return
    raise TorchprofError(
        f"{folder} has rank {known_rank} of {its}, but rank {rank} to be saved is {this}. A folder is for the ranks of "
        "one job: save this one to another folder, or remove the old one first."
    )


def _ranks_in(folder: Path) -> Iterator[int]:
    """The numbers of the ranks that are in a job folder, in any order."""
    names = (_FILE.fullmatch(file.name) for file in (folder / _RANKS).iterdir())
    return (int(name[1]) for name in names if name is not None)


def _make(folder: Path) -> None:
    """Make a job folder without ranks, if there is none. Several processes may do so at once."""
    if not is_job_folder(folder):
        if not folder.parent.is_dir():
            raise TorchprofError(f"{folder} cannot be made: the folder {folder.parent} does not exist. Make it first.")
        folder.mkdir(exist_ok=True)
        others = {file.name for file in folder.iterdir() if not file.name.startswith(".")} - {*_TABLES, _MARK}
        if others:
            raise TorchprofError(
                f"{folder} is not a job folder, and has other files: {some(sorted(others))}. Choose a new folder."
            )
        for name in _TABLES:
            (folder / name).mkdir(exist_ok=True)
        with whole_file(folder / _MARK) as file:
            file.write(json.dumps({"format": _FORMAT, "schema": _SCHEMA}).encode())
    _check(folder)


def _check(folder: Path) -> None:
    """Raises TorchprofError if this is not a job folder, or one of a newer torchprof."""
    if not is_job_folder(folder):
        what = f"is not a job folder: it has no {_MARK}" if folder.exists() else "does not exist"
        raise TorchprofError(f"{folder} {what}. `torchprof show RUNS -o {folder}/` makes a job folder of saved runs.")
    try:
        mark = json.loads((folder / _MARK).read_bytes())
        is_known = mark["format"] == _FORMAT and type(mark["schema"]) is int
    except (ValueError, TypeError, KeyError):
        is_known = False
    if not is_known:
        raise TorchprofError(f"{folder / _MARK} is damaged: it has the format and the schema of a job folder.")
    schema = mark["schema"]
    if not 1 <= schema <= _SCHEMA:
        raise TorchprofError(
            f"{folder} has schema {schema!s:.80}; this torchprof reads up to {_SCHEMA}. Read it with a newer torchprof."
        )


def _file_of(folder: Path, table: str, rank: int) -> Path:
    return folder / table / f"rank-{rank:06}.parquet"


# The tables of a job folder

_WHOLE, _COMPARED = "run", "compared"  # the columns with the run file of a rank, and with what is compared of it
_LEVEL = 6  # of gzip: the highest one takes twice as long for 1 % less


def table_of_rank(run: Run) -> ParquetTable:
    """One line: how the only rank of a run was recorded, what is compared, and the whole run (gzipped run files)."""
    meta = run.meta
    line: dict[str, tuple[str, Any]] = {
        "rank": (INT, meta.rank),
        "world_size": (INT, meta.world_size),
        "job": (TEXT, meta.job or None),
        "host": (TEXT, meta.machine or None),
        "device": (TEXT, meta.device or "cpu"),
        "models": (TEXTS, meta.model),
        "measured": (TEXTS, meta.measured),
        "cycles": (INT, meta.cycles),
        "steps": (INT, meta.steps),
        "wall_ns": (INT, meta.wall_ns),
        "process_cpu_ns": (INT, meta.process_cpu_ns),
        "run_delay_ns": (INT, meta.run_delay_ns),
        _COMPARED: (BYTES, zipped_json(run.to_compare(), _LEVEL)),
        _WHOLE: (BYTES, zipped_json(run, _LEVEL)),
    }
    return {name: (kind, [value]) for name, (kind, value) in line.items()}


def _read_rank(file: Path, read: Callable[[bytes, str], Run] = run_of, column: str = _WHOLE) -> Run:
    """The run that ``table_of_rank`` has in a ``column``, or what ``read`` reads of its file."""
    (content,) = read_line(_content_of(file), str(file), [column])
    if type(content) is not bytes:
        raise TorchprofError(f"{file} is a damaged Parquet file: its column {column!r} has no run.")
    return read(content, str(file))


def table_of_steps(run: Run) -> ParquetTable:
    """The single times in the lockstep of the only rank of a run, one line for each."""
    names, _ = names_of_layers(run)
    keys: list[LockstepKey] = []
    numbers: list[int] = []
    times: list[int] = []
    for key, lockstep in run.lockstep.items():
        keys += [key] * len(lockstep.own_ns)
        numbers += lockstep.times or range(len(lockstep.own_ns))
        times += lockstep.own_ns
    places = [(key.layer, key.phase) if key.is_collective or key.what == WORK else None for key in keys]
    groups = [key.group or NOT_RECORDED for key in keys]
    return {
        "rank": (INT, [run.meta.rank] * len(keys)),
        "layer": (TEXT, [place and names[place[0]] for place in places]),
        "phase": (TEXT, [place and phase_of(*place) for place in places]),
        "device": (TEXT, [key.device for key in keys]),
        "what": (TEXT, [key.what for key in keys]),
        "group_name": (TEXT, [group.name or None for group in groups]),
        "group_description": (TEXT, [group.description or None for group in groups]),
        "group_size": (INT, [group.size for group in groups]),
        "group_ranks": (TEXT, [group.ranks or None for group in groups]),
        "number": (INT, numbers),
        "ns": (INT, times),
    }


_TABLES = {"rows": table_of_rows, "steps": table_of_steps, _RANKS: table_of_rank}
"""The tables, by the names of their folders. A rank is there if the last one has its file."""
