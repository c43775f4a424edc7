"""Golden text: what is printed, stored in ``test/golden``, so that a changed text is a diff to read."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from build.places import ROOT

from torchprof import TorchprofError

GOLDEN = ROOT / "test" / "golden"


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Compares texts, or texts by title, with the file that has the name of the test; ``--renew`` writes the file."""
    file = GOLDEN / (re.sub(r"\W+", "_", request.node.name.removeprefix("test_")).strip("_") + ".txt")

    def compare(*texts: str | dict[str, str]) -> None:
        several = (titled(text) if isinstance(text, dict) else [text] for text in texts)
        printed = "\n\n".join(text for one in several for text in one) + "\n"
        if request.config.getoption("--renew"):
            file.write_text(printed, encoding="utf-8")
        assert printed.splitlines() == file.read_text(encoding="utf-8").splitlines(), f"{file}, see pytest --renew"

    return compare


def titled(texts: dict[str, str]) -> list[str]:
    return [f"=== {title}\n{text}" for title, text in texts.items()]


def drawn(value: Any, report: str, **options: object) -> str:
    """A report of a run, or of a comparison, below its name and options."""
    title = " ".join([report, *(f"{name}={option}" for name, option in options.items())])
    return titled({title: value.report(report, **options)})[0]


def message(call: Callable[..., Any], *args: Any, **options: Any) -> str:
    """What the error says that the call raises."""
    with pytest.raises((TorchprofError, AssertionError)) as caught:
        call(*args, **options)
    return str(caught.value)
