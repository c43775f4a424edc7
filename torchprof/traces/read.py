"""``from_trace``: the run of a trace that torch's profiler wrote, with or without the model."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate, groupby, pairwise
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from torchprof.attribute.event_columns import BEYOND, EventColumns
from torchprof.attribute.events import Detail
from torchprof.attribute.launches import sole_group
from torchprof.errors import TorchprofError
from torchprof.measure.assemble import assemble, with_warnings
from torchprof.measure.recording import Observations, Options, Recording
from torchprof.run.merge import add_cycle, merge
from torchprof.run.meta import RunWarning
from torchprof.run.processes import check_processes, in_processes, paused_gc
from torchprof.run.run import Run
from torchprof.run.saved import is_run_file
from torchprof.traces.event_table import EventTable
from torchprof.traces.events import TraceEvents
from torchprof.traces.file import TraceFile, meta_of_header, process_groups
from torchprof.traces.plan import ModelPlan, References, plan_trace

if TYPE_CHECKING:
    from torch import nn


_SUFFIXES = (".json", ".json.gz")
_HOW_TO_ADD_A_RANK = (
    "A trace has its rank if torch.distributed was initialized before the recording; otherwise it counts as rank 0. "
    'You can add the rank at the top of its JSON: "distributedInfo": {"rank": 1, "world_size": 2}.'
)


@paused_gc()
def from_trace(
    traces: str | PathLike[str] | Iterable[str | PathLike[str]],
    model: nn.Module | Sequence[nn.Module] | None = None,
    *,
    inputs: Any = None,
    kwargs: Mapping[str, Any] | None = None,
    paths: Iterable[Any] | None = None,
    with_timeline: bool = False,
    progress: Callable[[float], None] | None = None,
    processes: int = 1,
) -> Run:
    """The run of a trace: of a file from ``torch.profiler.profile(...).export_chrome_trace``, plain or gzip.

    The layers are torchprof's labels, if the trace was recorded inside ``torchprof.annotate`` or ``Profile``; else the
    modules of ``with_stack=True``; else the ranges of ``record_function``. Memory, FLOPs and device time are in the run
    if they were recorded, FLOPs only with ``record_shapes=True``. Everything that a trace does not have is unknown.

    - ``traces``: the path of a file, or several paths: ranks of one job, or cycles of one process, which are added up.
      A folder means all traces directly in it: see ``traces_in``. One of these that cannot be read is left out, with a
      warning.
    - ``model``: a module or a list of modules. With it, layers have their parameters and settings. If the trace has no
      labels, its operators are aligned with those of the model's forward, which runs on the meta device for it: see
      docs/traces.md.
    - ``inputs``, ``kwargs``: what the model is called with, for that alignment. ``inputs`` is a tensor, a tuple of
      arguments, or a dict of keyword arguments. Shapes are enough, on any device. Without them, likely inputs are
      tried; of several models, each is called with these.
    - ``paths``: selects modules of the model, as for ``Profile``.
    - ``with_timeline``: also keep when everything ran.
    - ``progress``: called now and then with the fraction of the bytes that were read, from 0 to 1.
    - ``processes``: how many processes read traces at once; each needs the memory for one trace. They are spawned, so a
      script that uses several must call this function below ``if __name__ == "__main__":``.

    Does not import torch, unless shapes were recorded or a model is given. A file that was cut off is read as far as
    possible, with a warning.

    Raises TorchprofError for a file that is not a trace of torch, for a trace of another model, and for two traces of
    one rank that are not of one process; OSError as ``open`` does.
    """
    named = [Path(path) for path in ([traces] if isinstance(traces, (str, PathLike)) else traces)]
    if not (files := traces_in(named)):
        raise TorchprofError("from_trace needs a trace: the path of one, or several; the list is empty.")
    if paths is not None and model is None:
        raise TorchprofError("paths= selects modules of a model: also give from_trace the model.")
    check_processes(processes)
    known = None if model is None else _plan_of(model, paths, inputs, kwargs)
    if known is not None and processes > 1 and len(files) > 1:
        known = known.complete()
    in_folders = frozenset(files) - {*named}
    read = partial(_read_or_error, in_folders=in_folders, model=known, with_timeline=with_timeline)
    try:
        runs = _without_errors(files, _outcomes(files, read, progress, processes))
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise TorchprofError(
            "FLOPs and bytes of a trace with shapes are computed with torch, which is not installed here: pip install "
            "torch. Or read it where torch is, and save the run: a saved run is read without torch."
        ) from error
    except TorchprofError as error:
        # Of several files, the error may be that of another one than the first.
        part = None if model is None or len(files) > 1 else _part_of_trace(files[0], model, inputs, kwargs)
        if part is None:
            raise
        raise TorchprofError(f"{error} But the trace is of a part of this model: give from_trace {part}.") from None
    return _combined(runs)


def _plan_of(
    model: nn.Module | Sequence[nn.Module], paths: Iterable[Any] | None, inputs: Any, kwargs: Mapping[str, Any] | None
) -> ModelPlan:
    # These import torch, which is not needed without a model.
    from torchprof.record.modules import arguments_of, checked_models
    from torchprof.record.plan import Plan

    models = checked_models(model)
    plan = Plan(models, paths, model)
    roots = [spot.path[0] for spot in plan.spots if len(spot.path) == 1]

    @cache
    def references() -> References:
        from torchprof.traces.reference import references_of

        arguments, named = (None, {}) if inputs is None else arguments_of(inputs)
        try:
            return [references_of(*each, arguments, {**named, **(kwargs or {})}) for each in zip(models, roots)]
        except TorchprofError as error:
            return str(error)

    return ModelPlan.of(plan, references)


def _part_of_trace(
    file: Path, model: nn.Module | Sequence[nn.Module], inputs: Any, kwargs: Mapping[str, Any] | None
) -> str | None:
    """The submodule of a model that made all of a trace, as Python, with its class. None if none did."""
    for name, part in _main_parts(model):
        try:
            _read(file, _plan_of(part, None, inputs, kwargs), with_timeline=False)
        except TorchprofError:
            continue
        step_by_step = re.sub(r"\.(\d+)", r"[\1]", f"model.{name}")
        return f"{step_by_step} ({type(part).__name__})"
    return None


def _main_parts(model: nn.Module | Sequence[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """The submodules that have most of the parameters of a model, outer to inner, with their names in it."""

    def elements(module: nn.Module) -> int:  # those of a lazy module are not known, and count as none
        return sum(weight.numel() for weight in module.parameters() if not hasattr(weight, "materialize"))

    name = ""
    while not isinstance(model, Sequence):
        step, largest = max(model.named_children(), key=lambda child: elements(child[1]), default=("", None))
        if largest is None or 2 * elements(largest) <= elements(model):
            return
        name, model = f"{name}.{step}" if name else step, largest
        yield name, model


def traces_in(paths: Iterable[str | PathLike[str]]) -> list[Path]:
    """The files to read for some paths. A folder means the files directly in it whose names end in .json or .json.gz,
    sorted by name, without runs that torchprof saved. Raises TorchprofError for a folder without traces."""
    files: list[Path] = []
    for path in map(Path, paths):
        if not path.is_dir():
            files.append(path)
            continue
        named = (file for file in sorted(path.iterdir()) if file.name.lower().endswith(_SUFFIXES) and file.is_file())
        if not (traces := [file for file in named if not is_run_file(file)]):
            raise TorchprofError(
                f"{path} is a folder without traces: their names end in {' or '.join(_SUFFIXES)}, and it has no such "
                "file."
            )
        files += traces
    return files


@dataclass(frozen=True)
class _FileRun:
    """The run of one file, without its warnings, which are in ``seen``. ``start_ns``, ``end_ns``: the start and the end
    of its session. ``process``: the name of the machine, and the IDs of its processes."""

    path: Path
    run: Run
    seen: Observations
    start_ns: int
    end_ns: int
    process: tuple[str, tuple[str, ...]]


def _detail(operator: str) -> Detail:
    # It imports torch: this is only called if the trace has shapes.
    from torchprof.measure.flops.torch_registry import detail_for

    return detail_for(operator, Detail.SHAPES)


@paused_gc()
def _read(
    path: Path, model: ModelPlan | None, with_timeline: bool, progress: Callable[[float], None] | None = None
) -> _FileRun:
    """The run of one file. Raises TorchprofError if it is not a trace, has no event, or is of another model."""
    file, table = TraceFile(path), EventTable(_detail)
    for piece in file.pieces(progress):
        table.add(piece)
    duplicates = table.drop_duplicates()
    table.place_overhead()
    crossing = table.separate()
    base = file.header.get("baseTimeNanoseconds")
    events = TraceEvents(table, base if type(base) is int and abs(base) < BEYOND else 0)
    seen = Observations(warnings=[*file.warnings, *_warnings(path, events, duplicates, crossing)])
    if not len(table):
        raise TorchprofError(
            f"{path} holds no event of torch's profiler that can be read: no operator, no range and no kernel. "
            f"{''.join(f'{warning} ' for warning in seen.warnings)}A trace is what "
            '`prof.export_chrome_trace("trace.json")` writes after a `with torch.profiler.profile() as prof:` block.'
        )
    planned, layers = plan_trace(path, events, model, seen)
    options = Options(
        device=events.device,
        profile_memory=events.has_memory,
        with_flops=events.has_shapes,
        record_shapes=events.has_shapes,
        with_timeline=with_timeline,
        on_cpu=events.has_operators or events.device is None,
    )

    def columns() -> EventColumns:
        columns = events.columns(planned.sites)
        columns.add(before=planned.labels)
        return columns

    recording = Recording(
        events,
        columns,
        layers,
        meta_of_header(path, file.header),
        seen,
        group=sole_group(process_groups(file.header)),
        has_steps=events.marks > 1,
        from_first_mark=events.from_first_mark,
    )
    run = assemble(recording, planned, options)
    return _FileRun(path, run, seen, *events.session, (run.meta.machine, table.processes))


_Outcome: TypeAlias = "_FileRun | TorchprofError"


def _read_or_error(path: Path, *, in_folders: frozenset[Path], **options: Any) -> _Outcome:
    """The run of one file. If it cannot be read and was found in a folder, the error."""
    try:
        return _read(path, **options)
    except TorchprofError as error:
        if path not in in_folders:
            raise
        return error


def _without_errors(files: Sequence[Path], outcomes: Iterable[_Outcome]) -> list[_FileRun]:
    """The runs, with a warning for each file that could not be read. Raises its error if no file could be."""
    of_files = [*outcomes]  # to their end, where processes are left
    runs = [run for run in of_files if isinstance(run, _FileRun)]
    for file, error in zip(files, of_files):
        if isinstance(error, TorchprofError):
            if not runs:
                raise error
            why = str(error).replace(str(file), file.name)
            runs[0].seen.warnings.append(RunWarning.of("trace_left_out", file=file.name, why=why))
    return runs


def _outcomes(
    files: Sequence[Path], read: Callable[..., _Outcome], progress: Callable[[float], None] | None, processes: int
) -> Iterator[_Outcome]:
    """What ``read`` gives of each file, one after the other, or in several processes."""
    sizes = [file.stat().st_size for file in files]
    before = [*accumulate(sizes, initial=0)]

    def report(number: int, fraction: float) -> None:
        if progress is not None:
            progress((before[number] + fraction * sizes[number]) / max(before[-1], 1))

    if processes > 1 and len(files) > 1:
        for number, outcome in enumerate(in_processes(read, files, processes)):
            report(number, 1)
            yield outcome
    else:
        yield from (read(file, progress=partial(report, number)) for number, file in enumerate(files))


_MUCH_OUTSIDE, _LONG_OUTSIDE_NS = 0.05, 5_000_000
"""The time of a session outside of all events is a warning if it is longer than this share of what was recorded, and
than this: starting and stopping the profiler takes some milliseconds."""


def _warnings(path: Path, events: TraceEvents, duplicates: int, crossing: int) -> Iterator[RunWarning]:
    table = events.table
    if duplicates:
        yield RunWarning.of("trace_events_twice", file=path.name, count=duplicates)
    if table.unread:
        yield RunWarning.of("trace_events_missing", file=path.name, count=table.unread)
    if crossing:
        yield RunWarning.of("trace_ranges_cross", file=path.name, count=crossing)
    if len(table.processes) == 1 and (early := table.count_early_work()):
        yield RunWarning.of("clocks_differ", file=path.name, count=early)
    before_ns, after_ns = events.outside_ns
    if before_ns + after_ns > max(_MUCH_OUTSIDE * events.wall_ns, _LONG_OUTSIDE_NS):
        yield RunWarning.of("session_outside", before_ns=before_ns, after_ns=after_ns)
    if len(table.processes) > 1:
        yield RunWarning.of("trace_of_processes", file=path.name, count=len(table.processes))
    if events.has_nodes and not events.has_forward_threads:
        yield RunWarning.of("trace_without_numbers", file=path.name)


def _combined(runs: Iterable[_FileRun]) -> Run:
    """One run of several files. The cycles of one process add up; ranks are merged side by side."""
    in_order = sorted(runs, key=lambda cycle: (cycle.run.meta.rank, cycle.start_ns))
    by_rank = [[*cycles] for _, cycles in groupby(in_order, lambda cycle: cycle.run.meta.rank)]
    for cycles in by_rank:
        for cycle, after in pairwise(cycles):
            if after.start_ns < cycle.end_ns:
                raise TorchprofError(
                    f"{cycle.path} and {after.path} are of the same time: one recording twice, or two processes "
                    f"without a rank. Give each recording once, and read each process separately. {_HOW_TO_ADD_A_RANK}"
                )
        for cycle in cycles:
            if cycle.process != cycles[0].process:
                raise TorchprofError(
                    f"{cycles[0].path} and {cycle.path} are both of rank {cycle.run.meta.rank}, and of different "
                    f"processes. Read each of them separately. {_HOW_TO_ADD_A_RANK}"
                )
    return merge(map(_sum_of_cycles, by_rank))


def _sum_of_cycles(cycles: Iterable[_FileRun]) -> Run:
    run: Run | None = None
    seen = Observations()
    for cycle in cycles:
        run = add_cycle(run, cycle.run)
        seen.add(cycle.seen, [run.layers.index_of[layer.path] for layer in cycle.run.layers])
    assert run is not None
    return with_warnings(run, seen)
