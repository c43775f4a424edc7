"""Runs as Parquet files: every number, what is unknown, and which files are refused."""

from __future__ import annotations

import json
import sys
import tempfile
from base64 import b64decode, b64encode
from dataclasses import replace
from gzip import compress, decompress
from pathlib import Path
from typing import Any

import pytest
import torch
from build.all_kinds import KINDS
from build.examples import examples
from build.hand_made import kernel, label, python_line, row, run_of
from build.models import Mlp
from build.nonempty import at_least_one
from build.places import DATA
from build.random_runs import runs
from hypothesis import given

import torchprof
from torchprof import TorchprofError
from torchprof.run.file import stripped
from torchprof.run.measures import FIELDS
from torchprof.run.run import Run
from torchprof.run.words import NOT_SELECTED, OUTSIDE, FrameKind

pq = pytest.importorskip("pyarrow.parquet")
pa = pytest.importorskip("pyarrow")

KEY = b"torchprof-run"


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """The file of a run of training steps."""
    torchprof.load(DATA / "run-schema-3.json").save(tmp_path / "run.parquet")
    return tmp_path / "run.parquet"


def lines_of(path: Path) -> list[dict[str, Any]]:
    return pq.read_table(path).to_pylist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", KINDS)
def test_load_after_save_gives_the_same_run_of_each_kind(kind: str, tmp_path: Path) -> None:
    run = KINDS[kind]()
    run.save(tmp_path / "run.parquet")
    assert torchprof.load(tmp_path / "run.parquet") == run
    assert [*torchprof.load(tmp_path / "run.parquet").rows] == [*run.rows]


@examples(60)
@given(runs())
def test_load_after_save_gives_the_same_random_run(run: Run) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.parquet"
        run.save(path)
        assert torchprof.load(path) == run
        run.save(path, strip=True)
        assert torchprof.load(path) == stripped(run) != run


def test_load_after_save_gives_the_same_recorded_run(tmp_path: Path) -> None:
    model = Mlp()
    with torchprof.Profile(model, profile_memory=True, with_timeline=True, with_flops=True, with_stack=True) as prof:
        for _ in range(2):
            model(torch.rand(3, 4)).sum().backward()
            prof.step()
    prof.run.save(tmp_path / "run.parquet")
    loaded = torchprof.load(tmp_path / "run.parquet")
    assert loaded == prof.run and loaded.timeline is not None
    assert loaded.report("tree") == prof.run.report("tree")


@pytest.mark.parametrize("kind", KINDS)
def test_a_line_has_the_figures_of_its_row(kind: str, tmp_path: Path) -> None:
    """Each value against ``Run.rows``, which makes its rows of other tables."""
    run = KINDS[kind]()
    run.save(tmp_path / "run.parquet")
    lines = lines_of(tmp_path / "run.parquet")
    assert len(lines) == len(run.rows)
    measured = {meta.rank: meta.measured for meta in run.metas}
    for number, (line, of_run) in enumerate(zip(lines, run.rows)):
        layer = run.layers.name_of(run.rows.columns["layer"][number])
        assert line["layer"] == layer
        assert line["kind"] == (of_run.layer.kind or None if of_run.layer else None)
        figures = line["rank"], line["phase"], line["device"], line["calls"]
        assert figures == (of_run.rank, of_run.phase, of_run.device, of_run.calls)
        assert line["frames"] == [frame.name for frame in of_run.frames]
        last = (of_run.frames[-1].name, of_run.frames[-1].kind) if of_run.frames else ("(between ops)", "op")
        assert (line["operator"], line["operator_kind"]) == last
        for name in FIELDS:
            value = getattr(of_run.cost, name)
            is_known = ("cpu_ns" if name == "collective_ns" else name) in measured[of_run.rank]
            has_cost = not of_run.frames or of_run.frames[-1].kind != FrameKind.PYTHON
            assert line[name] == (value if value or (is_known and has_cost) else None)


def test_a_cost_is_null_on_the_ranks_that_did_not_measure_it(tmp_path: Path) -> None:
    """Rank 0 counted no FLOPs, rank 1 did, and one of its rows has none."""
    rows = {0: [row(0, cpu_ns=5), row(1, cpu_ns=0)], 1: [row(0, cpu_ns=5, flops=7), row(1, cpu_ns=0, flops=0)]}
    measured = {0: ("cpu_ns",), 1: ("cpu_ns", "macs", "flops", "uncounted")}
    ranks = []
    for rank in (0, 1):
        run = run_of([(*line[:8], rank) for line in rows[rank]], rank=rank, measured=measured[rank], world_size=2)
        ranks.append(run)
    torchprof.merge(ranks).save(tmp_path / "run.parquet")
    lines = lines_of(tmp_path / "run.parquet")
    assert [(line["rank"], line["cpu_ns"], line["flops"]) for line in lines] == [
        (0, 5, None),
        (0, 0, None),
        (1, 5, 7),
        (1, 0, 0),
    ]
    assert all(line["device_ns"] is None for line in lines)
    assert torchprof.load(tmp_path / "run.parquet") == torchprof.merge(ranks)


def test_rows_that_are_special_in_tables_are_so_in_columns(tmp_path: Path) -> None:
    """A sampled line of Python has calls and no cost; a kernel that was launched before the recording has no layer."""
    line = python_line("net.py(3): forward")
    before = label("(launched before the recording)")
    run = run_of([row(1, line, calls=4), row(OUTSIDE, before, kernel("gemm"), cpu_ns=9), row(NOT_SELECTED, cpu_ns=2)])
    run.save(tmp_path / "run.parquet")
    names = ("layer", "phase", "operator", "operator_kind", "calls", "cpu_ns")
    assert [tuple(each[name] for name in names) for each in lines_of(tmp_path / "run.parquet")] == [
        ("Net.a", "forward", "net.py(3): forward", "python", 4, None),
        ("(launched before the recording)", "other", "gemm", "kernel", 1, 9),
        ("(not selected)", "forward", "(between ops)", "op", 1, 2),
    ]
    assert torchprof.load(tmp_path / "run.parquet") == run


def test_names_that_are_not_unicode_are_escaped_in_columns_alone(tmp_path: Path) -> None:
    """Python makes a lone surrogate of an undecodable byte in the name of a file."""
    run = run_of([row(0, label("naïve \udcff.py")), row(0)])
    run.save(tmp_path / "run.parquet")
    assert [line["frames"] for line in lines_of(tmp_path / "run.parquet")] == [["naïve \\udcff.py"], []]
    assert torchprof.load(tmp_path / "run.parquet") == run


def test_the_metadata_is_in_the_file_once(saved: Path) -> None:
    assert [*pq.read_metadata(saved).metadata] == [KEY]


def test_the_metadata_may_be_larger_than_pyarrow_reads_by_default(saved: Path) -> None:
    """That is 100 MB, less than the runs of some thousand ranks have."""
    run, table, metadata = torchprof.load(saved), pq.read_table(saved), pq.read_metadata(saved).metadata
    with pq.ParquetWriter(saved, table.schema, store_schema=False) as writer:
        writer.write_table(table)
        writer.add_key_value_metadata({b"more": b"x" * 100_000_001, **metadata})
    assert torchprof.load(saved) == run


def test_show_and_compare_read_such_a_file_and_export_writes_one(saved: Path, tmp_path: Path, cli: Any) -> None:

    run = torchprof.load(saved)
    said = cli("show", str(saved), "--report", "tree", "-o", str(tmp_path / "again.parquet"))
    assert said.out == run.report("tree") + "\n"
    assert torchprof.load(tmp_path / "again.parquet") == run
    assert str(torchprof.compare(saved, DATA / "run-schema-3.json")) == str(torchprof.compare(run, run))
    with pytest.raises(TorchprofError, match="it has no option 'depth'"):
        run.export(tmp_path / "deep.parquet", depth=1)


def test_an_error_while_saving_keeps_the_old_file(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = saved.read_bytes()

    def written(*_: Any) -> None:
        raise MemoryError

    monkeypatch.setattr("torchprof.run.file.write_table", written)
    with pytest.raises(MemoryError):
        KINDS["eager"]().save(saved)
    assert [file.name for file in saved.parent.iterdir()] == [saved.name]
    assert saved.read_bytes() == before


# Files that are refused


def with_metadata(saved: Path, **changes: Any) -> None:
    """Write the file again, with other values of the run file in its metadata."""
    document = json.loads(decompress(b64decode(pq.read_metadata(saved).metadata[KEY])))
    write_again(saved, b64encode(compress(json.dumps({**document, **changes}).encode())))


def write_again(saved: Path, metadata: bytes) -> None:
    table = pq.read_table(saved)
    with pq.ParquetWriter(saved, table.schema, store_schema=False) as writer:
        writer.write_table(table)
        writer.add_key_value_metadata({KEY: metadata})


def test_a_foreign_parquet_file_is_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": [1, 2]}), tmp_path / "foreign.parquet")
    with pytest.raises(TorchprofError, match=r"foreign.parquet is a Parquet file, but not a saved run: write one with"):
        torchprof.load(tmp_path / "foreign.parquet")


def test_a_damaged_file_is_refused(saved: Path) -> None:
    whole = saved.read_bytes()
    for data in at_least_one((whole[:-9], whole[:100], b"PAR1", whole[:4] + b"\0" * 2000 + whole[2004:])):
        saved.write_bytes(data)
        with pytest.raises(TorchprofError, match=r"run.parquet is a damaged Parquet file: \w+"):
            torchprof.load(saved)


@pytest.mark.parametrize("metadata", [b"", b"x", b64encode(b"no gzip"), b64encode(compress(b"[1]", mtime=0))])
def test_damaged_metadata_is_refused(saved: Path, metadata: bytes) -> None:
    write_again(saved, metadata)
    with pytest.raises(TorchprofError, match=r"run.parquet is (a damaged|not a saved run|JSON, but not a saved run)"):
        torchprof.load(saved)


def test_metadata_that_contradicts_the_columns_is_refused(saved: Path) -> None:
    keys = json.loads(decompress(b64decode(pq.read_metadata(saved).metadata[KEY])))["rows"]
    for rows in at_least_one(({name: numbers[1:] for name, numbers in keys.items()}, {}, [], 3)):
        with_metadata(saved, rows=rows)
        with pytest.raises(TorchprofError, match=r"run.parquet is a damaged"):
            torchprof.load(saved)


def test_a_file_of_a_newer_schema_is_refused(saved: Path) -> None:
    with_metadata(saved, schema=5)
    with pytest.raises(TorchprofError, match="has schema 5; this torchprof reads up to 4"):
        torchprof.load(saved)


def test_a_file_without_a_column_of_costs_is_refused(saved: Path) -> None:
    metadata = pq.read_metadata(saved).metadata[KEY]
    table = pq.read_table(saved).drop_columns(["flops"])
    with pq.ParquetWriter(saved, table.schema, store_schema=False) as writer:
        writer.write_table(table)
        writer.add_key_value_metadata({KEY: metadata})
    with pytest.raises(TorchprofError, match=r"damaged Parquet file: KeyError 'flops'"):
        torchprof.load(saved)


def test_without_pyarrow_the_error_says_how_to_install_it(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = KINDS["eager"]()
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    for use in at_least_one((lambda: torchprof.load(saved), lambda: run.save(saved.parent / "new.parquet"))):
        with pytest.raises(TorchprofError, match=r'pip install pyarrow, or pip install "torchprof\[job\]"'):
            use()
    assert [file.name for file in saved.parent.iterdir()] == [saved.name]
    run.save(saved.parent / "run.json")  # which does not need it
    assert torchprof.load(saved.parent / "run.json") == replace(run)
