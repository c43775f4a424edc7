"""Ranges that are open on a thread."""

from typing import NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from torchprof.attribute.events import OpenRanges


class _Range(NamedTuple):
    start_ns: int
    end_ns: int
    thread: int = 0


def test_ranges_are_closed_from_the_inside_when_they_have_ended() -> None:
    closed: list[_Range] = []
    ranges: OpenRanges[_Range] = OpenRanges(lambda open_ranges: closed.append(open_ranges.pop()))
    outer, inner = _Range(0, 10), _Range(2, 8)
    ranges.at(0, 0).append(outer)
    ranges.at(0, 2).append(inner)
    assert ranges.at(0, 7) == [outer, inner]
    assert ranges.at(0, 8) == [outer]  # the end is no part of a range
    assert (ranges.at(0, 10), closed) == ([], [inner, outer])


def test_each_thread_has_its_own_ranges_and_close_all_ends_those_of_all() -> None:
    closed: list[_Range] = []
    ranges: OpenRanges[_Range] = OpenRanges(lambda open_ranges: closed.append(open_ranges.pop()))
    for one in (_Range(0, 9, 1), _Range(1, 9, 2), _Range(2, 5, 1)):
        ranges.at(one.thread, one.start_ns).append(one)
    assert (len(ranges.at(1, 3)), len(ranges.at(2, 3)), len(ranges.at(3, 3))) == (2, 1, 0)
    ranges.close_all()
    assert closed == [_Range(2, 5, 1), _Range(0, 9, 1), _Range(1, 9, 2)]


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 10), st.integers(0, 1)), max_size=12))
def test_what_is_open_is_what_began_before_and_ends_after(drawn: list[tuple[int, int, int]]) -> None:
    ranges: OpenRanges[_Range] = OpenRanges()
    begun: list[_Range] = []
    for start, ns, thread in sorted(drawn):
        around = ranges.at(thread, start)
        assert around == [one for one in begun if one.thread == thread and one.end_ns > start]
        end = min([start + ns, *(one.end_ns for one in around)])
        around.append(_Range(start, end, thread))
        begun.append(_Range(start, end, thread))
