"""The run itself, as JSON that ``torchprof.load`` reads. Its schema is in docs/run-file.md."""

from __future__ import annotations

from torchprof.reports import report
from torchprof.run.file_write import text_of
from torchprof.run.run import Run


@report("json", suffix=".json")
def json(run: Run, *, strip: bool = False) -> str:
    """All that the run knows. ``strip=True`` leaves the names of files and machines out."""
    return text_of(run, strip=strip)
