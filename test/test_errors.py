"""The sentences with which errors name the valid choices."""

from __future__ import annotations

import pytest

from torchprof.errors import suggest

MANY = [f"column_{number:02}" for number in range(30)]


@pytest.mark.parametrize(
    ("given", "choices", "text"),
    [
        ("foward", ["forward", "backward", "recompute"], "Did you mean 'forward'? Choose from 'forward', 'backward', "),
        ("x", ["forward", "backward"], "Choose from 'forward', 'backward'."),
        ("off", ["of"], "Did you mean 'of'?"),
        ("x", [], "There is none."),
        ("column_7", MANY, "Did you mean 'column_27' or 'column_17' or 'column_07'?"),
        ("x", MANY, "Choose from 'column_00', 'column_01', "),
    ],
)
def test_the_choices_that_are_named(given: str, choices: list[str], text: str) -> None:
    found = suggest(given, choices)
    assert found.startswith(text)
    assert found.endswith(" and 10 more.") == (len(choices) == 30 and given == "x")
    assert ("Choose from" in found) == ("Choose from" in text)


def test_every_choice_is_listed_sorted_if_that_is_wanted() -> None:
    text = suggest("column_29", [*reversed(MANY)], every=True)
    assert text.startswith("Did you mean 'column_29' or ") and text.index("'column_00'") < text.index("'column_01'")
    assert all(repr(name) in text for name in MANY)
    assert suggest("x", ["b", "a"], every=True) == "Choose from 'a', 'b'."
