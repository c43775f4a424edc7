"""This process: the peak of its devices; which rank of which job it is; its environment: torch, its build, the devices,
the threads, the machine and the script; and the memory that a profiler session does not record."""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial
from pathlib import Path
from threading import get_ident
from timeit import default_timer
from typing import Any, NamedTuple
from weakref import finalize

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from torchprof.attribute.launches import mesh_of_groups, sole_group
from torchprof.errors import TorchprofError
from torchprof.measure.recording import Freed, LiveMemory
from torchprof.run.lockstep import GroupOfRanks
from torchprof.run.meta import MeshDim, Meta, Peak, name_of_job
from torchprof.run.processes import usable_cpus
from torchprof.version import __version__

_FIGURES = {
    "allocated": "allocated_bytes.all.current",
    "allocated at most": "allocated_bytes.all.peak",
    "reserved": "reserved_bytes.all.current",
    "reserved at most": "reserved_bytes.all.peak",
}

_SECONDS = 0.3  # for each of the two measurements
_ENOUGH_SECONDS = 0.2  # for one product; a larger matrix would not be more exact
_measured: dict[tuple[str, str, int], Peak] = {}

# The peak of a device in FLOP/s and byte/s


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
    where = _place(device)
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


def _place(device: str | torch.device | None) -> torch.device:
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
    """A square matrix whose product takes more than 0.2 s, or the largest that is tried. The size depends on the type:
    some are 400 times slower than others."""
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


# The job


class Job(NamedTuple):
    """``group``: the ranks of this rank's collectives; None if it is in groups of different ranks, or without a job.
    ``in_traces``: the job as JSON, as ``torch.profiler.profile`` writes it into traces; None without a job. ``name``:
    the job ID of torchrun or Slurm, "" without one."""

    rank: int = 0
    world_size: int = 1
    mesh: tuple[MeshDim, ...] = ()
    group: GroupOfRanks | None = None
    in_traces: str | None = None
    name: str = ""


def this_job(models: Iterable[nn.Module], before: Job | None = None) -> Job:
    """The job of this process, with the mesh of these models. ``before``: an earlier result for this process.

    Without a process group, it is ``before``, if that had one; otherwise it follows from the environment variables of
    torchrun and similar launchers. A process without them is a job of one rank.
    """
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        if before is not None and before.in_traces is not None:
            return before
        of_process, of_job = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
        if of_process.isdecimal() and of_job.isdecimal() and int(of_process) < int(of_job):
            return Job(int(of_process), int(of_job), name=name_of_job())
        return Job()
    rank, size = distributed.get_rank(), distributed.get_world_size()
    groups = _groups()
    described = {"backend": distributed.get_backend(), "rank": rank, "world_size": size, "pg_config": groups}
    mesh = _mesh_of(models) or mesh_of_groups(groups, rank)
    return Job(rank, size, mesh, sole_group(groups), json.dumps(described), name_of_job())


def _groups() -> list[Mapping[str, Any]]:
    """The process groups of this rank, as torch's profiler writes them into traces. Without the private API, none."""
    try:
        return list(torch.distributed.distributed_c10d._world.pg_config_info)
    except (AttributeError, KeyError, TypeError):
        return []


def _mesh_of(models: Iterable[nn.Module]) -> tuple[MeshDim, ...]:
    """The device mesh of sharded parameters; the root mesh, if torch gives it."""
    for model in models:
        for param in model.parameters():
            mesh = getattr(param, "device_mesh", None)
            if mesh is None:
                continue
            resources: Any = getattr(torch.distributed.device_mesh, "_mesh_resources", None)  # torch 2.9 and before
            if hasattr(mesh, "_get_root_mesh"):
                mesh = mesh._get_root_mesh()
            elif hasattr(resources, "get_root_mesh"):
                mesh = resources.get_root_mesh(mesh)
            names, positions = mesh.mesh_dim_names, mesh.get_coordinate()
            if names is not None and positions is not None:
                return tuple(MeshDim(name, mesh.size(index), positions[index]) for index, name in enumerate(names))
    return ()


# The environment


def this_process(job: Job) -> Meta:
    """The metadata of a run in this process that are known before it is recorded. ``job``: the job of this process."""
    return Meta(
        model=(),
        rank=job.rank,
        world_size=job.world_size,
        job=job.name,
        mesh=job.mesh,
        peaks=measured_peaks(),
        versions=(("torchprof", __version__), ("torch", torch.__version__), ("python", platform.python_version())),
        environment=environment(),
        switches=switches(),
        machine=platform.node(),
        script=str(Path(sys.argv[0]).absolute()) if sys.argv and sys.argv[0] else "",
    )


def environment() -> tuple[tuple[str, str], ...]:
    """(name, value) of what two comparable runs share, without names of hosts and users. No device is initialized."""
    threads = f"{torch.get_num_threads()} in an operator, {torch.get_num_interop_threads()} between operators"
    device = [("CUDA", _cuda())] if torch.cuda.is_available() or torch.version.cuda else []
    return (
        ("torch", f"{torch.__version__} on Python {platform.python_version()}"),
        ("built", _build()),
        *device,
        ("threads", threads),
        ("CPU", f"{cpu_name()}, {_usable()} usable of {os.cpu_count()}"),
        ("system", f"{platform.system()} {platform.release()} {platform.machine()}"),
    )


def switches() -> tuple[tuple[str, str], ...]:
    """(name, value) of torch's current settings that change the speed of a model."""
    on_cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
    capability = ".".join(map(str, torch.cuda.get_device_capability())) if on_cuda else ""
    return (
        ("float32_matmul_precision", torch.get_float32_matmul_precision()),
        ("cudnn_tf32", str(torch.backends.cudnn.allow_tf32)),
        ("cudnn_benchmark", str(torch.backends.cudnn.benchmark)),
        ("deterministic_algorithms", str(torch.are_deterministic_algorithms_enabled())),
        ("detect_anomaly", str(torch.is_anomaly_enabled())),
        ("num_threads", str(torch.get_num_threads())),
        ("usable_cpus", str(_usable())),
        *((("compute_capability", capability),) if capability else ()),
    )


def _build() -> str:
    """What CPU operators use: the instruction set of their kernels on this machine, and libraries."""
    libraries = (
        ("oneDNN", torch.backends.mkldnn.is_available()),
        ("MKL", torch.backends.mkl.is_available()),
        ("OpenMP", torch.backends.openmp.is_available()),
    )
    kernels = f"kernels for {torch.backends.cpu.get_cpu_capability()}"
    checks = ["with assertions (DEBUG=1), which is slow"] if torch.version.debug else []
    return ", ".join([kernels, *(name for name, there in libraries if there), *checks])


def _cuda() -> str:
    version = f"{torch.version.cuda}"
    if not torch.cuda.is_available():
        return f"{version}, but no device was found"
    if not torch.cuda.is_initialized():  # reading their names would allocate memory on them
        return f"{version}, {torch.cuda.device_count()} device(s), not used"
    devices = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    counts = Counter(f"{device.name} ({device.total_memory / 2**30:.0f} GB)" for device in devices)
    cudnn = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
    libraries = [f"cuDNN {cudnn}"] if cudnn else []
    tf32 = ["float32 products in TF32"] if torch.get_float32_matmul_precision() != "highest" else []
    return ", ".join([version, *libraries, *(f"{count} × {name}" for name, count in counts.items()), *tf32])


@cache
def cpu_name() -> str:
    """The model of the processor; "" if neither Linux nor Python knows it."""
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
        name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), name)
    return name


def _usable() -> int:
    """How many logical processors this process may use, by its affinity and the quota of its container."""
    quota = _quota()
    return usable_cpus() if quota is None else max(1, min(usable_cpus(), round(quota)))


def _quota() -> float | None:
    """How many processors the control group of this process may use (docs.kernel.org, "Control Group v2", ``cpu.max``;
    in version 1 ``cpu.cfs_quota_us``); None without a limit."""
    root = Path("/sys/fs/cgroup")
    try:
        if (root / "cpu.max").is_file():
            quota, period = (root / "cpu.max").read_text(encoding="utf-8").split()[:2]
        else:
            quota, period = ((root / "cpu" / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return float(quota) / float(period) if float(quota) > 0 else None
    except (OSError, ValueError, ZeroDivisionError):  # "max": no limit
        return None


# Memory that a session does not record: that of models, and the statistics of torch's allocators


def held_now(models: Iterable[nn.Module], watch: bool = False) -> LiveMemory:
    """The memory of parameters, buffers and gradients that is allocated now. A shared storage counts once.

    ``watch``: note when each storage of the CPU is freed, until ``stop_watching``: torch's profiler does not record all
    of that, as gradients that zero_grad frees; see ``add_frees``. Allocators of devices record all, with whole blocks.
    """
    blocks: dict[tuple[str, int], int] = {}
    freed: list[Freed] = []
    watches: list[finalize[Any, Any]] = []
    sizes: defaultdict[str, Counter[str]] = defaultdict(Counter)
    held: dict[tuple[str, int], str] = {}  # device and address → kind
    home = get_ident()
    for model in models:
        params, buffers = (
            [tensor for tensor in tensors if not is_lazy(tensor)] for tensors in (model.parameters(), model.buffers())
        )
        gradients = [param.grad for param in params if param.grad is not None]
        for kind, tensors in (("parameters", params), ("buffers", buffers), ("gradients", gradients)):
            for whole in tensors:
                tensor = getattr(whole, "_local_tensor", whole)  # of a DTensor, the part that is on this rank
                storage = _storage(tensor)
                device = tensor.device.type  # as the profiler's events name it
                device = device if device == "cpu" else f"{device}:{tensor.device.index or 0}"
                if storage is None or (block := (device, storage.data_ptr())) in held:
                    continue
                held[block] = kind
                sizes[device][kind] += storage.nbytes()
                if device == "cpu":
                    blocks[block] = storage.nbytes()
                    if watch:  # not the tensor: views and autograd graphs may share its storage
                        watches.append(finalize(storage, _note_freed, freed, home, block))
                        watches[-1].atexit = False
    by_device = {device: tuple(of_device.items()) for device, of_device in sizes.items()}
    addresses = frozenset(block for block, kind in held.items() if kind != "gradients")
    return LiveMemory(by_device, addresses, _allocators(), blocks, freed, watches)


def _note_freed(freed: list[Freed], home: int, block: tuple[str, int]) -> None:
    freed.append(Freed(time.perf_counter_ns(), get_ident() == home, block))


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """A tensor's storage; None if it has no address."""
    try:
        storage = tensor.untyped_storage()
        return storage if storage.data_ptr() else None
    except RuntimeError:  # sparse, fake and wrapped tensors
        return None


def _allocators() -> dict[str, dict[str, int]]:
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return {}
    statistics = {f"cuda:{index}": torch.cuda.memory_stats(index) for index in range(torch.cuda.device_count())}
    return {
        device: {name: figures.get(key, 0) for name, key in _FIGURES.items()} for device, figures in statistics.items()
    }
