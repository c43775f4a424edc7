"""``torchprof show``."""

from __future__ import annotations

import argparse
import sys

import torchprof
from torchprof.cli.options import OF_THE_TABLE, check_output, check_report, given_options
from torchprof.cli.output import export, in_color, opening_of, print_report, print_run, report_of


def show_command(arguments: argparse.Namespace) -> int:
    check_output(arguments)
    check_report(arguments)
    run = torchprof.load(arguments.run)
    if arguments.rank is not None:
        run = run.of_rank(arguments.rank)
    code = export(run.export, arguments)
    if arguments.report:
        print_report(run, arguments)
    elif arguments.summary or given_options(arguments, OF_THE_TABLE):
        print_run(run, arguments)
    else:
        print(
            opening_of(run, arguments.run), *report_of(run, arguments, [arguments.run], in_color(sys.stdout)), sep="\n"
        )
    return code
