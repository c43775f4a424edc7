"""Reports as text for terminals, as GitHub Flavored Markdown, and as HTML for notebooks."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from importlib import import_module
from importlib.resources import files
from itertools import zip_longest
from shutil import get_terminal_size
from typing import TYPE_CHECKING
from unicodedata import east_asian_width

from tabulate import tabulate, tabulate_formats

from torchprof.analyze.layer_reports import tree
from torchprof.analyze.layers import fitting_depth
from torchprof.analyze.report import HOT, Part, ReportTable, Section, TableRow, report, spaced, tables_and_sentences
from torchprof.errors import TorchprofError, printable, printable_lines, suggest
from torchprof.first_screen.overview import overview
from torchprof.first_screen.verdict import verdict
from torchprof.run.formats import format_time
from torchprof.run.processes import paused_gc
from torchprof.run.run import Run

if TYPE_CHECKING:
    from torchprof.comparison.diff import Diff

# Text for terminals

_BOLD = "1"
# The smallest share of the whole for each color, the hottest first, as SGR codes (ECMA-48). The colors are of xterm's
# cube of 256, which nearly every terminal shows alike; the 16 basic colors depend on the user's theme (yellow is often
# unreadable on white). Their contrast is at least 3.4:1 on white and on the dark gray of dark themes.
_HEAT = ((0.5, "1;38;5;196"), (0.25, "38;5;166"), (0.1, "38;5;100"), (0.05, "38;5;64"), (0.01, "38;5;31"))
_COLD = "38;5;244"

_FIRST_WIDE = "\u1100"  # Hangul: no letter before it is wide
_COLOR = re.compile(r"\033\[[\d;]*m")


def text_of(part: Part, tablefmt: str | None = None) -> str:
    """A report, or a part of one, as text. A name in it cannot command a terminal, except in a ``part`` that is text
    already. ``tablefmt``: see ``checked_tablefmt``."""
    if isinstance(part, Section):
        texts = (printable_lines(inner) if isinstance(inner, str) else text_of(inner, tablefmt) for inner in part.parts)
        return part.separator.join(texts)
    if isinstance(part, str):
        return part
    if part.text is not None:
        return printable_lines(part.text)
    headings = [*map(printable, part.headings)]
    if tablefmt is None:
        return _own_table(headings, [_painted(row, part) if part.in_color else _texts(row) for row in part.rows])
    rows = [*map(_texts, part.rows)]
    return str(tabulate(rows, headings, checked_tablefmt(tablefmt), disable_numparse=True, preserve_whitespace=True))


def checked_tablefmt(tablefmt: str | None) -> str | None:
    """A format of tables in text: None is torchprof's own. Raises TorchprofError for one unknown to tabulate."""
    if tablefmt is None or tablefmt in tabulate_formats:
        return tablefmt
    raise TorchprofError(f"tabulate has no format {tablefmt!r}. {suggest(str(tablefmt), tabulate_formats)}")


def _texts(row: TableRow) -> list[str]:
    return [*map(printable, (row.first, *map(str, row.cells[1:])))]


def _painted(row: TableRow, table: ReportTable) -> list[str]:
    """The text of each cell, in the color of its share; a name on the hottest path is bold."""
    name, *figures = _texts(row)
    _, *shares = table.shares(row)
    painted = [text if share is None else _in_color(text, heat(share)) for text, share in zip(figures, shares)]
    return [_in_color(name, _BOLD) if row.is_hot else name, *painted]


def heat(share: float) -> str:
    """The color of a figure with this share of the whole, as an SGR code."""
    return next((color for least, color in _HEAT if share >= least), _COLD)


def _in_color(text: str, color: str) -> str:
    return f"\033[{color}m{text}\033[0m"


def _own_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table as in torchprof 1: no outer bars, and a line of dashes below the headings."""
    columns, line = [], []
    for texts in zip_longest(headings, *rows, fillvalue=""):
        widths = [*map(_width, texts)]
        widest = max(widths)
        columns.append([text + " " * (widest - width) for text, width in zip(texts, widths)])
        line.append("-" * widest)
    first, *others = (" | ".join(row).rstrip() for row in zip(*columns))
    return "\n".join([first, "-|-".join(line), *others])


def _width(text: str) -> int:
    """How many columns of a terminal a text takes. Letters of Chinese, Japanese and Korean take two."""
    if "\033" in text:
        text = _COLOR.sub("", text)
    if text.isascii() or max(text) < _FIRST_WIDE:
        return len(text)
    return len(text) + sum(east_asian_width(char) in "WF" for char in text)


@paused_gc()
def printed(run: Run, whole: str = 'run.report("tree") shows all.') -> str:
    """What ``print`` shows of a run: the overview, as wide as the terminal. ``whole``: see ``overview``."""
    return text_of(overview(run, width=terminal_width(), whole=whole))


def terminal_width() -> int:
    """The number of characters of a line: ``COLUMNS``, else that of the terminal, else 160."""
    return get_terminal_size((160, 50)).columns


# GitHub Flavored Markdown (https://github.github.com/gfm)

_ESCAPES = {ord(char): f"\\{char}" for char in "\\`*_[]<>|~&#$"} | {ord("@"): "@<!-- -->"}
"""A backslash escapes these characters. GitHub reads a user's name after "@" even if that is escaped, so an empty
comment separates them."""
_BEFORE_A_BAR = re.compile(r"(?<!\\)(\\*)\|")  # a bar ends the cell even inside code, unless it is escaped


@report("markdown", "the tree for pull requests and issues", suffix=".md")
def markdown(
    run: Run,
    *,
    show_events: bool = False,
    depth: int | None = None,
    sort_by: str | None = None,
    top: int | None = None,
    percent: bool = False,
    hot: bool = False,
) -> str:
    """The facts of the run, the tree table, and the run's warnings. The options are those of the report "tree".

    Names are code spans, so that Markdown finds no links, mentions or tags in them. Raises TorchprofError as "tree".
    """
    content = tree(run, show_events=show_events, depth=depth, sort_by=sort_by, top=top, percent=percent, hot=hot)
    lines, notes = ["".join(f"{fact}\n" for fact in _facts(run))], []
    for part in tables_and_sentences(content):
        if isinstance(part, ReportTable):
            lines += markdown_lines(part)
        else:
            notes.append(f"- {_escaped(part)}")
    return "\n".join([*lines, *[""] * bool(notes), *notes])


def markdown_lines(table: ReportTable) -> Iterator[str]:
    """The lines of a table in Markdown. The first cell of each row is a name."""
    yield _line_of(map(_escaped, table.headings))
    yield _line_of([":--", *["--:"] * (len(table.headings) - 1)])
    for row in table.rows:
        lead = row.lead[:-4].replace(" ", "\u00a0") + row.lead[-4:]
        span = _code_span(lead + printable(str(row.cells[0])))
        name = _BEFORE_A_BAR.sub(r"\1\1\\|", span) + f" {HOT}" * row.is_hot
        yield _line_of([name, *(_escaped(str(figure)) for figure in row.cells[1:])])


def _line_of(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _facts(run: Run) -> Iterator[str]:
    """What was recorded, its duration, and the environment."""
    meta = run.meta
    models = f" of {', '.join(_code_span(printable(model)) for model in meta.model)}" if meta.model else ""
    ranks = f", rank {meta.rank} and {len(run.metas) - 1} more" if len(run.metas) > 1 else ""
    steps = f", {meta.marked_steps} step{'s' if meta.marked_steps != 1 else ''}" if meta.marked_steps else ""
    time = f": {format_time(meta.wall_ns)} recorded" if meta.wall_ns else ""
    version = "".join(f" {version}" for name, version in meta.versions if name == "torchprof")
    yield f"**torchprof{_escaped(version)}**{models}{time}{steps}{ranks}"
    for what, values in (
        ("Recorded", [f"{name}: {value}" for name, value in meta.program]),
        ("Ran on", [f"{name}: {value}" for name, value in meta.environment]),
        ("Switches", [f"{name}={value}" for name, value in meta.settings]),
        ("Recorded with", [name for name, is_on in meta.flags if is_on]),
    ):
        if values:
            yield f"- {what}: {_escaped('; '.join(values))}"


def _escaped(text: str) -> str:
    """Text with all characters escaped that have a meaning in Markdown."""
    return printable(text).translate(_ESCAPES)


def _code_span(name: str) -> str:
    """A name as a code span. Its fence is longer than any sequence of backticks in the name."""
    fence = "`" * (max(map(len, re.findall("`+", name)), default=0) + 1)
    pad = " " if name.startswith(("`", " ")) or name.endswith(("`", " ")) or not name else ""
    return f"{fence}{pad}{name}{pad}{fence}"


@report("markdown", "the table for pull requests", suffix=".md", of="diff")
def diff_markdown(diff: Diff, *, depth: int | None = None, sort_by: str | None = None, top: int = 20) -> str:
    """The headline, changes of the whole run, the table, matched layers that changed, and notes. The options are those
    of "table". Raises TorchprofError as "table"."""
    from torchprof.comparison.table import changes_of_layers, changes_of_run, diff_headline, table_of

    table, notes = table_of(diff, depth, sort_by, top)
    lines = [_escaped(diff_headline(diff, sort_by=sort_by)), ""]
    whole = [f"- {_escaped(sentence)}" for sentence in changes_of_run(diff)]
    lines += [*whole, ""] if whole else []
    lines += markdown_lines(table)
    for what, texts in (*changes_of_layers(diff), ("", (*notes, *diff.notes, *diff.warnings))):
        lines.append("")
        lines += [f"- {what}: {_code_span(text)}" if what else f"- {_escaped(text)}" for text in texts]
    return "\n".join(lines)


# HTML for notebooks

_ROWS_SHOWN = 500  # a row takes some hundred bytes of the notebook's file
_STYLE = "page/notebook.css"
"""For light and dark themes. Headings and names stay visible while the table is scrolled, so they need opaque
backgrounds: those of JupyterLab, VS Code or Colab, elsewhere those of the browser. All other colors are transparent."""
_NAME_FITS = 25  # so many characters fit in the first column of 50ch, also wide ones, which take 2ch
_BARS = ((0.5, ' class="hot"'), (0.1, ' class="warm"'), (0.01, ""))
"""The smallest share of each class; smaller ones have no bar."""


@report("notebook", "the table that a notebook shows")
def notebook(run: Run, *, depth: int | None = None) -> str:
    """The verdict and the tree as HTML without a script: what a notebook shows for a run or a profile. Without
    ``depth``, at most 500 layers are shown."""
    parts: list[Part] = []
    if depth is None:
        depth = fitting_depth(run, _ROWS_SHOWN)
        if hidden := sum(len(layer.path) > depth + 1 for layer in run.layers):
            parts.append(f"Deeper layers are hidden: {hidden}. The page that run.show() shows has them all.")
    return html_of(Section([text_of(spaced(verdict(run))), tree(run, depth=depth), *parts]))


def html_of(content: Part) -> str:
    """A report as HTML: its tables, and paragraphs for all other text. The length of the bar behind a figure is its
    share of the sum of its column."""
    parts = []
    for part in tables_and_sentences(content):
        if isinstance(part, ReportTable):
            classes = [' class="text"' if is_text else "" for is_text in part.are_texts]
            headings = "".join(f"<th{name}>{_text(heading)}</th>" for name, heading in zip(classes, part.headings))
            rows = "".join(f"<tr>{''.join(_cells(row, part, classes))}</tr>\n" for row in part.rows)
            parts.append(f"<div><table>\n<thead><tr>{headings}</tr></thead>\n<tbody>\n{rows}</tbody>\n</table></div>\n")
        elif "\n" in part:  # lines that belong together, such as a picture
            parts.append(f"<pre>{escape(part)}</pre>\n")
        else:
            parts.append(f"<p>{_text(part)}</p>\n")
    style = re.sub(r"\n +", "", files("torchprof.reports").joinpath(_STYLE).read_text(encoding="utf-8"))
    return f'<div class="torchprof">\n<style>\n{style}</style>\n{"".join(parts)}</div>'


def _cells(row: TableRow, table: ReportTable, classes: Sequence[str]) -> Iterator[str]:
    """The cells of a row. The style shortens a long name, so its element has all of it as a title. ``classes``: the
    attribute of the cells of each column; "" for figures."""
    title = f' title="{_text(str(row.cells[0]))}"' if len(row.first) > _NAME_FITS else ""
    lines = f"<i>{row.lead}</i>" if row.lead else ""
    yield f"<td{title}>{lines}{_text(row.first.removeprefix(row.lead))}</td>"
    for cell, share, name in zip(row.cells[1:], table.shares(row)[1:], classes[1:]):
        yield f"<td{name}{_bar(share)}>{_text(str(cell))}</td>"


def _text(text: str) -> str:
    return escape(printable(text))


def _bar(share: float | None) -> str:
    """The attributes of a cell whose figure has this share of the whole."""
    if share is None:
        return ""
    warmth = next((f"{warmth} style" for least, warmth in _BARS if share >= least), "")
    return f'{warmth}="--share:{min(share, 1):.0%}"' if warmth else ""


def show_page(page: str, height: int) -> None:
    """Show a page in a frame of a notebook. ``height``: in pixels.

    The frame isolates the page: its styles and scripts cannot access the notebook. Raises TorchprofError if IPython is
    missing, outside of a notebook, and for an invalid height.
    """
    if not isinstance(height, int) or height < 1:
        raise TorchprofError(f"height is a number of pixels, not {height!r}.")
    elsewhere = 'run.export("report.html") writes the page to a file.'
    try:
        shown = import_module("IPython.display")
        shell = import_module("IPython").get_ipython()
    except ImportError as error:
        raise TorchprofError(f"show() needs IPython: pip install ipython. {elsewhere}") from error
    if shell is None or "text/html" not in shell.display_formatter.active_types:
        raise TorchprofError(f"show() is for notebooks only. {elsewhere}")
    frame = f'<iframe sandbox="allow-scripts" allow="clipboard-write" srcdoc="{escape(page)}"'
    shown.display(shown.HTML(f'<div>{frame} style="width: 100%; height: {height}px; border: 0"></iframe></div>'))
