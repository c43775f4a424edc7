"""How and where a run was recorded: one ``Meta`` for each rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torchprof.run.warnings import Caveat


class Peak(NamedTuple):
    """The most that a device was seen to do: ``flops_per_s`` in a product of matrices of this ``dtype`` ("float32"),
    ``bytes_per_s`` read and written in a copy. ``threads`` is 0 for what is not the CPU."""

    device: str
    dtype: str
    threads: int
    flops_per_s: float
    bytes_per_s: float


class MeshDim(NamedTuple):
    """A dimension of the ``DeviceMesh`` that a job's ranks form: its ``name`` ("dp", "tp"), how many ranks it has, and
    at which ``position`` in it, from 0 on, this rank is."""

    name: str
    size: int
    position: int


class CompiledRegion(NamedTuple):
    """Code that torch.compile made: its compile id ``name`` ("0/1": the second version of the first function), and the
    ``function`` that it is of, in ``file`` from ``line`` on. Where torch.compile could go no further, it ends in a
    graph break, at ``break_line``, for ``break_reason`` ("" where that is not known): the rest of the function is a
    region of its own."""

    name: str
    function: str
    file: str
    line: int
    break_line: int | None = None
    break_reason: str = ""


@dataclass(frozen=True)
class Meta:
    """How a run came about; one per rank.

    ``requested`` and ``measured`` name fields of ``Cost``: what was asked for and not measured is shown as unknown.
    ``device`` is the kind of device that was asked for (``cuda``, ``xpu``, ``mps``), None for the CPU alone. ``paths``
    are the selected layers, None for all. ``wall_ns`` is how long it was recorded, in so many ``cycles``, and ``steps``
    how many steps ended in that time. ``process_cpu_ns`` is the CPU time of all threads of the process in that time,
    and ``run_delay_ns`` for how long the thread that began the recording was ready to run and had no processor; None:
    not known. ``busy_ns`` is for each device how long anything ran on it, for the CPU how long any thread that was
    recorded was inside any op or range. ``peaks`` are what ``torchprof.peak`` had measured by then.
    ``warnings``: those that do not follow from the run; ``Run.warnings`` has all. ``environment`` says in words what it
    ran on, as (name, value), ``switches`` how torch's own were set at the end, those that make it faster or slower.
    ``machine`` and ``script`` are names that ``save(strip=True)`` leaves out. ``regions``: what is known of the
    compiled regions that ran, by their names in frames of that kind. ``world_size``: how many ranks the job has, this
    one among them; ``job``: its name, where torchrun or Slurm gave it one; ``mesh``: what ranks are for one another, as
    far as that is known.
    """

    model: tuple[str, ...]
    rank: int = 0
    world_size: int = 1
    job: str = ""
    mesh: tuple[MeshDim, ...] = ()
    device: str | None = None
    requested: tuple[str, ...] = ("cpu_ns",)
    measured: tuple[str, ...] = ("cpu_ns",)
    paths: tuple[tuple[str, ...], ...] | None = None
    wall_ns: int = 0
    cycles: int = 1
    steps: int = 0
    process_cpu_ns: int | None = None
    run_delay_ns: int | None = None
    busy_ns: tuple[tuple[str, int], ...] = ()
    peaks: tuple[Peak, ...] = ()
    warnings: tuple[Caveat, ...] = ()
    versions: tuple[tuple[str, str], ...] = ()
    flags: tuple[tuple[str, bool], ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    switches: tuple[tuple[str, str], ...] = ()
    regions: tuple[CompiledRegion, ...] = ()
    machine: str = ""
    script: str = ""
