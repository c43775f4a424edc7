"""The text of a JSON file, read and decoded a piece at a time. Invalid JSON is repaired if possible."""

from __future__ import annotations

import codecs
import gzip
import importlib
import json
import re
import zlib
from collections.abc import Callable
from contextlib import suppress
from io import BufferedReader
from typing import Any, NoReturn

from torchprof.run.file import most_unpacked, refuse_unpacked

_CHUNK = 1 << 16  # bytes that are read at a time: so few that the decoded objects fit into the cache of a core
_LONGEST = 1 << 24  # characters of an event or a value of the header: if it does not end by then, it is broken
_LONGEST_GAP = 40  # characters between two events: no writer of traces uses more
_LONGEST_MARK = 256  # characters: no match of a pattern for ``find`` is longer

_UTF_16 = {b"\xff\xfe": "utf-16", b"\xfe\xff": "utf-16", b"{\x00": "utf-16-le", b"\x00{": "utf-16-be"}
"""The first bytes of JSON in UTF-16, as PowerShell writes it, and the name of the encoding."""
try:
    _quick: Callable[[str], Any] | None = importlib.import_module("orjson").loads
except ImportError:
    _quick = None
"""The decoder of the extra "fast", or None. It is strict, and takes a third of the time of Python's decoder."""

# Python's json writes and reads NaN and Infinity, which are no JSON. Here they are None, in every spelling.
_JSON = json.JSONDecoder(strict=False, parse_constant=lambda _: None)
_CUT_WORD = re.compile(r"[\w\\.+-]{0,16}\Z")  # a word at the end of the text ("tru") may be valid with more text
_NO_NUMBER = re.compile(r"[-+]?(?:nan|inf)\b", re.IGNORECASE)
_STRING = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_STRING_OR_NO_NUMBER = re.compile(
    rf'(?P<string>{_STRING.pattern[:-1]}(?:"|\\?\Z))|(?<!\w){_NO_NUMBER.pattern}(?=[\s,\]}}])', re.DOTALL | re.I
)
_ESCAPED = re.compile(r'[^\\]*(?:\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})[^\\]*)*')
_BACKSLASH = re.compile(r'\\(["\\]?)')

_BLANK = re.compile(r"[ \t\r\n]*")
SEPARATOR = re.compile(r"[ \t\r\n,]*")

TraceEvent = dict[str, Any]
"""An object of ``traceEvents``, as in the file."""


class JsonText:
    """The text of a file that was read and not yet decoded: ``text`` from ``at`` on. ``failure``: why reading stopped
    before the end of the file, "" if it did not."""

    def __init__(self, source: BufferedReader | gzip.GzipFile, path: object = "The file") -> None:
        """``path``: its name in error messages."""
        self.text = ""
        self.at = 0
        self.failure = ""
        self._source = source
        self._path, self._most = path, most_unpacked()
        self._decoder: codecs.IncrementalDecoder | None = None
        self._dropped = 0  # characters before ``text``
        self._ended = False

    @property
    def position(self) -> int:
        return self._dropped + self.at

    def more(self) -> bool:
        """Read more; False at the end of the file. Each call doubles the text, so that a long value needs few calls.
        Raises TorchprofError if one value, or what was decompressed, is larger than a file may be."""
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
        unpacked = self._dropped if isinstance(self._source, gzip.GzipFile) else 0
        refuse_unpacked(self._path, unpacked + len(self.text), self._most)
        return True

    def _bytes(self, wanted: int) -> bytes:
        """The next bytes, at most so many; none at the end of the file, or if they cannot be decompressed."""
        data = b""
        try:
            data = self._source.read1(wanted)  # not ``read``, which loses what it had if it fails
        except EOFError:
            self.failure = "its gzip data is cut off"
        except (gzip.BadGzipFile, zlib.error) as error:
            self.failure = f"its gzip data is damaged ({error})"
        self._ended = not data
        return data

    def next(self, gap: re.Pattern[str] = _BLANK) -> str:
        """Step over blanks, or another gap, and return the character after it; "" at the end of the file."""
        while True:
            self.step(gap)
            if self.at < len(self.text):
                return self.text[self.at]
            if not self.more():
                return ""

    def step(self, gap: re.Pattern[str]) -> None:
        """Step over the part of a gap that was already read."""
        match = gap.match(self.text, self.at)
        self.at = match.end() if match else self.at

    def ahead(self, count: int) -> str:
        return self.text[self.at : self.at + count]

    def find(self, *patterns: re.Pattern[str]) -> bool:
        """Step behind the next match of a pattern. The first pattern with a match in the text wins. False: no match."""
        if len(self.text) - self.at < _CHUNK:
            self.more()  # the match of the first pattern may be in the next chunk
        while True:
            for pattern in patterns:
                if match := pattern.search(self.text, self.at):
                    self.at = match.end()
                    return True
            self.at = max(self.at, len(self.text) - _LONGEST_MARK)
            if not self.more():
                self.at = len(self.text)
                return False

    def find_end(self) -> bool:
        """Step to the end of the file, and return whether there was anything but blanks before it."""
        has_more = False
        while True:
            has_more = has_more or bool(self.text[self.at :].strip())
            self.at = len(self.text)
            if not self.more():
                return has_more

    def key(self) -> str:
        """Decode a key, and step over its colon to its value. Raises as ``whole_value``."""
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
        """As ``value``, but reads more if needed. EOFError means that the file ends inside the value."""
        while True:
            try:
                return self.value()
            except EOFError:
                if not self.more():
                    raise

    def value(self) -> Any:
        """Decode the value at ``at``, repaired if needed, and step behind it. Raises EOFError if the text that was read
        so far ends inside it, and ValueError if it is not a value."""
        while True:
            try:
                value, end = _JSON.raw_decode(self.text, self.at)
            except json.JSONDecodeError as error:
                self._repair(error)
            except RecursionError as error:
                raise ValueError("too deep") from error
            else:
                if self.text[end - 1] not in '}]"' and not self.text[end:].strip("0123456789.eE+-"):
                    raise EOFError  # more digits may follow
                self.at = end
                return value

    def _repair(self, error: json.JSONDecodeError) -> None:
        """Repair the text at the place of an error. Raises as ``value`` if it cannot be repaired."""
        if error.msg.startswith("Unterminated string") or _CUT_WORD.match(self.text, error.pos):
            self._raise_incomplete(error)
        if _NO_NUMBER.match(self.text, error.pos):
            if not _STRING_OR_NO_NUMBER.match(self.text, error.pos):  # no value, as in "name"-inf: 1
                raise error
            # Others may follow: those in the text are repaired at once, since each repair decodes the value anew.
            rest = self.text[error.pos :]
            self._replace(error.pos, len(self.text), _STRING_OR_NO_NUMBER.sub(lambda of: of["string"] or "null", rest))
        elif error.msg.startswith("Invalid \\"):
            # If one string is not escaped, the others are not either: repair all strings in the text at once.
            strings = self.text[self.at :]
            repaired = _STRING.sub(_with_literal_backslashes, strings)
            if repaired == strings:  # the end of the string is not in the text yet
                self._raise_incomplete(error)
            self._replace(self.at, len(self.text), repaired)
        else:
            raise error

    def _raise_incomplete(self, error: json.JSONDecodeError) -> NoReturn:
        """Raise EOFError, so that the caller reads more; the error itself if the value is already too long."""
        raise error if len(self.text) - self.at > _LONGEST else EOFError

    def _replace(self, start: int, end: int, new: str) -> None:
        self.text = self.text[:start] + new + self.text[end:]
        self._dropped -= len(new) - (end - start)  # so that ``position`` stays the position in the file

    def piece(self) -> list[TraceEvent] | None:
        """The events in the text, without the last one, which may be incomplete: of ``{…}, {…}, {"ph": "X", "na``, two.
        All are decoded at once, for speed. None if that fails: at the end of the list, or at a broken event."""
        cut = self._last_event()
        if not cut:
            return None
        # The text ends in a comma: the null is the entry after it.
        piece = f"[{self.text[self.at : cut]}null]"
        entries: list[Any] | None = None
        if _quick is not None:
            with suppress(ValueError):  # Python's decoder accepts more
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
        """Where the last event in the text probably starts; 0 if there is no second event."""
        start = len(self.text)
        while (start := self.text.rfind("{", self.at + 1, start)) > 0:
            before = self.text[max(start - _LONGEST_GAP, self.at) : start].rstrip()
            if before.endswith(",") and before[:-1].rstrip().endswith("}"):
                return start
        return 0


def _with_literal_backslashes(string: re.Match[str]) -> str:
    """A string with literal backslashes, if one of them escapes nothing: then the writer did not escape this string, so
    each of its backslashes is literal, even one before an n."""
    if "\\" not in string[0] or _ESCAPED.fullmatch(string[0]):
        return string[0]
    return _BACKSLASH.sub(lambda escape: escape[0] if escape[1] else "\\\\", string[0])
