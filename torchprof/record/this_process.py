"""What a run says of this process: its job, its environment, and the memory that is live in it."""

from __future__ import annotations

import functools
import gc
import json
import os
import platform
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from itertools import chain
from multiprocessing.process import BaseProcess
from pathlib import Path
from threading import get_ident
from types import MappingProxyType
from typing import Any, NamedTuple
from weakref import finalize

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from torchprof.attribute.launches import mesh_of_groups, sole_group
from torchprof.measure.memory_blocks import OTHER_PARAMETERS, OTHER_TENSORS, OTHERS, Freed, LiveBlocks, LiveMemory
from torchprof.record.modules import inner_tensors
from torchprof.record.peak import measured_peaks
from torchprof.record.torch_internals import SharedChange, optional
from torchprof.run.lockstep import GroupOfRanks
from torchprof.run.meta import MeshDim, Meta, name_of_job
from torchprof.run.processes import usable_cpus
from torchprof.version import __version__

# The job


class Job(NamedTuple):
    """The job of a process, and its place in it.

    - ``group``: the ranks of this rank's collectives; None if it is in groups of different ranks, or without a job.
    - ``metadata``: the job as JSON, as ``torch.profiler.profile`` writes it into traces; None without a process group.
    - ``name``: the job ID of torchrun or Slurm, "" without one.
    """

    rank: int = 0
    world_size: int = 1
    mesh: tuple[MeshDim, ...] = ()
    group: GroupOfRanks | None = None
    metadata: str | None = None
    name: str = ""


def this_job(models: Iterable[nn.Module], before: Job | None = None) -> Job:
    """The job of this process, with the mesh of these models. ``before``: an earlier result for this process. Without a
    process group, it is ``before``, if that had one; otherwise it follows from the environment variables of torchrun
    and similar launchers. A process without them is a job of one rank."""
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        if before is not None and before.metadata is not None:
            return before
        rank_text, size_text = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
        if rank_text.isdecimal() and size_text.isdecimal() and int(rank_text) < int(size_text):
            return Job(int(rank_text), int(size_text), name=name_of_job())
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
            if (mesh := getattr(param, "device_mesh", None)) is None:
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


def this_process(job: Job, began_ns: int | None = None) -> Meta:
    """The metadata of a run in this process that do not depend on what was recorded. ``job``: the job of this process.
    ``began_ns``: when the recording began, in ns since 1970; None: unknown."""
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
        date="" if began_ns is None else time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(began_ns // 10**9)),
        commit=os.environ.get("TORCHPROF_COMMIT") or os.environ.get("GITHUB_SHA", ""),
    )


def environment() -> tuple[tuple[str, str], ...]:
    """(name, value) of what two comparable runs share, without names of hosts and users. No device is initialized."""
    threads = f"{torch.get_num_threads()} in an operator, {torch.get_num_interop_threads()} between operators"
    device = [("CUDA", _cuda_environment())] if torch.cuda.is_available() or torch.version.cuda else []
    return (
        ("torch", f"{torch.__version__} on Python {platform.python_version()}"),
        ("built", _build()),
        *device,
        ("threads", threads),
        ("CPU", f"{cpu_name()}, {_usable_processors()} usable of {os.cpu_count()}"),
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
        ("usable_cpus", str(_usable_processors())),
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


def _cuda_environment() -> str:
    """The version of CUDA; if this process uses it, also its libraries and its devices."""
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


def _usable_processors() -> int:
    """How many logical processors this process may use, by its affinity and the quota of its container."""
    quota = _processor_quota()
    return usable_cpus() if quota is None else max(1, min(usable_cpus(), round(quota)))


def _processor_quota() -> float | None:
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


# The memory that is live now, of which a session records only what is allocated later

_ALLOCATOR_STATISTICS = {  # torch's names of the statistics of an allocator, by ours
    "allocated": "allocated_bytes.all.current",
    "allocated at most": "allocated_bytes.all.peak",
    "reserved": "reserved_bytes.all.current",
    "reserved at most": "reserved_bytes.all.peak",
}


_MOST_OTHERS = 20_000
"""How many tensors that are not the models' count, since each takes some microseconds; what others have is unknown."""
_KINDS_IN_CPP = ("activations", "weight casts")
"""The kinds of memory that may have no tensor in Python: what autograd graphs and autocast keep."""
_BLOCK_BYTES = 512
"""The sizes of torch's caching allocators are multiples of it."""


def live_memory(
    models: Iterable[nn.Module], watch: bool = False, recorded: LiveBlocks = MappingProxyType({})
) -> LiveMemory:
    """The memory of parameters, buffers and gradients that is allocated now. A shared storage counts once. ``watch``:
    also the state of optimizers, all other tensors that Python code has, what else was ``recorded`` before (only C++
    code has it), and what else the allocator of a device gave out ("unknown"); and note when each storage of the CPU
    is freed, until ``stop_watching``. torch's profiler does not record all of these frees, such as those of gradients
    by zero_grad: ``measure.assemble`` adds them. Of devices it records all."""
    blocks: dict[tuple[str, int], int] = {}
    freed: list[Freed] = []
    watches: list[finalize[Any, Any]] = []
    sizes: defaultdict[str, Counter[str]] = defaultdict(Counter)
    kind_of: dict[tuple[str, int], str] = {}  # by device and address
    in_blocks = Counter[str]()  # by device
    home = get_ident()
    models = [*models]
    for kind, tensor in chain(_tensors_of(models), _all_tensors(models) if watch else ()):
        if (block := block_of(tensor)) is None or block in kind_of:
            continue
        device, storage = block[0], _storage(tensor)
        nbytes = storage.nbytes()
        kind_of[block] = kind
        sizes[device][kind] += nbytes
        in_blocks[device] += -(-nbytes // _BLOCK_BYTES) * _BLOCK_BYTES
        if device == "cpu":
            blocks[block] = nbytes
            if watch:  # not the tensor: views and autograd graphs may share its storage
                watches.append(finalize(storage, _note_freed, freed, home, block))
                watches[-1].atexit = False
    for block, (kind, nbytes) in recorded.items():
        if block not in kind_of and kind in _KINDS_IN_CPP:
            device = block[0]
            sizes[device][kind] += nbytes
            in_blocks[device] += nbytes
            if device == "cpu":
                blocks[block] = nbytes
    allocators = _allocators()
    for device, figures in allocators.items() if watch else ():
        if (rest := figures["allocated"] - in_blocks[device]) > 0:
            sizes[device]["unknown"] = rest
    by_device = {device: tuple(of_device.items()) for device, of_device in sizes.items()}
    addresses = frozenset(block for block, kind in kind_of.items() if kind in ("parameters", "buffers"))
    others = frozenset(block for block, kind in kind_of.items() if kind in OTHERS)
    return LiveMemory(by_device, addresses, allocators, blocks, freed, watches, others)


def _tensors_of(models: Iterable[nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of models with their kinds; of a subclass those inside."""
    for model in models:
        params = [param for param in model.parameters() if not is_lazy(param)]
        buffers = [buffer for buffer in model.buffers() if not is_lazy(buffer)]
        gradients = [param.grad for param in params if param.grad is not None]
        for kind, tensors in (("parameters", params), ("buffers", buffers), ("gradients", gradients)):
            yield from ((kind, inner) for tensor in tensors for inner in inner_tensors(tensor))


def _all_tensors(models: Iterable[nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors that all optimizers of torch keep for parameters of these models, and then all tensors that Python
    code has."""
    params = {id(param) for model in models for param in model.parameters()}
    kinds = torch.Tensor, torch.optim.Optimizer
    found = [value for value in gc.get_objects() if issubclass(type(value), kinds)]
    for optimizer in (value for value in found if issubclass(type(value), torch.optim.Optimizer)):
        states = getattr(optimizer, "state", {})  # a subclass may not have made it yet
        waiting: list[Any] = [kept for param, kept in [*states.items()] if id(param) in params]
        while waiting:
            kept = waiting.pop()
            if isinstance(kept, torch.Tensor):
                yield from (("optimizer state", inner) for inner in inner_tensors(kept))
            elif isinstance(kept, (dict, list, tuple)):
                waiting += kept.values() if isinstance(kept, dict) else kept
    tensors = [value for value in found if issubclass(type(value), torch.Tensor)][:_MOST_OTHERS]
    yield from ((OTHER_PARAMETERS, tensor) for tensor in tensors if isinstance(tensor, nn.Parameter))
    yield from ((OTHER_TENSORS, tensor) for tensor in tensors)


def _note_freed(freed: list[Freed], home: int, block: tuple[str, int]) -> None:
    """Note that a block was freed just now. ``home``: the thread that watches."""
    freed.append(Freed(time.perf_counter_ns(), get_ident() == home, block))


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage:
    """The storage of a tensor. No code of a subclass runs. Raises RuntimeError if it has none."""
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.untyped_storage()


def block_of(tensor: torch.Tensor) -> tuple[str, int] | None:
    """The device of a tensor, as the profiler's events name it, and the address of its storage; None without one."""
    try:
        if _is_copied_on_write(tensor):  # asking for its address would copy it
            return None
        with torch._C.DisableTorchFunctionSubclass():
            storage = tensor.untyped_storage()
            # A fake tensor is one of the compiler, without memory: torch warns of who asks for its address.
            device, address = tensor.device, 0 if storage.device.type == "meta" else storage.data_ptr()
    except RuntimeError:  # sparse and wrapped tensors
        return None
    name = device.type if device.type == "cpu" else f"{device.type}:{device.index or 0}"
    return (name, address) if address else None


_is_copied_on_write: Callable[[torch.Tensor], bool] = optional("torch._C._is_cow_tensor", lambda _: False)


def bytes_in_use() -> int | None:
    """The memory that torch's allocator gave out on the current CUDA device; if there is none, the resident memory of
    this process without that of files (proc_pid_statm(5)). None if the system does not tell."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return torch.cuda.memory_allocated()
    try:
        _, resident, shared, *_ = map(int, Path("/proc/self/statm").read_text(encoding="ascii").split())
        return (resident - shared) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return None


def _allocators() -> dict[str, dict[str, int]]:
    """The statistics of torch's caching allocator by device, in bytes. No device is initialized."""
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return {}
    devices = {f"cuda:{index}": torch.cuda.memory_stats(index) for index in range(torch.cuda.device_count())}
    return {
        device: {name: statistics.get(key, 0) for name, key in _ALLOCATOR_STATISTICS.items()}
        for device, statistics in devices.items()
    }


# Processes that it starts

_WORKERS_OF = ("multiprocessing", "concurrent", "torch.utils.data")


class ChildProcesses(SharedChange):
    """From ``on`` to ``off``, processes that run functions of the user are counted, as ``torch.multiprocessing.spawn``
    starts them: no workers of loaders, pools, executors and managers."""

    def __init__(self) -> None:
        self.count = 0

    def _make(self) -> None:
        start: Any = BaseProcess.start

        @functools.wraps(start)
        def started(process: Any) -> None:
            start(process)
            module = getattr(getattr(process, "_target", None), "__module__", None) or "multiprocessing"
            if not module.startswith(_WORKERS_OF):
                for each in self._all_on:
                    each.count += 1

        self._put(BaseProcess, "start", started)
