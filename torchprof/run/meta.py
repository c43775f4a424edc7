"""``Meta``: how and where a rank was recorded. ``RunWarning``: a warning about it as data: a code, layers and facts."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from pathlib import PurePath
from typing import Any, NamedTuple

from torchprof.errors import some
from torchprof.run.groups import sets_by_key
from torchprof.run.layers import Layers
from torchprof.run.part import Scale, demand, fields_of, read_as, read_list
from torchprof.run.sentences import RANKS_CHOSEN, SENTENCES, WITHOUT_SHAPES, Fact
from torchprof.run.words import StepEnd


class Peak(NamedTuple):
    """The measured peak performance of a ``device`` ("cuda:0", "cpu"): ``flops_per_s`` in a matrix product of ``dtype``
    ("float32"), ``bytes_per_s`` read and written in a copy. ``threads``: of the CPU, 0 for other devices."""

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
    """Code that torch.compile made of a function. ``name`` is its compile id ("0/1": the second version of the first
    function). The ``function`` is in ``file`` from ``line`` on. If the region ends in a graph break, that is at
    ``break_line`` for ``break_reason`` ("" if unknown), and the rest of the function is another region. ``break_hint``:
    what torch advises against the break, "" if nothing."""

    name: str
    function: str
    file: str
    line: int
    break_line: int | None = None
    break_reason: str = ""
    break_hint: str = ""

    @property
    def break_place(self) -> str:
        """The file and the line of its graph break; only the line in a stripped run, which has no files."""
        file = PurePath(self.file).name
        return f"{file}:{self.break_line}" if file else f"line {self.break_line}"


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

    @property
    def is_first_version(self) -> bool:
        """Whether no version of this code was compiled before: a compile id ends in the number of the version."""
        return self.name.rpartition("/")[2] == "0"


_LEFT_OUT = "(left out)"
_NOTICED = frozenset({"partial_backward", "cpu_autocast"})
_NAMES = frozenset({"file", "where", "reason", "error", "why", "line"})
"""The facts of warnings that may name files and functions."""


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
    - ``run_delay_ns``: how long the thread that started the recording waited for a processor; None if unknown.
    - ``busy_ns``: for each device how long anything ran on it; for the CPU how long any thread was in an op or range.
    - ``peaks``: what ``torchprof.peak`` had measured by then.
    - ``warnings``: the stored ones, which do not follow from the run; ``Run.warnings`` has all.
    - ``environment``: (name, value) of the hardware and software, in words. ``switches``: (name, value) of the settings
      of torch that affect speed, as they were at the end; and what was noticed: whether autograd was called otherwise
      than by ``backward()``, whether models ran under autocast.
    - ``regions``: the compiled regions that ran; frames of kind "region" have their names. ``compilations``: when and
      why torch.compile compiled these, and all other code while it was recorded, in the order of time.
    - ``versions``: (name, version) of torchprof, torch and Python. ``flags``: (name, value) of what was to be recorded.
    - ``machine``, ``script``: names that ``save(strip=True)`` leaves out.
    - ``date``: when the recording began, in UTC, as "2026-11-29T13:28:05Z"; "" if unknown. ``commit``: that of the
      recorded program, if ``$TORCHPROF_COMMIT``, or GitHub's ``$GITHUB_SHA``, said which it is.
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
    date: str = ""
    commit: str = ""

    @property
    def program(self) -> tuple[tuple[str, str], ...]:
        """(name, value) of what was recorded, and when, where that is known: the file (a script, or a trace) without
        its folder, the commit, and the date."""
        file = re.split(r"[/\\]", self.script)[-1]
        date = self.date.replace("T", " ").replace("Z", " UTC")
        known = (("file", file), ("commit", self.commit), ("date", date))
        return tuple((name, value) for name, value in known if value)

    @property
    def title(self) -> str:
        """What was recorded, in a few words: the models; of a trace without models its file."""
        return ", ".join(self.model) or dict(self.program).get("file", "torchprof")

    @property
    def device_heading(self) -> str:
        """The kind of device as headings and messages name it: "CUDA"; "DEVICE" for a run of the CPU alone."""
        return (self.device or "device").upper()

    @property
    def settings(self) -> tuple[tuple[str, str], ...]:
        """The ``switches`` without what was only noticed."""
        return tuple(switch for switch in self.switches if switch[0] not in _NOTICED)

    @property
    def busy_devices(self) -> dict[str, int]:
        """``busy_ns`` of devices, without the CPU."""
        return {device: ns for device, ns in self.busy_ns if device != "cpu"}

    def of_a_comparison(self) -> Meta:
        """Without what is not compared between ranks. Only times are."""
        times = ("cpu_ns", "device_ns")
        left_out = ("environment", "switches", "flags", "peaks", "warnings", "regions", "compilations")
        nothing: dict[str, Any] = dict.fromkeys(left_out, ())
        return replace(
            self,
            requested=tuple(name for name in self.requested if name in times),
            measured=tuple(name for name in self.measured if name in times),
            **nothing,
        )

    @property
    def lacks_kernels(self) -> bool:
        """Whether so many kernels were lost, or cannot be right, that device times are unknown."""
        codes = ("kernels_lost", "kernels_overlap")
        return any(warning.code in codes and bool(warning.facts.get("unknown")) for warning in self.warnings)

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
        in_any = {(name, value) for name, value in self.switches if name in _NOTICED}
        for compilation in cycle.compilations:
            step = None if compilation.step is None else self.marked_steps + compilation.step
            compilations.setdefault(key(compilation), compilation._replace(step=step))
        return replace(
            cycle,
            date=self.date,
            measured=tuple(name for name in self.measured if name in cycle.measured),
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
            switches=tuple((name, "True" if (name, "True") in in_any else value) for name, value in cycle.switches),
        )

    def scaled(self, scale: Scale) -> Meta:
        """The recording of all passes, as estimated from that of some."""
        known = {name: getattr(self, name) for name in ("wall_ns", "process_cpu_ns", "run_delay_ns")}
        times: dict[str, Any] = {name: None if ns is None else scale.total(ns) for name, ns in known.items()}
        busy_ns = tuple((device, scale.on(device).total(ns)) for device, ns in self.busy_ns)
        return replace(self, **times, busy_ns=busy_ns, steps=scale.number(self.steps))

    def stripped(self) -> Meta:
        """The same without the names of files, machines and jobs, also in warnings."""
        regions = tuple(region._replace(file="", break_hint="") for region in self.regions)
        compilations = tuple(
            each._replace(file="", reason=each.reason and _LEFT_OUT, failure=each.failure and _LEFT_OUT)
            for each in self.compilations
        )
        warnings = tuple(
            replace(
                warning, facts={name: _LEFT_OUT if name in _NAMES else fact for name, fact in warning.facts.items()}
            )
            for warning in self.warnings
        )
        nameless = replace(self, machine="", script="", job="", warnings=warnings)
        return replace(nameless, regions=regions, compilations=compilations)

    def to_json(self, warnings: StoredWarnings) -> dict[str, Any]:
        return {**fields_of(self), "warnings": [*map(warnings.number_of, self.warnings)]}

    @classmethod
    def from_json(cls, stored: Any, warnings: Sequence[RunWarning]) -> Meta:
        """Ranks with equal ``warnings``, to which they refer by number, share the objects."""
        numbers = read_as(tuple[int, ...], stored.pop("warnings", []))
        demand(all(0 <= number < len(warnings) for number in numbers), f"the warnings of a rank: {numbers!r:.80}")
        meta: Meta = read_as(cls, stored)
        return replace(meta, warnings=tuple(warnings[number] for number in numbers))


def sum_if_known(*figures: int | None) -> int | None:
    """The sum of some figures; None if one of them is unknown."""
    return None if None in figures else sum(filter(None, figures))


def _unambiguous(regions: Sequence[CompiledRegion]) -> tuple[CompiledRegion, ...]:
    """Each region once. A name that stands for two different regions (torch.compile was reset) is left out."""
    by_name = sets_by_key((region.name, region) for region in regions)
    return tuple(region for same_name in by_name.values() if len(same_name) == 1 for region in same_name)


def name_of_job() -> str:
    """The job ID of torchrun or Slurm, "" without one. torchrun's is "none" if the user gave none."""
    name = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    return os.environ.get("SLURM_JOB_ID", "") if name == "none" else name


# Warnings


@dataclass(frozen=True)
class RunWarning:
    """A warning about the figures of a run. ``str()`` is its sentence.

    - ``code``: what it is about. ``layers``: the layers concerned, by dotted name. ``facts``: everything else, by name.
    - ``added``: one entry for each sum of runs that it has passed through, the last sum first: the numbers of the runs
      that had it, from 1 on, and how many runs were added.
    - ``ranks``: the ranks that it is of, in ``Run.warnings``; empty in ``Meta.warnings``.

    A code of another torchprof may have no sentence here: ``str()`` shows the code with its layers and facts.
    """

    code: str
    layers: tuple[str, ...] = ()
    facts: Mapping[str, Fact] = field(default_factory=dict)
    added: tuple[tuple[tuple[int, ...], int], ...] = ()
    ranks: tuple[int, ...] = ()

    @classmethod
    def of(cls, code: str, layers: Sequence[str] = (), **facts: Fact) -> RunWarning:
        return cls(code, tuple(layers), facts)

    def __hash__(self) -> int:
        return hash((self.code, self.layers, frozenset(self.facts.items()), self.added, self.ranks))

    def __str__(self) -> str:
        of_runs = "".join(map(_of_the_runs_added, self.added))
        try:
            return of_runs + SENTENCES[self.code](list(self.layers), **self.facts)
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError):  # of a newer torchprof
            facts = [f"{name}={value!r}" for name, value in self.facts.items()]
            about = "; ".join([*filter(None, [some(list(self.layers))]), *facts])
            return f"{of_runs}{self.code}: {about}" if about else of_runs + self.code

    def to_json(self) -> dict[str, Any]:
        """``added`` is left out if it is empty: only sums of runs have it."""
        fields = {"code": self.code, "layers": self.layers, "facts": self.facts}
        return {**fields, "added": self.added} if self.added else fields

    @classmethod
    def from_json(cls, stored: Any, names: Sequence[str]) -> RunWarning:
        """A warning of a file, with any code: a newer torchprof may have more codes. ``names``: of all layers."""
        demand(isinstance(stored, dict), f"{stored!r:.80} instead of a warning")
        demand({"code"} <= {*stored} <= {"code", "layers", "facts", "added"}, f"the parts of a warning: {stored!r:.80}")
        facts = stored.get("facts", {})
        demand(isinstance(facts, dict), f"{facts!r:.80} instead of the facts of a warning")
        added = read_as(tuple[tuple[tuple[int, ...], int], ...], stored.get("added", []))
        for numbers, count in added:
            is_valid = numbers and [*numbers] == sorted({*numbers}) and numbers[0] >= 1 and numbers[-1] <= count
            demand(is_valid, f"the runs {added!r:.80}")
        layers = read_list(stored.get("layers", []))
        are_known = all(type(layer) is not int or 0 <= layer < len(names) for layer in layers)
        demand(are_known, f"the layers of a warning: {layers!r:.80}")
        layers = [names[layer] if type(layer) is int else layer for layer in layers]
        if stored["code"] == WITHOUT_SHAPES:  # analyze.warnings computes with these
            read_as(tuple[str, ...], facts.get("names", []))
        if stored["code"] == RANKS_CHOSEN:  # so does ranks
            for name in ("slow", "late"):
                read_as(tuple[int, ...], facts[name])
            read_as(bool, facts["may_be_chance"])
        facts = {name: read_as(Any, fact) for name, fact in facts.items()}
        return cls(read_as(str, stored["code"]), read_as(tuple[str, ...], layers), facts, added)


def _of_the_runs_added(added: tuple[Sequence[int], int]) -> str:
    """The beginning of a sentence: which of the runs that were added it is about. ``added``: see ``RunWarning``."""
    numbers, count = added
    if len(numbers) == count:
        return f"Each of the {count} runs added: "
    return f"Run{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))} of the {count} added: "


def sharing_key(warning: RunWarning) -> tuple[Any, ...]:
    """Equal for two warnings only if they are written alike: one object, and one entry of a file, can serve for both.
    Stricter than ``==``, for which 1, 1.0 and True are equal."""
    return warning.code, warning.layers, repr([*warning.facts.items()]), warning.added, warning.ranks


class StoredWarnings:
    """The distinct warnings of all ranks, as a file has them: metadata refers to them by number, from 0 on."""

    def __init__(self) -> None:
        self._numbered: dict[tuple[Any, ...], tuple[int, RunWarning]] = {}

    def number_of(self, warning: RunWarning) -> int:
        return self._numbered.setdefault(sharing_key(warning), (len(self._numbered), warning))[0]

    def to_json(self, layers: Layers) -> Iterator[dict[str, Any]]:
        """The warnings, with the index of each layer in place of its name: every rank may have a list of thousands,
        each different. The name stays if no layer has it, or two have."""
        names = Counter(layer.name for layer in layers)
        index_of = {layer.name: index for index, layer in enumerate(layers) if names[layer.name] == 1}
        for _, warning in self._numbered.values():
            yield {**warning.to_json(), "layers": [index_of.get(name, name) for name in warning.layers]}
