"""Reference recordings: runs of a GPU with their traces, and what an independent count says of them.

A folder of each has ``trace.json.gz``, ``run.json.gz`` and ``counts.json``. They are made on a machine with a GPU, and
read everywhere.
"""

from __future__ import annotations

import gzip
import json
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from build.machine import Machine, kernels, whole
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from examples.large_models import Llama, ResNet50
from torchprof import Run, from_trace, load
from torchprof.attribute.event_names import MEMORY
from torchprof.run.words import BACKWARD, FORWARD

TRACE, RUN, COUNTS = "trace.json.gz", "run.json.gz", "counts.json"


class Subject(NamedTuple):
    """A model and a step. ``eager``: whether each operator is called by Python, so that its FLOPs are known."""

    model: nn.Module
    step: Callable[[], Any]
    options: dict[str, Any]
    eager: bool = True


def resnet50_training(machine: Machine) -> Subject:
    batch, size = (16, 224) if machine.is_gpu else (2, 32)
    model = ResNet50().to(machine.device)
    images = torch.rand(batch, 3, size, size, device=machine.device)
    labels = torch.randint(0, 1000, (batch,), device=machine.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()

    return Subject(model, step, {"profile_memory": True})


def llama(machine: Machine) -> Llama:
    model = Llama() if machine.is_gpu else Llama(100, 32, 2, 4, 2, 48)
    return model.to(machine.device)


def llama_training(machine: Machine) -> Subject:
    model = llama(machine)
    tokens = torch.randint(0, 100, (4, 512) if machine.is_gpu else (2, 8), device=machine.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast(machine.device.type, torch.bfloat16):
            scores = model(tokens)
        nn.functional.cross_entropy(scores.float().flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()

    return Subject(model, step, {"profile_memory": True})


def decoding(machine: Machine) -> tuple[Llama, Callable[[], Tensor]]:
    """A Llama, and the step that makes one more token for a batch of one."""
    model = llama(machine).eval()
    caches = model.empty_caches(1, 256)
    place = torch.tensor([100], device=machine.device)
    token = torch.randint(0, 100, (1, 1), device=machine.device)

    def step() -> Tensor:
        with torch.no_grad():
            return model(token, caches, place)

    return model, step


def llama_decoding(machine: Machine) -> Subject:
    model, step = decoding(machine)
    return Subject(model, step, {})


def llama_decoding_as_a_graph(machine: Machine) -> Subject:
    model, step = decoding(machine)
    if not machine.is_gpu:
        return Subject(model, step, {})
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return Subject(model, graph.replay, {}, eager=False)


def llama_decoding_compiled(machine: Machine) -> Subject:
    model, _ = decoding(machine)
    caches, place = model.empty_caches(1, 256), torch.tensor([100], device=machine.device)
    token = torch.randint(0, 100, (1, 1), device=machine.device)
    fast = torch.compile(model)

    def step() -> None:
        with torch.no_grad():
            fast(token, caches, place)

    return Subject(fast, step, {"compile_layers": True}, eager=False)


SUBJECTS = (resnet50_training, llama_training, llama_decoding, llama_decoding_as_a_graph, llama_decoding_compiled)


def record(subject: Subject, machine: Machine, folder: Path) -> None:
    """Write the trace, the run and the counts of one step."""
    folder.mkdir(parents=True, exist_ok=True)
    schedule = torch.profiler.schedule(wait=3, warmup=1, active=1, repeat=1)
    traced: list[list[tuple[str, int]]] = []

    def keep(prof: Any) -> None:
        prof.export_chrome_trace(folder / TRACE)
        traced.append(machine.work(prof))

    with machine.profile(
        subject.model, with_flops=True, schedule=schedule, on_trace_ready=keep, **subject.options
    ) as prof:
        for _ in range(5):
            subject.step()
            machine.wait()
            prof.step()
    prof.run.export(folder / RUN)
    by_name: dict[str, list[int]] = {}
    for name, ns in traced[0]:
        calls, sum_ns = by_name.get(name, (0, 0))
        by_name[name] = [calls + 1, sum_ns + ns]
    counts = {
        "device": torch.cuda.get_device_name() if machine.is_gpu else "cpu",
        "torch": torch.__version__,
        "eager": subject.eager,
        "python": platform.python_version(),
        "ns": sum(ns for _, ns in traced[0]),
        "work": by_name if machine.is_gpu else {},
        "flops": counted_by_torch(subject) if subject.eager and machine.is_gpu else None,
    }
    (folder / COUNTS).write_text(json.dumps(counts, indent=1) + "\n", encoding="utf-8")


def counted_by_torch(subject: Subject) -> int:
    """All FLOPs of a step: convolutions, matrix products and attention, forward and backward, by torch's counter."""
    with FlopCounterMode(display=False) as counter:
        subject.step()
    return counter.get_total_flops()


def check(folder: Path) -> Run:
    """Assert that the run and the trace say the same, and what torch counted. Returns the run."""
    counts = json.loads((folder / COUNTS).read_text(encoding="utf-8"))
    run, traced = load(folder / RUN), from_trace(folder / TRACE)
    on_gpu = counts["device"] != "cpu"
    assert dict(run.meta.versions)["torch"] == counts["torch"]
    if on_gpu:
        assert whole(run).device_ns == whole(traced).device_ns == counts["ns"]
        calls = {name: calls for name, (calls, _) in counts["work"].items()}
        assert kernels(run) == kernels(traced) == calls
    if counts["flops"] is not None:
        assert 2 * whole(run).macs == counts["flops"]
    for memory in (*run.memory, *traced.memory):
        if memory.device != "cpu":
            assert memory.peak_bytes == peak_of(folder / TRACE, int(memory.device.partition(":")[2]))
    if not counts["eager"]:  # a trace names no layers of compiled code and of graphs
        return run
    layers = {node.layer.path for node in run.tree().walk() if whole_time(node) > 0}
    for phase in (FORWARD, BACKWARD):
        ours = {node.layer.path: node for node in run.tree(phase).walk() if node.layer.path in layers}
        theirs = {node.layer.path: node for node in traced.tree(phase).walk()}
        for path, node in ours.items():
            there = theirs.get(path)
            assert there is not None or not node.self.device_ns, (phase, path)
            if there is not None and on_gpu:
                assert there.self.device_ns == node.self.device_ns, (phase, path)
            if there is not None and phase == FORWARD:
                assert there.calls == node.calls, (phase, path)
    return run


def peak_of(trace: Path, device: int) -> int:
    """The most memory of a device above that at the start, as torch's allocator says it in each event of a trace."""
    events = [
        event
        for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
        if event["name"] == MEMORY and event["args"]["Device Type"] != 0 and event["args"]["Device Id"] == device
    ]
    first = min(events, key=lambda event: float(event["ts"]))["args"]
    start: int = first["Total Allocated"] - first["Bytes"]
    return max(event["args"]["Total Allocated"] for event in events) - start


def whole_time(node: Any) -> int:
    return node.self.cpu_ns + node.self.device_ns


@contextmanager
def skipping_without_compiler() -> Iterator[None]:
    """Skip where torch.compile finds no compiler."""
    try:
        yield
    except Exception as error:
        if "compiler" in str(error).lower() or "triton" in str(error).lower():
            pytest.skip(f"torch.compile does not work here: {str(error).splitlines()[0]}")
        raise
