"""Reads a file of torch.profiler a piece at a time: plain or gzip, whole or cut off.

The format is Chrome's: "Trace Event Format", Google, 2016, an object with a list ``traceEvents``, or this list alone
(https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU).
"""

from __future__ import annotations

import gzip
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from io import BufferedReader
from os import PathLike
from pathlib import Path
from typing import Any

from torchprof.attribute.launches import mesh_of_groups
from torchprof.errors import TorchprofError
from torchprof.run.file import BYTES_OF_JSON, most_unpacked, refuse_unpacked
from torchprof.run.meta import Meta, RunWarning
from torchprof.traces.json_text import SEPARATOR, JsonText, TraceEvent
from torchprof.version import __version__

_FOREIGN = {
    b"BZh": "bzip2",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"\xfd7zXZ\x00": "xz",
    b"\x04\x22\x4d\x18": "lz4",
    b"PK\x03\x04": "zip",
}
"""The first bytes of files that another program must decompress, and its name."""
_TAR_MARK = slice(257, 262)
"""The place of the word "ustar" in a tar archive (POSIX.1-1988, "ustar Interchange Format")."""
_HOW = 'A trace is what torch.profiler\'s `prof.export_chrome_trace("trace.json")` writes.'
_NOR = "It is not a run saved by torchprof, either."

_MOST_RANKS = 2**31  # a larger number is none
_FIRST_EVENT = re.compile(r'"traceEvents"\s*:\s*(?=\[)')
_NEXT_EVENT = re.compile(r'\}\s*,\s*(?=\{\s*"(?:ph|name|cat|pid|tid|ts|dur|args)"\s*:)')
_LAST_EVENT = re.compile(r'\}\s*(?=\]\s*(?:\}|,\s*"))')


class TraceFile:
    """One file of torch.profiler, read from its start to its end, a piece at a time.

    ``header``: the top level of the file without its events, from before and after them; the last value of a repeated
    key. ``warnings``: what is missing. Both are complete after the last piece.

    Some invalid JSON is read, too. UTF-16 is recognized. Bytes that are not UTF-8 are replaced. A value ``nan`` or
    ``inf`` is None. In a string with invalid escapes, as in "C:\\work\\new", all backslashes are literal. An event that
    still cannot be read is left out. If the file was cut off, all complete events are read.
    """

    def __init__(self, path: str | PathLike[str]) -> None:
        self.path = Path(path)
        self.header: dict[str, Any] = {}
        self.warnings: list[RunWarning] = []
        self._read = self._lost = 0  # how many events were read, and how many could not be read
        self._first_lost = 0  # position of the first event that could not be read

    def pieces(self, progress: Callable[[float], None] | None = None) -> Iterator[list[TraceEvent]]:
        """All events in the order of the file, some dozens at a time, which takes little memory.

        Entries of the list that are not objects are ignored. ``progress`` is called now and then with the fraction of
        the file that was read, from 0 to 1; for a gzip file, the fraction of its compressed bytes.

        Raises OSError if the file cannot be read, TorchprofError if it is not a trace, or ends before its first event.
        """
        self.header, self.warnings = {}, []
        self._read = self._lost = self._first_lost = 0
        with open(self.path, "rb", opener=_opened) as file:
            size = os.fstat(file.fileno()).st_size
            for events in self._pieces(JsonText(self._unpacked(file), self.path)):
                self._read += len(events)
                if progress and size:  # a pipe has none
                    progress(min(file.tell() / size, 1.0))
                if events:
                    yield events
        if progress:
            progress(1.0)

    def _unpacked(self, file: BufferedReader) -> BufferedReader | gzip.GzipFile:
        """The decompressed file. Its first bytes decide whether it is compressed, because users rename files."""
        first = file.peek(8)
        for magic, name in _FOREIGN.items():
            if first.startswith(magic):
                raise TorchprofError(
                    f"{self.path} is a {name} file: decompress it first. Traces are read as JSON, plain or in gzip."
                )
        return gzip.GzipFile(fileobj=file) if first.startswith(b"\x1f\x8b") else file

    def _pieces(self, text: JsonText) -> Iterator[list[TraceEvent]]:
        """The events of the file, and the warnings about what could not be read."""
        first = text.next()
        if first not in ("{", "["):
            raise TorchprofError(f"{self.path} {self._instead_of_a_trace(first, text)}")
        try:
            yield from self._top_level(text) if first == "{" else self._events(text)
        except EOFError:
            self._note_cut(text)
        else:
            has_more, name = text.find_end(), self.path.name
            if text.failure:
                self.warnings.append(RunWarning.of("trace_end_unread", file=name, reason=text.failure))
            elif has_more:
                self.warnings.append(RunWarning.of("trace_goes_on", file=name))
        if self._lost:
            name, events = self.path.name, self._read + self._lost
            about = RunWarning.of("trace_events_unread", file=name, lost=self._lost, events=events, at=self._first_lost)
            self.warnings.append(about)

    @staticmethod
    def _instead_of_a_trace(first: str, text: JsonText) -> str:
        """What a file is that does not begin as a trace. ``first``: its first character."""
        if not first and text.failure:
            return f"cannot be decompressed: {text.failure}. Copy or record it again."
        if not first:
            return f"is empty: the program that writes it probably ended early. {_HOW}"
        if text.ahead(_TAR_MARK.stop)[_TAR_MARK] == "ustar":
            return "is a tar archive: unpack it first (tar -xf), and give the traces in it, or their folder."
        begin = text.ahead(20)
        return f"is not a trace of torch.profiler, which begins with '{{': it begins with {begin!r}. {_HOW} {_NOR}"

    def _top_level(self, text: JsonText) -> Iterator[list[TraceEvent]]:
        """The events in the top-level object, from ``{`` to behind ``}``. Raises EOFError if the file ends before."""
        text.at += 1
        has_events, in_header, most = False, 0, most_unpacked()
        while text.next(SEPARATOR) != "}":
            try:
                key = text.key()
                is_list = key == "traceEvents" and text.ahead(1) == "["
                if not is_list:
                    begin = text.position
                    value = text.whole_value()
                    in_header += (text.position - begin) * BYTES_OF_JSON
                    refuse_unpacked(self.path, in_header, most)
                    if text.next() not in ",}":
                        raise ValueError("a quote in the value")
                    self.header[key] = value
            except ValueError:
                # Skip what cannot be read around the events, because the events matter more.
                is_list = not has_events and text.find(_FIRST_EVENT)
                if has_events or is_list:
                    where = "after" if has_events else "before"
                    self.warnings.append(RunWarning.of("trace_around_unread", where=where, file=self.path.name))
                if not is_list:
                    text.find_end()
                    break
            if self.header.get("format") == "torchprof-run":
                raise TorchprofError(
                    f"{self.path} is not a trace, but a run saved by torchprof: read it with torchprof.load(path), "
                    "or show it with `python -m torchprof show FILE`."
                )
            if is_list:
                has_events = True
                yield from self._events(text)
        else:
            text.at += 1
        if not has_events:
            raise TorchprofError(
                f'{self.path} is not a trace of torch.profiler: it has no list "traceEvents". {_HOW} {_NOR}'
            )
        about = self.header.get("otherData")
        if isinstance(about, dict) and about.keys() == {"model", "notes"}:
            raise TorchprofError(
                f"{self.path} is a timeline that torchprof drew of a run, and is not complete: give the file of the "
                "run to torchprof.load, or read the trace that torch.profiler wrote."
            )

    def _events(self, text: JsonText) -> Iterator[list[TraceEvent]]:
        """The events in their list, from its ``[`` to behind its ``]``. Raises EOFError if the file ends before."""
        text.at += 1
        while (first := text.next(SEPARATOR)) != "]":
            if not first:
                raise EOFError
            piece = text.piece()
            yield self._one_by_one(text) if piece is None else piece
        text.at += 1

    def _one_by_one(self, text: JsonText) -> list[TraceEvent]:
        """The complete events in the text that was read so far, each decoded separately: at the end of the list, and
        where they cannot be decoded as one piece. Reads more if none is complete. EOFError: the file ends before."""
        events: list[TraceEvent] = []
        while True:
            start = text.position
            try:
                entry = text.value()
            except EOFError:
                if not text.more() and not events:
                    raise
                return events
            except ValueError:
                text.at += 1
                if not text.find(_NEXT_EVENT, _LAST_EVENT):
                    return events  # the file ends inside this event
                self._first_lost = self._first_lost if self._lost else start
                self._lost += 1
            else:
                if isinstance(entry, dict):
                    events.append(entry)
            text.step(SEPARATOR)
            if text.ahead(1) == "]":
                return events

    def _note_cut(self, text: JsonText) -> None:
        """Add the warning that the file was cut off. Raises TorchprofError if it has no complete event."""
        why = f"; {text.failure}" if text.failure else ""
        if not self._read:
            raise TorchprofError(
                f"{self.path} ends before its first event{why}: the program that wrote it ended early, or the copy "
                f"is incomplete. Copy or record it again. {_HOW}"
            )
        self.warnings.append(RunWarning.of("trace_cut", file=self.path.name, events=self._read, reason=text.failure))


def _opened(path: str, flags: int) -> int:
    """Open a file. A pipe without a writer is empty: it is not waited for."""
    opened = os.open(path, flags | getattr(os, "O_NONBLOCK", 0))
    if hasattr(os, "O_NONBLOCK"):
        os.set_blocking(opened, True)
    return opened


# The header: everything in the file but its events


def meta_of_header(path: Path, header: Mapping[str, Any]) -> Meta:
    """Where the trace was recorded: machine, devices, rank, process groups."""
    distributed = _distributed(header)
    numbers = (distributed.get(key) for key in ("rank", "world_size"))
    rank, ranks = (number if type(number) is int and 0 < number <= _MOST_RANKS else 0 for number in numbers)
    devices: Counter[str] = Counter()
    properties = header.get("deviceProperties")
    for device in properties if isinstance(properties, list) else ():
        if isinstance(device, dict) and device.get("name"):
            memory = device.get("totalGlobalMem")
            size = f" ({memory / 2**30:.0f} GB)" if isinstance(memory, int) and memory > 0 else ""
            devices[f"{device['name']}{size}"] += 1
    environment = [("devices", ", ".join(f"{count} × {name}" for name, count in devices.items()))] if devices else []
    if ranks:
        backend = " ".join(str(distributed[key]) for key in ("backend", "nccl_version") if distributed.get(key))
        environment.append(("ranks", f"{ranks}{', ' if backend else ''}{backend}"))
    machine = header.get("host_name")
    return Meta(
        model=(),
        rank=rank,
        world_size=max(ranks, 1),
        mesh=mesh_of_groups(process_groups(header), rank),
        versions=(("torchprof", __version__),),
        environment=tuple(environment),
        machine=machine if isinstance(machine, str) else "",
        script=str(path.absolute()),
    )


def _distributed(header: Mapping[str, Any]) -> Mapping[str, Any]:
    distributed = header.get("distributedInfo")
    return distributed if isinstance(distributed, dict) else {}


def process_groups(header: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The process groups of the rank, as torch describes them in the header."""
    groups = _distributed(header).get("pg_config")
    return [group for group in groups if isinstance(group, dict)] if isinstance(groups, list) else []
