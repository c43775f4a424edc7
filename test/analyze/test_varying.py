"""Whether the calls of a layer had the same shapes, from hand-made rows."""

from __future__ import annotations

from array import array
from dataclasses import replace
from typing import Any

import pytest
import torch
from build.hand_made import NET, op, row, run_of
from torch import nn

import torchprof
from torchprof.analyze.figures import varying_calls
from torchprof.run.run import Run


def of_model(run: Run, same_shapes: bool | None) -> Run:
    layers = (replace(run.layers[0], same_shapes=same_shapes), *run.layers[1:])
    return replace(run, layers=layers, rows=replace(run.rows, layers=layers))


def states(found: dict[tuple[str, ...], bool | None]) -> list[bool | None]:
    return [found[tuple(path.split("."))] for path in NET]


def calls_of_b(*rows: Any, calls: int = 2) -> Run:
    """Two calls of Net, and ``calls`` of Net.b, with these rows in it."""
    return run_of([row(0, calls=2), row(2, calls=calls), *rows])


A, B = (4, 8), (2, 8)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([row(2, op("x", A), calls=2)], False),
        ([row(2, op("x", A), calls=1), row(2, op("x", B), calls=1)], True),
        ([row(2, op("x", A), calls=4), row(2, op("y", B), calls=2)], False),
        ([row(2, op("x"), op("y", A), calls=1), row(2, op("x"), op("y", B), calls=1)], True),
        ([row(2, op("x", A), calls=1)], False),  # in one call alone: made when it was first needed
        ([row(2, op("x", A), calls=2), row(2, op("x", B), calls=2)], None),  # both in each, or one twice in each
        ([row(2, op("x"), calls=2)], None),
        ([row(2, op("x", A), calls=1), row(2, op("x", B), calls=1, phase="backward")], False),
        ([], None),  # nothing of what ran in it was recorded
    ],
)
def test_shapes_of_operators_show_whether_calls_varied(rows: list[Any], expected: bool | None) -> None:
    run = calls_of_b(*rows)
    assert states(varying_calls(run)) == states(varying_calls(run, of_model=True)) == [expected, False, expected, False]


def test_input_shapes_of_the_model_decide_if_those_of_operators_are_unknown() -> None:
    unknown = calls_of_b(row(2, op("x"), calls=2))
    assert states(varying_calls(of_model(unknown, True))) == [False] * 4
    assert states(varying_calls(of_model(unknown, False))) == [True, False, None, False]
    seen = calls_of_b(row(2, op("x", A), calls=1), row(2, op("x", B), calls=1))
    assert states(varying_calls(of_model(seen, True))) == [True, False, True, False]


def test_a_layer_called_twice_per_model_call_varies_in_calls_not_in_work() -> None:
    """Each call has another shape: its own calls vary, but its work per call of the model does not."""
    run = calls_of_b(row(2, op("x", A), calls=2), row(2, op("x", B), calls=2), calls=4)
    assert states(varying_calls(of_model(run, True))) == [False, False, True, False]
    assert states(varying_calls(of_model(run, True), of_model=True)) == [False] * 4


def test_a_single_call_does_not_vary() -> None:
    run = run_of([row(0), row(0, op("x", A)), row(0, op("x", B))])
    assert states(varying_calls(run)) == [False] * 4


# What is recorded of a model


@pytest.mark.parametrize(
    ("sizes", "expected"), [([4, 4, 4], True), ([4], True), ([4, 4, 3], False), ([4, 3, 4], False), ([], None)]
)
def test_the_inputs_of_all_calls_of_a_model_are_compared(sizes: list[int], expected: bool | None) -> None:
    model = nn.Sequential(nn.Linear(8, 8))
    with torchprof.Profile(model) as prof:
        for size in sizes:
            model(torch.rand(size, 8))
    assert [layer.same_shapes for layer in prof.run.layers] == [expected, None]


def test_a_layer_that_only_some_calls_of_the_model_repeat() -> None:
    """On the same shapes each time: 4 and then 1 calls of Net.b are other work."""
    run = of_model(calls_of_b(row(2, op("x", A), calls=5), calls=5), True)
    assert states(varying_calls(run, of_model=True)) == [True, False, True, False]
    assert states(varying_calls(run)) == [False] * 4


def test_a_layer_without_operators_varies_with_its_model() -> None:
    run = run_of([row(0, calls=2), row(1, calls=2)])
    assert [states(varying_calls(of_model(run, same)))[1] for same in (True, False, None)] == [False, None, None]


def test_the_first_call_is_the_first_that_is_recorded() -> None:
    model = nn.Linear(8, 8)
    schedule = torch.profiler.schedule(wait=1, warmup=0, active=2, repeat=1)
    with torchprof.Profile(model, schedule=schedule) as prof:
        for size in (4, 3, 3):
            model(torch.rand(size, 8))
            prof.step()
    layer = prof.run.layers[0]
    assert (layer.input_shapes, layer.output_shapes, layer.same_shapes) == (((3, 8),), ((3, 8),), True)


def test_calls_that_a_schedule_skips_do_not_count() -> None:
    model = nn.Linear(8, 8)
    schedule = torch.profiler.schedule(wait=1, warmup=0, active=1, repeat=2)
    with torchprof.Profile(model, schedule=schedule) as prof:
        for size in (4, 4, 3, 4):
            model(torch.rand(size, 8))
            prof.step()
    assert prof.run.tree("forward").calls == 2
    assert prof.run.layers[0].same_shapes is True


def test_unknown_sizes_are_not_equal() -> None:
    nested = torch.nested.nested_tensor([torch.rand(2, 8), torch.rand(3, 8)])
    model = nn.Linear(8, 8)
    with torchprof.Profile(model) as prof:
        model(nested)
        model(nested)
    assert prof.run.layers[0].same_shapes is False


def of_rank(run: Run, rank: int) -> Run:
    rows = replace(run.rows, columns={**run.rows.columns, "rank": array("q", [rank] * len(run.rows))})
    samples = {key._replace(rank=rank): spread for key, spread in run.samples.items()}
    return replace(run, metas=(replace(run.meta, rank=rank),), rows=rows, samples=samples)


def test_cycles_and_ranks_add_up() -> None:
    model = nn.Linear(8, 8)

    def run(*sizes: int) -> Run:
        with torchprof.Profile(model) as prof:
            for size in sizes:
                model(torch.rand(size, 8))
        return prof.run

    four, two, none = run(4, 4), run(2), run()

    def of_both(*runs: Run, ranks: bool) -> bool | None:
        if ranks:
            runs = tuple(of_rank(run, rank) for rank, run in enumerate(runs))
        return torchprof.merge(runs, add_cycles=not ranks).layers[0].same_shapes

    for ranks in (False, True):
        assert of_both(run(4), run(4, 4), ranks=ranks) is True
        assert of_both(four, two, ranks=ranks) is False
        assert of_both(four, run(4, 3), ranks=ranks) is False
        assert of_both(two, four, four, ranks=ranks) is False
    assert torchprof.merge([four, two], add_cycles=True).layers[0].input_shapes == ((4, 8),)  # of the first call
    assert of_both(none, four, ranks=False) is True
    assert of_both(four, none, ranks=False) is True
    assert of_both(four, none, ranks=True) is None
