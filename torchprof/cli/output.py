"""What several commands print and write."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TextIO

import torchprof
from torchprof.cli.options import OF_THE_TABLE, given_options, in_words, report_options, table_options
from torchprof.errors import TorchprofError
from torchprof.reports import format_of
from torchprof.run.warnings import Caveat

_LAYERS_SHOWN = 50
_OPERATORS_SHOWN = 12
_BETWEEN_SHOWN = 5
_ADVICE_SHOWN = 3
_RECORDS = {"record_shapes": "--shapes (shapes and types)", "profile_memory": "--memory (memory)"}
_NOT_WRITTEN = 2
INTERRUPTED = 128 + signal.SIGINT


def in_color(stream: TextIO) -> bool:
    """Whether what is written there is seen in colours: on a terminal that can, by a user who does not refuse them.

    Where ``NO_COLOR`` is set to anything but nothing, there are none (https://no-color.org).
    """
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def opening_of(run: torchprof.Run, name: str) -> str:
    recorded = max(meta.wall_ns for meta in run.metas)
    timed = f" Recorded: {recorded / 1e9:.2f} s." if "cpu_ns" in run.meta.measured else ""
    return f"torchprof: {name}.{timed}\n"


def print_report(run: torchprof.Run, arguments: argparse.Namespace) -> None:
    options = report_options(arguments)
    if arguments.report == "tree":
        options["color"] = in_color(sys.stdout)
    if arguments.report == "advice":
        options.setdefault("limit", None)
    print(run.report(arguments.report, **options))


def print_run(run: torchprof.Run, arguments: argparse.Namespace) -> None:
    if arguments.summary:
        given = [name for name in given_options(arguments, OF_THE_TABLE) if name not in ("depth", "tablefmt")]
        if given:
            raise TorchprofError(f"The summary has no {in_words(given)}: leave that out, or leave --summary out.")
        print(run.report("summary", depth=arguments.depth, tablefmt=arguments.tablefmt))
        return
    print(run.report("tree", **table_options(arguments), color=in_color(sys.stdout)))
    if any(spread.count > 1 for spread in run.samples.values()):
        print("\nOne forward call, on the CPU's clock:\n")
        print(run.report("calls", depth=arguments.depth, tablefmt=arguments.tablefmt))


def failure_to_write(export: Callable[[Path], None], path: Path, shown: str) -> str:
    """Write a file. Says in a sentence why that failed: the report, and other files, are to be had in any case."""
    try:
        export(path)
    except OSError as error:
        return f"Not written: {shown}: {error.strerror or error}. Another place: -o FILE."
    except TorchprofError as error:
        return f"Not written: {shown}: {error}"
    return ""


class _Warned(torchprof.Run):
    """A run whose warnings are shown already."""

    @property
    def warnings(self) -> tuple[Caveat, ...]:
        return ()


def report_of(run: torchprof.Run, arguments: argparse.Namespace, written: Sequence[str], color: bool) -> Iterator[str]:
    """What is known of a run that somebody sees for the first time, section after section, the answer first.

    ``written``: the files that it is in.
    """
    from torchprof.reports.tree import fitting_depth

    yield run.report("headline")
    if run.meta.environment:
        yield "\n" + "\n".join(f"  {name:<8} {value}" for name, value in run.meta.environment)
    advice = _advice(run, written, is_trace=arguments.subcommand == "trace")
    if advice:
        yield section("What to change", advice)
    timed = not {"cpu_ns", "device_ns"}.isdisjoint(run.meta.measured)
    yield section("Where the time goes" if timed else "Where the FLOPs are", run.report("top"))
    # What to know before was said, once: the warnings, and which ranks of the job are missing. The verdicts on ranks
    # depend on how many the job has.
    of_job = _Warned(**{field.name: getattr(run, field.name) for field in fields(run)})
    run = replace(of_job, metas=tuple(replace(meta, world_size=1) for meta in run.metas))
    depth = fitting_depth(run, _LAYERS_SHOWN) if arguments.depth is None else arguments.depth
    if run.layers:
        deepest = max(len(layer.path) for layer in run.layers) - 1
        hidden = "" if depth >= deepest else f"\nDeeper layers are hidden: --depth {deepest} shows all."
        names = ("show_events", "sort_by", "top", "percent", "tablefmt", "hot")
        options = {name: getattr(arguments, name) for name in names if getattr(arguments, name, None)}
        yield section("The layers", run.report("tree", depth=depth, color=color, **options) + hidden)
    if len(run.metas) > 1:
        yield section("The ranks", of_job.report("ranks"))
    if run.device_times:
        yield section("The devices", run.report("device"))
    if any(time.communication_ns for time in run.device_times):
        yield section("Communication", run.report("collectives"))
    if "cpu_ns" not in run.meta.measured and run.device_times:  # a trace of devices alone
        yield section("The kernels", run.report("kernels", row_limit=_OPERATORS_SHOWN))
    else:
        if any(chain[0].kind != "python" for chain in run.rows.frames if chain):
            yield section("The operators, by themselves", run.report("ops", row_limit=_OPERATORS_SHOWN))
        if "cpu_ns" in run.meta.measured:
            yield section("Between the operators", run.report("between", limit=_BETWEEN_SHOWN))
    if run.memory:
        yield section("Memory", run.report("memory", depth=depth))
    if arguments.subcommand == "show" and any(spread.count > 1 for spread in run.samples.values()):
        yield section("One forward call, on the CPU's clock", run.report("calls", depth=depth))


def _advice(run: torchprof.Run, written: Sequence[str], is_trace: bool) -> str:
    """What is the most worth changing, and how to see and find more, in the words of the command line; "" for
    nothing."""
    from torchprof.analyze.advice import advise
    from torchprof.reports.advice import findings, not_shown, unrecorded

    found = advise(run)
    if not found:
        return ""
    parts = findings(run, found[:_ADVICE_SHOWN])
    if len(found) > _ADVICE_SHOWN:
        saved = next((shown for shown in written if format_of(shown) == "json"), None)
        show = f"torchprof show {saved}" if saved else "saved with -o run.json, torchprof show run.json"
        parts.append(f"{not_shown(len(found) - _ADVICE_SHOWN)}: {show} --report advice shows all.")
    missing = [name for name in unrecorded(run) if name in _RECORDS]
    if missing and is_trace:
        parts.append(f"More can be found in a trace with {' and '.join(f'{name}=True' for name in missing)}.")
    elif missing:
        parts.append(f"More can be found in a run with {' and '.join(_RECORDS[name] for name in missing)}.")
    return "\n\n".join(parts)


def section(title: str, text: str) -> str:
    return f"\n{title}\n{'=' * len(title)}\n{text}"


def export(export: Callable[[Path], None], arguments: argparse.Namespace) -> int:
    """Write all files that can be written, and say so of each. Returns the exit code."""
    failures = [failure_to_write(export, Path(file), file) for file in arguments.output]
    for file, failure in zip(arguments.output, failures):
        print(failure or f"Written: {file}.", file=sys.stderr)
    return _NOT_WRITTEN if any(failures) else 0


def tell_failure(arguments: argparse.Namespace, failure: Exception) -> int:
    given = " ".join(arguments.input) or "no input (--input)"
    print(f"torchprof: the model failed on {given}: {type(failure).__name__}: {failure}", file=sys.stderr)
    return 1


def progress(what: str, count: int) -> Iterator[int]:
    """Count up, and on a terminal say where we are."""
    for number in range(count):
        if sys.stderr.isatty():
            print(f"\r{what} {number + 1} of {count} ", end="", file=sys.stderr, flush=True)
        yield number
    if count and sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr, flush=True)
