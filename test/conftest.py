"""Fixtures and hooks that all tests share."""

import gc
import re
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from build.browser import chromium, look, open_tab, speedscope  # noqa: F401  # fixtures
from build.golden import golden  # noqa: F401  # fixture
from hypothesis import settings

import torchprof.measure.recording

settings.register_profile("without a time limit", deadline=None)  # a busy machine may stall a single example
settings.load_profile("without a time limit")

SLOW = "browser or compiler or jobs"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--renew", action="store_true", help="write the files of test/golden anew, for a diff to review")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """``make test`` and ``make test-slow`` import only files with tests of theirs: that is much of their start."""
    if config.option.markexpr.removeprefix("not ").strip("()") != SLOW or not collection_path.match("test_*.py"):
        return None
    text = collection_path.read_text(encoding="utf-8")
    if config.option.markexpr == SLOW:
        words = ("open_tab", "look: Callable", "chromium", "mark.compiler", "mark.jobs")
        return None if any(word in text for word in words) else True
    return True if re.search(r"^pytestmark = \[?\s*pytest\.mark\.(compiler|jobs)\b", text, re.MULTILINE) else None


@pytest.hookimpl(tryfirst=True)  # before -m deselects tests
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that open a page as ``browser``."""
    for item in items:
        if "chromium" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.browser)


@pytest.fixture(scope="module", autouse=True)
def _frozen() -> None:
    """On entry, Profile searches all objects for profilers in warm-up. Exclude those of pytest and torch.

    They stay frozen: else each module would have the garbage collector search all of them again, for half a second."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _never_busy() -> Iterator[None]:
    """On a busy machine, each report would have a warning about that."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torchprof.measure.recording, "_SCHEDSTAT", Path("nowhere"))
        yield


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    """Some tests set handlers of signals; after KeyboardInterrupt, Lightning leaves SIGINT ignored."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGALRM, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="session", autouse=True)
def _ctrl_c_is_not_ignored() -> Iterator[None]:
    """In the background of a shell, SIGINT is ignored: restore its handler for the tests and their child processes."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def garbage_is_not_collected() -> Iterator[None]:
    """What an earlier test left to the garbage collector would be freed, and rightly counted, in this test's layers;
    and what goes without it is freed by its references alone."""
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def world_of_one() -> Iterator[None]:
    """A process group of this process alone."""
    from torch import distributed  # the process that distributes the tests does not need it

    if not (distributed.is_available() and distributed.is_gloo_available()):
        pytest.skip("this torch has no gloo")
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.fixture
def dynamo() -> Iterator[Callable[[], int]]:
    """No compiled code of other tests, and none left to them; tells how many graphs torch.compile has made."""
    import torch._dynamo as _dynamo

    _dynamo.reset()
    _dynamo.utils.counters.clear()
    yield lambda: _dynamo.utils.counters["stats"]["unique_graphs"]
    _dynamo.reset()
    _dynamo.utils.counters.clear()


@pytest.fixture(autouse=True)
def _limits_of_python() -> Iterator[None]:
    """torch's compiler raises the limit of recursion, for all tests after it; some tests set it, or how often threads
    take turns."""
    recursion, interval = sys.getrecursionlimit(), sys.getswitchinterval()
    yield
    sys.setrecursionlimit(recursion)
    sys.setswitchinterval(interval)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The empty folder that the test runs in."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def reloaded(tmp_path: Path) -> Callable[[Any], Any]:
    """Saves a run or a comparison: what the file has."""

    def reload(saved: Any, **options: Any) -> Any:
        saved.save(tmp_path / "run.json", **options)
        return torchprof.load(tmp_path / "run.json")

    return reload


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """Runs a command, which must end with ``code``: what it printed is in ``.out`` and ``.err``. ``more``: words that
    may have blanks."""
    from torchprof.cli import main

    def run(command: str, *more: str, code: int = 0) -> Any:
        capsys.readouterr()
        assert main([*command.split(), *more]) == code
        return capsys.readouterr()

    return run


@pytest.fixture
def model() -> Iterator[Any]:
    """An ``Mlp`` that must be as it was when the test ends."""
    from build.models import Mlp  # it imports torch, which the process that distributes the tests does not need
    from build.snapshots import snapshot

    made = Mlp()
    before = snapshot(made)
    yield made
    assert snapshot(made) == before
