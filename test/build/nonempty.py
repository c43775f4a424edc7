"""Values of which there must be some: a loop of asserts over none would pass."""

from collections.abc import Iterable
from typing import TypeVar

Value = TypeVar("Value")


def at_least_one(values: Iterable[Value]) -> list[Value]:
    """The values as a list. Raises if there are none."""
    found = list(values)
    assert found, "there is nothing to check"
    return found
