"""The calls report: its figures against quantiles by hand and by numpy."""

from dataclasses import replace

import numpy as np
import pytest
from build import hand_made

from torchprof.errors import TorchprofError
from torchprof.run.layers import Layer
from torchprof.run.run import Run
from torchprof.run.samples import SampleKey, Spread


def run_of(**durations: list[int]) -> Run:
    """A run of layers ``net`` and ``net_a`` with calls of these durations in ns, in the order of time."""
    layers = [Layer(tuple(name.split("_")), "Module") for name in durations]
    samples = {
        SampleKey(index, "forward", 0, "cpu", "cpu_ns"): Spread.of(list(enumerate(took)))
        for index, took in enumerate(durations.values())
    }
    return replace(hand_made.run_of([], layers=layers), samples=samples)


def test_the_table_of_single_calls() -> None:
    """The median of 1 to 5 ms is 3 ms; the 5th percentile is a fifth of the way from the first value to the second."""
    run = run_of(net=[5_000_000, 1_000_000, 2_000_000, 3_000_000, 4_000_000], net_a=[700])
    assert run.report("calls").splitlines() == [
        "Module | Number of Calls | First call | Median  | P5 to P95          | Min     | Max",
        "-------|-----------------|------------|---------|--------------------|---------|--------",
        "net    | 5               | 5.000ms    | 3.000ms | 1.200ms to 4.800ms | 1.000ms | 5.000ms",
        "net.a  | 1               | 0.700us    | 0.700us | 0.700us to 0.700us | 0.700us | 0.700us",
    ]
    assert "net.a" not in run.report("calls", depth=0)
    assert run.report("calls", tablefmt="github").startswith("| Module")
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
