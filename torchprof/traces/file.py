"""A file that torch.profiler wrote, read a piece at a time: plain or gzip, whole or cut off.

The format is Chrome's: "Trace Event Format", Google, 2016, an object that holds ``traceEvents``, or their list alone
(https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU).
"""

from __future__ import annotations

import codecs
import gzip
import importlib
import json
import os
import re
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from io import BufferedReader
from os import PathLike
from pathlib import Path
from typing import Any, NoReturn

from torchprof.errors import TorchprofError
from torchprof.run.warnings import Caveat, caveat

_CHUNK = 1 << 16
"""How many bytes are read at a time: few enough that what json makes of them stays in the cache of a core."""
_LONGEST = 1 << 24
"""How many characters an event or a value of the header may have: what does not end by then is broken."""
_LONGEST_GAP = 40  # characters: no writer of traces puts more between two events
_LONGEST_MARK = 256  # characters: no mark between two events (the three patterns below) is longer

_GZIP = b"\x1f\x8b"
_FOREIGN = {
    b"BZh": "bzip2",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"\xfd7zXZ\x00": "xz",
    b"\x04\x22\x4d\x18": "lz4",
    b"PK\x03\x04": "zip",
}
"""The first bytes of what another program has to unpack, and its name."""
_TAR_MARK = slice(257, 262)
"""Where an archive of tar says that it is one (POSIX.1-1988, "ustar Interchange Format")."""
_UTF_16 = {b"\xff\xfe": "utf-16", b"\xfe\xff": "utf-16", b"{\x00": "utf-16-le", b"\x00{": "utf-16-be"}
"""The first bytes of JSON that another program wrote anew, as PowerShell does, and how it is to be read."""
_HOW = 'A trace is what torch.profiler\'s `prof.export_chrome_trace("trace.json")` writes.'

try:
    _quick: Callable[[str], Any] | None = importlib.import_module("orjson").loads
except ImportError:
    _quick = None
"""The decoder of the extra "fast", which takes a third of the time of Python's, and is strict; None where it is not."""

# Python's json writes and reads NaN and Infinity: what is no number is None here, however it is written.
_JSON = json.JSONDecoder(strict=False, parse_constant=lambda _: None)
_CUT_WORD = re.compile(r"[\w\\.+-]{0,16}\Z")  # wrong by itself, as "tru", it may be right with what comes
_NO_NUMBER = re.compile(r"[-+]?(?:nan|inf)\b", re.IGNORECASE)
_STRING = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_ESCAPED = re.compile(r'[^\\]*(?:\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})[^\\]*)*')
_BACKSLASH = re.compile(r'\\(["\\]?)')

_BLANK = re.compile(r"[ \t\r\n]*")
_GAP = re.compile(r"[ \t\r\n,]*")
_FIRST_EVENT = re.compile(r'"traceEvents"\s*:\s*(?=\[)')
_NEXT_EVENT = re.compile(r'\}\s*,\s*(?=\{\s*"(?:ph|name|cat|pid|tid|ts|dur|args)"\s*:)')
_LAST_EVENT = re.compile(r'\}\s*(?=\]\s*(?:\}|,\s*"))')

TraceEvent = dict[str, Any]
"""An object of ``traceEvents``, as the file has it."""


class TraceFile:
    """One file that torch.profiler wrote, read from its start to its end, a piece at a time.

    ``header`` is the top level of the file beside its events: what is before them and what is after them, and of two
    values of one key the last. ``warnings`` say what is missing. Both are complete after the
    last piece.

    What is no proper JSON is read nevertheless: UTF-16 is recognized, bytes that are no UTF-8 are replaced, a value
    ``nan`` or ``inf`` is None, and a string in which a backslash escapes nothing, as in "C:\\work\\new", has just those
    backslashes. An event that cannot be read even so is left out. Of a file that was cut off, all whole ones are read.
    """

    def __init__(self, path: str | PathLike[str]) -> None:
        self.path = Path(path)
        self.header: dict[str, Any] = {}
        self.warnings: list[Caveat] = []
        self._read = self._lost = self._first_lost = 0  # events; those that could not be read; where the first begins

    def pieces(self, progress: Callable[[float], None] | None = None) -> Iterator[list[TraceEvent]]:
        """All events in the order of the file, some dozens at a time: who drops each piece needs little memory.

        Entries of the list that are no objects are ignored. ``progress`` is called now and then with the share of the
        file that was read, from 0 to 1; of a gzip file, that of its compressed bytes.

        Raises OSError where the file cannot be read, and TorchprofError where it is empty, is no trace of
        torch.profiler, or ends before its first event.
        """
        self.header, self.warnings = {}, []
        self._read = self._lost = self._first_lost = 0
        with self.path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            for events in self._pieces(_Text(self._unpacked(file))):
                self._read += len(events)
                if progress and size:  # a pipe has none
                    progress(min(file.tell() / size, 1.0))
                if events:
                    yield events
        if progress:
            progress(1.0)

    def _unpacked(self, file: BufferedReader) -> BufferedReader | gzip.GzipFile:
        """The file without its compression. Its first bytes tell which: people rename files."""
        first = file.peek(8)
        for magic, name in _FOREIGN.items():
            if first.startswith(magic):
                raise TorchprofError(
                    f"{self.path} is a {name} file: decompress it first. Traces are read as JSON, plain or in gzip."
                )
        return gzip.GzipFile(fileobj=file) if first.startswith(_GZIP) else file

    def _pieces(self, text: _Text) -> Iterator[list[TraceEvent]]:
        first = text.next()
        if not first and text.failure:
            raise TorchprofError(f"{self.path} cannot be decompressed: {text.failure}. Copy or record it again.")
        if not first:
            raise TorchprofError(f"{self.path} is empty: what should have written it did not get so far. {_HOW}")
        if first not in "{[" and text.ahead(_TAR_MARK.stop)[_TAR_MARK] == "ustar":
            raise TorchprofError(
                f"{self.path} is an archive of tar: unpack it first (tar -xf), and give the traces that were in it, or "
                "the folder they are in."
            )
        if first not in "{[":
            raise TorchprofError(
                f"{self.path} is no trace of torch.profiler, which begins with '{{': it begins with {text.ahead(20)!r}."
                f" {_HOW}"
            )
        is_whole = False
        try:
            yield from self._top_level(text) if first == "{" else self._events(text)
            is_whole = True
        except EOFError:
            self._note_cut(text)
        if is_whole:
            self._look_behind(text)
        self._note_lost()

    def _top_level(self, text: _Text) -> Iterator[list[TraceEvent]]:
        """From the ``{`` of the file to behind its ``}``. Raises EOFError where the file ends in between."""
        text.at += 1
        has_events = False
        while text.next(_GAP) != "}":
            try:
                key = text.key()
                is_list = key == "traceEvents" and text.ahead(1) == "["
                if not is_list:
                    value = text.whole_value()
                    if text.next() not in ",}":
                        raise ValueError("a quote in the value")
                    self.header[key] = value
            except ValueError:
                # The events are worth more than what is around them.
                is_list = not has_events and text.find(_FIRST_EVENT)
                if has_events or is_list:
                    where = "behind" if has_events else "before"
                    self.warnings.append(caveat("trace_around_unread", where=where, file=self.path.name))
                if not is_list:
                    text.find_end()
                    break
            if self.header.get("format") == "torchprof-run":
                raise TorchprofError(
                    f"{self.path} is no trace but a run that torchprof saved: read it with torchprof.load(path), "
                    "or show it with `python -m torchprof show FILE`."
                )
            if is_list:
                has_events = True
                yield from self._events(text)
        else:
            text.at += 1
        if not has_events:
            raise TorchprofError(f'{self.path} is no trace of torch.profiler: it has no list "traceEvents". {_HOW}')
        about = self.header.get("otherData")
        if isinstance(about, dict) and about.keys() == {"model", "notes"}:
            raise TorchprofError(
                f"{self.path} is a picture of a run that torchprof drew, and not all is in it: give the file of the "
                "run to torchprof.load, or read the trace that torch.profiler wrote."
            )

    def _events(self, text: _Text) -> Iterator[list[TraceEvent]]:
        """From the ``[`` of the events to behind their ``]``. Raises EOFError where the file ends in between."""
        text.at += 1
        while (first := text.next(_GAP)) != "]":
            if not first:
                raise EOFError
            piece = text.piece()
            yield self._one_by_one(text) if piece is None else piece
        text.at += 1

    def _one_by_one(self, text: _Text) -> list[TraceEvent]:
        """The events in what was read so far: for what does not read as one piece, and for the end of the list.

        Reads on where not one was whole. Raises EOFError where that cannot be.
        """
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
                    return events  # the file was cut off inside it
                self._first_lost = self._first_lost if self._lost else start
                self._lost += 1
            else:
                if isinstance(entry, dict):
                    events.append(entry)
            text.step(_GAP)
            if text.ahead(1) == "]":
                return events

    def _note_cut(self, text: _Text) -> None:
        why = f"; {text.failure}" if text.failure else ""
        if not self._read:
            raise TorchprofError(
                f"{self.path} ends before its first event{why}: what wrote it did not get so far, or the copy is not "
                f"whole. Copy or record it again. {_HOW}"
            )
        self.warnings.append(caveat("trace_cut", file=self.path.name, events=self._read, reason=text.failure))

    def _look_behind(self, text: _Text) -> None:
        goes_on = text.find_end()
        if text.failure:
            self.warnings.append(caveat("trace_end_unread", file=self.path.name, reason=text.failure))
        elif goes_on:
            self.warnings.append(caveat("trace_goes_on", file=self.path.name))

    def _note_lost(self) -> None:
        if self._lost:
            self.warnings.append(
                caveat(
                    "trace_events_unread",
                    file=self.path.name,
                    lost=self._lost,
                    events=self._read + self._lost,
                    at=self._first_lost,
                )
            )


class _Text:
    """What was read of a file and not used yet: ``text`` from ``at`` on. ``failure`` says why no more could be read."""

    def __init__(self, source: BufferedReader | gzip.GzipFile) -> None:
        self.text = ""
        self.at = 0
        self.failure = ""
        self._source = source
        self._decoder: codecs.IncrementalDecoder | None = None
        self._dropped = 0  # characters before ``text``
        self._ended = False

    @property
    def position(self) -> int:
        """How many characters of the file are before ``at``."""
        return self._dropped + self.at

    def more(self) -> bool:
        """Read on; False at the end of the file. It is as much again as is there already: what is long is not tried
        again for every chunk of it."""
        if self._ended:
            return False
        data = b""
        wanted = max(_CHUNK, len(self.text) - self.at)
        while len(data) < wanted and not self._ended:
            data += self._bytes(wanted - len(data))
        if self._decoder is None:
            self._decoder = codecs.getincrementaldecoder(_UTF_16.get(data[:2], "utf-8-sig"))("replace")
        self._dropped += self.at
        self.text = self.text[self.at :] + self._decoder.decode(data, self._ended)
        self.at = 0
        return True

    def _bytes(self, wanted: int) -> bytes:
        data = b""
        try:
            data = self._source.read1(wanted)  # and not read, which keeps what it had when it fails
        except EOFError:
            self.failure = "its gzip data is cut off"
        except (gzip.BadGzipFile, zlib.error) as error:
            self.failure = f"its gzip data is damaged ({error})"
        self._ended = not data
        return data

    def next(self, gap: re.Pattern[str] = _BLANK) -> str:
        """Step over blanks, or another gap, and say which character comes then: "" at the end of the file."""
        while True:
            self.step(gap)
            if self.at < len(self.text):
                return self.text[self.at]
            if not self.more():
                return ""

    def step(self, gap: re.Pattern[str]) -> None:
        """Step over a gap, as far as it was read."""
        found = gap.match(self.text, self.at)
        self.at = found.end() if found else self.at

    def ahead(self, count: int) -> str:
        """The next so many characters, or as many of them as were read."""
        return self.text[self.at : self.at + count]

    def find(self, *patterns: re.Pattern[str]) -> bool:
        """Step behind the next place of a pattern, of several the first that has one in what was read."""
        if len(self.text) - self.at < _CHUNK:
            self.more()  # so that the first of them has its chance
        while True:
            for pattern in patterns:
                if found := pattern.search(self.text, self.at):
                    self.at = found.end()
                    return True
            self.at = max(self.at, len(self.text) - _LONGEST_MARK)
            if not self.more():
                self.at = len(self.text)
                return False

    def find_end(self) -> bool:
        """Step to the end of the file, and say whether there was anything but blanks on the way."""
        has_more = False
        while True:
            has_more = has_more or bool(self.text[self.at :].strip())
            self.at = len(self.text)
            if not self.more():
                return has_more

    def key(self) -> str:
        """A key, and the step over its colon to its value. Raises as ``whole_value``."""
        key = self.whole_value()
        colon = self.next()
        if not colon:
            raise EOFError
        if not isinstance(key, str) or colon != ":":
            raise ValueError("where a key belongs")
        self.at += 1
        self.next()
        return key

    def whole_value(self) -> Any:
        """As ``value``, but reads on where that is needed: EOFError says that the file ends inside the value."""
        while True:
            try:
                return self.value()
            except EOFError:
                if not self.more():
                    raise

    def value(self) -> Any:
        """The value that begins here, mended where that helps, and the step behind it.

        Raises EOFError where what was read so far ends inside it, and ValueError where it is no value.
        """
        while True:
            try:
                value, end = _JSON.raw_decode(self.text, self.at)
            except json.JSONDecodeError as error:
                self._mend(error)
            except RecursionError as error:
                raise ValueError("too deep") from error
            else:
                if self.text[end - 1] not in '}]"' and not self.text[end:].strip("0123456789.eE+-"):
                    raise EOFError  # it was not the whole of the number
                self.at = end
                return value

    def _mend(self, error: json.JSONDecodeError) -> None:
        """Put right what stopped the decoder. Raises as ``value`` where nothing is known against it."""
        if error.msg.startswith("Unterminated string") or _CUT_WORD.match(self.text, error.pos):
            self._demand_more(error)
        if found := _NO_NUMBER.match(self.text, error.pos):
            self._replace(*found.span(), "null")
        elif error.msg.startswith("Invalid \\"):
            # Where one string is not escaped, others are not: all that were read are mended, not each by its error.
            strings = self.text[self.at :]
            mended = _STRING.sub(_as_it_was_meant, strings)
            if mended == strings:  # the end of the string was not read yet
                self._demand_more(error)
            self._replace(self.at, len(self.text), mended)
        else:
            raise error

    def _demand_more(self, error: json.JSONDecodeError) -> NoReturn:
        raise error if len(self.text) - self.at > _LONGEST else EOFError

    def _replace(self, start: int, end: int, new: str) -> None:
        self.text = self.text[:start] + new + self.text[end:]
        self._dropped -= len(new) - (end - start)  # so that ``position`` is that in the file

    def piece(self) -> list[TraceEvent] | None:
        """The events up to the last one that begins in what was read, that one excluded.

        They are decoded in one go, which is what makes reading as quick as it is. None where that does not do: the
        list ends, an event is broken, or what looked like the beginning of an event was none.
        """
        cut = self._last_event()
        if not cut:
            return None
        # The null stands where the comma before it wants one more entry.
        piece = f"[{self.text[self.at : cut]}null]"
        entries: list[Any] | None = None
        if _quick is not None:
            with suppress(ValueError):  # what is too lax for it may be good enough for Python's
                entries = _quick(piece)
        if entries is None:
            try:
                entries, end = _JSON.raw_decode(piece)
            except (ValueError, RecursionError):
                return None
            if end < len(piece):
                return None
        self.at = cut
        return [entry for entry in entries if isinstance(entry, dict)]

    def _last_event(self) -> int:
        """Where the last event begins of which anything was read, by the looks of it; 0 where no second one does."""
        at = len(self.text)
        while (at := self.text.rfind("{", self.at + 1, at)) > 0:
            before = self.text[max(at - _LONGEST_GAP, self.at) : at].rstrip()
            if before.endswith(",") and before[:-1].rstrip().endswith("}"):
                return at
        return 0


def _as_it_was_meant(string: re.Match[str]) -> str:
    """A string in which a backslash escapes nothing was not escaped at all: each one stands for itself, also the one
    that happens to stand before an n."""
    if "\\" not in string[0] or _ESCAPED.fullmatch(string[0]):
        return string[0]
    return _BACKSLASH.sub(lambda one: one[0] if one[1] else "\\\\", string[0])
