"""Golden text: what is printed, stored in ``test/golden``, so that a changed text is a diff to read."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from build.places import ROOT

GOLDEN = ROOT / "test" / "golden"


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Compare texts with the file that has the test's name; ``pytest --renew`` writes the file."""
    file = GOLDEN / (re.sub(r"\W+", "_", request.node.name.removeprefix("test_")).strip("_") + ".txt")

    def compare(*texts: object) -> None:
        printed = "\n\n".join(map(str, texts)) + "\n"
        if request.config.getoption("--renew"):
            file.write_text(printed, encoding="utf-8")
        assert printed.splitlines() == file.read_text(encoding="utf-8").splitlines(), f"{file}, see pytest --renew"

    return compare


def titled(title: str, text: object) -> str:
    return f"=== {title}\n{text}"


def drawn(value: Any, report: str, **options: object) -> str:
    """A report of a run, or of a comparison, below its name and options."""
    title = " ".join([report, *(f"{name}={option}" for name, option in options.items())])
    return titled(title, value.report(report, **options))
