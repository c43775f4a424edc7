"""A comparison in Markdown, for pull requests: the headline first."""

from __future__ import annotations

from torchprof.analyze.compare.diff import Diff
from torchprof.analyze.compare.table import changes_of_layers, diff_headline, view_of, whole_of
from torchprof.analyze.report import report
from torchprof.reports.markdown import code, lines_of, plain


@report("markdown", "the table for pull requests", suffix=".md", of="diff")
def diff_markdown(diff: Diff, *, depth: int | None = None, sort_by: str | None = None, top: int = 20) -> str:
    """The headline, changes of the whole run, the table, matched layers that changed, and notes. The options are those
    of "table".

    Names are code spans, so that Markdown finds no links, mentions or tags in them. Raises TorchprofError as "table".
    """
    view = view_of(diff, depth, sort_by, top)
    lines = [plain(diff_headline(diff, sort_by=sort_by)), ""]
    whole = [f"- {plain(sentence)}" for sentence in whole_of(diff)]
    lines += [*whole, ""] if whole else []
    lines += lines_of(view.table())
    for what, texts in (*changes_of_layers(diff), ("", (*view.notes, *diff.notes, *diff.warnings))):
        lines.append("")
        lines += [f"- {what}: {code(text)}" if what else f"- {plain(text)}" for text in texts]
    return "\n".join(lines)
