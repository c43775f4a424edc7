"""The picture of the README, drawn anew: python docs/pictures/draw.py, with Playwright and Debian's Chromium."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

HERE = Path(__file__).parent
EXAMPLE = HERE.parent.parent / "examples" / "html_report.py"

with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
    subprocess.run([sys.executable, EXAMPLE], check=True, cwd=folder, stdout=subprocess.DEVNULL)
    program = os.environ.get("CHROMIUM") or shutil.which("chromium-headless-shell") or shutil.which("chromium")
    browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
    tab = browser.new_page(viewport={"width": 1280, "height": 1000})
    tab.goto((Path(folder) / "report.html").as_uri())
    tab.locator("main").wait_for()
    tab.screenshot(path=HERE / "report.png")
    browser.close()
