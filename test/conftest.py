"""What all tests share."""

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def _frozen() -> Iterator[None]:
    """On entry, Profile looks through all objects for profilers in warm-up: spare it those of pytest and torch."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
