"""Files of runs: what is in them, and those that earlier versions wrote."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from build.models import Mlp
from build.places import DATA
from build.warnings import sentences

import torchprof
from torchprof import TorchprofError
from torchprof.run.cost import FIELDS
from torchprof.run.lockstep import WORK, Lockstep, LockstepKey
from torchprof.run.memory import Memory
from torchprof.run.meta import CompiledRegion
from torchprof.run.run import Run
from torchprof.run.samples import SampleKey
from torchprof.run.timeline import Lane
from torchprof.run.words import BACKWARD, FORWARD, Signature


def document(path: Path) -> dict[str, Any]:
    """A file as JSON, read by nobody of ours."""
    return json.loads(path.read_text(encoding="utf-8"))


def totals(run: Run, phase: str) -> dict[str, tuple[int, ...]]:
    """Of each layer: calls, self and total time, net memory, MACs and FLOPs."""
    return {
        node.layer.name: (
            node.calls,
            node.self.cpu_ns,
            node.total.cpu_ns,
            node.total.cpu_allocated - node.total.cpu_freed,
            node.total.macs,
            node.total.flops,
        )
        for node in run.tree(phase).walk()
    }


@pytest.mark.parametrize("schema", [1, 2])
def test_each_row_of_an_earlier_schema_is_read(schema: int) -> None:
    """Every row as the file has it: there its signature stood beside its frames, and not in the last of them."""
    file = DATA / f"run-schema-{schema}.json"
    written = document(file)
    assert written["schema"] == schema
    rows, run = written["rows"], torchprof.load(file)
    assert len(run.rows) == len(rows["layer"])
    assert [layer.path for layer in run.layers] == [tuple(layer["path"]) for layer in written["layers"]]
    for at, row in enumerate(run.rows):
        layer = written["layers"][rows["layer"][at]] if rows["layer"][at] >= 0 else None
        assert (list(row.layer.path) if row.layer else None) == (layer["path"] if layer else None)
        assert [[frame.kind, frame.name] for frame in row.frames] == written["frames"][rows["frames"][at]]
        assert all(frame.signature is None for frame in row.frames[:-1])
        number = rows.get("signature", [0] * (at + 1))[at]
        expected = written["signatures"][number - 1] if number else None
        assert (json.loads(json.dumps(row.signature[:3])) if row.signature else None) == expected
        assert (row.within, row.rank, row.calls) == ((), 0, rows["calls"][at])
        assert [getattr(row.cost, name) for name in FIELDS] == [rows.get(name, {at: 0})[at] for name in FIELDS]
    for sample, (key, spread) in zip(written["samples"], run.samples.items(), strict=True):
        assert {name: sample[name] for name in key._fields} == key._asdict()
        assert (spread.count, spread.sum, spread.min, spread.max, spread.first, list(spread.sample)) == tuple(
            sample[name] for name in ("count", "sum", "min", "max", "first", "sample")
        )


def test_what_torchprof_2_0_printed_of_its_run() -> None:
    """Schema 1 has no counts, and no peak: both are unknown, not 0."""
    run = torchprof.load(DATA / "run-schema-1.json")
    assert all(row.signature is None and not row.cost.uncounted for row in run.rows)
    assert run.memory == ()
    assert run.timeline is None
    summary = run.report("summary")
    assert "FLOPs                    –" in summary
    assert "Peak memory above start  –" in summary
    assert "FLOPs" not in run.report("tree")


def test_what_torchprof_2_1_printed_of_its_run() -> None:
    """The figures are copied from the reports that it made of this file: three training steps of a model with a label.

    Of labels it knew what ran in them and in no layer: the total is that, and the run says so.
    """
    run = torchprof.load(DATA / "run-schema-2.json")
    assert totals(run, FORWARD) == {
        "Net": (3, 256_411, 562_185, 192, 192, 480),
        "Net.fc": (3, 252_725, 252_725, 192, 192, 432),
        "Net.act": (3, 53_049, 53_049, 192, 0, 48),
    }
    assert totals(run, BACKWARD) == {
        "Net": (0, 0, 225_797, -192, 192, 600),
        "Net.fc": (0, 189_773, 189_773, -192, 192, 552),
        "Net.act": (0, 36_024, 36_024, 0, 0, 48),
    }
    assert run.no_layer(FORWARD).cpu_ns == 80_912
    ops = {op.name: (op.calls, op.self.cpu_ns, op.total.cpu_ns, op.total.flops) for op in run.ops()[1]}
    assert ops["aten::linear"] == (3, 23_694, 204_253, 432)
    assert ops["(between ops)"] == (0, 48_472, 48_472, 0)
    (label,) = [op for op in run.ops()[0] if op.kind == "label"]
    assert (label.name, label.calls, label.total.cpu_ns) == ("mine", 3, 178_325)
    assert "the totals of labels leave out the layers" in sentences(run)[-1]
    linear = next(row for row in run.rows if row.frames and row.frames[-1].name == "aten::linear")
    assert linear.signature == Signature(((2, 4), (8, 4), (8,)), ("float", "float", "float"))
    spread = run.samples[SampleKey(0, FORWARD, 0, "cpu", "cpu_ns")]
    assert (spread.count, spread.first, spread.median, spread.min) == (3, 361_306, 119_398, 81_481)
    assert run.memory == (Memory("cpu", 0, 232),)
    assert (run.meta.wall_ns, run.meta.cycles, run.meta.steps) == (1_347_802, 1, 0)
    summary = run.report("summary")
    for line in ("FLOPs                    160", "Activations              128 B", "start  232 B on cpu"):
        assert line in summary


def test_what_torchprof_2_2_printed_of_its_run() -> None:
    """The figures are copied from the report that it made of this file: three training steps, with a label."""
    run = torchprof.load(DATA / "run-schema-3.json")
    assert dict(run.meta.switches) == {}
    assert {layer.settings for layer in run.layers} == {""}
    assert (run.meta.steps, run.timeline is not None) == (3, True)
    assert totals(run, FORWARD)["Net"] == (3, 250_402, 3_059_745, 192, 192, 480)
    assert totals(run, BACKWARD)["Net"] == (0, 0, 282_362, 192, 192, 480)


def test_what_torchprof_2_3_printed_of_its_run() -> None:
    """The figures are copied from the report that it made of this file: a step on a fake GPU, on two streams."""
    run = torchprof.load(DATA / "run-schema-4.json")
    assert run.device_times == ()
    assert run.meta.busy_ns == (("cpu", 1_910), ("cuda:0", 5_800))
    assert (run.tree(FORWARD).total.device_ns, run.tree(BACKWARD).total.device_ns) == (2_000, 6_104)
    assert "cuda:0 was busy for 5.800us of 6.500us, idle for 0.700us (10.8%)." in run.report("kernels")
    assert run.timeline is not None
    assert run.timeline.spans is not None
    assert run.timeline.spans.lanes == (Lane("cpu", 1), Lane("cpu", 2), Lane("cuda:0", 1), Lane("cuda:0", 2))
    assert '"cuda:0, at the same time (2)"' in run.report("chrome-trace")


def test_what_torchprof_2_4_printed_of_its_run() -> None:
    """The figures are copied from the reports that it made of this file: two traces, of ranks 1 and 3."""
    run = torchprof.load(DATA / "run-schema-5.json")
    assert [(meta.rank, meta.world_size, meta.mesh) for meta in run.metas] == [(1, 1, ()), (3, 1, ())]
    assert run.missing_ranks == ()
    assert (run.tree().calls, run.tree().total.cpu_ns, run.tree().total.device_ns) == (2, 400_000, 400_000)
    assert [run.of_rank(rank).tree().total.cpu_ns for rank in (1, 3)] == [100_000, 300_000]
    assert "Communication: 180.000us, 100.000us (55.6%) of it at the same time as computing" in run.report("device")
    assert run.timeline is not None
    assert run.timeline.rank == 1
    assert (run.of_rank(1).timeline, run.of_rank(3).timeline) == (run.timeline, None)
    assert {row.shared_by for row in run.rows} == {()}
    assert (run.lockstep, {layer.ranks for layer in run.layers}) == ({}, {()})


def test_what_torchprof_2_5_printed_of_its_run() -> None:
    """The figures are copied from the report that it made of this file: two ranks, in lockstep for two steps."""
    run = torchprof.load(DATA / "run-schema-6.json")
    assert [(meta.rank, meta.regions) for meta in run.metas] == [(0, ()), (1, ())]
    assert {layer.name: layer.ranks for layer in run.layers if layer.ranks} == {"Net.b.1": (1,)}
    assert run.report("ranks").startswith("2 ranks. No rank stands out: own work takes 0.160us to 0.250us a step.")
    own = run.lockstep[LockstepKey(1, FORWARD, "cpu", WORK)]
    assert own == Lockstep((0, 1), (2, 2), (220, 390), (0, 0), (300, 120), (1, 0))


def test_what_torchprof_2_6_printed_of_its_run() -> None:
    """The figures are copied from the reports that it made of this file: one of two layers is under torch.compile."""
    run = torchprof.load(DATA / "run-schema-7.json")
    assert run.meta.regions == (CompiledRegion("0/0", "wrap_inline.<locals>.inner", "", 67),)
    assert "a             | 254.588ms      | 254.588ms | 2\n" in run.report("tree")
    assert "(region 0/0) | 1.399ms        | 14.512ms  | 2\n" in run.report("tree")
    assert "torch.compile was at work 1 time: 237.009ms." in run.report("compiled")


def test_a_collective_of_an_earlier_schema_has_the_name_of_now(tmp_path: Path) -> None:
    """Where two would have one name they keep theirs, so that none is lost; nobody had measured how long they took."""
    document = json.loads((DATA / "run-schema-6.json").read_text())
    work = document["lockstep"][0]
    for phase, what in (("forward", "_allgather_base"), ("backward", "allreduce"), ("backward", "allreduce_coalesced")):
        document["lockstep"].append({**work, "phase": phase, "device": "device", "what": what})
    (tmp_path / "old.json").write_text(json.dumps(document))
    run = torchprof.load(tmp_path / "old.json")
    assert len(run.lockstep) == len(document["lockstep"])
    found = {(key.phase, key.what) for key in run.lockstep if key.device == "device"}
    assert found == {("forward", "all_gather"), ("backward", "allreduce"), ("backward", "allreduce_coalesced")}
    assert not any(run.rows.columns["collective_ns"])


@pytest.mark.parametrize("schema", [1, 2, 3, 4, 5, 6, 7])
def test_a_run_of_an_earlier_schema_can_be_saved_again(schema: int, tmp_path: Path) -> None:
    """As a file of this version, that says the same."""
    run = torchprof.load(DATA / f"run-schema-{schema}.json")
    run.save(tmp_path / "run.json")
    assert document(tmp_path / "run.json")["schema"] == 8
    assert torchprof.load(tmp_path / "run.json") == run


@pytest.mark.parametrize(
    ("where", "value"),
    [
        (("rows", "signature", 3), 99),
        (("rows", "signature", 3), -1),
        (("rows", "signature", 0), 1),  # the row of a layer's own time: no op was called on anything
        (("rows", "frames", 3), -1),
        (("rows", "frames", 3), 99),
        (("rows", "signature"), [0]),
        (("metas", 0, "peak_bytes"), [["cpu"]]),
        (("frames", 1), [["op"]]),
    ],
)
def test_damaged_files_of_an_earlier_schema(where: tuple[Any, ...], value: Any, tmp_path: Path) -> None:
    damaged = document(DATA / "run-schema-2.json")
    assert damaged["frames"][damaged["rows"]["frames"][0]] == []
    here = damaged
    for step in where[:-1]:
        here = here[step]
    here[where[-1]] = value
    file = tmp_path / "run.json"
    file.write_text(json.dumps(damaged), encoding="utf-8")
    with pytest.raises(TorchprofError, match="damaged"):
        torchprof.load(file)


def test_compiled_regions_are_kept_and_stripped_of_their_files(tmp_path: Path) -> None:
    region = CompiledRegion("0/1", "Net.forward", "/home/me/net.py", 12, 14, "Call to print")
    run = torchprof.load(DATA / "run-schema-6.json")
    run = replace(run, metas=(replace(run.meta, regions=(region,)), *run.metas[1:]))
    run.save(tmp_path / "run.json")
    assert torchprof.load(tmp_path / "run.json") == run
    run.save(tmp_path / "stripped.json", strip=True)
    assert "net.py" not in (tmp_path / "stripped.json").read_text(encoding="utf-8")
    assert torchprof.load(tmp_path / "stripped.json").meta.regions == (region._replace(file=""),)


def test_a_signature_is_written_once(tmp_path: Path) -> None:
    """Many frames may refer to one: the file has each but once, and the frames its number, 0 for none."""
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


def test_a_timeline_with_frees_of_what_nobody_saw_allocated(tmp_path: Path) -> None:
    """What an earlier session saw allocated is freed in this one: of unknown kind, and saved and read as that."""
    model = Mlp()
    with torchprof.Profile(model, profile_memory=True):
        kept = model(torch.rand(3, 4))
    with torchprof.Profile(model, profile_memory=True, with_timeline=True) as prof:
        del kept
    run = prof.run
    assert run.timeline
    assert -1 in run.timeline.columns["kind"]
    run.save(tmp_path / "run.json")
    assert torchprof.load(tmp_path / "run.json") == run


@pytest.mark.parametrize("name", ["run.json", "run.json.gz"])
def test_a_file_is_written_whole_or_not_at_all(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was there before stays until the new one is complete."""
    run = torchprof.load(DATA / "run-schema-5.json")
    run.save(tmp_path / name)
    before = (tmp_path / name).read_bytes()

    def pieces(*_: Any) -> Any:
        yield "{"
        raise MemoryError

    monkeypatch.setattr("torchprof.run.file_write._pieces", pieces)
    for path in (tmp_path / name, tmp_path / f"new-{name}"):
        with pytest.raises(MemoryError):
            run.save(path)
    assert [one.name for one in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_bytes() == before


def test_a_link_is_written_through(tmp_path: Path) -> None:
    run = torchprof.load(DATA / "run-schema-5.json")
    (tmp_path / "there.json").write_text("old")
    (tmp_path / "here.json").symlink_to(tmp_path / "there.json")
    run.save(tmp_path / "here.json")
    assert (tmp_path / "here.json").is_symlink()
    assert torchprof.load(tmp_path / "there.json") == run
