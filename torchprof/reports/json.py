"""The run itself, as JSON that ``torchprof.load`` reads. Its schema is in docs/run-file.md."""

from __future__ import annotations

from typing import Any

from torchprof.analyze.report import report
from torchprof.run.file_write import json_of_run, stripped, warning_data
from torchprof.run.run import Run
from torchprof.run.warnings import Caveat


@report("json", "the run as data; torchprof.load reads it", suffix=".json")
def json(run: Run, *, strip: bool = False) -> str:
    """The file of the run, with all of its warnings, also those that ``load`` computes from the run.

    ``strip=True`` leaves the names of files and machines out.
    """
    run = stripped(run) if strip else run
    return json_of_run(run, strip=strip, computed={"warnings": map(_data, run.warnings)})


def _data(warning: Caveat) -> dict[str, Any]:
    return {**warning_data(warning), "ranks": warning.ranks, "sentence": str(warning)}
