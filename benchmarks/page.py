"""The time to write the HTML report of a large run, to open it, and to answer a click in a browser.

The runs are artificial, with forward and backward: 10,000 layers and 200,000 rows, and 100,000 layers and 500,000 rows.
Opening them needs Playwright and Debian's ``chromium-headless-shell`` or ``chromium`` (or the browser in
``$CHROMIUM``); without them, only writing is measured.
"""

from __future__ import annotations

import os
import random
import shutil
import statistics
import tempfile
import time
from array import array
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.ratios import asked_quick, say, show, verdict
from torchprof.run.layers import Layer
from torchprof.run.measures import SampleKey, Spread
from torchprof.run.meta import Meta
from torchprof.run.rows import Rows
from torchprof.run.run import Run
from torchprof.run.words import BACKWARD, FORWARD, PHASES, Frame, FrameKind

if TYPE_CHECKING:
    from playwright.sync_api import Page

WRITTEN_S = 2.0
LARGE_WRITTEN_S = 5.0
LARGE_MB = 5.0
ANSWERED_MS = 100.0
OPS = ("linear", "addmm", "t", "transpose", "as_strided", "copy_", "relu", "add", "empty")

CLICKS: Mapping[str, str] = {
    "a block of the icicle": "document.querySelectorAll('.icicle .block')[1].click()",
    "a block inside of that": "document.querySelectorAll('.icicle .block')[4].click()",
    "the top of the crumbs": "document.querySelector('.crumbs button').click()",
    "another phase": "document.querySelectorAll('.choice[aria-label=Phase] button')[1].click()",
    "all phases": "document.querySelector('.choice[aria-label=Phase] button:last-child').click()",
    "another measure": "document.querySelectorAll('.choice[aria-label=Width] button')[1].click()",
    "the first measure": "document.querySelector('.choice[aria-label=Width] button').click()",
    "a line of the table": "document.querySelectorAll('.lines .line')[3].querySelector('.number').click()",
    "a heading: sort": "document.querySelectorAll('.head button')[1].click()",
    "the heading again": "document.querySelectorAll('.head button')[1].click()",
    "Open all": "[...document.querySelectorAll('button')].find((one) => one.textContent === 'Open all').click()",
    "without the tree": "document.querySelector('.flat').click()",
    "with the tree": "document.querySelector('.flat').click()",
    "Close all": "[...document.querySelectorAll('button')].find((one) => one.textContent === 'Close all').click()",
    "search": """{
        const box = document.querySelector('input[type=search]');
        box.value = 'layer7';
        box.dispatchEvent(new Event('input'));
    }""",
}
"""Actions of users on the page, in an order in which each one has an effect."""

_TIMED = """(action) => {
    const start = performance.now();
    action();
    document.body.getBoundingClientRect();
    return performance.now() - start;
}"""


def measure(quick: bool) -> None:
    rounds = 1 if quick else 5
    text = written(big_run(1_000, 20_000) if quick else big_run(), rounds, WRITTEN_S)
    with suppress(ImportError):
        in_a_browser(text, rounds)
    if quick:
        return
    text = written(big_run(100_000, 500_000), 1, LARGE_WRITTEN_S, LARGE_MB)
    with suppress(ImportError):
        in_a_browser(text, 1)


def written(run: Run, rounds: int, limit_s: float, limit_mb: float | None = None) -> str:
    """The page of a run. Shows how long it takes to write, and its size."""
    seconds = []
    for number in range(rounds):
        say(f"writing the page: {number + 1}", again=number > 0)
        start = time.perf_counter()
        text = run.report("html")
        seconds.append(time.perf_counter() - start)
    took, size = statistics.median(seconds), len(text) / 2**20
    show(
        f"The HTML report of {len(run.layers):,} layers and {len(run.rows):,} rows",
        ["", "Took", "Limit"],
        [
            ["writing it", f"{took:.2f} s", verdict(took, limit_s)],
            ["its size", f"{size:.1f} MB", "" if limit_mb is None else verdict(size, limit_mb)],
        ],
    )
    return text


def in_a_browser(text: str, rounds: int) -> None:
    from playwright.sync_api import sync_playwright

    program = os.environ.get("CHROMIUM") or shutil.which("chromium-headless-shell") or shutil.which("chromium")
    if program is None:
        return
    say("clicking")
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        file = Path(folder) / "page.html"
        file.write_text(text, encoding="utf-8")
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        took: dict[str, list[float]] = {}
        opened = []
        for _ in range(rounds):
            start = time.perf_counter()
            page.goto(file.as_uri())
            page.locator("main").wait_for()
            opened.append(time.perf_counter() - start)
            for click, ms in click_ms(page).items():
                took.setdefault(click, []).append(ms)
        browser.close()
    medians = {click: statistics.median(ms) for click, ms in took.items()}
    show(
        "From a click to the page's next layout",
        ["Click", "Took", "Limit"],
        [
            ["(opening the page)", f"{statistics.median(opened) * 1e3:.0f} ms", ""],
            *([click, f"{ms:.1f} ms", verdict(ms, ANSWERED_MS)] for click, ms in medians.items()),
        ],
        "Each as the first of its kind on a page just opened: sums that a later click would find ready are made.",
    )


def click_ms(page: Page) -> dict[str, float]:
    """The milliseconds from each of ``CLICKS`` to the layout of its changes."""
    return {name: page.evaluate(f"() => ({_TIMED})(() => {{ {action} }})") for name, action in CLICKS.items()}


def big_run(layers: int = 10_000, rows: int = 200_000, seed: int = 0) -> Run:
    """An artificial run with about ``layers`` layers, in ten stages of ten blocks, and exactly ``rows`` rows."""
    generator = random.Random(seed)
    paths: list[tuple[str, ...]] = [("Net",)]
    for stage in range(10):
        paths.append(("Net", f"stage{stage}"))
        for number in range(10):
            block = ("Net", f"stage{stage}", f"block{number}")
            paths += [block, *((*block, f"layer{layer}") for layer in range(layers // 100 - 1))]
    found = tuple(
        Layer(
            path,
            "Linear" if len(path) == 4 else "Block",
            100,
            100,
            400,
            input_shapes=((8, 16),),
            output_shapes=((8, 16),),
        )
        for path in paths
    )
    starts = [(first, count) for first in range(len(OPS)) for count in (1, 2, 3) if first + count <= len(OPS)]
    chains = (
        (),
        *(
            tuple(Frame(FrameKind.OP, f"aten::{name}") for name in OPS[first : first + count])
            for first, count in starts
        ),
    )
    columns = {name: array("q", [0]) * rows for name in Rows.COLUMNS}
    for at in range(rows):
        round_, layer = divmod(at, len(found))
        columns["layer"][at] = layer
        columns["phase"][at] = PHASES.index(BACKWARD if round_ % 2 else FORWARD)
        columns["frames"][at] = round_ // 2 % len(chains)
        columns["calls"][at] = 10
        columns["cpu_ns"][at] = generator.randrange(100, 100_000)
        columns["cpu_allocated"][at] = generator.choice([0, 512, 4096])
        columns["flops"][at] = generator.choice([0, 0, 10**6])
    samples = {
        SampleKey(layer, FORWARD, 0, "cpu", "cpu_ns"): Spread.of(
            [(at, generator.randrange(1000, 9000)) for at in range(10)]
        )
        for layer in range(len(found))
    }
    measured = ("cpu_ns", "cpu_allocated", "cpu_freed", "macs", "flops", "uncounted")
    meta = Meta(("Net",), requested=measured, measured=measured, wall_ns=10**9, busy_ns=(("cpu", 9 * 10**8),))
    return Run((meta,), found, Rows(found, chains, ("cpu",), columns), samples)


if __name__ == "__main__":
    measure(asked_quick(__doc__))
