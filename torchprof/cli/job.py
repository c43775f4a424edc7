"""Large jobs on the command line. ``torchprof show RUNS -o job/`` writes a job folder, ``torchprof show job/`` reads
one. Of many ranks, in a job folder or in files, all are compared, and only some are loaded."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torchprof
from torchprof.analyze.ranks.selection import chosen_ranks, with_comparison
from torchprof.cli.files import Files, model_for, model_of, processes_for_runs, saved_runs
from torchprof.cli.options import REPORT_OPTIONS, TABLE_OPTIONS, given_options, in_words
from torchprof.errors import TorchprofError
from torchprof.reports import format_of, known
from torchprof.run.job_folder import is_job_folder, names_job_folder
from torchprof.run.saved import load_to_compare

MOST_RANKS = 256
"""How many ranks are loaded at most, if ``--rank`` does not say which."""
_NOT_WHILE_WRITING = (*TABLE_OPTIONS, *REPORT_OPTIONS, "report", "summary", "json", "rank", "add_cycles")


def job_to_write(arguments: argparse.Namespace) -> str:
    """The job folder among the outputs, "" if there is none. Raises TorchprofError if anything else is to be done."""
    folders = [output for output in arguments.output if names_job_folder(output)]
    if not folders:
        return ""
    folder: str = folders[0]
    given = given_options(arguments, _NOT_WHILE_WRITING)
    if given or len(arguments.output) > 1:
        others = in_words(given) if given else "the other files"
        raise TorchprofError(
            f"-o {folder} only writes the folder: leave out {others}. Then `torchprof show {folder}` shows it, and "
            "writes other files."
        )
    return folder


def write_job(runs: Iterable[torchprof.Run], folder: str) -> None:
    """Write the runs of ranks into a job folder, one after the other. Raises TorchprofError."""
    for run in runs:
        run.save(folder)
        del run  # before the next one is loaded
    count = len(torchprof.open_job(folder).ranks)
    print(f"Written: {folder} has {count} rank{'s' if count > 1 else ''} now.", file=sys.stderr)


class JobRun(NamedTuple):
    """The ``run`` to show. If it has chosen ranks of a job: what is ``compared`` of all, else None."""

    run: torchprof.Run
    compared: torchprof.Run | None = None


def read_job(arguments: argparse.Namespace) -> JobRun | None:
    """The run of the job folder that is to be shown; None if none of the files is a job folder.

    Of more than ``MOST_RANKS`` ranks it has ``chosen_ranks``, and a warning with the verdict on all. These are compared
    with their layers for a page and for the report "ranks" alone, since that takes longer. Raises TorchprofError.
    """
    folders = [file for file in arguments.files if is_job_folder(file)]
    if not folders:
        return None
    if len(arguments.files) > 1:
        raise TorchprofError(
            f"{folders[0]} is a job folder, which is shown alone. `torchprof show FILE … -o {folders[0]}` adds ranks."
        )
    if model_of(arguments) is not None or arguments.add_cycles:
        raise TorchprofError(
            "--model is for traces, and --add-cycles for files: a job folder has one run of each rank."
        )
    job = torchprof.open_job(folders[0])
    if arguments.rank is not None:
        return JobRun(job.run([arguments.rank]))
    if len(job.ranks) <= MOST_RANKS:
        return JobRun(job.run())
    comparison = job.comparison()
    run = with_comparison(job.run(chosen_ranks(comparison)), comparison)
    if arguments.report == "ranks" or any(format_of(output) == "html" for output in arguments.output):
        comparison = job.comparison(layers=True, processes=processes_for_runs(arguments))
    return JobRun(run, comparison)


def read_many(files: Files, arguments: argparse.Namespace) -> JobRun | None:
    """The run of the chosen ranks of more than ``MOST_RANKS`` saved runs, as of a job folder; with --rank, the run of
    that rank. None if all runs are to be merged: there are fewer, or traces, or cycles to add up, or a file or a report
    for other programs is to be written. Raises TorchprofError.
    """
    if len(files.saved) <= MOST_RANKS or files.traces or arguments.add_cycles or _is_for_programs(arguments):
        return None
    model_for(files, arguments)  # raises if there is one
    file_of: dict[int, str] = {}

    def compared() -> Iterator[torchprof.Run]:
        for file, run in saved_runs(files, arguments, load_to_compare):
            file_of.update((meta.rank, file) for meta in run.metas)
            yield run

    comparison = torchprof.merge(compared())
    ranks = chosen_ranks(comparison) if arguments.rank is None else [comparison.of_rank(arguments.rank).meta.rank]
    chosen = files._replace(saved=[*dict.fromkeys(file_of[rank] for rank in ranks)])
    runs = saved_runs(chosen, arguments, torchprof.load)
    run = torchprof.merge(of_rank for _, run in runs for of_rank in run.of_ranks(_among(ranks, run)))
    if arguments.rank is not None:
        return JobRun(run)
    return JobRun(with_comparison(run, comparison.to_compare()), comparison)


def _is_for_programs(arguments: argparse.Namespace) -> bool:
    """Whether other programs read what is written or printed: a file other than a page, a report that is a file format,
    or the data of any report but "ranks", which compares all ranks."""
    report = arguments.report
    has_files = any(format_of(output) != "html" for output in arguments.output)
    is_format = report is not None and not known()[report].answers
    return has_files or is_format or (arguments.json and report != "ranks")


def _among(ranks: Iterable[int], run: torchprof.Run) -> list[int]:
    """Those of the ranks that a run has."""
    return sorted({*ranks}.intersection(meta.rank for meta in run.metas))
