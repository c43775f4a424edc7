"""The command line: ``torchprof profile``, ``run``, ``flops``, ``show``, ``compare`` and ``try``.

Each command has a file with two functions: ``add_to`` adds its parser, ``execute`` runs it and returns the exit code;
``try`` is where ``compare`` is.
No other package prints or exits. Only the commands that run a model import torch; ``show`` of saved runs and
``compare`` do not.
"""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Sequence
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from shutil import get_terminal_size
from textwrap import wrap
from typing import Any

import torchprof
from torchprof.analyze.report import QUESTIONS
from torchprof.cli import compare, flops, profile, run, show
from torchprof.cli.output import INTERRUPTED
from torchprof.errors import TorchprofError, no_encoding_errors, printable_lines, suggest
from torchprof.reports import known

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
        print(f"torchprof: {printable_lines(_about(error))}", file=sys.stderr)
        return 2


def _about(error: Exception) -> str:
    """The sentence for an error; for a file that is not there, with names in its folder that are similar."""
    if not isinstance(error, FileNotFoundError) or error.filename is None:
        return str(error)
    path = Path(error.filename)
    if not path.parent.is_dir():
        return f"There is no file {path}: its folder does not exist."
    if path.is_symlink():
        return f"There is no file {path}: it is a link to {path.readlink()}, which does not exist."
    near = get_close_matches(path.name, [file.name for file in path.parent.iterdir()])
    meant = f" Did you mean {' or '.join(str(path.with_name(name)) for name in near)}?" if near else ""
    return f"There is no file {path}.{meant}"


# The parser, whose help is ordered by questions


def parser() -> MainParser:
    main_parser = MainParser(prog="torchprof")
    main_parser.add_argument("--version", action="version", version=f"torchprof {torchprof.__version__}")
    for command in _COMMANDS:
        command.add_to(main_parser.commands)
    return main_parser


_HEADER = """\
Which layer of a PyTorch model takes the time, the memory and the FLOPs?

Record a run
  torchprof profile net.py:Net --input 8,64   a model on random inputs
  torchprof run train.py                      a whole script, unchanged
  torchprof flops net.py:Net --input 8,64     parameters, MACs and FLOPs from shapes alone
"""
_ANSWERED_BY = {
    "time": "torchprof show run.json                     the answer first; also of a trace of torch.profiler",
    "why": "torchprof show run.json",
    "fit": "torchprof show run.json                     of a run that was recorded with --memory",
    "changed": "torchprof compare before.json after.json    with limits for CI: --fail-if\n"
    "  torchprof try before.py after.py            two versions of a script, a step of each in turn",
    "waits": "torchprof show rank*.json                   the ranks of a job, compared",
}
"""For each question a command that answers it, by the keys of ``QUESTIONS``."""
_REPORTS = "    --report NAME                             "
_FOOTER = """\
More
  torchprof COMMAND --help                    all options and examples of a command
  torchprof show run.json -o report.html      the run as a page, a table, a flame graph, a timeline
  torchprof show run.json --json              a report as data

Exit codes
  0    success
  1    the model failed, or a limit of `compare --fail-if` is exceeded
  2    bad input, or a file could not be written
  130  Ctrl-C
  `torchprof run` ends as its script ends: with its exit code, or by the signal that ended it.
"""


class MainParser(ArgumentParser):
    """The parser of ``torchprof``. ``commands`` adds a command, whose help keeps the line breaks of its epilog."""

    def __init__(self, **options: Any) -> None:
        super().__init__(usage="torchprof COMMAND ...", **options)
        of_command: Any = partial(ArgumentParser, formatter_class=RawDescriptionHelpFormatter)
        self.commands: Any = self.add_subparsers(
            required=True, dest="subcommand", metavar="COMMAND", parser_class=of_command, prog="torchprof"
        )

    def parse(self, words: Sequence[str]) -> Namespace:
        """The parsed arguments. Bad input ends the process with exit code 2, as ``argparse`` does; the error for an
        unknown option names similar ones."""
        command = next((word for word in words if not word.startswith("-")), None)
        if not words:
            self.error("a command is missing: torchprof --help shows them")
        if command is not None and command not in self.commands.choices:
            if command.endswith((".py", ".json", ".gz")):  # a script, a saved run or a trace
                self.error(f"a command is missing: torchprof {'run' if command.endswith('.py') else 'show'} {command}")
            self.error(f"there is no command {command!r}. {suggest(command, self.commands.choices, every=True)}")
        arguments, unknown = self.parse_known_args(words)
        of_command = self.commands.choices[arguments.subcommand]
        options = [option for option in of_command._option_string_actions if option.startswith("--")]
        for word in unknown:
            if word.startswith("-"):
                name = word.partition("=")[0]
                of_command.error(f"there is no option {name}. {suggest(name, options, limit=1)}")
        if unknown:
            of_command.error(f"too many arguments: {' '.join(unknown)}")
        return arguments

    def format_help(self) -> str:
        """The commands and the reports, below the questions that they answer."""
        reports = known()
        sections = [self.format_usage(), _HEADER]
        for key, command in _ANSWERED_BY.items():
            names = sorted(name for name, report in reports.items() if report.answers == key)
            of_reports = wrap(
                ", ".join(names),
                width=max(get_terminal_size().columns, 2 * len(_REPORTS)),
                initial_indent=_REPORTS,
                subsequent_indent=" " * len(_REPORTS),
            )
            sections.append("\n".join([QUESTIONS[key], f"  {command}", *of_reports, ""]))
        return "\n".join([*sections, _FOOTER])
