"""``torchprof compare``: two saved runs, with limits. ``torchprof try``: two versions of a script, in turn."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import textwrap
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torchprof
from torchprof.analyze.report import ReportTable
from torchprof.cli.options import Commands, add_options, add_output_option, check_output, seconds_above_0
from torchprof.cli.output import write_files
from torchprof.errors import TorchprofError, printable, printable_lines
from torchprof.reports.documents import text_of
from torchprof.run.formats import UNKNOWN, as_range, short_time

if TYPE_CHECKING:
    from torchprof.profile.in_turn import InTurn, Version

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

_EPILOG_OF_TRY = """\
Each version is a process of its own. One runs for some steps while the other one is stopped, and so on, until the
interval of the gain is 2 % wide or the time is spent. So both meet the same noise of the machine. A step is one of the
loop, as in `torchprof run`; scripts of only a few steps run as a whole, again and again. Start-up, until the end of the
first step, counts apart. What a version prints is not shown, but compared. Both have their memory all the time, and
run in the same folder, maybe several times: let them write files of different names.

A version with arguments is in quotes. A version that has not ended by then is ended by SIGTERM: its files may be
incomplete.

examples:
  torchprof try train.py train_fused.py
  torchprof try "train.py --workers 0" "train.py --workers 4" --seconds 120
  torchprof try "-m package.train" "-m package.train --compile"
"""
_SHOWN = 100  # characters of a line


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
    _add_try_to(commands)


def _add_try_to(commands: Commands) -> None:
    parser = commands.add_parser(
        "try",
        help="say how much faster a changed script is",
        usage="torchprof try BEFORE.py AFTER.py [options]",
        description="Run the steps of two versions of a script in turn, and print what the change gains.",
        epilog=_EPILOG_OF_TRY,
    )
    parser.add_argument("before", metavar="BEFORE.py", type=_script)
    parser.add_argument("after", metavar="AFTER.py", type=_script)
    parser.add_argument(
        "--seconds", type=seconds_above_0, default=60.0, metavar="S", help="without start-up, at most (default: 60)"
    )
    add_options(parser, "--json")
    parser.set_defaults(execute=_try)


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


# Two versions of a script


def _script(text: str) -> tuple[str, list[str], bool]:
    """The file, or the name of a module, with its arguments, and whether it is a module."""
    words = [text] if text and Path(text).exists() else shlex.split(text)
    is_module = words[:1] == ["-m"]
    if len(words) <= is_module:
        raise argparse.ArgumentTypeError(f"{text!r} names no script: 'train.py --epochs 1', or '-m package.train'")
    return words[is_module], words[is_module + 1 :], is_module


def _try(arguments: argparse.Namespace) -> int:
    from torchprof.profile.benchmark import shown_progress
    from torchprof.profile.in_turn import run_both
    from torchprof.profile.script import Script

    if int(os.environ.get("WORLD_SIZE") or 1) > 1:
        raise TorchprofError("torchprof try runs one process of each version: start it without torchrun.")
    before, after = Script(*arguments.before), Script(*arguments.after)
    with shown_progress() as show:
        result = run_both(before, after, arguments.seconds, show)
    print(json.dumps(_data(result)) if arguments.json else printable_lines("\n\n".join(_text(result))))
    return 0


def _text(result: InTurn) -> list[str]:
    unit = result.unit
    rows = [[version.name, *_times(version, unit)] for version in (result.before, result.after)]
    headings = ["", "Step", "Start-up", "Steps", "Whole run"]
    return [_headline(result), text_of(ReportTable.of_cells(headings, rows)), _about_output(result)]


def _headline(result: InTurn) -> str:
    """What the change gains: "train_fused.py takes 31% less time than train.py (28–33%), by 24 turns of both."."""
    before, after, gain = result.before.name, result.after.name, result.gain
    if gain is None:
        return f"Nothing is known: {before} and {after} have not both come to the end of a second step in time."
    takes = f"{after} takes {abs(gain):.0%} {'less' if gain >= 0 else 'more'} time than {before}"
    count = f"{len(result.pairs)} {'turns' if result.unit == 'step' else 'runs'} of both"
    if result.interval is None:
        return f"{takes} in {count}. They are too few to tell a gain from noise."
    low, high = sorted(value if gain >= 0 else -value for value in result.interval)
    interval = as_range(f"{low:.0%}", f"{high:.0%}")
    return f"{'' if low > 0 else 'No difference beyond noise: '}{takes} ({interval}), by {count}."


def _times(version: Version, unit: str) -> list[str]:
    step = short_time(median(version.steps) * 1e9) if version.steps and unit == "step" else UNKNOWN
    start_up = UNKNOWN if version.start_up_s is None else short_time(version.start_up_s * 1e9)
    if not version.whole_s:
        return [step, start_up, UNKNOWN, UNKNOWN]
    return [step, start_up, f"{version.counts[0]:,}", short_time(median(version.whole_s) * 1e9)]


def _about_output(result: InTurn) -> str:
    """Whether both printed the same, which is the case if they compute the same from the same seed."""
    lines = min(len(result.before.output), len(result.after.output))
    if not lines:
        return "The results of both were not compared: a version prints nothing."
    if (different := result.first_difference) is None:
        return f"Both print the same {lines:,} line{'s' * (lines != 1)}."
    number, *texts = different
    before, after = (textwrap.shorten(text, _SHOWN, placeholder=" …") for text in texts)
    return f"Line {number} of what they print is the first that differs:\n  {before}\n  {after}"


def _data(result: InTurn) -> dict[str, Any]:
    different = result.first_difference
    return {
        "unit": result.unit,
        "gain": result.gain,
        "interval": None if result.interval is None else [*result.interval],
        "pairs": len(result.pairs),
        "before": _data_of(result.before),
        "after": _data_of(result.after),
        "first_different_line": None if different is None else different[0],
    }


def _data_of(version: Version) -> dict[str, Any]:
    return {
        "name": version.name,
        "steps_s": version.steps,
        "start_up_s": version.start_up_s,
        "whole_s": version.whole_s,
        "steps_of_a_run": version.counts,
    }
