"""Amounts with units, by hand: bytes go by 1024, counts by 1000, times by the second."""

from __future__ import annotations

import pytest

from torchprof.run.formats import EXAMPLES, Unit, parse_amount


@pytest.mark.parametrize(
    ("text", "amount"),
    [
        ("0", 0),
        ("7", 7),
        ("512B", 512),
        ("1k", 1024),
        ("1kB", 1024),
        ("1 KB", 1024),
        ("1KiB", 1024),
        ("1.5M", 1_572_864),
        ("1.5mb", 1_572_864),
        ("24GB", 25_769_803_776),
        ("24gib", 25_769_803_776),
        ("0.5TB", 549_755_813_888),
    ],
)
def test_bytes_go_by_1024(text: str, amount: int) -> None:
    assert parse_amount(text, Unit.BYTES) == amount


@pytest.mark.parametrize(
    ("text", "amount"),
    [
        ("0", 0),
        ("64", 64),
        ("10k", 10_000),
        ("10K", 10_000),
        ("1.5M", 1_500_000),
        ("4.2g", 4_200_000_000),
        ("3T", 3_000_000_000_000),
        (" 2 P ", 2_000_000_000_000_000),
        ("1.0005k", 1000.5),
    ],
)
def test_counts_go_by_1000(text: str, amount: float) -> None:
    assert parse_amount(text, Unit.COUNT) == amount


@pytest.mark.parametrize(
    ("text", "amount"),
    [("12ns", 12), ("1.5us", 1500), ("1.5µs", 1500), ("1.5μs", 1500), ("12 ms", 12_000_000), ("0.25s", 250_000_000)],
)
def test_times_are_in_ns(text: str, amount: int) -> None:
    assert parse_amount(text, Unit.TIME) == amount


@pytest.mark.parametrize(
    ("unit", "text"),
    [
        *((Unit.TIME, text) for text in ("12", "12m", "12 MS", "1S", "1.ms", "ms", "")),
        *((Unit.BYTES, text) for text in ("1bit", "1PB", "-1", "1e3", "1,5kB", "kB")),
        *((Unit.COUNT, text) for text in ("1kB", "ten", "-1k", "1_000", "+10%", "inf")),
    ],
)
def test_what_is_no_amount_is_none(unit: Unit, text: str) -> None:
    assert parse_amount(text, unit) is None


def test_the_examples_are_amounts() -> None:
    assert {unit: parse_amount(text, unit) for unit, text in EXAMPLES.items()} == {
        Unit.TIME: 12_000_000,
        Unit.BYTES: 1_610_612_736,
        Unit.COUNT: 4_200_000_000,
    }
