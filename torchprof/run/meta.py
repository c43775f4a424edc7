"""``Meta``: how and where a rank was recorded."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, NamedTuple

from torchprof.run.part import demand, fields_of, read_as
from torchprof.run.warnings import RunWarning, StoredWarnings
from torchprof.run.words import StepEnd


class Peak(NamedTuple):
    """The measured peak performance of a ``device`` ("cuda:0", "cpu"): ``flops_per_s`` in a matrix product of ``dtype``
    ("float32"), ``bytes_per_s`` read and written in a copy. ``threads``: the number of CPU threads, 0 for other
    devices."""

    device: str
    dtype: str
    threads: int
    flops_per_s: float
    bytes_per_s: float


class MeshDim(NamedTuple):
    """A dimension of the ``DeviceMesh`` of a job: its ``name`` ("dp", "tp"), how many ranks it has (``size``), and the
    ``position`` of this rank in it, from 0 on."""

    name: str
    size: int
    position: int


class CompiledRegion(NamedTuple):
    """Code that torch.compile made of a function.

    ``name`` is its compile id ("0/1": the second version of the first function). The ``function`` is in ``file`` from
    ``line`` on. If the region ends in a graph break, that is at ``break_line`` for ``break_reason`` ("" if unknown),
    and the rest of the function is another region. ``break_hint``: what torch advises against the break, "" if nothing.
    """

    name: str
    function: str
    file: str
    line: int
    break_line: int | None = None
    break_reason: str = ""
    break_hint: str = ""


class Compilation(NamedTuple):
    """One time that torch.compile compiled a region.

    ``name`` is the compile id of the region, ``phase`` forward or backward. It is made of the ``function`` in ``file``
    from ``line`` on ("" and 0 if unknown). ``step``: how many recorded steps had ended when it began; None if it began
    before the recording. ``reason``: why the versions before did not fit, in torch's words; "" for the first version,
    and if unknown. ``failure``: why there is no compiled code, "" if there is.

    ``ns``: how long it took. Its parts: ``tracing_ns`` (Dynamo), ``autograd_ns`` (AOTAutograd), ``lowering_ns``
    (Inductor, without the next), ``kernels_ns`` (compilers of Triton and C++; None if torch does not tell: then it
    is in ``lowering_ns``). ``from_cache``: whether its graph was in a cache; None if this torch does not tell.
    ``began_ns``: when, in ns since 1970.
    """

    name: str
    phase: str
    function: str
    file: str
    line: int
    step: int | None
    reason: str
    failure: str
    ns: int
    tracing_ns: int
    autograd_ns: int
    lowering_ns: int
    kernels_ns: int | None
    from_cache: bool | None
    began_ns: int


@dataclass(frozen=True)
class Meta:
    """How a rank was recorded.

    - ``model``: the class names of the models. ``rank``: its number in the job, 0 without one.
    - ``world_size``: how many ranks the job has. ``job``: its name, if torchrun or Slurm gave it one. ``mesh``: the
      dimensions of its ``DeviceMesh``, if known.
    - ``device``: the kind of device that was requested (``cuda``, ``xpu``, ``mps``), None for the CPU alone.
    - ``requested``, ``measured``: fields of ``Cost``. What was requested but not measured is shown as unknown.
    - ``paths``: the selected layers, None for all.
    - ``wall_ns``: how long it was recorded, over all ``cycles``. ``steps``: how many whole steps are in that time, and
      ``step_end``: what ended them.
    - ``process_cpu_ns``: the CPU time of all threads of the process in that time; None if unknown.
    - ``run_delay_ns``: how long the thread that started the recording was ready to run but had no processor; None if
      unknown.
    - ``busy_ns``: for each device how long anything ran on it; for the CPU how long any recorded thread was
      inside any op or range.
    - ``peaks``: what ``torchprof.peak`` had measured by then.
    - ``warnings``: the stored ones, which do not follow from the run; ``Run.warnings`` has all.
    - ``environment``: (name, value) of the hardware and software, in words. ``switches``: (name, value) of the settings
      of torch that affect speed, as they were at the end.
    - ``regions``: the compiled regions that ran; frames of kind "region" have their names. ``compilations``: when and
      why torch.compile compiled these, and all other code while it was recorded, in the order of time.
    - ``versions``: (name, version) of torchprof, torch and Python. ``flags``: (name, value) of what was to be recorded.
    - ``machine``, ``script``: names that ``save(strip=True)`` leaves out.
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
    step_end: StepEnd = StepEnd.MARK
    process_cpu_ns: int | None = None
    run_delay_ns: int | None = None
    busy_ns: tuple[tuple[str, int], ...] = ()
    peaks: tuple[Peak, ...] = ()
    warnings: tuple[RunWarning, ...] = ()
    versions: tuple[tuple[str, str], ...] = ()
    flags: tuple[tuple[str, bool], ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    switches: tuple[tuple[str, str], ...] = ()
    regions: tuple[CompiledRegion, ...] = ()
    compilations: tuple[Compilation, ...] = ()
    machine: str = ""
    script: str = ""

    @property
    def device_heading(self) -> str:
        """The kind of device as headings and messages name it: "CUDA"; "DEVICE" for a run of the CPU alone."""
        return (self.device or "device").upper()

    @property
    def busy_devices(self) -> dict[str, int]:
        """``busy_ns`` of devices, without the CPU."""
        return {device: ns for device, ns in self.busy_ns if device != "cpu"}

    def of_a_comparison(self) -> Meta:
        """Without what is not compared between ranks. Only times are."""
        requested, measured = (
            tuple(name for name in names if name in ("cpu_ns", "device_ns"))
            for names in (self.requested, self.measured)
        )
        kept = replace(self, requested=requested, measured=measured, environment=(), switches=(), flags=())
        return replace(kept, peaks=(), warnings=(), regions=(), compilations=())

    @property
    def marked_steps(self) -> int:
        """The number of steps that ``prof.step()`` or torch's profiler marked."""
        return self.steps if self.step_end == StepEnd.MARK else 0

    def __add__(self, cycle: Meta) -> Meta:
        """The recording of both cycles of a rank. It has no stored warnings: those of one cycle need not hold for both.
        The later cycle also knows the compilations of the earlier one, as before it."""
        busy = Counter(dict(self.busy_ns))
        busy.update(dict(cycle.busy_ns))
        key = attrgetter("name", "phase", "began_ns")
        compilations = {key(compilation): compilation for compilation in self.compilations}
        for compilation in cycle.compilations:
            step = None if compilation.step is None else self.marked_steps + compilation.step
            compilations.setdefault(key(compilation), compilation._replace(step=step))
        return replace(
            cycle,
            wall_ns=self.wall_ns + cycle.wall_ns,
            process_cpu_ns=sum_if_known(self.process_cpu_ns, cycle.process_cpu_ns),
            run_delay_ns=sum_if_known(self.run_delay_ns, cycle.run_delay_ns),
            cycles=self.cycles + cycle.cycles,
            steps=self.steps + cycle.steps,
            step_end=cycle.step_end if cycle.steps else self.step_end,
            warnings=(),
            busy_ns=tuple(sorted(busy.items())),
            regions=_unambiguous(self.regions + cycle.regions),
            compilations=tuple(sorted(compilations.values(), key=attrgetter("began_ns"))),
        )

    def stripped(self) -> Meta:
        """The same without the names of files, machines and jobs."""
        regions = tuple(region._replace(file="") for region in self.regions)
        compilations = tuple(compilation._replace(file="") for compilation in self.compilations)
        return replace(self, machine="", script="", job="", regions=regions, compilations=compilations)

    def to_json(self, warnings: StoredWarnings) -> dict[str, Any]:
        return {**fields_of(self), "warnings": [*map(warnings.number_of, self.warnings)]}

    @classmethod
    def from_json(cls, stored: Any, warnings: Sequence[RunWarning]) -> Meta:
        """Ranks with equal ``warnings``, to which they refer by number, share the objects."""
        numbers = read_as(tuple[int, ...], stored.pop("warnings", []))
        demand(all(0 <= number < len(warnings) for number in numbers), f"the warnings of a rank: {numbers!r:.80}")
        meta: Meta = read_as(cls, stored)
        return replace(meta, warnings=tuple(warnings[number] for number in numbers))


def sum_if_known(before: int | None, cycle: int | None) -> int | None:
    return None if before is None or cycle is None else before + cycle


def _unambiguous(regions: Sequence[CompiledRegion]) -> tuple[CompiledRegion, ...]:
    """Each region once. A name that stands for two different regions (torch.compile was reset) is left out: it is
    ambiguous."""
    of_name: dict[str, set[CompiledRegion]] = {}
    for region in regions:
        of_name.setdefault(region.name, set()).add(region)
    return tuple(region for same in of_name.values() if len(same) == 1 for region in same)


def name_of_job() -> str:
    """The job ID of torchrun or Slurm, "" without one. torchrun's is "none" if the user gave none."""
    name = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    return os.environ.get("SLURM_JOB_ID", "") if name == "none" else name
