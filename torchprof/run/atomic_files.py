"""Atomic writes: a file appears, or changes, when its new contents are complete."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from secrets import token_hex
from typing import BinaryIO


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write, under another name until the block ends: then it replaces ``path``. An error removes it.

    A pipe or a terminal is written directly. Raises OSError like ``open``.
    """
    if path.exists() and not path.is_file():
        with path.open("wb") as file:
            yield file
        return
    # Processes of other machines, in containers with the same process number, may write a file of this name, too.
    written = path.with_name(f".{path.name}.{token_hex(4)}.part")
    try:
        with written.open("wb") as file:
            yield file
        written.replace(path)
    except BaseException:
        written.unlink(missing_ok=True)
        raise
