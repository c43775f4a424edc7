"""``benchmark``: its figures compared with ``statistics`` on a fake clock, its calls, and what it leaves behind."""

import gc
import io
import re
import runpy
import statistics
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from build.models import Layers
from build.places import ROOT
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import torchprof
from torchprof import TorchprofError
from torchprof.profile import benchmark as benchmark_module
from torchprof.profile.benchmark import BenchmarkResult, Latency, benchmark
from torchprof.record import this_process
from torchprof.run.meta import Peak


class Spy(Layers):
    """Passes its input to ``seen`` and returns the result of ``then``. It has one parameter, so it can be trained."""

    def __init__(self, then: Callable[..., Any] = lambda *args, **kwargs: None) -> None:
        super().__init__(weight=nn.Parameter(torch.ones(())), then=then)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        self.then(*args, **kwargs)
        first = next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        return self.weight * first.float().sum()


class Clock:
    """A fake clock: its calls start and end intervals in turn, and the intervals have the given lengths."""

    def __init__(self, *durations: float) -> None:
        self.durations = iter(durations)
        self.now = 100.0
        self.running = False

    def __call__(self) -> float:
        self.now += next(self.durations) if self.running else 7
        self.running = not self.running
        return self.now


# The figures


@given(st.lists(st.floats(1e-7, 1e3), min_size=2, max_size=400))
def test_the_figures_equal_those_of_the_statistics_module(seconds: list[float]) -> None:
    row = Latency(3, tuple(seconds))
    assert row.mean == pytest.approx(statistics.fmean(seconds))
    assert row.std == pytest.approx(statistics.stdev(seconds), rel=1e-6, abs=1e-12)
    assert row.median == pytest.approx(statistics.median(seconds))
    assert row.p95 == pytest.approx(statistics.quantiles(seconds, n=20, method="inclusive")[-1])
    assert (row.min, row.max) == (min(seconds), max(seconds))
    assert row.samples_per_s == pytest.approx(3 * len(seconds) / sum(seconds))


def test_each_call_is_timed_but_warm_up_calls_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    durations = [900, 800, 0.5, 0.25, 1.0, 0.75]
    monkeypatch.setattr(benchmark_module, "timer", Clock(*durations, *(2 * one for one in durations)))
    result = benchmark(Spy(), torch.ones(2), (2, 6), warmup=2, repeat=4)
    assert [row.batch_size for row in result.rows] == [2, 6]
    assert [row.seconds for row in result.rows] == [(0.5, 0.25, 1.0, 0.75), (1.0, 0.5, 2.0, 1.5)]
    assert [row.samples_per_s for row in result.rows] == [2 / 0.625, 6 / 1.25]
    assert (result.model, result.step, result.device) == ("Spy", "inference", "cpu")


def test_the_figures_of_a_row_without_calls_are_none() -> None:
    row = Latency(8, error="out of memory")
    assert [row.mean, row.std, row.median, row.p95, row.min, row.max, row.samples_per_s] == [None] * 7


def test_the_clock_waits_for_all_devices_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own clock waits only for the current device."""
    waited = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    monkeypatch.setattr(torch.mps, "synchronize", lambda: waited.append("mps"))
    monkeypatch.setattr(benchmark_module, "timer", lambda: waited.append("timer") or 5.0)
    on = [SimpleNamespace(device=torch.device(name)) for name in ("cpu", "cuda:1", "cuda:1", "meta")]
    model = SimpleNamespace(parameters=lambda: on[:2], buffers=lambda: on[2:])
    timing = benchmark_module._Timing(model, [*model.parameters()], False, None, None, 0, 2, lambda text: None, [])
    clock = timing._clock(SimpleNamespace(tensors=[SimpleNamespace(device=torch.device("mps"))]))
    assert waited == []
    assert clock() == 5.0
    assert waited == [torch.device("cuda:1"), "mps", "timer"]
    assert timing.devices == (torch.device("cuda:1"), torch.device("mps"))


def test_the_table_of_a_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 1, 2 and 3 ms, the sample standard deviation is 1 ms (not 0.816, as of a population), the 95% quantile 2.9."""
    rows = (Latency(1, (0.002, 0.001, 0.003)), Latency(16, error="CUDA out of memory. Tried to allocate 2.00 GiB"))
    result = BenchmarkResult("Net", "inference", "cuda:0", 3, 20, rows, ("A warning.",))
    assert str(result).splitlines() == [
        "Batch size | Mean ± std        | Median  | P95     | Min     | Max     | Samples/s",
        "-----------|-------------------|---------|---------|---------|---------|----------",
        "1          | 2.000ms ± 1.000ms | 2.000ms | 2.900ms | 1.000ms | 3.000ms | 500",
        "16         | out of memory     | –       | –       | –       | –       | –",
        "",
        "Net, inference on cuda:0: 20 calls at each batch size, after 3 that were not timed.",
        "Batch size 16 did not fit in memory: CUDA out of memory. Tried to allocate 2.00 GiB",
        "A warning.",
    ]


def test_the_processors_name_comes_from_linux_or_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(this_process.Path, "is_file", lambda self: True)
    monkeypatch.setattr(
        this_process.Path, "read_text", lambda self, **_: "processor : 0\nmodel\t: 1\nmodel name\t: Abacus: 9\n"
    )
    assert this_process.cpu_name.__wrapped__() == "Abacus: 9"
    monkeypatch.setattr(this_process.Path, "read_text", lambda self, **_: "CPU part : 0xd0c\n")
    monkeypatch.setattr(this_process.platform, "processor", lambda: "")
    monkeypatch.setattr(this_process.platform, "machine", lambda: "aarch64")
    assert this_process.cpu_name.__wrapped__() == "aarch64"


# The calls


@pytest.mark.parametrize("train", [False, True, 1])
def test_the_number_and_the_mode_of_the_calls(train: bool) -> None:
    seen = []

    def look(x: Tensor) -> None:
        seen.append((len(x), model.training, torch.is_inference_mode_enabled(), torch.is_grad_enabled()))

    model = Spy(look)
    model.train(not train)
    benchmark(model, torch.ones(3), (1, 5), warmup=2, repeat=4, train=train)
    assert seen == [(size, bool(train), not train, bool(train)) for size in (1, 5) for _ in range(2 + 4)]
    assert model.training is (not train)


def test_the_defaults_of_batch_sizes_warmup_and_repeat() -> None:
    calls = []
    benchmark(Spy(lambda x: calls.append(len(x))), torch.ones(1))
    assert calls == [1] * (3 + 20) + [8] * (3 + 20)


@pytest.mark.parametrize("train", [False, True])
def test_a_model_in_the_right_mode_keeps_the_modes_of_its_submodules(train: bool) -> None:
    seen = set()
    model = nn.Sequential(Spy(lambda x: seen.add((model.training, model[0].training, model[1].training))), Spy())
    model.train(train)
    model[1].train(not train)
    benchmark(model, torch.ones(1), (1,), warmup=0, repeat=2, train=train)
    assert seen == {(train, train, not train)}
    assert [module.training for module in model.modules()] == [train, train, not train]


def test_a_training_step_runs_backward_and_the_optimizer() -> None:
    """For the sum of all outputs, the gradient of a Linear's bias is the batch size if gradients do not accumulate."""
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    gradients, biases, before = [], [], []
    start = model.bias.detach().clone()
    model.register_forward_pre_hook(lambda module, args: before.append(module.bias.grad))
    optimizer.register_step_pre_hook(lambda *_: gradients.append(model.bias.grad.tolist()))
    optimizer.register_step_post_hook(lambda *_: biases.append(model.bias.detach().clone()))
    result = benchmark(model, torch.rand(3, 4), (2, 3), warmup=1, repeat=2, train=True, optimizer=optimizer)
    assert gradients == [[2.0, 2.0]] * 3 + [[3.0, 3.0]] * 3
    assert before == [None] * 6
    # Each batch size goes on from the parameters that the one before left.
    expected = [start - 0.5 * done for done in (2, 4, 6, 9, 12, 15)]
    torch.testing.assert_close(torch.stack(biases), torch.stack(expected))
    assert result.step == "training step with SGD"
    assert "training step with SGD on cpu: 2 calls" in str(result)


def test_the_loss_gets_the_output() -> None:
    """For the mean of the squares of w·x, the gradient is 2·w·x² = 2·5·9."""
    gradients = []
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 5)
    model.weight.register_hook(lambda gradient: gradients.append(gradient.item()))
    x = torch.full((1, 1), 3.0)
    benchmark(model, x, (1, 4), warmup=0, repeat=2, train=True, loss=lambda output: output.square().mean())
    assert gradients == [90.0] * 4


class Weighted(Layers):
    """A loss with a parameter: w · the sum of the outputs."""

    def forward(self, output: torch.Tensor) -> torch.Tensor:
        return self.weight * output.sum()


def test_gradients_of_a_loss_do_not_accumulate_and_are_restored() -> None:
    loss, accumulated = Weighted(weight=nn.Parameter(torch.ones(()))), []
    loss.weight.grad = before = torch.tensor(1.0)
    optimizer = torch.optim.SGD(loss.parameters(), lr=0.0)
    optimizer.register_step_pre_hook(lambda *_: accumulated.append(loss.weight.grad.item()))
    x = torch.full((2, 1), 3.0)
    benchmark(nn.Identity(), x, (2,), warmup=0, repeat=3, train=True, loss=loss, optimizer=optimizer)
    assert accumulated == [6.0] * 3
    assert loss.weight.grad is before


def test_without_a_loss_all_outputs_with_a_gradient_are_summed() -> None:
    class Several(Layers):
        def forward(self, x: Tensor) -> dict[str, Any]:
            return {"a": 2 * self.weight, "b": [x, (3 * self.weight).expand(4)], "c": "text"}

    gradients = []
    model = Several(weight=nn.Parameter(torch.ones(())))
    model.weight.register_hook(lambda gradient: gradients.append(gradient.item()))
    benchmark(model, torch.ones(1), (1,), warmup=0, repeat=2, train=True)
    assert gradients == [2.0 + 4 * 3.0] * 2


@pytest.mark.parametrize("around", [nullcontext, torch.no_grad, torch.inference_mode])
def test_training_needs_no_optimizer_and_does_not_depend_on_the_callers_grad_mode(around: Callable[[], Any]) -> None:
    backward = []
    model = nn.Linear(4, 2)
    model.weight.register_hook(lambda gradient: backward.append(1))
    with around():
        result = benchmark(model, torch.rand(1, 4), (1, 2), warmup=1, repeat=2, train=True)
    assert (len(backward), result.step) == (6, "training step")


def test_a_model_that_uses_autograd_itself_runs_without_inference_mode() -> None:
    class Force(Layers):
        def forward(self, x: Tensor) -> Tensor:
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                modes.append((torch.is_inference_mode_enabled(), len(x)))
                return torch.autograd.grad((self.energy(x) * x).sum(), x)[0]

    modes: list[tuple[bool, int]] = []
    model = Force(energy=nn.Linear(3, 1))
    result = benchmark(model, torch.rand(2, 3), (1, 2), warmup=1, repeat=2)
    assert modes == [(True, 1)] + [(False, 1)] * 3 + [(False, 2)] * 3
    assert [len(row.seconds) for row in result.rows] == [2, 2]
    assert model.energy.weight.grad is None
    (warning,) = result.warnings
    assert warning.startswith("Ran under torch.no_grad(): under torch.inference_mode() the model failed: element 0")
    assert warning in str(result)


def test_the_garbage_collector_is_on_between_the_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = at_a_terminal(monkeypatch)
    seen = []
    terminal.write = lambda text: seen.append((gc.isenabled(), text))
    benchmark(Spy(), torch.ones(1), (1,), warmup=1, repeat=2)
    assert [enabled for enabled, _ in seen] == [True] * 4


@pytest.mark.parametrize("was", [True, False])
def test_the_garbage_collector_is_off_while_a_call_is_timed_and_threads_are_as_many(was: bool) -> None:
    seen = set()
    around = gc.isenabled()
    try:
        (gc.enable if was else gc.disable)()
        look = Spy(lambda x: seen.add((gc.isenabled(), torch.get_num_threads())))
        benchmark(look, torch.ones(1), (1,), warmup=1, repeat=2)
        assert gc.isenabled() is was
        with pytest.raises(ZeroDivisionError):
            benchmark(Spy(lambda x: 1 / 0), torch.ones(1), (1,))
        assert gc.isenabled() is was
    finally:
        (gc.enable if around else gc.disable)()
    assert seen == {(False, torch.get_num_threads())}


@pytest.mark.parametrize("train", [False, True])
def test_under_autocast_every_call_casts_the_weights(train: bool) -> None:
    """As if each call had its own autocast block: within one block, torch caches the cast weights."""

    class Casts(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.count += func in (torch.ops.aten._to_copy.default, torch.ops.aten.to.dtype)
            return func(*args, **(kwargs or {}))

    model = nn.Linear(4, 4)
    x = torch.rand(2, 4)
    with torch.autocast("cpu", torch.bfloat16), Casts() as alone:
        with torch.set_grad_enabled(train):
            total = model(x).sum()
        if train:
            total.backward()
    with torch.autocast("cpu", torch.bfloat16), Casts() as all_calls:
        benchmark(model, x, (2,), warmup=1, repeat=4, train=train, loss=torch.sum if train else None)
    assert alone.count > 0
    assert all_calls.count == 5 * alone.count


class OneMode(nn.Linear):
    """Like a module of torch.export: its mode cannot be changed."""

    def train(self, mode: bool = True) -> "OneMode":
        raise NotImplementedError("Calling train() is not supported yet.")


@pytest.mark.parametrize(
    ("make", "warnings"),
    [
        (lambda: torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout())), ()),
        (lambda: torch.jit.freeze(torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.Dropout()).eval())), ()),
        (lambda: torch.fx.symbolic_trace(nn.Sequential(nn.Linear(4, 4), nn.Dropout())), ()),
        (lambda: torch.compile(nn.Linear(4, 4), backend="eager"), ()),
        (lambda: OneMode(4, 4), ("The model cannot be switched to eval mode, and ran as it is.",)),
    ],
    ids=["script", "frozen", "fx", "compile", "one mode"],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_models_that_are_not_plain_modules(make: Callable[[], nn.Module], warnings: tuple[str, ...]) -> None:
    model = make()
    modes = [getattr(module, "training", None) for module in model.modules()]
    result = benchmark(model, torch.rand(2, 4), (2, 3), warmup=1, repeat=2)
    assert [len(row.seconds) for row in result.rows] == [2, 2]
    assert result.warnings == warnings
    assert [getattr(module, "training", None) for module in model.modules()] == modes


# The inputs


def calls_of(inputs: Any, sizes: tuple[int, ...], **options: Any) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """The inputs of the model, once for each batch size."""
    seen = []
    benchmark(Spy(lambda *args, **kwargs: seen.append((args, kwargs))), inputs, sizes, warmup=0, repeat=2, **options)
    assert len(seen) == 2 * len(sizes)
    return seen[::2]


def test_a_tensor_is_cut_or_repeated() -> None:
    x = torch.arange(3.0).repeat_interleave(2).view(3, 2)
    columns = [args[0].tolist() for args, _ in calls_of(x, (1, 2, 3, 4, 6, 8))]
    rows = [[float(at % 3)] * 2 for at in range(8)]
    assert columns == [rows[:size] for size in (1, 2, 3, 4, 6, 8)]


def test_tensors_of_a_tuple_that_are_not_batches_are_unchanged() -> None:
    weights = torch.rand(4, 2)
    scalar = torch.tensor(7)
    shapes = []
    for args, kwargs in calls_of(
        (torch.rand(2, 3), weights, [torch.ones(2, dtype=torch.bool), "text"], scalar, None), (1, 5)
    ):
        x, w, (mask, text), number, nothing = args
        assert not kwargs
        assert torch.equal(w, weights)
        assert (text, number.item(), nothing) == ("text", 7, None)
        shapes.append((tuple(x.shape), tuple(mask.shape), mask.dtype))
    assert shapes == [((1, 3), (1,), torch.bool), ((5, 3), (5,), torch.bool)]


def test_a_dict_gives_keyword_arguments() -> None:
    ids = torch.tensor([[1, 2], [3, 4]])
    for (args, kwargs), size in zip(calls_of({"ids": ids, "scale": 2.0, "mask": ids > 1}, (1, 3)), (1, 3)):
        assert not args
        assert list(kwargs) == ["ids", "scale", "mask"]
        assert kwargs["ids"].tolist() == [[1, 2], [3, 4], [1, 2]][:size]
        assert torch.equal(kwargs["mask"], kwargs["ids"] > 1)
        assert kwargs["scale"] == 2.0


@pytest.mark.parametrize("kind", ["tensor", "tuple", "dict"])
def test_a_function_makes_the_inputs(kind: str) -> None:
    asked = []

    def make(size: int) -> Any:
        asked.append(size)
        x = torch.full((size, 1), float(size))
        return {"tensor": x, "tuple": (x, 1), "dict": {"x": x}}[kind]

    got = [next(iter((*args, *kwargs.values()))) for args, kwargs in calls_of(make, (2, 5))]
    assert asked == [2, 5]
    assert [x.tolist() for x in got] == [[[2.0]] * 2, [[5.0]] * 5]


def test_arguments_that_are_not_tensors_are_unchanged() -> None:
    seen = []
    model = nn.LSTM(4, 4)
    model.register_forward_pre_hook(lambda module, args: seen.append(args))
    benchmark(model, lambda size: (PACKED,), (2,), warmup=0, repeat=2)
    for (packed,) in seen:
        assert isinstance(packed, nn.utils.rnn.PackedSequence)
        assert torch.equal(packed.data, PACKED.data)


def test_the_memory_format_and_requires_grad_are_kept() -> None:
    x = torch.rand(2, 3, 4, 4).to(memory_format=torch.channels_last).requires_grad_()
    gradients = []
    spy = Spy(lambda x: gradients.append(x.grad))
    benchmark(spy, x, (1, 3), warmup=0, repeat=2, train=True)
    assert gradients == [None] * 4
    for (args, _), size in zip(calls_of(x, (1, 2, 3, 4), train=True), (1, 2, 3, 4)):
        assert args[0].shape[0] == size
        assert args[0].is_contiguous(memory_format=torch.channels_last)
        assert not args[0].is_contiguous()
        assert args[0].requires_grad
        assert args[0].is_leaf
    assert x.grad is None


@pytest.mark.parametrize("as_function", [False, True])
def test_the_users_tensors_are_not_written_to(as_function: bool) -> None:
    x, other = torch.ones(2, 3), torch.ones(5)
    model = Spy(lambda *tensors: [tensor.zero_() for tensor in tensors])
    benchmark(model, (lambda size: (x, other)) if as_function else (x, other), (1, 2, 3), warmup=0, repeat=2)
    assert (x.sum().item(), other.sum().item()) == (6, 5)


# The state afterwards


@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("train", [False, True])
def test_modes_and_gradients_are_restored(train: bool, error: type[BaseException] | None) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)).train(not train)
    model[1].train(train)
    x = torch.rand(4, 4)
    model(x).sum().backward()
    model[0].bias.grad = None
    gradients = [parameter.grad for parameter in model.parameters()]
    values = [None if gradient is None else gradient.clone() for gradient in gradients]
    during = set()

    def watch(module: nn.Module, args: Any) -> None:
        during.add((module.training, module[1].training, all(one.grad is None for one in module.parameters())))
        if error is not None:
            raise error("enough")

    model.register_forward_pre_hook(watch)
    with pytest.raises(error) if error is not None else nullcontext():
        benchmark(model, x, (4, 8), warmup=1, repeat=2, train=train)
    assert during == {(train, train, train)}
    assert [module.training for module in model.modules()] == [not train, not train, train, not train]
    assert all(parameter.grad is gradient for parameter, gradient in zip(model.parameters(), gradients))
    for gradient, value in zip(gradients, values):
        assert value is None or torch.equal(gradient, value)


# Memory


def allocate_too_much(x: Tensor) -> None:
    if len(x) > 4:
        torch.empty(2**50)  # 4 PiB, more than any address space


def claim(error: BaseException) -> Callable[[Tensor], None]:
    def fail(x: Tensor) -> None:
        if len(x) > 4:
            raise error

    return fail


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize(
    ("fail", "said"),
    [
        (allocate_too_much, "DefaultCPUAllocator"),
        (claim(torch.cuda.OutOfMemoryError("CUDA out of memory. Tried\nmore")), "CUDA out of memory. Tried"),
        (claim(RuntimeError("MPS backend out of memory")), "MPS backend out of memory"),
        (claim(MemoryError()), "MemoryError"),
    ],
    ids=["torch's own", "CUDA", "MPS", "Python's"],
)
def test_after_out_of_memory_the_row_has_the_error_and_the_next_is_timed(fail: Any, said: str, train: bool) -> None:
    result = benchmark(Spy(fail), torch.ones(2), (2, 8, 4), warmup=0, repeat=2, train=train)
    assert [len(row.seconds) for row in result.rows] == [2, 0, 2]
    assert [row.error is None for row in result.rows] == [True, False, True]
    assert said in str(result.rows[1].error)
    assert "\n" not in str(result.rows[1].error)
    cells = [[cell.strip() for cell in line.split(" | ")] for line in str(result).splitlines()[2:5]]
    assert [row[0] for row in cells] == ["2", "8", "4"]
    assert [row[1:] == ["out of memory", *"–––––"] for row in cells] == [False, True, False]
    assert not result.warnings


def test_a_batch_that_does_not_fit_into_memory_has_a_row() -> None:
    result = benchmark(Spy(), lambda size: torch.empty(2**50 if size > 1 else 1), (1, 2), warmup=0, repeat=2)
    assert [row.error is None for row in result.rows] == [True, False]


# Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def at_a_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Call this in the test itself: pytest sets its own stderr after the fixtures."""
    fake = Terminal()
    monkeypatch.setattr(sys, "stderr", fake)
    monkeypatch.setattr(benchmark_module, "_UPDATE_S", 0)
    return fake


def test_on_a_terminal_the_progress_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = at_a_terminal(monkeypatch)
    benchmark(Spy(), torch.ones(1), (1, 32), warmup=1, repeat=2)
    shown = terminal.getvalue().split("\r\033[K")
    calls = [f"batch size {size}, call {call} of 3 " for size in (1, 32) for call in (1, 2, 3)]
    assert shown == ["", *calls, ""]  # the last one is empty: the line was erased


def test_the_progress_line_is_erased_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = at_a_terminal(monkeypatch)
    with pytest.raises(ZeroDivisionError):
        benchmark(Spy(lambda x: 1 / 0), torch.ones(1), (1,))
    assert terminal.getvalue() == "\r\033[Kbatch size 1, call 1 of 23 \r\033[K"


def test_the_terminal_is_not_written_to_for_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = at_a_terminal(monkeypatch)
    monkeypatch.setattr(benchmark_module, "_UPDATE_S", 3600)
    benchmark(Spy(), torch.ones(1), (1, 2), warmup=1, repeat=2)
    assert terminal.getvalue() == "\r\033[Kbatch size 1, call 1 of 3 \r\033[K"


def test_without_a_terminal_no_progress_is_written(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    benchmark(Spy(), torch.ones(1), (1,))
    assert capfd.readouterr() == ("", "")
    monkeypatch.setattr(sys, "stderr", None)  # as in a program without a console
    benchmark(Spy(), torch.ones(1), (1,), warmup=0, repeat=2)


# Errors


MODEL = nn.Linear(4, 2)
X = torch.rand(2, 4)
PACKED = nn.utils.rnn.pack_sequence([torch.ones(3, 4), torch.zeros(2, 4)])


@pytest.mark.parametrize(
    ("arguments", "options", "said"),
    [
        ((len, X), {}, "benchmark needs a torch.nn.Module, not <built-in"),
        ((nn.Linear, X), {}, r"Make one first: Linear\(...\)"),
        ((Layers(inner=nn.LazyLinear(2)), X), {}, "inner.weight has no shape before the first call"),
        ((MODEL, X, ()), {}, r"batch_sizes must be a tuple of integers of at least 1, for example \(1, 8\), not \(\)"),
        ((MODEL, X, 8), {}, "batch_sizes must be .* not 8"),
        ((MODEL, X, "18"), {}, "batch_sizes must be .* not '18'"),
        ((MODEL, X, (1, 0)), {}, "A batch size must be an integer of at least 1, not 0"),
        ((MODEL, X, (1, 2.0)), {}, "not 2.0"),
        ((MODEL, X, (True,)), {}, "not True"),
        ((MODEL, X), {"warmup": -1}, "warmup must be a number of calls of the model, 0 or more, not -1"),
        ((MODEL, X), {"repeat": 1}, r"repeat must be a number of calls, 2 or more \(one call has no spread\), not 1"),
        ((MODEL, X), {"repeat": 2.5}, "not 2.5"),
        ((MODEL, X), {"loss": torch.sum}, "add train=True"),
        ((MODEL, X), {"optimizer": torch.optim.SGD(MODEL.parameters(), lr=0.1)}, "add train=True"),
        ((MODEL, X), {"train": True, "loss": 3}, "loss must be a function of the model's output, not 3"),
        ((MODEL, X), {"train": True, "optimizer": "SGD"}, "optimizer must be a torch.optim.Optimizer, not 'SGD'"),
        ((MODEL, X), {"train": True, "optimizer": torch.optim.SGD}, r"Make one first: SGD\(model.parameters\(\)\)"),
        ((MODEL, X), {"train": True, "loss": lambda output: 3.0}, "loss returned 3.0; backward needs a tensor"),
        ((MODEL, X), {"train": True, "loss": torch.detach}, "loss returned tensor"),
        ((nn.Identity(), X), {"train": True}, "No output of the model has a gradient"),
        ((MODEL, None), {}, "inputs must be a tensor, a tuple of arguments, .* not NoneType"),
        ((MODEL, PACKED), {}, "not PackedSequence"),
        ((MODEL, lambda size: "text"), {}, "inputs must be a tensor, .* not str"),
        ((MODEL, ()), {}, "inputs holds no tensor with a dimension, .* inputs=lambda size"),
        ((MODEL, {"x": torch.tensor(1.0), "n": 3}), {}, "inputs holds no tensor with a dimension"),
        ((MODEL, torch.rand(0, 4)), {}, "inputs holds an empty batch"),
        ((MODEL, torch.rand(2, 4, device="meta")), {}, "inputs are on the meta device"),
        (
            (nn.Identity(), torch.eye(3).to_sparse(), (1,)),
            {},
            "this sparse_coo tensor, so that its batch of 3 cannot become one of 1. .* inputs=lambda size",
        ),
    ],
)
def test_bad_arguments_are_refused(arguments: Any, options: dict[str, Any], said: str) -> None:
    with pytest.raises(TorchprofError, match=said):
        benchmark(*arguments, **options)
    assert all(parameter.grad is None for parameter in MODEL.parameters())


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("error", [RuntimeError("mine"), ValueError("mine"), TypeError("mine")], ids=repr)
@pytest.mark.parametrize("where", ["model", "inputs"])
def test_errors_of_the_model_the_loss_and_the_inputs_pass_through(where: str, error: Exception, train: bool) -> None:
    def fail(*args: Any) -> Any:
        raise error

    with pytest.raises(type(error)) as caught:
        if where == "model":
            benchmark(Spy(fail), torch.ones(1), train=train)
        else:
            benchmark(Spy(), fail, train=train)
    assert caught.value is error
    assert error.__cause__ is None
    assert error.__context__ is None


# The documentation


@pytest.fixture
def in_root(monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(ROOT))
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    monkeypatch.setattr(torchprof, "benchmark", benchmark, raising=False)
    monkeypatch.setattr(torchprof, "peak", fake_peak, raising=False)  # this would take a second and test nothing new
    return ROOT


def fake_peak(device: str, dtype: torch.dtype = torch.float32) -> Peak:
    return Peak(device, str(dtype).removeprefix("torch."), 2, 3e9, 4e9)


def headings_and_sizes(text: str) -> list[list[str]]:
    """The parts that are the same in each run: the headings and the first column."""
    lines = [line for line in text.splitlines() if " | " in line]
    return [lines[0].split()] + [line.split()[:1] for line in lines[1:]]


def test_the_code_blocks_of_the_documentation_print_what_it_shows(
    in_root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (in_root / "docs" / "latency.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```(\w+)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert [language for language, _ in blocks] == ["python", "text", "python", "python", "python", "python"]
    space: dict[str, Any] = {}
    printed = []
    for language, block in blocks:
        if language == "python":
            exec(compile(block, "latency.md", "exec"), space)
            printed.append(capsys.readouterr().out)
    assert headings_and_sizes(printed[0]) == headings_and_sizes(blocks[1][1])
    shown, written = printed[0].splitlines()[-2], blocks[1][1].splitlines()[-2]
    assert shown == written
    assert [row.batch_size for row in space["trained"].rows] == [1, 4, 16]
    assert "training step with AdamW" in str(space["trained"])
    assert printed[4] == "3 GFLOP/s, 4 GB/s with 2 threads\n"


def test_the_example_runs(in_root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "models", raising=False)  # the tests have a module with this name, too
    runpy.run_path(str(in_root / "examples" / "latency.py"))
    out = capsys.readouterr().out
    assert [line.split()[0] for line in out.splitlines() if " | " in line] == ["Batch", "1", "4", "16"] * 2
    assert "TinyTransformer, inference on" in out
    assert "TinyTransformer, training step with AdamW on" in out
    assert "in float32: 3.0 GFLOP/s in a product of matrices, 4.0 GB/s in a copy." in out


def test_a_result_shows_itself_as_a_table() -> None:
    """At Python's prompt and in a notebook."""
    result = benchmark(torch.nn.Linear(2, 2), torch.rand(1, 2), (1, 3), warmup=0, repeat=2)
    assert repr(result) == str(result)
    html = result._repr_html_()
    assert html.count("<tr>") == 1 + 2 and "<th>Batch size</th>" in html
