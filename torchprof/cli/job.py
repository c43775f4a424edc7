"""Job folders on the command line: ``torchprof show RUNS -o job/`` writes one, ``torchprof show job/`` reads one."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable

import torchprof
from torchprof.analyze.ranks.selection import chosen_ranks, with_comparison
from torchprof.cli.files import model_of
from torchprof.cli.options import REPORT_OPTIONS, TABLE_OPTIONS, given_options, in_words
from torchprof.errors import TorchprofError
from torchprof.run.job_folder import is_job_folder, names_job_folder

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


def read_job(arguments: argparse.Namespace) -> torchprof.Run | None:
    """The run of the job folder that is to be shown; None if none of the files is a job folder.

    Of more than ``MOST_RANKS`` ranks it has ``chosen_ranks``, and a warning with the verdict on all. Raises
    TorchprofError.
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
        return job.run([arguments.rank])
    if len(job.ranks) <= MOST_RANKS:
        return job.run()
    comparison = job.comparison()
    return with_comparison(job.run(chosen_ranks(comparison)), comparison)
