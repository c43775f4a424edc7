"""The parser of the command line: help that is ordered by questions, and errors with similar names."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from shutil import get_terminal_size
from textwrap import wrap
from typing import Any, NoReturn

from torchprof.analyze.report import QUESTIONS
from torchprof.errors import suggest
from torchprof.reports import known

EXIT_CODES = """\
Exit codes
  0    success
  1    the model failed, or a limit of `compare --fail-if` is exceeded
  2    bad input, or a file could not be written
  130  Ctrl-C
  `torchprof run` ends as its script ends: with its exit code, or by the signal that ended it.
"""

_HEADER = """\
Which layer of a PyTorch model takes the time, the memory and the FLOPs?

Record a run
  torchprof profile net.py:Net --input 8,64   a model on random inputs
  torchprof run train.py                      a whole script, unchanged
  torchprof flops net.py:Net --input 8,64     parameters, MACs and FLOPs from shapes alone
"""
_COMMANDS = {
    "time": "torchprof show run.json                     the answer first; also of a trace of torch.profiler",
    "why": "torchprof show run.json",
    "fit": "torchprof show run.json                     of a run that was recorded with --memory",
    "changed": "torchprof compare before.json after.json    with limits for CI: --fail-if",
    "waits": "torchprof show rank*.json                   the ranks of a job, compared",
}
"""For each question a command that answers it, by the keys of ``QUESTIONS``."""
_REPORTS = "    --report NAME                             "
_FOOTER = """\
More
  torchprof COMMAND --help                    all options and examples of a command
  torchprof show run.json -o report.html      the run as a page, a table, a flame graph, a timeline
  torchprof show run.json --json              a report as data
"""


class Parser(argparse.ArgumentParser):
    """The parser of a command. Its help keeps the line breaks of the epilog, its errors name similar options."""

    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, **options)

    def unknown_options(self, words: Sequence[str]) -> NoReturn:
        """End with an error for words that no option and no argument took."""
        options = [option for option in self._option_string_actions if option.startswith("--")]
        unknown = [word.partition("=")[0] for word in words if word.startswith("-")]
        if not unknown:
            self.error(f"too many arguments: {' '.join(words)}")
        self.error(f"there is no option {unknown[0]}. {suggest(unknown[0], options, limit=1)}")


class MainParser(Parser):
    """The parser of ``torchprof``."""

    def __init__(self, **options: Any) -> None:
        super().__init__(usage="torchprof COMMAND ...", **options)
        self.commands: Any = self.add_subparsers(
            required=True, dest="subcommand", metavar="COMMAND", parser_class=Parser, prog="torchprof"
        )
        """Adds a command; ``choices`` has the parser of each."""

    def parse(self, words: Sequence[str]) -> argparse.Namespace:
        """The parsed arguments. Bad input ends the process with exit code 2, as ``argparse`` does."""
        command = next((word for word in words if not word.startswith("-")), None)
        if not words:
            self.error("a command is missing: torchprof --help shows them")
        if command is not None and command not in self.commands.choices:
            self.error(f"there is no command {command!r}. {suggest(command, self.commands.choices, every=True)}")
        arguments, unknown = self.parse_known_args(words)
        if unknown:
            parser = self.commands.choices[arguments.subcommand]
            assert isinstance(parser, Parser)
            parser.unknown_options(unknown)
        return arguments

    def format_help(self) -> str:
        """The commands and the reports, below the questions that they answer."""
        reports = known()
        sections = [self.format_usage(), _HEADER]
        for key, command in _COMMANDS.items():
            names = sorted(name for name, report in reports.items() if report.answers == key)
            lines = [QUESTIONS[key], f"  {command}"]
            if names:
                lines += wrap(
                    ", ".join(names),
                    width=max(get_terminal_size().columns, 2 * len(_REPORTS)),
                    initial_indent=_REPORTS,
                    subsequent_indent=" " * len(_REPORTS),
                )
            sections.append("\n".join([*lines, ""]))
        return "\n".join([*sections, _FOOTER, EXIT_CODES])
