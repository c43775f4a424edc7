"""Recordings of a GPU in ``test/data/gpu``, made by ``make gpu``: the run, the trace and torch's counts agree."""

from __future__ import annotations

from pathlib import Path

import pytest
from build.places import DATA
from build.recordings import check

FOLDERS = sorted(path.parent for path in DATA.glob("gpu/*/counts.json"))


@pytest.mark.skipif(not FOLDERS, reason="there are no recordings of a GPU yet: make gpu PART=recordings makes them")
@pytest.mark.parametrize("folder", FOLDERS or [DATA], ids=lambda folder: folder.name)
def test_a_recording_of_a_gpu_reads_the_same_as_run_and_as_trace(folder: Path) -> None:
    run = check(folder)
    for name in ("tree", "overview", "kernels", "device", "advice", "ops"):
        assert run.report(name)
