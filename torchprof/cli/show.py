"""``torchprof show``: show saved runs and traces."""

from __future__ import annotations

import argparse
from functools import partial

import torchprof
from torchprof.cli.files import JobRun, files_of, job_to_write, read_job, read_many, runs_of, write_job
from torchprof.cli.models import SPECS
from torchprof.cli.options import Commands, add_report_options, check_output, check_report, whole_number
from torchprof.cli.output import print_all, print_run, write_files
from torchprof.errors import TorchprofError
from torchprof.reports import format_of

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


def add_to(commands: Commands) -> None:
    parser = commands.add_parser(
        "show",
        help="show saved runs and traces, several as one",
        usage="torchprof show FILE [FILE ...] [options]",
        description="Show saved runs and traces of torch.profiler; several make one run. Saved runs need no torch.",
        epilog=_EPILOG,
    )
    parser.add_argument("files", nargs="+", metavar="FILE", help="saved runs, traces, or folders of them")
    add_report_options(parser)
    several = parser.add_argument_group("several ranks or cycles")
    several.add_argument("--rank", type=whole_number, metavar="N", help="only this rank")
    several.add_argument("--add-cycles", action="store_true", help="add up saved runs of one rank, in this order")
    several.add_argument(
        "--jobs",
        type=whole_number,
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
    traces.add_argument("--paths", nargs="+", metavar="PATH", help="only these layers: features.0, layer.*")
    parser.set_defaults(execute=execute, method="forward", dtype=None)


def execute(arguments: argparse.Namespace) -> int:
    folder = job_to_write(arguments)
    if not folder:
        check_output(arguments)
    check_report(arguments)
    if arguments.jobs == 0:
        raise TorchprofError("--jobs is at least 1.")
    if folder:
        write_job(runs_of(files_of(arguments.files), arguments, one_by_one=True), folder)
        return 0
    job, names, is_trace = read_job(arguments), arguments.files, False
    if job is None:
        files = files_of(arguments.files)
        job = read_many(files, arguments)
        if job is None:
            job = JobRun(torchprof.merge(runs_of(files, arguments), add_cycles=arguments.add_cycles))
        names, is_trace = [*files.saved, *files.traces], bool(files.traces)
    run = job.run if arguments.rank is None else job.run.of_rank(arguments.rank)
    code = write_files(partial(_export, run, job.compared), arguments)
    of_ranks = job.compared or run
    print_run(
        of_ranks if arguments.report == "ranks" else run,
        arguments,
        lambda: print_all(run, arguments, names, of_ranks, is_trace=is_trace),
    )
    return code


def _export(run: torchprof.Run, compared: torchprof.Run | None, path: str) -> None:
    is_page = compared is not None and format_of(path) == "html"
    run.export(path, **({"compared": compared} if is_page else {}))
