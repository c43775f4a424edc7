"""``peak``: what it makes of the times of a product and a copy, what it keeps, and what a run carries of it."""

import dataclasses
import functools
import gc
import time
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.utils.benchmark
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import torchprof
from torchprof import TorchprofError
from torchprof.profile.program import Program
from torchprof.record import peak as peaks
from torchprof.record.peak import measured_peaks, peak
from torchprof.run.measures import Spread
from torchprof.run.meta import Peak
from torchprof.run.words import BACKWARD, FORWARD

PRODUCT_S = 0.5
COPY_S = 0.125


@pytest.fixture(autouse=True)
def _nothing_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peaks, "_measured", {})


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> list[SimpleNamespace]:
    """What was to be timed, in place of the clock: a product takes half a second, a copy an eighth."""
    seen: list[SimpleNamespace] = []

    def fastest(statement: str, names: dict[str, Any], now: Any) -> float:
        seen.append(SimpleNamespace(statement=statement, **names))
        return COPY_S if "target" in names else PRODUCT_S

    monkeypatch.setattr(peaks, "_fastest", fastest)
    monkeypatch.setattr(torch, "ones", torch.empty)  # memory that nobody writes to takes no time
    monkeypatch.setattr(peaks, "_ENOUGH_SECONDS", 0)
    return seen


def test_the_peak_is_that_of_the_fastest_product_and_copy(timed: list[SimpleNamespace]) -> None:
    """n³ multiplications and as many additions; each byte of the copy is read once and written once."""
    found = peak("cpu")
    product, copy = timed
    rows, inner = product.matrix.shape
    assert rows == inner
    assert found.flops_per_s == 2 * rows**3 / PRODUCT_S
    assert found.bytes_per_s == (copy.source.nbytes + copy.target.nbytes) / COPY_S
    assert found == Peak("cpu", "float32", torch.get_num_threads(), found.flops_per_s, found.bytes_per_s)
    assert (product.matrix.dtype, product.matrix.device.type) == (torch.float32, "cpu")


def test_a_product_and_a_copy_are_timed(timed: list[SimpleNamespace]) -> None:
    peak("cpu")
    product, copy = timed
    small = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    assert eval(product.statement, {"torch": torch, "matrix": small}).tolist() == [[7.0, 10.0], [15.0, 22.0]]
    source, target = torch.rand(8), torch.zeros(8)
    exec(copy.statement, {"source": source, "target": target})
    assert torch.equal(source, target)
    assert copy.source.data_ptr() != copy.target.data_ptr()


def test_a_second_call_measures_nothing(timed: list[SimpleNamespace]) -> None:
    first = peak("cpu")
    assert len(timed) == 2
    assert peak("cpu") is first
    assert peak(torch.device("cpu"), torch.float32) is first
    assert len(timed) == 2
    assert measured_peaks() == (first,)


def test_each_type_and_number_of_threads_is_measured_separately(
    timed: list[SimpleNamespace], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    single = peak("cpu")
    double = peak("cpu", torch.float64)
    assert timed[2].matrix.dtype is torch.float64
    monkeypatch.setattr(torch, "get_num_threads", lambda: 5)
    threads = peak("cpu")
    assert len(timed) == 6
    found = [(one.device, one.dtype, one.threads) for one in (single, double, threads)]
    assert found == [("cpu", "float32", 3), ("cpu", "float64", 3), ("cpu", "float32", 5)]
    assert measured_peaks() == (single, double, threads)


def test_without_a_device_it_is_cuda_where_there_is_one(
    timed: list[SimpleNamespace], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert peak().device == "cpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(TorchprofError, match="The peak of cuda"):
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
        monkeypatch.setattr(torch, "empty", lambda *shape, device: missing(device))
        peak()


def missing(device: torch.device) -> torch.Tensor:
    assert device.type == "cuda"
    raise RuntimeError("no such device")


def test_the_fastest_of_all_runs_counts_at_the_current_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    class Timer:
        def __init__(self, statement: str, **options: Any) -> None:
            made.append((statement, options["globals"], options["timer"], options["num_threads"]))

        def blocked_autorange(self, **options: Any) -> SimpleNamespace:
            return SimpleNamespace(times=[0.75, 0.25, 0.5], median=0.5)

    monkeypatch.setattr(torch.utils.benchmark, "Timer", Timer)
    assert peaks._fastest("x + 1", {"x": 1}, time.perf_counter) == 0.25
    assert made == [("x + 1", {"x": 1}, time.perf_counter, torch.get_num_threads())]


def test_the_clock_is_a_real_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sleep never ends early."""
    monkeypatch.setattr(peaks, "_SECONDS", 0.001)
    assert peaks._fastest("sleep(0.002)", {"sleep": time.sleep}, time.perf_counter) >= 0.002
    threads = torch.get_num_threads()
    found = peak("cpu")
    assert found.flops_per_s > 0
    assert found.bytes_per_s > 0
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize(
    ("device", "dtype", "said"),
    [
        ("cuda:99", torch.float32, "The peak of cuda:99 in float32 cannot be measured"),
        ("gpu", torch.float32, "device='gpu' is not a device of torch"),
        (3.5, torch.float32, "device=3.5 is not a device of torch"),
        ("meta", torch.float32, "The meta device computes nothing"),
        ("cpu", torch.int64, "dtype must be a floating-point type, for example torch.float32, not torch.int64"),
        ("cpu", torch.complex64, "not torch.complex64"),
        ("cpu", "float32", "not 'float32'"),
    ],
)
def test_a_measurement_that_fails_raises_an_error_and_is_not_kept(device: str, dtype: torch.dtype, said: str) -> None:
    with pytest.raises(TorchprofError, match=said) as caught:
        peak(device, dtype)
    assert ("torchprof.peak" in str(caught.value)) is ("cannot be measured" in str(caught.value))
    assert measured_peaks() == ()


def test_the_random_state_of_the_user_does_not_change(timed: list[SimpleNamespace]) -> None:
    before = torch.get_rng_state()
    peak("cpu")
    assert torch.equal(torch.get_rng_state(), before)


def test_running_out_of_memory_raises_a_clear_error(
    timed: list[SimpleNamespace], monkeypatch: pytest.MonkeyPatch
) -> None:
    for error, said in (
        (torch.cuda.OutOfMemoryError("CUDA out of memory. Tried"), "CUDA out of memory. Name"),
        (AssertionError(), "AssertionError. Name"),
    ):

        def fail(*_: Any, **__: Any) -> None:
            raise error  # noqa: B023

        monkeypatch.setattr(torch, "ones", fail)
        with pytest.raises(TorchprofError, match=said):
            peak("cpu")


def test_a_product_grows_until_it_takes_long_enough(
    timed: list[SimpleNamespace], monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks = iter([0, 0.1, 1, 1.1, 2, 2.3])
    monkeypatch.setattr(peaks, "_ENOUGH_SECONDS", 0.2)
    matrix = peaks._largest_matrix(torch.device("cpu"), torch.float32, lambda: next(ticks))
    assert matrix.shape == (1024, 1024)


def test_the_clock_waits_for_the_device_that_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    now = peaks.clock_that_waits([torch.device("cuda:1")], time.perf_counter)
    assert waited == []
    assert now() <= time.perf_counter()
    assert waited == [torch.device("cuda:1")]


def test_the_cpu_has_no_number(timed: list[SimpleNamespace]) -> None:
    assert peak("cpu:0") is peak("cpu")


def test_a_run_carries_what_was_measured_before_it(timed: list[SimpleNamespace], reloaded: Any) -> None:
    def profiled() -> torchprof.Run:
        model = torch.nn.Linear(2, 2)
        with torchprof.Profile(model) as prof:
            model(torch.rand(1, 2))
        return prof.run

    assert profiled().meta.peaks == ()
    found = (peak("cpu"), peak("cpu", torch.float64))
    run = profiled()
    assert run.meta.peaks == found
    for strip in (False, True):
        again = reloaded(run, strip=strip)
        assert again.meta.peaks == found
        assert all(type(one) is Peak for one in again.meta.peaks)
    assert reloaded(run) == run


# The largest products, on ordinary values


def trained(model: nn.Module, inputs: torch.Tensor, *, steps: int = 3) -> torchprof.Run:
    with torchprof.Profile(model) as prof:
        for _ in range(steps):
            model(inputs).abs().sum().backward()
    return prof.run


def tried_again(model: nn.Module, inputs: torch.Tensor) -> torchprof.Run:
    """The same, up to five times: on a busy machine, what contradicts itself is left out."""
    for _ in range(5):
        peaks._known.clear()
        if again(run := trained(model, inputs)):
            break
    return run


def again(run: torchprof.Run) -> dict[tuple[str, str, str], int]:
    """What was computed again, by layer, phase and measure."""
    return {
        (run.layers[key.layer].name, key.phase, key.measure): spread.sum
        for key, spread in run.samples.items()
        if key.measure in ("ordinary_ns", "bfloat16_ns", "float32_ns")
    }


@pytest.mark.parametrize("kind", ["linear", "convolution"])
def test_products_on_ordinary_values_take_what_a_stopwatch_shows(kind: str) -> None:
    """Their own values are ordinary, too. 512 rows are computed of 2,048."""
    layer, inputs = (
        (nn.Linear(512, 512), torch.rand(64, 32, 512, requires_grad=True))
        if kind == "linear"
        else (nn.Conv2d(32, 32, 3, padding=1), torch.rand(16, 32, 32, 32, requires_grad=True))
    )
    for last in (False, False, False, False, True):  # a machine that is busy makes one of them slower
        found = again(tried_again(nn.Sequential(layer), inputs))
        measures = {measure for _, _, measure in found}
        assert measures in ({"ordinary_ns"}, {"ordinary_ns", "bfloat16_ns"}) and len(found) == 2 * len(measures)
        truth = {key: ns for measure in measures for key, ns in by_stopwatch(layer, inputs, measure).items()}
        # 3 times is far less than a wrong unit or batch.
        if all(truth[key] / 3 < ns < truth[key] * 3 for key, ns in found.items()):
            return
        assert not last, (found, truth)


def by_stopwatch(layer: nn.Module, inputs: torch.Tensor, measure: str) -> dict[tuple[str, str, str], int]:
    forwards, backwards = [], []
    for _ in range(10):
        start = time.perf_counter_ns()
        with torch.autocast("cpu", torch.bfloat16, enabled=measure == "bfloat16_ns"):
            output = layer(inputs)
        forwards.append(time.perf_counter_ns() - start)
        gradient, start = torch.rand_like(output), time.perf_counter_ns()
        torch.autograd.grad(output, [inputs, *layer.parameters()], gradient)
        backwards.append(time.perf_counter_ns() - start)
    times = {FORWARD: min(forwards), BACKWARD: min(backwards)}
    return {("Sequential.0", phase, measure): ns for phase, ns in times.items()}


def test_the_user_sees_nothing_of_products_that_are_computed_again() -> None:
    model = nn.Sequential(nn.Linear(256, 256), nn.Dropout(0.5), nn.Linear(256, 256))
    inputs = torch.rand(1024, 256)
    with torchprof.Profile(model) as prof:
        for _ in range(3):
            model(inputs).abs().sum().backward()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    grads = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    calls: list[nn.Module] = []
    model[0].register_forward_hook(lambda module, *_: calls.append(module))
    random, threads = torch.get_rng_state(), torch.get_num_threads()
    peaks._known.clear()
    with FlopCounterMode(display=False) as counter, torch.autocast("cpu", torch.bfloat16), torch.inference_mode():
        found = again(prof.run)
    assert {name for name, _, _ in found} == {"Sequential.0", "Sequential.2"}
    assert len(peaks._known) == 1, "equal layers are computed once"
    assert counter.get_total_flops() == 0 and not calls
    assert torch.equal(random, torch.get_rng_state()) and threads == torch.get_num_threads()
    assert all(map(torch.equal, before, (parameter.detach() for parameter in model.parameters())))
    assert all(map(torch.equal, grads, (parameter.grad for parameter in model.parameters())))


def test_a_part_of_a_batch_tells_what_all_of_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call takes 5 us, and 2 us a sample: to read a weight takes as long for one sample as for many."""
    sizes: list[int] = []

    def times(product: peaks.Product, end: float) -> dict[tuple[str, str], int]:
        sizes.append(product.shape[0])
        return {(FORWARD, "ordinary_ns"): 5_000 + 2_000 * product.shape[0]}

    monkeypatch.setattr(peaks, "_times_at", times)
    monkeypatch.setattr(peaks, "_enough_samples", lambda product, end: 16)
    product = peaks.product_of(nn.Linear(4, 4))
    assert product is not None
    long = product._replace(shape=(1024, 4), samples=1)
    assert peaks._times_of(long, time.perf_counter() + 60) == {(FORWARD, "ordinary_ns"): 5_000 + 2_000 * 1024}
    assert sizes == [8, 16]
    assert peaks._times_of(product._replace(shape=(4,)), 0)[FORWARD, "ordinary_ns"] == 13_000  # no batch: as it is
    monkeypatch.setattr(peaks, "_times_at", lambda product, end: {(FORWARD, "ordinary_ns"): 5_000})
    assert peaks._times_of(long, time.perf_counter() + 60) == {}  # both parts take as long: nothing is known


@pytest.mark.parametrize(("ms", "found"), [(300, ["Sequential.0"]), (500, [])])
def test_a_sample_of_up_to_200_ms_is_computed_again(ms: int, found: list[str]) -> None:
    """There are two in the batch. A processor without instructions for a type takes that long, and it matters most."""
    model = nn.Sequential(nn.Linear(256, 256))
    run = trained(model, torch.rand(2, 256))
    slow = {key: Spread.of([(0, ms * 1_000_000)]) for key in run.samples}
    product = peaks.product_of(model[0])
    assert product is not None
    largest = peaks._largest(dataclasses.replace(run, samples=slow), {("Sequential", "0"): product})
    assert [run.layers[number].name for _, numbers in largest for number in numbers] == found


def test_what_takes_longer_alone_than_in_the_model_is_left_out() -> None:
    model = nn.Sequential(nn.Linear(256, 256))
    run = trained(model, torch.rand(1024, 256))
    [of_call] = [spread.median for key, spread in run.samples.items() if key.layer == 1 and key.measure == "cpu_ns"]
    for times, known in ((1.4, True), (1.6, False)):
        peaks._known.update({key: {(FORWARD, "ordinary_ns"): round(of_call * times)} for key in [*peaks._known]})
        products = {("Sequential", "0"): peaks.product_of(model[0])}
        assert bool(again(peaks.with_ordinary_times(without(run), products))) == known  # type: ignore[arg-type]


def without(run: torchprof.Run) -> torchprof.Run:
    left = {key: spread for key, spread in run.samples.items() if (key.measure == "cpu_ns")}
    return dataclasses.replace(run, samples=left)


def test_many_equal_layers_are_computed_once_however_small_the_share_of_each() -> None:
    peaks._known.clear()
    model = nn.Sequential(*(nn.Linear(128, 128) for _ in range(200)))
    run = trained(model, torch.rand(2048, 128))
    assert max(sum(key.layer == number for key in run.samples) for number in range(201)) > 0
    assert len({name for name, _, _ in again(run)}) == 200 and len(peaks._known) == 1


def test_other_threads_or_ranks_than_those_of_the_recording_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(256, 256))
    run, products = tried_again(model, torch.rand(1024, 256)), {("Sequential", "0"): peaks.product_of(model[0])}
    assert again(peaks.with_ordinary_times(without(run), products))  # type: ignore[arg-type]
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    assert not again(peaks.with_ordinary_times(without(run), products))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Conv1d(16, 16, 3, padding=1, padding_mode="circular"), (16, 16, 1024)),
        (nn.Conv3d(4, 8, 3), (2, 4, 16, 16, 16)),
        (nn.Conv2d(16, 16, 3, groups=16, bias=False), (16, 64, 64)),  # no batch
        (nn.Linear(2048, 2048), (2048,)),  # neither
        (nn.Linear(256, 256).half(), (1024, 256)),
        (nn.Linear(256, 256).double(), (1024, 256)),
        (nn.Linear(256, 256).requires_grad_(False), (1024, 256)),
        (nn.Linear(256, 256, dtype=torch.cfloat), (1024, 256)),
        (torch.nn.utils.parametrizations.weight_norm(nn.Linear(256, 256)), (1024, 256)),
        (nn.LazyLinear(256), (1024, 256)),
    ],
    ids=str,
)
def test_layers_of_all_kinds_are_computed_again_or_left_out(layer: nn.Module, shape: tuple[int, ...]) -> None:
    peaks._known.clear()
    dtype = torch.float32 if isinstance(layer, nn.LazyLinear) else next(layer.parameters()).dtype
    inputs = torch.rand(shape, dtype=dtype, requires_grad=True)
    found = again(tried_again(nn.Sequential(layer), inputs))
    is_usual = type(layer).__module__.startswith("torch.nn.modules")
    assert bool(found) == is_usual
    if is_usual:
        phases = {phase for _, phase, _ in found}
        assert phases == ({FORWARD, BACKWARD} if layer.weight.requires_grad else {FORWARD})  # type: ignore[union-attr]
    assert ("float32_ns" in str(found)) == (dtype == torch.half)
    assert all(ns > 0 for ns in found.values())


def test_a_weight_of_another_kind_is_no_product_and_no_error() -> None:
    layer = nn.Linear(8, 8)
    layer.weight = nn.Parameter(layer.weight.detach().to_sparse())
    assert peaks.product_of(layer) is None
    assert peaks.product_of(nn.Linear(8, 8, device="meta")) is None
    assert peaks.product_of(nn.LazyLinear(8)) is None


def test_a_model_that_was_freed_and_a_forward_of_the_users_own() -> None:
    freed = []

    def main() -> None:
        model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256))
        model[1].forward = functools.partial(nn.functional.relu)  # type: ignore[method-assign]
        freed.append(weakref.ref(model[0]))
        for _ in range(20):
            model(torch.rand(1024, 256))

    with Program(warmup_calls=None) as program:
        main()
        gc.collect()
        assert freed[0]() is None
    assert {name for name, _, _ in again(program.run)} == {"Sequential.0"}


def test_no_other_layer_is_begun_when_the_time_is_spent(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(*(nn.Linear(size, size + 16) for size in range(256, 336, 16)))
    peaks._known.clear()
    monkeypatch.setattr(peaks, "_LEAST_S", 0)
    monkeypatch.setattr(peaks, "_MOST_S", 0)
    assert again(trained(model, torch.rand(512, 256))) == {}
    monkeypatch.setattr(peaks, "_LEAST_S", 60)
    assert len({name for name, _, _ in again(tried_again(model, torch.rand(512, 256)))}) >= 3  # on a busy machine, too
