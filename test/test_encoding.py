"""Text for streams that cannot encode all characters, compared with what Python can encode."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

import pytest
import torch
from torch import nn

import torchprof
from torchprof.errors import encodable, error_handler_for, no_encoding_errors
from torchprof.integrations.deepspeed import get_model_profile

TREE = "Net\n├── a | ≥ 4\n└── b | –"
ASCII = "Net\n|-- a | >= 4\n`-- b | -"


def stream(encoding: str, errors: str = "strict") -> io.TextIOWrapper:
    return io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors=errors, newline="\n")


def written(of: io.TextIOWrapper) -> bytes:
    of.flush()
    buffer = of.buffer
    assert isinstance(buffer, io.BytesIO)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("encoding", "expected"),
    [("utf-8", TREE), ("ascii", ASCII), ("latin-1", ASCII), ("cp1252", ASCII[:-1] + "–"), ("cp437", TREE[:-1] + "-")],
)
def test_a_character_that_cannot_be_encoded_becomes_similar_ascii(encoding: str, expected: str) -> None:
    assert encodable(TREE, stream(encoding)) == expected
    assert expected.encode(encoding)


def test_a_character_without_similar_ascii_is_escaped() -> None:
    assert encodable("层 é", stream("ascii")) == "\\u5c42 \\xe9"
    assert encodable("层 é", stream("latin-1")) == "\\u5c42 é"


def test_streams_that_do_not_raise_or_have_no_encoding_are_unchanged() -> None:
    assert encodable(TREE, stream("ascii", "replace")) == TREE
    assert encodable(TREE, io.StringIO()) == TREE
    assert encodable(TREE, None) == TREE
    assert error_handler_for(stream("ascii", "replace")) == "replace"


def test_undecodable_bytes_of_file_names_are_kept() -> None:
    """In the C locale, Python uses such characters in file names."""
    one = stream("ascii", "surrogateescape")
    with no_encoding_errors(one):
        one.write("caf\udce9 ≥ 层")
    assert written(one) == b"caf\xe9 >= \\u5c42"


def test_inside_the_block_a_stream_does_not_raise() -> None:
    one = stream("ascii")
    with no_encoding_errors(one, io.StringIO(), None):
        one.write(TREE)
    assert written(one).decode() == ASCII
    with pytest.raises(UnicodeEncodeError):
        one.write(TREE)


def test_display_writes_only_characters_that_the_stream_can_encode(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    with torchprof.Profile(model) as prof:
        model(torch.rand(1, 2))
    with (tmp_path / "table.txt").open("w", encoding="cp1252") as file:
        text = prof.display(file=file)
    assert (tmp_path / "table.txt").read_text(encoding="cp1252") == text.replace("└──", "`--") + "\n"


def test_pages_of_the_drop_ins_have_only_characters_that_the_stream_can_encode() -> None:
    class Größe(nn.Linear):
        pass

    with contextlib.redirect_stdout(stream("ascii")) as out:
        get_model_profile(Größe(2, 2), (1, 2))
    assert b"Gr\\xf6\\xdfe" in written(out)
