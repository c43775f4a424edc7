"""A budget for a model in a test suite: a test fails if a change makes the model more expensive, and names the layer.

Run it with ``pytest examples/budget_in_pytest.py``. The first test needs only the model. The second compares it with a
run that was saved earlier; in continuous integration, that is the run of the main branch, and one command makes the
same check: ``torchprof compare baseline.json run.json --fail-if "cpu_total > +25%"`` (docs/compare.md).
"""

from pathlib import Path

import pytest
import torch
from torch import nn

import torchprof

STEPS = 20


def record() -> torchprof.Run:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    batch = torch.rand(32, 64)
    model(batch)
    with torchprof.Profile(model, with_flops=True, profile_memory=True) as prof:
        for _ in range(STEPS):
            model(batch)
            prof.step()
    return prof.run


@pytest.fixture(scope="module")
def run() -> torchprof.Run:
    return record()


@pytest.fixture(scope="module")
def baseline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was saved earlier. It should be from the same machine, or times cannot be compared."""
    path = tmp_path_factory.mktemp("baseline") / "baseline.json"
    record().save(path)
    return path


def test_what_it_may_cost(run: torchprof.Run) -> None:
    torchprof.assert_budget(
        run,
        {
            "flops": "1.3M",  # of one forward call, for any number of recorded calls
            "params": 20_000,
            "cpu_peak": "128KB",  # the peak of memory above the start of a forward call
            "1: cpu_peak": "32KB",  # of the layer "1" alone; "*" matches any one step of a path
            "cpu_total": "1s",
        },
    )


def test_it_costs_no_more_than_before(run: torchprof.Run, baseline: Path) -> None:
    torchprof.assert_budget(run, {"flops": "+0%", "params": "+0%", "cpu_peak": "+5%"}, baseline)


def test_a_budget_that_is_exceeded_names_the_layer(run: torchprof.Run) -> None:
    with pytest.raises(AssertionError, match=r"Sequential: flops 1\.23 M, limit 1\.00 M.*Sequential\.0"):
        torchprof.assert_budget(run, {"flops": "1M"})


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q", "-p", "no:cacheprovider"]))
