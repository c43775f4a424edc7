"""The page of a run or of a comparison: one file of HTML with its style, its script and its data.

It loads nothing. In a comparison, the icicle is colored by change, and tables have each figure before and after.
"""

from __future__ import annotations

import json
import re
import sys
from array import array
from base64 import b64encode
from collections.abc import Mapping, Sequence
from hashlib import sha256
from html import escape
from importlib.resources import files
from types import NoneType
from typing import Any
from zlib import compress

from torchprof.advise import Advice, advise, gain_in_words, place_in_words
from torchprof.advise.evidence import Evidence
from torchprof.analyze.layer_reports import shapes_in_words
from torchprof.analyze.report import QUESTIONS, report
from torchprof.analyze.sentences import LEGEND, called_models, count_of_ranks
from torchprof.comparison.diff import Diff
from torchprof.comparison.layers import MOVED
from torchprof.comparison.table import changes_of_layers, changes_of_run, diff_headline
from torchprof.errors import TorchprofError
from torchprof.first_screen.headline import headline, main_field
from torchprof.first_screen.verdict import first_findings, in_short, lines_of_run, no_finding
from torchprof.ranks.sentences import MOST_WHOLE_RANKS, run_of_chosen
from torchprof.reports.icicle import drawn_diff
from torchprof.reports.page.data import page_data
from torchprof.reports.page.layers import Path, Take, Tree
from torchprof.run.formats import UNKNOWN, format_time
from torchprof.run.run import Run
from torchprof.run.words import OUTSIDE_NAME, PHASES
from torchprof.version import __version__

_SCRIPTS = (
    "format data elements address theme interval run sheet reports icicle table layer timeline charts sections keys "
    "page"
)
_COMMENTS = re.compile(r"^[ \t]*(?://.*|/\*(?:(?!\*/)[\s\S])*\*/[ \t]*)?\n|^[ \t]+", re.MULTILINE)
_FINDINGS_SHOWN = 12
_COMPRESSION = 3
"""zlib's level: with a higher one, the page of many layers takes longer and is hardly smaller."""


@report("html", "the page: an icicle chart of the layers, all tables, a roofline, memory over time", suffix=".html")
def html(run: Run, *, beside: Mapping[str, Run] | None = None, compared: Run | None = None) -> str:
    """A page that answers the five questions: docs/html.md describes it. It needs no network and no server, and works
    in any browser of May 2023 or later.

    ``beside``: other runs by name; a control of the page switches between the runs. Layers with the same path are one
    layer. ``compared``: what is compared of all ranks of the job, if ``run`` has some of them. Of a run of more than
    ``MOST_WHOLE_RANKS`` ranks that were not chosen, all are compared, and some are on the page whole. With other runs
    ``beside`` it, the page has the sums over all ranks of each run.

    Raises TorchprofError if a value of ``beside`` is not a run.
    """
    if not isinstance(beside, (Mapping, NoneType)):
        raise TorchprofError(f'beside= is {beside!r:.60}, not other runs by name. Write {{"with AMP": run}}.')
    for name, other in (beside or {}).items():
        if not isinstance(other, Run):
            given = f"beside={{{name!r}: …}} is {other!r:.60}"
            raise TorchprofError(f"{given}, not a Run. Read a file with torchprof.load().")
    if len(run.metas) > MOST_WHOLE_RANKS and compared is None and run.choice is None and not beside:
        run, compared = run_of_chosen(run), run
    takes = [Take("this run", run), *(Take(str(name), other) for name, other in (beside or {}).items())]
    return page(takes, {"headline": headline(run), "ran": lines_of_run(run)}, compared)


def _measured(finding: Advice) -> tuple[float, float, float] | None:
    """What a remedy gained, and the interval of that, as shares of the recorded time; None if it was not tried."""
    trial = finding.measured
    return None if trial is None else (trial.gain, trial.low, trial.high)


def page(takes: Sequence[Take], more: Mapping[str, Any], compared: Run | None = None) -> str:
    """The page of one or several runs. ``more`` is added to the data; title, facts and findings are those of the first
    run. ``compared``: see ``page_data``."""
    run = takes[0].run
    title = run.meta.title
    evidence = Evidence(run)
    findings = advise(run)
    first = first_findings(evidence, findings)
    document = {
        "title": title,
        "version": __version__,
        "questions": QUESTIONS,
        "legend": list(LEGEND.items()),
        "program": [*filter(None, [_program(run)])],
        "facts": _facts(run),
        "findings": [
            {
                "gain": gain_in_words(finding, evidence),
                "place": place_in_words(finding),
                "layers": finding.layers or [finding.layer],
                "finding": finding.finding,
                "remedy": finding.remedy,
                "measured": _measured(finding),
            }
            for finding in findings[:_FINDINGS_SHOWN]
        ],
        "mainField": main_field(run),
        "moreFindings": max(len(findings) - _FINDINGS_SHOWN, 0),
        "ran": [],
        "help": [(*in_short(finding, evidence), _measured(finding)) for finding in first],
        "noHelp": "" if first else no_finding(run),
        **more,
        **page_data(takes, compared),
    }
    script = page_script()
    script_hash = b64encode(sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{script_hash}'; img-src data:"
    shown = f"{title} · torchprof".encode("utf-8", "replace").decode()
    parts = {
        "title": escape(shown),
        "policy": policy,
        "style": _part("page.css") + _part("chart.css"),
        "data": _packed(document),
    }
    parts["script"] = script
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _part("page.html"))


def _packed(document: Mapping[str, Any]) -> str:
    """A line of JSON, then the bytes of all arrays of integers in it, deflated and in base64. In place of an array, the
    JSON has {"column": [its first byte, its length]}. No name of a layer can end the element that the text is in.

    Of each array come first the lowest bytes of all values, then the next bytes: so they are compressed best.
    """
    columns: list[bytes] = []
    sizes = [0]

    def place(column: array[int]) -> dict[str, list[int]]:
        if sys.byteorder == "big":
            column = column[:]
            column.byteswap()
        values = column.tobytes()
        columns.append(b"".join(values[byte::8] for byte in range(8)))
        sizes.append(sizes[-1] + len(values))
        return {"column": [sizes[-2], len(column)]}

    text = json.dumps(document, separators=(",", ":"), default=place)
    return b64encode(compress(b"\n".join([text.encode(), b"".join(columns)]), _COMPRESSION)).decode()


def page_script() -> str:
    """The JavaScript of the page: all its files in one scope, without comment lines, empty lines and indentation.

    They could be parts of a multi-line string, so eslint (test/page) forbids such strings.
    """
    script = "".join(_part(f"{name}.js") for name in _SCRIPTS.split())
    return '"use strict";\n(() => {\n' + _COMMENTS.sub("", script) + "})();\n"


def _part(name: str) -> str:
    return files("torchprof.reports").joinpath("page").joinpath(name).read_text(encoding="utf-8")


def _program(run: Run) -> str:
    """What was recorded, when, where and on which inputs: "train.py · commit 0159fa72 · 2026-11-29 13:28:05 UTC ·
    AMD EPYC, 2 usable of 2 · input [8, 64]"; "" if all of that is unknown."""
    known = [part for part in run.meta.program if part != ("file", run.meta.title)]
    words = [f"commit {value}" if name == "commit" else value for name, value in known]
    environment = dict(run.meta.environment)
    where = {"devices": "", "CUDA": "CUDA "} if run.meta.device else {"CPU": ""}  # of a trace, and of a recording
    words += [f"{lead}{environment[name]}" for name, lead in where.items() if name in environment]
    called = [run.layers[root] for root in called_models(run)]
    if len(called) == 1 and called[0].same_shapes and called[0].input_shapes:
        words.append(f"input {shapes_in_words(called[0].input_shapes, False)}")
    return " · ".join(words)


def _facts(run: Run) -> list[tuple[str, str]]:
    """What was recorded, its duration, and the environment: (name, value)."""
    meta = run.meta
    cycles = f" in {meta.cycles} cycles" if meta.cycles > 1 else ""
    return [
        ("recorded", f"{format_time(meta.wall_ns) if meta.wall_ns else UNKNOWN}{cycles}"),
        *([("steps", str(meta.marked_steps))] if meta.marked_steps else []),
        ("layers", str(len(run.layers))),
        *([("ranks", count_of_ranks(run))] if len(run.metas) > 1 else []),
        *meta.environment,
        *meta.settings,
        ("options", ", ".join(name for name, is_on in meta.flags if is_on) or "none"),
        ("torchprof", dict(meta.versions).get("torchprof", UNKNOWN)),
    ]


_MOVED_AWAY = "moved away"


@report("html", "the page in the colors of what changed", suffix=".html", of="diff")
def diff_html(diff: Diff) -> str:
    """The page of ``Run.report("html")`` over the layers of both runs, with figures before and after.

    A renamed layer is one row, under its new name. Removed layers are at their old place, and moved layers at both
    places, so that the figures of each run add up. They are for one call or one step if the diff is.
    """
    before, after = _paths(diff)
    takes = [Take("after", diff.after, after), Take("before", diff.before, before)]
    tree = Tree.of(takes)
    more = {
        "headline": diff_headline(diff),
        "program": [
            f"{side}: {_program(run) or UNKNOWN}" for side, run in (("before", diff.before), ("after", diff.after))
        ],
        "comparison": {
            "scale": [1 / count if diff.unit else 1 for count in reversed(diff.counts)],
            "per": diff.unit,
            "notes": [*diff.notes, *diff.warnings],
            "whole": changes_of_run(diff),
            "picture": drawn_diff(diff),
            "layerChanges": [[what, lines] for what, lines in changes_of_layers(diff)],
            "quantities": [
                {
                    "key": quantity.key,
                    "heading": quantity.heading,
                    "unit": quantity.unit.value,
                    "phase": PHASES.index(quantity.phase),
                    "self": quantity.is_self,
                    "field": quantity.measure.fields[0][0] if quantity.measure else quantity.what,
                }
                for quantity in diff.quantities
            ],
            "pairs": _pairs(diff, tree, takes),
        },
    }
    return page(takes, more)


def _paths(diff: Diff) -> tuple[dict[Path, Path], dict[Path, Path]]:
    """The path on the page of each layer of ``before`` and of ``after``, by its own path. A layer of both runs has one
    path on the page, unless it moved to another parent: then its old path, with "(before)" if another layer has it."""
    pairs = [pair for pair in diff.walk() if pair.is_layer]
    after = {pair.after.path: pair.after.path for pair in pairs if pair.after}
    before: dict[Path, Path] = {}
    taken = set(after)
    of_before = {pair.before.path: pair for pair in pairs if pair.before}
    for layer in diff.before.layers:
        pair = of_before[layer.path]
        above = before.get(layer.path[:-1], ())
        if pair.after and pair.after.path[:-1] == above:
            before[layer.path] = pair.after.path
            continue
        path = (*above, layer.path[-1])
        while path in taken:
            path = (*path[:-1], f"{path[-1]} (before)")
        taken.add(path)
        before[layer.path] = path
    return before, after


def _pairs(diff: Diff, tree: Tree, takes: list[Take]) -> list[dict[str, Any]]:
    """By node: how the layer is matched, and each quantity before and after."""
    nodes_after, nodes_before = (
        {path: nodes[index] for path, index in take.run.layers.index_of.items()}
        for take, nodes in zip(takes, tree.nodes)
    )
    outside = len(tree.layers)
    # Work launched before the recording is not compared.
    by_node: list[dict[str, Any]] = [{"how": "same", "differs": (), "changes": {}} for _ in range(outside + 3)]
    for pair in diff.walk():
        data = {
            "how": pair.how,
            "was": pair.before.name if pair.before else None,
            "is": pair.after.name if pair.after else None,
            "differs": pair.differs,
            "changes": {
                key: [change.before, change.after, change.difference, change.verdict, change.at_least]
                for key, change in pair.changes.items()
            },
        }
        if not pair.is_layer:
            by_node[outside + (pair.name != OUTSIDE_NAME)] = data
            continue
        before = nodes_before[pair.before.path] if pair.before else None
        after = nodes_after[pair.after.path] if pair.after else None
        if before is not None:
            by_node[before] = data if after is None else {**data, "how": _MOVED_AWAY}
        if after is not None:
            moved_along = before not in (None, after) and pair.how == "same"  # its parent moved
            by_node[after] = {**data, "how": MOVED} if moved_along else data
    return by_node
