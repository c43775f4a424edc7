"""Looks up a report by its name, checks its options, and renders it as text or writes its file."""

from __future__ import annotations

import gzip
import inspect
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from os import PathLike
from pathlib import Path
from pkgutil import walk_packages
from typing import Any, Literal, TypeAlias

from torchprof.analyze.report import OPTIONS, QUESTIONS, REPORTS, Part, Report, Section
from torchprof.errors import TorchprofError, suggest
from torchprof.reports.documents import checked_tablefmt, text_of
from torchprof.run.file import whole_file
from torchprof.run.processes import paused_gc
from torchprof.run.run import ReportText, Run
from torchprof.run.saved import names_job_folder, write

_RENAMED = {"advice": "findings"}
_FIRST = "overview"  # in the list of reports
_TABLEFMT = "tablefmt"  # the option of all reports that only changes how they look
Reported: TypeAlias = Literal["run", "diff"]  # what a report is of
PARQUET_RUN = "parquet"
"""In place of the name of a report: a Parquet file, or a job folder, which ``Run.save`` writes."""


def known(of: Reported = "run") -> Mapping[str, Report]:
    """All reports of a "run" or of a "diff", by name."""
    _import_all()
    return REPORTS[of]


@cache
def _import_all() -> None:
    for package in ("analyze", "ranks", "comparison", "first_screen", "advise", "reports"):
        folder = f"torchprof.{package}"
        for file in walk_packages(import_module(folder).__path__, f"{folder}."):
            import_module(file.name)


def _list_of_reports(of: Reported = "run") -> str:
    """A line for each report, below the question that it answers: the overview first, the others from A to Z."""
    reports = known(of)
    width = max(map(len, reports))
    sections = []
    for answers, question in QUESTIONS.items():
        names = sorted(
            (name for name, report in reports.items() if report.answers == answers),
            key=lambda name: (name != _FIRST, name),
        )
        lines = [f"  {name:<{width}}  {reports[name].shows}" for name in names]
        sections += ["\n".join([question, *lines])] if lines else []
    return "\n\n".join(sections)


@paused_gc()
def render(name: str | None, value: object, options: Mapping[str, Any], *, of: Reported = "run") -> ReportText:
    """The text of the report of that name, the list of all reports without a name. Raises TorchprofError for an unknown
    name or option."""
    if name is None:
        if options:
            raise TorchprofError(f"Options are of one report: which one? {suggest('', known(of), every=True)}")
        reports = _list_of_reports(of)
        return ReportText(reports, "reports", reports)
    name = current_name(name)
    content = content_of(name, value, options, of=of)
    if not known(of)[name].answers:  # the text of a file
        return ReportText(str(content), name, None)
    text = text_of(Section([content]), checked_tablefmt(options.get(_TABLEFMT)))
    return ReportText(text, name, content)


def content_of(name: str, value: object, options: Mapping[str, Any], *, of: Reported = "run") -> Part:
    """The report of that name. Raises TorchprofError as ``render``, and for a wrong value of an option."""
    name = current_name(name)
    accepted = options_of(name, of=of)
    for option, given in options.items():
        if option not in accepted:
            choice = suggest(option, accepted) if accepted else "It has none."
            raise TorchprofError(f"The report {name!r} has no option {option!r}. {choice}")
        OPTIONS[option].check(option, given)
    return known(of)[name].write(value, **{option: given for option, given in options.items() if option != _TABLEFMT})


def options_of(name: str, *, of: Reported = "run") -> list[str]:
    """The names of a report's options. Raises TorchprofError for an unknown report."""
    reports, name = known(of), current_name(name)
    if name not in reports:
        raise TorchprofError(f"There is no report {name!r} of a {of}. {suggest(str(name), reports, every=True)}")
    of_content = list(inspect.signature(reports[name].write).parameters)[1:]
    return [*of_content, _TABLEFMT] if reports[name].answers else of_content


def current_name(name: str) -> str:
    """The name of a report, which may have had another one."""
    return _RENAMED.get(name, name)


def export(path: str | PathLike[str], value: object, options: Mapping[str, Any], *, of: Reported = "run") -> None:
    """Write a report to a file. The suffix of the file chooses the report; files ending in ``.gz`` are gzipped.

    Raises TorchprofError for a suffix without a report, for an unknown option and for a folder that does not exist;
    OSError as ``open`` does.
    """
    name = format_of(path, of=of)
    if name == PARQUET_RUN:
        if options:
            raise TorchprofError(f"{path} is the whole run: it has no option {next(iter(options))!r}.")
        assert isinstance(value, Run)  # a diff has no such file
        write(value, path)
        return
    # Before the file is opened: an error must not leave an empty file.
    data = render(name, value, options, of=of).encode("utf-8", "backslashreplace")
    path = Path(path)
    if not path.parent.is_dir():
        raise TorchprofError(f"{path} cannot be written: the folder {path.parent} does not exist. Make it first.")
    with whole_file(path) as file:
        file.write(gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)


def format_of(path: str | PathLike[str], *, of: Reported = "run") -> str:
    """The name of the report that belongs to the suffix of a file. Raises TorchprofError if there is none."""
    file = Path(path).name.removesuffix(".gz")
    formats = {report.suffix: name for name, report in known(of).items() if report.suffix is not None}
    if of == "run":
        formats[".parquet"] = PARQUET_RUN
        if names_job_folder(path):
            return PARQUET_RUN
    if not (fitting := [suffix for suffix in formats if file.endswith(suffix)]):
        raise TorchprofError(
            f"{str(path)!r} does not say by its ending which format it is to have. Choose from "
            f"{', '.join(f'{suffix} ({name})' for suffix, name in sorted(formats.items()))}."
        )
    return formats[max(fitting, key=len)]
