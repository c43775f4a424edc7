"""The parser of the command line."""

from __future__ import annotations

import argparse

import torchprof
from torchprof.cli.compare import compare_command
from torchprof.cli.flops import flops_command
from torchprof.cli.merge import merge_command
from torchprof.cli.options import (
    add_hot_option,
    add_model_options,
    add_output_option,
    add_report_options,
    add_shapes_option,
    add_table_options,
    whole_number,
)
from torchprof.cli.profile import profile_command
from torchprof.cli.run import run_command
from torchprof.cli.show import show_command
from torchprof.cli.trace import trace_command

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


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="torchprof",
        description="Which layer? Time, memory and calls of a PyTorch model, layer by layer, forward and backward.",
    )
    parser.add_argument("--version", action="version", version=f"torchprof {torchprof.__version__}")
    commands = parser.add_subparsers(required=True, dest="subcommand", metavar="COMMAND")

    profile = commands.add_parser(
        "profile",
        help="profile a model on random inputs",
        description="Make a model, run it on random inputs, and print what each layer cost.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_model_options(profile)
    profile.add_argument("--cuda", action="store_true", help="run on the GPU and record its kernels")
    profile.add_argument("--memory", action="store_true", help="record allocations")
    profile.add_argument("--flops", action="store_true", help="count parameters, MACs and FLOPs")
    add_shapes_option(profile)
    profile.add_argument(
        "--warmup", type=whole_number, default=1, metavar="N", help="steps before, not recorded (default 1)"
    )
    profile.add_argument("--steps", type=whole_number, default=1, metavar="N", help="recorded steps (default 1)")
    profile.add_argument("--paths", nargs="+", metavar="PATH", help="profile only these layers: features.0, layer.*")
    add_output_option(profile)
    add_table_options(profile)
    profile.set_defaults(command=profile_command)

    run = commands.add_parser(
        "run",
        help="profile a whole script, unmodified",
        description="Run a script as Python would, find the models that it calls, and print where its time went.",
        epilog=_RUN_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="torchprof run [options] script.py [args ...]\n       torchprof run [options] -m module [args ...]",
    )
    run.add_argument("-m", dest="is_module", action="store_true", help="run a module, as python -m does")
    run.add_argument(
        "--warmup-calls", type=whole_number, default=0, metavar="N", help="calls of models before, not recorded"
    )
    run.add_argument("--max-calls", type=whole_number, metavar="N", help="record so many calls of models, then no more")
    run.add_argument("--memory", action="store_true", help="record allocations")
    run.add_argument("--flops", action="store_true", help="count parameters, MACs and FLOPs")
    add_shapes_option(run)
    run.add_argument("--compile-layers", action="store_true", help="give what torch.compile makes back to its layers")
    run.add_argument("--python", action="store_true", help="run it once more under cProfile, for Python's functions")
    run.add_argument("--depth", type=whole_number, metavar="N", help="hide the layers below this depth; totals stay")
    add_hot_option(run)
    add_output_option(run)
    run.add_argument("script", metavar="script.py", help="the script, or the module")
    run.add_argument("args", nargs=argparse.REMAINDER, help="its own arguments")
    run.set_defaults(command=run_command)

    flops = commands.add_parser(
        "flops",
        help="count parameters, MACs and FLOPs of a model from shapes alone",
        description="Make a model on the meta device, which holds no data, and count what its forward computes.",
        epilog=_FLOPS_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_model_options(flops)
    add_output_option(flops)
    add_table_options(flops)
    flops.set_defaults(command=flops_command)

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
    add_report_options(trace)
    add_output_option(trace)
    add_table_options(trace)
    trace.set_defaults(command=trace_command)

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
    merge.add_argument(
        "--jobs", type=whole_number, metavar="N", help="so many processes read traces (default: one a CPU)"
    )
    add_report_options(merge)
    add_output_option(merge)
    add_table_options(merge)
    merge.set_defaults(command=merge_command)

    show = commands.add_parser(
        "show",
        help="show a saved run",
        description="Show a saved run: without options all that `torchprof run` prints, with one for the table that "
        "alone. Needs no torch.",
    )
    show.add_argument("run", metavar="RUN.json")
    show.add_argument("--rank", type=whole_number, metavar="N", help="of a run of several ranks, this one alone")
    add_report_options(show)
    add_output_option(show)
    add_table_options(show)
    show.set_defaults(command=show_command)

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
    table.add_argument("--depth", type=whole_number, metavar="N", help="hide the layers below this depth; totals stay")
    table.add_argument("--sort-by", metavar="QUANTITY", help="what to show and order by: flops, cpu_peak, calls, …")
    table.add_argument(
        "--top", type=whole_number, default=20, metavar="N", help="only the N that changed most (default 20)"
    )
    table.add_argument("--tablefmt", metavar="FORMAT", help="any of tabulate's formats: github, html, …")
    compare.set_defaults(command=compare_command)
    return parser
