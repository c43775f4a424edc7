"""Memory over time: peaks, live memory at the peaks, bytes saved for backward, and the report."""

from __future__ import annotations

import gc
import json
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import accumulate, groupby
from operator import itemgetter
from typing import Any
from weakref import ref

import pytest
import torch
from build.architectures import ARCHITECTURES
from build.events import ENGINE, label, node, op, step, walk_of
from build.events import memory as memory_event
from build.examples import examples
from build.hand_made import row
from build.hand_made import run_of as made_by_hand
from build.libraries import usable_transformers
from build.models import Checkpointed, Mlp, Raises
from build.texts import format_memory
from build.warnings import run_warnings
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import torchprof
from torchprof import Profile, Run, TorchprofError
from torchprof.attribute.event_columns import EventColumns
from torchprof.attribute.events import Event, Kind, Site
from torchprof.attribute.rule import Attribution
from torchprof.measure.assemble import attribution_of
from torchprof.measure.memory import Allocations
from torchprof.measure.memory_blocks import NOT_MEASURED, OTHERS, Freed, LiveMemory, add_frees, allocators_between
from torchprof.record.this_process import live_memory
from torchprof.run.file import json_of_run, run_of
from torchprof.run.layers import Layer
from torchprof.run.measures import SampleKey, Spread
from torchprof.run.timeline import KINDS, Held, Memory, Timeline
from torchprof.run.words import BACKWARD, FORWARD, OTHER, OUTSIDE, RECOMPUTE

ROWS, WIDTH = 2048, 16
BLOCK = ROWS * WIDTH * 4  # bytes of the output of one layer of a chain
WEIGHT = WIDTH * WIDTH * 4


class Chain(nn.Module):
    """Layers in sequence; each output has ``BLOCK`` bytes. With ``segments``, they are checkpointed in this number of
    groups."""

    def __init__(self, layers: int, segments: int = 0, use_reentrant: bool = False) -> None:
        super().__init__()
        size = layers // segments if segments else layers
        self.groups = nn.ModuleList(
            nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(size))) for _ in range(layers // size)
        )
        self.segments = segments
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        for group in self.groups:
            x = checkpoint(group, x, use_reentrant=self.use_reentrant) if self.segments else group(x)
        return x


def rows() -> Tensor:
    return torch.rand(ROWS, WIDTH)


def profiled(model: Any, work: Callable[[], Any], **options: Any) -> Profile:
    """A profile of some work, with memory and all its steps."""
    gc.collect()
    with Profile(model, profile_memory=True, with_timeline=True, **options) as prof:
        work()
    return prof


def cpu(run: Run) -> Memory:
    (memory,) = [memory for memory in run.memory if memory.device == "cpu"]
    return memory


def of_model(run: Run) -> dict[str, int]:
    """What the model and its optimizer had at the start on the CPU: the test process has other tensors, too."""
    return {kind: nbytes for kind, nbytes in cpu(run).before or () if kind not in OTHERS}


def peak(run: Run, layer: str, phase: str = FORWARD, measure: str = "peak_bytes") -> int:
    """The largest sample of a layer, by name."""
    index = [one.name for one in run.layers].index(layer)
    return run.samples[SampleKey(index, phase, 0, "cpu", measure)].max


def kept(run: Run) -> int:
    """The bytes that all forward calls saved for backward."""
    return sum(spread.sum for key, spread in run.samples.items() if key.measure == "kept_bytes")


def by_kind(memory: Memory) -> dict[str, int]:
    sums: Counter[str] = Counter()
    for held in memory.held:
        sums[held.kind] += held.nbytes
    return dict(sums)


Step = tuple[int, int, str, str, str]


def steps_of(run: Run) -> list[Step]:
    """The rows of the timeline: time, bytes, device, layer ("" for none) and kind ("?": unknown)."""
    timeline = run.timeline
    assert timeline is not None
    return [
        (
            time,
            nbytes,
            timeline.devices[device],
            run.layers[layer].name if layer >= 0 else "",
            KINDS[kind] if kind >= 0 else "?",
        )
        for time, nbytes, device, layer, _, kind in zip(*(timeline.columns[name] for name in Timeline.COLUMNS))
    ]


def made(run: Run, kind: str, layer: str | None = None) -> list[int]:
    """The sizes of the allocations of one kind, in the order of time."""
    return [size for _, size, _, where, of in steps_of(run) if size > 0 and of == kind and layer in (None, where)]


# Models whose peak is known by hand


def test_a_chain_in_training_keeps_every_activation() -> None:
    """n layers have n live outputs at the end of forward; the call of each layer adds its output."""
    model, x = Chain(8), rows()
    run = profiled(model, lambda: model(x)).run
    assert peak(run, "Chain") == 8 * BLOCK
    assert peak(run, "Chain.groups.0.3") == BLOCK
    assert cpu(run).peak_bytes == 8 * BLOCK
    assert by_kind(cpu(run)) == {"activations": 8 * BLOCK}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_chain_without_gradients_has_two_live_outputs(mode: Callable[[], AbstractContextManager[None]]) -> None:
    """The outputs of one layer and of the next; nothing is saved for backward."""
    model, x = Chain(8), rows()

    def work() -> None:
        with mode():
            model(x)

    run = profiled(model, work).run
    assert peak(run, "Chain") == cpu(run).peak_bytes == 2 * BLOCK
    assert kept(run) == 0


def test_freed_gradients_from_before_the_block_do_not_count() -> None:
    """The usual loop: the gradients that zero_grad frees were live at the start, and torch does not record these frees.
    1 MB of weights."""
    model = nn.Linear(512, 512, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.rand(1, 512)

    def step() -> None:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()

    step()
    peaks: list[int] = []
    with Profile(
        model,
        profile_memory=True,
        schedule=torch.profiler.schedule(wait=0, warmup=0, active=1, repeat=4),
        on_trace_ready=lambda prof: peaks.append(prof.run.memory[0].peak_bytes),
    ) as prof:
        for _ in range(4):
            step()
            prof.step()
    assert len(peaks) == 4
    assert all(0 <= peak < 2**16 for peak in peaks), "the new gradients take the room of the old ones"
    assert dict(prof.run.memory[0].before or ())["gradients"] == 2**20
    assert peak(prof.run, "Linear") == 512 * 4, "what was let go before the call is no room inside of it"
    model.zero_grad()
    with Profile(model, profile_memory=True) as prof:
        step()
    assert prof.run.memory[0].peak_bytes >= 2**20, "here they are new"


@pytest.mark.parametrize("cycles", [False, True])
def test_every_block_of_a_loop_has_the_same_memory(cycles: bool) -> None:
    """Each step makes one gradient and frees that of the step before, which an earlier profile may have recorded."""
    model, x = nn.Linear(256, 256, bias=False), torch.rand(8, 256)
    gradient, output, loss = 256 * 256 * 4, 8 * 256 * 4, 4
    runs: list[Run] = []

    def step() -> None:
        model.zero_grad()
        model(x).sum().backward()

    step()
    gc.collect()
    if cycles:
        with Profile(
            model,
            profile_memory=True,
            with_timeline=True,
            schedule=torch.profiler.schedule(wait=1, warmup=0, active=1, repeat=3),
            on_trace_ready=lambda prof: runs.append(prof.run),
        ) as prof:
            for _ in range(6):
                step()
                prof.step()
    else:
        runs = [profiled(model, step).run for _ in range(3)]
    for run in runs:
        sizes = [size for _, size, *_ in steps_of(run)]
        assert sum(sizes) == 0
        assert sizes.count(-gradient) == sizes.count(gradient) == 1
        # The gradient of the output is freed, and that of the loss is not, when the new gradient is there.
        assert cpu(run).peak_bytes == output + 2 * loss
        costs = [(row.layer is None, row.phase, row.cost) for row in run.rows]
        assert sum(cost.cpu_allocated for _, _, cost in costs) == sum(size for size in sizes if size > 0)
        assert sum(cost.cpu_freed for _, _, cost in costs) == -sum(size for size in sizes if size < 0)
        outside = sum(cost.cpu_freed for is_outside, phase, cost in costs if is_outside and phase == OTHER)
        assert outside >= gradient, "zero_grad is no layer's"

    """Its tensor is freed, but the storage has another owner."""
    model = nn.Linear(512, 512, bias=False)
    model(torch.rand(1, 512)).sum().backward()
    assert model.weight.grad is not None
    keeps = model.weight.grad.detach()
    prof = profiled(model, model.zero_grad)
    assert model.weight.grad is None and keeps.shape == (512, 512)
    assert steps_of(prof.run) == []


def test_the_storage_of_a_freed_view_stays() -> None:
    """Like the gradients in the buckets of DistributedDataParallel."""
    model = nn.Linear(512, 512, bias=False)
    bucket = torch.zeros(2**18 + 2**16)
    model.weight.grad = bucket[: 2**18].view(512, 512)
    with Profile(model, profile_memory=True) as prof:
        model.zero_grad()
        torch.empty(2**18)
    assert bucket.numel() and model.weight.grad is None
    assert prof.run.memory[0].peak_bytes == 2**20
    assert dict(prof.run.memory[0].before or ())["gradients"] == bucket.numel() * 4


def test_a_training_step_of_a_chain_has_one_more_live_output() -> None:
    """The first gradient of an activation is live together with all n activations, and in addition the weight
    gradients."""
    model, x = Chain(8), rows()
    run = profiled(model, lambda: model(x).sum().backward()).run
    assert 9 * BLOCK <= cpu(run).peak_bytes <= 9 * BLOCK + 8 * WEIGHT + 64
    (key,) = [key for key in run.samples if key.measure == "device_peak_bytes"]
    assert (run.layers[key.layer].name, key.phase) == ("Chain.groups.0.7", BACKWARD)
    assert run.samples[key].max == cpu(run).peak_bytes
    assert kept(run) == 7 * BLOCK  # a sum needs no value of its input, so nothing needs the last output


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize(("layers", "segments"), [(16, 4), (24, 4), (24, 8)])
def test_checkpoints_hold_their_outputs_and_one_segment(layers: int, segments: int, use_reentrant: bool) -> None:
    """k checkpoints over n layers: the k outputs of segments, and the n / k outputs of the segment that is
    recomputed."""
    model, x = Chain(layers, segments, use_reentrant), rows().requires_grad_()
    run = profiled(model, lambda: model(x).sum().backward()).run
    blocks = cpu(run).peak_bytes / BLOCK
    assert segments + layers / segments - 1 <= blocks <= segments + layers / segments + 2.5
    size = layers // segments
    # Each segment's forward is computed again, and all its outputs are there before its backward begins.
    assert peak(run, "Chain.groups.1", RECOMPUTE) == pytest.approx(size * BLOCK, abs=BLOCK)
    # Beside the outputs of segments (of the last, if it is held) each checkpoint keeps the state of a random generator.
    assert segments - 1 <= kept(run) / BLOCK <= segments + 0.4


# Peaks against an independent replay of the raw events


class Replay:
    """The memory by the raw events of a session, computed in a slow and simple way."""

    def __init__(self, prof: Profile) -> None:
        memory = [(raw.start_ns(), raw.nbytes()) for raw in prof._session._read().all if raw.name() == "[memory]"]
        self.times = [time for time, _ in memory]
        self.running = list(accumulate((size for _, size in memory), initial=0))
        self.paths = [layer.path for layer in prof.run.layers]
        attributed = list(walk_of(attribution_of(prof._plan.layer_plan()), prof._session.columns().events()))
        self.nodes = [  # those inside no other: layer, start, end
            (place.layer, event.start_ns, event.end_ns)
            for event, place, around, *_ in attributed
            if place.is_node and (around is None or around.phase == FORWARD or around.node is None)
        ]
        self.ranges = [
            (place.layer, event.start_ns, event.start_ns + ns)
            for event, place, _, calls, ns, _ in attributed
            if event.kind is Kind.LABEL and calls
        ]

    def rise(self, start: int, end: int) -> int:
        """The largest increase of the memory in an interval, above its start."""
        first, last = bisect_left(self.times, start), bisect_left(self.times, end)
        return max(self.running[first : last + 1]) - self.running[first]

    def calls(self, layer: int, phase: str) -> list[int]:
        """The rise in each call of a layer, in one phase: calls inside an autograd node are recompute."""
        return [
            self.rise(start, end)
            for of, start, end in self.ranges
            if of == layer
            if any(first <= start <= last for _, first, last in self.nodes) == (phase == RECOMPUTE)
        ]

    def stretches(self, layer: int) -> list[int]:
        """The rise in each sequence of nodes of a layer and of the layers below it, with no other node and no call
        between."""
        above = self.paths[layer]
        spans = [(of >= 0 and self.paths[of][: len(above)] == above, start, end) for of, start, end in self.nodes]
        spans += [(False, start, start) for _, start, _ in self.ranges]
        rows = [list(row) for mine, row in groupby(sorted(spans, key=itemgetter(1)), key=itemgetter(0)) if mine]
        return [self.rise(row[0][1], row[-1][2]) for row in rows]


@pytest.mark.parametrize("name", ["AlexNet", "U-Net", "GPT", "LSTM", "tied words"])
def test_peaks_of_layers_equal_those_of_a_replay(name: str) -> None:
    """All calls and stretches of backward, of all layers: two training steps, and an optimizer step between them."""
    torch.manual_seed(0)
    model, inputs = ARCHITECTURES[name].make().train(), ARCHITECTURES[name].inputs()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def work() -> None:
        for _ in range(2):
            total(model(*inputs)).backward()
            optimizer.step()
            optimizer.zero_grad()

    prof = profiled(model, work)
    replay = Replay(prof)
    compared = 0
    for index, layer in enumerate(prof.run.layers):
        for phase, expected in ((FORWARD, replay.calls(index, FORWARD)), (BACKWARD, replay.stretches(index))):
            spread = prof.run.samples.get(SampleKey(index, phase, 0, "cpu", "peak_bytes"))
            assert sorted(expected) == ([] if spread is None else list(spread.sample)), (layer.name, phase)
            compared += len(expected)
    assert compared > 4 * len(prof.run.layers) / 3
    assert cpu(prof.run).peak_bytes == max(replay.running)
    assert cpu(prof.run).peak_ns == replay.times[replay.running.index(max(replay.running)) - 1] - start_of(prof)


def start_of(prof: Profile) -> int:
    return next(event.start_ns for event in prof._session.columns().events() if event.kind is Kind.STEP)


def total(result: Any) -> Tensor:
    """The sum of all outputs of a model that need a gradient."""
    if isinstance(result, Tensor):
        return result.sum()
    parts = result.values() if isinstance(result, dict) else result
    return sum((total(part) for part in parts if not isinstance(part, Tensor) or part.requires_grad), torch.zeros(()))


def test_peaks_of_recomputed_calls_equal_those_of_a_replay() -> None:
    """Checkpointed layers are called again inside backward; these peaks have their own phase."""
    for use_reentrant in (True, False):
        model, x = Checkpointed(use_reentrant), torch.rand(3, 4, requires_grad=True)
        prof = profiled(model, lambda: model(x).sum().backward())  # noqa: B023
        replay = Replay(prof)
        for index, layer in enumerate(prof.run.layers):
            spread = prof.run.samples.get(SampleKey(index, RECOMPUTE, 0, "cpu", "peak_bytes"))
            assert (list(spread.sample) if spread else []) == sorted(replay.calls(index, RECOMPUTE)), layer.name
            assert (spread is not None) == ("block" in layer.path)


# Sums


@pytest.mark.parametrize("name", ["GPT", "LSTM", "ShuffleNet"])
def test_sums_equal_those_of_torchs_events(name: str) -> None:
    """The rows, the timeline and torch's raw events have the same bytes, wherever a block is freed."""
    model, inputs = ARCHITECTURES[name].make().train(), ARCHITECTURES[name].inputs()
    prof = profiled(model, lambda: total(model(*inputs)).backward())
    run, raws = prof.run, [raw.nbytes() for raw in prof._session._read().all if raw.name() == "[memory]"]
    assert run.timeline is not None
    assert list(run.timeline.columns["nbytes"]) == raws
    assert sum(row.cost.cpu_allocated for row in run.rows) == sum(size for size in raws if size > 0)
    assert sum(row.cost.cpu_freed for row in run.rows) == -sum(size for size in raws if size < 0)
    assert max(accumulate(raws)) == cpu(run).peak_bytes == sum(held.nbytes for held in cpu(run).held)


def test_a_free_in_the_timeline_has_the_layer_and_kind_of_its_block() -> None:
    """By layer and kind, the timeline adds up to the memory that is still live."""
    model, x = Mlp(), torch.rand(64, 4)
    outputs = []
    run = profiled(model, lambda: outputs.append(model(x))).run
    left: Counter[tuple[str, str]] = Counter()
    for _, size, _, layer, kind in steps_of(run):
        left[layer, kind] += size
    assert +left == {("Mlp.fc2", "activations"): 64 * 2 * 4, ("Mlp.act", "activations"): 64 * 8 * 4}
    assert sum(left.values()) == sum(size for _, size, *_ in steps_of(run))


# What is kept for backward


def saved_bytes(model: nn.Module, inputs: tuple[Any, ...], **more: Any) -> int:
    """The bytes that autograd saves in a forward: distinct storages, without parameters, buffers and inputs."""
    given = [one for one in (*inputs, *more.values()) if isinstance(one, Tensor)]
    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers(), *given)}
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        result = model(*inputs, **more)
        assert result is not None
    return sum(saved.values())


@pytest.mark.parametrize(
    "name", ["AlexNet", "ResNet", "EfficientNet", "U-Net", "GPT", "ViT", "LSTM", "mixture of experts", "tied words"]
)
def test_saved_bytes_equal_those_that_autograd_saves(name: str) -> None:
    """Within 2 % (and a few scalars) of the storages that saved_tensors_hooks gets, in a training step."""
    torch.manual_seed(0)
    model, inputs = ARCHITECTURES[name].make().train(), ARCHITECTURES[name].inputs()
    model(*inputs)
    torch.manual_seed(1)
    saved = saved_bytes(model, inputs)
    torch.manual_seed(1)
    run = profiled(model, lambda: total(model(*inputs)).backward()).run
    assert saved > 0
    assert kept(run) == pytest.approx(saved, rel=0.02, abs=16)


def test_casts_that_autocast_caches_are_saved() -> None:
    """Autocast casts each weight once. Backward needs the casts, but not the outputs that the next layer casts."""
    model, x = Chain(4), rows()

    def work() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(x).sum()
        loss.backward()

    with torch.autocast("cpu", torch.bfloat16):
        saved = saved_bytes(model, (x,))
    run = profiled(model, work).run
    # The input of each layer in two bytes, and its weight. The first has no weight here: its input needs no gradient.
    assert saved == 4 * BLOCK // 2 + 3 * WEIGHT // 2
    assert kept(run) == pytest.approx(saved, rel=0.02)


def test_a_dropped_graph_counts_as_saved() -> None:
    """A forward with gradients enabled by mistake: everything is saved, with the output, and freed with it."""
    model, x = Chain(4), rows()

    def work() -> None:
        model(x)
        with torch.no_grad():
            model(x)

    run = profiled(model, work).run
    assert kept(run) == 4 * BLOCK
    assert peak(run, "Chain.groups.0.0", measure="kept_bytes") == BLOCK
    assert run.samples[SampleKey(3, FORWARD, 0, "cpu", "kept_bytes")].sample == (0, BLOCK)  # the second call, the first


def test_blocks_freed_before_backward_were_not_saved() -> None:
    """The loss does not need the value of the last output. Without another reference, it is freed before backward."""
    model, x = Chain(4), rows()
    run = profiled(model, lambda: (model(x) * 2).sum().backward()).run
    assert kept(run) == 3 * BLOCK
    held = []

    def holding() -> None:
        held.append(model(x))
        (held[0] * 2).sum().backward()

    assert kept(profiled(model, holding).run) == 4 * BLOCK


def test_frozen_layers_save_nothing() -> None:
    """No gradient goes through the first group: its blocks are freed at once, except for the input of the second."""
    model, x = Chain(8, 2), rows()
    model.segments = 0
    model.groups[0].requires_grad_(False)
    run = profiled(model, lambda: model(x).sum().backward()).run
    kept_by = {
        run.layers[key.layer].name: spread.sum for key, spread in run.samples.items() if key.measure == "kept_bytes"
    }
    assert [kept_by[f"Chain.groups.0.{at}"] for at in range(4)] == [0, 0, 0, BLOCK]
    assert [kept_by[f"Chain.groups.1.{at}"] for at in range(4)] == [BLOCK, BLOCK, BLOCK, 0]
    assert set(made(run, "gradients")) == {WEIGHT}
    assert len(made(run, "gradients")) == 4


# What memory is held for


def test_a_training_step_by_kind() -> None:
    """Inputs, activations, the loss, one gradient for each parameter, and Adam's state, only in its first step."""
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    params = [param.nbytes for param in model.parameters()]

    def step() -> None:
        images, targets = torch.rand(128, 32), torch.randint(8, (128,))
        nn.functional.cross_entropy(model(images), targets).backward()
        optimizer.step()
        optimizer.zero_grad()

    first = profiled(model, step).run
    assert made(first, "inputs") == [128 * 32 * 4, 128 * 8]
    # The two outputs that are freed before the model's call ends, or the loss has them, are not kept.
    assert made(first, "activations", "Sequential.1") == [128 * 64 * 4]
    assert sorted(made(first, "gradients")) == sorted(params)
    state = [size for size in made(first, "optimizer state") if size > 8]  # beside it a step's number for each
    assert sorted(state) == sorted(2 * params)
    assert made(first, "parameters") == []
    assert 128 * 8 * 4 in made(first, "activations", "")  # the loss keeps the logarithms of the shares
    second = profiled(model, step).run
    assert [size for size in made(second, "optimizer state") if size > 8] == []
    assert sorted(made(second, "gradients")) == sorted(params)
    state = ("optimizer state", 2 * sum(params) + 4 * len(params))
    assert of_model(second) == dict((("parameters", sum(params)), state))


def test_the_peak_of_a_training_step_equals_that_of_torchs_tracker() -> None:
    """By kind, in the second step with Adam; torch's MemTracker follows each tensor with a mode and hooks. It lists the
    batch as another tensor, and the test process has more of these."""
    tracker = pytest.importorskip("torch.distributed._tools.mem_tracker").MemTracker
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU()) for _ in range(4)))
    optimizer, x = torch.optim.Adam(model.parameters(), foreach=False), torch.rand(256, 64)

    def step() -> None:
        optimizer.zero_grad()
        model(x).pow(2).mean().backward()
        optimizer.step()

    step()
    with tracker() as tracked:
        tracked.track_external(model, optimizer, x)
        step()
    [peak_of_kinds] = tracked.get_tracker_snapshot("peak").values()
    true = {str(kind).rpartition(".")[2]: nbytes for kind, nbytes in peak_of_kinds.items()}
    run = profiled(model, step).run
    at_peak = Counter(by_kind(cpu(run))) + Counter(of_model(run))
    assert at_peak["parameters"] == true["PARAM"]
    assert at_peak["optimizer state"] == true["OPT"]
    assert at_peak["activations"] == true["ACT"]
    assert at_peak["temporaries"] == true["TEMP"]
    others = sum(nbytes for kind, nbytes in cpu(run).before or () if kind in OTHERS)
    assert cpu(run).bytes_at_peak - others == true["Total"] - x.nbytes


def test_a_chain_at_its_peak_by_kind() -> None:
    """In a step of a chain, at the peak: n - 1 activations, and the gradients of the last layer's output and input."""
    model = Chain(8)

    def step() -> None:
        model(rows()).sum().backward()

    run = profiled(model, step).run
    kinds = by_kind(cpu(run))
    assert kinds["inputs"] == BLOCK
    assert kinds["activations"] == pytest.approx(7 * BLOCK, abs=64)
    assert kinds["temporaries"] == pytest.approx(2 * BLOCK, abs=64)
    assert sum(kinds.values()) == cpu(run).peak_bytes


def backward(model: nn.Module, x: Tensor) -> None:
    model(x).sum().backward()


GRADIENTS: dict[str, tuple[int, Callable[[nn.Module, Tensor], Any]]] = {
    "a pass": (4, backward),
    "freed by no op after the pass": (4, lambda model, x: [backward(model, x), model.zero_grad()]),
    "two passes": (4, lambda model, x: [backward(model, x), backward(model, x)]),
    "zeroed between": (
        4,
        lambda model, x: [backward(model, x), model.zero_grad(set_to_none=False), backward(model, x)],
    ),
    "freed between": (8, lambda model, x: [backward(model, x), model.zero_grad(), backward(model, x)]),
    "returned": (4, lambda model, x: torch.autograd.grad(model(x).sum(), list(model.parameters()))),
}


@pytest.mark.parametrize("case", GRADIENTS)
def test_gradients(case: str) -> None:
    """New gradients if there were none. If there were, the addend is temporary, whether they were zeroed or not."""
    model, x = Chain(4), rows()
    expected, step = GRADIENTS[case]
    assert made(profiled(model, lambda: step(model, x)).run, "gradients").count(WEIGHT) == expected
    if case == "two passes":
        assert made(profiled(model, lambda: step(model, x)).run, "gradients").count(WEIGHT) == 0


def test_gradients_from_before_the_block() -> None:
    """The live memory of the model at the start, by kind; each storage once."""
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8, bias=False))
    model[2].weight = model[0].weight
    model[0].weight.grad = torch.zeros(8, 8)
    run = profiled(model, lambda: model(torch.rand(4, 8))).run
    assert of_model(run) == {"parameters": 8 * 8 * 4 + 3 * 8 * 4, "buffers": 2 * 8 * 4 + 8, "gradients": 256}


def test_parameters_that_lazy_modules_make_in_the_block() -> None:
    model = nn.Sequential(nn.LazyLinear(16), nn.ReLU(), nn.LazyLinear(4))
    run = profiled(model, lambda: model(torch.rand(8, 32))).run
    assert sorted(made(run, "parameters")) == sorted([16 * 32 * 4, 16 * 4, 4 * 16 * 4, 4 * 4])
    assert of_model(run) == {}


def test_outputs_that_are_kept_in_a_list_without_gradients() -> None:
    """They outlive the model's call, so they are not temporary. Nothing of them is saved for backward."""
    model, x, outputs = Chain(4), rows(), []

    def work() -> None:
        with torch.no_grad():
            for _ in range(3):
                outputs.append(model(x))

    run = profiled(model, work).run
    assert made(run, "activations") == [BLOCK] * 3
    assert made(run, "temporaries") == [BLOCK] * 9
    assert kept(run) == 0
    assert cpu(run).peak_bytes == 4 * BLOCK  # two outputs in the list, and two layers of the third call


def test_a_loss_outside_the_model_is_an_activation() -> None:
    """The blocks that a loss saves for backward are activations; its intermediate blocks are not."""
    model, x, target = Chain(2), rows(), rows()
    run = profiled(model, lambda: (model(x) - target).square().mean().backward()).run
    assert made(run, "activations", "") == [BLOCK, 4, 4]  # the difference, which its square needs, the mean, a one
    assert BLOCK in made(run, "temporaries", "")  # the square, which nothing needs


def test_a_model_called_twice_before_backward() -> None:
    """As in a GAN: the loss of the first call is live when the second begins, but is no input of it."""
    model = Chain(2)

    def work() -> None:
        first = (model(rows()) - 1).square().mean()
        noise = rows()
        second = (model(noise) - 1).square().mean()
        (first + second).backward()

    run = profiled(model, work).run
    assert made(run, "inputs") == [BLOCK, 4, BLOCK]  # both inputs, and the first loss itself, which the code holds
    assert made(run, "activations", "").count(BLOCK) == 2  # the differences


def test_inputs_that_only_the_graph_holds() -> None:
    """A batch without other references is freed by the pass. It is still an input, in each step of a loop."""
    model = Chain(2)

    def work() -> None:
        for _ in range(3):
            model(rows()).sum().backward()

    assert made(profiled(model, work).run, "inputs") == [BLOCK] * 3


def test_retained_graphs() -> None:
    """Blocks that a first pass leaves for a second are activations, and the weights get their gradients once."""
    model, x = Chain(4), rows()

    def work() -> None:
        loss = model(x).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()

    run = profiled(model, work).run
    assert kept(run) == 4 * BLOCK
    assert made(run, "gradients").count(WEIGHT) == 4
    assert set(made(run, "gradients")) == {WEIGHT}


def test_a_derivative_of_derivatives() -> None:
    """Blocks that a first pass makes for a second are no gradients: the second pass frees them."""
    model, x = Chain(2), rows().requires_grad_()

    def work() -> None:
        (gradient,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        gradient.square().sum().backward()

    run = profiled(model, work).run
    of_layers = [size for size in made(run, "gradients") if size == WEIGHT]
    assert len(of_layers) == 2
    # The outputs, which the squares need, and what the first pass left.
    assert (
        made(run, "activations", "").count(BLOCK)
        + sum(made(run, "activations", f"Chain.groups.0.{at}").count(BLOCK) for at in (0, 1))
        >= 3
    )


def test_a_forward_that_raises() -> None:
    """Blocks from before the error are freed and counted. Later steps are not affected."""
    model, x = Raises(), torch.rand(64, 4)

    def work() -> None:
        model(x)
        with pytest.raises(ValueError, match="second call"):
            model(x)
        model(x).sum().backward()

    prof = profiled(model, work)
    replay = Replay(prof)
    for index in range(2):
        spread = prof.run.samples[SampleKey(index, FORWARD, 0, "cpu", "peak_bytes")]
        assert list(spread.sample) == sorted(replay.calls(index, FORWARD))
        assert spread.count == 3
    assert sorted(made(prof.run, "gradients")) == [16, 64]


def test_an_optimizer_that_works_inside_backward() -> None:
    """Weights are updated as soon as they have their gradient: the state is optimizer state, and the pass stays one
    pass."""
    model, x = Chain(4), rows()
    optimizers = {param: torch.optim.SGD([param], lr=0.1, momentum=0.9) for param in model.parameters()}

    def update(param: Tensor) -> None:
        optimizers[param].step()
        optimizers[param].zero_grad()

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(update)
    run = profiled(model, lambda: model(x).sum().backward()).run
    assert made(run, "optimizer state") == [WEIGHT] * 4
    assert made(run, "gradients") == []  # each is gone before the next is made
    assert peak(run, "Chain", BACKWARD) >= 2 * BLOCK
    assert run.samples[SampleKey(0, BACKWARD, 0, "cpu", "peak_bytes")].count == 1


def test_an_optimizer_that_calls_the_model() -> None:
    """LBFGS calls the model inside its step: calls and passes there have the same kinds as elsewhere."""
    model, x = Chain(2), rows()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (model(x) - 1).square().mean()
        loss.backward()
        return loss

    run = profiled(model, lambda: optimizer.step(closure)).run
    calls = len(run.samples[SampleKey(0, FORWARD, 0, "cpu", "kept_bytes")].sample)
    assert calls >= 2
    assert made(run, "activations").count(BLOCK) == 3 * calls  # two layers, and the differences of the loss
    assert made(run, "activations", "").count(BLOCK) == calls
    assert len([size for size in made(run, "gradients") if size == WEIGHT]) == 2 * calls
    assert 2 * WEIGHT in made(run, "optimizer state")  # the last gradient, flat


def test_a_scaled_loss() -> None:
    """Only the scaled loss of a GradScaler outlives its op; its checks are temporary."""
    model, x = Chain(2), rows()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.zeros(()))  # makes its state

    def work() -> None:
        scaler.scale(model(x).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()

    run = profiled(model, work).run
    assert [size for size in made(run, "gradients") if size >= WEIGHT] == [WEIGHT] * 2
    assert [size for size in made(run, "optimizer state") if size >= WEIGHT] == []
    assert [size for size in made(run, "inputs") if size >= WEIGHT] == []
    assert kept(run) == 2 * BLOCK


def test_generate_grows_by_the_cache() -> None:
    """The keys and values of each new token outlive the call; nothing is saved for backward."""
    transformers = usable_transformers()
    config = transformers.GPT2Config(
        n_layer=2, n_embd=32, n_head=2, vocab_size=50, bos_token_id=0, eos_token_id=None, pad_token_id=0
    )
    model = transformers.GPT2LMHeadModel(config).eval()
    tokens = torch.randint(1, 50, (1, 8))
    run = profiled(model, lambda: model.generate(tokens, max_new_tokens=4, do_sample=False)).run
    assert kept(run) == 0
    assert made(run, "gradients") == made(run, "optimizer state") == []
    longest = 4 * 2 * 32 * 4 * (8 + 3)  # keys and values of two layers, all positions but the last
    assert longest / 2 <= cpu(run).peak_bytes
    (root,) = [key for key in run.samples if key.measure == "kept_bytes" and key.layer == 0]
    assert run.samples[root].count == 4


# By hand-made events: what no CPU shows


NET, CONV, FC = 0, 1, 2
LAYERS = (Layer(("Net",), "Net"), Layer(("Net", "conv"), "Conv2d"), Layer(("Net", "fc"), "Linear"))
SITES = {"net": Site((NET,)), "conv": Site((CONV,)), "fc": Site((FC,))}
CLOCK_NS = 1_000_000


def walked(
    *events: Event, parameters: frozenset[tuple[str, int]] = frozenset(), start: LiveMemory = NOT_MEASURED
) -> tuple[dict[str, Memory], dict[SampleKey, Spread], Timeline]:
    """The results for hand-made events, in the order of their start. The clock of ``start`` shows 1,000,000 ns when
    that of the events shows 0."""
    attribution = Attribution(SITES, [layer.path for layer in LAYERS])
    allocations = Allocations(LAYERS, 0, parameters, before={}, with_timeline=True)
    in_order = sorted((step(0), *events), key=lambda event: event.start_ns)
    columns = EventColumns.of(in_order)
    add_frees(columns, start, CLOCK_NS)
    attributed = list(allocations.observe(walk_of(attribution, columns)))
    assert start is not NOT_MEASURED or len(attributed) == len(in_order)
    result = allocations.result()
    return {one.device: one for one in result["memory"]}, result["samples"], result["timeline"]


Block = tuple[str, int]


@dataclass
class History:
    """The history of memory in a hand-made recording: ``events`` as torch records them, ``start`` as we measure the
    model. And the truth, a plain sum: the ``levels`` of each device after each change, and the bytes ``freed`` of
    each."""

    events: list[Event]
    start: LiveMemory
    levels: dict[str, list[int]]
    freed: Counter[str]


@st.composite
def histories(draw: st.DrawFn) -> History:
    """Blocks of a model that are freed: with an event of torch, of the right size or another; with a note of ours a
    little before or after it; or with one of the two. Addresses that are used again. Two devices."""
    alive = {(device, at): draw(st.integers(1, 9)) * 100 for device in ("cpu", "cuda:0") for at in (1, 2, 3)}
    at_start = dict(alive)
    addresses: list[Block] = [*alive, ("cpu", 4), ("cuda:0", 4)]
    events, notes = [], []
    levels: dict[str, list[int]] = {"cpu": [0], "cuda:0": [0]}
    freed: Counter[str] = Counter()
    models = set(alive)  # the blocks of the model that are there still
    for number, block in enumerate(draw(st.lists(st.sampled_from(addresses), max_size=20)), 1):
        time, (device, address) = 100 * number, block
        if block not in alive:
            alive[block] = draw(st.integers(1, 9)) * 100
            events.append(memory_event(time, alive[block], device, address=address))
            levels[device].append(levels[device][-1] + alive[block])
            continue
        size = alive.pop(block)
        levels[device].append(levels[device][-1] - size)
        freed[device] += size
        recorded = noted = False
        if block in models:
            models.discard(block)
            recorded, noted = draw(st.sampled_from([(True, False), (False, True), (True, True)]))
        if recorded or not noted:
            stale = draw(st.integers(1, 9)) * 100 if recorded and device == "cpu" else size
            events.append(memory_event(time, -stale, device, address=address))
        if noted:
            at_ns = CLOCK_NS + time + draw(st.integers(-40, 40))
            notes.append(Freed(at_ns, draw(st.booleans()), block))
    start = LiveMemory({}, frozenset(), {}, at_start, sorted(notes))
    return History(events, start, levels, freed)


@examples(200)
@given(histories())
def test_each_block_is_freed_once(history: History) -> None:
    """The peak, the timeline and the rows, against the plain sum of live memory."""
    memory, _, timeline = walked(*history.events, start=history.start)
    for device, levels in history.levels.items():
        sizes = [
            nbytes
            for nbytes, of in zip(timeline.columns["nbytes"], timeline.columns["device"])
            if timeline.devices[of] == device
        ]
        assert list(accumulate(sizes, initial=0)) == levels
        assert -sum(size for size in sizes if size < 0) == history.freed[device]
        if device in memory:
            assert memory[device].peak_bytes == max(levels)


FREES: dict[str, tuple[list[Event], LiveMemory, list[int], int]] = {
    "not recorded: its address is used again": (
        [memory_event(20, 300, address=7), memory_event(30, -300, address=7), memory_event(40, 500, address=8)],
        LiveMemory({}, frozenset(), {}, {("cpu", 7): 1000}),
        [-1000, 300, -300, 500],
        0,
    ),
    "without an address: it is that of the block whose address is used again": (
        [
            memory_event(20, 300, address=7),
            memory_event(30, -300),
            memory_event(40, 300, address=7),
            memory_event(50, 1000, address=8),
        ],
        NOT_MEASURED,
        [300, -300, 300, 1000],
        1300,
    ),
    "from before a block: it is not that of the block": (
        [memory_event(20, -100), memory_event(30, 100, address=7), memory_event(40, 50, address=7)],
        NOT_MEASURED,
        [-100, 100, -100, 50],
        0,
    ),
    "between the measurement of the model and the recording": (
        [memory_event(20, 300, address=7), memory_event(30, 500, address=8)],
        LiveMemory({}, frozenset(), {}, {("cpu", 7): 1000}, [Freed(CLOCK_NS - 1, True, ("cpu", 7))]),
        [300, 500],
        800,
    ),
    "on a thread that is not observed": (
        [memory_event(10, 100, address=1), memory_event(30, 70, address=1), memory_event(40, 80, address=2)],
        NOT_MEASURED,
        [100, -100, 70, 80],
        150,
    ),
}


@pytest.mark.parametrize("case", FREES)
def test_frees_that_were_not_recorded_in_full(case: str) -> None:
    events, start, sizes, peak_bytes = FREES[case]
    memory, _, timeline = walked(*events, start=start)
    assert list(timeline.columns["nbytes"]) == sizes
    assert memory["cpu"].peak_bytes == peak_bytes
    assert sum(held.nbytes for held in memory["cpu"].held) == peak_bytes
    assert "unknown" not in {held.kind for held in memory["cpu"].held} or peak_bytes == 0


def test_each_device_has_its_own_peak() -> None:
    """Blocks with one address on two devices are two blocks; memory of one device does not raise the peak of
    another."""
    memory, samples, timeline = walked(
        label("net", 10, 100),
        op("aten::op", 15, 80, sequence=1),
        memory_event(20, 100, address=7),
        memory_event(30, 1000, "cuda:0", address=7),
        memory_event(40, -100, address=7),
        memory_event(50, 50, address=8),
        memory_event(60, 10, "cuda:1", address=8),
        memory_event(70, -1000, "cuda:0", address=7),
    )
    assert {device: (one.peak_bytes, one.peak_ns) for device, one in memory.items()} == {
        "cpu": (100, 20),
        "cuda:0": (1000, 30),
        "cuda:1": (10, 60),
    }
    assert memory["cuda:0"].held == (Held(NET, FORWARD, "temporaries", 1000, 1),)
    peaks = {key.device: spread.max for key, spread in samples.items() if key.measure == "peak_bytes"}
    assert peaks == {"cpu": 100, "cuda:0": 1000, "cuda:1": 10}
    assert [timeline.devices[at] for at in timeline.columns["device"]] == [
        "cpu", "cuda:0", "cpu", "cpu", "cuda:1", "cuda:0",
    ]  # fmt: skip


def test_backward_on_its_own_thread() -> None:
    """As on a GPU: the engine's thread works and frees. Stretches of layers consist of its nodes; kinds are as
    always."""
    memory, samples, timeline = walked(
        label("net", 10, 100),
        label("conv", 20, 40),
        op("aten::op", 21, 39, sequence=1),
        memory_event(25, 100, "cuda:0", address=1),
        label("fc", 50, 70),
        op("aten::op", 51, 69, sequence=2),
        memory_event(55, 200, "cuda:0", address=2),
        node("Backward0", 110, 130, 2, thread=ENGINE),
        memory_event(115, 40, "cuda:0", thread=ENGINE, address=3),
        memory_event(120, 60, "cuda:0", thread=ENGINE, address=4),
        memory_event(125, -200, "cuda:0", thread=ENGINE, address=2),
        node("Backward0", 140, 160, 1, thread=ENGINE),
        memory_event(145, 30, "cuda:0", thread=ENGINE, address=5),
        memory_event(150, -40, "cuda:0", thread=ENGINE, address=3),
        memory_event(155, -100, "cuda:0", thread=ENGINE, address=1),
    )
    assert memory["cuda:0"].peak_bytes == 400
    assert memory["cuda:0"].held == (
        Held(FC, FORWARD, "activations", 200, 1),
        Held(CONV, FORWARD, "activations", 100, 1),
        Held(FC, BACKWARD, "gradients", 60, 1),
        Held(FC, BACKWARD, "temporaries", 40, 1),
    )
    of = {(key.layer, key.phase): spread.max for key, spread in samples.items() if key.measure == "peak_bytes"}
    assert of == {
        (NET, FORWARD): 300, (CONV, FORWARD): 100, (FC, FORWARD): 200,
        (NET, BACKWARD): 100, (FC, BACKWARD): 100, (CONV, BACKWARD): 30,
    }  # fmt: skip
    left: Counter[str] = Counter()
    for size, kind in zip(timeline.columns["nbytes"], timeline.columns["kind"]):
        left[KINDS[kind]] += size
    assert +left == {"gradients": 90}


def test_a_call_that_ended_does_not_count_later_blocks_of_another_thread() -> None:
    _, samples, _ = walked(
        label("conv", 10, 30, thread=7),
        memory_event(20, 5, thread=7, address=1),
        label("fc", 40, 60),
        memory_event(50, 500, address=2),
    )
    assert samples[SampleKey(CONV, FORWARD, 0, "cpu", "peak_bytes")].max == 5
    assert samples[SampleKey(FC, FORWARD, 0, "cpu", "peak_bytes")].max == 500


def test_a_call_counts_blocks_that_another_thread_allocates_meanwhile() -> None:
    """Memory belongs to the device, not to a thread: a peak is a peak of the device."""
    _, samples, _ = walked(
        label("conv", 10, 100), memory_event(20, 5, address=1), memory_event(50, 500, thread=7, address=2)
    )
    assert samples[SampleKey(CONV, FORWARD, 0, "cpu", "peak_bytes")].max == 505


def test_a_block_freed_in_another_layer_counts_once() -> None:
    """Allocated in one layer on one thread, freed in another on another: until then it belongs to the first layer."""
    memory, _, timeline = walked(
        label("conv", 10, 30),
        memory_event(20, 100, address=1),
        label("fc", 40, 90, thread=7),
        memory_event(50, -100, thread=7, address=1),
        memory_event(60, 30, thread=7, address=1),
        memory_event(70, 80, thread=7, address=2),
    )
    assert list(timeline.columns["layer"]) == [CONV, CONV, FC, FC]
    assert memory["cpu"].peak_bytes == 110
    assert memory["cpu"].held == (Held(FC, FORWARD, "activations", 110, 2),)


def test_freed_memory_from_before_the_start_is_negative_in_the_peak() -> None:
    """Its free has no kind. The live new blocks have more bytes than the memory rose by; the kind unknown is the
    difference."""
    memory, _, timeline = walked(
        memory_event(10, -100, address=9), memory_event(20, 150, address=1), memory_event(30, -30, "cuda:0", address=8)
    )
    assert memory["cpu"].peak_bytes == 50
    assert {(held.kind, held.nbytes) for held in memory["cpu"].held} == {("temporaries", 150), ("unknown", -100)}
    assert memory["cuda:0"].peak_bytes == 0
    assert list(timeline.columns["kind"]) == [-1, KINDS.index("temporaries"), -1]
    assert [timeline.devices[at] for at in timeline.columns["device"]] == ["cpu", "cpu", "cuda:0"]


def test_blocks_without_an_address_are_of_an_unknown_kind() -> None:
    memory, _, timeline = walked(
        memory_event(10, 100, address=0), memory_event(20, 50, address=1), memory_event(30, -100, address=0)
    )
    assert {(held.kind, held.nbytes) for held in memory["cpu"].held} == {("unknown", 100), ("temporaries", 50)}
    assert list(timeline.columns["kind"]) == [-1, KINDS.index("temporaries"), -1]


def test_parameters_are_the_blocks_at_their_address_at_the_end() -> None:
    """An earlier block at this address has its own kind."""
    _, _, timeline = walked(
        memory_event(10, 100, address=1),
        memory_event(20, -100, address=1),
        memory_event(30, 60, address=1),
        parameters=frozenset({("cpu", 1)}),
    )
    assert [KINDS[kind] for kind in timeline.columns["kind"]] == ["temporaries", "temporaries", "parameters"]


def peaks_of(samples: dict[SampleKey, Spread]) -> dict[tuple[int, str], tuple[int, ...]]:
    """All peaks by layer and phase."""
    return {(key.layer, key.phase): spread.sample for key, spread in samples.items() if key.measure == "peak_bytes"}


def test_a_pass_inside_a_node_has_its_own_stretches() -> None:
    """Reentrant checkpointing runs a pass inside a node: its layers rise there, and the stretch around continues."""
    _, samples, _ = walked(
        label("net", 10, 100),
        label("fc", 12, 98),
        op("aten::op", 15, 95, sequence=1),
        node("Backward0", 200, 300, 1),
        memory_event(205, 1000, address=1),
        label("conv", 210, 220),
        op("aten::op", 211, 219, sequence=2),
        memory_event(215, 10, address=2),
        node("Backward0", 230, 240, 2),
        memory_event(235, 7, address=3),
        memory_event(237, -1000, address=1),
        node("Backward0", 250, 260, 2),
        memory_event(255, 500, address=4),
        node("Backward0", 310, 330, 1),
        memory_event(320, 600, address=5),
    )
    assert peaks_of(samples) == {
        (NET, BACKWARD): (1117,), (FC, BACKWARD): (1117,), (CONV, RECOMPUTE): (10,), (CONV, BACKWARD): (7,),
    }  # fmt: skip


def test_a_pass_inside_a_call() -> None:
    """A model that returns a derivative: the layer's backward is a stretch inside its call."""
    _, samples, timeline = walked(
        label("net", 10, 300),
        op("aten::op", 15, 20, sequence=1),
        memory_event(16, 1, address=9),
        node("Backward0", 100, 150, 1),
        memory_event(110, 8, address=1),
        memory_event(120, 4, address=2),
        memory_event(130, -4, address=2),
        op("aten::op", 200, 250),
        memory_event(210, 5, address=3),
        memory_event(310, -8, address=1),
    )
    assert peaks_of(samples) == {(NET, FORWARD): (14,), (NET, BACKWARD): (12,)}
    assert [KINDS[kind] for kind in timeline.columns["kind"]] == [
        "activations", "gradients", "temporaries", "temporaries", "activations", "gradients",
    ]  # fmt: skip


# The report


def step_of_a_run(**options: Any) -> Run:
    """A hand-made run: a model of two layers on a GPU, its inputs on the CPU, and the memory of one training step."""
    gpu = "cuda:0"
    cells = [
        row(CONV, device=gpu, device_allocated=4096, device_freed=1024),
        row(FC, device=gpu, device_allocated=1024),
        row(FC, phase=BACKWARD, device=gpu, device_allocated=2048, device_freed=1024),
        row(CONV, phase=BACKWARD, device=gpu, device_allocated=1024, device_freed=4096),
        row(OUTSIDE, device=gpu, device_allocated=512),
        row(OUTSIDE, cpu_allocated=2048, cpu_freed=2048),
    ]
    samples = {
        SampleKey(layer, phase, 0, gpu, measure): Spread.of([(1, value)])
        for layer, phase, measure, value in (
            (NET, FORWARD, "peak_bytes", 5120),
            (CONV, FORWARD, "peak_bytes", 4096),
            (FC, FORWARD, "peak_bytes", 1024),
            (NET, BACKWARD, "peak_bytes", 2048),
            (FC, BACKWARD, "peak_bytes", 2048),
            (CONV, BACKWARD, "peak_bytes", 1024),
            (NET, FORWARD, "kept_bytes", 0),
            (CONV, FORWARD, "kept_bytes", 3072),
            (FC, FORWARD, "kept_bytes", 1000),
            (FC, BACKWARD, "device_peak_bytes", 6656),
        )
    }
    live = (
        Held(CONV, FORWARD, "activations", 3072, 2),
        Held(FC, BACKWARD, "temporaries", 2048, 1),
        Held(FC, FORWARD, "activations", 1024, 1),
        Held(OUTSIDE, FORWARD, "inputs", 512, 1),
    )
    before = (("parameters", 8192), ("buffers", 64))
    allocator = (("allocated", 8704, 9216), ("reserved", 2097152, 2097152))
    memory = (
        Memory("cpu", peak_bytes=2048, peak_ns=1000, held=(Held(OUTSIDE, FORWARD, "inputs", 2048, 2),)),
        Memory(gpu, peak_bytes=6656, peak_ns=2_500_000, held=live, before=before, allocator=allocator),
    )
    layers = (LAYERS[0], replace(LAYERS[CONV], output_bytes=3072), replace(LAYERS[FC], output_bytes=1024))
    fields = ("cpu_ns", "cpu_allocated", "cpu_freed", "device_allocated", "device_freed")
    about = {"device": "cuda", "requested": fields, "measured": fields, "warnings": run_warnings("A doubt.")}
    return replace(made_by_hand(cells, layers=layers, **about, **options), samples=samples, memory=memory)


def test_the_text_of_memory(golden: Callable[..., None]) -> None:
    """Two devices; unknown figures are a dash, unused layers have no table, and warnings come last."""
    golden(step_of_a_run().report("memory"))


def test_options_of_the_report_on_memory(golden: Callable[..., None]) -> None:
    """What follows the kinds of the device's memory."""
    run = step_of_a_run()
    options: list[dict[str, Any]] = [
        {"phase": BACKWARD, "sort_by": "backward_freed"},
        {"sort_by": "Backward peak"},
        {"depth": 0},
        {"top": 1, "sort_by": "saved_for_backward"},
    ]
    texts = {str(each): run.report("memory", **each) for each in options}
    texts["one layer was selected"] = step_of_a_run(paths=(("Net", "fc"),)).report("memory")
    golden({title: "Made in" + text.rpartition("\n\nMade in")[2] for title, text in texts.items()})
    assert "| Net" in run.report("memory", tablefmt="github")
    with pytest.raises(TorchprofError, match="no format 'neat'"):
        run.report("memory", tablefmt="neat")
    assert "start of its cycle, after 2.500ms, in Net.fc (backward)" in step_of_a_run(cycles=2).report("memory")


def tables_of(text: str) -> list[list[list[str]]]:
    """The cells of each table of a report, its headings first."""
    blocks = [block.splitlines() for block in text.split("\n\n")]
    return [
        [[cell.strip() for cell in line.split("|")] for line in block if "---" not in line]
        for block in blocks
        if len(block) > 1 and "-|-" in block[1]
    ]


def test_the_figures_of_layers_equal_those_of_the_run() -> None:
    """The table of a real step, against its rows and samples."""
    model = Mlp()
    run = profiled(model, lambda: model(torch.rand(64, 4)).sum().backward()).run
    *_, table = tables_of(run.report("memory"))
    columns = {heading: [row[at] for row in table[1:]] for at, heading in enumerate(table[0])}
    assert columns["Module"] == ["Mlp", "├── fc1", "├── act", "└── fc2", "(outside)"]
    for at, path in enumerate([("Mlp",), ("Mlp", "fc1"), ("Mlp", "act"), ("Mlp", "fc2")]):
        for phase, lead in ((FORWARD, ""), (BACKWARD, "Backward ")):
            below = [
                row.cost for row in run.rows if row.layer and row.layer.path[: len(path)] == path and row.phase == phase
            ]
            allocated, freed = (sum(getattr(cost, name) for cost in below) for name in ("cpu_allocated", "cpu_freed"))
            for heading, value in (
                ("Allocated", allocated),
                ("Freed", freed),
                ("Net", allocated - freed),
                ("Peak", peak(run, ".".join(path), phase)),
            ):
                assert columns[(lead + heading).capitalize()][at] == format_memory(value)
    assert columns["Activations"] == ["512 B", "2.00 KB", "2.00 KB", "512 B", ""]
    assert columns["Saved for backward in a model call"] == ["2.00 KB", "0 B", "2.00 KB", "0 B", ""]
    outside = [row.cost.cpu_allocated for row in run.rows if row.layer is None and row.phase == OTHER]
    assert columns["Allocated"][-1] == format_memory(sum(outside))


def test_each_rank_has_the_tables_that_its_run_has_alone() -> None:
    model = Mlp()
    run = profiled(model, lambda: model(torch.rand(64, 4)).sum().backward()).run
    document = json.loads(json_of_run(run))
    document.update(lockstep=[], timeline=None)
    ranks = []
    for rank in range(3):
        document["rows"]["rank"] = [rank] * len(run.rows)
        for entry in (*document["metas"], *document["samples"], *document["memory"]):
            entry["rank"] = rank
        ranks.append(run_of(json.dumps(document).encode(), "run.json"))
    alone = tables_of(run.report("memory"))
    assert "512 B" in [row[alone[-1][0].index("Activations")] for row in alone[-1]]
    expected = [
        [[cell.replace("Module", f"Module, on cpu of rank {rank}") for cell in row] for row in table]
        for rank in range(3)
        for table in alone
    ]
    assert tables_of(torchprof.merge(ranks).report("memory")) == expected


def test_saved_bytes_are_the_mean_of_the_calls_and_add_up() -> None:
    """Two calls with gradients and two without: half of the bytes of a call with gradients; layers add up."""
    model, x = Chain(4), rows()

    def work() -> None:
        for _ in range(2):
            model(x).square().sum().backward()
            with torch.no_grad():
                model(x)

    *_, table = tables_of(profiled(model, work).run.report("memory"))
    at = table[0].index("Saved for backward in a model call")
    half = format_memory(BLOCK // 2)
    assert [row[at] for row in table[1:]] == [format_memory(2 * BLOCK)] * 3 + [half] * 4 + [""]
    assert table[2][0] == "└── groups"  # a list, which is never called
    assert table[2][table[0].index("Peak")] == "–"


def test_saved_bytes_of_a_layer_in_a_loop_add_up() -> None:
    """A layer that is called 20 times in a call of the model: of one of these calls is what a loop of its own says."""

    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.step = nn.Tanh()

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(20):
                x = self.step(x)
            return x

    model, x = Loop(), rows().requires_grad_()
    run = profiled(model, lambda: [model(x).sum().backward() for _ in range(3)]).run
    for sort_by in ("Saved for backward", "saved_for_backward"):  # the heading before, and the key
        *_, table = tables_of(run.report("memory", sort_by=sort_by))
        at = table[0].index("Saved for backward in a model call")
        assert [row[at] for row in table[1:3]] == [format_memory(20 * BLOCK)] * 2


def test_the_picture_is_the_timeline() -> None:
    """The memory of a chain rises in equal steps to its peak: the highest column is the peak, and its fills are the
    kinds."""
    model = Chain(8)
    run = profiled(model, lambda: model(rows()).sum().backward()).run
    picture = next(block for block in run.report("memory").split("\n\n") if block.startswith("Memory on"))
    title, legend, *rows_, axis, _ = picture.splitlines()
    assert title.endswith(f"a row {format_memory(round(cpu(run).peak_bytes / 10))}.")
    assert legend == "G gradients   █ activations   ▒ inputs   ░ temporaries"
    assert rows_[0].split(" ┤")[0].strip() == format_memory(cpu(run).peak_bytes)
    columns = list(zip(*(row.partition("┤")[2].ljust(80) for row in rows_)))
    heights = [10 - column.count(" ") for column in columns]
    assert max(heights) == 10
    full = ["".join(column) for column, height in zip(columns, heights) if height == 10]
    # From the top: two gradients of activations, seven activations and the input: of ten.
    assert Counter(full[0])["█"] == 7
    assert "with_timeline=True" not in run.report("memory")
    assert axis.endswith("─" * 80)


def test_cycles_keep_the_highest_peak() -> None:
    """The peak of each cycle is above its own start. The run has the highest peak, and the samples of all cycles."""
    model, sizes = Chain(4), [64, 2048, 64, 64]
    prof = Profile(
        model,
        profile_memory=True,
        with_timeline=True,
        schedule=torch.profiler.schedule(wait=0, warmup=0, active=1, repeat=4),
    )
    with prof, torch.no_grad():
        for size in sizes:
            model(torch.rand(size, WIDTH))
            prof.step()
    run = prof.run
    assert cpu(run).peak_bytes == 3 * BLOCK  # the input, and two layers
    assert sorted(
        value for key, spread in run.samples.items() if key.measure == "device_peak_bytes" for value in spread.sample
    ) == [3 * BLOCK * size // 2048 for size in sorted(sizes)]
    text = run.report("memory")
    assert " above the start of its cycle, after " in text
    assert "above the start of the last cycle, over time" in text


# What the model holds


def test_a_shared_storage_counts_once() -> None:
    flat = torch.zeros(100)
    model = nn.Linear(8, 8, bias=False)
    model.weight = nn.Parameter(flat[:64].view(8, 8))
    other = nn.Linear(4, 4, bias=False)
    other.weight = nn.Parameter(flat[64:80].view(4, 4))
    held = live_memory([model, other])
    assert held.sizes == {"cpu": (("parameters", 400),)}
    assert held.addresses == {("cpu", flat.untyped_storage().data_ptr())}
    assert held.allocator == {}


def test_tensors_without_memory_hold_none() -> None:
    assert live_memory([nn.Linear(8, 8, device="meta"), nn.LazyLinear(3)]).sizes == {}


def test_figures_of_torchs_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    """For each CUDA device, the statistics at both ends; none if CUDA was not used."""
    now = {"allocated_bytes.all.current": 10, "allocated_bytes.all.peak": 30, "reserved_bytes.all.current": 2000}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(
        torch.cuda, "memory_stats", lambda index: {key: size * (index + 1) for key, size in now.items()}
    )
    start = live_memory([])
    assert start.allocator == {}
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert allocators_between(start, live_memory([])) == {
        f"cuda:{index}": (
            ("allocated", 0, 10 * (index + 1)),
            ("allocated at most", 0, 30 * (index + 1)),
            ("reserved", 0, 2000 * (index + 1)),
            ("reserved at most", 0, 0),
        )
        for index in (0, 1)
    }


@pytest.mark.usefixtures("garbage_is_not_collected")
def test_the_observer_is_freed_without_the_garbage_collector() -> None:
    """It has an entry for each memory event: a reference cycle would keep all of them until a full collection."""
    observer = Allocations(())
    alive = ref(observer)
    del observer
    assert alive() is None


# Casts of autocast, and temporaries of optimizers


@pytest.mark.parametrize("cache_enabled", [True, False])
def test_the_casts_that_autocast_keeps_are_no_activations_and_nothing_is_saved(cache_enabled: bool) -> None:
    """Of each weight and bias, in half the bytes; without the cache they are freed at once."""
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)]).eval()
    with torchprof.Profile(model, profile_memory=True) as prof:
        for _ in range(2):
            with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=cache_enabled):
                model(torch.rand(16, 64))
    live = Counter[str]()
    for held in prof.run.memory[0].held:
        live[held.kind] += held.nbytes
    kept = sum(parameter.numel() * 2 for parameter in model.parameters()) if cache_enabled else 0
    assert live["weight casts"] == kept and live["activations"] <= 16 * 64 * 2
    saved = [spread.sum for key, spread in prof.run.samples.items() if key.measure == "kept_bytes"]
    assert saved and not any(saved)


def test_the_casts_of_a_training_call_are_activations() -> None:
    """They are saved for backward, and freed in it."""
    model = nn.Linear(64, 64)
    with torchprof.Profile(model, profile_memory=True) as prof:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(torch.rand(16, 64)).sum()
        loss.backward()
    assert {held.kind for held in prof.run.memory[0].held}.isdisjoint({"weight casts"})
    assert sum(spread.sum for key, spread in prof.run.samples.items() if key.measure == "kept_bytes") > 0


@pytest.mark.parametrize("fused", [True, False])
def test_what_an_optimizer_frees_before_its_step_ends_is_a_temporary_of_it(fused: bool) -> None:
    model = nn.Linear(512, 512, bias=False)
    optimizer = torch.optim.Adam(model.parameters(), fused=fused)
    with torchprof.Profile(model, profile_memory=True, with_timeline=True) as prof:
        for _ in range(2):
            model(torch.rand(2, 512)).sum().backward()
            optimizer.step()
    timeline = prof.run.timeline
    assert timeline is not None
    numbers = zip(timeline.columns["kind"], timeline.columns["nbytes"])
    largest = max((size for kind, size in numbers if KINDS[kind] == "optimizer temporaries"), default=0)
    assert largest <= 64 if fused else largest == 512 * 512 * 4


@pytest.mark.parametrize(("name", "says"), [("Adam", True), ("RMSprop", False)])
def test_temporaries_of_an_optimizer_are_a_finding_if_it_has_a_fused_step(name: str, says: bool) -> None:
    model = nn.Linear(2048, 1024, bias=False)
    optimizer = getattr(torch.optim, name)(model.parameters(), foreach=False)
    with torchprof.Profile(model, profile_memory=True) as prof:
        for _ in range(3):
            model(torch.rand(2, 2048)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    text = " ".join(prof.run.report("findings").split())
    assert ("temporaries of the optimizer (Adam)" in text, "(…, fused=True)`, which has none" in text) == (says, says)


@pytest.mark.parametrize(
    ("make", "copies"),
    [
        (lambda params: torch.optim.SGD(params, 0.1), 0),
        (lambda params: torch.optim.SGD(params, 0.1, momentum=0.9), 1),
        (lambda params: torch.optim.Adam(params), 2),
        (lambda params: torch.optim.AdamW(params, amsgrad=True), 3),
    ],
    ids=["SGD", "momentum", "Adam", "AMSGrad"],
)
def test_the_state_of_an_optimizer_is_live_at_the_start(make: Callable[..., Any], copies: int) -> None:
    """So many copies of the parameters, and in Adam a step of 4 bytes for each. Other models have their own."""
    model, other = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 8)), nn.Linear(512, 512)
    optimizers = [make(model.parameters()), torch.optim.Adam(other.parameters())]
    for optimizer, net, width in zip(optimizers, (model, other), (64, 512)):
        net(torch.rand(2, width)).sum().backward()
        optimizer.step()
    with torchprof.Profile(model, profile_memory=True) as prof:
        model(torch.rand(2, 64)).sum().backward()
    params = [*model.parameters()]
    size = sum(param.numel() * 4 for param in params)
    before = dict(prof.run.memory[0].before or ())
    assert before["parameters"] == before["gradients"] == size
    assert before.get("optimizer state", 0) == copies * size + 4 * len(params) * (copies > 1)
    row = next((line for line in prof.run.report("memory").splitlines() if line.startswith("optimizer state")), "")
    assert bool(row) == (copies > 0)
    assert {held.kind for held in prof.run.memory[0].held}.isdisjoint({"parameters", "optimizer state"})
