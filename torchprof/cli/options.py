"""Options that several commands share. Each is declared here once, together with its check."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchprof.errors import TorchprofError
from torchprof.reports import format_of, options_of

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]
    """The type that ``add_subparsers`` returns."""

TABLE_OPTIONS = ("depth", "show_events", "sort_by", "top", "percent", "tablefmt", "hot")
"""The options of a table, as attributes of the parsed arguments."""

_REPORT_OPTIONS = ("op", "layer", "phase", "by_shape", "full_names")
_TOP_IN_REPORTS = ("top", "row_limit", "limit")  # the names that reports use for --top
_BY_SHAPE_IN_REPORTS = "group_by_input_shape"


def non_negative_int(text: str) -> int:
    """The argparse type of an option that takes an integer of 0 or more."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 0 on")
    return int(text)


_SHARED: dict[str, dict[str, Any]] = {
    "--memory": {"action": "store_true", "help": "record allocations"},
    "--flops": {"action": "store_true", "help": "count parameters, MACs and FLOPs"},
    "--shapes": {"action": "store_true", "help": "record shapes and types: more advice, ops by shape"},
    "--depth": {"type": non_negative_int, "metavar": "N", "help": "hide the layers below this depth; totals stay"},
    "--hot": {"action": "store_true", "help": "order siblings by their total, and mark the hottest path"},
    "--tablefmt": {"metavar": "FORMAT", "help": "any of tabulate's formats: github, html, …"},
}


def add_options(parser: argparse._ActionsContainer, *names: str) -> None:
    """Add some of the shared options to a parser or a group, in the given order."""
    for name in names:
        parser.add_argument(name, **_SHARED[name])


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """The model to run, its inputs and its mode."""
    parser.add_argument("spec", metavar="SPEC", help="package.module:callable or file.py:callable")
    parser.add_argument("--kwargs", default="{}", metavar="JSON", help="arguments for the callable, a JSON object")
    parser.add_argument("--input", action="append", default=[], metavar="INPUT", help="an input, once for each")
    parser.add_argument("--backward", action="store_true", help="also run backward, from the sum of the outputs")
    parser.add_argument("--train", action="store_true", help="model.train() instead of model.eval()")


def add_report_options(parser: argparse.ArgumentParser) -> None:
    """The choice of one report, and the options that only reports have."""
    one = parser.add_argument_group("one report", "--depth, --sort-by, --top, --tablefmt: for those that have them")
    one.add_argument("--report", metavar="NAME", help="top, ops, layers, kernels, memory, steps, device, between, …")
    one.add_argument("--op", metavar="OP", help="layers: which operator, as aten::linear")
    one.add_argument("--layer", metavar="PATH", help="ops, kernels: in these layers alone: features.0, layer.*")
    one.add_argument("--phase", metavar="PHASE", help="ops, layers, kernels, memory: forward, backward or recompute")
    one.add_argument("--by-shape", action="store_true", help="ops: a row for each shape of the inputs")
    one.add_argument("--full-names", action="store_true", help="kernels: names in full")


_RUN_FILES = (
    "write the run to a file, again for each: run.json (to show and compare), report.html, table.csv, … "
    "(gzipped where it ends in .gz)"
)


def add_output_option(parser: argparse.ArgumentParser, description: str = _RUN_FILES) -> None:
    """``-o``: files to write."""
    parser.add_argument("-o", "--output", action="append", default=[], metavar="FILE", help=description)


def add_table_options(parser: argparse.ArgumentParser) -> None:
    """The options of the table of layers, and ``--summary``, which replaces the table."""
    table = parser.add_argument_group("the table")
    add_options(table, "--depth")
    table.add_argument("--show-events", action="store_true", help="list the operators of each layer")
    table.add_argument("--sort-by", metavar="COLUMN", help="order siblings: cpu_total, self_cpu_mem, calls, …")
    table.add_argument(
        "--top", type=non_negative_int, metavar="N", help="only the N largest layers, with those above them"
    )
    table.add_argument("--percent", action="store_true", help="write the share beside each time")
    add_options(table, "--hot", "--tablefmt")
    table.add_argument("--summary", action="store_true", help="shapes and the model's figures instead of the tree")


def given_options(arguments: argparse.Namespace, names: Sequence[str]) -> dict[str, Any]:
    """Those of the options ``names`` that the user gave, with their values."""
    values = {name: getattr(arguments, name) for name in names}
    return {name: value for name, value in values.items() if value is not None and value is not False}


def in_words(names: Iterable[str]) -> str:
    """The options as a user writes them: ``--sort-by, --top``."""
    return ", ".join(f"--{name.replace('_', '-')}" for name in names)


def check_report(arguments: argparse.Namespace) -> None:
    """Check the report's name and options. Call this before any file is read, since reading may take long.

    Raises TorchprofError.
    """
    given = given_options(arguments, _REPORT_OPTIONS)
    if arguments.report and arguments.summary:
        raise TorchprofError("--report and --summary: take one of them; the summary is --report summary, too.")
    if arguments.report:
        report_options(arguments)
    elif given:
        raise TorchprofError(f"{in_words(given)}: only for one of the reports: say which with --report.")


def report_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """The given options, by the names that the report's function uses for them.

    Raises TorchprofError for an unknown report, and for an option that the report does not have.
    """
    name = arguments.report
    accepted = options_of(name)
    name_in_report = {_name_on_command_line(option): option for option in accepted}
    given = given_options(arguments, (*TABLE_OPTIONS, *_REPORT_OPTIONS))
    refused = [option for option in given if option not in name_in_report]
    if refused:
        known = [option for option in (*TABLE_OPTIONS, *_REPORT_OPTIONS) if option in name_in_report]
        choice = f"It has {in_words(known)}." if known else "It has no options."
        raise TorchprofError(f"--report {name} has no {in_words(refused)}. {choice}")
    if "op" in accepted and "op" not in given:
        raise TorchprofError(f"--report {name}: of which operator? --op aten::linear, say; --report ops lists all.")
    return {name_in_report[option]: value for option, value in given.items()}


def _name_on_command_line(option: str) -> str:
    """The command line's name for an option of a report's function."""
    return "top" if option in _TOP_IN_REPORTS else "by_shape" if option == _BY_SHAPE_IN_REPORTS else option


def check_output(arguments: argparse.Namespace, of: str = "run") -> None:
    """Check that all files of ``-o`` can be written. Call this before any work, since the work may take long.

    ``of``: what will be written, "run" or "diff". Raises TorchprofError that names all files that cannot be written.
    """
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
    """Why a file cannot be written; "" if it probably can."""
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
    """Whether one of the files to write needs a timeline."""
    return any(format_of(file) in ("chrome-trace", "html") for file in arguments.output)
