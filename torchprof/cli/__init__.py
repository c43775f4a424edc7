"""The command line: ``torchprof profile``, ``run``, ``flops``, ``show`` and ``compare``.

Each command has a file with two functions: ``add_to`` adds its parser, ``execute`` runs it and returns the exit code.
No other package prints or exits. Only the commands that run a model import torch; ``show`` of saved
runs and ``compare`` do not.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path

import torchprof
from torchprof.cli import compare, flops, profile, run, show
from torchprof.cli.options import MainParser
from torchprof.cli.output import INTERRUPTED
from torchprof.encoding import no_encoding_errors
from torchprof.errors import TorchprofError

_COMMANDS = (profile, run, flops, show, compare)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code.

    0: success. 1: the model failed, or a limit of ``compare`` was exceeded. 2: bad input, or a file could not be
    written. 130: Ctrl-C. ``torchprof run`` does not return: it ends the process as its script ended.
    """
    with no_encoding_errors(sys.stdout, sys.stderr):
        arguments = parser().parse(sys.argv[1:] if argv is None else argv)
    try:
        if arguments.execute is run.execute:  # the script must see stdout and stderr unchanged
            run.execute(arguments)
        with no_encoding_errors(sys.stdout, sys.stderr):
            try:
                code: int = arguments.execute(arguments)
                sys.stdout.flush()
                return code
            except KeyboardInterrupt:
                print("torchprof: interrupted (Ctrl-C).", file=sys.stderr)
                return INTERRUPTED
    except (TorchprofError, OSError) as error:
        if isinstance(error, BrokenPipeError):  # the reader has closed the pipe, as `| head` does
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        print(f"torchprof: {_about(error)}", file=sys.stderr)
        return 2


def parser() -> MainParser:
    parser = MainParser(prog="torchprof")
    parser.add_argument("--version", action="version", version=f"torchprof {torchprof.__version__}")
    for command in _COMMANDS:
        command.add_to(parser.commands)
    return parser


def _about(error: Exception) -> str:
    """The sentence for an error; for a file that is not there, with names in its folder that are similar."""
    if not isinstance(error, FileNotFoundError) or error.filename is None:
        return str(error)
    path = Path(error.filename)
    if not path.parent.is_dir():
        return f"There is no file {path}: its folder does not exist."
    near = get_close_matches(path.name, [file.name for file in path.parent.iterdir()])
    meant = f" Did you mean {' or '.join(str(path.with_name(name)) for name in near)}?" if near else ""
    return f"There is no file {path}.{meant}"
