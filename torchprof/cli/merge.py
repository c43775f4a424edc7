"""``torchprof merge``: make one run from the saved runs and traces of all ranks."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torchprof
from torchprof.cli.options import (
    add_output_option,
    add_report_options,
    add_table_options,
    add_traced_model_options,
    check_output,
    check_report,
    non_negative_int,
)
from torchprof.cli.output import print_report, print_table, progress, write_files
from torchprof.cli.trace import read_traces, traced_model
from torchprof.errors import TorchprofError
from torchprof.run.file_read import is_run_file

if TYPE_CHECKING:
    from torchprof.cli.options import Commands

_EPILOG = """\
FILE is a saved run (run.json, of one rank or of several) or a trace that torch.profiler wrote, in any mix; traces are
read by several processes at once. Layers are matched by path. Ranks of the job that gave no file are named.

The report is "ranks", of which --depth, --top, --tablefmt and --sort-by are (flops_max/mean, waiting, ...); what else
shapes the table is for --report tree, the sum over the ranks.

Examples:
  torchprof merge rank*.json
  torchprof merge traces/*.pt.trace.json.gz -o merged.json.gz -o report.html
  torchprof show merged.json.gz --rank 3
"""


def add_to(commands: Commands) -> None:
    parser = commands.add_parser(
        "merge",
        help="make one run of the runs or traces of all ranks",
        description="Make one run of the ranks of a job, from their saved runs or traces, and compare them.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("files", nargs="+", metavar="FILE", help="run.json, trace.json, either gzipped")
    add_traced_model_options(parser)
    parser.add_argument(
        "--add-cycles", action="store_true", help="saved runs of one rank are cycles, in this order, and add up"
    )
    parser.add_argument(
        "--jobs", type=non_negative_int, metavar="N", help="so many processes read traces (default: one a CPU)"
    )
    add_report_options(parser)
    add_output_option(parser)
    add_table_options(parser)
    parser.set_defaults(execute=execute)


def execute(arguments: argparse.Namespace) -> int:
    check_output(arguments)
    if not arguments.summary:
        arguments.report = arguments.report or "ranks"
    check_report(arguments)
    if arguments.jobs == 0:
        raise TorchprofError("--jobs is at least 1.")
    model = traced_model(arguments)
    saved = [file for file in arguments.files if is_run_file(file)]
    traces = [file for file in arguments.files if file not in saved]
    if model is not None and not traces:
        raise TorchprofError("--model is for traces: saved runs know their model, and there is no trace.")

    def runs() -> Iterator[torchprof.Run]:
        yield from _saved_runs(saved, arguments.add_cycles)
        if traces:
            yield read_traces(traces, model, arguments, processes=arguments.jobs or os.cpu_count() or 1)

    run = torchprof.merge(runs(), add_cycles=arguments.add_cycles)
    code = write_files(run.export, arguments)
    if arguments.summary:
        print_table(run, arguments)
    else:
        print_report(run, arguments)
    return code


def _saved_runs(files: Sequence[str], add_cycles: bool) -> Iterator[torchprof.Run]:
    """Load the saved runs, one at a time. Raises TorchprofError for a second file of a rank without add_cycles."""
    file_of: dict[int, str] = {}
    for _, file in zip(progress("run", len(files)), files):
        run = torchprof.load(file)
        for meta in run.metas:
            if meta.rank in file_of and not add_cycles:
                raise TorchprofError(
                    f"{file_of[meta.rank]} and {file} are both of rank {meta.rank}. Where they are of one process, "
                    "one after the other, --add-cycles adds them up. Processes that are no job are all of rank 0: "
                    "show each by itself."
                )
            file_of[meta.rank] = file
        yield run
