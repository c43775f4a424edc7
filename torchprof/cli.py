"""The command line: ``torchprof run``, ``profile``, ``flops``, ``trace``, ``merge``, ``show`` and ``compare``. The only
file that prints or exits.

torch is imported by the commands that run something, and not by ``merge``, ``show`` and ``compare``.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import math
import os
import re
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TextIO

import torchprof
from torchprof.encoding import errors_of, readable
from torchprof.errors import TorchprofError, suggest
from torchprof.reports import format_of, options_of
from torchprof.run_file import is_run_file

if TYPE_CHECKING:
    import torch

    from torchprof.script import Ending, Script

_OF_TORCH = re.compile(r"\btorch\b|torch\._C")
_RANK = "{rank}"
_LAYERS_SHOWN = 50
_OPERATORS_SHOWN = 12
_BETWEEN_SHOWN = 5
_ADVICE_SHOWN = 3
_RECORDS = {"record_shapes": "--shapes (shapes and types)", "profile_memory": "--memory (memory)"}
_FUNCTIONS_SHOWN = 15
_INTERRUPTED = 128 + signal.SIGINT
_NOT_WRITTEN = 2
_NUMBERS = ("top", "row_limit", "limit")  # what reports call how much they show: --top
_BY_SHAPE = "group_by_input_shape"

_INPUT = re.compile(
    r"(?:(?P<name>[A-Za-z_]\w*)=)?(?:(?P<dtype>[a-z]\w*):)?(?P<shape>\d+(?:,\d+)*)"
    r"(?::(?P<low>-?\d+(?:\.\d+)?)\.\.(?P<high>-?\d+(?:\.\d+)?))?"
)

_EPILOG = """\
SPEC names what makes the model: package.module:callable or file.py:callable, a class, a function or a module.

An input is [NAME=][DTYPE:]SHAPE[:LOW..HIGH], as in
  1,3,224,224                    a float32 tensor of random numbers from 0 to 1, passed by position
  ids=int64:1,128:0..30522       whole numbers from 0 to 30521, passed as ids=

Examples:
  torchprof profile torchvision.models:alexnet --input 1,3,224,224 --memory
  torchprof profile net.py:Net --kwargs '{"width": 64}' --input 8,64 --backward --train --steps 20 -o run.json
  torchprof profile transformers:BertModel --kwargs '{"config": {"num_hidden_layers": 2}}' \\
      --input input_ids=int64:1,128:0..30522
  torchprof show run.json --depth 2
"""

_RUN_EPILOG = """\
CUDA kernels are recorded where torch finds a CUDA device. The run is saved beside the report, in SCRIPT.torchprof.json
unless -o names another file. The exit code is the script's own, and a script that fails, or is interrupted with Ctrl-C
or SIGTERM, has the report of what ran until then. With --python the script runs twice: Python's own profiler and
torch's would distort each other. Under torchrun each rank writes files, where {rank} in a name is its number, and the
first prints the report of its own.

Examples:
  torchprof run train.py --epochs 1
  torchprof run --warmup-calls 10 --max-calls 50 --memory -m package.train
  torchrun --nproc-per-node 2 -m torchprof run -o 'rank{rank}.json' train.py
"""

_FLOPS_EPILOG = """\
SPEC and INPUT are as for `torchprof profile`. No data is made, so that a model of any size will do:
  torchprof flops transformers:LlamaForCausalLM --kwargs '{"config": {"num_hidden_layers": 80, "hidden_size": 8192}}' \\
      --input input_ids=int64:1,4096 --depth 2
"""

_TRACE_EPILOG = """\
The layers are those of torchprof's own labels, where the trace was recorded inside torchprof.annotate(model); else the
modules that were recorded with_stack=True; else the ranges of record_function. With --model, a SPEC as for `torchprof
profile`, modules have their paths and parameters. Traces of several ranks, or of several cycles of one, make one run.

Examples:
  torchprof trace trace.json.gz -o report.html
  torchprof trace trace.json --model net.py:Net --report device
"""

_MERGE_EPILOG = """\
FILE is a saved run (run.json, of one rank or of several) or a trace that torch.profiler wrote, in any mix; traces are
read by several processes at once. Layers are matched by path. Ranks of the job that gave no file are named.

The report is "ranks", of which --depth, --top, --tablefmt and --sort-by are (flops_max/mean, waiting, ...); what else
shapes the table is for --report tree, the sum over the ranks.

Examples:
  torchprof merge rank*.json
  torchprof merge traces/*.pt.trace.json.gz -o merged.json.gz -o report.html
  torchprof show merged.json.gz --rank 3
"""

_COMPARE_EPILOG = """\
A LIMIT is [LAYERS: ]MEASURE > AMOUNT. Without LAYERS the models are meant; * in a path stands for any one step.
  --fail-if "cpu_total > +10%"              relative to BEFORE; a difference within noise does not fail
  --fail-if "flops > 4.2G"                  absolute, for one forward call of the model
  --fail-if "features.*: cpu_peak > 1.5GB"  for each of these layers
  --fail-if "step > +10%"                   how long a step lasted; "(outside): cpu_total > +20%" is loss, optimizer, …
Measures: cpu_total, self_cpu_total, cuda_total, cpu_mem, backward_cpu_total, flops, macs, params, calls, peak, step, …

The exit code is 0; 1 where a limit is exceeded, which the last lines say on stderr; 2 for bad input, and for limits on
what is not known or not there.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code: 0, 1 where the model or a limit failed, 2 for bad input and for
    files that could not be written, 130 after Ctrl-C. ``torchprof run`` ends as its script does."""
    with readable(sys.stdout, sys.stderr):
        arguments = _parser().parse_args(argv)
    try:
        if arguments.command is _run:  # its script is to find the streams as they are
            _run(arguments)
        with readable(sys.stdout, sys.stderr):
            return _finish(arguments)
    except (TorchprofError, OSError) as error:
        if isinstance(error, BrokenPipeError):  # whoever read our output has seen enough (`| head`)
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        print(f"torchprof: {error}", file=sys.stderr)
        return 2


def _finish(arguments: argparse.Namespace) -> int:
    """Run a command that is all ours, which Ctrl-C ends without a traceback."""
    try:
        code: int = arguments.command(arguments)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        print("torchprof: interrupted (Ctrl-C).", file=sys.stderr)
        return _INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="torchprof",
        description="Which layer? Time, memory and calls of a PyTorch model, layer by layer, forward and backward.",
    )
    parser.add_argument("--version", action="version", version=f"torchprof {torchprof.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    profile = commands.add_parser(
        "profile",
        help="profile a model on random inputs",
        description="Make a model, run it on random inputs, and print what each layer cost.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_model_options(profile)
    profile.add_argument("--cuda", action="store_true", help="run on the GPU and record its kernels")
    profile.add_argument("--memory", action="store_true", help="record allocations")
    profile.add_argument("--flops", action="store_true", help="count parameters, MACs and FLOPs")
    _add_shapes_option(profile)
    profile.add_argument("--warmup", type=_count, default=1, metavar="N", help="steps before, not recorded (default 1)")
    profile.add_argument("--steps", type=_count, default=1, metavar="N", help="recorded steps (default 1)")
    profile.add_argument("--paths", nargs="+", metavar="PATH", help="profile only these layers: features.0, layer.*")
    _add_output_option(profile)
    _add_table_options(profile)
    profile.set_defaults(command=_profile)

    run = commands.add_parser(
        "run",
        help="profile a whole script, unmodified",
        description="Run a script as Python would, find the models that it calls, and print where its time went.",
        epilog=_RUN_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="torchprof run [options] script.py [args ...]\n       torchprof run [options] -m module [args ...]",
    )
    run.add_argument("-m", dest="is_module", action="store_true", help="run a module, as python -m does")
    run.add_argument("--warmup-calls", type=_count, default=0, metavar="N", help="calls of models before, not recorded")
    run.add_argument("--max-calls", type=_count, metavar="N", help="record so many calls of models, then no more")
    run.add_argument("--memory", action="store_true", help="record allocations")
    run.add_argument("--flops", action="store_true", help="count parameters, MACs and FLOPs")
    _add_shapes_option(run)
    run.add_argument("--compile-layers", action="store_true", help="give what torch.compile makes back to its layers")
    run.add_argument("--python", action="store_true", help="run it once more under cProfile, for Python's functions")
    run.add_argument("--depth", type=_count, metavar="N", help="hide the layers below this depth; totals stay")
    _add_hot_option(run)
    _add_output_option(run)
    run.add_argument("script", metavar="script.py", help="the script, or the module")
    run.add_argument("args", nargs=argparse.REMAINDER, help="its own arguments")
    run.set_defaults(command=_run)

    flops = commands.add_parser(
        "flops",
        help="count parameters, MACs and FLOPs of a model from shapes alone",
        description="Make a model on the meta device, which holds no data, and count what its forward computes.",
        epilog=_FLOPS_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_model_options(flops)
    _add_output_option(flops)
    _add_table_options(flops)
    flops.set_defaults(command=_flops)

    trace = commands.add_parser(
        "trace",
        help="read a trace that torch.profiler wrote",
        description="Read traces that torch.profiler wrote, here or elsewhere, and print where the time went.",
        epilog=_TRACE_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    trace.add_argument("traces", nargs="+", metavar="FILE", help="trace.json, trace.json.gz, or a folder of them")
    trace.add_argument("--model", metavar="SPEC", help="the model that was traced, for paths and parameters")
    trace.add_argument("--kwargs", default="{}", metavar="JSON", help="arguments for its callable, a JSON object")
    trace.add_argument("--paths", nargs="+", metavar="PATH", help="only these layers of the model: features.0, layer.*")
    _add_report_options(trace)
    _add_output_option(trace)
    _add_table_options(trace)
    trace.set_defaults(command=_trace)

    merge = commands.add_parser(
        "merge",
        help="make one run of the runs or traces of all ranks",
        description="Make one run of the ranks of a job, from their saved runs or traces, and compare them.",
        epilog=_MERGE_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    merge.add_argument("files", nargs="+", metavar="FILE", help="run.json, trace.json, either gzipped")
    merge.add_argument("--model", metavar="SPEC", help="the model that was traced, for paths and parameters")
    merge.add_argument("--kwargs", default="{}", metavar="JSON", help="arguments for its callable, a JSON object")
    merge.add_argument(
        "--add-cycles", action="store_true", help="saved runs of one rank are cycles, in this order, and add up"
    )
    merge.add_argument("--jobs", type=_count, metavar="N", help="so many processes read traces (default: one a CPU)")
    _add_report_options(merge)
    _add_output_option(merge)
    _add_table_options(merge)
    merge.set_defaults(command=_merge)

    show = commands.add_parser(
        "show",
        help="show a saved run",
        description="Show a saved run: without options all that `torchprof run` prints, with one for the table that "
        "alone. Needs no torch.",
    )
    show.add_argument("run", metavar="RUN.json")
    show.add_argument("--rank", type=_count, metavar="N", help="of a run of several ranks, this one alone")
    _add_report_options(show)
    _add_output_option(show)
    _add_table_options(show)
    show.set_defaults(command=_show)

    compare = commands.add_parser(
        "compare",
        help="say what changed between two saved runs",
        description="Compare two saved runs layer by layer, those that changed most first; needs no torch.",
        epilog=_COMPARE_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    compare.add_argument("before", metavar="BEFORE.json")
    compare.add_argument("after", metavar="AFTER.json")
    compare.add_argument(
        "--fail-if", action="append", default=[], metavar="LIMIT", help="exit with 1 where this holds, again for each"
    )
    compare.add_argument(
        "-o",
        "--output",
        action="append",
        default=[],
        metavar="FILE",
        help="write the comparison to a file, again for each: diff.md, diff.json, diff.html",
    )
    table = compare.add_argument_group("the table")
    table.add_argument("--depth", type=_count, metavar="N", help="hide the layers below this depth; totals stay")
    table.add_argument("--sort-by", metavar="QUANTITY", help="what to show and order by: flops, cpu_peak, calls, …")
    table.add_argument("--top", type=_count, default=20, metavar="N", help="only the N that changed most (default 20)")
    table.add_argument("--tablefmt", metavar="FORMAT", help="any of tabulate's formats: github, html, …")
    compare.set_defaults(command=_compare)
    return parser


def _add_model_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("spec", metavar="SPEC", help="package.module:callable or file.py:callable")
    parser.add_argument("--kwargs", default="{}", metavar="JSON", help="arguments for the callable, a JSON object")
    parser.add_argument("--input", action="append", default=[], metavar="INPUT", help="an input, once for each")
    parser.add_argument("--backward", action="store_true", help="also run backward, from the sum of the outputs")
    parser.add_argument("--train", action="store_true", help="model.train() instead of model.eval()")


def _add_shapes_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shapes", action="store_true", help="record shapes and types: more advice, ops by shape")


def _add_report_options(parser: argparse.ArgumentParser) -> None:
    one = parser.add_argument_group("one report", "--depth, --sort-by, --top, --tablefmt: for those that have them")
    one.add_argument("--report", metavar="NAME", help="top, ops, layers, kernels, memory, steps, device, between, …")
    one.add_argument("--op", metavar="OP", help="layers: which operator, as aten::linear")
    one.add_argument("--layer", metavar="PATH", help="ops, kernels: in these layers alone: features.0, layer.*")
    one.add_argument("--phase", metavar="PHASE", help="ops, layers, kernels, memory: forward, backward or recompute")
    one.add_argument("--by-shape", action="store_true", help="ops: a row for each shape of the inputs")
    one.add_argument("--full-names", action="store_true", help="kernels: names in full")


def _add_output_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-o",
        "--output",
        action="append",
        default=[],
        metavar="FILE",
        help="write the run to a file, again for each: run.json (to show and compare), report.html, table.csv, … "
        "(gzipped where it ends in .gz)",
    )


def _add_table_options(parser: argparse.ArgumentParser) -> None:
    table = parser.add_argument_group("the table")
    table.add_argument("--depth", type=_count, metavar="N", help="hide the layers below this depth; totals stay")
    table.add_argument("--show-events", action="store_true", help="list the operators of each layer")
    table.add_argument("--sort-by", metavar="COLUMN", help="order siblings: cpu_total, self_cpu_mem, calls, …")
    table.add_argument("--top", type=_count, metavar="N", help="only the N largest layers, with those above them")
    table.add_argument("--percent", action="store_true", help="write the share beside each time")
    _add_hot_option(table)
    table.add_argument("--tablefmt", metavar="FORMAT", help="any of tabulate's formats: github, html, …")
    table.add_argument("--summary", action="store_true", help="shapes and the model's figures instead of the tree")


def _add_hot_option(parser: argparse._ActionsContainer) -> None:
    parser.add_argument("--hot", action="store_true", help="order siblings by their total, and mark the hottest path")


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 0 on")
    return int(text)


_OF_THE_TABLE = ("depth", "show_events", "sort_by", "top", "percent", "tablefmt", "hot")
_OF_A_REPORT = ("op", "layer", "phase", "by_shape", "full_names")


def _table_options(arguments: argparse.Namespace) -> dict[str, Any]:
    return {name: getattr(arguments, name) for name in _OF_THE_TABLE}


def _given(arguments: argparse.Namespace, names: Sequence[str]) -> dict[str, Any]:
    """Those of some options that were given."""
    values = {name: getattr(arguments, name) for name in names}
    return {name: value for name, value in values.items() if value is not None and value is not False}


def _in_words(names: Iterable[str]) -> str:
    return ", ".join(f"--{name.replace('_', '-')}" for name in names)


def _check_report(arguments: argparse.Namespace) -> None:
    """Before anything is read, which may take long: whether the report is there and has the options that were given."""
    given = _given(arguments, _OF_A_REPORT)
    if arguments.report and arguments.summary:
        raise TorchprofError("--report and --summary: take one of them; the summary is --report summary, too.")
    if arguments.report:
        _report_options(arguments)
    elif given:
        raise TorchprofError(f"{_in_words(given)}: only for one of the reports: say which with --report.")


def _report_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """What was given, by the names that the report has for it. Raises TorchprofError for an unknown report, and for
    what it has no use for."""
    name = arguments.report
    accepted = options_of(name)
    ours = {_on_the_command_line(option): option for option in accepted}
    given = _given(arguments, (*_OF_THE_TABLE, *_OF_A_REPORT))
    refused = [option for option in given if option not in ours]
    if refused:
        known = [option for option in (*_OF_THE_TABLE, *_OF_A_REPORT) if option in ours]
        choice = f"It has {_in_words(known)}." if known else "It has no options."
        raise TorchprofError(f"--report {name} has no {_in_words(refused)}. {choice}")
    if "op" in accepted and "op" not in given:
        raise TorchprofError(f"--report {name}: of which operator? --op aten::linear, say; --report ops lists all.")
    return {ours[option]: value for option, value in given.items()}


def _on_the_command_line(option: str) -> str:
    """What the command line calls an option of a report."""
    return "top" if option in _NUMBERS else "by_shape" if option == _BY_SHAPE else option


def _in_color(stream: TextIO) -> bool:
    """Whether what is written there is seen in colours: on a terminal that can, by a user who does not refuse them.

    Where ``NO_COLOR`` is set to anything but nothing, there are none (https://no-color.org).
    """
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _show(arguments: argparse.Namespace) -> int:
    _check_output(arguments)
    _check_report(arguments)
    run = torchprof.load(arguments.run)
    if arguments.rank is not None:
        run = run.of_rank(arguments.rank)
    code = _export(run.export, arguments)
    if arguments.report:
        _print_report(run, arguments)
    elif arguments.summary or _given(arguments, _OF_THE_TABLE):
        _print_run(run, arguments)
    else:
        print(_opening(run, arguments.run), *_report(run, arguments, [arguments.run], _in_color(sys.stdout)), sep="\n")
    return code


def _opening(run: torchprof.Run, name: str) -> str:
    recorded = max(meta.wall_ns for meta in run.metas)
    timed = f" Recorded: {recorded / 1e9:.2f} s." if "cpu_ns" in run.meta.measured else ""
    return f"torchprof: {name}.{timed}\n"


def _print_report(run: torchprof.Run, arguments: argparse.Namespace) -> None:
    options = _report_options(arguments)
    if arguments.report == "tree":
        options["color"] = _in_color(sys.stdout)
    if arguments.report == "advice":
        options.setdefault("limit", None)
    print(run.report(arguments.report, **options))


def _trace(arguments: argparse.Namespace) -> int:
    from torchprof.trace import traces_in

    _check_output(arguments)
    _check_report(arguments)
    traces = [str(file) for file in traces_in(arguments.traces)]
    run = _read_traces(traces, _traced_model(arguments), arguments, paths=arguments.paths)
    code = _export(run.export, arguments)
    if arguments.report:
        _print_report(run, arguments)
    elif arguments.summary:
        _print_run(run, arguments)
    else:
        opening = _opening(run, ", ".join(traces))
        print(opening, *_report(run, arguments, arguments.output, color=_in_color(sys.stdout)), sep="\n")
    return code


def _traced_model(arguments: argparse.Namespace) -> torch.nn.Module | None:
    if arguments.model:
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        return _make_model(arguments.model, arguments.kwargs)
    if arguments.kwargs != "{}":
        raise TorchprofError("--kwargs are arguments for a model: say which with --model.")
    return None


def _read_traces(
    files: Sequence[str], model: torch.nn.Module | None, arguments: argparse.Namespace, **options: Any
) -> torchprof.Run:
    try:
        return torchprof.from_trace(
            files,
            model,
            with_timeline=_wants_timeline(arguments) or arguments.report == "memory",
            progress=_tell_share if sys.stderr.isatty() else None,
            **options,
        )
    finally:
        if sys.stderr.isatty():
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def _merge(arguments: argparse.Namespace) -> int:
    _check_output(arguments)
    if not arguments.summary:
        arguments.report = arguments.report or "ranks"
    _check_report(arguments)
    if arguments.jobs == 0:
        raise TorchprofError("--jobs is at least 1.")
    model = _traced_model(arguments)
    saved = [file for file in arguments.files if is_run_file(file)]
    traces = [file for file in arguments.files if file not in saved]
    if model is not None and not traces:
        raise TorchprofError("--model is for traces: saved runs know their model, and there is no trace.")

    def runs() -> Iterator[torchprof.Run]:
        file_of: dict[int, str] = {}
        for _, file in zip(_progress("run", len(saved)), saved):
            run = torchprof.load(file)
            for meta in run.metas:
                if meta.rank in file_of and not arguments.add_cycles:
                    raise TorchprofError(
                        f"{file_of[meta.rank]} and {file} are both of rank {meta.rank}. Where they are of one process, "
                        "one after the other, --add-cycles adds them up. Processes that are no job are all of rank 0: "
                        "show each by itself."
                    )
                file_of[meta.rank] = file
            yield run
        if traces:
            yield _read_traces(traces, model, arguments, processes=arguments.jobs or os.cpu_count() or 1)

    run = torchprof.merge(runs(), add_cycles=arguments.add_cycles)
    code = _export(run.export, arguments)
    if arguments.summary:
        _print_run(run, arguments)
    else:
        _print_report(run, arguments)
    return code


def _tell_share(share: float) -> None:
    print(f"\rreading {share:4.0%} ", end="", file=sys.stderr, flush=True)


def _compare(arguments: argparse.Namespace) -> int:
    from torchprof.budget import check, limit_of
    from torchprof.reports.tree import printable

    limits = [limit_of(text) for text in arguments.fail_if]
    _check_output(arguments, of="diff")
    diff = torchprof.compare(arguments.before, arguments.after)
    code = _export(diff.export, arguments)
    names = ("depth", "sort_by", "top", "tablefmt")
    print(diff.report("table", **{name: getattr(arguments, name) for name in names}))
    outcomes = check(diff, limits)
    if outcomes:
        print()
    for outcome in outcomes:
        if not outcome.failures:
            print("\n".join([f"Limit kept: {printable(outcome.limit.text)}", *map(printable, outcome.remarks)]))
    failures = [failure for outcome in outcomes for failure in outcome.failures]
    sys.stdout.flush()
    for failure in failures:
        print(printable(failure), file=sys.stderr)
    return 1 if failures else code


def _print_run(run: torchprof.Run, arguments: argparse.Namespace) -> None:
    if arguments.summary:
        given = [name for name in _given(arguments, _OF_THE_TABLE) if name not in ("depth", "tablefmt")]
        if given:
            raise TorchprofError(f"The summary has no {_in_words(given)}: leave that out, or leave --summary out.")
        print(run.report("summary", depth=arguments.depth, tablefmt=arguments.tablefmt))
        return
    print(run.report("tree", **_table_options(arguments), color=_in_color(sys.stdout)))
    if any(spread.count > 1 for spread in run.samples.values()):
        print("\nOne forward call, on the CPU's clock:\n")
        print(run.report("calls", depth=arguments.depth, tablefmt=arguments.tablefmt))


def _profile(arguments: argparse.Namespace) -> int:
    # torch 2.13 writes two lines a session to stderr, for every session, unless told otherwise before its import.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    inputs = [_parse_input(text) for text in arguments.input]
    if not arguments.steps:
        raise TorchprofError("--steps is at least 1.")
    _check_output(arguments)
    import torch

    if arguments.cuda and not torch.cuda.is_available():
        raise TorchprofError("--cuda: torch finds no CUDA device here. Leave it out to profile on the CPU.")
    torch.manual_seed(0)
    model = _make_model(arguments.spec, arguments.kwargs)
    model.train(arguments.train)
    device = torch.device("cuda" if arguments.cuda else "cpu")
    model.to(device)
    args, kwargs = _make_inputs(inputs, device)

    def step() -> None:
        with nullcontext() if arguments.backward else torch.no_grad():
            output = model(*args, **kwargs)
        if arguments.backward:
            _sum_of(output).backward()
            model.zero_grad(set_to_none=True)

    prof = torchprof.Profile(
        model,
        use_cuda=arguments.cuda,
        profile_memory=arguments.memory,
        paths=arguments.paths,
        record_shapes=arguments.shapes,
        with_flops=arguments.flops,
        with_timeline=_wants_timeline(arguments),
    )
    failure: Exception | KeyboardInterrupt | None = None
    try:
        for _ in _progress("warm-up", arguments.warmup):
            step()
        with prof:
            for _ in _progress("step", arguments.steps):
                step()
                prof.step()
    except TorchprofError:
        raise
    except (Exception, KeyboardInterrupt) as error:
        failure = error
    code = 0
    if prof.exited:
        code = _export(prof.run.export, arguments)  # before the table, which may break (a closed pipe, a wrong column)
        _print_run(prof.run, arguments)
        sys.stdout.flush()
    if isinstance(failure, KeyboardInterrupt):
        what = "shown is what ran until then" if prof.exited else "nothing was recorded yet"
        print(f"torchprof: interrupted (Ctrl-C): {what}.", file=sys.stderr)
        return _INTERRUPTED
    return code if failure is None else _tell_failure(arguments, failure)


def _run(arguments: argparse.Namespace) -> NoReturn:
    # As for _profile; and before the script, which may import torch, too.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    name = arguments.script.rpartition(".")[2] if arguments.is_module else Path(arguments.script).resolve().stem
    rank, world_size = _place_in_job()
    if arguments.python and world_size > 1:
        raise TorchprofError("--python runs the script twice, and a rank of a job cannot run alone: leave it out.")
    asked = bool(arguments.output)
    arguments.output = _outputs_of(rank, world_size, arguments.output, name)
    if asked:  # a file that nobody asked for keeps no script from running
        _check_output(arguments)
    files = {shown: Path(shown).absolute() for shown in arguments.output}  # the script may go elsewhere
    report = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding=sys.stdout.encoding, errors=errors_of(sys.stdout))
    import torch

    from torchprof.program import Program
    from torchprof.script import Script

    script = Script(arguments.script, arguments.args, arguments.is_module)
    program = Program(
        use_cuda=torch.cuda.is_available(),
        profile_memory=arguments.memory,
        with_flops=arguments.flops,
        record_shapes=arguments.shapes,
        with_timeline=_wants_timeline(arguments),
        compile_layers=arguments.compile_layers,
        warmup_calls=arguments.warmup_calls,
        max_calls=arguments.max_calls,
    )
    failures: dict[str, str] = {}

    @contextmanager
    def recorded() -> Iterator[None]:
        with program:
            yield
        # Before the report, which may break: whoever reads it may have seen enough (`| head`), and close the pipe. And
        # here, where SIGTERM does not end us: that is how torchrun ends the other ranks when one has failed.
        failures.update({shown: _failure_to_write(program.run.export, path, shown) for shown, path in files.items()})

    ending = script.run(recorded)
    if ending.began and rank:  # of a job's ranks, the first prints
        with suppress(Exception):
            for failure in filter(None, failures.values()):
                print(failure, file=sys.stderr)
    elif ending.began:
        with suppress(Exception):  # the script may have closed it, or put anything in its place
            sys.stdout.flush()
        where = [failure or _written(shown, world_size) for shown, failure in failures.items()]
        try:
            with suppress(BrokenPipeError), report:
                for text in _program_report(program.run, ending, script, arguments, files, color=_in_color(report)):
                    print(text, file=report, flush=True)
                print("", *where, sep="\n", file=report)
        except (TorchprofError, OSError) as error:  # the exit code stays the script's
            with suppress(Exception):
                print(f"torchprof: {error}", *where, sep="\n", file=sys.stderr)
    ending.end()


def _place_in_job() -> tuple[int, int]:
    """The rank of this process and how many there are, as torchrun tells a process that it starts."""
    rank, world_size = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    return (int(rank), int(world_size)) if rank.isdecimal() and world_size.isdecimal() else (0, 1)


def _outputs_of(rank: int, world_size: int, given: Sequence[str], name: str) -> list[str]:
    """The files that a rank writes: those that were given, with its number in them, else one beside the report."""
    if not given:
        return [f"{name}.rank{rank}.torchprof.json" if world_size > 1 else f"{name}.torchprof.json"]
    for file in given:
        if world_size > 1 and _RANK not in file:
            raise TorchprofError(
                f"-o {file}: all {world_size} ranks of the job would write this file. Put {_RANK} into its name."
            )
    return [file.replace(_RANK, str(rank)) for file in given]


def _failure_to_write(export: Callable[[Path], None], path: Path, shown: str) -> str:
    """Write a file. Says in a sentence why that failed: the report, and other files, are to be had in any case."""
    try:
        export(path)
    except OSError as error:
        return f"Not written: {shown}: {error.strerror or error}. Another place: -o FILE."
    except TorchprofError as error:
        return f"Not written: {shown}: {error}"
    return ""


def _written(shown: str, world_size: int) -> str:
    """Which file was written, and what can be done with it."""
    if format_of(shown) != "json":
        return f"Written: {shown}."
    if world_size > 1:
        return f"Written: {shown}; each other rank writes its own. To compare them: torchprof merge FILE …"
    return f"Written: {shown}. To see more of it: torchprof show {shown}"


def _program_report(
    run: torchprof.Run,
    ending: Ending,
    script: Script,
    arguments: argparse.Namespace,
    files: Mapping[str, Path],
    color: bool,
) -> Iterator[str]:
    """The report of a whole script, section after section, the answer first."""
    yield f"\ntorchprof: {arguments.script} {ending.outcome}. Recorded: {run.meta.wall_ns / 1e9:.2f} s.\n"
    yield from _report(run, arguments, [shown for shown, path in files.items() if path.is_file()], color)
    if arguments.python:
        yield _section(
            "Python's functions outside torch, of a second run under cProfile", _python_table(script, ending)
        )


def _report(run: torchprof.Run, arguments: argparse.Namespace, written: Sequence[str], color: bool) -> Iterator[str]:
    """What is known of a run that somebody sees for the first time, section after section, the answer first.

    ``written``: the files that it is in.
    """
    from torchprof.reports.tree import fitting_depth

    yield run.report("headline")
    if run.meta.environment:
        yield "\n" + "\n".join(f"  {name:<8} {value}" for name, value in run.meta.environment)
    advice = _advice(run, written, is_trace=arguments.command is _trace)
    if advice:
        yield _section("What to change", advice)
    timed = not {"cpu_ns", "device_ns"}.isdisjoint(run.meta.measured)
    yield _section("Where the time goes" if timed else "Where the FLOPs are", run.report("top"))
    # What there is to doubt was said, once: the warnings, and which ranks of the job are missing. The verdicts on ranks
    # depend on how many the job has.
    of_job = replace(run, metas=tuple(replace(meta, warnings=()) for meta in run.metas))
    run = replace(run, metas=tuple(replace(meta, warnings=(), world_size=1) for meta in run.metas))
    depth = fitting_depth(run, _LAYERS_SHOWN) if arguments.depth is None else arguments.depth
    if run.layers:
        deepest = max(len(layer.path) for layer in run.layers) - 1
        hidden = "" if depth >= deepest else f"\nDeeper layers are hidden: --depth {deepest} shows all."
        names = ("show_events", "sort_by", "top", "percent", "tablefmt", "hot")
        options = {name: getattr(arguments, name) for name in names if getattr(arguments, name, None)}
        yield _section("The layers", run.report("tree", depth=depth, color=color, **options) + hidden)
    if len(run.metas) > 1:
        yield _section("The ranks", of_job.report("ranks"))
    if run.device_times:
        yield _section("The devices", run.report("device"))
    if any(time.communication_ns for time in run.device_times):
        yield _section("Communication", run.report("collectives"))
    if "cpu_ns" not in run.meta.measured and run.device_times:  # a trace of devices alone
        yield _section("The kernels", run.report("kernels", row_limit=_OPERATORS_SHOWN))
    else:
        if any(chain[0].kind != "python" for chain in run.rows.frames if chain):
            yield _section("The operators, by themselves", run.report("ops", row_limit=_OPERATORS_SHOWN))
        if "cpu_ns" in run.meta.measured:
            yield _section("Between the operators", run.report("between", limit=_BETWEEN_SHOWN))
    if run.memory:
        yield _section("Memory", run.report("memory", depth=depth))
    if arguments.command is _show and any(spread.count > 1 for spread in run.samples.values()):
        yield _section("One forward call, on the CPU's clock", run.report("calls", depth=depth))


def _advice(run: torchprof.Run, written: Sequence[str], is_trace: bool) -> str:
    """What is the most worth changing, and how to see and find more, in the words of the command line; "" for
    nothing."""
    from torchprof.advice import advise
    from torchprof.reports.advice import findings, not_shown, unrecorded

    found = advise(run)
    if not found:
        return ""
    parts = findings(run, found[:_ADVICE_SHOWN])
    if len(found) > _ADVICE_SHOWN:
        saved = next((shown for shown in written if format_of(shown) == "json"), None)
        show = f"torchprof show {saved}" if saved else "saved with -o run.json, torchprof show run.json"
        parts.append(f"{not_shown(len(found) - _ADVICE_SHOWN)}: {show} --report advice shows all.")
    missing = [name for name in unrecorded(run) if name in _RECORDS]
    if missing and is_trace:
        parts.append(f"More can be found in a trace with {' and '.join(f'{name}=True' for name in missing)}.")
    elif missing:
        parts.append(f"More can be found in a run with {' and '.join(_RECORDS[name] for name in missing)}.")
    return "\n\n".join(parts)


def _section(title: str, text: str) -> str:
    return f"\n{title}\n{'=' * len(title)}\n{text}"


def _python_table(script: Script, ending: Ending) -> str:
    import torch

    from torchprof.reports.tree import draw
    from torchprof.script import profile_python

    if ending.signal is not None:
        return "Not run: the first run was interrupted."
    if sys.stderr.isatty():
        print("torchprof: running it once more under cProfile ...", file=sys.stderr, flush=True)
    done = profile_python(script)
    failed = f"This run left with exit code {done.code}. {done.errors}".rstrip() if done.code else ""
    if not done.functions:
        return f"It left nothing to show. {failed}".rstrip()
    in_torch = str(Path(torch.__file__).parent) + os.sep
    table = [
        [
            f"{one.self_ns / 1e9:.3f}s",
            f"{one.total_ns / 1e9:.3f}s",
            str(one.calls),
            one.function if one.file == "~" else f"{_shown(one.file)}:{one.line} {one.function}",
        ]
        for one in done.functions
        if not (one.file.startswith(in_torch) or (one.file == "~" and _OF_TORCH.search(one.function)))
    ]
    text = draw(["Self", "Total", "Calls", "Function"], table[:_FUNCTIONS_SHOWN])
    return f"{text}\n{failed}" if failed else text


def _shown(file: str) -> str:
    """A path from the folder that Python found it in, where that is known."""
    folders = [folder for folder in sys.path if folder and Path(file).is_relative_to(folder)]
    return str(Path(file).relative_to(max(folders, key=len))) if folders else file


def _flops(arguments: argparse.Namespace) -> int:
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    inputs = [_parse_input(text) for text in arguments.input]
    _check_output(arguments)
    import torch

    device = torch.device("meta")
    with device:
        model = _make_model(arguments.spec, arguments.kwargs)
    model.train(arguments.train)
    args, kwargs = _make_inputs(inputs, device)
    try:
        with torch.set_grad_enabled(arguments.backward):
            run = torchprof.flops(model, *args, **kwargs)
    except TorchprofError:
        raise
    except Exception as error:
        return _tell_failure(arguments, error)
    code = _export(run.export, arguments)
    _print_run(run, arguments)
    return code


def _check_output(arguments: argparse.Namespace, of: str = "run") -> None:
    """Before anything runs, which may take long: whether all files can be written. Raises TorchprofError that names
    each one that cannot."""
    known: dict[Path, str] = {}
    problems = []
    for file in arguments.output:
        path = Path(file).resolve()
        problem = f"-o {file}: it is the same file as -o {known[path]}." if path in known else _problem_with(file, of)
        known[path] = file
        problems += [problem] if problem else []
    if problems:
        raise TorchprofError("\n".join(problems))


def _problem_with(file: str, of: str) -> str:
    """Why a file cannot be written, "" where it can, as far as is known before."""
    path = Path(file).absolute()
    if path.is_dir():
        return f"-o {file}: that is a folder."
    try:
        format_of(file, of=of)
    except TorchprofError as error:
        return f"-o {error}"
    if not path.parent.is_dir():
        return f"-o {file}: there is no such folder to write to."
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        return f"-o {file}: there is no permission to write it."
    return ""


def _wants_timeline(arguments: argparse.Namespace) -> bool:
    """Whether a file is to be written that shows what happened when."""
    return any(format_of(file) in ("chrome-trace", "html") for file in arguments.output)


def _export(export: Callable[[Path], None], arguments: argparse.Namespace) -> int:
    """Write all files that can be written, and say so of each. Returns the exit code."""
    failures = [_failure_to_write(export, Path(file), file) for file in arguments.output]
    for file, failure in zip(arguments.output, failures):
        print(failure or f"Written: {file}.", file=sys.stderr)
    return _NOT_WRITTEN if any(failures) else 0


def _tell_failure(arguments: argparse.Namespace, failure: Exception) -> int:
    given = " ".join(arguments.input) or "no input (--input)"
    print(f"torchprof: the model failed on {given}: {type(failure).__name__}: {failure}", file=sys.stderr)
    return 1


def _make_inputs(inputs: Sequence[_Input], device: torch.device) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    args = [one.make(device) for one in inputs if one.name is None]
    return args, {one.name: one.make(device) for one in inputs if one.name is not None}


def _progress(what: str, count: int) -> Iterator[int]:
    """Count up, and on a terminal say where we are."""
    for number in range(count):
        if sys.stderr.isatty():
            print(f"\r{what} {number + 1} of {count} ", end="", file=sys.stderr, flush=True)
        yield number
    if count and sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr, flush=True)


def _make_model(spec: str, kwargs_text: str) -> torch.nn.Module:
    from torch import nn

    try:
        kwargs = json.loads(kwargs_text)
    except ValueError as error:
        raise TorchprofError(f"--kwargs is no JSON ({error}). Write an object: '{{\"width\": 64}}'.") from error
    if not isinstance(kwargs, dict):
        raise TorchprofError(f"--kwargs is {kwargs_text}; it has to be a JSON object: '{{\"width\": 64}}'.")
    made = _find(spec)
    if not isinstance(made, nn.Module):
        if not callable(made):
            raise TorchprofError(f"{spec} is {made!r:.60}: neither a module nor something that makes one.")
        try:
            if hasattr(made, "config_class") and isinstance(kwargs.get("config", {}), dict):
                kwargs["config"] = made.config_class(**kwargs.get("config", {}))  # as models of transformers take it
            made = made(**kwargs)
        except Exception as error:
            raise TorchprofError(f"{spec} could not be made: {type(error).__name__}: {error}") from error
    elif kwargs:
        raise TorchprofError(f"{spec} is a module already: --kwargs has nothing to go to.")
    if not isinstance(made, nn.Module):
        raise TorchprofError(f"{spec} made {made!r:.60}, which is no torch.nn.Module.")
    return made


def _find(spec: str) -> Any:
    """The object that ``package.module:name`` or ``file.py:name`` names."""
    place, colon, name = spec.rpartition(":")
    if not colon or not place or not name:
        raise TorchprofError(f"{spec!r} names no model: write package.module:callable or file.py:callable.")
    try:
        if place.endswith(".py"):
            path = Path(place).resolve()
            if not path.is_file():
                raise TorchprofError(f"There is no file {place}.")
            sys.path.insert(0, str(path.parent))
            found = importlib.util.spec_from_file_location(path.stem, path)
            assert found is not None and found.loader is not None
            module = importlib.util.module_from_spec(found)
            sys.modules.setdefault(path.stem, module)  # a file may be called as a module that is there already
            found.loader.exec_module(module)
        else:
            sys.path.insert(0, str(Path.cwd()))
            module = importlib.import_module(place)
    except TorchprofError:
        raise
    except Exception as error:
        raise TorchprofError(f"{place} could not be imported: {type(error).__name__}: {error}") from error
    try:
        return attrgetter(name)(module)
    except AttributeError as error:
        names = [one for one in vars(module) if not one.startswith("_")]
        raise TorchprofError(f"{place} has no {name!r}. {suggest(name, names)}") from error


class _Input(NamedTuple):
    """A random tensor to be made."""

    text: str
    name: str | None
    dtype: str
    shape: tuple[int, ...]
    low: float | None
    high: float | None

    def make(self, device: torch.device) -> torch.Tensor:
        import torch

        dtype = getattr(torch, self.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise TorchprofError(f"--input {self.text}: torch has no dtype {self.dtype!r}; int64 or float32, say.")
        try:
            if dtype.is_floating_point or dtype.is_complex:
                low, high = self.low or 0.0, 1.0 if self.high is None else self.high
                return torch.rand(self.shape, device=device).mul_(high - low).add_(low).to(dtype)
            first, end = math.ceil(self.low or 0), 2 if self.high is None else math.ceil(self.high)
            return torch.randint(first, end, self.shape, device=device).to(dtype)
        except (RuntimeError, TypeError) as error:
            raise TorchprofError(f"--input {self.text} cannot be made: {error}") from error


def _parse_input(text: str) -> _Input:
    match = _INPUT.fullmatch(text)
    if match is None:
        raise TorchprofError(
            f"--input {text!r} reads as [NAME=][DTYPE:]SHAPE[:LOW..HIGH]: 1,3,224,224 or ids=int64:1,128:0..30522."
        )
    low, high = (None if match[end] is None else float(match[end]) for end in ("low", "high"))
    if low is not None and high is not None and low >= high:
        raise TorchprofError(f"--input {text!r}: the range {match['low']}..{match['high']} is empty.")
    shape = tuple(map(int, match["shape"].split(",")))
    return _Input(text, match["name"], match["dtype"] or "float32", shape, low, high)


def _sum_of(output: Any) -> torch.Tensor:
    """The sum of all floating-point tensors in an output that have a gradient, for backward to start from."""
    import torch

    total: torch.Tensor | None = None
    waiting = [output]
    while waiting:
        value = waiting.pop()
        if isinstance(value, torch.Tensor):
            if value.requires_grad:
                total = value.sum() if total is None else total + value.sum()
        elif isinstance(value, dict):
            waiting.extend(value.values())
        elif isinstance(value, (tuple, list)):
            waiting.extend(value)
    if total is None:
        raise TorchprofError("--backward: no output of the model has a gradient.")
    return total
