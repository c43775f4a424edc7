"""Kernels, copies and sets: all of them, each to the ns, each in the layer that launched it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from build.machine import Machine, kernels, on_gpu, whole
from build.models import Layers
from build.nonempty import at_least_one
from build.torchs_list import torchs_list
from torch import Tensor, nn
from torch.autograd import DeviceType
from torch.nn import functional as F  # noqa: N812
from torch.nn.attention import SDPBackend, sdpa_kernel

from examples.large_models import Llama
from torchprof.attribute.event_names import OF_THE_PROFILER, OVERHEAD
from torchprof.attribute.events import PREFIX
from torchprof.run.words import BACKWARD, FORWARD, FrameKind, is_runtime_call

WAITS = {"cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize"}


def convolutions(device: torch.device) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 32, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32 * 28 * 28, 10)
    ).to(device)


def training_step(model: nn.Module, x: Tensor) -> Callable[[], None]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6, momentum=0.9)

    def step() -> None:
        optimizer.zero_grad()
        model(x).float().sum().backward()
        optimizer.step()

    return step


def calls_in(prof: Any, path: tuple[str, ...], phase: str = FORWARD) -> dict[str, int]:
    """How often each operator and call of the runtime was called in a layer."""
    return {op.name: op.calls for op in prof.run.ops(phase).get(path, ())}


# Sums


def test_all_work_of_a_training_step_is_counted(machine: Machine, figure: Callable[..., None]) -> None:
    model, x = convolutions(machine.device), torch.rand(4, 3, 32, 32, device=machine.device)
    prof = machine.recorded(model, training_step(model, x))
    figure("device time of a small training step", machine.adds_up(prof), unit="ns")
    run = prof.run
    nodes = list(run.tree().walk())
    inside = sum(machine.ns(node.self) for node in nodes)
    outside = sum(machine.ns(run.no_layer(phase)) for phase in run.phases())
    assert inside + outside + machine.ns(run.left_over) == machine.ns(whole(run))


def test_spans_of_annotations_are_no_work(machine: Machine) -> None:
    model, x = convolutions(machine.device), torch.rand(4, 3, 32, 32, device=machine.device)

    def step() -> None:
        with torch.profiler.record_function("mine"):
            model(x).sum().backward()

    prof = machine.recorded(model, step)
    machine.adds_up(prof)
    assert not [name for name in kernels(prof.run) if name == "mine" or name.startswith(PREFIX)]


def test_each_layer_with_work_has_time_forward_and_backward(machine: Machine) -> None:
    model, x = convolutions(machine.device), torch.rand(4, 3, 32, 32, device=machine.device)
    prof = machine.recorded(model, training_step(model, x))
    for phase in (FORWARD, BACKWARD):
        busy = [node.self.device_ns > 0 for node in prof.run.tree(phase).children]
        assert busy == [machine.is_gpu and at != 4 for at in range(6)]  # Flatten launches nothing
        assert prof.run.tree(phase).self.device_ns == 0


@on_gpu
def test_the_time_of_a_layer_is_that_of_its_events_in_torchs_list(machine: Machine) -> None:
    model, x = convolutions(machine.device), torch.rand(4, 3, 32, 32, device=machine.device)
    prof = machine.recorded(model, lambda: model(x).sum().backward())
    raw = prof.raw()
    assert raw is not None
    for node in at_least_one(prof.run.tree(FORWARD).children):
        (events,) = raw[1][node.layer.path]
        # The runtime's calls have IDs of their own. Torch gives them the kernels of the ops with equal IDs, once more.
        # Overhead has the ID of the op around it: then each of the two gets all kernels twice.
        on_cpu = [event for event in events if event.device_type == DeviceType.CPU and not is_runtime_call(event.name)]
        times = Counter(event.id for event in on_cpu)
        ops = [event for event in on_cpu if event.name not in OVERHEAD]
        theirs = sum(event.self_device_time_total / times[event.id] for event in ops)
        assert node.self.device_ns / 1000 == pytest.approx(theirs, abs=0.01)


@on_gpu
def test_work_of_the_profiler_is_in_no_layer(machine: Machine, figure: Callable[..., None]) -> None:
    """CUPTI allocates memory at the first launches of a session: inside an operator of the first layer."""
    model, x = convolutions(machine.device), torch.rand(4, 3, 32, 32, device=machine.device)
    prof = machine.recorded(model, training_step(model, x))
    machine.adds_up(prof)
    rows = [row for row in prof.run.rows if any(frame.name in OF_THE_PROFILER for frame in row.frames)]
    for row in at_least_one(rows):
        figure(row.frames[0].name, row.cost.cpu_ns, unit="ns")
        assert row.layer is None and row.frames[0].kind == FrameKind.PROFILER
        assert not row.cost.device_ns
    for row in prof.run.rows:
        if row.frames and row.frames[-1].kind == FrameKind.KERNEL:
            assert not any(frame.name in OVERHEAD for frame in row.frames)


def test_the_profiler_of_torch_and_ours_see_the_same_kernels(machine: Machine) -> None:
    """Recorded one after the other: by name and number. Times differ from run to run."""
    model, x = convolutions(machine.device), torch.rand(4, 3, 32, 32, device=machine.device)
    step = training_step(model, x)
    prof = machine.recorded(model, step)
    with torch.profiler.profile() as theirs:
        step()
        machine.wait()
    expected: dict[str, int] = {}
    for event in theirs.events():
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation:
            expected[event.name] = expected.get(event.name, 0) + 1
    assert kernels(prof.run) == expected


def test_nothing_waits_for_the_device_inside_layers(machine: Machine) -> None:
    model, x = convolutions(machine.device), torch.rand(4, 3, 32, 32, device=machine.device)
    prof = machine.recorded(model, lambda: model(x))
    of_layers = {path: ops for path, ops in prof.run.ops(FORWARD).items() if path != ("(outside)",)}
    for ops in at_least_one(of_layers.values()):
        assert not WAITS & {op.name for op in ops}


def test_many_recordings_in_one_process_add_up(machine: Machine) -> None:
    """A schedule with 20 cycles: each is complete, although work of a step may still run when the next begins."""
    model, x = convolutions(machine.device), torch.rand(4, 3, 32, 32, device=machine.device)
    step, sums = training_step(model, x), []
    schedule = torch.profiler.schedule(wait=1, warmup=1, active=1)
    with machine.profile(model, schedule=schedule, on_trace_ready=lambda prof: sums.append(machine.adds_up(prof))) as p:
        for _ in range(60):
            step()
            p.step()
    assert len(sums) == 20
    assert machine.working_ns(p.run) == pytest.approx(sum(sums), rel=1e-6)


# Streams and copies


class OnTwoStreams(nn.Module):
    """Two layers that run at the same time, each on a stream of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.here, self.there = nn.Linear(2048, 2048), nn.Linear(2048, 2048)
        self.side = torch.cuda.Stream()

    def forward(self, x: Tensor) -> Tensor:
        main = torch.cuda.current_stream()
        self.side.wait_stream(main)
        with torch.cuda.stream(self.side):
            there = self.there(x)
        here = self.here(x)
        main.wait_stream(self.side)
        return here + there


@on_gpu
def test_work_on_several_streams_belongs_to_its_layers(machine: Machine, figure: Callable[..., None]) -> None:
    model, x = OnTwoStreams().to(machine.device), torch.rand(4096, 2048, device=machine.device)
    prof = machine.recorded(model, lambda: model(x).sum().backward())
    machine.adds_up(prof)
    assert [node.self.device_ns > 0 for node in prof.run.tree().children] == [True, True]
    (time,) = prof.run.device_times
    assert len(time.streams) >= 2
    assert sum(one.kernels for one in time.streams) == len(machine.work(prof))
    assert max(one.busy_ns for one in time.streams) <= time.busy_ns <= sum(one.busy_ns for one in time.streams)
    assert time.busy_ns <= time.span_ns
    figure("two streams: busy against the sum of both", time.busy_ns / sum(one.busy_ns for one in time.streams))


class Loads(Layers):
    """Copies its input to the device and its result back."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x.to(self.fc.weight.device, non_blocking=True))
        return y.cpu()


@on_gpu
@pytest.mark.parametrize("pinned", [True, False])
def test_copies_belong_to_the_layer_that_makes_them(machine: Machine, pinned: bool) -> None:
    model, x = Loads(fc=nn.Linear(1024, 1024)).to(machine.device), torch.rand(1024, 1024)
    x = x.pin_memory() if pinned else x
    with torch.no_grad():
        prof = machine.recorded(model, lambda: model(x))
    machine.adds_up(prof)
    own = [row for row in prof.run.rows if row.layer is not None and row.layer.path == ("Loads",)]
    names = " ".join(row.frames[-1].name for row in own if row.frames and row.frames[-1].kind == "kernel")
    assert "HtoD" in names and "DtoH" in names
    assert ("Pinned -> Device" in names) == pinned
    assert "cudaStreamSynchronize" in calls_in(prof, ("Loads",))  # .cpu() waits


class Waits(Layers):
    """A layer that reads a number from the device, as a metric or a mask often does."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x)
        return y * y.abs().max().item()


def test_a_wait_inside_a_layer_is_in_this_layer(machine: Machine) -> None:
    model, x = Waits(fc=nn.Linear(512, 512)).to(machine.device), torch.rand(512, 512, device=machine.device)
    with torch.no_grad():
        prof = machine.recorded(model, lambda: model(x))
    machine.adds_up(prof)
    calls = calls_in(prof, ("Waits",))
    assert calls["aten::item"] == 1
    assert bool(WAITS & calls.keys()) == machine.is_gpu
    assert not WAITS & calls_in(prof, ("Waits", "fc")).keys()


# Types


@contextmanager
def tf32(enabled: bool) -> Iterator[None]:
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("high" if enabled else "highest")
    torch.backends.cudnn.allow_tf32 = enabled
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]


TYPES: dict[str, dict[str, Any]] = {
    "float32": {},
    "tf32": {"tf32": True},
    "float16": {"dtype": torch.float16},
    "bfloat16": {"dtype": torch.bfloat16},
    "autocast": {"autocast": True},
    "channels last": {"dtype": torch.bfloat16, "channels_last": True},
}


@pytest.mark.parametrize("name", TYPES)
def test_types_and_layouts_change_no_count(name: str, machine: Machine, figure: Callable[..., None]) -> None:
    """The kernels are others; the sums stay complete, and the multiply-accumulates are those counted by hand."""
    kind = TYPES[name]
    dtype = kind.get("dtype", torch.float32)
    layout = torch.channels_last if kind.get("channels_last") else torch.contiguous_format
    model = convolutions(machine.device).to(dtype=dtype, memory_format=layout)
    x = torch.rand(4, 3, 32, 32, device=machine.device).to(dtype=dtype, memory_format=layout)
    step = training_step(model, x)

    def run() -> None:
        autocast = torch.autocast(machine.device.type, torch.bfloat16) if kind.get("autocast") else nullcontext()
        with ExitStack() as stack:
            stack.enter_context(tf32(kind.get("tf32", False)))
            stack.enter_context(autocast)
            step()

    prof = machine.recorded(model, run, with_flops=True)
    figure(f"device time with {name}", machine.adds_up(prof), unit="ns")
    first, second, linear = 30 * 30 * 16 * 3 * 9, 28 * 28 * 32 * 16 * 9, 32 * 28 * 28 * 10
    counted = [node.self.macs for node in prof.run.tree(FORWARD).children]
    assert counted == [4 * first, 0, 4 * second, 0, 0, 4 * linear]
    counted = [node.self.macs for node in prof.run.tree(BACKWARD).children]
    assert counted == [4 * first, 0, 2 * 4 * second, 0, 0, 2 * 4 * linear]


class Fp8(nn.Module):
    """A matrix product of 8-bit floats, as quantized training makes it."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("weight", torch.rand(size, size).to(torch.float8_e4m3fn))
        self.register_buffer("one", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return torch._scaled_mm(x, self.weight.t(), self.one, self.one, out_dtype=torch.bfloat16)


@on_gpu
def test_products_of_8_bit_floats_are_counted(machine: Machine) -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no 8-bit floats")
    model, x = Fp8(1024).to(machine.device), torch.rand(512, 1024, device=machine.device).to(torch.float8_e4m3fn)
    prof = machine.recorded(model, lambda: model(x), with_flops=True)
    machine.adds_up(prof)
    assert prof.run.tree().self.macs == 512 * 1024 * 1024


# Attention

BACKENDS = {name: getattr(SDPBackend, name) for name in SDPBackend.__members__ if name not in ("ERROR", "OVERRIDEABLE")}


class Attends(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v)


@pytest.mark.parametrize("name", BACKENDS)
def test_every_backend_of_attention_is_counted(name: str, machine: Machine, figure: Callable[..., None]) -> None:
    model = Attends()
    batch, heads, length, size = 2, 8, 256, 64
    dtype = torch.bfloat16 if machine.is_gpu else torch.float32
    q, k, v = (torch.rand(batch, heads, length, size, device=machine.device, dtype=dtype) for _ in range(3))
    for tensor in (q, k, v):
        tensor.requires_grad_()

    def step() -> None:
        with sdpa_kernel(BACKENDS[name]):
            model(q, k, v).sum().backward()

    try:
        step()
    except RuntimeError as error:
        pytest.skip(f"this device has no such attention: {str(error).splitlines()[0]}")
    prof = machine.recorded(model, step, with_flops=True)
    figure(f"attention: {name}", machine.adds_up(prof), unit="ns")
    figure(f"attention: kernels of {name}", kernels(prof.run))
    product = batch * heads * length * length * size
    assert prof.run.tree(FORWARD).total.macs == 2 * product
    # Fused backward makes the product of queries and keys once more.
    assert prof.run.tree(BACKWARD).total.macs == (4 if name == "MATH" else 5) * product


def test_a_transformer_adds_up(machine: Machine, figure: Callable[..., None]) -> None:
    sizes = {} if machine.is_gpu else {"vocabulary": 100, "width": 64, "layers": 2, "hidden": 96}
    model = Llama(**sizes).to(machine.device)
    batch, length = 2, 256 if machine.is_gpu else 16
    tokens = torch.randint(0, 100, (batch, length), device=machine.device)
    prof = machine.recorded(model, lambda: model(tokens).float().sum().backward(), with_flops=True)
    figure("device time of a small Llama, forward and backward", machine.adds_up(prof), unit="ns")
    assert prof.run.tree(FORWARD).total.macs == model.macs(batch, length, length)


@on_gpu
def test_torchs_own_list_has_the_same_sum(machine: Machine) -> None:
    """Not only the raw events: also what ``prof.key_averages()`` of torch would show."""
    model, x = convolutions(machine.device), torch.rand(4, 3, 32, 32, device=machine.device)
    prof = machine.recorded(model, lambda: model(x).sum().backward())
    theirs = sum(
        event.time_range.elapsed_us()
        for event in torchs_list(prof)
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation and not event.name.startswith(PREFIX)
    )
    assert machine.ns(whole(prof.run)) / 1e3 == pytest.approx(theirs, abs=0.01)
