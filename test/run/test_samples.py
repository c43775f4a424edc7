"""``Spread``: the sample of a measure depends neither on the order nor on the grouping of the calls."""

from __future__ import annotations

import random
from dataclasses import replace
from operator import itemgetter

from build.examples import examples
from hypothesis import given
from hypothesis import strategies as st

from torchprof.run.measures import Spread, spreads_at


@examples(60)
@given(st.lists(st.tuples(st.integers(0, 10**15), st.integers(0, 10**9)), min_size=1, max_size=600), st.randoms())
def test_a_spread_does_not_depend_on_the_order_of_the_calls(calls: list[tuple[int, int]], rng: random.Random) -> None:
    """The same calls in any order give the same spread. Up to its size it has all values."""
    shuffled = list(calls)
    rng.shuffle(shuffled)
    spread = Spread.of(calls)
    assert Spread.of(shuffled) == spread
    values = sorted(value for _, value in calls)
    assert (spread.count, spread.sum, spread.min, spread.max) == (len(values), sum(values), values[0], values[-1])
    if len(calls) <= Spread.SIZE:
        assert list(spread.sample) == values
    else:
        assert len(spread.sample) == Spread.SIZE
        assert set(spread.sample) <= set(values)


def test_a_spread_of_calls_that_started_together_does_not_depend_on_their_order() -> None:
    """Calls on several threads can start in the same nanosecond. The choice among them does not depend on the order."""
    calls = [(start, value) for start in range(150) for value in (start, 1000 + start, 2000 + start)]
    spread = Spread.of(calls)
    assert Spread.of(calls[::-1]) == spread
    assert Spread.of(sorted(calls, key=lambda call: call[1])) == spread


@examples(30)
@given(
    st.lists(
        st.tuples(st.integers(0, 10**15), st.integers(0, 10**9)), min_size=1, max_size=600, unique_by=itemgetter(0)
    )
)
def test_spreads_at_known_starts_are_those_of_the_calls(calls: list[tuple[int, int]]) -> None:
    spread = spreads_at([start for start, _ in calls])
    assert spread([value for _, value in calls]) == Spread.of(calls)
    assert spread([-value for _, value in calls]) == Spread.of([(start, -value) for start, value in calls])


def test_the_sample_of_a_spread_is_not_the_first_calls() -> None:
    """The sample of 10,000 rising values has about their median: it is drawn from all of them."""
    spread = Spread.of([(1000 * number, number) for number in range(10_000)])
    assert 3_500 < spread.median < 6_500
    assert spread.first == 0
    assert spread.max == 9_999


START = st.integers(0, 10**15)
CALLS = st.lists(st.tuples(START, st.integers(0, 10**9)), min_size=1, max_size=400)


@examples(60)
@given(st.lists(CALLS, min_size=2, max_size=4), st.data())
def test_adding_spreads_is_associative(groups: list[list[tuple[int, int]]], data: st.DataObject) -> None:
    """The sum is the spread of all calls, in any grouping. ``first`` is that of the first group."""
    whole = Spread.of([call for group in groups for call in group])
    spreads = [Spread.of(group) for group in groups]
    first = spreads[0].first
    assert Spread.of_all(spreads) == replace(whole, first=first)
    while len(spreads) > 1:
        at = data.draw(st.integers(0, len(spreads) - 2))
        spreads[at : at + 2] = [spreads[at] + spreads[at + 1]]
    assert spreads[0] == replace(whole, first=first)
    assert spreads[0].hashes == whole.hashes
