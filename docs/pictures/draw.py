"""The pictures of the product, drawn anew: python docs/pictures/draw.py.

It records the example ``html_report.py``, saves its pictures as SVG, and those of a comparison with a model whose
activations are ReLU. The page is drawn with Playwright and Debian's Chromium. With the saved runs of the ranks of a
pipeline, ``python docs/pictures/draw.py RUN…``, it draws that of docs/pipelines.md.
"""

import os
import runpy
import shutil
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright
from torch import nn

import torchprof

HERE = Path(__file__).parent
EXAMPLES = HERE.parent.parent / "examples"
PICTURES = ("step.svg", "icicle.svg", "timeline.svg", "memory.svg", "roofline.svg")


def draw() -> torchprof.Run:
    """Records the example, and saves its pictures."""
    sys.path.insert(0, str(EXAMPLES))
    example = runpy.run_path(str(EXAMPLES / "html_report.py"))
    run: torchprof.Run = example["prof"].run
    for name in PICTURES:
        run.export(HERE / name)
    for block in example["model"].blocks:
        block.mlp.act = nn.ReLU()
    with torchprof.Profile(example["model"], profile_memory=True, with_flops=True) as prof:
        for _ in range(example["STEPS"]):
            example["step"]()
            prof.step()
    torchprof.compare(run, prof.run).export(HERE / "diff.svg")
    return run


with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
    os.chdir(folder)
    report = Path(folder) / "report.html"
    files = sys.argv[1:]
    (torchprof.load(files) if files else draw()).export(report)
    program = os.environ.get("CHROMIUM") or shutil.which("chromium-headless-shell") or shutil.which("chromium")
    browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
    tab = browser.new_page(viewport={"width": 1280, "height": 1000})
    tab.goto(report.as_uri())
    tab.locator("main").wait_for()
    if files:
        tab.locator("#pipelines figure").screenshot(path=HERE / "pipeline.png")
    else:
        tab.screenshot(path=HERE / "report.png")
    browser.close()
