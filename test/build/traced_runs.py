"""Traces that tests record or write, the runs of them, and their comparison field by field."""

from __future__ import annotations

import gc
import gzip
import json
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
import torch
from build.models import Mlp
from build.places import TRACES
from build.trace_files import session, trace_event, write
from build.warnings import sentences
from torch import Tensor, nn
from torch.profiler import record_function

import torchprof
from torchprof.run.measures import Cost
from torchprof.run.run import Run
from torchprof.run.timeline import Memory
from torchprof.run.words import OTHER, Frame

A100 = TRACES / "a100_ddp_train_rank0_of_2.json.gz"
MI250 = TRACES / "mi250_toy_train_rocm62.json.gz"
NEEDS_TRACES = pytest.mark.skipif(not TRACES.is_dir(), reason="the folder with traces is missing")
HAS_LIST_SHAPES = hasattr(torch._C._autograd._KinetoEvent, "structured_input_shapes")  # not in torch 2.4
X = torch.rand(3, 4)


def comparable_frames(frames: Iterable[Frame]) -> tuple[Frame, ...]:
    """The frames. If a live run does not have the shapes of lists of tensors, these shapes are unknown."""
    if HAS_LIST_SHAPES:
        return tuple(frames)
    return tuple(
        frame
        if frame.signature is None
        else frame._replace(
            signature=frame.signature._replace(
                shapes=tuple(
                    None if dtype == "TensorList" else shape
                    for shape, dtype in zip(frame.signature.shapes, frame.signature.dtypes)
                )
            )
        )
        for frame in frames
    )


def path_or_number(run: Run, layer: int) -> Any:
    return run.layers[layer].path if layer >= 0 else layer


def rows_of(run: Run) -> dict[Any, tuple[int, Cost]]:
    """The rows, without the time in which nothing ran: a session of torch.profiler is longer in its trace."""
    rows: dict[Any, tuple[int, Cost]] = {}
    for row in run.rows:
        if row.layer is None and row.selected and not row.frames and not row.calls and row.phase == OTHER:
            row = row._replace(cost=replace(row.cost, cpu_ns=0))
            if not row.cost:
                continue
        within = tuple(
            (path_or_number(run, around.layer), around.phase, comparable_frames(around.frames)) for around in row.within
        )
        path = row.layer.path if row.layer else None
        key = path, row.selected, row.phase, within, comparable_frames(row.frames), row.device, row.rank
        calls, cost = rows.get(key, (0, Cost()))
        rows[key] = calls + row.calls, cost + row.cost
    assert len(rows) >= len(run.rows) - 1 or not HAS_LIST_SHAPES
    return rows


def samples_of(run: Run) -> dict[Any, Any]:
    again = ("ordinary_ns", "bfloat16_ns", "float32_ns")  # computed after a live recording
    kept = {key: spread for key, spread in run.samples.items() if key.measure not in again}
    return {(path_or_number(run, key.layer), *key[1:]): spread for key, spread in kept.items()}


def memory_of(run: Run) -> list[Memory]:
    """Without values that only the process has: the memory before the recording, and statistics of allocators."""
    return [replace(memory, before=None, allocator=()) for memory in run.memory]


def layers_of(run: Run) -> list[Any]:
    """Without values that no trace has: shapes of calls, mode, and what optimizers updated."""
    of_calls: dict[str, Any] = {"input_shapes": (), "output_shapes": (), "output_bytes": None, "same_shapes": None}
    noted = "training input_number grad_calls updated_params noted_calls repeated_calls longer_calls grad_inputs"
    of_training: dict[str, Any] = dict.fromkeys([*noted.split(), "optimizer_steps", "used_gradients"])
    return [replace(layer, **of_calls, **of_training) for layer in run.layers]


def warnings_of(run: Run) -> list[str]:
    """Without the cost of labels, and whether a slow first call had other shapes: only the process has these; and
    without ranges that cross, as some of the compiler do: only the reader of a trace counts them."""
    of_one = ("It is in the times of layers.", "the rest of their time counts in what is around both.")
    warnings = [warning for warning in sentences(run) if not warning.endswith(of_one)]
    return [re.sub(r"^(The first recorded call of .* on average)\. .*", r"\1", warning) for warning in warnings]


def assert_same(live: Run, read: Run, *, with_model: bool = True) -> None:
    """Everything that both runs can have is equal: rows, samples, memory, steps, layers."""
    assert rows_of(read) == rows_of(live)
    assert samples_of(read) == samples_of(live)
    assert read.device_times == live.device_times
    for name in ("rank", "device", "requested", "measured", "cycles", "steps", "busy_ns", "flags"):
        assert getattr(read.meta, name) == getattr(live.meta, name), name
    if with_model:
        assert layers_of(read) == layers_of(live)
        assert memory_of(read) == memory_of(live)
        assert read.meta.model == live.meta.model
        assert read.meta.paths == live.meta.paths
        assert warnings_of(read) == warnings_of(live)


def settle(step: Callable[[], Any]) -> Callable[[], Any]:
    """The step. Its first run does more than later ones; and all garbage is freed before a recording begins."""
    step()
    gc.collect()
    return step


def annotated(model: Any, step: Callable[[], Any], path: Path, **options: Any) -> Run:
    """The live run of a step under torch.profiler; its trace is written to ``path``."""
    options = {"record_shapes": True, "profile_memory": True, **options}
    with torchprof.annotate(model), torch.profiler.profile(**options) as theirs:
        step()
    theirs.export_chrome_trace(str(path))
    return torchprof.from_profiler(theirs, model)


def training(model: nn.Module, *inputs: Any) -> Callable[[], None]:
    def step() -> None:
        out = model(*inputs)
        (out if isinstance(out, Tensor) else out[0]).sum().backward()
        model.zero_grad()

    return step


def events_in(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = trace_in(path)["traceEvents"]
    return found


def trace_in(path: Path) -> dict[str, Any]:
    """The content of the file, with exact numbers."""
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    found: dict[str, Any] = json.loads(data, parse_float=Decimal)
    return found


def two_steps(left_over: int, rank: int = 0) -> dict[str, Any]:
    """Two steps of 100 us with one kernel of 8 us each, and one kernel of 2 us without its launch.

    ``left_over``: the number of kernels of 3 us that were launched before the recording, and run in the first step on
    two streams.
    """
    events = []
    for number in (0, 1):
        start, launch = 100 * number, 50 + number
        events += [
            trace_event("user_annotation", f"ProfilerStep#{number + 1}", start, 100),
            trace_event("user_annotation", "forward", start + 5, 50),
            trace_event("cpu_op", "aten::mm", start + 10, 20, External_id=2 + number),
            trace_event("cuda_runtime", "cudaLaunchKernel", start + 12, 5, correlation=launch, External_id=2 + number),
            trace_event(
                "kernel", "gemm", start + 60, 8, External_id=2 + number, correlation=launch, device=0, stream=7
            ),
        ]
    events += [
        trace_event("kernel", "old", 2 + 4 * number, 3, correlation=20 + number, device=0, stream=7 + number % 2)
        for number in range(left_over)
    ]
    events.append(trace_event("kernel", "lost", 150, 2, correlation=77, device=0, stream=7))
    return {"traceEvents": events, "distributedInfo": {"rank": rank, "world_size": 2}}


def with_modules(model: nn.Module, step: Callable[[], Any], path: Path) -> Path:
    """A trace with the events of modules, and without labels."""
    with torch.profiler.profile(with_stack=True, record_shapes=True) as theirs, record_function("## step ##"):
        step()
    theirs.export_chrome_trace(str(path))
    return path


def with_ranges(path: Path) -> Path:
    model = Mlp()
    with torch.profiler.profile() as theirs:
        with record_function("## forward ##"):
            y = model(X)
        with record_function("## backward ##"):
            y.sum().backward()
    theirs.export_chrome_trace(str(path))
    return path


def names_of(run: Run) -> list[str]:
    return [layer.name for layer in run.layers]


def of_two_ranks(folder: Path) -> list[Path]:
    """One layer with one kernel, on each of two ranks; rank 1 takes three times as long for everything."""
    files = []
    for rank, times in enumerate((1, 3)):
        events = [
            session(0.5, 250 * times),
            trace_event("user_annotation", "layer", 1, 100 * times),
            trace_event("cpu_op", "aten::mm", 2, 50 * times, External_id=5),
            trace_event("kernel", "gemm", 60, 40 * times, External_id=5, correlation=9, device=0, stream=7),
        ]
        ranks = {"distributedInfo": {"backend": "nccl", "rank": rank, "world_size": 2}}
        files.append(write(folder / f"rank{rank}.json", {**ranks, "traceEvents": events}))
    return files
