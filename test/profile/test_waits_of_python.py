"""Calls of Python that wait for other threads or ranks, as a stopwatch around them sees it."""

from __future__ import annotations

import queue
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from build.models import Layers
from build.torchrun import torchrun
from torch import nn

import torchprof
from torchprof.advise import advise
from torchprof.run.words import OUTSIDE, WAITS_FOR_THREADS, FrameKind

MS = 1_000_000


class Threaded(Layers):
    """Two layers on two threads; ``waited_ns``: how long the forward waited for them, by a stopwatch."""

    def __init__(self) -> None:
        super().__init__(a=nn.Linear(64, 64), b=nn.Linear(64, 64), waited_ns=0)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs = []

        def job(layer: nn.Module) -> None:
            time.sleep(0.01)
            outputs.append(layer(inputs))

        threads = [threading.Thread(target=job, args=(layer,)) for layer in (self.a, self.b)]
        began = time.perf_counter_ns()
        for thread in threads:
            thread.start()  # which waits until the thread runs
        for thread in threads:
            thread.join()
        self.waited_ns += time.perf_counter_ns() - began
        return outputs[0] + outputs[1]


def waits_in(run: torchprof.Run, layer: int, name: str) -> tuple[int, int]:
    """The time and the number of waits of a layer itself."""
    rows = run.rows.summed(
        "layer",
        ("cpu_ns", "calls"),
        frames=lambda frames: bool(frames) and frames[-1].kind == FrameKind.WAIT and frames[-1].name == name,
    )
    return rows.get(layer, (0, 0))


def test_a_forward_waits_for_its_own_threads() -> None:
    model = Threaded()
    with torch.no_grad(), torchprof.Profile(model) as prof:
        for _ in range(3):
            model(torch.ones(4, 64))
    ns, calls = waits_in(prof.run, 0, WAITS_FOR_THREADS)
    assert calls >= 6 and 30 * MS <= ns <= model.waited_ns <= ns + 20 * MS
    [finding] = [finding for finding in advise(prof.run) if finding.rule == "waits_for_threads"]
    assert (finding.layer, finding.gain_ns) == ("Threaded", ns)
    assert not any(
        "between operators" in finding.finding or "larger batch" in finding.remedy for finding in advise(prof.run)
    )
    rows = {line.split("|")[0].strip("├─└ ").split(" ")[0]: line for line in str(prof).splitlines()}
    assert rows["a"].split("|")[1:] == rows["b"].split("|")[1:]
    assert [cell.strip() for cell in rows["a"].split("|")[1:]] == ["–", "–", "3"]


def test_queues_events_and_futures_are_waits_outside_of_layers() -> None:
    model, items, done = nn.Linear(4, 4), queue.Queue(), threading.Event()

    def later() -> None:
        time.sleep(0.02)
        items.put(1)
        time.sleep(0.02)
        done.set()

    with torchprof.Profile(model) as prof, ThreadPoolExecutor(1) as pool:
        model(torch.ones(4, 4))
        future = pool.submit(later)
        began = time.perf_counter_ns()
        items.get()
        done.wait()
        future.result()
        waited_ns = time.perf_counter_ns() - began
    ns, _ = waits_in(prof.run, OUTSIDE, WAITS_FOR_THREADS)
    assert 35 * MS <= waited_ns <= ns + 2 * MS
    assert "waiting for other threads" in str(prof.run)


def test_nothing_of_threading_is_left_changed() -> None:
    before = threading.Condition.wait, threading.Thread.join
    with torchprof.Profile(nn.Linear(2, 2)):
        assert (threading.Condition.wait, threading.Thread.join) != before
    assert (threading.Condition.wait, threading.Thread.join) == before


JOB = """
import time, torch, torchprof
import torch.distributed as dist
from torch import nn
from torchprof.advise import advise
from torchprof.run.words import FrameKind, WAITS_FOR_RANKS

dist.init_process_group("gloo")
rank, model, waited = dist.get_rank(), nn.Linear(8, 8), 0
with torchprof.Profile(model) as prof:
    for _ in range(3):
        model(torch.ones(4, 8))
        if rank == 0:
            time.sleep(0.03)
        began = time.perf_counter_ns()
        if rank == 0:
            dist.send(torch.ones(2), 1)
        else:
            dist.recv(torch.ones(2), 0)
        dist.barrier()
        waited += time.perf_counter_ns() - began
def waits(frames):
    return bool(frames) and frames[-1].kind == FrameKind.WAIT and frames[-1].name == WAITS_FOR_RANKS
ns = prof.run.rows.total("cpu_ns", frames=waits)
assert 0 < ns <= waited + 1_000_000, (ns, waited)
assert rank == 0 or ns > 60_000_000, ns
said = [finding.finding for finding in advise(prof.run)]
assert rank == 0 or not any("Python" in text or "nothing" in text for text in said), said
print("right")
dist.destroy_process_group()
"""


@pytest.mark.jobs
def test_receiving_and_a_barrier_are_waits_for_other_ranks(tmp_path: Path) -> None:
    job = torchrun(tmp_path, 2, JOB)
    assert job.code == 0 and all("right" in out for out in job.out), str(job)


def test_waits_of_a_loop_are_a_part_of_its_steps() -> None:
    model, items = nn.Linear(4, 4), queue.Queue[torch.Tensor]()

    def prepare() -> None:
        for _ in range(3):
            time.sleep(0.02)
            items.put(torch.ones(1, 4))

    with torchprof.Profile(model) as prof:
        thread, began = threading.Thread(target=prepare), time.perf_counter_ns()
        thread.start()  # which waits until the thread runs
        waited_ns = time.perf_counter_ns() - began
        for _ in range(3):
            began = time.perf_counter_ns()
            x = items.get()
            waited_ns += time.perf_counter_ns() - began
            model(x)
            prof.step()
    sums = {key.measure: spread.sum for key, spread in prof.run.samples.items() if key.layer == OUTSIDE}
    assert 50 * MS < sums["step_awaited_ns"] <= waited_ns
    assert sums["step_ns"] >= sums["step_awaited_ns"] + sums["step_gap_ns"]
    steps = prof.run.report("steps")
    assert "waiting for other threads or ranks | " in steps and "in no op  " in steps


@pytest.mark.skipif(
    not hasattr(torch._C._profiler, "_ExperimentalConfig"), reason="this torch records no other threads"
)
def test_where_torch_records_all_threads_their_layers_and_the_wait_have_times() -> None:
    """As the warning says; the stopwatch is around the threads."""
    model, inputs = Threaded(), torch.ones(4, 64)
    config = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    with torch.no_grad(), torchprof.annotate(model), torch.profiler.profile(experimental_config=config) as theirs:
        model(inputs)
    run = torchprof.from_profiler(theirs, model)
    ns, _ = waits_in(run, 0, WAITS_FOR_THREADS)
    assert 10 * MS <= ns <= model.waited_ns
    assert [run.rows.forward_calls(index) for index in range(3)] == [1, 1, 1]
    assert all(branch.total.cpu_ns > 0 for branch in run.tree().walk())
