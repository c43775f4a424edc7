"""``torchprof run``."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import torchprof
from torchprof.cli.options import check_output, wants_timeline
from torchprof.cli.output import failure_to_write, in_color, report_of, section
from torchprof.encoding import errors_of
from torchprof.errors import TorchprofError
from torchprof.reports import format_of

if TYPE_CHECKING:
    from torchprof.profile.script import Ending, Script


_OF_TORCH = re.compile(r"\btorch\b|torch\._C")
_RANK = "{rank}"
_FUNCTIONS_SHOWN = 15


def run_command(arguments: argparse.Namespace) -> NoReturn:
    # As for _profile; and before the script, which may import torch, too.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    name = arguments.script.rpartition(".")[2] if arguments.is_module else Path(arguments.script).resolve().stem
    rank, world_size = _place_in_job()
    if arguments.python and world_size > 1:
        raise TorchprofError("--python runs the script twice, and a rank of a job cannot run alone: leave it out.")
    asked = bool(arguments.output)
    arguments.output = _outputs_of(rank, world_size, arguments.output, name)
    if asked:  # a file that nobody asked for keeps no script from running
        check_output(arguments)
    files = {shown: Path(shown).absolute() for shown in arguments.output}  # the script may go elsewhere
    report = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding=sys.stdout.encoding, errors=errors_of(sys.stdout))
    import torch

    from torchprof.profile.program import Program
    from torchprof.profile.script import Script

    script = Script(arguments.script, arguments.args, arguments.is_module)
    program = Program(
        use_cuda=torch.cuda.is_available(),
        profile_memory=arguments.memory,
        with_flops=arguments.flops,
        record_shapes=arguments.shapes,
        with_timeline=wants_timeline(arguments),
        compile_layers=arguments.compile_layers,
        warmup_calls=arguments.warmup_calls,
        max_calls=arguments.max_calls,
    )
    failures: dict[str, str] = {}

    @contextmanager
    def recorded() -> Iterator[None]:
        with program:
            yield
        # Before the report, which may break: whoever reads it may have seen enough (`| head`), and close the pipe. And
        # here, where SIGTERM does not end us: that is how torchrun ends the other ranks when one has failed.
        failures.update({shown: failure_to_write(program.run.export, path, shown) for shown, path in files.items()})

    ending = script.run(recorded)
    if ending.began and rank:  # of a job's ranks, the first prints
        with suppress(Exception):
            for failure in filter(None, failures.values()):
                print(failure, file=sys.stderr)
    elif ending.began:
        with suppress(Exception):  # the script may have closed it, or put anything in its place
            sys.stdout.flush()
        where = [failure or _written(shown, world_size) for shown, failure in failures.items()]
        try:
            with suppress(BrokenPipeError), report:
                for text in _program_report(program.run, ending, script, arguments, files, color=in_color(report)):
                    print(text, file=report, flush=True)
                print("", *where, sep="\n", file=report)
        except (TorchprofError, OSError) as error:  # the exit code stays the script's
            with suppress(Exception):
                print(f"torchprof: {error}", *where, sep="\n", file=sys.stderr)
    ending.end()


def _place_in_job() -> tuple[int, int]:
    """The rank of this process and how many there are, as torchrun tells a process that it starts."""
    rank, world_size = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    return (int(rank), int(world_size)) if rank.isdecimal() and world_size.isdecimal() else (0, 1)


def _outputs_of(rank: int, world_size: int, given: Sequence[str], name: str) -> list[str]:
    """The files that a rank writes: those that were given, with its number in them, else one beside the report."""
    if not given:
        return [f"{name}.rank{rank}.torchprof.json" if world_size > 1 else f"{name}.torchprof.json"]
    for file in given:
        if world_size > 1 and _RANK not in file:
            raise TorchprofError(
                f"-o {file}: all {world_size} ranks of the job would write this file. Put {_RANK} into its name."
            )
    return [file.replace(_RANK, str(rank)) for file in given]


def _written(shown: str, world_size: int) -> str:
    """Which file was written, and what can be done with it."""
    if format_of(shown) != "json":
        return f"Written: {shown}."
    if world_size > 1:
        return f"Written: {shown}; each other rank writes its own. To compare them: torchprof merge FILE …"
    return f"Written: {shown}. To see more of it: torchprof show {shown}"


def _program_report(
    run: torchprof.Run,
    ending: Ending,
    script: Script,
    arguments: argparse.Namespace,
    files: Mapping[str, Path],
    color: bool,
) -> Iterator[str]:
    """The report of a whole script, section after section, the answer first."""
    yield f"\ntorchprof: {arguments.script} {ending.outcome}. Recorded: {run.meta.wall_ns / 1e9:.2f} s.\n"
    yield from report_of(run, arguments, [shown for shown, path in files.items() if path.is_file()], color)
    if arguments.python:
        yield section("Python's functions outside torch, of a second run under cProfile", _python_table(script, ending))


def _python_table(script: Script, ending: Ending) -> str:
    import torch

    from torchprof.profile.cprofile import profile_python
    from torchprof.reports.text import draw

    if ending.signal is not None:
        return "Not run: the first run was interrupted."
    if sys.stderr.isatty():
        print("torchprof: running it once more under cProfile ...", file=sys.stderr, flush=True)
    done = profile_python(script)
    failed = f"This run left with exit code {done.code}. {done.errors}".rstrip() if done.code else ""
    if not done.functions:
        return f"It left nothing to show. {failed}".rstrip()
    in_torch = str(Path(torch.__file__).parent) + os.sep
    table = [
        [
            f"{one.self_ns / 1e9:.3f}s",
            f"{one.total_ns / 1e9:.3f}s",
            str(one.calls),
            one.function if one.file == "~" else f"{_shown(one.file)}:{one.line} {one.function}",
        ]
        for one in done.functions
        if not (one.file.startswith(in_torch) or (one.file == "~" and _OF_TORCH.search(one.function)))
    ]
    text = draw(["Self", "Total", "Calls", "Function"], table[:_FUNCTIONS_SHOWN])
    return f"{text}\n{failed}" if failed else text


def _shown(file: str) -> str:
    """A path from the folder that Python found it in, where that is known."""
    folders = [folder for folder in sys.path if folder and Path(file).is_relative_to(folder)]
    return str(Path(file).relative_to(max(folders, key=len))) if folders else file
