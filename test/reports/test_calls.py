"""The table of single calls: its figures against quantiles computed by hand, and against numpy's."""

from dataclasses import replace

import numpy as np
import pytest

from torchprof.errors import TorchprofError
from torchprof.measure.fold import fold
from torchprof.run.layers import Layer
from torchprof.run.meta import Meta
from torchprof.run.rows import Rows
from torchprof.run.run import Run
from torchprof.run.samples import SampleKey, Spread


def run_of(**durations: list[int]) -> Run:
    """A run of layers ``net`` and ``net_a``, whose calls started in the order given and took so many ns."""
    layers = tuple(Layer(tuple(name.split("_")), "Module") for name in durations)
    rows, _, _ = fold([], [], layers)
    samples = {
        SampleKey(index, "forward", 0, "cpu", "cpu_ns"): Spread.of(list(enumerate(took)))
        for index, took in enumerate(durations.values())
    }
    assert isinstance(rows, Rows)
    return Run((Meta(("Module",)),), layers, rows, samples)


def test_the_table_of_single_calls() -> None:
    """Of 1 to 5 ms the median is 3; 5 % lies a fifth of the way from the first to the second, and so for 95 %."""
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


def test_samples_of_no_layer_are_no_calls() -> None:
    """What a step took outside, or in layers that were not selected, has no layer to be shown with."""
    run = run_of(net=[1_000])
    steps = {SampleKey(layer, "forward", 0, "cpu", "step_cpu_ns"): Spread.of([(0, 5)]) for layer in (-2, -1)}
    with_steps = replace(run, samples={**run.samples, **steps})
    assert with_steps.report("calls", depth=0) == run.report("calls", depth=0)
