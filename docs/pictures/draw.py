"""All pictures of the product in the documentation, drawn anew: python docs/pictures/draw.py.

It records the example ``html_report.py`` and saves its pictures, those of a comparison with a model whose MLPs are
twice as wide, and those of two jobs (``jobs.py``), as SVG. Pages are drawn with Playwright and Debian's Chromium.
"""

import os
import runpy
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright

import torchprof

HERE = Path(__file__).parent
EXAMPLES = HERE.parent.parent / "examples"
PICTURES = ("step.svg", "icicle.svg", "timeline.svg", "memory.svg", "roofline.svg")
JOBS = {"ranks": 2, "pipeline": 4}  # how many ranks


def record() -> dict[str, torchprof.Run | torchprof.Diff]:
    """Records what the pages are of, and saves the pictures that need no browser."""
    sys.path.insert(0, str(EXAMPLES))
    example = runpy.run_path(str(EXAMPLES / "html_report.py"))
    pages = {"report": example["prof"].run}
    for name in PICTURES:
        pages["report"].export(HERE / name)
    mlp = type(example["model"].blocks[0].mlp)
    for block in example["model"].blocks:
        block.mlp = mlp(block.mlp.up.in_features, 2 * block.mlp.up.out_features)
        example["optimizer"].add_param_group({"params": block.mlp.parameters()})
    example["step"]()  # makes the state of the optimizer
    with torchprof.Profile(example["model"], profile_memory=True, with_flops=True) as prof:
        for _ in range(example["STEPS"]):
            example["step"]()
            prof.step()
    pages["comparison"] = torchprof.compare(pages["report"], prof.run)
    pages["comparison"].export(HERE / "diff.svg")
    for name, ranks in JOBS.items():
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        subprocess.run([*torchrun, str(HERE / "jobs.py"), name], check=True, timeout=300)
        torchprof.load(f"{name}.json").export(HERE / f"{name}.svg")
    return pages


def draw(browser: Browser, page: str, name: str, *, width: int = 1280, height: int = 1000, **options: str) -> None:
    """A page on a screen of this size. ``click``: what is clicked first. ``at``: what it is scrolled to."""
    theme = options.get("theme", "light")
    tab = browser.new_page(viewport={"width": width, "height": height}, color_scheme=theme, reduced_motion="reduce")
    tab.goto(Path(f"{page}.html").resolve().as_uri())
    tab.locator("main").wait_for()
    if "click" in options:
        tab.locator(options["click"]).click()
    if "at" in options:
        tab.locator(options["at"]).evaluate("(one) => one.scrollIntoView({ block: 'start' })")
    tab.screenshot(path=HERE / f"{name}.png")
    tab.close()


with tempfile.TemporaryDirectory() as folder:
    os.chdir(folder)
    for name, shown in record().items():
        shown.export(f"{name}.html")
    with sync_playwright() as playwright:  # only now: a recording needs the machine for itself
        program = os.environ.get("CHROMIUM") or shutil.which("chromium-headless-shell") or shutil.which("chromium")
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
        draw(browser, "report", "report")
        draw(browser, "report", "page-dark", theme="dark", at=".controls.chosen")
        draw(browser, "report", "page-step", click="header [data-link='2']", at=".controls.chosen")
        draw(browser, "report", "page-phone", width=390, height=844, at=".controls.chosen")
        draw(browser, "comparison", "page-comparison")
        browser.close()
