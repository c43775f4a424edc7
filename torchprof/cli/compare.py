"""``torchprof compare``."""

from __future__ import annotations

import argparse
import sys

import torchprof
from torchprof.cli.options import check_output
from torchprof.cli.output import export


def compare_command(arguments: argparse.Namespace) -> int:
    from torchprof.analyze.compare.budget import check, limit_of
    from torchprof.reports.text import printable

    limits = [limit_of(text) for text in arguments.fail_if]
    check_output(arguments, of="diff")
    diff = torchprof.compare(arguments.before, arguments.after)
    code = export(diff.export, arguments)
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
