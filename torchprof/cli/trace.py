"""``torchprof trace``: read traces that torch.profiler wrote."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torchprof
from torchprof.cli.models import make_model
from torchprof.cli.options import (
    add_output_option,
    add_report_options,
    add_table_options,
    add_traced_model_options,
    check_output,
    check_report,
    wants_timeline,
)
from torchprof.cli.output import print_overview, print_report, print_table, silence_kineto, write_files
from torchprof.errors import TorchprofError

if TYPE_CHECKING:
    import torch

    from torchprof.cli.options import Commands

_EPILOG = """\
The layers are those of torchprof's own labels, where the trace was recorded inside torchprof.annotate(model); else the
modules that were recorded with_stack=True; else the ranges of record_function. With --model, a SPEC as for `torchprof
profile`, modules have their paths and parameters. Traces of several ranks, or of several cycles of one, make one run.

Examples:
  torchprof trace trace.json.gz -o report.html
  torchprof trace trace.json --model net.py:Net --report device
"""


def add_to(commands: Commands) -> None:
    parser = commands.add_parser(
        "trace",
        help="read a trace that torch.profiler wrote",
        description="Read traces that torch.profiler wrote, here or elsewhere, and print where the time went.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("traces", nargs="+", metavar="FILE", help="trace.json, trace.json.gz, or a folder of them")
    add_traced_model_options(parser)
    parser.add_argument(
        "--paths", nargs="+", metavar="PATH", help="only these layers of the model: features.0, layer.*"
    )
    add_report_options(parser)
    add_output_option(parser)
    add_table_options(parser)
    parser.set_defaults(execute=execute)


def execute(arguments: argparse.Namespace) -> int:
    from torchprof.traces.read import traces_in

    check_output(arguments)
    check_report(arguments)
    traces = [str(file) for file in traces_in(arguments.traces)]
    run = read_traces(traces, traced_model(arguments), arguments, paths=arguments.paths)
    code = write_files(run.export, arguments)
    if arguments.report:
        print_report(run, arguments)
    elif arguments.summary:
        print_table(run, arguments)
    else:
        print_overview(run, arguments, ", ".join(traces), saved=arguments.output)
    return code


def traced_model(arguments: argparse.Namespace) -> torch.nn.Module | None:
    """The model of ``--model``; None without it."""
    if arguments.model:
        silence_kineto()
        return make_model(arguments.model, arguments.kwargs)
    if arguments.kwargs != "{}":
        raise TorchprofError("--kwargs are arguments for a model: say which with --model.")
    return None


def read_traces(
    files: Sequence[str], model: torch.nn.Module | None, arguments: argparse.Namespace, **options: Any
) -> torchprof.Run:
    """Make one run of all the files. ``options``: more arguments of ``torchprof.from_trace``."""
    try:
        return torchprof.from_trace(
            files,
            model,
            with_timeline=wants_timeline(arguments) or arguments.report == "memory",
            progress=_show_progress if sys.stderr.isatty() else None,
            **options,
        )
    finally:
        if sys.stderr.isatty():
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def _show_progress(share: float) -> None:
    print(f"\rreading {share:4.0%} ", end="", file=sys.stderr, flush=True)
