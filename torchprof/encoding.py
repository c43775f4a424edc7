"""Text for streams that cannot hold all of it: a pipe on Windows (cp1252), PYTHONIOENCODING=ascii.

What a stream cannot hold becomes the nearest ASCII ("–" a minus, "≥" ">=", the lines of a tree "|-- "), and where there
is none an escape (``\\u4e2d``). Files that are written by name are UTF-8 and need none of this.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from typing import Any

READABLE = "torchprof.readable"
"""The name of the error handler, as ``open(..., errors=)`` takes it."""

_RAISING = ("strict", "surrogateescape")  # of a stream's error handlers, those that raise for such text
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
    one = UnicodeEncodeError(error.encoding, error.object, error.start, error.start + 1, error.reason)
    char = error.object[error.start]
    if "\udc80" <= char <= "\udcff":  # a byte of a file's name
        return codecs.lookup_error("surrogateescape")(one)
    if char in _ASCII:
        return _ASCII[char], error.start + 1
    return codecs.lookup_error("backslashreplace")(one)


codecs.register_error(READABLE, _replace)


def fitting(text: str, stream: Any) -> str:
    """The text as a stream can hold it: unchanged where it can, and where the stream does not tell its encoding."""
    encoding, errors = getattr(stream, "encoding", None), getattr(stream, "errors", None) or "strict"
    if not isinstance(encoding, str) or errors not in _RAISING:
        return text
    try:
        text.encode(encoding, errors)
    except UnicodeEncodeError:
        return text.encode(encoding, READABLE).decode(encoding, "surrogateescape")
    return text


def errors_of(stream: Any) -> str:
    """The error handler with which nothing that is written raises: the stream's own, if that does not."""
    errors = getattr(stream, "errors", None) or "strict"
    return READABLE if errors in _RAISING else errors


@contextmanager
def readable(*streams: Any) -> Iterator[None]:
    """While entered, nothing that is written to these streams raises for want of a character."""
    before = [(stream, stream.errors) for stream in streams if isinstance(stream, TextIOWrapper)]
    for stream, _ in before:
        stream.reconfigure(errors=errors_of(stream))
    try:
        yield
    finally:
        for stream, errors in before:
            if not stream.closed:
                stream.reconfigure(errors=errors)
