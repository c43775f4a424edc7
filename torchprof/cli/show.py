"""``torchprof show``: show saved runs and traces, in any mix, or a job folder, which ``show RUNS -o job/`` writes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torchprof
from torchprof.cli import options
from torchprof.cli.models import SPECS, call_of, make_without_data
from torchprof.cli.output import ERASED, print_all, print_run, progress, show_status, write_files
from torchprof.errors import TorchprofError
from torchprof.ranks.sentences import chosen_ranks, with_comparison
from torchprof.reports import format_of, known
from torchprof.run.processes import in_processes, usable_cpus
from torchprof.run.saved import is_job_folder, is_run_file, load_to_compare, names_job_folder

if TYPE_CHECKING:
    import torch

_EPILOG = """\
FILE is a saved run (run.json, run.parquet), a trace of torch.profiler (trace.json), either gzipped, or a folder of
them. Several files make one run: the ranks of a job, or the cycles of one process. With several ranks, the ranks are
shown first.

Of more than 64 ranks all are compared, and stragglers and some others shown whole; of more than 256 saved runs, only
these are loaded, unless -o writes another file than a page, and without --json.

-o job/ writes a job folder: the run of each rank as Parquet files, one rank at a time, for jobs that are too large to
merge. Shown, it is like its ranks; of more than 256 ranks all are compared, and stragglers and some others loaded.

The layers of a trace are torchprof's labels, if it was recorded inside torchprof.annotate(model); else the modules of
with_stack=True; else the ranges of record_function. With --model, layers have their paths and parameters, and a trace
without labels gets them: its operators are aligned with those of the model's forward (see --input).

Without an option that shapes the output, all that matters is printed; with one of the table, the table alone.

examples:
  torchprof show run.json
  torchprof show run.json --report ops --layer features.0
  torchprof show run.json -o report.html
  torchprof show trace.json.gz --model net.py:Net --input 32,3,224,224
  torchprof show traces/ -o job.json.gz
  torchprof show rank*.json --report ranks --top 3
  torchprof show runs/ -o job/
  torchprof show job/ --rank 3
"""


def add_to(commands: options.Commands) -> None:
    parser = commands.add_parser(
        "show",
        help="show saved runs and traces, several as one",
        usage="torchprof show FILE [FILE ...] [options]",
        description="Show saved runs and traces of torch.profiler; several make one run. Saved runs need no torch.",
        epilog=_EPILOG,
    )
    parser.add_argument("files", nargs="+", metavar="FILE", help="saved runs, traces, or folders of them")
    options.add_report_options(parser)
    several = parser.add_argument_group("several ranks or cycles")
    several.add_argument("--rank", type=options.whole_number, metavar="N", help="only this rank")
    several.add_argument("--add-cycles", action="store_true", help="add up saved runs of one rank, in this order")
    several.add_argument(
        "--jobs",
        type=options.whole_number,
        metavar="N",
        help="read with N processes (default: one per CPU, of saved runs at most 4)",
    )
    traces = parser.add_argument_group("traces")
    traces.add_argument("--model", metavar="SPEC", help=f"the model: {SPECS}")
    traces.add_argument("--kwargs", default="{}", metavar="JSON", help="arguments that make the model")
    traces.add_argument(
        "--input",
        action="append",
        default=[],
        metavar="INPUT",
        help="a tensor that --model is called with: 32,3,224,224; once for each, if the trace names no layers",
    )
    traces.add_argument("--call-kwargs", default="{}", metavar="JSON", help="arguments of that call other than tensors")
    options.add_options(traces, "--paths", "--timeline")
    parser.set_defaults(execute=execute, method="forward", dtype=None)


def execute(arguments: argparse.Namespace) -> int:
    if not (folder := job_to_write(arguments)):
        options.check_output(arguments)
    options.check_report(arguments)
    if arguments.jobs == 0:
        raise TorchprofError("--jobs is at least 1.")
    if folder:
        _write_job(folder, arguments)
        return 0
    names, is_trace = arguments.files, False
    if (shown := read_job(arguments)) is None:
        files = files_of(arguments.files)
        names, is_trace = [*files.saved, *files.traces], bool(files.traces)
        if (shown := read_many(files, arguments)) is None:
            shown = RunToShow(torchprof.merge(runs_of(files, arguments), add_cycles=arguments.add_cycles))
    run = shown.run if arguments.rank is None else shown.run.of_rank(arguments.rank)
    page_options = {} if shown.compared is None else {"compared": shown.compared}
    code = write_files(lambda path: run.export(path, **(page_options if format_of(path) == "html" else {})), arguments)
    of_ranks = shown.compared or run
    print_run(
        of_ranks if arguments.report == "ranks" else run,
        arguments,
        lambda: print_all(run, arguments, names, of_ranks, is_trace=is_trace),
    )
    return code


# The files: saved runs and traces

_WORTH_PROCESSES = 2**24  # bytes of saved runs, which take a second to read
_MOST_PROCESSES = 4  # that read saved runs: one process merges them, which takes a third of the time


class Files(NamedTuple):
    """The files to read: saved runs and traces. Without traces, torch is not needed. ``in_folders``: those that were
    found in a folder. A saved run of these that cannot be read is left out."""

    saved: list[str]
    traces: list[str]
    in_folders: frozenset[str] = frozenset()


def files_of(paths: Sequence[str]) -> Files:
    """The files that the paths name. A folder means its traces; without traces, its saved runs. Raises TorchprofError
    for a folder without either, OSError as ``open`` does."""
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


def runs_of(files: Files, arguments: argparse.Namespace, *, one_by_one: bool = False) -> Iterator[torchprof.Run]:
    """The runs in the files: of each saved run, then of all traces together, or ``one_by_one``. Raises TorchprofError,
    also for options that the files do not need."""
    model = model_of(arguments, has_traces=bool(files.traces))
    for _, run in saved_runs(files, arguments, torchprof.load):
        yield run
        del run  # before the next one is loaded
    if one_by_one:
        yield from (_read_traces([file], model, arguments) for file in files.traces)
    elif files.traces:
        yield _read_traces(files.traces, model, arguments)


def model_of(arguments: argparse.Namespace, *, has_traces: bool = True) -> torch.nn.Module | None:
    """The model of ``--model``; None without it. Raises TorchprofError if there is no trace for it."""
    if arguments.model and not has_traces:
        raise TorchprofError("--model is for traces: a saved run has its model already.")
    if arguments.model:
        return make_without_data(arguments.model, arguments.kwargs)
    given = {"--kwargs": arguments.kwargs != "{}", "--input": arguments.input, "--paths": arguments.paths is not None}
    for option in filter(given.get, given):
        raise TorchprofError(f"{option} is for the model of a trace: say which with --model.")
    return None


def saved_runs(
    files: Files, arguments: argparse.Namespace, read: Callable[[str], torchprof.Run]
) -> Iterator[tuple[str, torchprof.Run]]:
    """``read`` the saved runs, one after the other: the file, and what is read of it. Raises TorchprofError for a
    second file of a rank without --add-cycles."""
    file_of: dict[int, str] = {}
    count = len(files.saved)
    is_large = arguments.jobs or sum(Path(file).stat().st_size for file in files.saved) >= _WORTH_PROCESSES
    processes = processes_for_runs(arguments) if is_large else 1
    runs = in_processes(partial(_run_or_error, read), files.saved, processes)
    for _, file in zip(progress("run", count) if count > 1 else range(1), files.saved):
        run = next(runs)
        if isinstance(run, TorchprofError):
            if file not in files.in_folders or count == 1:
                raise run
            _say_left_out(run)
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


def _say_left_out(error: TorchprofError) -> None:
    print(f"Left out: {error}", file=sys.stderr)


def _run_or_error(read: Callable[[str], torchprof.Run], file: str) -> torchprof.Run | TorchprofError:
    try:
        return read(file)
    except TorchprofError as error:
        return error


def processes_for_runs(arguments: argparse.Namespace) -> int:
    """How many processes read many saved runs: ``--jobs``, or one for each CPU, but no more than are of use."""
    return arguments.jobs or min(_MOST_PROCESSES, usable_cpus())


def _read_traces(files: Sequence[str], model: torch.nn.Module | None, arguments: argparse.Namespace) -> torchprof.Run:
    inputs, kwargs = call_of(arguments).arguments("meta") if arguments.input else (None, None)
    try:
        return torchprof.from_trace(
            files,
            model,
            inputs=inputs,
            kwargs=kwargs,
            paths=arguments.paths,
            with_timeline=options.wants_timeline(arguments) or arguments.report == "memory",
            progress=(lambda share: show_status(f"\rreading {share:4.0%} ")) if sys.stderr.isatty() else None,
            processes=arguments.jobs or usable_cpus(),
        )
    finally:
        show_status(ERASED)


# Jobs: of many ranks, in a job folder or in files, all are compared, and only some are loaded

MOST_RANKS = 256
"""How many ranks are loaded at most, if ``--rank`` does not say which."""
_OTHERS = ("report", "summary", "json", "rank", "add_cycles")
_NOT_WHILE_WRITING = (*options.TABLE_OPTIONS, *options.REPORT_OPTIONS, *_OTHERS)


def job_to_write(arguments: argparse.Namespace) -> str:
    """The job folder among the outputs, "" if there is none. Raises TorchprofError if anything else is to be done."""
    folders = [output for output in arguments.output if names_job_folder(output)]
    if not folders:
        return ""
    folder: str = folders[0]
    given = options.given_options(arguments, _NOT_WHILE_WRITING)
    if given or len(arguments.output) > 1:
        others = options.in_words(given) if given else "the other files"
        raise TorchprofError(
            f"-o {folder} only writes the folder: leave out {others}. Then `torchprof show {folder}` shows it, and "
            "writes other files."
        )
    return folder


def _write_job(folder: str, arguments: argparse.Namespace) -> None:
    for run in runs_of(files_of(arguments.files), arguments, one_by_one=True):
        run.save(folder)
        del run  # before the next one is loaded
    count = len(torchprof.open_job(folder).ranks)
    print(f"Written: {folder} has {count} rank{'s' if count > 1 else ''} now.", file=sys.stderr)


class RunToShow(NamedTuple):
    """The ``run`` to show. If it has chosen ranks of a job: what is ``compared`` of all, else None."""

    run: torchprof.Run
    compared: torchprof.Run | None = None


def read_job(arguments: argparse.Namespace) -> RunToShow | None:
    """The run of the job folder that is to be shown; None if none of the files is a job folder.

    Of more than ``MOST_RANKS`` ranks it has ``chosen_ranks``, and a warning with the verdict on all. These are compared
    with their layers for a page and for the report "ranks" alone, since that takes longer. Raises TorchprofError.
    """
    if not (folders := [file for file in arguments.files if is_job_folder(file)]):
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
    said: set[str] = set()

    def left_out(error: TorchprofError) -> None:
        if str(error) not in said:
            said.add(str(error))
            _say_left_out(error)

    if arguments.rank is not None:
        return RunToShow(job.run([arguments.rank]))
    if len(job.ranks) <= MOST_RANKS:
        return RunToShow(job.run(left_out=left_out))
    comparison = job.comparison(left_out=left_out)
    run = with_comparison(job.run(chosen_ranks(comparison), left_out=left_out), comparison)
    if arguments.report == "ranks" or any(format_of(output) == "html" for output in arguments.output):
        processes = processes_for_runs(arguments)
        comparison = job.comparison(layers=True, processes=processes, left_out=left_out)
    return RunToShow(run, comparison)


def read_many(files: Files, arguments: argparse.Namespace) -> RunToShow | None:
    """The run of the chosen ranks of more than ``MOST_RANKS`` saved runs, as of a job folder; with --rank, the run of
    that rank. None if all runs are to be merged: there are fewer, or traces, or cycles to add up, or a file or a report
    for other programs is to be written. Raises TorchprofError."""
    if len(files.saved) <= MOST_RANKS or files.traces or arguments.add_cycles or _is_for_programs(arguments):
        return None
    model_of(arguments, has_traces=False)  # raises if there is one
    file_of: dict[int, str] = {}

    def to_compare() -> Iterator[torchprof.Run]:
        for file, run in saved_runs(files, arguments, load_to_compare):
            file_of.update((meta.rank, file) for meta in run.metas)
            yield run

    comparison = torchprof.merge(to_compare())
    ranks = chosen_ranks(comparison) if arguments.rank is None else [comparison.of_rank(arguments.rank).meta.rank]
    files_of_ranks = files._replace(saved=[*dict.fromkeys(file_of[rank] for rank in ranks)])
    run = torchprof.merge(
        of_rank
        for _, run in saved_runs(files_of_ranks, arguments, torchprof.load)
        for of_rank in run.of_ranks(sorted({*ranks}.intersection(meta.rank for meta in run.metas)))
    )
    if arguments.rank is not None:
        return RunToShow(run)
    return RunToShow(with_comparison(run, comparison.to_compare()), comparison)


def _is_for_programs(arguments: argparse.Namespace) -> bool:
    """Whether other programs read what is written or printed: a file other than a page, a report that is a file format,
    or the data of any report but "ranks", which compares all ranks."""
    report = arguments.report
    has_files = any(format_of(output) != "html" for output in arguments.output)
    is_format = report is not None and not known()[report].answers
    return has_files or is_format or (arguments.json and report != "ranks")
