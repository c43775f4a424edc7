"""Writes the file of a run. The format is in docs/run-file.md."""

from __future__ import annotations

import gzip
import json
import os
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, fields, replace
from itertools import chain
from operator import itemgetter
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchprof.errors import TorchprofError
from torchprof.run.layers import Layer
from torchprof.run.lockstep import Lockstep
from torchprof.run.meta import Meta
from torchprof.run.samples import Spread
from torchprof.run.timeline import Timeline
from torchprof.run.warnings import Caveat, sharing_key
from torchprof.run.words import Frame, Signature

if TYPE_CHECKING:
    from torchprof.run.run import Run

SCHEMA = 3
"""The version of the format. It increases when an older reader would misread a newer file."""
SAMPLE_NAMES = itemgetter("phase", "device", "measure")
SAMPLE_NUMBERS = itemgetter("layer", "rank", "count", "sum", "min", "max", "first")
SAMPLE_PARTS = 12

_IF_ANY = ("times", "kept_ns", "medians", "values")

FORMAT = "torchprof-run"


def json_of_run(run: Run, *, strip: bool = False, computed: Mapping[str, Any] | None = None) -> str:
    """The text of the file of a run. ``strip`` leaves out the names of files, machines and jobs.

    ``computed``: more keys, for other programs. ``load`` ignores them: their values follow from the run.
    """
    return "".join(_pieces(run, strip, computed or {}))


def stripped(run: Run) -> Run:
    """The run without the names of files, machines and jobs."""
    return replace(run, metas=tuple(map(_stripped, run.metas)))


def write(run: Run, path: str | PathLike[str], *, strip: bool = False) -> None:
    """Save a run as ``Run.save`` describes. The old contents of the file stay until the new ones are complete."""
    path = Path(os.path.realpath(path))  # write to the target of a link
    if not path.parent.is_dir():
        raise TorchprofError(f"{path} cannot be written: the folder {path.parent} does not exist. Make it first.")
    is_plain = path.is_file() or not path.exists()  # not a pipe or terminal
    written = path.with_name(f".{path.name}.{os.getpid()}.part") if is_plain else path
    try:
        with written.open("wb") as plain, ExitStack() as stack:
            file: Any = plain
            if path.suffix == ".gz":
                file = stack.enter_context(gzip.GzipFile("", "wb", fileobj=plain, mtime=0))
            for piece in _pieces(run, strip, {}):
                file.write(piece.encode())
        if is_plain:
            written.replace(path)
    except BaseException:
        if is_plain:
            written.unlink(missing_ok=True)
        raise


def _pieces(run: Run, strip: bool, computed: Mapping[str, Any]) -> Iterator[str]:
    """The text of a run's file in pieces: for a thousand ranks it is too large for memory."""
    before = "{"
    for name, value in chain(_parts(run, strip), computed.items()):
        yield f"{before}{_json(name)}:"
        before = ","
        if isinstance(value, Iterator):
            yield "["
            for number, one in enumerate(value):
                yield f"{',' if number else ''}{_json(one)}"
            yield "]"
        elif isinstance(value, Mapping):
            for number, (key, one) in enumerate(value.items()):
                yield f"{',' if number else '{'}{_json(key)}:{_json(one.tolist() if isinstance(one, array) else one)}"
            yield "}"
        else:
            yield _json(value)
    yield "}"


def _parts(run: Run, strip: bool) -> Iterator[tuple[str, Any]]:
    """The keys of the file and their values. A list that may be very long is an iterator."""
    metas = [_stripped(meta) for meta in run.metas] if strip else run.metas
    frames = _Frames()
    warnings = _Warnings()
    named = "" if strip else "; the names of the machine, the script and the job"
    yield "format", FORMAT
    yield "schema", SCHEMA
    yield "holds", f"layer paths, operator and kernel names, shapes, costs; no tensor data{named}"
    yield "metas", ({**_plain(meta), "warnings": [*map(warnings.number_of, meta.warnings)]} for meta in metas)
    yield "stored_warnings", _with_layer_numbers(warnings.all, run.layers)
    yield "layers", map(asdict, run.layers)
    yield "frames", map(frames.chain, run.rows.frames)
    yield "within", ([[*around[:2], frames.chain(around.frames)] for around in step] for step in run.rows.within)
    yield "shared", run.rows.shared
    yield "signatures", list(frames.signatures)
    yield "devices", run.rows.devices
    yield "rows", run.rows.columns
    yield "samples", ({**key._asdict(), **_of_spread(spread)} for key, spread in run.samples.items())
    yield "memory", ({**asdict(memory), "held": memory.held} for memory in run.memory)
    yield "timeline", None if run.timeline is None else _of_timeline(run.timeline)
    yield "device_times", map(asdict, run.device_times)
    yield "lockstep", ({**key._asdict(), **_of_lockstep(lockstep)} for key, lockstep in run.lockstep.items())
    yield "unfinished", ({**asdict(one), "entered": one.entered} for one in run.unfinished)


def _stripped(meta: Meta) -> Meta:
    regions = tuple(region._replace(file="") for region in meta.regions)
    compilations = tuple(one._replace(file="") for one in meta.compilations)
    return replace(meta, machine="", script="", job="", regions=regions, compilations=compilations)


def _plain(meta: Meta) -> dict[str, Any]:
    """Like ``asdict``, but without the warnings: it would copy the names of all their layers."""
    return asdict(replace(meta, warnings=()))


def _with_layer_numbers(warnings: Sequence[Caveat], layers: Sequence[Layer]) -> Iterator[dict[str, Any]]:
    """Warnings with the index of each layer in place of its name: every rank may have a list of thousands, each
    different. The name stays if no layer has it, or two have."""
    names = Counter(layer.name for layer in layers)
    index_of = {layer.name: index for index, layer in enumerate(layers) if names[layer.name] == 1}
    for warning in warnings:
        yield {**warning_data(warning), "layers": [index_of.get(name, name) for name in warning.layers]}


def warning_data(warning: Caveat) -> dict[str, Any]:
    """A warning as the file holds it. ``added`` is left out if it is empty: only sums of runs have it."""
    values = {"code": warning.code, "layers": warning.layers, "facts": warning.facts}
    return {**values, "added": warning.added} if warning.added else values


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


class _Warnings:
    """The distinct warnings of all ranks: ``Meta.warnings`` refers to them by number, from 0 on."""

    def __init__(self) -> None:
        self.all: list[Caveat] = []
        self._numbers: dict[tuple[Any, ...], int] = {}

    def number_of(self, warning: Caveat) -> int:
        number = self._numbers.setdefault(sharing_key(warning), len(self.all))
        if number == len(self.all):
            self.all.append(warning)
        return number


class _Frames:
    """Frames as in the file: kind, name, and the number of the signature, from 1 on; 0 for no signature."""

    def __init__(self) -> None:
        self.signatures: dict[Signature, int] = {}

    def chain(self, frames: Sequence[Frame]) -> list[tuple[str, str, int]]:
        numbers = self.signatures
        return [
            (kind, name, 0 if signature is None else numbers.setdefault(signature, len(numbers) + 1))
            for kind, name, signature in frames
        ]


def _of_lockstep(lockstep: Lockstep) -> dict[str, Any]:
    """Like ``asdict``, but without copies, and without optional fields that are empty."""
    values = {field.name: getattr(lockstep, field.name) for field in fields(Lockstep)}
    return {name: value for name, value in values.items() if value or name not in _IF_ANY}


def _of_spread(spread: Spread) -> dict[str, Any]:
    """Like ``asdict``, but without copying each value: a thousand ranks have a million."""
    return {field.name: getattr(spread, field.name) for field in fields(Spread)}


def _of_timeline(timeline: Timeline) -> dict[str, Any]:
    spans = None
    if timeline.spans is not None:
        fields = {name: getattr(timeline.spans, name) for name in ("lanes", "names", "steps", "dropped")}
        spans = {**fields, **_of_columns(timeline.spans.columns)}
    return {
        "devices": timeline.devices,
        "dropped": timeline.dropped,
        "rank": timeline.rank,
        **_of_columns(timeline.columns),
        "spans": spans,
    }


def _of_columns(columns: Mapping[str, array[int]]) -> dict[str, list[int]]:
    return {name: column.tolist() for name, column in columns.items()}
