"""Files of runs: their contents, and which are refused."""

from __future__ import annotations

import copy
import gzip
import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from build.examples import examples
from build.hand_made import row, run_of
from build.models import Mlp
from build.places import DATA
from build.random_runs import runs
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import torchprof
from torchprof import TorchprofError
from torchprof.run.file import json_of_run
from torchprof.run.meta import CompiledRegion, RunWarning
from torchprof.run.rows import Around
from torchprof.run.run import Run
from torchprof.run.words import FORWARD, OUTSIDE, Frame, FrameKind, Signature, SourceLine

SAVED = DATA / "run-schema-4.json"


def document(path: Path) -> dict[str, Any]:
    """A file as plain JSON."""
    return json.loads(path.read_text(encoding="utf-8"))


def test_the_reports_of_a_saved_run_have_not_changed() -> None:
    """The expected texts were copied when the run was recorded. One of its two layers is under torch.compile."""
    run = torchprof.load(SAVED)
    assert run.meta.regions == (CompiledRegion("0/0", "wrap_inline.<locals>.inner", "", 67),)
    assert "a             | 254.588ms      | 254.588ms | 2\n" in run.report("tree")
    assert "(region 0/0) | 1.399ms        | 14.512ms  | 2\n" in run.report("tree")
    assert "torch.compile compiled 1 time: 237.009ms." in run.report("compiled")


NEW_IN_LAYERS = ["input_number", "noted_calls", "repeated_calls", "longer_calls", "grad_inputs"]
NEW_IN_LAYERS += ["optimizer_steps", "used_gradients", "of_torch"]


def test_saving_a_loaded_run_gives_the_same_file(tmp_path: Path) -> None:
    run = torchprof.load(SAVED)
    run.save(tmp_path / "run.json")
    assert document(tmp_path / "run.json") == {
        **document(SAVED),
        "metas": [{**meta, "date": "", "commit": ""} for meta in document(SAVED)["metas"]],
        "layers": [{**layer, **dict.fromkeys(NEW_IN_LAYERS), "padding": []} for layer in document(SAVED)["layers"]],
        "pipelines": [],
        "passes": [],
        "trials": [],
    }  # version 2.7 wrote none
    assert torchprof.load(tmp_path / "run.json") == run


@pytest.mark.parametrize("schema", [1, 2])
def test_a_file_of_an_older_schema_is_read(schema: int) -> None:
    """Schema 1 has no compilations and no hints for graph breaks; both do not have the time in which nothing ran."""
    old = DATA / f"run-schema-{schema}.json"
    run = torchprof.load(old)
    assert run == torchprof.load(SAVED) == torchprof.load(DATA / "run-schema-3.json")
    assert sum(document(old)["rows"]["cpu_ns"]) == dict(run.meta.busy_ns)["cpu"] == 267254002
    assert sum(run.rows.columns["cpu_ns"]) == run.meta.wall_ns == 267763241
    outside = [row for row in run.rows if row.layer is None and not row.frames]
    assert [row.cost.cpu_ns for row in outside] == [267763241 - 267254002]


@pytest.mark.parametrize("in_row", [False, True])
def test_the_idle_time_of_an_older_file_is_that_of_each_rank(in_row: bool, tmp_path: Path) -> None:
    """Rank 0 was busy for 3 of 10 us, 1 us of it outside all layers; rank 1 for 4 of 10 us. Rank 2 has no CPU times."""
    rows = [(-1 if in_row else 0, 0, 1_000), (0, 0, 2_000), (0, 1, 4_000)]
    new = document(SAVED)
    columns = {name: [0] * len(rows) for name in new["rows"]}
    columns["layer"], columns["rank"], columns["cpu_ns"] = map(list, zip(*rows))
    metas = [{**new["metas"][0], "rank": rank, "wall_ns": 10_000, "warnings": []} for rank in range(3)]
    for meta, busy in zip(metas, ([["cpu", 3_000]], [["cpu", 4_000]], [])):
        meta["busy_ns"] = busy
    parts = {"samples": [], "memory": [], "device_times": [], "lockstep": [], "unfinished": [], "timeline": None}
    (tmp_path / "run.json").write_text(json.dumps({**new, **parts, "schema": 2, "metas": metas, "rows": columns}))
    outside = {row.rank: row.cost.cpu_ns for row in torchprof.load(tmp_path / "run.json").rows if row.layer is None}
    assert outside == {0: 7_000 + 1_000 * in_row, 1: 6_000}


@pytest.mark.parametrize("schema", [5, 999, 0, -1, None, "1", True, 1.0])
def test_a_file_of_another_schema_is_refused(schema: Any, tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    file.write_text(json.dumps({**document(SAVED), "schema": schema}), encoding="utf-8")
    with pytest.raises(TorchprofError, match=f"has schema {schema}; this torchprof reads up to 4"):
        torchprof.load(file)


def test_compiled_regions_are_saved_and_strip_removes_their_files(tmp_path: Path, reloaded: Any) -> None:
    region = CompiledRegion("0/1", "Net.forward", "/home/me/net.py", 12, 14, "Call to print")
    run = torchprof.load(SAVED)
    run = replace(run, metas=(replace(run.meta, regions=(region,)), *run.metas[1:]))
    assert reloaded(run) == run
    run.save(tmp_path / "stripped.json", strip=True)
    assert "net.py" not in (tmp_path / "stripped.json").read_text(encoding="utf-8")
    assert torchprof.load(tmp_path / "stripped.json").meta.regions == (region._replace(file=""),)


def test_a_signature_is_written_once(tmp_path: Path) -> None:
    """Many frames may refer to a signature by its number; 0 means none."""
    model = Mlp()
    with torchprof.Profile(model, record_shapes=True) as prof:
        model(torch.rand(3, 4))
        model(torch.rand(5, 4))
    prof.run.save(tmp_path / "run.json")
    written = document(tmp_path / "run.json")
    signatures = [json.dumps(one) for one in written["signatures"]]
    assert len(set(signatures)) == len(signatures)
    frames = [frame for chain in written["frames"] for frame in chain]
    assert {number for _, _, number in frames} >= set(range(1, len(signatures) + 1))
    shapes = {written["signatures"][number - 1][0][0][0] for _, name, number in frames if name == "aten::linear"}
    assert shapes == {3, 5}


def test_a_timeline_with_frees_of_unrecorded_allocations_is_saved(reloaded: Any) -> None:
    """Memory that was allocated in an earlier session is freed in this one. Its kind is unknown."""
    model = Mlp()
    with torchprof.Profile(model, profile_memory=True):
        kept = model(torch.rand(3, 4))
    with torchprof.Profile(model, profile_memory=True, with_timeline=True) as prof:
        del kept
    run = prof.run
    assert run.timeline
    assert -1 in run.timeline.columns["kind"]
    assert reloaded(run) == run


@pytest.mark.parametrize("name", ["run.json", "run.json.gz"])
def test_an_error_while_saving_keeps_the_old_file(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The old contents stay until the new ones are complete."""
    run = torchprof.load(SAVED)
    run.save(tmp_path / name)
    before = (tmp_path / name).read_bytes()

    def pieces(*_: Any) -> Any:
        yield "{"
        raise MemoryError

    monkeypatch.setattr("torchprof.run.file._pieces", pieces)
    for path in (tmp_path / name, tmp_path / f"new-{name}"):
        with pytest.raises(MemoryError):
            run.save(path)
    assert [one.name for one in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_bytes() == before


def test_saving_to_a_link_writes_its_target(tmp_path: Path) -> None:
    run = torchprof.load(SAVED)
    (tmp_path / "there.json").write_text("old")
    (tmp_path / "here.json").symlink_to(tmp_path / "there.json")
    run.save(tmp_path / "here.json")
    assert (tmp_path / "here.json").is_symlink()
    assert torchprof.load(tmp_path / "there.json") == run


@examples(60)
@given(runs(), st.sampled_from(["run.json", "run.json.gz"]))
def test_load_after_save_gives_the_same_run(run: Run, name: str) -> None:
    """``load(save(run)) == run``, plain and gzipped. Saving does not change the run."""
    before = copy.deepcopy(run)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        run.save(path)
        assert (path.read_bytes()[:2] == b"\x1f\x8b") == name.endswith(".gz")
        loaded = torchprof.load(path)
        assert loaded == run == before
        assert list(loaded.rows) == list(run.rows)
        loaded.save(path)
        assert torchprof.load(path) == run, "and once more"


@examples(20)
@given(runs())
def test_strip_removes_only_names_of_machines_and_scripts(run: Run) -> None:
    """With ``strip=True``, everything else stays."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.json"
        run.save(path, strip=True)
        assert "host" not in path.read_text(encoding="utf-8")
        assert "x.py" not in path.read_text(encoding="utf-8")
        loaded = torchprof.load(path)
    assert loaded != run
    assert replace(loaded, metas=run.metas) == replace(run, rows=run.rows.without_source())
    assert replace(run.meta, machine="", script="", warnings=loaded.meta.warnings) == loaded.meta


@pytest.mark.parametrize("name", ["run.json", "run.json.gz", "run.parquet", "job/"])
def test_a_stripped_run_names_no_file_and_no_function(name: str, tmp_path: Path) -> None:
    """In sampled lines, in source lines of operators, also around a layer, in warnings; the sums stay."""
    if name in ("run.parquet", "job/"):
        pytest.importorskip("pyarrow")
    calls = [Signature(((2, 3),), ("float",), (), (f"secret.py({line}): secret_function",)) for line in (3, 9)]
    ops = [Frame(FrameKind.OP, "aten::mm", signature) for signature in calls]
    sampled = Frame(FrameKind.PYTHON, SourceLine("secret_folder/secret.py", 7, "secret_function", "secret_call"))
    around = Around(0, FORWARD, (ops[0],))
    rows = [row(1, op, calls=2, cpu_ns=4_000, within=(around,)) for op in ops]
    run = run_of([row(0, cpu_ns=100), *rows, row(OUTSIDE, sampled, calls=3), row(OUTSIDE, cpu_ns=50)])
    warned = RunWarning.of("trace_left_out", file="secret.json", why="secret.json is cut")
    run = replace(run, metas=(replace(run.meta, machine="secret", script="secret.py", warnings=(warned,)),))
    run.save(f"{tmp_path}/{name}", strip=True)
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    contents = b"".join(
        gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes() for file in files
    )
    assert b"secret" not in contents
    loaded = torchprof.load(tmp_path / name)
    assert "secret" not in json_of_run(loaded)
    for cost in ("cpu_ns", "flops"):
        assert loaded.rows.total(cost) == run.rows.total(cost)
    assert loaded.rows.total("calls") == run.rows.total("calls") - 3 and len(loaded.rows) == len(run.rows) - 2


@pytest.mark.parametrize("name", ["run.json", "run.json.gz"])
def test_load_after_save_gives_the_same_training_run(tmp_path: Path, name: str) -> None:
    """The same for a run of training steps, with everything that can be recorded."""
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    optimizer = torch.optim.Adam(model.parameters())
    with torchprof.Profile(
        model,
        profile_memory=True,
        with_timeline=True,
        with_flops=True,
        record_shapes=True,
        with_stack=True,
        schedule=torch.profiler.schedule(wait=0, warmup=1, active=2, repeat=2),
    ) as prof:
        for _ in range(6):
            with torch.profiler.record_function("pass"):
                model(torch.rand(5, 3)).sum().backward()
            optimizer.step()
            prof.step()
    run = prof.run
    assert (run.meta.cycles, run.meta.steps) == (2, 4)
    assert run.timeline
    assert run.memory[0].held
    assert any(row.within for row in run.rows)
    assert any(row.signature and row.signature.stack for row in run.rows)
    run.save(tmp_path / name)
    assert torchprof.load(tmp_path / name) == run
