"""The functions that methods of ``Run`` call by name, most of ``reports`` and ``analyze``; and the text of a report.
They are imported when they are first called, so ``run`` imports none of the packages that read it."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from torchprof.errors import TorchprofError

_FILES = {
    "chosen_ranks": "torchprof.ranks.sentences",
    "with_comparison": "torchprof.ranks.sentences",
    "benchmark_table": "torchprof.analyze.summary",
    "data_of": "torchprof.reports.documents",
    "dataframe": "torchprof.reports.exports",
    "export": "torchprof.reports",
    "html_of": "torchprof.reports.documents",
    "metrics": "torchprof.analyze.records",
    "printed": "torchprof.reports.documents",
    "render": "torchprof.reports",
    "all_warnings": "torchprof.analyze.sentences",
    "text_of": "torchprof.reports.documents",
    "verdict_on_ranks": "torchprof.ranks.sentences",
    "show_page": "torchprof.reports.documents",
    "write": "torchprof.run.saved",
}


def output(name: str) -> Callable[..., Any]:
    """The function of that name."""
    return getattr(import_module(_FILES[name]), name)  # type: ignore[no-any-return]


class ReportText(str):
    """The text of a report: a ``str`` that also has the report's ``data``. Python's prompt shows the ``repr`` of a
    value, so its ``repr`` is the text. A notebook shows its tables."""

    __slots__ = ("_content", "_name")

    _name: str
    _content: Any

    def __new__(cls, text: str, name: str = "", content: Any = None) -> ReportText:
        """``content``: the report whose text it is, a ``Part`` of ``analyze.report``; None for a file format."""
        self = super().__new__(cls, text)
        self._name, self._content = name, content
        return self

    def __repr__(self) -> str:
        return str(self)

    @property
    def data(self) -> dict[str, Any]:
        """The report for other programs, as values that JSON can store: its ``tables`` and ``sentences``.
        docs/exports.md describes them. Raises TorchprofError for a report that is a file format, such as "csv"."""
        if self._content is None:
            raise TorchprofError(
                f"The report {self._name!r} is a file format: its text is for other programs, and it has no other data."
            )
        return output("data_of")(self._name, self._content)  # type: ignore[no-any-return]

    def _repr_html_(self) -> str | None:
        """The HTML that a notebook shows; None for a file format, of which it shows the text."""
        return None if self._content is None else output("html_of")(self._content)
