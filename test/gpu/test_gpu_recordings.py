"""Reference recordings: made here, put into one file, and read back."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from build.machine import DEVICE, FOLDER, Machine
from build.recordings import SUBJECTS, check, record, skipping_without_compiler


@pytest.mark.parametrize(
    "subject",
    [pytest.param(each, marks=[pytest.mark.compiler] if "compiled" in each.__name__ else []) for each in SUBJECTS],
    ids=lambda subject: subject.__name__,
)
def test_a_recording_is_read_as_it_was_recorded(
    subject: Callable[[Machine], object], machine: Machine, figure: Callable[..., None], tmp_path: Path
) -> None:
    if "compiled" in subject.__name__ and not machine.is_gpu and DEVICE not in os.environ:
        pytest.skip("needs a GPU: on the CPU it takes long, and other tests compile models")
    folder = tmp_path / subject.__name__
    with skipping_without_compiler():
        record(subject(machine), machine, folder)  # type: ignore[arg-type]
    for file in folder.iterdir():
        figure(f"{subject.__name__}/{file.name}", file.stat().st_size, 2**20, "bytes")
    if FOLDER in os.environ:  # kept even if what follows fails: that is when one wants to look at it
        with zipfile.ZipFile(Path(os.environ[FOLDER], "recordings.zip"), "a") as kept:
            for file in folder.iterdir():
                kept.write(file, f"{subject.__name__}/{file.name}")
    run = check(folder)
    assert all(file.stat().st_size < 2**20 for file in folder.iterdir())
    assert run.report("tree") and run.report("overview")
    assert not machine.is_gpu or run.report("device")
