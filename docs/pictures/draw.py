"""The pictures of the HTML report, drawn anew with Playwright and Debian's Chromium.

``python docs/pictures/draw.py`` draws the README's. ``python docs/pictures/draw.py RUN…``, with the saved runs of the
ranks of a pipeline, draws that of docs/pipelines.md.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

import torchprof

HERE = Path(__file__).parent
EXAMPLE = HERE.parent.parent / "examples" / "html_report.py"

with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
    report = Path(folder) / "report.html"
    files = sys.argv[1:]
    if files:
        torchprof.load(files).export(report)
    else:
        subprocess.run([sys.executable, EXAMPLE], check=True, cwd=folder, stdout=subprocess.DEVNULL)
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
