"""Processor time: what a process used, how long a thread waited for a processor, and what a label costs."""

from __future__ import annotations

import time
from itertools import chain, repeat
from pathlib import Path

import pytest
import torch
from torch import nn

import torchprof
from torchprof import Profile
from torchprof.measure.recording import CpuTime
from torchprof.profile import cycle as calibration
from torchprof.run.run import Run

SCHEDSTAT = Path("/proc/thread-self/schedstat")


def at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> CpuTime:
    (tmp_path / "schedstat").write_text(text, encoding="ascii")
    monkeypatch.setattr(torchprof.measure.recording, "_SCHEDSTAT", tmp_path / "schedstat")
    return CpuTime.now()


def test_the_wait_for_a_processor_is_the_second_number(monkeypatch, tmp_path) -> None:
    before, now = (at(tmp_path, monkeypatch, text) for text in ("1000 200 3\n", "5000 950 9\n"))
    assert now.since(before).run_delay_ns == 750
    assert now.since(before).process_ns == now.process_ns - before.process_ns >= 0


@pytest.mark.parametrize("text", ["0 0 0\n", "", "no numbers", "1 2\n"])
def test_the_run_delay_is_unknown_on_a_system_without_statistics(monkeypatch, tmp_path, text) -> None:
    known, unknown = (at(tmp_path, monkeypatch, one) for one in ("1000 200 3\n", text))
    assert unknown.run_delay_ns is None
    assert unknown.since(known).run_delay_ns is None and known.since(unknown).run_delay_ns is None


def test_the_run_delay_of_another_thread_is_unknown() -> None:
    before = CpuTime(0, 10, thread=1)
    assert CpuTime(5, 30, thread=1).since(before).run_delay_ns == 20
    assert CpuTime(5, 30, thread=2).since(before) == CpuTime(5, None, 2)


def test_a_wait_after_the_end_of_the_recording_is_not_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread loses the processor while the second value is read."""
    delays = chain([0, 80_000_000], repeat(0))  # a second session measures what a label costs

    def read() -> int:
        delay = next(delays)
        time.sleep(delay / 1e9)
        return delay

    monkeypatch.setattr(torchprof.measure.recording, "_run_delay_ns", read)
    model = nn.Linear(2, 2)
    with Profile(model) as prof:
        model(torch.rand(1, 2))
    assert prof.run.meta.run_delay_ns == 0
    assert not any(warning.code == "machine_busy" for warning in prof.run.warnings)


def test_an_unknown_run_delay_stays_unknown() -> None:
    assert CpuTime(5, None, 1).without_delay_of(3) == CpuTime(5, None, 1)
    assert CpuTime(5, 10, 1).without_delay_of(3) == CpuTime(5, 7, 1)


@pytest.mark.skipif(not SCHEDSTAT.is_file(), reason="this system does not say it")
def test_a_real_recording(monkeypatch) -> None:
    monkeypatch.setattr(torchprof.measure.recording, "_SCHEDSTAT", SCHEDSTAT)
    model, x = nn.Linear(64, 64), torch.rand(64, 64)
    process = time.process_time_ns()
    with Profile(model) as prof:
        thread = time.thread_time_ns()
        while time.thread_time_ns() < thread + 20_000_000:
            model(x)
    process = time.process_time_ns() - process
    meta = prof.run.meta
    assert meta.process_cpu_ns is not None and 20_000_000 <= meta.process_cpu_ns <= process
    assert meta.run_delay_ns is not None and 0 <= meta.run_delay_ns <= meta.wall_ns
    assert "CPU time of the process: " in prof.run.report("summary")


def test_cycles_add_up_and_a_sum_with_an_unknown_value_is_unknown() -> None:
    from torchprof.run.meta import sum_if_known

    assert [sum_if_known(*pair) for pair in ((3, 4), (None, 4), (3, None))] == [7, None, None]


def test_a_trace_does_not_have_it(tmp_path) -> None:
    with Profile(model := nn.Linear(4, 4)) as prof:
        model(torch.rand(2, 4))
    prof.export_chrome_trace(tmp_path / "trace.json")
    read: Run = torchprof.from_trace(tmp_path / "trace.json", model)
    assert read.meta.process_cpu_ns is read.meta.run_delay_ns is None


# What a label costs


def test_the_shortest_of_several_blocks_is_what_a_label_costs(monkeypatch) -> None:
    """The machine interrupts all blocks but one of each kind: 20 bare calls take 40 us, labelled ones 110 us."""
    bare, labelled = ([9e-3] * calibration._BLOCKS for _ in range(2))
    bare[3], labelled[7] = 40e-6, 110e-6
    blocks = iter([bare, labelled])
    monkeypatch.setattr(calibration, "_calibrated", [])
    monkeypatch.setattr(calibration, "repeat", lambda call, repeat, number: next(blocks))
    assert calibration.label_ns() == pytest.approx(3_500)
    assert next(blocks, None) is None
    assert calibration.label_ns() == pytest.approx(3_500)  # once in a process


def test_it_calls_a_module_no_more_than_400_times(monkeypatch) -> None:
    calls = 0

    class Counted(nn.Identity):
        def forward(self, x: object) -> object:  # type: ignore[override]
            nonlocal calls
            calls += 1
            return x

    monkeypatch.setattr(calibration.nn, "Identity", Counted)
    monkeypatch.setattr(calibration, "_calibrated", [])
    assert calibration.label_ns() is not None
    assert calls == 2 * (calibration._BLOCKS * calibration._CALLS + 1) == 402
