"""The calls report: its figures against quantiles by hand and by numpy."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from build import hand_made
from build.golden import drawn

from torchprof.errors import TorchprofError
from torchprof.run.layers import Layer
from torchprof.run.measures import SampleKey, Spread
from torchprof.run.run import Run


def run_of(**durations: list[int]) -> Run:
    """A run of layers ``net`` and ``net_a`` with calls of these durations in ns, in the order of time."""
    layers = [Layer(tuple(name.split("_")), "Module") for name in durations]
    samples = {
        SampleKey(index, "forward", 0, "cpu", "cpu_ns"): Spread.of(list(enumerate(took)))
        for index, took in enumerate(durations.values())
    }
    return replace(hand_made.run_of([], layers=layers), samples=samples)


def test_the_table_of_single_calls(golden: Callable[..., None]) -> None:
    """The median of 1 to 5 ms is 3 ms; the 5th percentile is a fifth of the way from the first value to the second."""
    run = run_of(net=[5_000_000, 1_000_000, 2_000_000, 3_000_000, 4_000_000], net_a=[700])
    golden(drawn(run, "calls"), drawn(run, "calls", depth=0, tablefmt="github"))
    with pytest.raises(TorchprofError, match="githup"):
        run.report("calls", tablefmt="githup")


@pytest.mark.parametrize("q", [0, 0.05, 0.25, 0.5, 0.95, 1])
def test_quantiles_are_those_of_numpy(q: float) -> None:
    values = [31, 4, 15, 92, 65, 35, 89]
    assert Spread.of(list(enumerate(values))).quantile(q) == pytest.approx(float(np.quantile(values, q)))


def test_samples_of_work_of_no_layer_have_no_row() -> None:
    """Samples of work outside of layers, or in layers that were not selected, belong to no row."""
    run = run_of(net=[1_000])
    steps = {SampleKey(layer, "forward", 0, "cpu", "step_cpu_ns"): Spread.of([(0, 5)]) for layer in (-2, -1)}
    with_steps = replace(run, samples={**run.samples, **steps})
    assert with_steps.report("calls", depth=0) == run.report("calls", depth=0)
