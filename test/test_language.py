"""What users and readers read is in plain English: messages, docstrings and the page have no private words."""

import ast
import re
from collections.abc import Iterator

import pytest
from build.messages import SOURCE, messages_of_javascript, messages_of_python

# A pattern of a word or phrase, and what to write instead.
PRIVATE_WORDS = {
    r"(no|any|some)body\b": "unknown, not recorded",
    r"told\b|tells? (apart|of|no|nothing|which|its|it)\b|tell (them|it) apart": "recorded, reported; distinguish",
    r"held\b": "allocated, saved",
    r"doubt|believe": "warning",
    r"whose it is|at rest|seen to\b|as for want of|at work\b": "the standard term",
    r"(is|are) said to|says no more": "may",
    r"(stands?|stood)\b(?! for\b|-in|s? for\b)": "is, has; straggler",
    r"kept for backward": "saved for backward",
    r"rose by": "peak: +…",
    r"pieces? of advice": "finding",
    r"for each byte": "FLOP/byte",
    r"beside\b(?!=)|besides\b": "next to; also",
    r"(gave|gives?) way|went by|(went|goes) on\b": "stopped; passed; continued",
    r"(?<!there )(is|was|are) (no|none)\b(?! longer)": "is not a",
    r"by (itself|themselves)\b": "alone, separately",
    r"put back\b": "restored",
}
_PYTHON = sorted(SOURCE.rglob("*.py"))
_JAVASCRIPT = sorted(SOURCE.rglob("*.js"))


def docstrings_of(source: str) -> Iterator[str]:
    """Docstrings, also those below attributes and constants, without code and names in italics."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            text = re.sub(r"``.*?``|\*.*?\*|\bNone\b", "_", node.value.value, flags=re.DOTALL)
            yield " ".join(text.split())


@pytest.fixture(scope="module")
def texts() -> list[tuple[str, str]]:
    """All messages and docstrings, each with the name of its file."""
    found = []
    for file in (*_PYTHON, *_JAVASCRIPT):
        source = file.read_text(encoding="utf-8")
        if file.suffix == ".py":
            messages = [*messages_of_python(source), *docstrings_of(source)]
        else:
            messages = [*messages_of_javascript(source)]
        found += [(file.relative_to(SOURCE).as_posix(), re.sub(r"\{[^{}]*\}", "{}", text)) for text in messages]
    assert len(found) > 4000
    return found


@pytest.mark.parametrize("words", PRIVATE_WORDS)
def test_no_text_is_in_private_language(texts: list[tuple[str, str]], words: str) -> None:
    pattern = re.compile(rf"\b({words})", re.IGNORECASE)
    found = [f"{file}: {text}" for file, text in texts if pattern.search(text)]
    assert not found, f"Write instead: {PRIVATE_WORDS[words]}"


def test_docstrings_are_found() -> None:
    source = '"""Of a module: is None,\n``beside``."""\nA = 1\n"""Of a constant."""\ndef f():\n    """Of a function."""'
    assert {*docstrings_of(source)} == {"Of a module: is _, _.", "Of a constant.", "Of a function."}


def test_messages_are_found_in_python() -> None:
    source = '''
"""The docstring of a module."""
def first(count, names):
    """The docstring of a function."""
    say(f"{count} of {', '.join(names)} were not counted" + suffix)  # a comment of five words
    say("one\\ntwo three", "two words", "add sub mul div exp log sin cos tan abs neg".split())
    pattern = r"of (\\w+) or (\\d+) at"
'''
    assert [*messages_of_python(source)] == ["{count} of {', '.join(names)} were not counted{suffix}", "one\ntwo three"]


def test_messages_are_found_in_javascript() -> None:
    source = 'const a = "first of all"; // "not a message, but a comment"\nsay(`${count} calls of it`, "no message");'
    assert [*messages_of_javascript(source)] == ["first of all", "${count} calls of it"]
