"""The warnings and notes under reports: each appears if its condition holds, with the right figures, and only then."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import pytest
from build.hand_made import kernel, label, op, row, run_of
from build.warnings import run_warnings

from torchprof.analyze.sentences import about_flops, about_sums, warnings_of
from torchprof.analyze.warnings import about_processors, about_start
from torchprof.errors import some
from torchprof.measure.warnings import (
    about_callers,
    about_cost,
    about_labels,
    about_modules,
    about_uncalled,
    own_ns_of_layers,
)
from torchprof.run.formats import ranks_in_words
from torchprof.run.layers import Layer
from torchprof.run.measures import SampleKey, Spread
from torchprof.run.meta import Meta, RunWarning
from torchprof.run.run import Run
from torchprof.run.words import LAUNCH_NOT_RECORDED, NOT_SELECTED, OUTSIDE, PHASES

NET, A, B = (Layer(path, "Module", 9) for path in [("Net",), ("Net", "a"), ("Net", "b")])


def forward(layer: int, *durations: int) -> dict[SampleKey, Spread]:
    return {SampleKey(layer, "forward", 0, "cpu", "cpu_ns"): Spread.of(list(enumerate(durations)))}


def test_a_long_list_of_names_is_cut() -> None:
    assert some(["a", "b", "c"]) == "a, b, c"
    assert some(["a", "b", "c", "d", "e"]) == "a, b, c and 2 more"


# Several ranks


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ([2], "rank 2"),
        ([5, 2], "ranks 2 and 5"),
        ([0, 1], "ranks 0 and 1"),
        ([1, 2, 3], "ranks 1 to 3"),
        ([7, 0, 1, 2, 3, 5], "ranks 0 to 3, 5 and 7"),
        ([0, 1, 2, 9, 10, 11, 12], "ranks 0 to 2 and 9 to 12"),
    ],
)
def test_ranks_in_words(ranks: list[int], words: str) -> None:
    assert ranks_in_words(ranks) == words


def of_ranks(warnings: Sequence[Sequence[str]], ranks: Sequence[int] | None = None, size: int = 1) -> Run:
    run = run_of([row(0, cpu_ns=1)])
    numbers = range(len(warnings)) if ranks is None else ranks
    metas = tuple(Meta(("Net",), rank, size, warnings=run_warnings(*said)) for rank, said in zip(numbers, warnings))
    return replace(run, metas=metas)


def test_a_warning_of_several_ranks_appears_once_with_its_ranks() -> None:
    run = of_ranks([["Mine.", "All.", "All."], ["All."], ["Ours.", "All."], ["Ours.", "All."]])
    assert warnings_of(run) == ["All.", "Ranks 2 and 3: Ours.", "Rank 0: Mine."]
    assert warnings_of(of_ranks([["One.", "Two."]])) == ["One.", "Two."]
    for report in ("tree", "top", "summary", "ops", "python"):
        assert run.report(report).endswith("All.\nRanks 2 and 3: Ours.\nRank 0: Mine."), report


def test_of_a_thousand_ranks_the_first_warnings_are_shown() -> None:
    run = of_ranks([[f"It took {rank} ms.", "All."] for rank in range(1000)])
    *shown, last = warnings_of(run)
    assert shown == ["All.", *(f"Rank {rank}: It took {rank} ms." for rank in range(9))]
    assert last.startswith("991 more warnings of single ranks are hidden.")
    assert len(warnings_of(of_ranks([[f"{number}." for number in range(20)]]))) == 20


def test_the_sentences_of_warnings(golden: Callable[..., None]) -> None:
    """Each appears if its condition holds, with the right figures, and only then."""
    busy = Meta(("Net",), wall_ns=100_000_000, process_cpu_ns=80_000_000, run_delay_ns=20_000_000)
    quiet = [replace(busy, run_delay_ns=5_000_000), replace(busy, run_delay_ns=None), Meta(("Net",), run_delay_ns=0)]
    metas = [Meta(("Net",), rank=rank, wall_ns=100_000_000, run_delay_ns=(rank + 1) * 1_000_000) for rank in range(16)]
    metas[12] = replace(metas[12], warnings=run_warnings("Something else."))
    many = replace(run_of([row(0, calls=1)]), metas=tuple(metas))
    often = replace(many, metas=tuple(replace(meta, warnings=(), run_delay_ns=0) for meta in metas))
    slow = forward(0, 300, 100, 140)
    missing = [of_ranks([["All."]] * 6, [0, 1, 3, 4, 6, 7], 8), of_ranks([[]] * 3, [0, 1, 3], 4)]
    complete = [of_ranks([[]], [1], 2), of_ranks([[]] * 4, size=4), of_ranks([[]], [3])]  # the first: not merged yet
    said: dict[str, Iterable[object]] = {
        "a first call of 300 ns, then 120 on average": about_start(called(slow)),
        "shapes differ": about_start(called(slow, False)),
        "shapes are unknown": about_start(called(slow, None)),
        "no slow first call": [*about_start(called(forward(0, 200, 100, 100))), *about_start(called(forward(0, 900)))],
        "another thread, no label": about_labels(LAYERS, {1: 1, 2: 3}, [2]),
        "labels: 1 of 10 ms": about_cost(500, 2_000.0, 5_000_000, 10_000_000),
        # Calibration on a busy machine gave half of all time. The ranges themselves took less.
        "labels: at most the time of their ranges": about_cost(500, 82_000.0, 2_000_000, 80_000_000),
        "labels: little": about_cost(500, 82_000.0, 1_000_000, 80_000_000),
        "ready to run for a fifth of the time, without a processor": about_processors(busy),
        "not busy, or unknown": [sentence for meta in quiet for sentence in about_processors(meta)],
        "busy on many ranks: one warning": warnings_of(many),
        "not busy on many ranks": warnings_of(often),
        "added and removed": about_modules(["Net.new"], ["Net.old"]),
        "missing ranks": [sentence for run in missing for sentence in warnings_of(run)],
        "no missing ranks": [sentence for run in complete for sentence in warnings_of(run)],
        "sums over ranks": about_sums(of_ranks([[]] * 3)),
        "no sums": about_sums(run_of([row(0)])),
    }
    golden({title: "\n".join(map(str, sentences)) for title, sentences in said.items()})
    assert of_ranks([[]] * 3).report("tree").endswith("\n" + "".join(about_sums(of_ranks([[]] * 3))))


LAYERS = [NET, A, B]
ALL = {0, 1, 2}
NO_ROWS = run_of([]).rows


def test_a_run_without_faults_has_no_warnings() -> None:
    assert list(about_modules([], [])) == []
    assert list(about_labels(LAYERS, {}, [])) == []
    samples = {**forward(0, 100, 90, 80), **forward(1, 50), **forward(2, 40)}
    assert list(about_uncalled(NO_ROWS, LAYERS, ALL, set())) == []
    assert list(about_callers(LAYERS, ALL, ALL, dict.fromkeys([(OUTSIDE, 0), (0, 1), (0, 2), (1, 1)], 50), 100)) == []
    assert list(about_start(called(samples))) == []
    assert list(about_cost(1000, 1_000.0, 10**9, 10**9)) == []


@pytest.mark.parametrize(("ns", "operators", "is_said"), [(50, 1, True), (49, 1, False), (50, 0, False)])
def test_kernels_without_a_launch_have_a_warning(ns: int, operators: int, is_said: bool) -> None:
    """From 5 % of the time of all kernels, unless the device alone was recorded."""
    rows = [row(OUTSIDE, label(LAUNCH_NOT_RECORDED), kernel("gemm"), device_ns=ns), row(0, device_ns=1000 - ns)]
    rows += [row(0, op("aten::mm"), cpu_ns=1)] * operators
    sentences = warnings_of(run_of(rows, device="cuda", measured=("cpu_ns", "device_ns")))
    said = f"0.{ns:03}us of 1.000us CUDA time are kernels whose launch was not recorded: they are of no layer."
    assert any(said in str(sentence) for sentence in sentences) is is_said


def test_a_layer_that_was_never_called_has_a_warning() -> None:
    (warning,) = about_uncalled(NO_ROWS, LAYERS, {0, 1}, {2})
    assert warning == RunWarning.of("never_called", ["Net.b"])


def test_a_layer_whose_children_are_called_is_not_reported_as_never_called() -> None:
    (warning,) = about_uncalled(NO_ROWS, LAYERS, {1}, {0, 2})
    assert warning.layers == ("Net.b",)


def test_a_module_called_at_another_of_its_paths_is_not_reported_as_never_called() -> None:
    twice = [NET, Layer(("Net", "a"), "ReLU", 9, shared_with=(("Net", "b"),)), Layer(("Net", "b"), "ReLU", 9)]
    assert list(about_uncalled(NO_ROWS, twice, {0, 1}, {2})) == []


def test_of_layers_without_calls_the_outermost_with_parameters_is_reported() -> None:
    layers = [
        NET,
        Layer(("Net", "drop"), "Dropout"),
        Layer(("Net", "a"), "Sequential"),
        Layer(("Net", "a", "0"), "Linear", 9),
        Layer(("Net", "lazy"), "LazyLinear", None),
    ]
    (warning,) = about_uncalled(NO_ROWS, layers, {0}, {1, 2, 3, 4})
    assert warning.layers == ("Net.a", "Net.lazy")
    (warning,) = about_uncalled(NO_ROWS, layers, set(), {0, 1, 2, 3, 4})
    assert warning.layers == ("Net",)


@pytest.mark.parametrize(("where", "operator"), [(0, "aten::linear"), (0, "aten::relu"), (1, "aten::linear")])
def test_a_layer_may_use_the_parameters_of_a_child_without_calling_it(where: int, operator: str) -> None:
    rows = run_of([row(where, op(operator))], layers=LAYERS).rows
    silent = (where, operator) == (0, "aten::linear")
    assert [one.layers for one in about_uncalled(rows, LAYERS, {0, 1}, {2})] == ([] if silent else [("Net.b",)])


@pytest.mark.parametrize(
    ("caller", "name"), [((1, 2), "Net.a"), ((OUTSIDE, 2), "")], ids=["another layer", "code outside the model"]
)
def test_a_layer_not_called_by_its_parent_has_a_warning(caller: tuple[int, int], name: str) -> None:
    callers = {(0, 1): 50, caller: 10, (NOT_SELECTED, 1): 20}
    (warning,) = about_callers(LAYERS, ALL, ALL, callers, 1000)
    assert warning == RunWarning.of("called_by_others", ["Net.b"], callers=(name,))
    assert list(about_callers(LAYERS, ALL, ALL, callers, 1001)) == [], "less than 1 % of the recorded time"


def test_calls_that_bypass_a_layer_without_calls_have_no_warning() -> None:
    """As in Lightning, which calls ``training_step`` of the model, and its layers from there."""
    assert list(about_callers(LAYERS, ALL, {1, 2}, {(OUTSIDE, 1): 50, (OUTSIDE, 2): 50}, 100)) == []
    deep = [NET, Layer(("Net", "base"), "Wrapper"), Layer(("Net", "base", "model"), "Inner")]
    assert list(about_callers(deep, ALL, {0, 2}, {(OUTSIDE, 0): 100, (0, 2): 99}, 100)) == []
    (warning,) = about_callers(deep, ALL, {0, 1, 2}, {(OUTSIDE, 0): 100, (1, 2): 50, (0, 2): 40}, 100)
    assert warning == RunWarning.of("called_by_others", ["Net.base.model"], callers=("Net",))


def test_children_of_a_container_without_a_forward_have_no_warning() -> None:
    layers = [NET, Layer(("Net", "blocks"), "ModuleList"), Layer(("Net", "blocks", "0"), "Linear")]
    assert list(about_callers(layers, {0, 2}, {0, 2}, {(OUTSIDE, 0): 100, (0, 2): 100}, 100)) == []


def called(samples: Mapping[SampleKey, Spread], same_shapes: bool | None = True) -> Run:
    """A run with these calls of the model, and one operator without shapes."""
    (calls,) = [spread.count for key, spread in samples.items() if key.layer == 0]
    run = run_of([row(0, calls=calls), row(0, op("aten::relu"), calls=calls)])
    layers = (replace(run.layers[0], same_shapes=same_shapes), *run.layers[1:])
    return replace(run, layers=layers, rows=replace(run.rows, layers=layers), samples=samples)


def test_the_ranges_own_time_is_that_of_layers_outside_operators() -> None:
    rows = [
        row(0, cpu_ns=1),
        row(1, cpu_ns=2),
        row(1, phase=PHASES[2], cpu_ns=4),  # recompute
        row(NOT_SELECTED, cpu_ns=8),
        row(OUTSIDE, cpu_ns=16),
        row(1, op("aten::relu"), cpu_ns=32),
    ]
    assert own_ns_of_layers(run_of(rows).rows) == 15


def test_a_note_says_what_flops_are_summed_over() -> None:
    """Steps if there are any, else calls of the model; there is no note for a single call."""

    def said(calls: int, **meta: int) -> list[str]:
        return list(about_flops(run_of([row(0, calls=calls), row(1, op("aten::mm"), calls=2, flops=8)], **meta)))

    assert said(1) == said(1, steps=1) == []
    assert said(12) == said(12, steps=1) == ["MACs and FLOPs are summed over 12 calls of Net."]
    assert said(12, steps=3) == ["MACs and FLOPs are summed over 3 steps."]
    assert list(about_flops(run_of([row(0, calls=12)]))) == []
    measured = {"requested": ("macs", "flops", "uncounted"), "measured": ("macs", "flops", "uncounted")}
    run = run_of([row(0, calls=2), row(1, op("aten::mm"), calls=2, flops=8)], **measured)
    assert "MACs and FLOPs are summed over 2 calls of Net." in run.report("tree")
    assert "MACs and FLOPs are summed over 2 calls of Net." in run.report("ops")
    assert "FLOPs (summed over 2 calls of Net)" in run.report("headline")
