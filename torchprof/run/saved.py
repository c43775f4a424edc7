"""Saves runs, and loads them: the name of a file chooses its format, its first bytes say which it has."""

from __future__ import annotations

import gzip
import os
import re
import zlib
from collections.abc import Iterable
from os import PathLike
from pathlib import Path

from torchprof.errors import TorchprofError
from torchprof.run.file import atomic_file, comparison_of, run_of, write_json
from torchprof.run.job_folder import add_to_job, is_job_folder, names_job_folder, open_job
from torchprof.run.merge import merge
from torchprof.run.parquet import PARQUET, run_of_parquet, write_parquet
from torchprof.run.paused_gc import paused_gc
from torchprof.run.processes import check_processes, in_processes
from torchprof.run.run import Run

_START = 256  # bytes: the format is named in the first of them


def write(run: Run, path: str | PathLike[str], *, strip: bool = False) -> None:
    """Save a run as ``Run.save`` describes. The old contents of the file stay until the new ones are complete."""
    if names_job_folder(path):
        add_to_job(run, path, strip=strip)
        return
    path = Path(os.path.realpath(path))  # write to the target of a link
    if not path.parent.is_dir():
        raise TorchprofError(f"{path} cannot be written: the folder {path.parent} does not exist. Make it first.")
    with atomic_file(path) as file:
        if path.suffix == ".parquet":
            write_parquet(run, file, strip=strip)
        else:
            write_json(run, file, strip=strip, zipped=path.suffix == ".gz")


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
    data = Path(path).read_bytes()
    return (run_of_parquet if data.startswith(PARQUET) else run_of)(data, str(path))


@paused_gc()
def load_to_compare(path: str | PathLike[str]) -> Run:
    """``load(path).to_compare(layers=True)`` of a file, but faster. Raises TorchprofError and OSError like ``load``."""
    data = Path(path).read_bytes()
    if data.startswith(PARQUET):
        return run_of_parquet(data, str(path)).to_compare(layers=True)
    return comparison_of(data, str(path))


def is_run_file(path: str | PathLike[str]) -> bool:
    """Whether a file is a saved run, by its first bytes; any Parquet file may be one. Raises OSError like ``open``."""
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
