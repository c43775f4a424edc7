"""Samples of where a thread is: the right line, all of the time, bounded memory, nothing left behind."""

from __future__ import annotations

import linecache
import os
import pickle
import subprocess
import sys
import sysconfig
import textwrap
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from build.places import ROOT

import torchprof
from torchprof.record import python_lines
from torchprof.record.python_lines import Sample, Sampler
from torchprof.run.words import SourceLine

HERE = str(Path(__file__).relative_to(ROOT))
CALLED = "sum" if sys.version_info >= (3, 11) else ""  # before, the source of a call is unknown
OURS = str(Path(torchprof.__file__).parent / "any.py")
STDLIB = str(Path(sysconfig.get_path("stdlib"), "any.py"))
INSTALLED = str(Path(sysconfig.get_path("purelib"), "numpy", "any.py"))


# Which line it is.


@contextmanager
def standing(*files: str) -> Iterator[int]:
    """A thread that stands in functions of these files, outermost first, each at line 2 of its file."""
    ready, leave = threading.Lock(), threading.Lock()
    ready.acquire()
    leave.acquire()
    call: Callable[[], object] = lambda: None  # noqa: E731
    for number, file in reversed(list(enumerate(files))):
        # Locks have no Python frames: once the thread is ready, it stands at this line and nowhere else.
        body = "ready.release(), leave.acquire(timeout=60)" if number == len(files) - 1 else "call()"
        names = {"ready": ready, "leave": leave, "call": call}
        exec(compile(f"def function{number}():\n    {body}", file, "exec"), names)
        call = names[f"function{number}"]  # type: ignore[assignment]
    thread = threading.Thread(target=call)
    thread.start()
    try:
        assert ready.acquire(timeout=60)
        assert thread.ident is not None
        yield thread.ident
    finally:
        leave.release()
        thread.join(60)


@contextmanager
def sampling(thread_ident: int, interval_s: float = 0.005) -> Iterator[Sampler]:
    sampler = Sampler(thread_ident, interval_s)
    sampler.start()
    try:
        yield sampler
    finally:
        sampler.stop()


def wait_for(sampler: Sampler, count: int) -> None:
    until = time.monotonic() + 60
    while sum(1 for _ in sampler.samples()) < count:
        assert time.monotonic() < until
        time.sleep(0.001)


def lines(sampler: Sampler) -> set[SourceLine]:
    return {sample.line for sample in sampler.samples()}


@pytest.mark.parametrize(
    "line",
    [
        SourceLine("a.py", 7, "log"),
        SourceLine("C:/my code/a.py", 7, "<module>", "torch.save"),
        SourceLine("a\nb.py", 7, "f", "os.path.join", is_hook=True),
        SourceLine("<string>", 1, "f", is_hook=True),
        SourceLine("", 0, "as another program wrote it"),
    ],
)
def test_a_line_is_read_from_its_text(line: SourceLine) -> None:
    for copied in (SourceLine.of_file(str(line)), pickle.loads(pickle.dumps(line))):
        assert copied == line and vars(copied) == vars(line)
    assert (line.at == line) is (line.calls == "")


COMMAND = str(Path(sys.executable).with_name("torchprof"))
FRAMES = {
    "the user's innermost": (["{cwd}/a.py", "{cwd}/b.py"], ("b.py", "function1")),
    "below a folder": (["{cwd}/deep/in/a.py"], ("deep/in/a.py", "function0")),
    "elsewhere": (["/some/where/else/a.py"], ("else/a.py", "function0")),
    "beside, with a name that begins alike": (["{cwd}2/a.py"], ("{name}2/a.py", "function0")),
    "a relative name": (["a.py"], ("a.py", "function0")),
    "the standard library": (["{cwd}/a.py", STDLIB], ("a.py", "function0", "function1")),
    "an installed package": (["{cwd}/a.py", INSTALLED, STDLIB], ("a.py", "function0", "function1")),
    "installed for the user": (
        ["{cwd}/a.py", "/home/me/.local/lib/site-packages/a.py"],
        ("a.py", "function0", "function1"),
    ),
    "of the system": (["{cwd}/a.py", "/usr/lib/python3/dist-packages/a.py"], ("a.py", "function0", "function1")),
    "a command": (["{cwd}/a.py", COMMAND], ("a.py", "function0", "function1")),
    "no file": (["{cwd}/a.py", "<string>"], ("a.py", "function0")),
    "a checkout of torch": (["{cwd}/a.py", "/src/torch/nn/module.py"], ("a.py", "function0")),
    "beside torch": (["{cwd}/a.py", "/src/torchvision/a.py"], ("torchvision/a.py", "function1")),
    "ours": (["{cwd}/a.py", OURS], ("a.py", "function0")),
    "ours between": (["{cwd}/a.py", OURS, STDLIB], ("a.py", "function0")),
    "ours under the user's": (["{cwd}/a.py", OURS, "{cwd}/b.py"], ("b.py", "function2")),
    "none is the user's": ([STDLIB, INSTALLED], ("numpy/any.py", "function1")),
    "none is the user's, ours is innermost": ([INSTALLED, "<string>", OURS], ("<string>", "function1")),
}


@pytest.mark.parametrize("name", FRAMES)
def test_the_innermost_line_of_the_user(here: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(__file__="/src/torch/__init__.py"))  # type: ignore[misc]
    files, (file, function, *called) = FRAMES[name]
    with standing(*(one.format(cwd=here) for one in files)) as thread, sampling(thread, 0.001) as sampler:
        monkeypatch.chdir("/")  # names stay as they were at the start
        wait_for(sampler, 2)
    assert lines(sampler) == {SourceLine(file.format(name=here.name), 2, function, *called)}


# All of the time.


def test_a_line_whose_c_code_holds_the_gil_gets_all_its_time() -> None:
    began = time.perf_counter_ns()
    with sampling(threading.get_ident(), 0.001) as sampler:
        wait_for(sampler, 1)
        sum(range(30_000_000))
        line = sys._getframe().f_lineno - 1
        wait_for(sampler, 10)
    found = [sample for sample in sampler.samples() if sample.line.line == line]
    most, intervals = max(sample.intervals for sample in found), sum(sample.intervals for sample in found)
    assert intervals > 10 and most > intervals / 2, "one sample when it let go, for all that were missed"
    assert all(began <= sample.at_ns <= time.perf_counter_ns() for sample in found)
    assert found[-1].line == SourceLine(HERE, line, sys._getframe().f_code.co_name, CALLED)


class Clock:
    """A clock that only moves when the sampler sleeps: by what it asked for, and by how much too long it slept."""

    def __init__(self, oversleeps: list[int]) -> None:
        self.now = 0
        self.oversleeps = iter(oversleeps)
        self.asked: list[float] = []

    def monotonic_ns(self) -> int:
        return self.now

    def perf_counter_ns(self) -> int:
        return 10**18 + self.now

    def acquire(self, timeout: float) -> bool:
        oversleep = next(self.oversleeps, None)
        if oversleep is None:
            return True
        self.asked.append(timeout)
        self.now += round(timeout * 1e9) + oversleep
        return False


def sampled(
    monkeypatch: pytest.MonkeyPatch, oversleeps: list[int], interval_s: float = 0.005
) -> tuple[list[Sample], Clock]:
    """The first sample comes after a whole interval."""
    clock = Clock(oversleeps)
    with standing("/x/a.py") as thread:
        sampler = Sampler(thread, interval_s)
        monkeypatch.setattr(python_lines, "time", clock)
        monkeypatch.setattr(python_lines, "_GOLDEN", 0)
        sampler._watch(clock)  # type: ignore[arg-type]
    return list(sampler.samples()), clock


def test_a_late_sample_stands_for_the_missed_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    ms = 1_000_000
    samples, clock = sampled(monkeypatch, [0, 1 * ms, 5 * ms, 0, 52 * ms, 0])
    assert [sample.intervals for sample in samples] == [1, 1, 2, 1, 11, 1]
    assert [sample.at_ns - 10**18 for sample in samples] == [one * ms for one in (5, 11, 20, 25, 82, 85)]
    assert sum(sample.intervals for sample in samples) * 5 * ms == clock.now
    assert clock.asked == pytest.approx([0.005, 0.005, 0.004, 0.005, 0.005, 0.003])  # back in step after each


def test_at_the_limit_half_of_the_samples_are_dropped_and_no_time_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(python_lines, "_MOST_SAMPLES", 8)
    samples, clock = sampled(monkeypatch, [0] * 7 + [10_000_000] + [0] * 3)
    # Eight samples, the last of them late by two, of which four are kept; from then on one in 10 ms.
    assert [sample.intervals for sample in samples] == [2, 2, 2, 4, 2, 2, 2]
    assert clock.asked == pytest.approx([0.005] * 8 + [0.01] * 3)
    assert sum(sample.intervals for sample in samples) * 5_000_000 == clock.now
    samples, clock = sampled(monkeypatch, [0] * 100)
    assert len(samples) < 8
    assert sum(sample.intervals for sample in samples) * 5_000_000 == clock.now
    assert [sample.at_ns for sample in samples] == sorted(sample.at_ns for sample in samples)


def test_short_intervals_become_longer_so_that_a_long_recording_has_few_samples(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(python_lines, "_MOST_OFTEN", 8)
    samples, clock = sampled(monkeypatch, [0] * 40, 0.001)
    # Eight at 1 ms, then four of 2 ms and four more; then one in 4 ms, which is not too often.
    assert clock.asked == pytest.approx([0.001] * 8 + [0.002] * 4 + [0.004] * 28)
    assert [sample.intervals for sample in samples] == [4] * 32
    assert sum(sample.intervals for sample in samples) * 1_000_000 == clock.now


def test_of_many_short_recordings_each_part_is_sampled_equally_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of recordings of 1 ms, sampled every 5 ms, one in five has a sample, at any time from its begin."""
    at_ms = []
    with standing("/x/a.py") as thread:
        for _ in range(500):
            clock = Clock([0])
            with monkeypatch.context() as patch:
                patch.setattr(python_lines, "time", clock)
                Sampler(thread, 0.005)._watch(clock)  # type: ignore[arg-type]
            at_ms.append(clock.now / 1e6)
    parts = Counter(int(at) for at in at_ms if at < 5)
    assert [*parts.values()] == pytest.approx([100] * 5, abs=2)


def test_a_million_samples_of_twenty_bytes_are_kept() -> None:
    sampler = Sampler(0)
    assert sum(column.itemsize for column in (sampler._times, sampler._places, sampler._intervals)) == 20
    assert python_lines._MOST_SAMPLES == 1_000_000


# Nothing left behind.


def test_started_again_it_goes_on_and_stopped_twice_it_stays_stopped() -> None:
    threads = threading.active_count()
    sampler = Sampler(threading.get_ident(), 0.001)
    sampler.stop()
    assert list(sampler.samples()) == []
    sampler.start()
    sampler.start()
    assert threading.active_count() == threads + 1
    wait_for(sampler, 2)
    sampler.stop()
    sampler.stop()
    assert threading.active_count() == threads
    first = list(sampler.samples())
    sampler.start()
    wait_for(sampler, len(first) + 2)
    sampler.stop()
    assert list(sampler.samples())[: len(first)] == first


def test_a_thread_that_does_not_exist_gives_no_samples() -> None:
    with sampling(0, 0.001) as sampler, sampling(threading.get_ident(), 0.001) as other:
        wait_for(other, 5)
    assert list(sampler.samples()) == []


def test_no_frame_is_kept_alive() -> None:
    class Big:
        pass

    import weakref

    def work() -> weakref.ref[Big]:
        big = Big()
        wait_for(sampler, 2)
        return weakref.ref(big)

    with sampling(threading.get_ident(), 0.001) as sampler:
        assert work()() is None


def run(code: str) -> str:
    before = """
        import os, sys, threading, time
        while_forking = []
        os.register_at_fork(before=lambda: while_forking.append(threading.active_count()))
        from torchprof.record.python_lines import Sampler
        def count(): return sum(1 for _ in sampler.samples())
        def wait(more):
            seen = count()
            while count() < seen + more: time.sleep(0.001)
        sampler = Sampler(threading.get_ident(), 0.001)
        sampler.start()
        wait(2)
    """
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(before) + textwrap.dedent(code)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (result.returncode, result.stderr) == (0, "")
    return result.stdout


def test_a_process_ends_while_a_sampler_is_running() -> None:
    last = "import atexit; sampler.stop(); atexit.register(lambda: print(threading.active_count())); sampler.start()"
    assert run(last + "; print('end', threading.active_count())") == "end 2\n1\n"


def test_a_sampler_that_was_stopped_is_not_kept() -> None:
    assert run("import weakref; sampler.stop(); kept = weakref.ref(sampler); del sampler; print(kept())") == "None\n"


def test_it_pauses_during_a_fork_and_does_not_run_in_the_child() -> None:
    out = run(
        """
        pid = os.fork()
        if not pid:
            seen = count()
            if not os.fork():
                os._exit(0)
            os.wait()
            print("child", threading.active_count(), count() == seen, flush=True)
            sampler.start()
            wait(2)
            sampler.stop()
            print("again", threading.active_count(), flush=True)
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        wait(2)
        print("parent", threading.active_count(), while_forking)
        """
    )
    assert out == "child 1 True\nagain 1\nparent 2 [1]\n"


def test_importing_it_imports_no_torch() -> None:
    assert run("print('torch' in sys.modules)") == "False\n"


def test_frames_are_read_while_no_garbage_is_collected() -> None:
    """In Python 3.11 a collection may begin where a frame is read; here it lets the thread go on, and the memory of its
    frames then has numbers."""
    out = run(
        """
        import gc
        sampler.stop()
        locks = stands, leave, is_elsewhere, end = [threading.Lock() for _ in range(4)]
        for lock in locks:
            lock.acquire()
        def deep(calls):
            if calls:
                return deep(calls - 1)
            stands.release(), leave.acquire(timeout=30)
        names = {"is_elsewhere": is_elsewhere, "end": end}
        numbers = "".join(f"    number{each} = {each}\\n" for each in range(500))
        exec("def elsewhere():\\n" + numbers + "    is_elsewhere.release(), end.acquire(timeout=30)", names)
        thread = threading.Thread(target=lambda: (deep(20), names["elsewhere"]()))
        thread.start()
        assert stands.acquire(timeout=30)
        def let_the_thread_go_on(phase, info):
            gc.callbacks.clear()
            leave.release()
            assert is_elsewhere.acquire(timeout=30)
        class Frames(dict):
            def get(self, ident):
                found = dict.get(self, ident)
                gc.collect()
                gc.set_threshold(1)
                gc.callbacks.append(let_the_thread_go_on)
                return found
        frames_now = sys._current_frames
        sys._current_frames = lambda: Frames(frames_now())
        other = Sampler(thread.ident)
        other._owners.update({"<string>": "library", threading.__file__: "library"})  # to find out makes objects
        other._add_sample(1)
        gc.set_threshold(0)
        leave.release(), end.release()
        thread.join(30)
        print(gc.isenabled(), *(sample.line.function for sample in other.samples()))
        """
    )
    assert out == "True deep\n"


def test_the_interval_of_the_gil_is_as_before_afterwards() -> None:
    before = sys.getswitchinterval()
    with sampling(threading.get_ident()):
        assert sys.getswitchinterval() <= 0.0006
    assert sys.getswitchinterval() == before


def test_an_interval_that_the_script_sets_stays() -> None:
    with sampling(threading.get_ident()):
        sys.setswitchinterval(0.003)
    assert sys.getswitchinterval() == pytest.approx(0.003)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="the source of a call is unknown")
@pytest.mark.parametrize(
    ("call", "name"),
    [
        ("model(x).sum().backward()", "backward"),
        ("(a + b).sum(dim=(0, 1))", "sum"),
        ("batches[0].to('cpu')", "to"),
        ("torch.linalg.inv(f(a))", "torch.linalg.inv"),
        ("log(model(x), y)", "log"),
        ("with torch.get('fork').Pool(2) as pool: pass", "Pool"),
    ],
)
def test_of_a_chain_of_calls_the_last_is_named(call: str, name: str) -> None:
    code = compile(f"def f(model, x, a, b, y, torch, log, batches):\n    {call}\n", "chain.py", "exec")
    function = next(each for each in code.co_consts if hasattr(each, "co_code"))
    linecache.cache["chain.py"] = (0, None, ["def f():\n", f"    {call}\n"], "chain.py")
    names = [python_lines._called_name(function, offset) for offset in range(0, len(function.co_code), 2)]
    assert [found for found in names if found][-1] == name
