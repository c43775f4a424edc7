"""What all tests share."""

import gc
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

import torchprof.record.cpu_time


@pytest.hookimpl(tryfirst=True)  # before those that -m leaves out are left out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that open a page are marked ``browser``."""
    for item in items:
        if "chromium" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.browser)


@pytest.fixture(scope="module", autouse=True)
def _frozen() -> Iterator[None]:
    """On entry, Profile looks through all objects for profilers in warm-up: spare it those of pytest and torch."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="session", autouse=True)
def _never_busy() -> Iterator[None]:
    """Where tests run on a busy machine, each report would say so."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torchprof.record.cpu_time, "_SCHEDSTAT", Path("nowhere"))
        yield


@pytest.fixture(scope="session", autouse=True)
def _ctrl_c_is_not_ignored() -> Iterator[None]:
    """Whoever runs the tests in the background of a shell ignores Ctrl-C, and so would they, and what they start."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
