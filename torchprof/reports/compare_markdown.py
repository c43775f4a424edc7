"""A diff in Markdown, for a pull request: the answer first."""

from __future__ import annotations

from torchprof.diff import Diff
from torchprof.reports import report
from torchprof.reports.compare import headline, named, told_of, view_of
from torchprof.reports.markdown import _BEFORE_A_BAR, _code, _line, _text


@report("markdown", suffix=".md", of="diff")
def markdown(diff: Diff, *, depth: int | None = None, sort_by: str | None = None, top: int = 20) -> str:
    """What changed in a sentence, the table, what happened to the layers themselves, and notes. The options are those
    of "table".

    Names are code, so nothing in them is a link, a mention or a tag. Raises TorchprofError as "table" does.
    """
    view = view_of(diff, depth, sort_by, top)
    lines = [_text(headline(diff)), ""]
    lines += [_line([*map(_text, view.headings)]), _line([":--", *["--:"] * (len(view.headings) - 1)])]
    lines += [
        _line([_BEFORE_A_BAR.sub(r"\1\1\\|", _code(named(pair))), *map(_text, view.cells(pair))]) for pair in view.pairs
    ]
    for what, texts in (*told_of(diff), ("", (*view.notes, *diff.notes, *diff.doubts))):
        lines.append("")
        lines += [f"- {what}: {_code(text)}" if what else f"- {_text(text)}" for text in texts]
    return "\n".join(lines)
