"""docs/size.md: each line of the house belongs to one feature, and no feature is above its ceiling."""

from collections import Counter

import pytest
from build.size import FEATURES, KINDS, PAGE, above_or_below, ceilings, files, home_of, lines_by_feature, renewed


def test_no_feature_is_above_its_ceiling() -> None:
    assert [*above_or_below(lines_by_feature(), ceilings(PAGE.read_text(encoding="utf-8")))] == []


def test_the_features_add_up_to_all_lines() -> None:
    counted = Counter[str]()
    for kind, file, _ in files():
        counted[kind] += len(file.read_bytes().splitlines())
    sizes = lines_by_feature()
    assert {kind: sum(size[kind] for size in sizes.values()) for kind in KINDS} == counted
    assert all(size[kind] >= 0 for size in sizes.values() for kind in KINDS)


def test_every_feature_has_a_row_and_every_start_of_a_path_a_file() -> None:
    assert {*ceilings(PAGE.read_text(encoding="utf-8"))} == {*FEATURES}
    paths = {kind: [path for listed, _, path in files() if listed == kind] for kind in KINDS}
    for feature in FEATURES.values():
        for kind in KINDS:
            for start in getattr(feature, kind).split():
                assert any(path.startswith(start.partition(":")[0]) for path in paths[kind]), start


def test_growth_and_ceilings_that_are_too_high_are_seen() -> None:
    sizes = lines_by_feature()
    limits = ceilings(renewed(PAGE.read_text(encoding="utf-8"), sizes))
    assert [*above_or_below(sizes, limits)] == []
    sizes["run"]["package"] += 1_000
    sizes["page"]["tests"] -= 1_000
    above, below = above_or_below(sizes, limits)
    assert "run: " in above and "lines of package, its ceiling is" in above
    assert "page: " in below and "lines of tests, far below its ceiling" in below


def test_a_file_of_no_feature_is_an_error() -> None:
    with pytest.raises(LookupError, match="belongs to no feature"):
        home_of("new_package/new_file", "package")
