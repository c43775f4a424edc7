"""What all tests of traces share."""

from __future__ import annotations

from pathlib import Path

import pytest

from torchprof.traces import json_text


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """A path for a trace file."""
    return tmp_path / "trace.json"


@pytest.fixture(params=["orjson", "json"])
def decoder(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the test with orjson (the extra "fast"), and without."""
    if request.param == "json":
        monkeypatch.setattr(json_text, "_quick", None)
    else:
        pytest.importorskip("orjson")


@pytest.fixture(params=[1 << 16, 1000, 7], ids=lambda size: f"{size} bytes at a time")
def any_chunk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the test with several sizes of the chunks that are read."""
    monkeypatch.setattr(json_text, "_CHUNK", request.param)
