"""Signals at any moment, concurrent threads, clocks that are set: nothing is lost without a warning."""

from __future__ import annotations

import pkgutil
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from build.models import Mlp
from build.snapshots import snapshot
from build.warnings import sentences
from torch.autograd import profiler as torch_profiler

import torchprof
from torchprof import Profile, TorchprofError
from torchprof.profile import cycle as cycle_module
from torchprof.profile.program import Program
from torchprof.profile.signals import DelayedSignals, uninterrupted
from torchprof.record import session, this_process
from torchprof.record.plan import Plan
from torchprof.record.python_lines import Sampler

PACKAGE = str(Path(torchprof.__file__).parent)
UNDEFENDED = (
    uninterrupted.__code__,
    this_process._note_freed.__code__,
    Profile.__exit__.__code__,
    Program.__exit__.__code__,
    torchprof.annotate.__wrapped__.__code__,
)  # type: ignore[attr-defined]
"""Nobody can do anything about a signal that comes before the first line of these, or in a callback of Python's."""


def interrupted(work: Callable[[], Any], at: int, where: str = PACKAGE) -> tuple[int, bool]:
    """Call a function, and send SIGINT after a number of lines of torchprof, or of one of its files. Returns how many
    lines ran, and whether KeyboardInterrupt was raised."""
    lines = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal lines
        if not frame.f_code.co_filename.startswith(where) or frame.f_code in UNDEFENDED:
            return None
        if event == "line":
            lines += 1
            if lines == at:
                signal.raise_signal(signal.SIGINT)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    except KeyboardInterrupt:
        return lines, True
    finally:
        sys.settrace(before)
    return lines, False


def failing(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which raises an unexpected error after its work."""

    def fails(*args: Any, **options: Any) -> Any:
        function(*args, **options)
        raise LookupError

    return fails


# Delayed signals


def test_delayed_signals_are_delivered_at_the_end_in_order() -> None:
    came: list[str] = []
    signal.signal(signal.SIGALRM, lambda *_: came.append("alarm"))
    with pytest.raises(KeyboardInterrupt), DelayedSignals():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGALRM)
        signal.raise_signal(signal.SIGALRM)
        assert came == []
    assert came == ["alarm"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_ctrl_c_is_not_delayed() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), DelayedSignals():
        signal.raise_signal(signal.SIGINT)
        done.append(1)
        signal.raise_signal(signal.SIGINT)
        done.append(2)
    assert done == [1]


def test_a_handler_that_is_set_inside_the_block_stays() -> None:
    def handler(*_: Any) -> None:
        pass

    with DelayedSignals(), DelayedSignals():
        signal.signal(signal.SIGINT, handler)
    assert signal.getsignal(signal.SIGINT) is handler


def test_signals_that_are_ignored_or_end_the_process_are_not_delayed() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with DelayedSignals():
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        signal.raise_signal(signal.SIGINT)


# SIGTERM


def test_a_forked_process_dies_by_sigterm_as_in_plain_python() -> None:
    """Terminated is raised only in the process that entered the block: another may catch all errors."""
    code = """if True:
        import os, signal, time
        from torchprof.profile.signals import SigtermAsError
        ready, tell = os.pipe()
        with SigtermAsError():
            child = os.fork()
            if child == 0:
                try:
                    os.write(tell, b"1")
                    time.sleep(60)
                except BaseException:
                    os._exit(7)
                os._exit(8)
            os.read(ready, 1)
            os.kill(child, signal.SIGTERM)
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert (result.stdout, result.stderr) == (f"{-signal.SIGTERM}\n", "")


# At any line


def profile(model: Mlp) -> Any:
    return Profile(model, profile_memory=True)


def in_cycles(model: Mlp) -> Any:
    return Profile(model, profile_memory=True, schedule=torch.profiler.schedule(wait=0, warmup=1, active=1))


def in_warmup(model: Mlp) -> Any:
    return Profile(model, warmup=1)


def program(_: Mlp) -> Any:
    return Program(profile_memory=True)


@pytest.mark.filterwarnings("ignore:Profiler won't be using warmup")
@pytest.mark.parametrize("block_of", [profile, in_cycles, in_warmup, program, torchprof.annotate])
def test_after_ctrl_c_at_any_line_everything_is_restored(block_of: Callable[[Mlp], Any]) -> None:
    """While the block is entered, left, and in a call inside it. Afterwards another block can be entered, and what the
    interrupted block has recorded can be read."""
    model, x = Mlp(), torch.rand(2, 4)
    model(x).sum().backward()
    model.zero_grad()
    block: Any = None

    def work() -> None:
        nonlocal block
        block = block_of(model)
        with block:
            for _ in range(2):
                model(x).sum().backward()
                model.zero_grad()
                if block_of is in_cycles:
                    block.step()

    work()
    before = snapshot(model)
    lines, _ = interrupted(work, at=-1)
    assert lines > 300
    for at in range(1, lines, lines // 40):
        ran, came = interrupted(work, at)
        model.zero_grad()
        assert came or ran < at, at
        assert snapshot(model) == before, at
        assert Profile._open is None
        assert not session.is_profiled()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if isinstance(block, Profile) and block.exited:
            assert len(block.run.layers) == 4
    work()


@pytest.mark.parametrize("file", ["plan.py", "labels.py"])
def test_after_ctrl_c_while_a_program_meets_a_new_model_its_forwards_are_restored(file: str) -> None:
    model, x = Mlp(), torch.rand(2, 4)

    def work() -> None:
        with Program():
            model(x)

    work()
    before = snapshot(model)
    where = str(Path(PACKAGE, "record", file))
    lines, _ = interrupted(work, at=-1, where=where)
    for at in range(1, lines, max(lines // 60, 1)):
        _, came = interrupted(work, at, where)
        assert came
        assert snapshot(model) == before, at


def test_after_ctrl_c_while_a_run_is_read_it_can_be_read_again() -> None:
    model, x = Mlp(), torch.rand(2, 4)
    wanted = {"Mlp": 0, "Mlp.fc1": 4 * 8 * 2, "Mlp.act": 0, "Mlp.fc2": 8 * 2 * 2}

    def record() -> Profile:
        with Profile(model, with_flops=True, record_shapes=True) as prof:
            model(x)
        return prof

    lines, _ = interrupted(lambda: record().run, at=-1)
    for at in range(1, lines, lines // 40):
        prof = record()
        _, came = interrupted(lambda: prof.run, at)  # noqa: B023
        assert {node.layer.name: node.self.macs for node in prof.run.tree().walk()} == wanted, (at, came)
        lists = prof.trace_profile_events
        assert sorted(map(len, lists.values())) == [1, 1, 1]


@pytest.mark.parametrize("lost", [True, False])
def test_after_an_error_while_torch_stops_its_session_it_is_stopped(
    monkeypatch: pytest.MonkeyPatch, lost: bool
) -> None:
    """If the session was not stopped, it is stopped again, and nothing is lost. If it was, torch's events are lost,
    and the run has a warning."""
    model, x = Mlp(), torch.rand(2, 4)
    disable = torch_profiler._disable_profiler
    errors = [KeyboardInterrupt]

    def interrupted_once() -> Any:
        if errors and not lost:
            raise errors.pop()
        results = disable()
        if errors:
            raise errors.pop()
        return results

    monkeypatch.setattr(torch_profiler, "_disable_profiler", interrupted_once)
    prof = Profile(model)
    with pytest.raises(KeyboardInterrupt), prof:
        model(x)
    assert not session.is_profiled()
    assert prof.run.tree("forward").calls == (0 if lost else 1)
    assert [("is lost" in warning) for warning in sentences(prof.run)] == ([True] if lost else [])
    with Profile(model) as following:
        model(x)
    assert following.run.tree("forward").calls == 1


@pytest.mark.parametrize("gives_way", [False, True])
def test_ctrl_c_while_a_program_ends_early_loses_nothing(monkeypatch: pytest.MonkeyPatch, gives_way: bool) -> None:
    """After ``max_calls``, or when the program starts a profiler, the run is complete and everything is off."""
    model, x = Mlp(), torch.rand(2, 4)
    real = cycle_module.assemble

    def interrupted_at_first(*args: Any, **options: Any) -> Any:
        monkeypatch.setattr(cycle_module, "assemble", real)
        signal.raise_signal(signal.SIGINT)
        return real(*args, **options)

    start = torch_profiler.profile._start_trace
    monkeypatch.setattr(cycle_module, "assemble", interrupted_at_first)
    block = Program(max_calls=None if gives_way else 1)
    with pytest.raises(KeyboardInterrupt), block:
        model(x)
        if gives_way:
            torch_profiler.profile().__enter__()
        model(x)
    assert torch_profiler.profile._start_trace is start
    assert not session.is_profiled()
    assert block.run.tree("forward").calls == 1


@pytest.mark.parametrize(
    "name",
    [
        "profile.Labels.detach",
        "cycle.this_job",
        "profile.Plan.layers",
        "profile.Plan.changes",
        "cycle.StackWarning.off",
        "profile.label_ns",
    ],
)
def test_after_an_error_at_the_end_of_the_block_torchs_session_is_stopped(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """For any source of the error, torch's session is stopped, and the next block can be entered."""
    model, x = Mlp(), torch.rand(2, 4)
    before = snapshot(model)
    prof = Profile(model, schedule=lambda _: torch.profiler.ProfilerAction.RECORD)
    where = f"torchprof.profile.{name}"
    with pytest.raises(LookupError), prof:
        model(x)
        monkeypatch.setattr(where, failing(pkgutil.resolve_name(where)))
    monkeypatch.undo()
    assert prof.exited and Profile._open is None
    assert not session.is_profiled()
    assert snapshot(model) == before
    with Profile(model) as following:
        model(x)
    assert following.run.tree("forward").calls == 1


def test_an_error_while_the_layers_are_read_loses_nothing(monkeypatch: pytest.MonkeyPatch, model: Mlp) -> None:
    """All that was recorded is in the run."""
    with pytest.raises(LookupError), Profile(model) as prof:
        model(torch.rand(2, 4))
        monkeypatch.setattr(Plan, "layers", failing(Plan.layers))
    monkeypatch.undo()
    assert [node.calls for node in prof.run.tree().walk()] == [1, 1, 1, 1]


def test_an_interrupted_entry_leaves_no_warning_in_torch_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    callbacks = pytest.importorskip("torch._dynamo.callback").callback_handler
    before = list(callbacks.start_callbacks)
    monkeypatch.setattr(cycle_module.StackWarning, "on", failing(cycle_module.StackWarning.on))
    with pytest.raises(LookupError), Profile(Mlp(), with_stack=True):
        pass
    assert callbacks.start_callbacks == before


def test_signals_are_not_delayed_during_on_trace_ready() -> None:
    """In a step and at the end of the block: the handler may take long, and Ctrl-C must end it."""
    model, x = Mlp(), torch.rand(2, 4)
    came: list[bool] = []
    calls: list[int] = []

    def ready(prof: Profile) -> None:
        signal.raise_signal(signal.SIGALRM)
        came.append(True)
        calls.append(prof.run.tree("forward").calls)

    signal.signal(signal.SIGALRM, lambda *_: came.append(False))
    record = torch.profiler.ProfilerAction.RECORD_AND_SAVE
    with Profile(model, schedule=lambda _: record, on_trace_ready=ready) as prof:
        model(x)
        prof.step()
        model(x)
        model(x)
    assert came == [False, True] * 2
    assert calls == [1, 2]
    assert prof.run.tree("forward").calls == 3


def test_after_an_error_while_a_program_ends_everything_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    start = torch_profiler.profile._start_trace
    monkeypatch.setattr(Sampler, "stop", failing(Sampler.stop))
    with pytest.raises(LookupError), Program():
        Mlp()(torch.rand(2, 4))
    assert torch_profiler.profile._start_trace is start
    assert not session.is_profiled()


def test_after_ctrl_c_while_torchs_lists_are_read_they_are_read_again(
    monkeypatch: pytest.MonkeyPatch, model: Mlp
) -> None:
    """Incomplete lists are not kept as the result."""
    with Profile(model) as prof:
        model(torch.rand(2, 4))
    assert prof._session is not None
    monkeypatch.setattr(type(prof._session), "event_lists", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        prof.raw()
    monkeypatch.undo()
    assert len(prof.trace_profile_events) == 3


# Concurrent threads


def test_if_threads_enter_at_the_same_time_one_succeeds() -> None:
    """Each time, one thread enters its block, the others get an error, and the recording is correct."""
    models = [Mlp() for _ in range(3)]
    before = [snapshot(model) for model in models]
    barrier = threading.Barrier(len(models))
    found: list[Any] = []

    def work(model: Mlp) -> None:
        for _ in range(15):
            barrier.wait(60)
            try:
                with Profile(model) as prof:
                    model(torch.rand(2, 4))
                found.append([node.calls for node in prof.run.tree().walk()])
            except TorchprofError as error:
                found.append("Another" in str(error))

    threads = [threading.Thread(target=work, args=(model,)) for model in models]
    sys.setswitchinterval(1e-5)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    recorded, refused = found.count([1, 1, 1, 1]), found.count(True)
    assert recorded + refused == len(found) == 45
    assert recorded >= 15
    assert [snapshot(model) for model in models] == before


# Clocks


@pytest.mark.parametrize(
    ("jump_s", "said"), [(0, None), (3600, r"forward by (\d+\.\d+)s"), (-3600, r"back by (\d+\.\d+)s"), (0.0001, None)]
)
def test_a_clock_that_is_set_gives_a_warning_and_does_not_change_our_times(
    monkeypatch: pytest.MonkeyPatch, jump_s: float, said: str | None
) -> None:
    model, jump_ns = torch.nn.Linear(256, 256, bias=False), 0
    model(torch.rand(8, 256)).sum().backward()
    real = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: real() + jump_ns)
    with Profile(model, profile_memory=True) as prof:
        jump_ns = round(jump_s * 1e9)
        model.zero_grad()
        model(torch.rand(8, 256)).sum().backward()
        time.sleep(0.005)
    run = prof.run
    warnings = [warning for warning in sentences(run) if "clock" in warning]
    assert len(warnings) == (said is not None)
    for warning in warnings:
        (seconds,) = re.findall(said or "", warning)
        assert float(seconds) == pytest.approx(3600, abs=1)  # the two clocks are not read at once
    assert 5_000_000 < run.meta.wall_ns < 60_000_000_000
    (memory,) = run.memory
    assert memory.peak_bytes == 2 * 8 * 256 * 4 + 2 * 4 and 0 < memory.peak_ns < run.meta.wall_ns
