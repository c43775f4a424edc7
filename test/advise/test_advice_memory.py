"""Advice about the peak of memory: real models, and what was alive by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from build.hand_made import FORWARD, op, row, run_of
from torch import Tensor, nn

from torchprof import Profile
from torchprof.advise import Advice, advise
from torchprof.run.measures import SampleKey, Spread
from torchprof.run.run import Run
from torchprof.run.timeline import Held, Holder, Memory
from torchprof.run.words import BACKWARD, NOT_SELECTED, OUTSIDE

MB = 2**20


def of(run: Run) -> list[Advice]:
    return [one for one in advise(run) if one.rule == "layer_that_makes_the_peak"]


class Wide(nn.Module):
    """Makes something large, and gives something small back. ``kept``: backward needs the large one."""

    def __init__(self, kept: bool) -> None:
        super().__init__()
        self.kept = kept

    def forward(self, x: Tensor) -> Tensor:
        large = x.repeat(1, 64) * 2  # 64 times the input
        large = large.sin() if self.kept else large
        return large.view(len(x), 64, -1).sum(1)


def model_with(layer: nn.Module) -> nn.Module:
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)), layer, *(nn.Linear(64, 64) for _ in range(4)))


def profiled(model: nn.Module) -> Run:
    with Profile(model, profile_memory=True) as prof:
        model(torch.ones(256, 64)).sum().backward()
    return prof.run


def test_a_real_layer_that_saves_much_for_backward_is_reported() -> None:
    """Backward of sin needs its input, of 64 x 256 x 64 floats, and at the peak has made three more of that size."""
    [advice] = of(profiled(model_with(Wide(kept=True))))
    assert advice.layer == "Sequential.4" and advice.gain_ns is None and advice.gain_bytes is not None
    assert 0 <= advice.gain_bytes - 4 * 64 * 256 * 64 * 4 < 64  # and the 2, a few bytes
    assert "was allocated here: 12.00 MB temporaries of backward, 4.00 MB activations of forward." in advice.finding
    assert "torch.chunk" in advice.remedy


def test_a_real_layer_with_large_temporaries_is_reported() -> None:
    """The repeated input and its double are live at the same time, and nothing keeps them."""
    with torch.no_grad():
        model = model_with(Wide(kept=False))
        with Profile(model, profile_memory=True) as prof:
            model(torch.ones(256, 64))
    [advice] = of(prof.run)
    assert advice.layer == "Sequential.4" and advice.gain_bytes is not None
    assert 0 <= advice.gain_bytes - 2 * 64 * 256 * 64 * 4 < 64  # and the 2, a few bytes
    assert "was allocated here: 8.00 MB temporaries of forward." in advice.finding and "torch.chunk" in advice.remedy


def test_a_real_model_of_equal_layers_is_reported_as_one() -> None:
    with Profile(model := model_with(nn.Identity()), profile_memory=True) as prof:
        model(torch.ones(32768, 64)).sum().backward()  # 8 MB in each layer
    assert prof.run.memory[0].peak_bytes > 8 * 2**23
    [advice] = of(prof.run)
    assert advice.layer == "Sequential.*"
    assert advice.gain_bytes == 7 * 2**23  # the output of the last layer is the eighth, and not saved
    assert "torch.utils.checkpoint" in advice.remedy


def held(*blocks: Held, before: int = 0, calls: int = 10, rows: Any = (), **fields: Any) -> Run:
    """What was alive at a peak of 30 MB, with a number of called layers."""
    memory = Memory("cpu", 0, 30 * MB, 1, tuple(blocks), (("parameters", before * MB),), **fields)
    run = replace(run_of([*rows, row(1, op("aten::add"), cpu_ns=1)], wall_ns=10), memory=(memory,))
    samples = {SampleKey(at, FORWARD, 0, "cpu", "cpu_ns"): Spread.of([(0, 1)]) for at in range(calls)}
    return replace(run, samples=samples)


BACK = [row(1, op("aten::mm"), phase=BACKWARD, cpu_ns=1)]


def test_the_figures_of_a_layer_and_its_kinds() -> None:
    run = held(
        Held(1, FORWARD, "temporaries", 4 * MB, 3),
        Held(1, FORWARD, "activations", 7 * MB, 3),
        Held(1, FORWARD, "activations", 1 * MB, 3),
        Held(2, BACKWARD, "temporaries", 11 * MB, 1),
        Held(3, FORWARD, "activations", 7 * MB, 7),
        before=2,
        rows=BACK,
    )
    first, second = of(run)
    assert first.layer == "Net.a" and first.gain_bytes == 12 * MB
    assert first.finding == (
        "38% of the peak of cpu (32.00 MB) was allocated here: 8.00 MB activations of forward, 4.00 MB temporaries of "
        "forward."
    )
    assert "torch.utils.checkpoint" in first.remedy
    assert second.layer == "Net.b" and second.gain_bytes == 11 * MB
    assert second.finding == ("34% of the peak of cpu (32.00 MB) was allocated here: 11.00 MB temporaries of backward.")


@pytest.mark.parametrize("nbytes, named", [(8, False), (200_000, False), (220_000, True)])
def test_small_parts_are_not_named(nbytes, named) -> None:
    """From 1 % of the 20 MB that the layer made."""
    large = Held(1, BACKWARD, "temporaries", 20 * MB, 1)
    [found] = of(held(large, Held(1, FORWARD, "activations", nbytes, 1)))
    assert "was allocated here: 20.00 MB temporaries of backward" in found.finding
    assert ("activations" in found.finding) == named and found.gain_bytes == 20 * MB + nbytes


def test_without_backward_checkpointing_is_not_recommended() -> None:
    large = Held(1, FORWARD, "activations", 20 * MB, 1)
    assert "checkpoint" in of(held(large, rows=BACK))[0].remedy
    assert "checkpoint" not in of(held(large))[0].remedy


def test_memory_allocated_outside_all_layers_is_reported() -> None:
    assert of(held(Held(OUTSIDE, FORWARD, "temporaries", 20 * MB, 1)))[0].layer == "(outside)"


@pytest.mark.parametrize(
    "make",
    [
        lambda: held(Held(1, FORWARD, "activations", 9 * MB, 1)),  # less than a third
        lambda: held(Held(1, FORWARD, "activations", 11 * MB, 1), before=6),  # of all that the device held
        lambda: held(Held(1, FORWARD, "activations", 14 * MB, 1), calls=4),  # of 4 layers one holds a fourth
        lambda: held(Held(1, FORWARD, "parameters", 25 * MB, 1)),
        lambda: held(Held(OUTSIDE, FORWARD, "optimizer state", 25 * MB, 1)),
        lambda: held(Held(OUTSIDE, FORWARD, "inputs", 25 * MB, 1)),
        lambda: held(Held(1, BACKWARD, "gradients", 25 * MB, 1)),
        lambda: held(Held(NOT_SELECTED, FORWARD, "activations", 25 * MB, 1)),
        lambda: held(Held(1, FORWARD, "activations", -25 * MB, 1)),
        lambda: held(),
        lambda: replace(held(Held(1, FORWARD, "activations", 25 * MB, 1)), memory=()),
    ],
)
def test_other_work_is_not_reported(make: Callable[[], Run]) -> None:
    assert of(make()) == []


def test_the_peaks_of_all_ranks_are_one_finding() -> None:
    run = held(Held(1, FORWARD, "activations", 20 * MB, 1))
    second = replace(run.memory[0], rank=1)
    both = replace(run, metas=(run.meta, replace(run.meta, rank=1)), memory=(run.memory[0], second))
    [advice] = of(both)
    assert (advice.layer, advice.gain_bytes) == ("Net.a", 40 * MB)
    assert advice.finding == (
        "67% of the peaks of 2 devices (60.00 MB) was allocated here: 40.00 MB activations of forward."
    )
    alone = replace(both, memory=(run.memory[0], replace(second, held=())))
    assert of(alone)[0].finding.startswith("67% of the peak of cpu of rank 0 (30.00 MB) was ")
    unknown = replace(both, memory=(run.memory[0], replace(second, before=None)))
    assert of(unknown)[0].finding.startswith("67% of the peaks of 2 devices (60.00 MB above the start) was ")


def test_a_small_peak_is_not_reported() -> None:
    run = held(Held(1, FORWARD, "activations", MB - 1, 1))
    assert of(replace(run, memory=(replace(run.memory[0], peak_bytes=MB + MB // 2),))) == []
    more = held(Held(1, FORWARD, "activations", MB, 1))
    assert len(of(replace(more, memory=(replace(more.memory[0], peak_bytes=MB + MB // 2),)))) == 1


# What was live at the start


def found(run: Run, rule: str) -> list[Advice]:
    return [advice for advice in advise(run) if advice.rule == rule]


def with_before(rule: str, *before: tuple[str, int], others: Holder | None = None) -> list[Advice]:
    """The findings of a rule on a run with a peak of 30 MB above what was live at the start, in MB by kind."""
    run = held(Held(1, BACKWARD, "gradients", 30 * MB, 1))
    memory = replace(run.memory[0], before=tuple((kind, size * MB) for kind, size in before), others=others)
    return found(replace(run, memory=(memory,)), rule)


@pytest.mark.parametrize(("size", "is_found"), [(39, False), (41, True)])
def test_optimizer_state_is_named_from_two_fifths_of_the_peak_on(size: int, is_found: bool) -> None:
    advice = with_before("optimizer_state_at_the_peak", ("parameters", 70 - size), ("optimizer state", size))
    assert [each.gain_bytes for each in advice] == [size * MB] * is_found
    assert all(each.cause == "41% of what is live at the peak of cpu are optimizer state." for each in advice)


@pytest.mark.parametrize(
    ("kind", "size", "words"),
    [
        ("other tensors", 59, ""),
        (
            "other tensors",
            61,
            "loaded or made before the start: the list `pictures` (train.py), with 9 tensors of float32",
        ),
        ("other parameters", 14, ""),
        ("other parameters", 16, "such as a copy of the model: the list `pictures`"),
    ],
)
def test_other_tensors_are_named_if_they_are_a_large_part(kind: str, size: int, words: str) -> None:
    others = Holder("pictures", "train.py", "list", 9, size * MB, "float32")
    advice = with_before("others_at_the_peak", ("parameters", 70 - size), (kind, size), others=others)
    assert [each.gain_bytes for each in advice] == [size * MB] * bool(words)
    assert all(words in each.cause for each in advice)


def test_results_of_earlier_calls_are_not_of_a_call() -> None:
    """A layer whose calls allocate 1 MB has 20 MB: 19 MB are of earlier calls. A smaller batch does not change that."""
    run = held(Held(1, FORWARD, "activations", 20 * MB, 20))
    assert of(run)
    of_a_call = {SampleKey(1, FORWARD, 0, "cpu", "peak_bytes"): Spread.of([(0, MB)])}
    assert of(replace(run, samples={**run.samples, **of_a_call})) == []
