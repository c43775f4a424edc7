"""Advice about loading data: real loaders, and rows and samples made by hand."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from build.hand_made import FORWARD, label, op, python_line, row, run_of
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from torchprof import Profile
from torchprof.advise import Advice, advise
from torchprof.run.measures import SampleKey, Spread
from torchprof.run.run import Run
from torchprof.run.words import OUTSIDE, StepEnd

MS = 1_000_000
ALONE = label("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__")
WORKERS = label(f"enumerate(DataLoader)#{_MultiProcessingDataLoaderIter.__name__}.__next__")


def of(run: Run) -> list[Advice]:
    return [one for one in advise(run) if one.rule == "waiting_for_data"]


class Samples(Dataset[Tensor]):
    """Each sample takes this long to make."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __len__(self) -> int:
        return 6

    def __getitem__(self, at: int) -> Tensor:
        time.sleep(self.seconds)
        return torch.full((256,), float(at))


def looped(seconds: float, times: int) -> Run:
    """Three batches through a model that does this many matrix products."""
    model = nn.Sequential(nn.Linear(256, 256))
    with Profile(model) as prof:
        for batch in DataLoader(Samples(seconds), batch_size=2):
            for _ in range(times):
                model(batch)
            prof.step()
    return prof.run


def test_a_real_loop_without_workers_is_reported() -> None:
    run = looped(0.01, 1)
    [advice] = of(run)
    took = sum(row.cost.cpu_ns for row in run.rows if row.frames and "DataLoader" in row.frames[0].name)
    fetches = 4  # the last one ends the loop
    assert advice.layer == "(outside)" and advice.gain_ns == took - fetches * MS // 2 and took >= 60 * MS
    assert "its DataLoader has no workers" in advice.finding and "num_workers=" in advice.remedy


def batches(loader: Any = ALONE, times: int = 4) -> list[Any]:
    """60 ms of the loader, 45 of them outside operators; 40 ms of other work."""
    return [
        row(OUTSIDE, loader, calls=times, cpu_ns=45 * MS),
        row(OUTSIDE, loader, op("aten::stack"), calls=times, cpu_ns=10 * MS),
        row(OUTSIDE, loader, op("aten::stack"), op("aten::cat"), calls=times, cpu_ns=5 * MS),
        row(1, op("aten::mm"), cpu_ns=40 * MS),
    ]


def with_steps(run: Run, *waited_ms: int) -> Run:
    values = [(start, ms * MS) for start, ms in enumerate(waited_ms)]
    return replace(run, samples={SampleKey(OUTSIDE, FORWARD, 0, "cpu", "step_data_ns"): Spread.of(values)})


def test_the_figures_of_a_loader_without_workers() -> None:
    [advice] = of(run_of(batches(), wall_ns=100 * MS))
    assert advice.finding == (
        "The loop loads each batch itself: its DataLoader has no workers. That takes 60.000ms. 75% of that time is in "
        "no operator."
    )
    assert advice.gain_ns == (60 - 4 * 0.5) * MS


@pytest.mark.parametrize("times, ms", [(50, 35), (110, 5), (111, None)])
def test_workers_do_not_gain_what_it_takes_to_pass_a_batch(times: int, ms: int | None) -> None:
    """0.5 ms a batch. Findings of less than 5 % are not reported."""
    found = of(run_of(batches(times=times), wall_ns=99 * MS))
    assert [one.gain_ns for one in found] == ([] if ms is None else [ms * MS])


def test_for_light_batches_workers_are_too_many() -> None:
    [advice] = of(run_of(batches(WORKERS, times=41), wall_ns=100 * MS))
    assert "If a batch takes less than a millisecond to make, load it in the process itself" in advice.remedy
    [advice] = of(run_of(batches(WORKERS, times=40), wall_ns=100 * MS))
    assert advice.remedy.startswith("Use more workers")


def test_the_function_that_takes_most_of_the_loading_is_named() -> None:
    lines = {"data.py:7 __getitem__ → Image.open": 6, "data.py:8 __getitem__": 2, "data.py:20 pad": 2}
    seen = [row(OUTSIDE, ALONE, python_line(line), calls=samples) for line, samples in lines.items()]
    [advice] = of(run_of([*batches(), *seen], wall_ns=100 * MS))
    assert advice.finding.startswith("The loop loads each batch itself, above all at data.py:7 __getitem__: its ")


def test_slow_workers_are_reported_without_their_start() -> None:
    """The first step waited 30 ms, the median one 10: 20 ms are the start of the workers."""
    [advice] = of(with_steps(run_of(batches(WORKERS), wall_ns=100 * MS), 30, 10, 10, 10))
    assert advice.finding == (
        "The loop waits 40.000ms (10.000ms per step on average) for the workers of its DataLoader: they are too slow. "
        "The first batch takes another 20.000ms."
    )
    assert advice.gain_ns == 40 * MS and advice.remedy.startswith("Use more workers")


def test_workers_that_are_slow_only_at_the_start_are_not_reported() -> None:
    assert of(with_steps(run_of(batches(WORKERS), wall_ns=100 * MS), 58, 1, 1, 0)) == []


def test_workers_without_steps() -> None:
    assert of(run_of(batches(WORKERS, times=9), wall_ns=100 * MS)) == []
    assert of(run_of(batches(WORKERS, times=10), wall_ns=100 * MS))[0].gain_ns == 60 * MS


def test_a_loader_with_an_unknown_label_is_reported() -> None:
    [advice] = of(run_of(batches(label("enumerate(DataPipe)#Mapper")), wall_ns=100 * MS))
    assert advice.finding == "The loop waits 60.000ms for data loading."


def test_the_label_may_be_inside_other_ranges() -> None:
    """As in the steps of torch.profiler, and in user ranges around a loop: here a step is two of them."""
    outer = (label("ProfilerStep*"), label("my loop"))
    inside = [(one[0], one[1], one[2], (*outer, *one[3]), *one[4:]) for one in batches()]
    run = with_steps(run_of([*inside, row(OUTSIDE, *outer, cpu_ns=20 * MS)], wall_ns=120 * MS), 30, 30)
    [advice] = of(run)
    assert advice.finding == (
        "The loop loads each batch itself: its DataLoader has no workers. That takes 60.000ms (30.000ms per step on "
        "average). 75% of that time is in no operator."
    )


def test_the_call_that_ends_an_epoch_does_not_count_as_a_batch() -> None:
    """torch's label is around it, too: 3 batches are 4 calls, so the time per batch is not reported."""
    loader = DataLoader(Samples(0.01), batch_size=2)
    with Profile(nn.Linear(256, 256)) as prof:
        for _ in loader:
            pass
    [calls] = [row.calls for row in prof.run.rows if row.frames and row.frames[-1].name == ALONE.name]
    [advice] = of(prof.run)
    assert len(loader) == 3 and calls == 4
    assert "per batch" not in advice.finding and "per step" not in advice.finding


def test_waiting_costs_nothing_while_the_device_works() -> None:
    measures = ("cpu_ns", "device_ns")
    cuda: dict[str, Any] = {"device": "cuda", "requested": measures, "measured": measures, "wall_ns": 100 * MS}
    assert of(run_of(batches(), busy_ns=(("cuda:0", 97 * MS),), **cuda)) == []
    assert of(run_of(batches(), busy_ns=(("cuda:0", 80 * MS),), **cuda))[0].gain_ns == 20 * MS


@pytest.mark.parametrize(
    "rows, wall_ns",
    [
        (batches(), 1200 * MS),  # 5 % of the time
        (batches(label("mine")), 100 * MS),
        ([row(0, ALONE, calls=4, cpu_ns=60 * MS)], 100 * MS),  # no loop: a layer does this
        ([row(OUTSIDE, ALONE, calls=4)], 100 * MS),
        ([row(OUTSIDE, ALONE, calls=4)], 0),
    ],
)
def test_other_work_is_not_reported(rows: list[Any], wall_ns: int) -> None:
    assert of(run_of(rows, wall_ns=wall_ns)) == []


def test_rows_that_are_selected_one_by_one_are_to_be_indexed_by_batch() -> None:
    """60 ms of the loader, in 4 fetches of 64 rows of two tensors: 0.1 ms a row is the limit."""
    selects = row(OUTSIDE, ALONE, op("aten::select"), calls=4 * 160, cpu_ns=0)
    [advice] = of(run_of([*batches(), selects], wall_ns=100 * MS))
    assert advice.cause == "The loop makes each batch row by row: 160 selections of a row, which are then stacked."
    assert "BatchSampler" in advice.remedy and advice.gain_ns == 60 * MS * 159 // 160
    slow = row(OUTSIDE, ALONE, op("aten::select"), calls=4 * 140, cpu_ns=0)
    [advice] = of(run_of([*batches(), slow], wall_ns=100 * MS))
    assert "its DataLoader has no workers" in advice.cause


def test_a_real_dataset_of_tensors_is_selected_row_by_row() -> None:
    data = torch.utils.data.TensorDataset(torch.rand(512, 16), torch.rand(512, 1))
    model = nn.Linear(16, 1)
    with Profile(model) as prof:
        for x, _ in DataLoader(data, batch_size=64):
            model(x)
    [advice] = of(prof.run)
    assert ": 113 selections of a row" in advice.cause  # 1,024 rows of two tensors in 9 fetches, of which one ends


@pytest.mark.parametrize(("cpus", "workers"), [(1, 1), (2, 1), (4, 3), (64, 4)])
def test_no_more_workers_are_recommended_than_processors_are_left(cpus: int, workers: int) -> None:
    [advice] = of(run_of(batches(), wall_ns=100 * MS, switches=(("usable_cpus", str(cpus)),)))
    assert f"num_workers={workers}, persistent_workers=True" in advice.remedy


@pytest.mark.parametrize(("threads", "wall_ms", "workers"), [(2, 121, False), (2, 119, True), (1, 121, True)])
def test_workers_need_processors_that_the_loop_does_not_use(threads: int, wall_ms: int, workers: bool) -> None:
    """60 ms of loading, on two processors: operators on both leave none, unless loading takes most of the time."""
    switches = (("usable_cpus", "2"), ("num_threads", str(threads)))
    [advice] = of(run_of(batches(), wall_ns=wall_ms * MS, switches=switches))
    assert ("num_workers=1" in advice.remedy) is workers
    assert ("once, before the loop" in advice.remedy) is not workers
    assert advice.gain_ns == (60 * MS - 4 * MS // 2 if workers else 60 * MS)


def test_loaders_with_workers_and_without_are_apart() -> None:
    found = of(run_of([*batches(), *batches(WORKERS, times=12)], wall_ns=200 * MS))
    assert [one.cause.startswith("The loop loads each batch itself") for one in found].count(True) == 1
    assert sum("60.000ms for the workers" in one.cause for one in found) == 1


def test_workers_that_start_in_each_pass_over_the_data_are_to_be_kept() -> None:
    """Four passes of ten batches: each first batch takes 50 ms, the others 1 ms. torch's label ends each pass, too."""
    waits = [50 if number % 10 == 0 else 1 for number in range(1, 41)]
    rows = [row(OUTSIDE, WORKERS, calls=44, cpu_ns=236 * MS), row(1, op("aten::mm"), cpu_ns=64 * MS)]
    run = with_steps(run_of(rows, wall_ns=300 * MS, steps=40, step_end=StepEnd.MARK), *waits)
    found = of(run)
    assert [("persistent_workers" in one.remedy, one.gain_ns) for one in found] == [(True, 200 * MS)]
