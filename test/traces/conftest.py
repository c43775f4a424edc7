"""What all tests of traces share."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """A path for a trace file."""
    return tmp_path / "trace.json"
