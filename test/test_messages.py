"""What users read: test/messages.txt has every message, and none is in words that only we understand."""

import re

import pytest
from build.messages import GOLDEN, all_messages, messages_of_javascript, messages_of_python

# A pattern of a word or phrase, and what to write instead.
PRIVATE_WORDS = {
    r"(no|any|some)body\b": "unknown, not recorded",
    r"told\b|tells? (apart|of|no|nothing|which|its|it)\b|tell (them|it) apart": "recorded, reported; distinguish",
    r"held\b": "allocated, saved",
    r"doubt|believe": "warning",
    r"whose it is|at rest|seen to\b|as for want of|at work\b": "the standard term",
    r"(is|are) said to|says no more": "may",
    r"stands?\b|stood\b": "is, has; straggler",
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


def test_the_list_of_messages_is_that_of_the_source() -> None:
    assert GOLDEN.read_text(encoding="utf-8") == all_messages(), "Messages changed: run `make messages`, read the diff."


@pytest.mark.parametrize("words", PRIVATE_WORDS)
def test_no_message_is_in_private_language(words: str) -> None:
    found = []
    for block in GOLDEN.read_text(encoding="utf-8").split("\n\n"):
        file, *messages = block.splitlines()
        without_fields = [re.sub(r"\{[^{}]*\}", "{}", message) for message in messages]
        found += [f"{file}: {text}" for text in without_fields if re.search(rf"\b({words})", text, re.I)]
    assert not found, f"Write instead: {PRIVATE_WORDS[words]}"


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
