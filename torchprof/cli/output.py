"""Output that several commands share: sections of reports, files, progress."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TextIO

import torchprof
from torchprof.advise import Advice, advise, texts_of_findings
from torchprof.analyze.layers import fitting_depth
from torchprof.analyze.report import Part, spaced, without_warnings
from torchprof.analyze.sentences import legend, not_shown, unrecorded
from torchprof.analyze.top import largest_parts, title_of_parts
from torchprof.cli.options import TABLE_OPTIONS, given_options, in_words, report_options
from torchprof.errors import TorchprofError, printable, printable_lines, some
from torchprof.first_screen.overview import other_sentences, short_tree
from torchprof.first_screen.verdict import verdict
from torchprof.ranks.sentences import MOST_WHOLE_RANKS, run_of_chosen
from torchprof.reports import content_of, current_name, options_of
from torchprof.reports.documents import terminal_width, text_of
from torchprof.run.words import FrameKind

INTERRUPTED = 128 + signal.SIGINT
"""The exit code after Ctrl-C."""

NOT_WRITTEN = 2
"""The exit code if a file could not be written."""
_PLACES_SHOWN = 5
_LAYERS_SHOWN = 50
_OPERATORS_SHOWN = 12
_GAPS_SHOWN = 5
_FINDINGS_SHOWN = 3
_OPTION_THAT_RECORDS = {"record_shapes": "--shapes (shapes and types)", "profile_memory": "--memory (memory)"}


def in_color(stream: TextIO) -> bool:
    """Whether to write colors to a stream: it is a terminal with colors, and ``NO_COLOR`` is unset or empty.
    https://no-color.org defines ``NO_COLOR``."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


# Print a run


def print_run(run: torchprof.Run, arguments: argparse.Namespace, otherwise: Callable[[], None] | None = None) -> None:
    """Print the report or the table that the user chose; if none was chosen, call ``otherwise``, or print the overview,
    with ``--timeline`` memory over time. With ``--json`` the data of that report is printed."""
    name, options = _chosen_report(arguments)
    if not name and not arguments.json and otherwise is not None:
        otherwise()
        return
    name = name or ("memory" if getattr(arguments, "timeline", False) else "overview")
    if arguments.json:
        print(json.dumps(run.report(name, **options).data))
        return
    accepted = options_of(name)
    for_terminal = {"color": in_color(sys.stdout), "width": terminal_width(), "whole": _how_to_see_all(run)}
    options |= {option: value for option, value in for_terminal.items() if option in accepted}
    text = run.report(name, **options)
    print(printable_lines(text.replace("\r\n", "\n")) if name == "csv" and sys.stdout.isatty() else text)


def _chosen_report(arguments: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    """The report of ``--report`` or ``--summary``, or the table if one of its options was given; its options. ``""`` if
    the user chose none."""
    if arguments.report:
        all_findings = {"top": None} if current_name(arguments.report) == "findings" else {}
        return arguments.report, all_findings | report_options(arguments)
    given = given_options(arguments, TABLE_OPTIONS)
    if arguments.summary:
        if refused := [name for name in given if name not in options_of("summary")]:
            raise TorchprofError(f"The summary has no {in_words(refused)}: leave out these options or --summary.")
        return "summary", given
    return "tree" if given else "", given


def _how_to_see_all(run: torchprof.Run) -> str:
    """The option that shows all layers."""
    deepest = max((len(layer.path) for layer in run.layers), default=1) - 1
    return f"--depth {deepest} shows all."


def print_all(
    run: torchprof.Run, arguments: argparse.Namespace, files: Sequence[str], of_ranks: torchprof.Run, *, is_trace: bool
) -> None:
    """Print all sections of a run that was read from files. ``of_ranks``: the run that compares the ranks of the job.
    Of more than ``MOST_WHOLE_RANKS`` ranks that were not chosen, only that section is about all, since the others would
    be very long."""
    if len(run.metas) > MOST_WHOLE_RANKS and of_ranks is run and run.choice is None:
        run = run_of_chosen(run)
    recorded = max(meta.wall_ns for meta in of_ranks.metas)
    timed = f" Recorded: {recorded / 1e9:.2f} s." if "cpu_ns" in run.meta.measured else ""
    sections = sections_of(run, arguments, in_color(sys.stdout), of_ranks, is_trace=is_trace)
    print(f"torchprof: {printable(some(files))}.{timed}\n", *with_legend(sections), sep="\n")


def with_legend(sections: Iterator[str]) -> Iterator[str]:
    """The sections, and after them the legend of the signs in them."""
    shown = ""
    for text in sections:
        shown += f"{text}\n"
        yield text
    if signs := legend(shown):
        yield section("Legend", "\n".join(signs))


def sections_of(
    run: torchprof.Run,
    arguments: argparse.Namespace,
    color: bool,
    of_ranks: torchprof.Run,
    *,
    command: str = "",
    is_trace: bool = False,
) -> Iterator[str]:
    """The sections that show a run as a whole, the most important first. ``of_ranks``: the run that compares the ranks
    of the job. ``command``: the command that shows the run, to which options are added; "" if the user has just typed
    it. ``is_trace``: the run, or a part of it, was read from a trace."""
    all_findings = advise(run)
    yield text_of(spaced(verdict(run, terminal_width(), all_findings)))
    if len(of_ranks.metas) > 1:
        yield section("The ranks", _without_warnings(of_ranks, "ranks"))
    sentences = "\n".join(other_sentences(run))
    places = spaced([*largest_parts(run, _PLACES_SHOWN, width=terminal_width()), sentences])
    yield section(title_of_parts(run), places)
    # The sections above have the warnings, so those below do not repeat them.
    depth = fitting_depth(run, _LAYERS_SHOWN) if arguments.depth is None else arguments.depth
    if run.layers:
        yield section("The layers", _layers(run, arguments, color))
    if all_findings:
        yield section("Findings", _first_findings(run, all_findings, command, is_trace))
    if run.device_use and run.device_times:
        yield section("The devices", _without_warnings(run, "device"))
    if any(time.communication_ns for time in run.device_times):
        yield section("Communication", _without_warnings(run, "collectives"))
    if "cpu_ns" not in run.meta.measured and run.device_times:  # a trace without CPU events
        yield section("The kernels", _without_warnings(run, "kernels", top=_OPERATORS_SHOWN))
    elif any(chain[0].kind != FrameKind.PYTHON for chain in run.rows.frames if chain):
        yield section("The operators", _without_warnings(run, "ops", top=_OPERATORS_SHOWN))
    if "cpu_ns" in run.meta.measured:
        yield section("Between the operators", _without_warnings(run, "python", top=_GAPS_SHOWN))
    if run.memory:
        yield section("Memory", _without_warnings(run, "memory", depth=depth))
    if arguments.subcommand != "run" and any(spread.count > 1 for spread in run.samples.values()):
        yield section("One forward call, CPU time", _without_warnings(run, "calls", depth=depth))
    if facts := [*run.meta.program, *run.meta.environment]:
        yield section("Recorded on", "\n".join(printable(f"  {name:<8} {value}") for name, value in facts))


def _without_warnings(run: torchprof.Run, report: str, **options: Any) -> Part:
    return without_warnings(content_of(report, run, options))


def section(title: str, part: Part) -> str:
    """The text of a report, or of a part of one, with an underlined title."""
    return f"\n{title}\n{'=' * len(title)}\n{text_of(part)}"


def _layers(run: torchprof.Run, arguments: argparse.Namespace, color: bool) -> str:
    """The tree of layers as the options of the table say; without one, the rows that fit."""
    if not (options := given_options(arguments, TABLE_OPTIONS)):
        return text_of(short_tree(run, _LAYERS_SHOWN, terminal_width(), _how_to_see_all(run), color=color))
    deepest = max(len(layer.path) for layer in run.layers) - 1
    hidden = "" if options.get("depth", deepest) >= deepest else f"\nDeeper layers are hidden: {_how_to_see_all(run)}"
    tree = _without_warnings(run, "tree", color=color, **options)
    return f"{text_of(tree, options.get('tablefmt'))}{hidden}"


def _first_findings(run: torchprof.Run, all_findings: Sequence[Advice], command: str, is_trace: bool) -> str:
    """The most important findings, and which commands and options show more."""
    parts = texts_of_findings(run, all_findings[:_FINDINGS_SHOWN])
    if len(all_findings) > _FINDINGS_SHOWN:
        show = f"{command} --report findings".lstrip()
        parts.append(f"{not_shown(len(all_findings) - _FINDINGS_SHOWN)}: {show} shows all.")
    missing = [name for name in unrecorded(run) if name in _OPTION_THAT_RECORDS]
    if missing and is_trace:
        parts.append(f"More can be found in a trace with {' and '.join(f'{name}=True' for name in missing)}.")
    elif missing:
        options = " and ".join(_OPTION_THAT_RECORDS[name] for name in missing)
        parts.append(f"More can be found in a run with {options}.")
    return "\n\n".join(parts)


# Write files


def write_files(export: Callable[[str], None], arguments: argparse.Namespace) -> int:
    """Write all files of ``-o`` that can be written, and print the outcome of each. Returns the exit code."""
    failures = [write_file(export, file, file) for file in arguments.output]
    for file, failure in zip(arguments.output, failures):
        print(failure or f"Written: {file}.", file=sys.stderr)
    return NOT_WRITTEN if any(failures) else 0


def write_file(export: Callable[[str], None], path: str, name: str) -> str:
    """Write one file. Returns "", or a sentence that says why the file was not written. That does not raise, so that
    the caller can still print the report and write the other files."""
    try:
        export(path)
    except OSError as error:
        return f"Not written: {name}: {error.strerror or error}. Choose another place: -o FILE."
    except TorchprofError as error:
        return f"Not written: {name}: {error}"
    return ""


# While a model runs

ERASED = "\r\033[K"
"""What erases the line of ``show_status``."""


def print_failure(given: str, failure: Exception) -> int:
    """Print the error that the model raised when it was called with ``given``. Returns the exit code for it."""
    given = given or "no input (--input)"
    print(f"torchprof: the model failed on {given}: {type(failure).__name__}: {failure}", file=sys.stderr)
    if "unexpected keyword argument" in str(failure):
        print("A model that takes a dict: --input '{img=2,8;ids=int64:2,8}'; a list: '[2,8;2,8]'.", file=sys.stderr)
    return 1


def progress(what: str, count: int) -> Iterator[int]:
    """Like ``range(count)``; on a terminal, stderr shows the current number."""
    for number in range(count):
        show_status(f"\r{what} {number + 1} of {count} ")
        yield number
    if count:
        show_status(ERASED)


@contextmanager
def shown_meanwhile(text: str) -> Iterator[None]:
    """On a terminal, stderr shows a text until the block ends."""
    show_status(f"\r{text} ")
    yield
    show_status(ERASED)


def show_status(text: str) -> None:
    """Show a text on stderr, if that is a terminal, in place of the last one."""
    if sys.stderr.isatty():
        print(text, end="", file=sys.stderr, flush=True)
