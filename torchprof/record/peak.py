"""What this machine can do, measured: ``torchprof.peak``, and the largest products of a run on ordinary values."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cache, partial
from math import prod
from pathlib import Path
from statistics import median
from time import perf_counter, perf_counter_ns
from timeit import default_timer
from typing import Any, NamedTuple

import torch
from torch import nn

from torchprof.errors import TorchprofError
from torchprof.record.torch_internals import optional
from torchprof.run.measures import SampleKey, Spread
from torchprof.run.meta import Peak
from torchprof.run.run import Run
from torchprof.run.words import BACKWARD, FORWARD

_SECONDS = 0.3  # for each of the two measurements
_ENOUGH_SECONDS = 0.2  # for one product; a larger matrix would not be more exact
_measured: dict[tuple[str, str, int], Peak] = {}  # by device, type and number of threads


def peak(device: str | torch.device | None = None, dtype: torch.dtype = torch.float32) -> Peak:
    """Measure the most FLOPs and bytes a second that a device does, with a product of matrices and a copy.

    ``device``: "cpu", "cuda" (the current one), "cuda:1", …; None for CUDA where there is one, else the CPU. ``dtype``:
    a floating-point type. Takes about a second; the result is kept for the process, and runs profiled later compare
    themselves with it (``run.report("summary")``). The CPU's is that of the current number of threads.

    The product is of square matrices (2·n³ FLOPs; n doubles from 256 until a product takes 0.2 s, up to 2048 on a CPU
    and 8192 elsewhere), the copy of 256 MB (which reads and writes each byte once), each timed by
    ``torch.utils.benchmark``; what counts is the fastest run.

    Raises TorchprofError for a device that is not there, a type that it cannot multiply, and where memory runs out.
    """
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise TorchprofError(f"dtype must be a floating-point type, for example torch.float32, not {dtype!r:.80}.")
    where = _checked_device(device)
    threads = torch.get_num_threads() if where.type == "cpu" else 0
    name = str(dtype).removeprefix("torch.")
    key = (str(where), name, threads)
    if key not in _measured:
        now = clock_that_waits([where], default_timer)
        try:
            torch.empty(0, device=where)  # its message for a missing device is clearer than that of a generator
            matrix = _largest_matrix(where, dtype, now)
            source = torch.ones(64 * 2**20, dtype=torch.float32, device=where)
            target = torch.empty_like(source)
            product_s = _fastest("torch.mm(matrix, matrix)", {"torch": torch, "matrix": matrix}, now)
            copy_s = _fastest("target.copy_(source)", {"target": target, "source": source}, now)
        except (RuntimeError, AssertionError, ImportError) as error:
            said = (str(error).split(". ")[0].splitlines() or [type(error).__name__])[0].rstrip(".")
            raise TorchprofError(
                f"The peak of {where} in {name} cannot be measured: {said}. Name a device that torch finds here and "
                'that has 1 GB free, and a floating-point type: torchprof.peak("cpu", torch.float32).'
            ) from error
        size = matrix.shape[0]
        _measured[key] = Peak(str(where), name, threads, 2 * size**3 / product_s, 2 * source.nbytes / copy_s)
    return _measured[key]


def measured_peaks() -> tuple[Peak, ...]:
    """All peaks measured in this process."""
    return tuple(_measured.values())


def _checked_device(device: str | torch.device | None) -> torch.device:
    """The device with its index. The CPU has none."""
    try:
        where = torch.device("cuda" if torch.cuda.is_available() else "cpu") if device is None else torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise TorchprofError(
            f'device={device!r:.80} is not a device of torch: use "cpu", "cuda", "cuda:1", …'
        ) from error
    if where.type == "meta":
        raise TorchprofError("The meta device computes nothing: it has no peak.")
    if where.type == "cpu":
        return torch.device("cpu")
    if where.index is None:
        backend: Any = getattr(torch, where.type, None)
        has_current = hasattr(backend, "current_device") and backend.is_available()
        where = torch.device(where.type, backend.current_device() if has_current else 0)
    return where


def clock_that_waits(devices: Iterable[torch.device], clock: Callable[[], float]) -> Callable[[], float]:
    """A clock that waits for all these devices. torch.utils.benchmark's clock waits only for the current device."""
    waits = []
    for device in devices:
        wait = getattr(getattr(torch, device.type, None), "synchronize", None)
        if wait is not None and device.type != "cpu":
            waits.append(wait if device.type == "mps" else partial(wait, device))

    def now() -> float:
        for wait in waits:
            wait()
        return clock()

    return now if waits else clock


def _largest_matrix(where: torch.device, dtype: torch.dtype, now: Callable[[], float]) -> torch.Tensor:
    """A square matrix whose product takes more than 0.2 s, or the largest that is tried: some types are slow."""
    largest = 2048 if where.type == "cpu" else 8192
    generator = torch.Generator(where).manual_seed(0)  # the user's random state must not change
    size = 256
    while True:
        matrix = torch.rand(size, size, dtype=torch.float32, device=where, generator=generator).to(dtype)
        torch.mm(matrix, matrix)  # the first product of a size can take much longer
        start = now()
        torch.mm(matrix, matrix)
        if size == largest or now() - start > _ENOUGH_SECONDS:
            return matrix
        size *= 2


def _fastest(statement: str, names: dict[str, object], now: Callable[[], float]) -> float:
    """The seconds of the fastest run."""
    from torch.utils.benchmark import Timer  # here, because the import takes 0.25 s

    timer = Timer(statement, globals=names, timer=now, num_threads=torch.get_num_threads())
    return min(timer.blocked_autorange(min_run_time=_SECONDS).times)


@cache
def cpu_instructions() -> frozenset[str]:
    """The names of the instructions that the CPU has, as Linux lists them; empty if they are unknown."""
    lists = Path("/proc/cpuinfo")
    return frozenset(lists.read_text(errors="replace").split()) if lists.is_file() else frozenset()


# The largest products of a run, on ordinary values

_PRODUCTS: dict[type[nn.Module], int] = {nn.Linear: 2, nn.Conv1d: 3, nn.Conv2d: 4, nn.Conv3d: 5}
"""The classes whose layers are computed again, with the dimensions that an input with a batch has."""
_OF_CONVOLUTIONS = "_reversed_padding_repeated_twice"
_BFLOAT16 = frozenset({"amx_bf16", "avx512_bf16"})
"""The instructions with which a CPU multiplies matrices in bfloat16."""
_LEAST_CALL_NS = 100_000  # a shorter call is bound by its dispatch
_LEAST_SHARE = 0.01  # of the recorded time, in all layers that are equal
_PART_NS, _MOST_NS = 2_000_000, 200_000_000
"""Of a longer call only parts of the batch are computed again. A sample that takes even longer is left out."""
_MOST_BYTES = 2**28  # of a weight, and of an input
_REPEATS = 2  # the faster counts
_LONGER, _LESS_LONGER = 1.5, 1.3  # times: twice as many samples, the second time
_SLOWER = 1.5  # times: as much longer than in the model, a call was disturbed
_LONG_ROUND_S = 0.1  # is not repeated
_LEAST_S, _MOST_S = 0.2, 0.8  # as long as the recording, but within these: no other call is begun then


class Product(NamedTuple):
    """A Linear layer or a convolution to be computed again, which may be freed by then. ``attributes``: what its
    forward reads; ``params``: shape, type and ``requires_grad`` of its parameters, by name. ``shape``: of its input;
    ``samples``: how many of it to compute first, 0 without a batch; ``with_backward``: as in training."""

    kind: type[nn.Module]
    settings: str
    attributes: dict[str, Any]
    params: dict[str, tuple[torch.Size, torch.dtype, bool] | None]
    shape: tuple[int, ...] = ()
    samples: int = 0
    with_backward: bool = False

    @property
    def key(self) -> tuple[object, ...]:
        """Layers with the same one take the same time."""
        switches = torch.get_num_threads(), torch.get_float32_matmul_precision()
        return self.kind, self.settings, self.shape, self.with_backward, *self.params.items(), *switches


def product_of(module: nn.Module) -> Product | None:
    """A module as a product; None for all but Linear layers and convolutions with usual parameters on the CPU."""
    kind: Any = type(module)
    own, params = vars(module), module._parameters
    weight = params.get("weight") if kind in _PRODUCTS and "forward" not in own else None
    if type(weight) is not nn.Parameter or weight.layout != torch.strided or weight.device.type != "cpu":
        return None
    if weight.nbytes > _MOST_BYTES:
        return None
    attributes = {name: own[name] for name in (*kind.__constants__, _OF_CONVOLUTIONS) if name in own}
    of = {name: None if each is None else (each.shape, each.dtype, each.requires_grad) for name, each in params.items()}
    return Product(kind, module.extra_repr(), attributes, of)


_Times = dict[tuple[str, str], int]  # in ns, by phase and measure
_known: dict[tuple[object, ...], _Times] = {}  # by the key of a product


def who_sees_calls() -> str:
    """What of the user's is called for what this thread computes, also ``without_modes``, as the end of a sentence; ""
    if nothing is. Another thread would not help: it has OpenMP threads of its own, and with two processors a product of
    80 us then takes 1.7 times as long."""
    modes = optional("torch.overrides._get_current_function_mode_stack", list)()
    if any(not type(mode).__module__.startswith("torch.") for mode in modes):
        return "a TorchFunctionMode of yours is active"
    hooks = optional("torch._C._autograd._top_saved_tensors_default_hooks", lambda _: None)(True)
    return "" if hooks is None else "hooks of yours on saved tensors are active"


@contextmanager
def without_modes() -> Iterator[None]:
    """With gradients, and without a counter of FLOPs, fake tensors, or another mode that sees operators. Under autocast
    without its cache, which has the user's casts, and is emptied only at the end of the user's block."""
    disabled = optional("torch.utils._python_dispatch._disable_current_modes", nullcontext)
    caches = torch.is_autocast_cache_enabled()
    with torch.inference_mode(False), torch.enable_grad(), disabled():
        torch.set_autocast_cache_enabled(caches and not any(map(torch.is_autocast_enabled, ("cpu", "cuda"))))
        try:
            yield
        finally:
            torch.set_autocast_cache_enabled(caches)


def with_ordinary_times(run: Run, products: Mapping[tuple[str, ...], Product]) -> Run:
    """The run with what the largest Linear layers and convolutions of a CPU take on ordinary values: 0.5 in weights and
    inputs, of the shapes and types of the first call, contiguous. ``products``: by the path of their layer.

    They are ``Run.samples`` of a call: ``ordinary_ns``; of a layer in float32 ``bfloat16_ns``, under autocast with its
    casts, where the CPU has instructions for it; of one in half precision ``float32_ns``. They are of forward and, in
    training, of backward. Equal layers are computed once in a process, those that took longest first, for as long as
    the recording took, but 0.2 to 0.8 s; of long calls two parts of the batch. The user's modules are not called, and
    nothing of the user's sees what is computed.
    """
    meta = run.meta
    threads = dict(meta.switches).get("num_threads", "")
    if meta.device is not None or meta.rank or "cpu_ns" not in meta.measured or threads != str(torch.get_num_threads()):
        return run  # the ranks of a machine would make each other slow
    if who_sees_calls():
        return run
    largest = _largest(run, products)
    budget_s = max(_LEAST_S, min(meta.wall_ns / 1e9, _MOST_S))
    with without_modes(), torch.autocast("cpu", enabled=False):
        _measure([product for product, _ in largest], perf_counter() + budget_s)
    samples = dict(run.samples)
    for product, numbers in largest:
        times = _known.get(product.key, {})
        of_call = median(run.samples[_key_of(run, number)].median for number in numbers)
        if times and times[FORWARD, "ordinary_ns"] > _SLOWER * of_call:
            continue
        for (phase, measure), ns in times.items():
            for number in numbers:
                samples[SampleKey(number, phase, meta.rank, "cpu", measure)] = Spread.of([(0, ns)])
    return replace(run, samples=samples)


def _key_of(run: Run, number: int) -> SampleKey:
    """Of the times of the forward calls of a layer."""
    return SampleKey(number, FORWARD, run.meta.rank, "cpu", "cpu_ns")


def _largest(run: Run, products: Mapping[tuple[str, ...], Product]) -> list[tuple[Product, list[int]]]:
    """What is to be computed again, with the numbers of the layers that are equal; what took longest comes first."""
    trains = BACKWARD in run.phases()
    known: dict[tuple[object, ...], tuple[Product, list[int], list[Spread]]] = {}
    for path, product in products.items():
        number = run.layers.index_of.get(path, -1)
        spread = run.samples.get(_key_of(run, number))
        shapes = run.layers[number].input_shapes if number >= 0 else ()
        if spread is None or len(shapes) != 1 or min(shapes[0], default=0) <= 0:
            continue
        product = product._replace(shape=shapes[0], with_backward=trains)
        _, numbers, spreads = known.setdefault(product.key, (product, [], []))
        numbers.append(number)
        spreads.append(spread)
    largest: list[tuple[int, Product, list[int]]] = []
    for product, numbers, spreads in known.values():
        ns, of_call = sum(spread.sum for spread in spreads), median(spread.median for spread in spreads)
        if of_call < _LEAST_CALL_NS or ns < _LEAST_SHARE * run.meta.wall_ns:
            continue
        shape, dims = product.shape, _PRODUCTS[product.kind]
        batch = shape[0] if len(shape) == dims or len(shape) > dims == 2 else 0
        samples = min(batch, max(int(batch * _PART_NS / of_call), 1))
        if of_call * max(samples, 1) <= _MOST_NS * max(batch, 1):
            largest.append((ns, product._replace(samples=samples), numbers))
    largest.sort(key=lambda each: -each[0])
    return [(product, numbers) for _, product, numbers in largest]


def _measure(products: Iterable[Product], end: float) -> None:
    """Compute products that are not known yet, until ``end``, in seconds of ``perf_counter``."""
    for product in products:
        if product.key not in _known and perf_counter() < end:
            try:
                _known[product.key] = _times_of(product, end)
            except TimeoutError:
                return
            except Exception:  # no memory, or a type or a mode of padding that the CPU cannot compute
                _known[product.key] = {}


def _times_of(product: Product, end: float) -> _Times:
    """The shortest times of a product, as it is and in another type. Of a long one two parts of the batch are computed:
    what a call takes at any size, such as to cast the weight, and what it takes for each sample, follow from both.
    Raises TimeoutError if it is not finished by ``end``."""
    if not product.samples or (samples := _enough_samples(product, end)) == product.shape[0]:
        return _times_at(product, end)
    few, many = (_times_at(_of_samples(product, count), end) for count in (samples // 2, samples))
    if any(many[key] < _LESS_LONGER * ns for key, ns in few.items() if key[1] == "ordinary_ns"):
        return {}  # too little of it is for the samples
    slopes = {key: max(ns - few[key], 0) / (samples - samples // 2) for key, ns in many.items()}
    return {key: round(ns + slopes[key] * (product.shape[0] - samples)) for key, ns in many.items()}


def _of_samples(product: Product, samples: int) -> Product:
    return product._replace(shape=(samples, *product.shape[1:]))


def _enough_samples(product: Product, end: float) -> int:
    """How many samples take long enough, and longer than half of them: its own values may have made the layer slow, and
    to read a large weight takes as long for one sample as for many."""
    samples, of_half = product.samples, float("inf")
    while samples < product.shape[0] and perf_counter() < end:
        layer, inputs = _ordinary(_of_samples(product, samples))
        times = []
        for _ in range(_REPEATS):
            start = perf_counter_ns()
            with torch.no_grad():
                layer.forward(inputs)
            times.append(perf_counter_ns() - start)
        if min(times) >= max(_PART_NS, _LONGER * of_half):
            break
        samples, of_half = min(2 * samples, product.shape[0]), min(times)
    return samples


def _times_at(product: Product, end: float) -> _Times:
    """The shortest times of a product of this size."""
    layer, inputs = _ordinary(product)
    variants = [("ordinary_ns", layer, inputs)]
    if inputs.dtype == torch.float32 and cpu_instructions() & _BFLOAT16:
        variants.append(("bfloat16_ns", layer, inputs))
    elif inputs.dtype.itemsize == 2:
        in_float32 = {name: of and (of[0], torch.float32, of[2]) for name, of in product.params.items()}
        variants.append(("float32_ns", *_ordinary(product._replace(params=in_float32))))
    times: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
    began = perf_counter()
    for number in range(1 + _REPEATS):
        if (number > 1 and perf_counter() > began + _LONG_ROUND_S) or (number and perf_counter() > end):
            break  # the first round of all starts a thread, and prepares kernels
        for measure, layer, inputs in variants:
            if perf_counter() > end and not number:
                raise TimeoutError
            with torch.set_grad_enabled(inputs.requires_grad):
                start = perf_counter_ns()
                # With its cache, the next call would not cast the weight.
                with torch.autocast("cpu", torch.bfloat16, measure == "bfloat16_ns", cache_enabled=False):
                    output = layer.forward(inputs)
                times[FORWARD, measure].append(perf_counter_ns() - start)
            if inputs.requires_grad:
                params = [param for param in layer._parameters.values() if param is not None and param.requires_grad]
                gradient = torch.full_like(output, 0.5)
                start = perf_counter_ns()
                torch.autograd.grad(output, [inputs, *params], gradient)
                times[BACKWARD, measure].append(perf_counter_ns() - start)
    return {key: min(values[1:] or values) for key, values in times.items()}


def _ordinary(product: Product) -> tuple[Any, torch.Tensor]:
    """A layer with ordinary values, and its input."""
    layer: Any = object.__new__(product.kind)
    nn.Module.__init__(layer)
    vars(layer).update(product.attributes)
    for name, of in product.params.items():
        layer._parameters[name] = None if of is None else torch.full(of[0], 0.5, dtype=of[1], device="cpu")
        layer._parameters[name] = None if of is None else layer._parameters[name].requires_grad_(of[2])
    if prod(product.shape) * layer.weight.element_size() > _MOST_BYTES:
        raise MemoryError
    inputs = torch.full(product.shape, 0.5, dtype=layer.weight.dtype, device="cpu")
    return layer, inputs.requires_grad_(product.with_backward and layer.weight.requires_grad)
