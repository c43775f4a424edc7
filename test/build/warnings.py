"""Warnings of hand-made runs, and the sentences of all that a run has."""

from torchprof.run.meta import RunWarning
from torchprof.run.run import Run


def run_warnings(*sentences: str) -> tuple[RunWarning, ...]:
    """Warnings whose sentences are these: a code that has no sentence of its own is shown as it is."""
    return tuple(map(RunWarning, sentences))


def sentences(run: Run) -> tuple[str, ...]:
    """The sentences of all warnings of a run."""
    return tuple(map(str, run.warnings))
