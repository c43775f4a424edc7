"""The environment of a run: torch, its build, the devices, the threads, the machine and the script."""

from __future__ import annotations

import os
import platform
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import torch

from torchprof.record.job import Job
from torchprof.record.peak import measured_peaks
from torchprof.run.meta import Meta
from torchprof.version import __version__


def this_process(job: Job) -> Meta:
    """The metadata of a run in this process that are known before it is recorded. ``job``: the job of this process."""
    return Meta(
        model=(),
        rank=job.rank,
        world_size=job.world_size,
        job=job.name,
        mesh=job.mesh,
        peaks=measured_peaks(),
        versions=(
            ("torchprof", __version__),
            ("torch", torch.__version__),
            ("python", platform.python_version()),
        ),
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
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _quota()
    return usable if quota is None else max(1, min(usable, round(quota)))


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
