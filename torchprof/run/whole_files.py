"""Writes files that are whole or not there: nobody reads half of one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write, under another name until the block ends: then it replaces ``path``. An error removes it.

    A pipe or a terminal is written directly. Raises OSError like ``open``.
    """
    if path.exists() and not path.is_file():
        with path.open("wb") as file:
            yield file
        return
    written = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with written.open("wb") as file:
            yield file
        written.replace(path)
    except BaseException:
        written.unlink(missing_ok=True)
        raise
