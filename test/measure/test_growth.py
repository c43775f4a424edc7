"""Memory that stays call by call, and what was live at the start: how much, and what keeps it."""

from __future__ import annotations

import gc
from collections import Counter, deque
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any, ClassVar
from weakref import ref

import numpy as np
import pytest
import torch
from build.examples import examples
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

import torchprof
from torchprof import Profile, Run
from torchprof.advise import advise
from torchprof.measure.memory_blocks import OTHERS, bytes_that_stay
from torchprof.record import this_process
from torchprof.record.this_process import live_memory
from torchprof.run.file import stripped
from torchprof.run.timeline import Growth, Memory
from torchprof.run.words import FORWARD, OUTSIDE

CALLS = 20
ROWS, WIDE = 64, 256
HIDDEN, OUTPUT = ROWS * 128 * 4, ROWS * WIDE * 4  # bytes of the two results of a call
module_history: list[Tensor] = []


@pytest.fixture
def model() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 128), nn.ReLU(inplace=True), nn.Linear(128, WIDE))


def batch() -> Tensor:
    return torch.randn(ROWS, 32)


def memory_of(model: nn.Module, work: Callable[[], Any], **options: Any) -> tuple[Memory, Run]:
    """The memory of the CPU over some work. What the work returns is kept until the run is read."""
    with Profile(model, profile_memory=True, **options) as prof:
        kept = work()
    run = prof.run
    del kept
    (memory,) = run.memory
    return memory, run


def grown(memory: Memory, layer: int = 3) -> list[Growth]:
    assert memory.growth is not None
    return [growth for growth in memory.growth if growth.layer == layer]


class Meter:
    """It keeps a sum, with its graph."""

    def __init__(self) -> None:
        self.total: Any = 0

    def add(self, value: Tensor) -> None:
        self.total = self.total + value


# How much


def test_outputs_in_a_list_without_gradients(model: nn.Module) -> None:
    outputs: list[Tensor] = []

    def work() -> None:
        with torch.no_grad():
            for _ in range(CALLS):
                outputs.append(model(batch()))

    memory, run = memory_of(model, work)
    after_the_second = sum(output.untyped_storage().nbytes() for output in outputs[2:])
    assert grown(memory) == [Growth(3, FORWARD, "activations", after_the_second, CALLS - 2, OUTPUT, OUTPUT)]
    assert memory.growth_per_call == OUTPUT
    assert run.metrics()["memory/cpu/growth_bytes_per_call"] == OUTPUT
    assert memory.holder is not None
    assert memory.holder._replace(where="") == (
        "outputs",
        "",
        "list",
        18,
        after_the_second,
        "float32",
        False,
        False,
    )


def test_what_is_freed_at_the_end_of_the_loop_grew_until_then(model: nn.Module) -> None:
    """Two evaluations, each with a list of its own, between training steps in which nothing stays."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def evaluate() -> None:
        outputs = []
        with torch.no_grad():
            for _ in range(10):
                outputs.append(model(batch()))

    def work() -> None:
        for _ in range(2):
            for _ in range(7):
                optimizer.zero_grad()
                model(batch()).sum().backward()
                optimizer.step()
            evaluate()

    [growth] = grown(memory_of(model, work)[0])
    assert (growth.nbytes / growth.calls, growth.least, growth.most) == (OUTPUT, OUTPUT, OUTPUT)
    assert 8 <= growth.calls <= 10


def test_graphs_that_a_sum_keeps(model: nn.Module) -> None:
    meter = Meter()
    memory, run = memory_of(model, lambda: [meter.add(model(batch()).sum()) for _ in range(CALLS)] and None)
    [of_first] = grown(memory, 1)  # the result of the second layer is that of the first, changed in place
    assert of_first.nbytes / of_first.calls == HIDDEN
    assert memory.holder is not None
    assert memory.holder[:3] == ("Meter.total", __name__, "tensor")
    assert memory.holder.with_graph
    assert memory.holder.are_numbers
    [finding] = [each for each in advise(run) if each.rule == "memory_that_grows"]
    assert "`loss.item()`" in finding.remedy


@pytest.mark.parametrize("every", [1, 3])
def test_steps_in_which_nothing_stays_are_in_the_mean(model: nn.Module, every: int) -> None:
    outputs: list[Tensor] = []

    def work() -> None:
        for step in range(2 + 18):
            output = model(batch()).detach()
            if step % every == 0:
                outputs.append(output)

    [growth] = grown(memory_of(model, work)[0])
    kept = sum(output.untyped_storage().nbytes() for output in outputs[-(-2 // every) :])
    assert abs(growth.nbytes - kept) <= OUTPUT  # the last one may be in the last call, or in none
    assert (growth.least, growth.most) == (OUTPUT if every == 1 else 0, OUTPUT)


def test_results_that_are_copied_to_a_larger_tensor_in_each_call(model: nn.Module) -> None:
    def work() -> Tensor:
        outputs = torch.zeros(0, WIDE)
        with torch.no_grad():
            for _ in range(CALLS):
                outputs = torch.cat([outputs, model(batch())])
        return outputs

    memory, _ = memory_of(model, work)
    [growth] = grown(memory, OUTSIDE)
    assert (growth.least, growth.most) == (OUTPUT, OUTPUT)
    assert growth.calls >= CALLS - 3


def test_cycles_add_up(model: nn.Module) -> None:
    outputs: list[Tensor] = []
    with Profile(model, profile_memory=True, schedule=torch.profiler.schedule(wait=0, warmup=1, active=12)) as prof:
        for _ in range(2 * 13):
            with torch.no_grad():
                outputs.append(model(batch()))
            prof.step()
    (memory,) = prof.run.memory
    [growth] = grown(memory)
    assert growth.nbytes == growth.calls * OUTPUT
    assert growth.calls in (2 * 9, 2 * 10)


# When nothing is said


def silent_loops(model: nn.Module) -> Iterator[tuple[str, Callable[[], Any]]]:
    optimizer = torch.optim.Adam(model.parameters())
    cache: dict[int, Tensor] = {}

    def training(rows: Callable[[int], int] = lambda step: ROWS) -> None:
        for step in range(30):
            optimizer.zero_grad()
            model(torch.randn(rows(step), 32)).pow(2).mean().backward()
            optimizer.step()

    def cached(least_recent: bool) -> None:
        for step in range(40):
            output = model(batch()).detach()
            if least_recent or step < 10:
                cache[step] = output
            if least_recent and len(cache) > 10:
                del cache[step - 10]

    generator = torch.Generator().manual_seed(0)
    yield "training", training
    yield "batches of any size", lambda: training(lambda _: int(torch.randint(8, 200, (), generator=generator)))
    yield "longer and longer batches", lambda: training(lambda step: 8 + 8 * step)
    yield "a cache that is full", lambda: cached(least_recent=False)
    yield "a cache of the last calls", lambda: cached(least_recent=True)

    def through_time() -> None:
        for _ in range(4):
            states = [model(batch()) for _ in range(12)]
            torch.stack(states).mean().backward()

    def sequences() -> None:
        with torch.no_grad():
            for _ in range(4):
                keys = [model(batch()) for _ in range(12)]
        del keys

    yield "calls before one backward pass", through_time
    yield "keys of one sequence after the other", sequences
    yield "the last results", lambda: deque((model(batch()) for _ in range(30)), maxlen=3)


@pytest.mark.parametrize("case", range(8))
def test_no_growth(model: nn.Module, case: int) -> None:
    name, work = [*silent_loops(model)][case]
    memory, run = memory_of(model, work)
    assert memory.growth == (), name
    assert run.metrics()["memory/cpu/growth_bytes_per_call"] == 0
    assert "No memory stays allocated call by call." in str(run.report("memory"))
    assert not [each for each in advise(run) if each.rule == "memory_that_grows"]


def test_with_few_calls_growth_is_unknown(model: nn.Module) -> None:
    memory, run = memory_of(model, lambda: [model(batch()) for _ in range(7)])
    assert memory.growth is memory.growth_per_call is None
    assert "memory/cpu/growth_bytes_per_call" not in run.metrics()
    assert "Whether memory grows call by call is unknown" in str(run.report("memory"))


kept_bytes = st.integers(1, 100)


@examples(200)
@given(st.lists(kept_bytes, min_size=8, max_size=30), st.integers(0, 5))
def test_what_every_call_keeps_until_the_end_stays(of_calls: list[int], after: int) -> None:
    """``after`` calls in which nothing is allocated, and what was kept is gone."""
    calls = len(of_calls) + after
    last = len(of_calls) if after else calls
    spans = [(call, last, 100 + nbytes) for call, nbytes in enumerate(of_calls)]
    stays = bytes_that_stay(spans, calls)
    assert stays == {call: 100 + nbytes for call, nbytes in enumerate(of_calls) if call >= 2}


@examples(200)
@given(st.integers(8, 40), st.integers(1, 7), st.lists(kept_bytes, min_size=40, max_size=40))
def test_what_lives_for_some_calls_does_not_stay(calls: int, lives: int, sizes: list[int]) -> None:
    """Each call frees what an earlier one allocated, for less than half of the calls."""
    lives = min(lives, calls // 2 - 2)
    spans = [(call, min(call + lives, calls), sizes[call]) for call in range(calls) if lives > 0]
    assert bytes_that_stay(spans, calls) is None


# What keeps it


class Slots:
    __slots__ = ("items",)


def keepers() -> Iterator[tuple[str | None, Callable[[int, Tensor], Any]]]:
    """The name of what keeps results, and how it does. All are made here: the tests hide what was made before from the
    garbage collector (``gc.freeze``)."""

    class Shared:
        store: ClassVar[dict[int, Any]] = {}

    global module_history
    module_history = []
    history: dict[str, list[Any]] = {"loss": []}
    rows: deque[Any] = deque()
    slots, meter = Slots(), Meter()
    slots.items = []
    yield "history['loss']", lambda step, output: history["loss"].append(output.mean())
    yield "rows", lambda step, output: rows.append({"step": step, "result": (output,)})
    yield "Meter.total", lambda step, output: meter.add(output.mean())
    yield "Shared.store", lambda step, output: Shared.store.update({step: [output]})
    yield "module_history", lambda step, output: module_history.append(output.detach())
    yield None, lambda step, output: slots.items.append(output)


@pytest.mark.parametrize("case", range(6))
def test_the_name_of_what_keeps_memory(model: nn.Module, case: int) -> None:
    name, keep = [*keepers()][case]
    memory, _ = memory_of(model, lambda: [keep(step, model(batch())) for step in range(CALLS)] and None)
    assert memory.growth_per_call is not None
    assert memory.growth_per_call >= HIDDEN
    assert (None if memory.holder is None else memory.holder.name) == name


def test_no_hook_of_saved_tensors_runs(model: nn.Module) -> None:
    """Graphs are read without unpacking: with checkpoints and offloading that would compute, or copy."""
    unpacked = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.clone(), unpacked.append):
        memory, _ = memory_of(model, lambda: [model(batch()).sum() for _ in range(CALLS)])
    assert memory.growth
    assert not unpacked


# What was live at the start


def others_in(run: Run) -> Counter[str]:
    return Counter({kind: nbytes for kind, nbytes in run.memory[0].before or () if kind in OTHERS})


# pytest puts ``locals()`` into a function with an assertion, and the variables of such a function are not looked at.


def with_pictures(model: nn.Module) -> tuple[Memory, Run, int, int]:
    """The memory and the run of a call with 40 pictures; the bytes of these tensors, and of a copy of the model."""
    pictures = [torch.zeros(2**20) for _ in range(40)]
    views, rows = [picture[1:] for picture in pictures], {"numpy": torch.from_numpy(np.zeros(100))}
    copy = deepcopy(model)
    memory, run = memory_of(model, lambda: model(batch()))
    of_copy = sum(param.nbytes for param in copy.parameters())
    return memory, run, sum(view.untyped_storage().nbytes() for view in views) + rows["numpy"].nbytes, of_copy


def test_other_tensors_and_parameters_are_live_at_the_start(model: nn.Module) -> None:
    """Each storage counts once, whoever has it; the test process has other tensors, too."""
    _, run = memory_of(model, lambda: model(batch()))
    before = others_in(run)
    memory, run, of_tensors, of_copy = with_pictures(model)
    assert others_in(run) - before == {"other tensors": of_tensors, "other parameters": of_copy}
    assert memory.others is not None
    assert memory.others[1:5] == ("with_pictures", "list", 40, 40 * 2**22)
    assert "160.00 MB of other tensors and parameters are in the list `" in str(run.report("memory"))


def with_a_copy() -> tuple[Memory, int]:
    model = nn.Sequential(nn.Sequential(nn.Linear(2048, 1024)), nn.Linear(1024, 1))
    best = {"model": deepcopy(model)}
    memory, _ = memory_of(model, lambda: model(torch.zeros(1, 2048)))
    return memory, sum(param.nbytes for param in best["model"].parameters())


def test_what_keeps_a_copy_of_the_model() -> None:
    memory, of_copy = with_a_copy()
    assert memory.others is not None
    assert memory.others[:3] == ("best['model']", "with_a_copy", "Sequential")
    assert memory.others.nbytes == of_copy


def with_locals(model: nn.Module) -> dict[str, Any]:
    """A script that keeps its settings so; more variables follow."""
    rate, steps = 0.1, 3
    settings = locals()
    pictures = [torch.zeros(2**20) for _ in range(2)]
    memory_of(model, lambda: [model(batch()) for _ in range(steps)])
    del pictures
    return settings


def test_the_dict_of_locals_stays_as_it_was(model: nn.Module) -> None:
    assert with_locals(model) == {"model": model, "rate": 0.1, "steps": 3}


class Careless(Tensor):
    """A tensor whose class lets no operation through."""

    @classmethod
    def __torch_function__(cls, *_: Any, **__: Any) -> Any:
        raise ValueError("not for this class")


def test_odd_objects_of_the_user_do_no_harm(model: nn.Module) -> None:
    """No code of them runs, and modules may refer to each other."""

    class Odd(list):  # type: ignore[type-arg]
        ran: ClassVar[list[str]] = []

        @property
        def __class__(self) -> Any:
            self.ran.append("class")
            raise RuntimeError

        @property
        def __dict__(self) -> Any:
            self.ran.append("dict")
            raise RuntimeError

    parent, outputs = deepcopy(model), Odd()
    parent.add_module("child", nn.Linear(1024, 512))
    parent.child.add_module("parent", parent)
    careless = torch.zeros(2**18).as_subclass(Careless)
    no_storage = torch.eye(3).to_sparse()
    memory, _ = memory_of(model, lambda: [outputs.append(model(batch())) for _ in range(CALLS)] and None)
    assert Odd.ran == []
    assert [growth.nbytes for growth in grown(memory)] == [18 * OUTPUT]
    assert type(careless) is Careless
    assert no_storage.is_sparse


def searched(model: nn.Module) -> tuple[Memory, list[Any]]:
    """The memory of some calls, and references to what was searched, all of which is dropped."""
    pictures = [torch.zeros(2**20) for _ in range(40)]
    outputs: list[Tensor] = []
    memory, _ = memory_of(model, lambda: [outputs.append(model(batch())) for _ in range(CALLS)] and None)
    return memory, [ref(pictures[0]), ref(outputs[-1])]


def test_the_search_keeps_nothing(model: nn.Module) -> None:
    """What it looked at is freed as soon as the user drops it, without the garbage collector."""
    gc.disable()
    try:
        memory, references = searched(model)
        assert memory.others is not None
        assert memory.holder is not None
        assert [each() for each in references] == [None, None]
    finally:
        gc.enable()


def test_what_the_allocator_has_besides_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a device, whose allocator tells what it gave out."""
    monkeypatch.setattr(this_process, "_allocators", lambda: {"cuda:0": {"allocated": 1000}})
    recorded = {("cuda:0", 4096): ("weight casts", 600)}
    sizes = live_memory([], watch=True, recorded=recorded).sizes
    assert dict(sizes["cuda:0"]) == {"weight casts": 600, "unknown": 400}


def test_a_tensor_of_two_tensors_has_the_bytes_of_both() -> None:
    model = nn.Linear(64, 32)
    model.weight = nn.Parameter(TwoTensor(torch.rand(32, 64), torch.rand(32, 64)))
    _, run = memory_of(model, lambda: None)
    assert dict(run.memory[0].before or ())["parameters"] == 2 * 32 * 64 * 4 + 32 * 4
    assert (run.layers[0].params, run.layers[0].param_bytes) == (32 * 64 + 32, 2 * 32 * 64 * 4 + 32 * 4)


def test_packed_weights_of_quantized_modules_are_parameters() -> None:
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8)).eval()
    expected = sum(param.numel() for param in model.parameters())
    quantized = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, torch.qint8)
    _, run = memory_of(quantized, lambda: quantized(torch.rand(4, 64)))
    assert sum(layer.params or 0 for layer in run.layers) == expected == 2344
    assert sum(layer.param_bytes or 0 for layer in run.layers) == 64 * 32 + 32 * 8 + 4 * (32 + 8)
    recurrent = torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.LSTM(8, 8)), {nn.LSTM}, torch.qint8)
    _, run = memory_of(recurrent, lambda: None)
    assert {layer.params for layer in run.layers if layer.kind == "PackedParameter"} == {None}  # it does not tell


# What is shown


def test_a_file_has_growth_and_a_stripped_one_no_names(model: nn.Module, tmp_path: Any) -> None:
    kept_outputs: list[Tensor] = []
    memory, run = memory_of(model, lambda: [kept_outputs.append(model(batch())) for _ in range(CALLS)] and None)
    run.save(tmp_path / "run.json")
    assert torchprof.load(tmp_path / "run.json") == run
    assert memory.holder is not None
    assert memory.holder.name == "kept_outputs"
    assert "kept_outputs" in str(run.report("memory"))
    assert "kept_outputs" not in str(stripped(run).report("memory"))
    assert f"grows by {torchprof_memory(memory.growth_per_call)} a call" in str(run)
    [finding] = [each for each in advise(run) if each.rule == "memory_that_grows"]
    assert finding.gain_bytes == sum(growth.nbytes for growth in memory.growth or ())
    assert "`.detach()`" in finding.remedy
    assert not [each for each in advise(run) if each.rule == "layer_that_makes_the_peak"]


def torchprof_memory(nbytes: float | None) -> str:
    return f"{(nbytes or 0) / 1024:.2f} KB"
