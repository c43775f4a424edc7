"""``torchprof.peak``: the most FLOP/s and byte/s that a device of this process reaches, measured."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from timeit import default_timer
from typing import Any

import torch

from torchprof.errors import TorchprofError
from torchprof.run.meta import Peak

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
