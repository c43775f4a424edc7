"""A job with a planted delay in a place that no other test has; ``python -m benchmarks delays`` runs all places."""

from __future__ import annotations

from pathlib import Path

import pytest
from build.delayed_training import PLACES, SLOW_RANK, STEPS
from build.places import ROOT
from build.warm import warm_job
from torch import distributed as dist

import torchprof
from torchprof.ranks import balance_of

if not dist.is_available():
    pytest.skip("this torch was built without torch.distributed", allow_module_level=True)


@pytest.mark.jobs
def test_a_rank_that_begins_to_exchange_gradients_late_is_named(tmp_path: Path) -> None:
    job = warm_job(tmp_path, 2, str(ROOT / "test" / "build" / "delayed_training.py"), "gather", "collective")
    assert job.code == 0, job
    run = torchprof.load(tmp_path / "job.json")
    assert [meta.steps for meta in run.metas] == [STEPS, STEPS]
    slow = balance_of(run).slow
    assert slow is not None and slow.ranks == (SLOW_RANK,)
    assert slow.difference is not None and slow.difference.excess_ns > 40e6
    text = run.report("ranks")
    assert "Most of the difference is " in text and PLACES["collective"] in text
