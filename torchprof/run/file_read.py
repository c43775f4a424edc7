"""Reads the file of a run and checks it. The format is in docs/run-file.md."""

from __future__ import annotations

import gzip
import json
import re
import zlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import astuple, is_dataclass, replace
from functools import cache
from operator import le
from os import PathLike
from pathlib import Path
from sys import intern
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

from torchprof.errors import TorchprofError
from torchprof.run.cost import Cost
from torchprof.run.cycles import sum_of_rows
from torchprof.run.file_write import FORMAT, SAMPLE_NAMES, SAMPLE_NUMBERS, SAMPLE_PARTS, SCHEMA
from torchprof.run.layers import Layer, Layers
from torchprof.run.lockstep import NO_LAST_RANK, Lockstep, LockstepKey
from torchprof.run.memory import KINDS, Held, Memory
from torchprof.run.meta import Meta
from torchprof.run.rows import Around, Rows, rows_of_lines
from torchprof.run.run import Run
from torchprof.run.samples import SampleKey, Spread
from torchprof.run.sentences import WITHOUT_SHAPES
from torchprof.run.timeline import DeviceTime, Lane, Spans, Timeline
from torchprof.run.unfinished import Entered, Unfinished
from torchprof.run.warnings import Caveat
from torchprof.run.words import FORWARD, NOT_SELECTED, OUTSIDE, PHASES, Frame, Signature

_WITH_IDLE_TIME = 3  # the first schema whose rows have the time in which nothing ran
_START = 256  # bytes: the format is named in the first of them


def is_run_file(path: str | PathLike[str]) -> bool:
    """Whether a file is a saved run, by its first bytes. Raises OSError like ``open``."""
    with Path(path).open("rb") as file:
        is_zipped = file.read(2) == b"\x1f\x8b"
        file.seek(0)
        try:
            start = (gzip.GzipFile(fileobj=file) if is_zipped else file).read(_START)
        except (OSError, EOFError, zlib.error):  # damaged: reading the file reports it
            return False
    return re.match(rb'(?:\xef\xbb\xbf)?\s*{\s*"format"\s*:\s*"torchprof-run"', start) is not None


def load(path: str | PathLike[str]) -> Run:
    """Read a run that ``Run.save`` wrote. Does not import torch.

    Raises OSError if the file cannot be read; TorchprofError if it is not a run file, is damaged, or was written by a
    newer torchprof.
    """
    return run_of(Path(path).read_bytes(), str(path))


def run_of(data: bytes, path: str) -> Run:
    """The run in the bytes of a file; ``path`` is its name in error messages. Raises TorchprofError like ``load``."""
    try:
        document = json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)
    except (ValueError, EOFError, OSError, zlib.error, RecursionError) as error:
        raise TorchprofError(f"{path} is not a saved run: it does not read as JSON ({error}).") from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        if isinstance(document, dict) and "traceEvents" in document:
            raise TorchprofError(
                f"{path} is a trace, not a saved run: torchprof.from_trace(path) reads it, and "
                "`python -m torchprof show FILE -o run.json` makes a saved run of it."
            )
        raise TorchprofError(f"{path} is JSON, but not a saved run: write one with `prof.run.save(path)`.")
    schema = document.get("schema")
    if type(schema) is not int or not 1 <= schema <= SCHEMA:
        raise TorchprofError(
            f"{path} has schema {schema}; this torchprof reads up to {SCHEMA}. Read it with a newer torchprof."
        )
    try:
        run = _run(document)
        return run if schema >= _WITH_IDLE_TIME else _with_idle_time(run)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError, RecursionError) as error:
        raise TorchprofError(f"{path} is a damaged run file: {type(error).__name__} {error}.") from error


def _run(document: dict[str, Any]) -> Run:
    """The run of a file. Raises KeyError, TypeError, ValueError or OverflowError if the file contradicts itself."""
    layers = _layers(document)
    metas = _metas(document, layers)
    rows = _rows(document, layers)
    samples = dict(_sample(entry, len(layers)) for entry in document["samples"])
    memory = _memory(document, len(layers))
    device_times = _read(tuple[DeviceTime, ...], document["device_times"])
    for time in device_times:
        _demand(_adds_up(time), f"the times of {time.device}")
    lockstep = _lockstep(document, len(layers))
    unfinished = _read(tuple[Unfinished, ...], document["unfinished"])
    for one in (each for step in unfinished for each in (step, *step.entered)):
        _demand(_leads_somewhere(one, len(layers)), f"{one} in 'unfinished'")
    timeline = None if document["timeline"] is None else _timeline(document["timeline"], len(layers))
    run = Run(metas, layers, rows, samples, memory, timeline, device_times, lockstep, unfinished)
    _demand(_ranks_in(run) <= {meta.rank for meta in metas}, "a rank without meta")
    return run


def _with_idle_time(run: Run) -> Run:
    """The run of an older file, with the time in which nothing ran in the row outside all layers."""
    idle = {meta.rank: meta.wall_ns - busy for meta in run.metas for device, busy in meta.busy_ns if device == "cpu"}
    lines: dict[tuple[int, ...], tuple[int, ...]] = {
        (OUTSIDE, PHASES.index(FORWARD), 0, 0, 0, 0, rank): (0, *astuple(Cost(cpu_ns=ns)))
        for rank, ns in idle.items()
        if ns > 0
    }
    idle_rows = rows_of_lines(run.layers, lines, [()], ["cpu"], [()], [()])
    return replace(run, rows=sum_of_rows(run.layers, run.rows, idle_rows))


def _metas(document: dict[str, Any], layers: Layers) -> tuple[Meta, ...]:
    """The metas, with their warnings instead of the numbers of these. Ranks with equal warnings share the objects."""
    names = [layer.name for layer in layers]
    for stored in _list(document["stored_warnings"]):
        stored["layers"] = [_name_of_layer(one, names) for one in _list(stored.get("layers", []))]
    warnings = _read(tuple[Caveat, ...], document["stored_warnings"])
    metas = []
    for entry in _list(document["metas"]):
        numbers = _read(tuple[int, ...], entry.pop("warnings", []))
        _demand(all(0 <= number < len(warnings) for number in numbers), f"the warnings of a rank: {numbers!r:.80}")
        metas.append(replace(_read(Meta, entry), warnings=tuple(warnings[number] for number in numbers)))
    _demand(bool(metas), "no metas")
    return tuple(metas)


def _name_of_layer(stored: Any, names: Sequence[str]) -> Any:
    """A layer of a warning is stored as its index; as its name if that is of no layer."""
    if type(stored) is not int:
        return stored
    _demand(0 <= stored < len(names), f"the layer {stored} of a warning")
    return names[stored]


def _layers(document: dict[str, Any]) -> Layers:
    layers = Layers(_read(tuple[Layer, ...], document["layers"]))
    known: set[tuple[str, ...]] = set()
    for layer in layers:
        _demand(bool(layer.path) and layer.path not in known, f"the path {layer.path}")
        _demand(len(layer.path) == 1 or layer.path[:-1] in known, f"the layer above {layer.name}")
        known.add(layer.path)
    return layers


def _rows(document: dict[str, Any], layers: Layers) -> Rows:
    """The rows, and the tables that they refer to by number."""
    signatures = [None, *_read(tuple[Signature, ...], document["signatures"])]

    def chain(frames: list[Any]) -> tuple[Frame, ...]:
        _demand(isinstance(frames, list), f"{frames!r} instead of frames")
        return tuple(_frame(frame, signatures) for frame in frames)

    frames = tuple(map(chain, document["frames"]))
    within = tuple(
        tuple(Around(_read(int, layer), _read(str, phase), chain(frames)) for layer, phase, frames in step)
        for step in document["within"]
    )
    shared = _read(tuple[tuple[int, ...], ...], document["shared"])
    devices = _read(tuple[str, ...], document["devices"])
    columns = {name: array("q", document["rows"][name]) for name in Rows.COLUMNS}
    _demand(len({len(column) for column in columns.values()}) == 1, "columns that differ in length")
    for name, low, high in (
        ("layer", NOT_SELECTED, len(layers)),
        ("phase", 0, len(PHASES)),
        ("shared", 0, len(shared)),
        ("within", 0, len(within)),
        ("frames", 0, len(frames)),
        ("device", 0, len(devices)),
        ("calls", 0, 2**63),
    ):
        column = columns[name]
        _demand(not column or low <= min(column) <= max(column) < high, f"a number in column {name!r} leads nowhere")
    _demand(all(0 <= layer < len(layers) for by in shared for layer in by), "a layer in 'shared'")
    for around in (around for step in within for around in step):
        _demand(_leads_somewhere(around, len(layers)), f"{tuple(around)} in 'within'")
    return Rows(layers, frames, devices, columns, within, shared)


def _memory(document: dict[str, Any], layers: int) -> tuple[Memory, ...]:
    memory: tuple[Memory, ...] = _read(tuple[Memory, ...], document["memory"])
    for held in (held for one in memory for held in one.held):
        _demand(_leads_somewhere(held, layers), f"{tuple(held)} at the peak")
        _demand(held.kind in (*KINDS, "unknown"), f"{held.kind!r} instead of a kind of memory")
    return memory


def _lockstep(document: dict[str, Any], layers: int) -> dict[LockstepKey, Lockstep]:
    found = {}
    for entry in document["lockstep"]:
        key = _read(LockstepKey, [entry.pop(name) for name in LockstepKey._fields])
        found[key] = _read(Lockstep, entry)
        _demand(_leads_somewhere(key, layers), f"lockstep {tuple(key)}")
        _demand(_is_in_lockstep(found[key]), f"the ranks of lockstep {tuple(key)}")
    return found


def _ranks_in(run: Run) -> set[int]:
    """All ranks for which a run has any figure or layer."""
    ranks = {*run.rows.columns["rank"]}
    for several in (run.samples, run.memory, run.device_times, run.unfinished):
        ranks.update(one.rank for one in several)
    ranks.update(*(one.ranks for one in (*run.layers, *run.lockstep.values())))
    return ranks if run.timeline is None else ranks | {run.timeline.rank}


def _sample(entry: dict[str, Any], layers: int) -> tuple[SampleKey, Spread]:
    """A sample of the file. There are many of them: this takes a third of the time of ``_read``."""
    phase, device, measure = map(intern, SAMPLE_NAMES(entry))
    layer, rank, count, total, least, most, first = array("q", SAMPLE_NUMBERS(entry))
    key = SampleKey(layer, phase, rank, device, measure)
    sample, hashes = tuple(array("q", entry["sample"])), tuple(array("q", entry["hashes"]))
    spread = Spread(count, total, least, most, first, sample, hashes)
    if len(entry) != SAMPLE_PARTS or not _leads_somewhere(key, layers):
        raise ValueError(f"sample {tuple(key)}")
    if not spread.count >= len(spread.sample) == len(spread.hashes) > 0:
        raise ValueError(f"the values of sample {tuple(key)}")
    return key, spread


def _is_in_lockstep(lockstep: Lockstep) -> bool:
    """Whether all parts have the right lengths."""
    ranks, counts, kept = lockstep.ranks, lockstep.counts, len(lockstep.last_ns)
    return (
        len(ranks) == len(counts) == len(lockstep.ns) == len(lockstep.beside_ns) > 0
        and list(ranks) == sorted(set(ranks))
        and (lockstep.is_paired or not (lockstep.last_ns or lockstep.times or lockstep.kept_ns or lockstep.values))
        and kept == len(lockstep.last_rank)
        and set(lockstep.last_rank) <= {*ranks, NO_LAST_RANK}
        and list(lockstep.times) == sorted(set(lockstep.times))
        and all(0 <= at < min(counts) for at in lockstep.times)
        and all(len(each) in (0, len(ranks)) for each in (lockstep.kept_ns, lockstep.medians, lockstep.values))
        and all(len(values) == kept for values in lockstep.values)
    )


def _adds_up(time: DeviceTime) -> bool:
    """Whether no part is longer than the whole, and none is negative."""
    parts = (time.idle_ns, time.compute_ns - time.overlap_ns, time.overlap_ns, time.exposed_ns, time.copy_alone_ns)
    return min(*parts, time.copy_ns - time.copy_alone_ns, *(min(stream[1:]) for stream in time.streams)) >= 0


def _timeline(document: dict[str, Any], layers: int) -> Timeline:
    columns = {name: array("q", document[name]) for name in Timeline.COLUMNS}
    spans = None if document["spans"] is None else _spans(document["spans"], layers)
    timeline = Timeline(
        _read(tuple[str, ...], document["devices"]),
        columns,
        _read(int, document["dropped"]),
        spans,
        _read(int, document["rank"]),
    )
    _demand(len({len(column) for column in columns.values()}) == 1, "columns of the timeline that differ in length")
    for name, low, high in (
        ("device", 0, len(timeline.devices)),
        ("layer", NOT_SELECTED, layers),
        ("phase", 0, len(PHASES)),
        ("kind", -1, len(KINDS)),
    ):
        _demand(all(low <= number < high for number in columns[name]), f"a number in {name!r} of the timeline")
    return timeline


def _spans(document: dict[str, Any], layers: int) -> Spans:
    columns = {name: array("q", document[name]) for name in Spans.COLUMNS}
    spans = Spans(
        _read(tuple[Lane, ...], document["lanes"]),
        _read(tuple[str, ...], document["names"]),
        columns,
        _read(tuple[int, ...], document["steps"]),
        _read(int, document["dropped"]),
    )
    _demand(len({len(column) for column in columns.values()}) == 1, "columns of the spans that differ in length")
    for name, low, high in (
        ("lane", 0, len(spans.lanes)),
        ("layer", NOT_SELECTED, layers),
        ("phase", 0, len(PHASES)),
        ("name", -1, len(spans.names)),
    ):
        _demand(all(low <= number < high for number in columns[name]), f"a number in {name!r} of the spans")
    _demand(all(map(le, columns["start_ns"], columns["end_ns"])), "a span that ends before it begins")
    _demand(all(map(le, spans.steps, spans.steps[1:])), "a step that ends before it begins")
    return spans


def _demand(holds: bool, what: str) -> None:
    if not holds:
        raise ValueError(what)


def _frame(value: Any, signatures: Sequence[Signature | None]) -> Frame:
    if not isinstance(value, list):
        raise TypeError(f"{value!r} instead of a frame")
    kind, name, signature = value
    _demand(0 <= _read(int, signature) < len(signatures), f"the signature of {name!r}")
    return Frame(_read(str, kind), _read(str, name), signatures[signature])


def _leads_somewhere(value: Around | Held | SampleKey | LockstepKey | Unfinished | Entered, layers: int) -> bool:
    return NOT_SELECTED <= value.layer < layers and value.phase in PHASES


def _read(kind: Any, value: Any) -> Any:
    """Convert a JSON value to the type ``kind``, an annotation: JSON has only lists and dicts.

    Raises TypeError, ValueError, KeyError or OverflowError if the value does not fit.
    """
    return _reader(kind)(value)


@cache
def _reader(kind: Any) -> Callable[[Any], Any]:
    """The function that converts JSON values to a type. Cached: a file has a great many values of few types."""
    parts = get_args(kind)
    if NoneType in parts:
        known = _reader(parts[0])
        return lambda value: None if value is None else known(value)
    if kind is Any:
        return _plain
    if kind is Caveat:
        return _warning
    if isinstance(kind, type) and is_dataclass(kind):
        readers = {name: _reader(hint) for name, hint in get_type_hints(kind).items()}
        return lambda value: kind(**{name: readers[name](each) for name, each in value.items()})
    if parts == (int, ...):
        return lambda value: tuple(array("q", _list(value)))
    if parts and parts[-1] is ...:
        each_of_them = _reader(parts[0])
        return lambda value: tuple(map(each_of_them, _list(value)))
    if get_origin(kind) is tuple or hasattr(kind, "_fields"):
        return _record_reader(kind, [*map(_reader, parts or get_type_hints(kind).values())])
    if kind is str:
        return _text

    def as_it_is(value: Any) -> Any:
        if type(value) is not kind and not (kind is float and type(value) is int):
            raise ValueError(f"{value!r:.80} instead of {kind.__name__}")
        return value

    return as_it_is


def _warning(value: Any) -> Caveat:
    """A warning with any code: a newer torchprof may have more codes."""
    _demand(isinstance(value, dict), f"{value!r:.80} instead of a warning")
    _demand({"code"} <= {*value} <= {"code", "layers", "facts", "added"}, f"the parts of a warning: {value!r:.80}")
    facts = value.get("facts", {})
    _demand(isinstance(facts, dict), f"{facts!r:.80} instead of the facts of a warning")
    added = _read(tuple[tuple[tuple[int, ...], int], ...], value.get("added", []))
    _demand(
        all(
            numbers and [*numbers] == sorted({*numbers}) and numbers[0] >= 1 and numbers[-1] <= of
            for numbers, of in added
        ),
        f"the runs {added!r:.80}",
    )
    layers = _read(tuple[str, ...], value.get("layers", []))
    if value["code"] == WITHOUT_SHAPES:  # analyze.caveats computes with these
        _read(tuple[str, ...], facts.get("names", []))
    return Caveat(_read(str, value["code"]), layers, {name: _plain(fact) for name, fact in facts.items()}, added)


def _record_reader(kind: Any, readers: Sequence[Callable[[Any], Any]]) -> Callable[[Any], Any]:
    """The function that reads a tuple or named tuple, part by part. Parts with defaults may be missing."""
    has_names = hasattr(kind, "_fields")
    least = len(kind._fields) - len(kind._field_defaults) if has_names else len(readers)

    def read(value: Any) -> Any:
        if not least <= len(_list(value)) <= len(readers):
            raise ValueError(f"{value!r:.80}, which is not of {len(readers)} parts")
        each = [reader(part) for reader, part in zip(readers, value)]
        return kind(*each) if has_names else tuple(each)

    return read


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{value!r:.80} instead of a list")
    return value


def _text(value: Any) -> str:
    """A string, interned: a thousand runs contain the same names."""
    if type(value) is not str:
        raise ValueError(f"{value!r:.80} instead of str")
    return intern(value)


def _plain(value: Any) -> Any:
    _demand(not isinstance(value, dict), f"{value!r:.80} instead of a plain value")
    return tuple(_plain(each) for each in value) if isinstance(value, list) else value
