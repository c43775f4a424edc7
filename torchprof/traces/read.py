"""``from_trace``: the run of a trace that torch's profiler wrote, with the model at hand or without."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchprof.attribute.collectives import layers_by_fqn
from torchprof.attribute.events import Detail, Site
from torchprof.attribute.process_groups import mesh_of_groups, sole_group
from torchprof.errors import TorchprofError, some
from torchprof.measure.assemble import assemble, wanted_detail, with_warnings
from torchprof.measure.recording import Observations, Options, RecordedCycle
from torchprof.run.cycles import add_cycle
from torchprof.run.file_read import is_run_file
from torchprof.run.layers import Layer
from torchprof.run.merge import merge
from torchprof.run.meta import Meta
from torchprof.run.paused_gc import paused_gc
from torchprof.run.renumber import on_layers
from torchprof.run.run import Run
from torchprof.run.warnings import MODULES_OF_CALL_STACKS, Caveat, caveat
from torchprof.traces.events import TraceEvents
from torchprof.traces.file import TraceFile
from torchprof.traces.layers import layers_of_labels, layers_of_modules, layers_of_ranges, path_of
from torchprof.traces.matching import ModelModule, match_modules, refuse_another_model
from torchprof.version import __version__

if TYPE_CHECKING:
    from torch import nn

    from torchprof.record.plan import Plan


_WITH_SHAPES = Options(with_flops=True, record_shapes=True)
_GIGABYTE = 2**30
_SUFFIXES = (".json", ".json.gz")
_HOW_TO_TELL = (
    "A trace tells its rank where torch.distributed was initialised before it was recorded, else it is taken for rank "
    '0; what tells it can be added at the top of its JSON: "distributedInfo": {"rank": 1, "world_size": 2}.'
)


@paused_gc()
def from_trace(
    traces: str | PathLike[str] | Iterable[str | PathLike[str]],
    model: nn.Module | Sequence[nn.Module] | None = None,
    *,
    paths: Iterable[Any] | None = None,
    with_timeline: bool = False,
    progress: Callable[[float], None] | None = None,
    processes: int = 1,
) -> Run:
    """The run of a trace: of a file that ``torch.profiler.profile(...).export_chrome_trace`` wrote, plain or gzipped.

    ``traces``: its path; or several, of the ranks of one job, or of the cycles of one process, which are added up. Of a
    folder, all traces directly in it: see ``traces_in``.

    The layers are those of our own labels, where the trace was recorded inside ``torchprof.annotate`` or ``Profile``;
    else the modules of Python's events (``with_stack=True``); else the ranges of ``record_function``. A trace tells of
    modules nothing but class and order: with the ``model``, a module or a list of them, they have their paths and
    parameters, and ``paths`` selects as for ``Profile``. Memory, FLOPs and device time are in the run where they were
    recorded, FLOPs with ``record_shapes=True``; what is in no trace is unknown. ``with_timeline`` keeps what ran when.

    ``progress`` is called now and then with the share of the bytes that were read, from 0 to 1. ``processes``: so many
    read traces at once, each as much memory as one of them takes; they are started afresh, so that a script that asks
    for several does so below ``if __name__ == "__main__":``. Needs no torch where neither shapes were recorded nor a
    model is given.

    Raises TorchprofError for what is no trace of torch's, for one of another model, and for two traces of one rank that
    are not of one process; OSError as ``open`` does. Of a file that was cut off, what there is is read, with a warning.
    """
    files = traces_in([traces] if isinstance(traces, (str, PathLike)) else traces)
    if not files:
        raise TorchprofError("from_trace needs a trace: the path of one, or several; the list is empty.")
    if paths is not None and model is None:
        raise TorchprofError("paths= selects modules of a model: give from_trace the model, too.")
    if not isinstance(processes, int) or processes < 1:
        raise TorchprofError(f"processes= is how many read traces at once, from 1 on, and got {processes!r}.")
    known = None
    if model is not None:
        # They import torch, which a trace alone does not need.
        from torchprof.record.modules import checked_models
        from torchprof.record.plan import Plan

        known = _Model.of(Plan(checked_models(model), paths))
    sizes = [file.stat().st_size for file in files]
    whole = max(sum(sizes), 1)

    def tell(read: float) -> None:
        if progress is not None:
            progress(read / whole)

    if processes > 1 and len(files) > 1:
        return _together(_read_at_once(files, known, with_timeline, min(processes, len(files)), tell))
    found: list[_Found] = []
    for at, file in enumerate(files):

        def part(share: float, before: int = sum(sizes[:at]), size: int = sizes[at]) -> None:
            tell(before + share * size)

        found.append(_read(file, known, with_timeline, part))
    return _together(found)


def traces_in(paths: Iterable[str | PathLike[str]]) -> list[Path]:
    """The files to read for some paths: files as they are, and of a folder those directly in it whose names end in
    .json or .json.gz, in the order of their names, but for runs that torchprof saved there.

    Raises TorchprofError for a folder without traces.
    """
    files: list[Path] = []
    for path in map(Path, paths):
        if not path.is_dir():
            files.append(path)
            continue
        named = (file for file in sorted(path.iterdir()) if file.name.lower().endswith(_SUFFIXES) and file.is_file())
        found = [file for file in named if not is_run_file(file)]
        if not found:
            raise TorchprofError(
                f"{path} is a folder without traces: their names end in {' or '.join(_SUFFIXES)}, and no such file is "
                "directly in it."
            )
        files += found
    return files


def _read_at_once(
    files: Sequence[Path], model: _Model | None, with_timeline: bool, processes: int, tell: Callable[[float], None]
) -> list[_Found]:
    """What each file gave, read by several processes; ``tell`` is called with the bytes that were read."""
    from concurrent.futures import ProcessPoolExecutor, as_completed  # they take longer to import than all else here
    from concurrent.futures.process import BrokenProcessPool
    from multiprocessing import get_context

    read = 0
    with ProcessPoolExecutor(processes, get_context("spawn"), _end_quietly_by_sigint) as pool:
        with _sigint_blocked():
            readings = {pool.submit(_read, file, model, with_timeline): file for file in files}
        try:
            for reading in as_completed(readings):
                reading.result()
                read += readings[reading].stat().st_size
                tell(read)
        except BrokenProcessPool as error:
            raise TorchprofError(
                f"One of the {processes} processes that read traces was ended from outside, as for want of memory. "
                "Fewer at once take less."
            ) from error
        finally:
            pool.shutdown(cancel_futures=True)
    return [reading.result() for reading in readings]


@contextmanager
def _sigint_blocked() -> Iterator[None]:
    """Block Ctrl-C in this thread: the processes that it starts begin so, and would else write tracebacks of it."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end_quietly_by_sigint() -> None:
    """Let Ctrl-C, which the terminal sends to all processes, end this one without a traceback: the first one tells."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])


@dataclass(frozen=True)
class _Found:
    """What one file gave: a run without its warnings. ``start_ns``: when its session began; ``process``: the name of
    the machine, and the numbers of its processes."""

    path: Path
    run: Run
    planned: _Layers
    seen: Observations
    start_ns: int
    process: tuple[str, tuple[str, ...]]


@paused_gc()
def _read(
    path: Path, model: _Model | None, with_timeline: bool, progress: Callable[[float], None] | None = None
) -> _Found:
    wanted: list[Callable[[str], Detail] | None] = []

    def detail(name: str) -> Detail:
        if not wanted:  # what it asks takes time to import: only where there are shapes
            wanted.append(wanted_detail(_WITH_SHAPES))
        return wanted[0](name) if wanted[0] else Detail.NOTHING

    file, events = TraceFile(path), TraceEvents(detail)
    for piece in file.pieces(progress):
        events.add(piece)
    base = file.header.get("baseTimeNanoseconds")
    events.base_ns = base if type(base) is int else 0
    seen = Observations(notes=[*file.warnings, *_warnings(path, events)])
    if not len(events):
        raise TorchprofError(
            " ".join(
                [
                    f"{path} holds no event of torch's profiler that can be read: no operator, no range and no kernel.",
                    *map(str, seen.notes),
                    'A trace is what `prof.export_chrome_trace("trace.json")` writes after a `with '
                    "torch.profiler.profile() as prof:` block.",
                ]
            )
        )
    planned, layers = _layers(path, events, model, seen)
    asked = Options(
        device=events.device,
        profile_memory=events.has_memory,
        with_flops=events.has_shapes,
        record_shapes=events.has_shapes,
        with_timeline=with_timeline,
        on_cpu=events.has_operators or events.device is None,
    )
    recording = RecordedCycle(
        events,
        events.events(planned.sites),
        layers,
        _origin(path, file.header),
        seen,
        group=sole_group(_groups(file.header)),
        has_steps=events.marks > 1,
        from_first_mark=events.from_first_mark,
    )
    run = assemble(recording, planned, asked)
    return _Found(path, run, planned, seen, events.first_ns, (run.meta.machine, events.processes))


def _warnings(path: Path, events: TraceEvents) -> Iterator[Caveat]:
    """What a trace has not, or has too much of. What stands in it twice is left out."""
    doubles = events.drop_doubles()
    if doubles:
        yield caveat("trace_events_twice", file=path.name, count=doubles)
    if events.unread:
        yield caveat("trace_events_missing", file=path.name, count=events.unread)
    if len(events.processes) > 1:
        yield caveat("trace_of_processes", file=path.name, count=len(events.processes))
    if events.has_nodes and not events.has_numbers:
        yield caveat("trace_without_numbers", file=path.name)


@dataclass(frozen=True)
class _Layers:
    """The layers that a trace tells of, as a plan: see ``LayerPlan``."""

    sites: Mapping[str, Site]
    layer_paths: Sequence[tuple[str, ...]]
    callable_layers: Set[int]
    fqns: Mapping[str, Sequence[int]]
    replicated: Mapping[int, Set[int]] | None = None
    selected: Set[int] | None = None
    selected_paths: tuple[tuple[str, ...], ...] | None = None


@dataclass(frozen=True)
class _Model:
    """What a plan knows of the modules of the model, and none of them: other processes can have it."""

    plan: _Layers
    names: Sequence[str]
    layers: tuple[Layer, ...]
    modules: Sequence[ModelModule]

    @classmethod
    def of(cls, plan: Plan) -> _Model:
        from torchprof.traces.model import model_modules  # which imports torch: a trace alone does without

        layers = _Layers(
            plan.sites,
            plan.layer_paths,
            plan.callable_layers,
            plan.fqns,
            plan.replicated or None,  # a model at hand need not be wrapped as it was in the recording
            plan.selected,
            plan.selected_paths,
        )
        return cls(layers, plan.names, tuple(map(_of_some_mode, plan.layers())), model_modules(plan))


def _layers(
    path: Path, events: TraceEvents, model: _Model | None, seen: Observations
) -> tuple[_Layers, tuple[Layer, ...]]:
    """The layers, from the best that the trace tells: labels, modules, ranges."""
    labels = events.labels
    if model is not None and labels:
        if set(labels).isdisjoint(model.plan.sites):
            raise TorchprofError(
                f"{path} is of other modules than those of {', '.join(model.names)}: {some(_models(labels))}. Give "
                "from_trace the model, and the paths, of the recording; or no model, and the labels tell the layers."
            )
        if not events.has_compiled:
            refuse_another_model(model.modules, {*map(path_of, labels)}, model.plan.selected)
        known = {module.path for module in model.modules}
        foreign = [path for path in map(path_of, labels) if path not in known]
        if foreign:
            seen.notes.append(caveat("labelled_in_trace_only", [".".join(path) for path in foreign]))
        return model.plan, model.layers
    if model is not None:
        modules = events.modules()
        if not modules:
            raise TorchprofError(
                f"{path} tells nothing of modules, so that the model is of no use. {_how_to_tell_modules(events)}; or "
                "give no model."
            )
        hierarchy = match_modules(modules, model.modules, model.layers, compiled=events.has_compiled)
    elif labels:
        hierarchy = layers_of_labels(labels, events.classes())
    elif modules := events.modules():
        hierarchy = layers_of_modules(modules)
    else:
        hierarchy = layers_of_ranges(events.ranges())
    seen.notes += hierarchy.warnings
    if events.device is not None and not events.has_operators:
        seen.notes.append(caveat("trace_without_operators", file=path.name))
    elif not hierarchy.layers:
        seen.notes.append(caveat("trace_without_layers", file=path.name, has_call_stacks=events.has_call_stacks))
    paths = [layer.path for layer in hierarchy.layers]
    called = {layer for site in hierarchy.sites.values() for layer in site.layers}
    layers = _Layers(hierarchy.sites, paths, called, layers_by_fqn(paths))
    if model is None:
        return layers, hierarchy.layers
    plan = model.plan
    called |= plan.callable_layers  # of those that were selected
    if plan.selected is not None:
        called &= plan.selected
    return replace(layers, selected=plan.selected, selected_paths=plan.selected_paths), hierarchy.layers


def _how_to_tell_modules(events: TraceEvents) -> str:
    """How to record a trace that has modules, where this one has none."""
    if events.has_call_stacks:
        return MODULES_OF_CALL_STACKS
    return "Record it inside `torchprof.annotate(model)`, or with `torch.profiler.profile(with_stack=True)`"


def _models(labels: Iterable[str]) -> list[str]:
    """The models that some labels are of."""
    return list(dict.fromkeys(path_of(label)[0] for label in labels))


def _of_some_mode(layer: Layer) -> Layer:
    """A layer of the model that was given: its mode in the recording is unknown."""
    return replace(layer, training=None)


def _origin(path: Path, header: Mapping[str, Any]) -> Meta:
    """What the trace says of where it was recorded."""
    distributed = _distributed(header)
    rank, ranks = (_number(distributed.get(key)) for key in ("rank", "world_size"))
    devices: Counter[str] = Counter()
    properties = header.get("deviceProperties")
    for one in properties if isinstance(properties, list) else ():
        if isinstance(one, dict) and one.get("name"):
            memory = one.get("totalGlobalMem")
            size = f" ({memory / _GIGABYTE:.0f} GB)" if isinstance(memory, int) and memory > 0 else ""
            devices[f"{one['name']}{size}"] += 1
    environment = [("devices", ", ".join(f"{count} × {name}" for name, count in devices.items()))] if devices else []
    if ranks:
        backend = " ".join(str(distributed[key]) for key in ("backend", "nccl_version") if distributed.get(key))
        environment.append(("ranks", f"{ranks}{', ' if backend else ''}{backend}"))
    machine = header.get("host_name")
    return Meta(
        model=(),
        rank=rank,
        world_size=max(ranks, 1),
        mesh=mesh_of_groups(_groups(header), rank),
        versions=(("torchprof", __version__),),
        environment=tuple(environment),
        machine=machine if isinstance(machine, str) else "",
        script=str(path.absolute()),
    )


def _distributed(header: Mapping[str, Any]) -> Mapping[str, Any]:
    """What the trace says of the job that its process was part of."""
    distributed = header.get("distributedInfo")
    return distributed if isinstance(distributed, dict) else {}


def _number(value: object) -> int:
    return value if type(value) is int and value > 0 else 0


def _groups(header: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The groups that its rank was in."""
    groups = _distributed(header).get("pg_config")
    return [group for group in groups if isinstance(group, dict)] if isinstance(groups, list) else []


def _together(found: Iterable[_Found]) -> Run:
    """One run of several files: cycles of one process add up, ranks stand beside each other."""
    by_rank: dict[int, list[_Found]] = {}
    for one in sorted(found, key=lambda one: (one.run.meta.rank, one.start_ns)):
        by_rank.setdefault(one.run.meta.rank, []).append(one)
    for cycles in by_rank.values():
        for one, after in pairwise(cycles):
            if after.start_ns < one.start_ns + one.run.meta.wall_ns:
                raise TorchprofError(
                    f"{one.path} and {after.path} are of the same time: one recording twice, or two processes that do "
                    f"not tell their rank. Give each recording once, and each process by itself. {_HOW_TO_TELL}"
                )
        for one in cycles:
            if one.process != cycles[0].process:
                raise TorchprofError(
                    f"{cycles[0].path} and {one.path} are both of rank {one.run.meta.rank}, and of different "
                    f"processes. Read each by itself. {_HOW_TO_TELL}"
                )
    return merge(map(_sum_of_cycles, by_rank.values()))


def _sum_of_cycles(cycles: Sequence[_Found]) -> Run:
    """The run of some cycles of one process, with the warnings of all of them."""
    layers: dict[tuple[str, ...], Layer] = {}
    for one in cycles:
        for layer in one.run.layers:
            layers.setdefault(layer.path, layer)
    number = {path: index for index, path in enumerate(layers)}
    run: Run | None = None
    seen = Observations()
    callable_layers: set[int] = set()
    for one in cycles:
        moved = {index: number[layer.path] for index, layer in enumerate(one.run.layers)}
        run = add_cycle(run, on_layers(one.run, tuple(layers.values())))
        seen.notes += [note for note in one.seen.notes if note not in seen.notes]
        seen.callers |= {(moved.get(outer, outer), moved.get(inner, inner)) for outer, inner in one.seen.callers}
        seen.labels += one.seen.labels
        seen.unmatched += one.seen.unmatched
        seen.uncertain += one.seen.uncertain
        callable_layers |= {moved[layer] for layer in one.planned.callable_layers}
    assert run is not None
    planned = replace(cycles[0].planned, sites={}, layer_paths=list(number), callable_layers=callable_layers)
    return with_warnings(run, planned, seen)
