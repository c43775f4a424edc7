"""The tree and the table of a comparison in GitHub Flavored Markdown (https://github.github.com/gfm)."""

from __future__ import annotations

import re
from collections.abc import Iterator

from torchprof.analyze.compare.diff import Diff
from torchprof.analyze.compare.table import changes_of_layers, diff_headline, table_of, whole_of
from torchprof.analyze.layers.report import tree
from torchprof.analyze.report import HOT, ReportTable, printable, report, tables_and_sentences
from torchprof.run.formats import format_time
from torchprof.run.run import Run

# A backslash escapes these characters. GitHub reads a user's name after "@" even if that is escaped, so an empty
# comment separates them.
_PLAIN = {ord(char): f"\\{char}" for char in "\\`*_[]<>|~&#$"} | {ord("@"): "@<!-- -->"}
_BEFORE_A_BAR = re.compile(r"(\\*)\|")  # a bar ends the cell even inside code, unless it is escaped


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
    parts = [*tables_and_sentences(content)]
    lines = ["".join(f"{fact}\n" for fact in _facts(run))]
    for table in parts:
        if isinstance(table, ReportTable):
            lines += lines_of(table)
    notes = [f"- {plain(sentence)}" for sentence in parts if isinstance(sentence, str)]
    return "\n".join([*lines, *([""] if notes else []), *notes])


def lines_of(table: ReportTable) -> Iterator[str]:
    """The lines of a table in Markdown. The first cell of each row is a name."""
    yield _line([*map(plain, table.headings)])
    yield _line([":--", *["--:"] * (len(table.headings) - 1)])
    for row in table.rows:
        lead = row.lead[:-4].replace(" ", "\u00a0") + row.lead[-4:]
        name = _cell(lead + printable(str(row.cells[0]))) + (f" {HOT}" if row.is_hot else "")
        yield _line([name, *(plain(str(figure)) for figure in row.cells[1:])])


def _facts(run: Run) -> Iterator[str]:
    """What was recorded, its duration, and the environment."""
    meta = run.meta
    models = f" of {', '.join(code(printable(model)) for model in meta.model)}" if meta.model else ""
    ranks = f", rank {meta.rank} and {len(run.metas) - 1} more" if len(run.metas) > 1 else ""
    steps = f", {meta.marked_steps} step{'s' if meta.marked_steps != 1 else ''}" if meta.marked_steps else ""
    time = f": {format_time(meta.wall_ns)} recorded" if meta.wall_ns else ""
    version = "".join(f" {version}" for name, version in meta.versions if name == "torchprof")
    yield f"**torchprof{plain(version)}**{models}{time}{steps}{ranks}"
    for what, values in (
        ("Ran on", [f"{name}: {value}" for name, value in meta.environment]),
        ("Switches", [f"{name}={value}" for name, value in meta.switches]),
        ("Recorded with", [name for name, is_on in meta.flags if is_on]),
    ):
        if values:
            yield f"- {what}: {plain('; '.join(values))}"


def _line(cells: list[str]) -> str:
    """A row of a Markdown table."""
    return f"| {' | '.join(cells)} |"


def plain(words: str) -> str:
    """Text with all characters escaped that have a meaning in Markdown."""
    return printable(words).translate(_PLAIN)


def code(name: str) -> str:
    """A name as a code span. Its fence is longer than any sequence of backticks in the name."""
    fence = "`" * (max(map(len, re.findall("`+", name)), default=0) + 1)
    pad = " " if name.startswith(("`", " ")) or name.endswith(("`", " ")) or not name else ""
    return f"{fence}{pad}{name}{pad}{fence}"


def _cell(name: str) -> str:
    """A name as a code span in a cell of a table."""
    return _BEFORE_A_BAR.sub(r"\1\1\\|", code(name))


@report("markdown", "the table for pull requests", suffix=".md", of="diff")
def diff_markdown(diff: Diff, *, depth: int | None = None, sort_by: str | None = None, top: int = 20) -> str:
    """The headline, changes of the whole run, the table, matched layers that changed, and notes. The options are those
    of "table".

    Names are code spans, so that Markdown finds no links, mentions or tags in them. Raises TorchprofError as "table".
    """
    table, notes = table_of(diff, depth, sort_by, top)
    lines = [plain(diff_headline(diff, sort_by=sort_by)), ""]
    whole = [f"- {plain(sentence)}" for sentence in whole_of(diff)]
    lines += [*whole, ""] if whole else []
    lines += lines_of(table)
    for what, texts in (*changes_of_layers(diff), ("", (*notes, *diff.notes, *diff.warnings))):
        lines.append("")
        lines += [f"- {what}: {code(text)}" if what else f"- {plain(text)}" for text in texts]
    return "\n".join(lines)
