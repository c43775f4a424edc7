"""Read the files that ``torchprof show`` is given: saved runs and traces, in any mix, into one run."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torchprof
from torchprof.cli.models import call_of, make_without_data
from torchprof.cli.options import wants_timeline
from torchprof.cli.output import ERASED, progress, show_status
from torchprof.errors import TorchprofError
from torchprof.run.processes import in_processes, usable_cpus
from torchprof.run.saved import is_run_file

if TYPE_CHECKING:
    import torch

_WORTH_PROCESSES = 2**24  # bytes of saved runs, which take a second to read
_MOST_OF_USE = 4  # processes that read saved runs: one process merges them, which takes a third of the time


class Files(NamedTuple):
    """The files to read: saved runs and traces. Without traces, torch is not needed. ``in_folders``: those that were
    found in a folder. A saved run of these that cannot be read is left out."""

    saved: list[str]
    traces: list[str]
    in_folders: frozenset[str] = frozenset()


def files_of(paths: Sequence[str]) -> Files:
    """The files that the paths name. A folder means its traces; without traces, its saved runs.

    Raises TorchprofError for a folder without either, OSError as ``open`` does.
    """
    files = [file for path in paths for file in _in_folder(path)]
    saved = [file for file in files if is_run_file(file)]
    return Files(saved, [file for file in files if file not in saved], frozenset(files) - {*paths})


def _in_folder(path: str) -> list[str]:
    """The files of a folder; the path itself if it is not a folder."""
    from torchprof.traces.read import traces_in

    if not Path(path).is_dir():
        return [path]
    try:
        return [str(file) for file in traces_in([path])]
    except TorchprofError:
        saved = [str(file) for file in sorted(Path(path).iterdir()) if file.is_file() and is_run_file(file)]
        if not saved:
            raise
        return saved


def read(files: Files, arguments: argparse.Namespace) -> torchprof.Run:
    """Make one run of all the files. Raises TorchprofError, also for options that the files do not need."""
    return torchprof.merge(runs_of(files, arguments), add_cycles=arguments.add_cycles)


def runs_of(files: Files, arguments: argparse.Namespace, *, one_by_one: bool = False) -> Iterator[torchprof.Run]:
    """The runs in the files: of each saved run, then of all traces together, or ``one_by_one``. Raises TorchprofError,
    also for options that the files do not need."""
    model = model_for(files, arguments)
    for _, run in saved_runs(files, arguments, torchprof.load):
        yield run
        del run  # before the next one is loaded
    if one_by_one:
        yield from (_read_traces([file], model, arguments) for file in files.traces)
    elif files.traces:
        yield _read_traces(files.traces, model, arguments)


def model_for(files: Files, arguments: argparse.Namespace) -> torch.nn.Module | None:
    """The model of ``--model`` for the traces among the files; None without it. Raises TorchprofError if there are
    none."""
    model = model_of(arguments)
    if model is not None and not files.traces:
        raise TorchprofError("--model is for traces: a saved run has its model already.")
    return model


def model_of(arguments: argparse.Namespace) -> torch.nn.Module | None:
    """The model of ``--model``; None without it."""
    if arguments.model:
        return make_without_data(arguments.model, arguments.kwargs)
    options = {
        "--kwargs": arguments.kwargs != "{}",
        "--input": bool(arguments.input),
        "--paths": arguments.paths is not None,
    }
    for option, is_given in options.items():
        if is_given:
            raise TorchprofError(f"{option} is for the model of a trace: say which with --model.")
    return None


def saved_runs(
    files: Files, arguments: argparse.Namespace, read: Callable[[str], torchprof.Run]
) -> Iterator[tuple[str, torchprof.Run]]:
    """``read`` the saved runs, one after the other: the file, and what is read of it.

    Raises TorchprofError for a second file of a rank without --add-cycles.
    """
    file_of: dict[int, str] = {}
    count = len(files.saved)
    runs = in_processes(partial(_run_or_error, read), files.saved, _processes(files.saved, arguments))
    for _, file in zip(progress("run", count) if count > 1 else range(1), files.saved):
        run = next(runs)
        if isinstance(run, TorchprofError):
            if file not in files.in_folders or count == 1:
                raise run
            print(f"Left out: {run}", file=sys.stderr)
            continue
        for meta in run.metas:
            if meta.rank in file_of and not arguments.add_cycles:
                raise TorchprofError(
                    f"{file_of[meta.rank]} and {file} are both of rank {meta.rank}. If one process recorded them, one "
                    "after the other, add them up with --add-cycles. If not, show each alone. To see what changed "
                    f"between them: torchprof compare {file_of[meta.rank]} {file}"
                )
            file_of[meta.rank] = file
        yield file, run
        del run  # before the next one is loaded


def _run_or_error(read: Callable[[str], torchprof.Run], file: str) -> torchprof.Run | TorchprofError:
    try:
        return read(file)
    except TorchprofError as error:
        return error


def processes_for_runs(arguments: argparse.Namespace) -> int:
    """How many processes read many saved runs: ``--jobs``, or one for each CPU, but no more than are of use."""
    return arguments.jobs or min(_MOST_OF_USE, usable_cpus())


def _processes(saved: Sequence[str], arguments: argparse.Namespace) -> int:
    """How many processes read these saved runs: one if they are not worth the start of processes."""
    is_worth = arguments.jobs or sum(Path(file).stat().st_size for file in saved) >= _WORTH_PROCESSES
    return processes_for_runs(arguments) if is_worth else 1


def _read_traces(files: Sequence[str], model: torch.nn.Module | None, arguments: argparse.Namespace) -> torchprof.Run:
    inputs, kwargs = call_of(arguments).arguments("meta") if arguments.input else (None, None)
    try:
        return torchprof.from_trace(
            files,
            model,
            inputs=inputs,
            kwargs=kwargs,
            paths=arguments.paths,
            with_timeline=wants_timeline(arguments) or arguments.report == "memory",
            progress=(lambda share: show_status(f"\rreading {share:4.0%} ")) if sys.stderr.isatty() else None,
            processes=arguments.jobs or usable_cpus(),
        )
    finally:
        show_status(ERASED)
