"""Options that several commands share, and how they are checked."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from torchprof.errors import TorchprofError
from torchprof.reports import format_of, options_of

_NUMBERS = ("top", "row_limit", "limit")  # what reports call how much they show: --top
_BY_SHAPE = "group_by_input_shape"


def add_model_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("spec", metavar="SPEC", help="package.module:callable or file.py:callable")
    parser.add_argument("--kwargs", default="{}", metavar="JSON", help="arguments for the callable, a JSON object")
    parser.add_argument("--input", action="append", default=[], metavar="INPUT", help="an input, once for each")
    parser.add_argument("--backward", action="store_true", help="also run backward, from the sum of the outputs")
    parser.add_argument("--train", action="store_true", help="model.train() instead of model.eval()")


def add_shapes_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shapes", action="store_true", help="record shapes and types: more advice, ops by shape")


def add_report_options(parser: argparse.ArgumentParser) -> None:
    one = parser.add_argument_group("one report", "--depth, --sort-by, --top, --tablefmt: for those that have them")
    one.add_argument("--report", metavar="NAME", help="top, ops, layers, kernels, memory, steps, device, between, …")
    one.add_argument("--op", metavar="OP", help="layers: which operator, as aten::linear")
    one.add_argument("--layer", metavar="PATH", help="ops, kernels: in these layers alone: features.0, layer.*")
    one.add_argument("--phase", metavar="PHASE", help="ops, layers, kernels, memory: forward, backward or recompute")
    one.add_argument("--by-shape", action="store_true", help="ops: a row for each shape of the inputs")
    one.add_argument("--full-names", action="store_true", help="kernels: names in full")


def add_output_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-o",
        "--output",
        action="append",
        default=[],
        metavar="FILE",
        help="write the run to a file, again for each: run.json (to show and compare), report.html, table.csv, … "
        "(gzipped where it ends in .gz)",
    )


def add_table_options(parser: argparse.ArgumentParser) -> None:
    table = parser.add_argument_group("the table")
    table.add_argument("--depth", type=whole_number, metavar="N", help="hide the layers below this depth; totals stay")
    table.add_argument("--show-events", action="store_true", help="list the operators of each layer")
    table.add_argument("--sort-by", metavar="COLUMN", help="order siblings: cpu_total, self_cpu_mem, calls, …")
    table.add_argument("--top", type=whole_number, metavar="N", help="only the N largest layers, with those above them")
    table.add_argument("--percent", action="store_true", help="write the share beside each time")
    add_hot_option(table)
    table.add_argument("--tablefmt", metavar="FORMAT", help="any of tabulate's formats: github, html, …")
    table.add_argument("--summary", action="store_true", help="shapes and the model's figures instead of the tree")


def add_hot_option(parser: argparse._ActionsContainer) -> None:
    parser.add_argument("--hot", action="store_true", help="order siblings by their total, and mark the hottest path")


def whole_number(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 0 on")
    return int(text)


OF_THE_TABLE = ("depth", "show_events", "sort_by", "top", "percent", "tablefmt", "hot")
_OF_A_REPORT = ("op", "layer", "phase", "by_shape", "full_names")


def table_options(arguments: argparse.Namespace) -> dict[str, Any]:
    return {name: getattr(arguments, name) for name in OF_THE_TABLE}


def given_options(arguments: argparse.Namespace, names: Sequence[str]) -> dict[str, Any]:
    """Those of some options that were given."""
    values = {name: getattr(arguments, name) for name in names}
    return {name: value for name, value in values.items() if value is not None and value is not False}


def in_words(names: Iterable[str]) -> str:
    return ", ".join(f"--{name.replace('_', '-')}" for name in names)


def check_report(arguments: argparse.Namespace) -> None:
    """Before anything is read, which may take long: whether the report is there and has the options that were given."""
    given = given_options(arguments, _OF_A_REPORT)
    if arguments.report and arguments.summary:
        raise TorchprofError("--report and --summary: take one of them; the summary is --report summary, too.")
    if arguments.report:
        report_options(arguments)
    elif given:
        raise TorchprofError(f"{in_words(given)}: only for one of the reports: say which with --report.")


def report_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """What was given, by the names that the report has for it. Raises TorchprofError for an unknown report, and for
    what it has no use for."""
    name = arguments.report
    accepted = options_of(name)
    ours = {_on_the_command_line(option): option for option in accepted}
    given = given_options(arguments, (*OF_THE_TABLE, *_OF_A_REPORT))
    refused = [option for option in given if option not in ours]
    if refused:
        known = [option for option in (*OF_THE_TABLE, *_OF_A_REPORT) if option in ours]
        choice = f"It has {in_words(known)}." if known else "It has no options."
        raise TorchprofError(f"--report {name} has no {in_words(refused)}. {choice}")
    if "op" in accepted and "op" not in given:
        raise TorchprofError(f"--report {name}: of which operator? --op aten::linear, say; --report ops lists all.")
    return {ours[option]: value for option, value in given.items()}


def _on_the_command_line(option: str) -> str:
    """What the command line calls an option of a report."""
    return "top" if option in _NUMBERS else "by_shape" if option == _BY_SHAPE else option


def check_output(arguments: argparse.Namespace, of: str = "run") -> None:
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


def wants_timeline(arguments: argparse.Namespace) -> bool:
    """Whether a file is to be written that shows what happened when."""
    return any(format_of(file) in ("chrome-trace", "html") for file in arguments.output)
