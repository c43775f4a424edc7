"""Options that several commands share. Each is declared here once, together with its check."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

from torchprof.analyze.report import OPTIONS
from torchprof.cli.models import SPECS
from torchprof.errors import TorchprofError, suggest
from torchprof.reports import PARQUET_RUN, Reported, format_of, options_of
from torchprof.run.file import check_pyarrow
from torchprof.run.formats import Unit, parse_amount
from torchprof.run.saved import make_room, names_job_folder
from torchprof.run.torch_names import DTYPES

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
"""The type that ``add_subparsers`` returns."""

TABLE_OPTIONS = ("depth", "show_events", "sort_by", "top", "percent", "tablefmt", "hot")
"""The options of a table, as attributes of the parsed arguments."""

REPORT_OPTIONS = ("op", "layer", "phase", "group_by_input_shape", "full_names")
"""The options that only reports have, likewise."""
_FLAGS = {"group_by_input_shape": "by_shape"}  # options whose flag is not their name


def whole_number(text: str) -> int:
    """The argparse type of an option that takes a whole number from 0 on: ``20``, ``10k``, ``1.5M``."""
    amount = parse_amount(text, Unit.COUNT)
    if amount is None or amount.denominator != 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 on; examples: 20, 10k")
    return int(amount)


def seconds_above_0(text: str) -> float:
    """The argparse type of an option that takes a time."""
    with suppress(ValueError):
        if 0 < (seconds := float(text)) < math.inf:
            return seconds
    raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0, as 20")


_FLAG = {"action": "store_true"}
_ALSO = {"--memory": ["--profile-memory"], "--flops": ["--with-flops"], "--shapes": ["--record-shapes"]}
"""The names that these options have in Python."""
_NUMBER = {"type": whole_number, "metavar": "N"}
_SHARED: dict[str, dict[str, Any]] = {
    "--warmup": _NUMBER | {"help": "calls of the model that come first and are not recorded (default %(default)s)"},
    "--memory": _FLAG | {"help": "record allocations"},
    "--timeline": _FLAG | {"help": "record allocations and what runs when; draw memory over time"},
    "--flops": _FLAG | {"help": "count parameters, MACs and FLOPs"},
    "--shapes": _FLAG | {"help": "record shapes and types: more findings, ops by shape"},
    "--paths": {"nargs": "+", "metavar": "PATH", "help": "only these layers: features.0, layer.*"},
    "--show-events": _FLAG | {"help": OPTIONS["show_events"].meaning},
    "--sort-by": {"metavar": "COLUMN", "help": OPTIONS["sort_by"].meaning},
    "--top": _NUMBER | {"help": OPTIONS["top"].meaning},
    "--percent": _FLAG | {"help": OPTIONS["percent"].meaning},
    "--op": {"metavar": "OP", "help": f"ops: {OPTIONS['op'].meaning}"},
    "--layer": {"metavar": "PATH", "help": f"ops, kernels: {OPTIONS['layer'].meaning}"},
    "--phase": {"metavar": "PHASE", "help": OPTIONS["phase"].meaning},
    "--by-shape": _FLAG | {"dest": "group_by_input_shape", "help": f"ops: {OPTIONS['group_by_input_shape'].meaning}"},
    "--full-names": _FLAG | {"help": f"kernels: {OPTIONS['full_names'].meaning}"},
    "--json": _FLAG | {"help": "print the report as JSON instead of text"},
    "--depth": _NUMBER | {"help": OPTIONS["depth"].meaning},
    "--hot": _FLAG | {"help": OPTIONS["hot"].meaning},
    "--tablefmt": {"metavar": "FORMAT", "help": OPTIONS["tablefmt"].meaning},
}


def add_options(parser: argparse._ActionsContainer, *names: str, **more: Any) -> None:
    """Add some of the shared options to a parser or a group, in the given order. ``more``: as of ``add_argument``."""
    for name in names:
        parser.add_argument(name, *_ALSO.get(name, ()), **{**_SHARED[name], **more})


_DTYPES = {dtype.name: dtype.others for dtype in DTYPES if dtype.others}
"""The dtypes of ``--dtype``, with other names."""


def add_model_options(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """The model to run, how it is called, and its mode. Returns their group."""
    parser.add_argument("spec", metavar="SPEC", help=f"what makes the model: {SPECS}")
    model = parser.add_argument_group("the model and its call")
    model.add_argument("--kwargs", default="{}", metavar="JSON", help="arguments that make the model: a JSON object")
    model.add_argument("--input", action="append", default=[], metavar="INPUT", help="a tensor, once for each")
    model.add_argument(
        "--method", default="forward", metavar="NAME", help="what to call: generate, … (default forward)"
    )
    model.add_argument(
        "--call-kwargs", default="{}", metavar="JSON", help="arguments of the call other than tensors: a JSON object"
    )
    model.add_argument("--backward", action="store_true", help="also run backward, from the sum of the outputs")
    model.add_argument("--train", action="store_true", help="model.train() instead of model.eval()")
    model.add_argument(
        "--dtype", type=dtype_name, metavar="DTYPE", help=f"of the model and of floating inputs: {', '.join(_DTYPES)}"
    )
    return model


def dtype_name(text: str) -> str:
    """The argparse type of ``--dtype``: the name that torch has for it."""
    names = {name: dtype for dtype, others in _DTYPES.items() for name in (dtype, *others)}
    try:
        return names[text.removeprefix("torch.")]
    except KeyError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a dtype for a model. {suggest(text, names)}") from None


_RUN_FILES = "write a file, once for each: run.json (to show and compare), report.html, table.csv, run.json.gz, …"


def add_output_option(parser: argparse.ArgumentParser, description: str = _RUN_FILES) -> argparse._ArgumentGroup:
    """``-o``: files to write. Returns the group of the output."""
    output = parser.add_argument_group("output")
    output.add_argument("-o", "--output", action="append", default=[], metavar="FILE", help=description)
    return output


def add_report_options(parser: argparse.ArgumentParser) -> None:
    """What to print: one report, with the options that only reports have, or the table of layers; and the output."""
    group = parser.add_argument_group(
        "one report", "--depth, --sort-by, --top and --tablefmt work here, too, if the report has them"
    )
    group.add_argument("--report", metavar="NAME", help="top, ops, memory, … (torchprof --help lists all)")
    add_options(group, "--op", "--layer", "--phase", "--by-shape", "--full-names")
    table = parser.add_argument_group("the table")
    add_options(table, "--depth", "--show-events", "--sort-by", "--top", "--percent", "--hot", "--tablefmt")
    table.add_argument("--summary", action="store_true", help="shapes and parameters instead of the tree")
    add_options(add_output_option(parser), "--json")


def given_options(arguments: argparse.Namespace, names: Sequence[str]) -> dict[str, Any]:
    """Those of the options ``names`` that the command has and the user gave, with their values."""
    values = {name: getattr(arguments, name, None) for name in names}
    return {name: value for name, value in values.items() if value is not None and value is not False}


def in_words(names: Iterable[str]) -> str:
    """The options as a user writes them: ``--sort-by, --top``."""
    return ", ".join(f"--{_FLAGS.get(name, name).replace('_', '-')}" for name in names)


def check_report(arguments: argparse.Namespace) -> None:
    """Check the report's name and options, before any file is read, since that may take long. Raises TorchprofError."""
    given = given_options(arguments, REPORT_OPTIONS)
    if arguments.report and arguments.summary:
        raise TorchprofError("--report and --summary exclude each other. The summary is also --report summary.")
    if arguments.report:
        report_options(arguments)
    elif given:
        raise TorchprofError(f"{in_words(given)}: options of a report. Say which report with --report.")


def report_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """The given options of the report. Raises TorchprofError for an unknown report, and for an option that it lacks."""
    name = arguments.report
    accepted = options_of(name)
    given = given_options(arguments, (*TABLE_OPTIONS, *REPORT_OPTIONS))
    if refused := [option for option in given if option not in accepted]:
        valid = [option for option in (*TABLE_OPTIONS, *REPORT_OPTIONS) if option in accepted]
        choice = f"It has {in_words(valid)}." if valid else "It has no options."
        raise TorchprofError(f"--report {name} has no {in_words(refused)}. {choice}")
    not_with_op = [option for option in ("layer", "group_by_input_shape") if option in given]
    if "op" in given and not_with_op:
        raise TorchprofError(f"--op shows the layers of one operator: leave out {in_words(not_with_op)}.")
    return given


def check_output(
    arguments: argparse.Namespace, of: Reported = "run", rank: int = 0, world_size: int = 1, job: str = ""
) -> None:
    """Check that all files of ``-o`` can be written. Call this before any work, since the work may take long.

    ``of``: what will be written, "run" or "diff"; ``rank``: of the run; ``world_size`` and ``job``: the number of ranks
    of its job, and its name, as for ``make_room``. A job folder is made now. Raises TorchprofError that names all files
    that cannot be written.
    """
    name_of: dict[Path, str] = {}  # as the user wrote it
    problems = []
    for file in arguments.output:
        path = Path(file).resolve()
        try:
            if path in name_of:
                raise TorchprofError(f"{file}: the same file as -o {name_of[path]}.")
            _check_file(file, of, rank, world_size, job)
        except TorchprofError as error:
            problems.append(f"-o {error}")
        name_of[path] = file
    if problems:
        raise TorchprofError("\n".join(problems))


def _check_file(file: str, of: Reported, rank: int, world_size: int, job: str) -> None:
    """Raise TorchprofError if it is known now that a file cannot be written."""
    path = Path(file).absolute()
    is_job = of == "run" and names_job_folder(file)
    if path.is_dir() and not is_job:
        raise TorchprofError(f"{file}: this is a folder, not a file.")
    report = format_of(file, of=of)
    try:
        if is_job:
            make_room(path, rank, world_size, job)
        elif report == PARQUET_RUN:
            check_pyarrow()
    except TorchprofError as error:
        raise TorchprofError(f"{file}: {error}") from error
    if not path.parent.is_dir():
        raise TorchprofError(f"{file}: its folder does not exist.")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise TorchprofError(f"{file}: no permission to write it.")


def wants_timeline(arguments: argparse.Namespace) -> bool:
    """Whether the timeline was requested, or one of the files to write needs it."""
    return arguments.timeline or any(format_of(file) in ("chrome-trace", "html") for file in arguments.output)
