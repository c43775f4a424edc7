"""The HTML report: one file with the page, its style, its script and its data. It loads nothing from elsewhere."""

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

from torchprof.analyze.advice import advise
from torchprof.analyze.advice.evidence import Evidence
from torchprof.analyze.advice.findings import gain, place
from torchprof.analyze.first_screen.headline import headline
from torchprof.analyze.first_screen.verdict import first_findings, in_short, ran
from torchprof.analyze.notes import LEGEND
from torchprof.analyze.report import QUESTIONS, report
from torchprof.errors import TorchprofError
from torchprof.reports.page.data import page_data
from torchprof.reports.page.largest import largest_places
from torchprof.reports.page.tree import Take
from torchprof.run.cost import UNKNOWN, format_time
from torchprof.run.run import Run
from torchprof.version import __version__

_SCRIPTS = (
    "format.js",
    "data.js",
    "elements.js",
    "run.js",
    "sheet.js",
    "largest.js",
    "icicle.js",
    "table.js",
    "layer.js",
    "ranks.js",
    "device.js",
    "memory.js",
    "roofline.js",
    "page.js",
)
_COMMENTS = re.compile(r"^[ \t]*(?://.*|/\*(?:(?!\*/)[\s\S])*\*/[ \t]*)\n", re.MULTILINE)
_FINDINGS_SHOWN = 12
_LEVEL = 3
"""The level of compression: with a higher one, the page of many layers takes longer and is hardly smaller."""


@report("html", "the page: an icicle chart of the layers, all tables, a roofline, memory over time", suffix=".html")
def html(run: Run, *, beside: Mapping[str, Run] | None = None) -> str:
    """A page that answers the five questions: the headline, the largest places, an icicle chart and tables of layers,
    operators and ranks, findings, a roofline, and memory over time.

    ``beside``: other runs by name; a control of the page switches between the runs. Layers with the same path are one
    layer. The page needs no network and no server, and works in any browser of May 2023 or later.

    Raises TorchprofError if a value of ``beside`` is not a run.
    """
    if not isinstance(beside, (Mapping, NoneType)):
        raise TorchprofError(f'beside= is {beside!r:.60}, not other runs by name. Write {{"with AMP": run}}.')
    for name, other in (beside or {}).items():
        if not isinstance(other, Run):
            raise TorchprofError(
                f"beside={{{name!r}: …}} is {other!r:.60}, not a Run. Read a file with torchprof.load()."
            )
    takes = [Take("this run", run), *(Take(str(name), other) for name, other in (beside or {}).items())]
    return page(
        ", ".join(run.meta.model) or "torchprof",
        takes,
        {"headline": headline(run), "ran": ran(run), "largest": largest_places(run)},
        run,
    )


def page(title: str, takes: Sequence[Take], more: Mapping[str, Any], run: Run) -> str:
    """The page of one or several runs. ``more`` is added to the data; facts and findings are those of ``run``."""
    evidence = Evidence(run)
    findings = advise(run)
    document = {
        "title": title,
        "version": __version__,
        "questions": QUESTIONS,
        "legend": list(LEGEND.items()),
        "facts": _facts(run),
        "findings": [
            {
                "gain": gain(one, evidence),
                "place": place(one),
                "layers": one.layers or [one.layer],
                "finding": one.finding,
                "remedy": one.remedy,
            }
            for one in findings[:_FINDINGS_SHOWN]
        ],
        "moreFindings": max(len(findings) - _FINDINGS_SHOWN, 0),
        "ran": [],
        "help": [in_short(one, evidence) for one in first_findings(run, findings)],
        **more,
        **page_data(takes),
    }
    data = _packed(document)
    script = page_script()
    style = _part("page.css")
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{_hash(script)}'; img-src data:"
    shown = f"{title} · torchprof".encode("utf-8", "replace").decode()
    parts = {"title": escape(shown), "policy": policy, "style": style, "data": data, "script": script}
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
    return b64encode(compress(b"\n".join([text.encode(), b"".join(columns)]), _LEVEL)).decode()


def page_script() -> str:
    """The JavaScript of the page: all its files in one scope, without comment lines.

    A line of a multi-line string could look like a comment, so eslint (test/page) forbids such strings.
    """
    return '"use strict";\n(() => {\n' + _COMMENTS.sub("", "".join(map(_part, _SCRIPTS))) + "})();\n"


def _part(name: str) -> str:
    return files("torchprof.reports").joinpath("page").joinpath(name).read_text(encoding="utf-8")


def _hash(script: str) -> str:
    return b64encode(sha256(script.encode()).digest()).decode()


def _facts(run: Run) -> list[tuple[str, str]]:
    """What was recorded, its duration, and the environment: (name, value)."""
    meta = run.meta
    cycles = f" in {meta.cycles} cycles" if meta.cycles > 1 else ""
    return [
        ("recorded", f"{format_time(meta.wall_ns) if meta.wall_ns else UNKNOWN}{cycles}"),
        *([("steps", str(meta.steps))] if meta.steps else []),
        ("layers", str(len(run.layers))),
        *([("ranks", str(len(run.metas)))] if len(run.metas) > 1 else []),
        *meta.environment,
        *meta.switches,
        ("options", ", ".join(name for name, is_on in meta.flags if is_on) or "none"),
        ("torchprof", dict(meta.versions).get("torchprof", UNKNOWN)),
    ]
