"""``torchprof show``: show a saved run."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

import torchprof
from torchprof.cli.options import (
    TABLE_OPTIONS,
    add_output_option,
    add_report_options,
    add_table_options,
    check_output,
    check_report,
    given_options,
    non_negative_int,
)
from torchprof.cli.output import print_overview, print_report, print_table, write_files

if TYPE_CHECKING:
    from torchprof.cli.options import Commands


def add_to(commands: Commands) -> None:
    parser = commands.add_parser(
        "show",
        help="show a saved run",
        description="Show a saved run: without options all that `torchprof run` prints, with one for the table that "
        "alone. Needs no torch.",
    )
    parser.add_argument("run", metavar="RUN.json")
    parser.add_argument("--rank", type=non_negative_int, metavar="N", help="of a run of several ranks, this one alone")
    add_report_options(parser)
    add_output_option(parser)
    add_table_options(parser)
    parser.set_defaults(execute=execute)


def execute(arguments: argparse.Namespace) -> int:
    check_output(arguments)
    check_report(arguments)
    run = torchprof.load(arguments.run)
    if arguments.rank is not None:
        run = run.of_rank(arguments.rank)
    code = write_files(run.export, arguments)
    if arguments.report:
        print_report(run, arguments)
    elif arguments.summary or given_options(arguments, TABLE_OPTIONS):
        print_table(run, arguments)
    else:
        print_overview(run, arguments, arguments.run, saved=[arguments.run])
    return code
