"""A real browser for tests: Chromium without a window and without a network, driven by Playwright.

``conftest.py`` has the fixtures. Where the browser, Playwright or a page that is looked at is missing, its tests are
skipped and say why; with ``CI=true`` they fail.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import pytest
from build.places import ROOT

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Page, Route

LOCAL = ("file:", "data:", "blob:", "about:")


class Tab(NamedTuple):
    """``page`` is Playwright's. ``errors``: what the page wrote to the console as an error, and what it threw.
    ``requests``: the addresses that it wanted from the network; none was loaded."""

    page: Page
    errors: list[str]
    requests: list[str]


def missing(what: str) -> NoReturn:
    """Skip the test; on CI, where everything is to be there, fail."""
    if os.environ.get("CI") == "true":
        pytest.fail(what, pytrace=False)
    pytest.skip(what)


# Of each module, not of the session: as long as Playwright runs, asyncio takes its loop for the thread's, and no other
# test could call asyncio.run.
@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    """The browser: what ``$CHROMIUM`` names, else Debian's ``chromium-headless-shell`` (a tab opens in a third of the
    time) or ``chromium``. None is ever downloaded."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        missing("no Playwright to drive a browser: pip install playwright")
    program = os.environ.get("CHROMIUM") or shutil.which("chromium-headless-shell") or shutil.which("chromium")
    if program is None:
        missing("no browser: install Debian's chromium-headless-shell, or name one in $CHROMIUM")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=program,
            args=["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--enable-unsafe-swiftshader"],
        )
        yield browser
        browser.close()


@pytest.fixture
def open_tab(chromium: Browser) -> Iterator[Callable[..., Tab]]:
    """``open_tab(file, width=1280, height=800, dark=False, fragment="") -> Tab``: a file in a tab of its own.

    Each tab starts without a memory of others. ``fragment`` is what follows the ``#`` in its address.
    """
    contexts: list[BrowserContext] = []

    def open_one(
        file: str | os.PathLike[str], *, width: int = 1280, height: int = 800, dark: bool = False, fragment: str = ""
    ) -> Tab:
        context = chromium.new_context(
            viewport={"width": width, "height": height},
            color_scheme="dark" if dark else "light",
            reduced_motion="reduce",  # blocks are at their places at once
        )
        contexts.append(context)
        context.grant_permissions(["clipboard-read", "clipboard-write"])
        errors: list[str] = []
        requests: list[str] = []

        def local_only(route: Route) -> None:
            if route.request.url.startswith(LOCAL):
                route.continue_()
            else:
                requests.append(route.request.url)
                route.abort()

        def heard(message: ConsoleMessage) -> None:
            if message.type == "error":
                errors.append(message.text)

        context.route("**/*", local_only)
        context.route_web_socket("**/*", lambda socket: (requests.append(socket.url), socket.close()))
        page = context.new_page()
        page.on("console", heard)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(Path(file).resolve().as_uri() + (f"#{fragment}" if fragment else ""))
        if page.locator("#data").count():  # the HTML report is drawn after it is loaded
            page.locator("main").wait_for()
        return Tab(page, errors, requests)

    yield open_one
    for context in contexts:
        context.close()


@pytest.fixture
def look(tmp_path: Path, open_tab: Callable[..., Tab]) -> Iterator[Callable[..., Page]]:
    """``look(what, width=…, height=…, dark=…, **options) -> Page``: the report of a run or comparison, or any text, in
    a tab. It must have no errors and request nothing."""
    tabs: list[Tab] = []

    def look_at(what: Any, *, width: int = 1280, height: int = 900, dark: bool = False, **options: Any) -> Page:
        file = tmp_path / f"{len(tabs)}.html"
        if isinstance(what, str):
            file.write_text(what, encoding="utf-8")
        else:
            what.export(file, **options)
        tabs.append(open_tab(file, width=width, height=height, dark=dark))
        return tabs[-1].page

    yield look_at
    assert [tab.errors for tab in tabs] == [[] for _ in tabs]
    assert [tab.requests for tab in tabs] == [[] for _ in tabs]


@pytest.fixture(scope="session")
def speedscope() -> Path:
    """The folder of the npm package ``speedscope``: ``$SPEEDSCOPE_FOLDER``, else ``build/speedscope`` (the Makefile's).

    ``dist/release/index.html`` in it is the whole program, ``dist/release/file-format-schema.json`` its format.
    """
    folder = Path(os.environ.get("SPEEDSCOPE_FOLDER") or ROOT / "build" / "speedscope")
    if not (folder / "dist" / "release" / "index.html").is_file():
        missing(f"no speedscope in {folder}: unpack the npm package there, or name its folder in $SPEEDSCOPE_FOLDER")
    return folder
