"""``torchprof completion``: print the script with which a shell completes commands, options and reports."""

from __future__ import annotations

import argparse
from importlib import import_module
from typing import Any

from torchprof.cli.options import Commands
from torchprof.errors import TorchprofError, suggest
from torchprof.reports import known
from torchprof.run.words import PHASES

_SHELLS = ("bash", "zsh", "fish")
_NAMES_OF_FILES = ("files", "before", "after", "script", "output")

_EPILOG = """\
Needs the package shtab: pip install "torchprof[completion]". Open a new shell afterwards.

examples:
  torchprof completion bash > ~/.local/share/bash-completion/completions/torchprof
  torchprof completion zsh > ~/.zfunc/_torchprof       # a folder of $fpath
  torchprof completion fish > ~/.config/fish/completions/torchprof.fish
"""


def add_to(commands: Commands) -> None:
    parser = commands.add_parser(
        "completion",
        help="print the completion script of a shell",
        usage="torchprof completion SHELL",
        description="Print the script with which a shell completes commands, options, reports and files.",
        epilog=_EPILOG,
    )
    parser.add_argument("shell", metavar="SHELL", help=", ".join(_SHELLS))
    parser.set_defaults(execute=execute)


def execute(arguments: argparse.Namespace) -> int:
    shell = arguments.shell
    if shell not in _SHELLS:
        raise TorchprofError(f"There is no completion for {shell!r}. {suggest(shell, _SHELLS, every=True)}")
    try:
        shtab: Any = import_module("shtab")
    except ImportError as error:
        raise TorchprofError(
            'Completion needs the package shtab: pip install shtab, or pip install "torchprof[completion]".'
        ) from error
    if shell not in shtab.SUPPORTED_SHELLS:
        raise TorchprofError(f"This version of shtab cannot complete for {shell}: pip install --upgrade shtab.")
    for command in arguments.whole.commands.choices.values():
        for action in command._actions:
            if action.dest in _NAMES_OF_FILES:
                action.complete = shtab.FILE
            elif action.dest == "report":
                action.choices = sorted(known())
            elif action.dest == "phase":
                action.choices = PHASES
    print(shtab.complete(arguments.whole, shell=shell))
    return 0
