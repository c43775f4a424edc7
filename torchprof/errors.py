"""TorchprofError, and text as users see it: in messages, and in streams whose encoding lacks some characters."""

from __future__ import annotations

import codecs
import difflib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from io import TextIOWrapper
from typing import Any


class TorchprofError(RuntimeError):
    """The only exception that torchprof defines. The message says what is wrong, what was expected and what to do."""

    __module__ = "torchprof"  # where users import it from: tracebacks and pickles show it

    def __str__(self) -> str:
        return printable_lines(super().__str__())


def printable(name: str) -> str:
    """A name with unprintable characters, such as line breaks and those that command a terminal, as escapes."""
    return name if name.isprintable() else "".join(char if char.isprintable() else repr(char)[1:-1] for char in name)


def printable_lines(text: str) -> str:
    """The same for a text of several lines."""
    return "\n".join(map(printable, text.split("\n")))


def suggest(given: str, choices: Iterable[str], limit: int = 3, *, every: bool = False) -> str:
    """Sentences with the valid choices that are most similar to what was given, if there are any, and with all of them.

    Up to 8 choices are all listed, after the most similar one. Of more, the ``limit`` most similar ones are listed;
    if none is similar, the first 20. With ``every``, all are listed after the similar ones, sorted.
    """
    if not (known := list(choices)):
        return "There is none."
    are_few = len(known) <= 8 and not every
    near = difflib.get_close_matches(given, known, n=1 if are_few else limit, cutoff=0.5)
    meant = "Did you mean " + " or ".join(repr(choice) for choice in near) + "?"
    if near and (len(near) == len(known) or not (are_few or every)):
        return meant
    shown = sorted(known) if every else known[:20]
    more = f" and {len(known) - len(shown)} more" if len(known) > len(shown) else ""
    listed = "Choose from " + ", ".join(repr(choice) for choice in shown) + more + "."
    return f"{meant} {listed}" if near else listed


def some(names: Sequence[str], limit: int = 3) -> str:
    """The first ``limit`` names, and how many more there are: ``a, b, c and 2 more``."""
    more = len(names) - limit
    return ", ".join(names[:limit]) + (f" and {more} more" if more > 0 else "")


# Streams whose encoding lacks some characters, as a pipe on Windows (cp1252): these are replaced by similar ASCII
# characters ("–" by "-", "≥" by ">=", the lines of a tree by "|-- "), or by an escape ("\u4e2d") if there are none.
# Files are written in UTF-8 and do not need this.

READABLE = "torchprof.readable"
"""The name of the error handler that replaces characters; a value for ``open(..., errors=)``."""

_RAISING = ("strict", "surrogateescape")  # the error handlers that raise for missing characters
_ASCII = {
    **dict.fromkeys("–─－", "-"),
    **dict.fromkeys("│├┤", "|"),
    **dict.fromkeys("┼＋", "+"),
    **dict(zip("└◄×·µ█▒░", "`<x.u#%:")),
    "≥": ">=",
    "…": "...",
    "→": "->",
    "Δ": "delta ",
    "±": "+-",
}


def _replace(error: UnicodeError) -> tuple[str | bytes, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    error_of_char = UnicodeEncodeError(error.encoding, error.object, error.start, error.start + 1, error.reason)
    char = error.object[error.start]
    if "\udc80" <= char <= "\udcff":  # an undecodable byte of a file name
        return codecs.lookup_error("surrogateescape")(error_of_char)
    if char in _ASCII:
        return _ASCII[char], error.start + 1
    return codecs.lookup_error("backslashreplace")(error_of_char)


codecs.register_error(READABLE, _replace)


def encodable(text: str, stream: Any) -> str:
    """The text in characters that a stream can encode; unchanged if it can, or if its encoding is unknown."""
    encoding, errors = getattr(stream, "encoding", None), getattr(stream, "errors", None) or "strict"
    if not isinstance(encoding, str) or errors not in _RAISING:
        return text
    try:
        text.encode(encoding, errors)
    except UnicodeEncodeError:
        return text.encode(encoding, READABLE).decode(encoding, "surrogateescape")
    return text


def error_handler_for(stream: Any) -> str:
    """An error handler that never raises: the stream's own, or ``READABLE`` if the stream's own may raise."""
    errors = getattr(stream, "errors", None) or "strict"
    return READABLE if errors in _RAISING else errors


@contextmanager
def no_encoding_errors(*streams: Any) -> Iterator[None]:
    """Inside the block, writing to these streams does not raise UnicodeEncodeError."""
    before = [(stream, stream.errors) for stream in streams if isinstance(stream, TextIOWrapper)]
    for stream, _ in before:
        stream.reconfigure(errors=error_handler_for(stream))
    try:
        yield
    finally:
        for stream, errors in before:
            if not stream.closed:
                stream.reconfigure(errors=errors)
