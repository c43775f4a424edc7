"""The file of a run: JSON, written and read. Its schema is in docs/run-file.md."""

from __future__ import annotations

import gzip
import json
import zlib
from array import array
from dataclasses import asdict, replace
from os import PathLike
from pathlib import Path
from typing import Any

from torchprof.attribute import NOT_SELECTED, PHASES, Frame, Signature
from torchprof.errors import TorchprofError
from torchprof.run import Layer, Meta, Peak, Rows, Run, SampleKey, Spread

SCHEMA = 2
"""It grows by one whenever a reader of the old file would misread the new one."""
_FORMAT = "torchprof-run"


def write(run: Run, path: str | PathLike[str], *, strip: bool = False) -> None:
    """What ``Run.save`` does."""
    metas = [replace(meta, machine="", script="") for meta in run.metas] if strip else run.metas
    document = {
        "format": _FORMAT,
        "schema": SCHEMA,
        "holds": "layer paths, operator and kernel names, shapes, costs; no tensor data"
        + ("" if strip else "; the names of the machine and the script"),
        "metas": [asdict(meta) for meta in metas],
        "layers": [asdict(layer) for layer in run.layers],
        "frames": run.rows.frames,
        "signatures": run.rows.signatures,
        "devices": run.rows.devices,
        "rows": {name: column.tolist() for name, column in run.rows.columns.items()},
        "samples": [{**key._asdict(), **asdict(spread)} for key, spread in run.samples.items()],
    }
    text = json.dumps(document, separators=(",", ":"))
    path = Path(path)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode(), mtime=0))
    else:
        path.write_text(text, encoding="utf-8")


def load(path: str | PathLike[str]) -> Run:
    """Read a run that ``Run.save`` wrote. Needs no torch.

    Raises OSError where the file cannot be read, TorchprofError where it is no run file, is damaged, or was written by
    a newer torchprof.
    """
    path = Path(path)
    data = path.read_bytes()
    try:
        document = json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)
    except (ValueError, EOFError, OSError, zlib.error, RecursionError) as error:
        raise TorchprofError(f"{path} is not a saved run: it does not read as JSON ({error}).") from error
    if not isinstance(document, dict) or document.get("format") != _FORMAT:
        raise TorchprofError(f"{path} is JSON, but no saved run: write one with `prof.run.save(path)`.")
    schema = document.get("schema")
    if not isinstance(schema, int) or schema > SCHEMA:
        raise TorchprofError(
            f"{path} has schema {schema}; this torchprof reads up to {SCHEMA}. Read it with a newer torchprof."
        )
    try:
        return _run(document)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError) as error:
        raise TorchprofError(f"{path} is a damaged run file: {type(error).__name__} {error}.") from error


def _run(document: dict[str, Any]) -> Run:
    """The run of a file. Raises KeyError, TypeError, ValueError or OverflowError where the file contradicts itself."""
    if document["schema"] < 2:
        _upgrade(document)
    metas = tuple(_meta(_tuples(meta)) for meta in document["metas"])
    layers = tuple(Layer(**_tuples(layer)) for layer in document["layers"])
    frames = tuple(tuple(_frame(frame) for frame in chain) for chain in document["frames"])
    signatures = tuple(Signature(*_tuples({"": signature})[""]) for signature in document["signatures"])
    devices = tuple(map(_text, document["devices"]))
    columns = {name: array("q", document["rows"][name]) for name in Rows.COLUMNS}
    samples = {}
    for sample in document["samples"]:
        key = SampleKey(**{name: sample[name] for name in SampleKey._fields})
        spread = Spread(**_tuples({name: sample[name] for name in sample if name not in SampleKey._fields}))
        samples[key] = spread
        _demand(0 <= key.layer < len(layers) and key.phase in PHASES, f"sample {tuple(key)}")
        _demand(spread.count >= len(spread.sample) > 0, f"the count of sample {tuple(key)}")
    _demand(bool(metas), "no metas")
    known: set[tuple[str, ...]] = set()
    for layer in layers:
        _demand(isinstance(layer.path, tuple) and bool(layer.path), f"the path {layer.path!r}")
        _demand(all(isinstance(step, str) for step in layer.path) and layer.path not in known, f"the path {layer.path}")
        _demand(len(layer.path) == 1 or layer.path[:-1] in known, f"the layer above {layer.name}")
        known.add(layer.path)
    _demand(len({len(column) for column in columns.values()}) == 1, "columns that differ in length")
    ranks = {meta.rank for meta in metas}
    _demand(set(columns["rank"]) <= ranks, "a rank without meta")
    for name, low, high in (
        ("layer", NOT_SELECTED, len(layers)),
        ("phase", 0, len(PHASES)),
        ("frames", 0, len(frames)),
        ("signature", 0, len(signatures) + 1),
        ("device", 0, len(devices)),
        ("calls", 0, 2**63),
    ):
        _demand(all(low <= number < high for number in columns[name]), f"a number in column {name!r} leads nowhere")
    return Run(metas, layers, Rows(layers, frames, devices, columns, signatures), samples)


def _upgrade(document: dict[str, Any]) -> None:
    """Schema 1 had no signatures, MACs and FLOPs."""
    document["signatures"] = []
    rows = document["rows"]
    for name in ("signature", "macs", "flops", "uncounted"):
        rows[name] = [0] * len(rows["layer"])


def _meta(fields: dict[str, Any]) -> Meta:
    return Meta(**{**fields, "peaks": tuple(Peak(*peak) for peak in fields.get("peaks", ()))})


def _demand(holds: bool, what: str) -> None:
    if not holds:
        raise ValueError(what)


def _frame(value: Any) -> Frame:
    if not isinstance(value, list):
        raise TypeError(f"{value!r} where a frame belongs")
    return Frame(*map(_text, value))


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} where a name belongs")
    return value


def _tuples(document: dict[str, Any]) -> dict[str, Any]:
    """JSON knows only lists: give back the tuples they were."""

    def deep(value: Any) -> Any:
        return tuple(deep(item) for item in value) if isinstance(value, list) else value

    return {name: deep(value) for name, value in document.items()}
