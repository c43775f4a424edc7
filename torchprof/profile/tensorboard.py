"""Write traces for TensorBoard: one file for each cycle of a loop."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

from torchprof.errors import TorchprofError

if TYPE_CHECKING:
    from torchprof.profile.profile import Profile


def tensorboard_trace_handler(
    dir_name: str | PathLike[str], worker_name: str | None = None, use_gzip: bool = False
) -> Callable[[Profile], None]:
    """Make a function for ``on_trace_ready`` that writes the trace of each cycle into a folder.

    It corresponds to torch's function of the same name. The file is ``<worker_name>.<time in ns>.pt.trace.json``, with
    ``.gz`` appended for ``use_gzip``. The folder is created if it does not exist. ``worker_name`` must be different in
    each process of a job; the default is ``<host name>_<process id>``. The returned function raises TorchprofError if
    the folder cannot be created, and OSError if the file cannot be written.
    """

    def write_trace(profile: Profile) -> None:
        folder = Path(dir_name)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise TorchprofError(f"No folder for traces can be made at {folder}: {error.strerror}.") from error
        worker = worker_name or f"{socket.gethostname()}_{os.getpid()}"
        profile.export_chrome_trace(folder / f"{worker}.{time.time_ns()}.pt.trace.json{'.gz' if use_gzip else ''}")

    return write_trace
