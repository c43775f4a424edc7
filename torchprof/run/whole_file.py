"""Files that are whole at any time: the old content, or the new one."""

from __future__ import annotations

import glob
import os
import platform
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from secrets import token_hex
from typing import BinaryIO

_LONGEST = 100  # characters of the names in it
_PART = re.compile(r"\.(?P<name>.+)\.(?P<host>[\w-]+)-(?P<process>\d+)-[0-9a-f]{8}\.part")
"""The names of files that are being written: the final name, the machine, the process, and a random number."""


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write, under another name until the block ends: then it replaces ``path``, which is the old file or the
    new one at any time. An error removes it. Those that a process of this machine left when it was killed are removed.
    A pipe or a terminal is written directly. Raises OSError like ``open``."""
    path = Path(os.path.realpath(path))  # write to the target of a link
    if path.exists() and not path.is_file():
        with path.open("wb") as file:
            yield file
        return
    _remove_parts(path)
    written = path.with_name(f".{path.name[:_LONGEST]}.{host()}-{os.getpid()}-{token_hex(4)}.part")
    try:
        with written.open("wb") as file:
            yield file
        with suppress(OSError):
            shutil.copymode(path, written)
        written.replace(path)
    except BaseException:
        written.unlink(missing_ok=True)
        raise


@cache
def host() -> str:
    """The name of this machine, and of the space of process numbers on it, as a part of the name of a file: containers
    of one name may have processes of one number."""
    space = ""
    with suppress(OSError, AttributeError):
        space = str(Path("/proc/self/ns/pid").readlink())
    return re.sub(r"[^\w-]", "_", f"{platform.node()[:_LONGEST]}{space.removeprefix('pid:')}") or "_"


def _remove_parts(path: Path) -> None:
    """Remove what processes of this machine that no longer exist have left of this file."""
    with suppress(OSError):
        name = path.name[:_LONGEST]
        for file in path.parent.glob(f".{glob.escape(name)}.*.part"):
            match = _PART.fullmatch(file.name)
            if match and (match["name"], match["host"]) == (name, host()) and not exists(int(match["process"])):
                file.unlink(missing_ok=True)


def exists(process: int) -> bool:
    """Whether there is a process with this number on this machine; True if it cannot be known."""
    if os.name == "nt":  # there, this signal is Ctrl-C
        return True
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):  # of another user, or no such number: leave its file alone
        return True
    return True
