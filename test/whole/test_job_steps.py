"""Jobs of scripts that mark no steps: the steps of the ranks pair, and the report names the rank with a delay."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from build.places import ROOT
from build.plain_training import BATCH_S, DELAY_S, STEPS
from build.warm import warm_job
from torch import distributed as dist

import torchprof
from torchprof import Run
from torchprof.ranks import balance_of
from torchprof.run.lockstep import STEP, WORK, LockstepKey
from torchprof.run.measures import SampleKey
from torchprof.run.words import FORWARD, OUTSIDE, StepEnd

if not dist.is_available():
    pytest.skip("this torch was built without torch.distributed", allow_module_level=True)

SCRIPT = ROOT / "test" / "build" / "plain_training.py"
RECORDED = STEPS - 2
"""The first step is start-up, and the second one began before the recording."""

Place = tuple[tuple[str, ...], str | None]
"""The path of a layer below the model, and the part of a step outside all layers."""
SECOND: Place = (("second",), None)

pytestmark = pytest.mark.jobs


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The folder of a job of two ranks with these arguments; it runs once for all tests that need it. With "profile"
    and "torch", the script records itself, else ``torchprof run`` does."""
    known: dict[tuple[str, ...], Path] = {}

    def finished(*how: str) -> Path:
        if how not in known:
            folder = tmp_path_factory.mktemp("-".join(how))
            command = [] if {"profile", "torch"} & {*how} else ["-m", "torchprof", "run", "-o", "rank{rank}.json"]
            ended = warm_job(folder, 2, *command, str(SCRIPT), *how)
            assert ended.code == 0, ended
            known[how] = folder
        return known[how]

    return finished


def run_in(folder: Path) -> Run:
    return torchprof.merge(torchprof.load(folder / f"rank{rank}.json") for rank in range(2))


def assert_names_rank_1(run: Run, steps: int, place: Place) -> None:
    """Rank 1 is slower by the delay in each step."""
    assert [(meta.steps, meta.step_end) for meta in run.metas] == [(steps, StepEnd.OPTIMIZER)] * 2
    slow = balance_of(run).slow
    assert slow is not None and slow.ranks == (1,)
    assert slow.slowest_in == (steps, steps)
    whole = run.lockstep[LockstepKey(OUTSIDE, FORWARD, "cpu", STEP)]
    assert whole.last_rank == (1,) * steps
    assert min(whole.last_ns) >= (BATCH_S + DELAY_S) * 1e9
    assert slow.difference is not None and slow.difference.excess_ns > DELAY_S * 1e9 / 2
    layer = run.layers[slow.difference.layer].path[1:] if slow.difference.layer >= 0 else ()
    assert (layer, slow.difference.part) == place
    text = run.report("ranks")
    assert "Own work a step" in text and "A step was still running" not in text


def test_the_rank_with_the_delay_is_named(job: Callable[..., Path]) -> None:
    run = run_in(job("data"))
    assert_names_rank_1(run, RECORDED, ((), "step_data_ns"))
    assert [meta.cycles for meta in run.metas] == [1, 1]


def test_the_rank_with_the_delay_is_named_in_cycles(job: Callable[..., Path]) -> None:
    """They end at different steps on the ranks, and rank 0 evaluates between its steps."""
    run = run_in(job("layer", "cycles", "evaluation"))
    assert_names_rank_1(run, RECORDED, SECOND)
    cycles = [meta.cycles for meta in run.metas]
    assert cycles[0] != cycles[1] and min(cycles) > 1


def test_without_a_delay_no_rank_is_named(job: Callable[..., Path]) -> None:
    run = run_in(job("cycles", "evaluation"))
    balance = balance_of(run)
    assert [rank.steps for rank in balance.ranks] == [RECORDED] * 2
    assert balance.slow is None or balance.slow.may_be_chance  # on a busy machine one rank may have less time
    assert "A step was still running" not in run.report("ranks")


def test_steps_are_whole_across_cycles(job: Callable[..., Path]) -> None:
    """Each step loads a batch, which takes 10 ms, and calls the model once; the optimizer ends it."""
    run = run_in(job("layer", "cycles", "evaluation"))
    for rank in range(2):
        spread = run.samples[SampleKey(OUTSIDE, FORWARD, rank, "cpu", "step_data_ns")]
        assert spread.count == RECORDED and spread.min >= BATCH_S * 1e9
        whole = run.samples[SampleKey(OUTSIDE, FORWARD, rank, "cpu", "step_ns")]
        assert whole.count == RECORDED and whole.sum <= run.metas[rank].wall_ns
    layer = run.layers.index_of["Net", "second"]
    work = run.lockstep[LockstepKey(layer, FORWARD, "cpu", WORK)]
    assert work.last_rank == (1,) * RECORDED and min(work.last_ns) >= DELAY_S * 1e9
    collectives = [lockstep for key, lockstep in run.lockstep.items() if key.is_collective]
    assert sum(sum(lockstep.counts) for lockstep in collectives) == 2 * RECORDED
    assert all(lockstep.is_paired for lockstep in collectives)


def test_a_profile_around_the_loop_and_its_traces_have_the_same_steps(job: Callable[..., Path]) -> None:
    folder = job("layer", "profile")
    run = run_in(folder)
    assert_names_rank_1(run, STEPS, SECOND)
    traces = torchprof.from_trace([folder / f"trace{rank}.json" for rank in range(2)])
    key = LockstepKey(OUTSIDE, FORWARD, "cpu", STEP)
    assert traces.lockstep[key].values == run.lockstep[key].values
    assert_names_rank_1(traces, STEPS, SECOND)


def test_traces_of_torchs_profiler_have_steps(job: Callable[..., Path]) -> None:
    """Nothing in them tells when the first step began. Their layers are ranges of torch."""
    folder = job("layer", "torch")
    run = torchprof.from_trace([folder / f"trace{rank}.json" for rank in range(2)])
    assert_names_rank_1(run, STEPS - 1, ((), None))
