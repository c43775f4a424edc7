"""``torchprof run``: profile a whole script without changing it."""

from __future__ import annotations

import argparse
import functools
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TextIO

import torchprof
from torchprof.analyze.report import ReportTable
from torchprof.cli.options import (
    Commands,
    add_options,
    add_output_option,
    check_output,
    seconds_above_0,
    wants_timeline,
    whole_number,
)
from torchprof.cli.output import NOT_WRITTEN, in_color, section, sections_of, with_legend, write_file
from torchprof.errors import TorchprofError, error_handler_for
from torchprof.reports import PARQUET_RUN, format_of
from torchprof.reports.documents import text_of
from torchprof.run.meta import name_of_job
from torchprof.run.saved import names_job_folder

if TYPE_CHECKING:
    from torchprof.profile.script import Ending, PythonFunction, Script

_EPILOG = """\
The script runs as under Python, with its own arguments. Options of torchprof come before its name. CUDA kernels are
recorded if torch finds a CUDA device. The run is saved in SCRIPT.torchprof.json, or where -o says.

torchprof ends as the script ends: with its exit code, or by the signal that ended it. If the script fails, or is ended
by Ctrl-C or SIGTERM, the report shows what ran until then.

Under torchrun each rank writes files, with its number for {rank} in their names, or to a job folder (job/); rank 0
prints its report.
With --python the script runs twice, since Python's profiler and torch's would distort each other.

examples:
  torchprof run train.py --epochs 1
  torchprof run --warmup 10 --max-calls 50 --memory -m package.train
  torchprof run --steps 1000:1020 train.py
  torchprof run --try train.py
  torchrun --nproc-per-node 2 -m torchprof run -o 'rank{rank}.json' train.py
  torchrun --nproc-per-node 8 -m torchprof run -o job/ train.py
"""
_RANK = "{rank}"  # in the name of a file
_FUNCTIONS_SHOWN = 15
_BUILT_IN_OF_TORCH = re.compile(r"\btorch\b|torch\._C")


def add_to(commands: Commands) -> None:
    parser = commands.add_parser(
        "run",
        help="profile a whole script, unchanged",
        description="Run a script as Python would, find the models that it calls, and print where the time went.",
        epilog=_EPILOG,
        usage="torchprof run [options] script.py [args ...]\n       torchprof run [options] -m module [args ...]",
    )
    parser.add_argument("-m", dest="is_module", action="store_true", help="run a module, as python -m does")
    recorded = parser.add_argument_group("what is recorded")
    default = "default: all before the first call, and the first step if more follow; 0 records everything"
    warmup = f"calls of the model that come first and are not recorded ({default})"
    add_options(recorded, "--warmup", help=warmup)
    # The former name of --warmup.
    recorded.add_argument("--warmup-calls", dest="warmup", type=whole_number, help=argparse.SUPPRESS)
    recorded.add_argument(
        "--max-calls", type=whole_number, metavar="N", help="record all calls of the model, and end after N"
    )
    which = recorded.add_mutually_exclusive_group()
    which.add_argument("--all", action="store_true", help="record all passes (default: some; the rest is timed)")
    which.add_argument("--steps", type=_steps, metavar="A:B", help="record passes A to B - 1 of the loop, from 0 on")
    add_options(recorded, "--memory", "--timeline", "--flops", "--shapes")
    recorded.add_argument(
        "--compile-layers", action="store_true", help="assign the kernels of torch.compile to their layers"
    )
    recorded.add_argument(
        "--try", dest="try_remedies", action="store_true", help="carry out what would help, on copies of the model"
    )
    recorded.add_argument(
        "--try-seconds", type=seconds_above_0, default=20.0, metavar="S", help="for all of --try (default: 20)"
    )
    recorded.add_argument("--python", action="store_true", help="run it again under cProfile, for Python's functions")
    table = parser.add_argument_group("the table")
    add_options(table, "--depth", "--hot")
    add_options(add_output_option(parser), "--json", help=argparse.SUPPRESS)  # to say what to do instead
    parser.add_argument("script", metavar="script.py", help="the script, or with -m the module")
    parser.add_argument("args", nargs=argparse.REMAINDER, help="the arguments of the script")
    parser.set_defaults(execute=execute)


def execute(arguments: argparse.Namespace) -> NoReturn:
    """Run the script, write the files, print the report, and end the process as the script ended."""
    rank, world_size = _rank_and_world_size()
    named = bool(arguments.output)  # by the user
    _check(arguments, world_size)
    files = _files(arguments, rank, world_size)
    # A copy of stdout, since the script may close or replace its own.
    stdout = os.fdopen(
        os.dup(sys.stdout.fileno()), "w", encoding=sys.stdout.encoding, errors=error_handler_for(sys.stdout)
    )
    import torch

    from torchprof.profile.passes import is_sampled
    from torchprof.profile.program import Program
    from torchprof.profile.script import Script
    from torchprof.profile.trials import TryingProgram

    script = Script(arguments.script, arguments.args, arguments.is_module)
    make = functools.partial(TryingProgram, seconds=arguments.try_seconds) if arguments.try_remedies else Program
    program = make(
        use_cuda=torch.cuda.is_available(),
        profile_memory=arguments.memory or arguments.timeline,
        with_flops=arguments.flops,
        record_shapes=arguments.shapes,
        with_timeline=wants_timeline(arguments),
        compile_layers=arguments.compile_layers,
        warmup_calls=arguments.warmup,
        max_calls=arguments.max_calls,
        passes=None if arguments.all else arguments.steps or is_sampled,
    )
    failures: dict[str, str] = {}  # by file, why it was not written; "" if it was

    @contextmanager
    def recorded() -> Iterator[None]:
        with program:
            yield
        # The files are written before the report, since printing may fail (`| head` closes the pipe). They are written
        # inside this context, where SIGTERM does not end the process: torchrun sends it when another rank has failed.
        failures.update({file: write_file(program.run.export, path, file) for file, path in files.items()})

    ending = script.run(recorded)
    if ending.began and rank:  # only the first rank of a job prints a report
        with suppress(Exception):
            for failure in filter(None, failures.values()):
                print(failure, file=sys.stderr)
    elif ending.began:
        written = [failure or _written(file, world_size) for file, failure in failures.items()]
        sections = _sections(program.run, ending, script, arguments, files, in_color(stdout))
        _print_report(sections, written, stdout)
    if named and any(failures.values()):
        ending = replace(ending, code=ending.code or NOT_WRITTEN)
    ending.end()


def _steps(text: str) -> range:
    """The numbers in "100:120"."""
    with suppress(argparse.ArgumentTypeError, ValueError):
        first, after = map(whole_number, text.split(":"))
        if first < after:
            return range(first, after)
    raise argparse.ArgumentTypeError(f"{text!r} is not A:B with A < B, as 100:120 for passes 100 to 119")


def _rank_and_world_size() -> tuple[int, int]:
    """From the environment variables of torchrun; (0, 1) without them."""
    rank, world_size = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    return (int(rank), int(world_size)) if rank.isdecimal() and world_size.isdecimal() else (0, 1)


def _check(arguments: argparse.Namespace, world_size: int) -> None:
    """Raise TorchprofError for options that a script, or a rank of a job, cannot have."""
    if arguments.json:
        raise TorchprofError(
            "torchprof run has no --json: stdout belongs to the script. Run it, then print the data of the saved run: "
            "torchprof show FILE --json."
        )
    if arguments.steps and arguments.max_calls is not None:
        raise TorchprofError("--steps and --max-calls both say what is recorded: give only one.")
    if arguments.try_remedies and (arguments.all or arguments.steps or arguments.max_calls is not None):
        raise TorchprofError(
            "--try works between passes that are not recorded: leave out --all, --steps and --max-calls."
        )
    if arguments.python and world_size > 1:
        raise TorchprofError("--python runs the script twice, which a rank of a job cannot do: leave it out.")
    for file in arguments.output:
        if world_size > 1 and _RANK not in file and not names_job_folder(file):
            raise TorchprofError(
                f"-o {file}: all {world_size} ranks would write this file. Put {_RANK} into its name, or write a job "
                "folder: job/"
            )


def _files(arguments: argparse.Namespace, rank: int, world_size: int) -> dict[str, str]:
    """The files to write, by the user's names; absolute, since the script may change the working directory."""
    if arguments.output:
        arguments.output = [file.replace(_RANK, str(rank)) for file in arguments.output]
        job = name_of_job() if world_size > 1 else ""
        check_output(arguments, rank=rank, world_size=world_size, job=job)
    else:  # the script runs even if the default file cannot be written
        name = arguments.script.rpartition(".")[2] if arguments.is_module else Path(arguments.script).resolve().stem
        of_rank = f".rank{rank}" if world_size > 1 else ""
        arguments.output = [f"{name}{of_rank}.torchprof.json"]
    # A slash at the end says that this is a job folder.
    return {file: f"{Path(file).absolute()}{'/' * names_job_folder(file)}" for file in arguments.output}


def _print_report(sections: Iterator[str], written: Sequence[str], stdout: TextIO) -> None:
    """Print the report and the outcome of each file. Does not raise: the exit code stays the script's own."""
    with suppress(Exception):  # the script may have closed or replaced sys.stdout
        sys.stdout.flush()
    try:
        with suppress(BrokenPipeError), stdout:
            for text in sections:
                print(text, file=stdout, flush=True)
            print("", *written, sep="\n", file=stdout)
    except (TorchprofError, OSError) as error:
        with suppress(Exception):
            print(f"torchprof: {error}", *written, sep="\n", file=sys.stderr)


def _written(file: str, world_size: int) -> str:
    """A sentence for a written file, with the command that reads it."""
    if world_size > 1 and names_job_folder(file):
        return f"Written: {file}, to which each other rank writes. To compare them: torchprof show {file}"
    if format_of(file) not in ("json", PARQUET_RUN):
        return f"Written: {file}."
    if world_size > 1:
        return f"Written: {file}. Each other rank writes its own. To compare them: torchprof show FILE …"
    return f"Written: {file}. To see more of it: torchprof show {file}"


def _sections(
    run: torchprof.Run,
    ending: Ending,
    script: Script,
    arguments: argparse.Namespace,
    files: Mapping[str, str],
    color: bool,
) -> Iterator[str]:
    """The sections of the report. ``files``: where the run was to be written."""
    recorded_s = sum(passes.recorded_ns for passes in run.passes) / 1e9
    of_all = f"{recorded_s:.2f} s of " if run.passes else ""
    yield f"\ntorchprof: {arguments.script} {ending.outcome}. Recorded: {of_all}{run.meta.wall_ns / 1e9:.2f} s.\n"
    saved = [file for file, path in files.items() if Path(path).exists() and format_of(file) in ("json", PARQUET_RUN)]
    command = f"torchprof show {saved[0]}" if saved else "saved with -o run.json, torchprof show run.json"
    yield from with_legend(sections_of(run, arguments, color, run, command=command))
    if arguments.python:
        yield section("Python's functions outside torch, in a second run", _python_table(script, ending))


def _python_table(script: Script, ending: Ending) -> str:
    """Run the script under cProfile. Returns the table of its functions, without those of torch."""
    import torch

    from torchprof.profile.script import profile_python

    if ending.signal is not None:
        return "Not run: the first run was interrupted."
    if sys.stderr.isatty():
        print("torchprof: running the script again under cProfile ...", file=sys.stderr, flush=True)
    done = profile_python(script)
    failed = f"This run ended with exit code {done.code}. {done.errors}".rstrip() if done.code else ""
    if not done.functions:
        return f"It recorded no function. {failed}".rstrip()
    in_torch = str(Path(torch.__file__).parent) + os.sep
    table = [_row(function) for function in done.functions if not _is_of_torch(function, in_torch)]
    text = text_of(ReportTable.of_cells(["Self", "Total", "Calls", "Function"], table[:_FUNCTIONS_SHOWN]))
    return f"{text}\n{failed}" if failed else text


def _is_of_torch(function: PythonFunction, in_torch: str) -> bool:
    """Whether a function is torch's. ``in_torch``: the folder of its files."""
    is_built_in = function.file == "~"
    return function.file.startswith(in_torch) or (is_built_in and bool(_BUILT_IN_OF_TORCH.search(function.function)))


def _row(function: PythonFunction) -> list[str]:
    is_built_in = function.file == "~"
    place = "" if is_built_in else f"{_relative(function.file)}:{function.line} "
    self_s, total_s = f"{function.self_ns / 1e9:.3f}s", f"{function.total_ns / 1e9:.3f}s"
    return [self_s, total_s, str(function.calls), f"{place}{function.function}"]


def _relative(file: str) -> str:
    """A path relative to the folder of ``sys.path`` that contains it; unchanged if there is none."""
    folders = [folder for folder in sys.path if folder and Path(file).is_relative_to(folder)]
    return str(Path(file).relative_to(max(folders, key=len))) if folders else file
