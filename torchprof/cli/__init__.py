"""The command line: ``torchprof run``, ``profile``, ``flops``, ``trace``, ``merge``, ``show`` and ``compare``. The only
file that prints or exits.

torch is imported by the commands that run something, and not by ``merge``, ``show`` and ``compare``.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from torchprof.cli.output import INTERRUPTED
from torchprof.cli.parser import parser
from torchprof.cli.run import run_command
from torchprof.encoding import readable
from torchprof.errors import TorchprofError


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code: 0, 1 where the model or a limit failed, 2 for bad input and for
    files that could not be written, 130 after Ctrl-C. ``torchprof run`` ends as its script does."""
    with readable(sys.stdout, sys.stderr):
        arguments = parser().parse_args(argv)
    try:
        if arguments.command is run_command:  # its script is to find the streams as they are
            run_command(arguments)
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
        return INTERRUPTED
