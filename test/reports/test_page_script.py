"""The JavaScript of the HTML report: which lines of its files are in a page, and whether the data has its types."""

from __future__ import annotations

import json
import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from build.all_kinds import KINDS
from build.browser import missing
from build.charted_runs import trained
from build.hand_made import kernel, op, row, run_of
from build.jobs import experts
from build.models import Mlp
from build.page import data_in
from build.places import ROOT
from torch import nn

import torchprof
from torchprof import Run
from torchprof.reports.html import page_script
from torchprof.run.meta import Peak
from torchprof.run.timeline import DeviceTime, StreamTime

FOLDER = Path(torchprof.__file__).parent / "reports" / "page"
CHECKS = ROOT / "test" / "page"
TSC = CHECKS / "node_modules" / ".bin" / "tsc"


def code_lines(text: str) -> Iterator[str]:
    """The lines without comments and indentation."""
    in_comment = False
    for line in text.splitlines():
        in_comment = in_comment or line.lstrip().startswith("/*")
        if not in_comment and line.strip() and not line.lstrip().startswith("//"):
            yield line.lstrip()
        in_comment = in_comment and not line.endswith("*/")


def test_the_page_has_all_lines_of_all_files_but_comments() -> None:
    texts = [file.read_text(encoding="utf-8") for file in FOLDER.glob("*.js")]
    expected = Counter(line for text in texts for line in code_lines(text))
    assert Counter(page_script().splitlines()) == expected + Counter(['"use strict";', "(() => {", "})();"])
    # Checks the test: the files do have comments.
    assert expected.total() < sum(text.count("\n") for text in texts) - 100
    assert '"http://www.w3.org/2000/svg"' in page_script()  # "//" inside a line is no comment


def on_a_device() -> Run:
    streams = (StreamTime(7, 4, 6_500, 6_000, 0, 1_000), StreamTime(20, 1, 6_000, 0, 6_000, 0))
    times = (DeviceTime("cuda:0", 0, 10_000, 9_000, 6_000, 6_000, 1_500, 3_500, streams),)
    rows = [row(1, op("aten::mm"), cpu_ns=10), row(1, op("aten::mm"), kernel("gemm"), device="cuda:0", device_ns=5)]
    measured = ("cpu_ns", "device_ns")
    peaks = (Peak("cuda:0", "float32", 0, 1e14, 1e12),)
    switches = (("detect_anomaly", "True"),)  # a finding of the advice
    run = run_of(rows, device="cuda", requested=measured, measured=measured, peaks=peaks, switches=switches)
    return replace(run, device_times=times)


def places(value: Any, at: str = "") -> Iterator[str]:
    """The path of names to each value of the data, without indices of lists."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from places(inner, f"{at}.{name}")
    elif isinstance(value, list):
        for inner in value:
            yield from places(inner, at)
    elif value is not None:
        yield at


def test_the_data_of_the_page_has_the_types_of_page_data_d_ts(tmp_path: Path) -> None:
    if not TSC.is_file():
        missing(f"no TypeScript in {CHECKS}: make lint installs it")
    before, after = (trained(nn.Sequential(Mlp(), nn.Linear(2, width)), 3, 4) for width in (2, 3))
    pages = [
        *(data_in(make().report("html")) for make in KINDS.values()),
        *(data_in(run.report("html")) for run in (before, on_a_device(), experts())),
        data_in(experts().report("html", compared=experts().to_compare(layers=True))),
        data_in(before.report("html", beside={"after": after, "another": on_a_device()})),
        data_in(torchprof.compare(before, after).report("html")),
        data_in(torchprof.compare(before, torchprof.flops(Mlp(), torch.rand(3, 4))).report("html")),
    ]
    reached = {place for data in pages for place in places(data)}
    whole = ["largest.rows", "largest.headings", "ran", "help"]
    whole += [
        "findings.layers",
        "calls",
        "peaks.nbytes",
        "samples.points",
        "rooflines",
        "operators.inside.cpu_ns",
        "reports.contents.rows",
        "devices.report.rows",
        "ranks.maps",
        "ranks.report.rows",
        "ranks.quantiles.rows",
    ]
    whole += [
        "memory.levels.nbytes",
        "memory.moves.nbytes",
        "memory.picture",
        "comparison.picture",
        "memory.report.rows",
        "comparison.scale",
        "comparison.whole",
    ]
    whole += [
        "comparison.layerChanges",
        "comparison.pairs.differs",
        "comparison.pairs.changes.cpu_total",
        "figures.vectors",
        "figures.boundVectors",
    ]
    assert {f".{name}" for name in whole} - reached == set()  # no type is right only because its list is empty
    # Checks the test: each missing name and each additional name is an error.
    small = pages[0]
    wrong = [{name: value for name, value in small.items() if name != without} for without in small]
    column, *columns = small["columns"]
    wrong += [{**small, "more": 1}, {**small, "columns": [{**column, "headings": "x"}, *columns]}]
    for name, found in (("right", pages), ("wrong", wrong)):
        lines = [f"const {name}{number}: PageData = {json.dumps(data)};" for number, data in enumerate(found)]
        (tmp_path / f"{name}.ts").write_text("\n".join(lines), encoding="utf-8")
    options = {"files": [str(CHECKS / "page_data.d.ts"), "right.ts", "wrong.ts"]}
    (tmp_path / "tsconfig.json").write_text(
        json.dumps({"extends": str(CHECKS / "tsconfig.json"), "include": [], **options})
    )
    checked = subprocess.run([TSC, "-p", tmp_path], capture_output=True, text=True, timeout=300)
    errors = [line for line in checked.stdout.splitlines() if ": error " in line]
    assert [line for line in errors if not line.startswith("wrong.ts") and "wrong.ts(" not in line] == []
    assert {int(line) for line in re.findall(r"wrong\.ts\((\d+),", checked.stdout)} == {*range(1, len(wrong) + 1)}
