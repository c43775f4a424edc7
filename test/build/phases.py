"""Phases of rows, and of the columns of tables."""

from __future__ import annotations

from torchprof.run.words import FORWARD, OTHER


def in_column_of(phase: str) -> str:
    """The phase whose columns have work of a phase: those of the forward also have the work outside all layers."""
    return FORWARD if phase == OTHER else phase
