"""The legend of the signs in a printed text."""

import pytest

from torchprof.analyze.sentences import LEGEND, legend


@pytest.mark.parametrize(
    ("text", "signs"),
    [
        ("a | 1.0 | –\nb | 2.0 | 3.0", ["–"]),
        ("–", ["–"]),
        ("a | ≥ 1.0 | (outside)", ["≥", "(outside)"]),
        ("a | (between ops)\n(outside) | –", ["–", "(outside)", "(between ops)"]),
        ("layers 0–9 | 149.095ms (124.387–171.235ms)", []),
        ("a | (between ops)\n(between ops): no operator ran.", []),
        ("", []),
    ],
)
def test_the_legend_has_the_signs_that_stand_in_the_text(text: str, signs: list[str]) -> None:
    lines = legend(text)
    assert [line.split("  ")[1] for line in lines] == signs
    assert [line.split("  ")[-1].strip() for line in lines] == [LEGEND[sign] for sign in signs]
