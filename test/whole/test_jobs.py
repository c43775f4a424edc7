"""Models that several ranks train together, in real jobs on this machine.

The tests check the owner of each collective, the work of each rank, the straggler, and that the trace of the same
session gives the same figures.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
from build.aligned import share_found, without_labels
from build.distributed_models import BATCH, CLASSES, DELAY_S, INNER, STEPS, WIDTH, Experts, Net
from build.libraries import RELEASE
from build.places import ROOT
from build.warm import warm_job
from build.warnings import sentences
from torch import distributed as dist

import torchprof
from torchprof import Run
from torchprof.run.collectives import collective_of
from torchprof.run.lockstep import WORK, LockstepKey
from torchprof.run.rows import Row

if not dist.is_available():
    pytest.skip("this torch was built without torch.distributed", allow_module_level=True)

pytestmark = pytest.mark.jobs

SCRIPT = ROOT / "test" / "build" / "distributed_models.py"


@dataclass
class Finished:
    """A job that has ended without errors: the files that its ranks wrote to a folder."""

    folder: Path
    ranks: int

    @cached_property
    def runs(self) -> list[Run]:
        return [torchprof.load(self.folder / f"rank{rank}.json") for rank in range(self.ranks)]

    @cached_property
    def run(self) -> Run:
        return torchprof.merge(self.runs)

    def trace(self, rank: int) -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = json.loads((self.folder / f"trace{rank}.json").read_text())["traceEvents"]
        return events

    def said_by_torch(self, rank: int) -> dict[str, Any]:
        said: dict[str, Any] = json.loads((self.folder / f"torch{rank}.json").read_text())
        return said


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Finished]:
    """A job with these arguments; it runs once for all tests that need it."""
    known: dict[tuple[str, int], Finished] = {}

    def finished(how: str, ranks: int, *options: str) -> Finished:
        if how in ("fsdp", "both") and RELEASE < (2, 7):
            pytest.skip("FSDP2 of this torch does not run on a CPU")
        if (how, ranks) not in known:
            folder = tmp_path_factory.mktemp(f"{how}-on-{ranks}")
            ended = warm_job(folder, ranks, str(SCRIPT), how, str(folder), *options)
            assert ended.code == 0, ended
            known[how, ranks] = Finished(folder, ranks)
        return known[how, ranks]

    return finished


@pytest.fixture(scope="module")
def ddp(job: Callable[..., Finished]) -> Finished:
    """Rank 1 sleeps for 150 ms in each call of the layer ``layers.1.2``."""
    return job("slow", 4, "record_shapes", "with_flops", "profile_memory")


@pytest.fixture(scope="module")
def fsdp(job: Callable[..., Finished]) -> Finished:
    return job("fsdp", 2, "with_flops", "profile_memory")


@pytest.fixture(scope="module")
def tp(job: Callable[..., Finished]) -> Finished:
    return job("tp", 2, "with_flops")


@pytest.fixture(scope="module")
def both(job: Callable[..., Finished]) -> Finished:
    return job("both", 4, "with_flops")


def exchanges(run: Run) -> list[Row]:
    return [row for row in run.rows if row.frames and row.frames[-1].kind == "collective"]


def by_layer(run: Run, phase: str) -> Counter[tuple[str, str]]:
    """How often each layer called each collective, in one phase."""
    found: Counter[tuple[str, str]] = Counter()
    for row in exchanges(run):
        if row.phase == phase:
            found[row.layer.name if row.layer else "(outside)", row.frames[-1].name] += row.calls
    return found


def total_macs(run: Run, name: str, phase: str = "forward") -> int:
    node = next(node for node in run.tree(phase).walk() if node.layer.name == name)
    return node.total.macs


NAMES = {
    "Net",
    "Net.embed",
    "Net.layers",
    "Net.head",
    *(f"Net.layers.{block}{step}" for block in range(3) for step in ("", ".0", ".1", ".2")),
}
EMBED, BLOCK, HEAD = BATCH * WIDTH * WIDTH, 2 * BATCH * WIDTH * INNER, BATCH * WIDTH * CLASSES
"""Multiply-accumulates of a call, by hand."""
PARAMS = WIDTH * WIDTH + WIDTH + 3 * (2 * WIDTH * INNER + INNER + WIDTH) + WIDTH * CLASSES + CLASSES


# All kinds of parallelism


@pytest.mark.parametrize("how", ["ddp", "fsdp", "tp", "both"])
def test_users_see_their_own_modules(how: str, request: pytest.FixtureRequest) -> None:
    for run in request.getfixturevalue(how).runs:
        assert {layer.name for layer in run.layers} == NAMES
        kinds = {layer.name: layer.kind for layer in run.layers}
        assert (kinds["Net"], kinds["Net.layers.0"], kinds["Net.layers.0.0"]) == ("Net", "Block", "Linear")
        assert sum(layer.params or 0 for layer in run.layers) == PARAMS  # of the whole model, sharded or not
        assert {layer.name: layer.input_shapes for layer in run.layers}["Net.layers.1"] == ((BATCH, WIDTH),)
        of_this_machine = ("start-up", "labels", "machine was busy")
        assert all(any(part in text for part in of_this_machine) for text in sentences(run))


@pytest.mark.parametrize("how", ["ddp", "fsdp", "tp", "both"])
def test_the_time_of_each_collective_equals_that_in_the_trace(how: str, request: pytest.FixtureRequest) -> None:
    """The reference is a sum over the trace of the same session."""
    done: Finished = request.getfixturevalue(how)
    for rank, run in enumerate(done.runs):
        took: Counter[str] = Counter()
        calls: Counter[str] = Counter()
        for event in done.trace(rank):
            if event.get("ph") == "X" and event["name"].startswith("gloo:"):
                name = event["name"].removeprefix("gloo:")
                took[name] += round(event["dur"] * 1000)
                calls[name] += 1
        assert calls
        of_rank = [(key, lockstep) for key, lockstep in run.lockstep.items() if key.is_collective]
        assert calls == sum((Counter({key.what: lockstep.counts[0]}) for key, lockstep in of_rank), Counter())
        assert took == sum((Counter({key.what: lockstep.ns[0]}) for key, lockstep in of_rank), Counter())
        assert all(key.layer >= 0 for key, _ in of_rank)  # each has a caller


@pytest.mark.parametrize("how", ["ddp", "fsdp", "tp", "both"])
def test_a_run_from_the_trace_equals_the_recorded_run(how: str, request: pytest.FixtureRequest) -> None:
    """A trace does not have the class of a model inside DDP: the root has the name of the wrapper there."""
    done: Finished = request.getfixturevalue(how)

    def plain(run: Run) -> dict[Any, Any]:
        def path(layer: int) -> tuple[str, ...] | None:
            return run.layers[layer].path[1:] if layer >= 0 else None

        return {
            key._replace(layer=path(key.layer)): lockstep  # type: ignore[arg-type]
            for key, lockstep in run.lockstep.items()
        }

    for rank, run in enumerate(done.runs):
        read = torchprof.from_trace(done.folder / f"trace{rank}.json")
        assert (read.meta.rank, read.meta.world_size) == (rank, done.ranks)
        assert plain(read) == plain(run)
        assert [(row.frames[-1], row.phase, row.calls, len(row.shared_by)) for row in exchanges(read)] == [
            (row.frames[-1]._replace(signature=read_row.frames[-1].signature), row.phase, row.calls, len(row.shared_by))
            for row, read_row in zip(exchanges(run), exchanges(read))
        ]


@pytest.mark.parametrize("how", ["ddp", "fsdp", "tp"])
def test_waiting_is_the_extra_time_compared_with_the_last_rank_to_arrive(
    how: str, request: pytest.FixtureRequest
) -> None:
    """By brute force: match the k-th collective of each name and size in all traces, in the order of their start.

    There is one group, so all ranks run the same collectives in the same order. But the group has two threads, which
    may start two collectives of different sizes in the other order on one rank.
    """
    done: Finished = request.getfixturevalue(how)
    times: list[dict[tuple[str, str], list[int]]] = []
    for rank in range(done.ranks):
        of_rank: dict[tuple[str, str], list[int]] = {}
        events = [one for one in done.trace(rank) if one.get("ph") == "X" and one["name"].startswith("gloo:")]
        for event in sorted(events, key=lambda one: one["ts"]):
            key = event["name"].removeprefix("gloo:"), str(event["args"].get("Input Dims"))
            of_rank.setdefault(key, []).append(round(event["dur"] * 1000))
        times.append(of_rank)
    for name in {name for name, _ in times[0]}:
        shortest = sum(sum(map(min, zip(*(of_rank[key] for of_rank in times)))) for key in times[0] if key[0] == name)
        for rank, of_rank in enumerate(times):
            waiting = [one.waiting_ns(rank) for key, one in done.run.lockstep.items() if key.what == name]
            took = sum(sum(of_rank[key]) for key in of_rank if key[0] == name)
            assert sum(one for one in waiting if one is not None) == took - shortest
            assert None not in waiting


@pytest.mark.parametrize(("how", "of_block"), [("ddp", 2 * BLOCK), ("fsdp", 2 * BLOCK), ("tp", BLOCK), ("both", BLOCK)])
def test_backward_belongs_to_the_layers_of_forward(how: str, of_block: int, request: pytest.FixtureRequest) -> None:
    """Backward repeats the work of forward for each input and each weight; the model's input has no gradient."""
    for run in request.getfixturevalue(how).runs:
        assert total_macs(run, "Net.embed", "backward") == STEPS * EMBED
        assert total_macs(run, "Net.head", "backward") == STEPS * 2 * HEAD
        for block in range(3):
            assert total_macs(run, f"Net.layers.{block}", "backward") == STEPS * of_block
            for linear in (0, 2):
                assert total_macs(run, f"Net.layers.{block}.{linear}", "backward") == STEPS * of_block // 2
        assert not any(row.cost.macs for row in run.rows if row.layer is None)


# DistributedDataParallel


def test_a_bucket_belongs_to_all_layers_with_gradients_in_it(ddp: Finished) -> None:
    """The reference is DDP's own list of the parameters in each bucket."""
    for rank, run in enumerate(ddp.runs):
        buckets = {
            frozenset(f"Net.{name.rpartition('.')[0]}" for name in bucket)
            for bucket in ddp.said_by_torch(rank)["buckets"]
        }
        assert len(buckets) > 2
        found = {
            frozenset(layer.name for layer in row.shared_by) or frozenset([row.layer.name if row.layer else ""]): row
            for row in exchanges(run)
        }
        assert set(found) == buckets
        for names, row in found.items():
            assert (row.phase, row.calls) == ("backward", STEPS)
            assert row.layer is not None
            assert all(name.startswith(row.layer.name) for name in names)  # their common ancestor
            below = [name[len(row.layer.name) :].split(".")[1:2] for name in names]
            assert len(names) == 1 or len({*map(tuple, below)}) > 1  # and the nearest


def test_each_rank_of_ddp_computes_the_whole_model_for_its_own_batch(ddp: Finished) -> None:
    for run in ddp.runs:
        assert total_macs(run, "Net") == STEPS * (EMBED + 3 * BLOCK + HEAD)
    assert total_macs(ddp.run, "Net") == ddp.ranks * STEPS * (EMBED + 3 * BLOCK + HEAD)


@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_a_trace_without_labels_gets_the_layers_of_the_model(how: str, request: pytest.FixtureRequest) -> None:
    """The model that is given is not wrapped, and is in no job."""
    finished: Finished = request.getfixturevalue(how)
    for rank in range(finished.ranks):
        trace = without_labels(finished.folder / f"trace{rank}.json")
        aligned = torchprof.from_trace(trace, Net(), inputs=(torch.rand(BATCH, WIDTH),))
        assert aligned.tree().calls == STEPS
        assert share_found(finished.runs[rank], aligned) > 0.99


# FSDP2


def test_all_gathers_and_reduce_scatters_belong_to_the_layer_of_the_parameters(fsdp: Finished) -> None:
    """Each block is gathered for forward; its parameters are freed, and gathered again for backward. The root is kept.
    gloo implements a reduce-scatter as an all-reduce."""
    groups = ["Net", *(f"Net.layers.{block}" for block in range(3))]
    for run in fsdp.runs:
        assert by_layer(run, "forward") == Counter({(name, "gloo:all_gather"): STEPS for name in groups})
        assert by_layer(run, "backward") == Counter(
            {
                **{(name, "gloo:all_gather"): STEPS for name in groups[1:]},
                **{(name, "gloo:all_reduce"): STEPS for name in groups},
            }
        )
        assert by_layer(run, "recompute") == Counter()


def test_each_rank_of_fsdp_computes_the_whole_model_and_stores_its_shard(fsdp: Finished) -> None:
    for rank, run in enumerate(fsdp.runs):
        assert total_macs(run, "Net") == STEPS * (EMBED + 3 * BLOCK + HEAD)
        held = sum(fsdp.said_by_torch(rank)["held"].values()) * 4
        (memory,) = run.memory
        assert held < PARAMS * 4
        # FSDP stores the parameters of one group in one piece, padded to the same length on all ranks.
        assert held <= dict(memory.before)["parameters"] <= held + 4 * 4 * 100
        assert [(dim.name, dim.size, dim.position) for dim in run.meta.mesh] == [("dp", 2, rank)]


def test_all_gathers_of_fsdp_have_the_sizes_of_their_outputs(fsdp: Finished) -> None:
    """The range of gloo has only its input. The operator that started it has both, in the trace."""
    for rank, run in enumerate(fsdp.runs):
        sizes: Counter[tuple[int, int]] = Counter()
        for event in fsdp.trace(rank):
            if event["name"] == "c10d::_allgather_base_":
                (out,), (given,) = event["args"]["Input Dims"][:2]
                sizes[4 * given, 4 * out] += 1
        found: Counter[tuple[int | None, int | None]] = Counter()
        for row in exchanges(run):
            collective = collective_of(row.frames)
            assert collective is not None
            assert collective.size == 2
            if collective.name == "all_gather":
                found[collective.bytes_in, collective.bytes_out] += row.calls
        assert found == sizes
        assert sizes


# Tensor parallel


def test_collectives_in_hooks_belong_to_the_layer_with_the_hooks(tp: Finished) -> None:
    """The row-wise product is summed after forward, the gradient of the column-wise input after backward."""
    for run in tp.runs:
        assert by_layer(run, "forward") == Counter(
            {(f"Net.layers.{at}.2", "gloo:all_reduce"): STEPS for at in range(3)}
        )
        assert by_layer(run, "backward") == Counter(
            {(f"Net.layers.{at}.0", "gloo:all_reduce"): STEPS for at in range(3)}
        )


def test_each_rank_of_tensor_parallel_counts_its_own_work(tp: Finished) -> None:
    """Half of each block, and all of what is not split. Backward has twice that, without the model's input."""
    for run in tp.runs:
        assert total_macs(run, "Net") == STEPS * (EMBED + 3 * BLOCK // 2 + HEAD)
        assert total_macs(run, "Net", "backward") == STEPS * (EMBED + 2 * (3 * BLOCK // 2 + HEAD))
        assert not any(row.cost.uncounted for row in run.rows)
    assert total_macs(tp.run, "Net.layers") == STEPS * 3 * BLOCK  # those of the whole model


def test_calls_of_hooks_do_not_count_as_calls_of_the_layer(tp: Finished) -> None:
    for run in tp.runs:
        calls = {node.layer.name: node.calls for node in run.tree("forward").walk()}
        assert {calls[name] for name in NAMES - {"Net.layers"}} == {STEPS}
        counts = {key.layer: spread.count for key, spread in run.samples.items() if key.measure == "cpu_ns"}
        assert set(counts.values()) == {STEPS}


# Both


def test_on_a_2d_mesh_the_groups_of_gloo_are_unknown(both: Finished) -> None:
    """Of ranks 0 to 3, those of a row are tensor parallel, those of a column share the parameters. No event of gloo
    says which of the two exchanged something, so who waited is unknown."""
    positions = [tuple((dim.name, dim.size, dim.position) for dim in run.meta.mesh) for run in both.runs]
    assert positions == [(("dp", 2, row), ("tp", 2, column)) for row in range(2) for column in range(2)]
    for run in both.runs:
        assert total_macs(run, "Net") == STEPS * (EMBED + 3 * BLOCK // 2 + HEAD)
    collectives = {key: lockstep for key, lockstep in both.run.lockstep.items() if key.is_collective}
    assert {key.what for key in collectives} == {"all_gather", "all_reduce"}
    for key, lockstep in collectives.items():
        assert key.group is None
        assert {*map(lockstep.waiting_ns, lockstep.ranks)} == {None}
    text = both.run.report("ranks")
    assert "mesh: dp 2 × tp 2" in text
    assert "– under Group: the ranks are in several groups" in text


# Planted faults


def test_a_straggler_is_found_with_its_slow_layer(ddp: Finished) -> None:
    """Nothing else takes as long as its sleep."""
    run = ddp.run
    number = {layer.name: at for at, layer in enumerate(run.layers)}
    work = run.lockstep[LockstepKey(number["Net.layers.1.2"], "forward", "cpu", WORK)]
    assert work.last_rank == (1,) * STEPS
    assert min(work.last_ns) >= DELAY_S * 1e9
    assert work.ns[0] < STEPS * DELAY_S * 1e9
    waiting = [one.waiting_ns(0) for key, one in run.lockstep.items() if key.is_collective]
    assert sum(one for one in waiting if one is not None) > STEPS * DELAY_S * 1e9 / 2
    text = run.report("ranks")
    assert "Rank 1 is the straggler" in text
    assert "Most of the difference is Net.layers.1.2 in forward" in text


@pytest.mark.parametrize("workers", ["0", "1"])
def test_a_rank_that_loads_its_data_slowly_is_found(tmp_path: Path, workers: str) -> None:
    """16 batches of 80 ms; those of the other rank take next to nothing."""
    ended = warm_job(tmp_path, 2, str(ROOT / "test" / "build" / "slow_loading.py"), str(tmp_path), workers)
    assert ended.code == 0, ended
    text = Finished(tmp_path, 2).run.report("ranks")
    assert "Rank 1 is the straggler" in text
    assert "Most of the difference is loading data: " in text


def test_work_during_an_early_receive_is_not_counted_as_waiting(job: Callable[..., Finished]) -> None:
    """Rank 1 sleeps 150 ms in each call of one layer during a receive that rank 0 answers at once."""
    run = job("ahead", 2).run
    number = {layer.name: at for at, layer in enumerate(run.layers)}
    work = run.lockstep[LockstepKey(number["Ahead.layers.1.2"], "forward", "cpu", WORK)]
    assert min(work.last_ns) >= DELAY_S * 1e9
    assert work.last_rank == (1,) * STEPS
    assert work.ns[0] < STEPS * DELAY_S * 1e9
    assert "Rank 1 is the straggler" in run.report("ranks")
    assert "Most of the difference is Ahead.layers.1.2 in forward" in run.report("ranks")


def test_an_unbalanced_expert_is_found(job: Callable[..., Finished]) -> None:
    """Each rank has one expert. The expert of rank 2 gets 60 of 100 tokens: 2.4 times the mean."""
    done = job("experts", 4, "with_flops")
    run = done.run
    ranks = {layer.name: layer.ranks for layer in run.layers}
    assert ranks["Mixture.moe.experts"] == ()
    assert [ranks[f"Mixture.moe.experts.{rank}"] for rank in range(4)] == [(0,), (1,), (2,), (3,)]
    macs = [total_macs(run.of_rank(rank), "Mixture.moe") for rank in range(4)]
    assert macs == [STEPS * tokens * WIDTH * WIDTH for tokens in Experts.TOKENS]
    lines = [line.split("|") for line in run.report("ranks", top=100).splitlines() if "Mixture.moe.experts " in line]
    heading = next(line for line in run.report("ranks").splitlines() if line.startswith("Module"))
    at = [cell.strip() for cell in heading.split("|")].index("FLOPs max/mean")
    assert {line[at].strip() for line in lines} == {"2.40"}
    assert by_layer(run, "forward") == Counter({("Mixture.moe", "gloo:all_reduce"): 4 * STEPS})
