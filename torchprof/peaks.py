"""How fast this very device is: a product of matrices and a copy, measured once in a process."""

from __future__ import annotations

import torch
from torch.utils.benchmark import Timer

from torchprof.errors import TorchprofError
from torchprof.run import Peak

_SECONDS = 0.3  # for each of the two measurements
_measured: dict[tuple[str, str, int], Peak] = {}


def peak(device: str | torch.device | None = None, dtype: torch.dtype = torch.float32) -> Peak:
    """Measure the most FLOPs and bytes a second that a device does, with a product of matrices and a copy.

    ``device``: "cpu", "cuda", "cuda:1", …; None for CUDA where there is one, else the CPU. ``dtype``: a floating-point
    type. Takes about a second; the result is kept for the process, and runs profiled later compare themselves with it
    (``run.report("summary")``). The CPU's is that of the current number of threads.

    The product is of square matrices (2·n³ FLOPs: n = 2048 on a CPU, 8192 elsewhere), the copy of 256 MB (which reads
    and writes each byte once), each timed by ``torch.utils.benchmark``; what counts is the fastest run.

    Raises TorchprofError for a device that is not there and a type that it cannot multiply.
    """
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if where.type != "cpu" and where.index is None:
        where = torch.device(where.type, 0)
    threads = torch.get_num_threads() if where.type == "cpu" else 0
    name = str(dtype).removeprefix("torch.")
    key = (str(where), name, threads)
    if key not in _measured:
        size = 2048 if where.type == "cpu" else 8192
        try:
            matrix = torch.rand(size, size, device=where).to(dtype)
            source = torch.ones(64 * 2**20, device=where)
            target = torch.empty_like(source)
            product_s = _fastest("torch.mm(matrix, matrix)", {"torch": torch, "matrix": matrix})
            copy_s = _fastest("target.copy_(source)", {"target": target, "source": source})
        except (RuntimeError, AssertionError, NotImplementedError) as error:
            raise TorchprofError(
                f"The peak of {where} in {name} cannot be measured: {str(error).splitlines()[0]} Name a device that "
                'torch finds here, and a floating-point type: torchprof.peak("cpu", torch.float32).'
            ) from error
        _measured[key] = Peak(
            str(where), name, threads, 2 * size**3 / product_s, 2 * source.numel() * source.element_size() / copy_s
        )
    return _measured[key]


def measured_peaks() -> tuple[Peak, ...]:
    """All peaks that were measured in this process."""
    return tuple(_measured.values())


def _fastest(statement: str, names: dict[str, object]) -> float:
    """Seconds of the fastest run; on a device the clock waits for it."""
    timer = Timer(statement, globals=names, num_threads=torch.get_num_threads())
    return min(timer.blocked_autorange(min_run_time=_SECONDS).times)
