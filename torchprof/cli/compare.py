"""``torchprof compare``: compare two saved runs, and check limits."""

from __future__ import annotations

import argparse
import json
import sys

import torchprof
from torchprof.cli.options import Commands, add_options, add_output_option, check_output
from torchprof.cli.output import write_files
from torchprof.errors import printable

_EPILOG = """\
A LIMIT is [LAYERS: ]MEASURE > AMOUNT. Without LAYERS it is on the models; * in a path is any one step.
  "cpu_total > +10%"              relative to BEFORE; a difference within noise does not fail
  "flops > 4.2G"                  absolute, for one forward call of the model
  "features.*: cpu_peak > 1.5GB"  for each of these layers
  "step > 120ms"                  the time of a step
  "(outside): cpu_total > +20%"   the work outside of all layers: loss, optimizer, …
Measures: cpu_total, self_cpu_total, cuda_total, cpu_mem, backward_cpu_total, flops, macs, params, calls, peak, step, …
Units: ns, us, ms, s; B, KB, MB, GB, TB (by 1024); K, M, G, T, P for FLOPs and calls (by 1000).

The exit code is 1 if a limit is exceeded: the last lines on stderr name it. It is 2 for a limit that cannot be checked.

examples:
  torchprof compare before.json after.json
  torchprof compare before.json after.json --sort-by flops --top 5
  torchprof compare before.json after.json --fail-if "step > +10%" --fail-if "peak > 24GB" -o diff.md
"""


def add_to(commands: Commands) -> None:
    parser = commands.add_parser(
        "compare",
        help="say what changed between two saved runs",
        usage="torchprof compare BEFORE.json AFTER.json [options]",
        description="Compare two saved runs layer by layer, the largest changes first. This needs no torch.",
        epilog=_EPILOG,
    )
    parser.add_argument("before", metavar="BEFORE.json")
    parser.add_argument("after", metavar="AFTER.json")
    limits = parser.add_argument_group("limits")
    limits.add_argument(
        "--fail-if", action="append", default=[], metavar="LIMIT", help="exit with 1 if this holds; once for each limit"
    )
    table = parser.add_argument_group("the table")
    add_options(table, "--depth")
    add_options(table, "--sort-by", metavar="QUANTITY", help="what to show and order by: flops, cpu_peak, calls, …")
    add_options(table, "--top", default=20, help="only the N that changed most (default 20)")
    add_options(table, "--tablefmt")
    output = add_output_option(parser, "write the comparison to a file, once for each: diff.md, diff.json, diff.html")
    add_options(output, "--json")
    parser.set_defaults(execute=execute)


def execute(arguments: argparse.Namespace) -> int:
    from torchprof.comparison.budget import check, limit_of

    limits = [limit_of(text) for text in arguments.fail_if]
    check_output(arguments, of="diff")
    diff = torchprof.compare(arguments.before, arguments.after)
    code = write_files(diff.export, arguments)
    names = ("depth", "sort_by", "top", "tablefmt")
    table = diff.report("table", **{name: getattr(arguments, name) for name in names})
    outcomes = check(diff, limits)
    if arguments.json:
        print(json.dumps(table.data))
    else:
        print(table, *([""] if outcomes else []), sep="\n")
    for outcome in outcomes:
        if not outcome.failures and not arguments.json:
            print("\n".join([f"Limit kept: {printable(outcome.limit.text)}", *map(printable, outcome.remarks)]))
    failures = [failure for outcome in outcomes for failure in outcome.failures]
    sys.stdout.flush()
    for failure in failures:
        print(printable(failure), file=sys.stderr)
    return 1 if failures else code
