"""``peak``: what it makes of the times of a product and a copy, what it keeps, and what a run carries of it."""

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.utils.benchmark

import torchprof
from torchprof import TorchprofError
from torchprof.record import peak as peaks
from torchprof.record.peak import measured_peaks, peak
from torchprof.run.meta import Peak

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
