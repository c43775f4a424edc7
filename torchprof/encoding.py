"""Write text to streams whose encoding lacks some characters: a pipe on Windows (cp1252), PYTHONIOENCODING=ascii.

Missing characters are replaced by similar ASCII characters ("–" by "-", "≥" by ">=", the lines of a tree by "|-- "), or
by an escape (``\\u4e2d``) if there are none. Files are written in UTF-8 and do not need this.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from typing import Any

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
