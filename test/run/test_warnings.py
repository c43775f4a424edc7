"""Warnings as data: the sentence of each code, saving and loading, and how ranks share them."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from build.hand_made import row, run_of

import torchprof
from torchprof.run.layers import Layer
from torchprof.run.meta import RunWarning
from torchprof.run.run import Run
from torchprof.run.sentences import SENTENCES
from torchprof.run.words import COMPILED_BEFORE

NAMES = ("Net.one", "Net.two")
WHERE = {"names": ("aten::sort", "mine"), "count": 3}
NO_STRAGGLER = {"verdict": "No straggler found.", "slow": (), "late": (), "may_be_chance": False}
FACTS: dict[str, dict[str, Any]] = {
    "ranks_chosen": {"count": 4096, "ranks": (0, 7), "missing": (9,), **NO_STRAGGLER},
    "calls_not_recorded": {"calls": 2},
    "called_by_others": {"callers": ("Net", "")},
    "label_cost": {"calls": 5, "cost_ns": 2500.5, "is_at_most": True, "wall_ns": 10_000},
    "clock_set": {"jump_ns": -2_000_000, "wall_ns": 10_000_000},
    "collectives_unmatched": {"count": 4},
    "buckets_uncertain": {"count": 4},
    "device_without_kernels": {"device": "MPS"},
    "no_device": {"device": "CUDA"},
    "device_not_recordable": {"device": "XPU"},
    "moved_to_device": {"device": "CUDA", "kind": "cuda"},
    "nothing_after_steps": {"steps": 7},
    "nothing_after_warmup": {"warmup": 7, "calls": 6},
    "compiler_unknown": {"reason": "no attribute 'V'"},
    "nothing_after_calls": {"warmup": 7, "calls": 6},
    "backward_incomplete": {"error": "no way back {0}."},
    "counted_on_data": {"reason": "no way {0}."},
    "stacks_left_out": {"modules": ("Linear", "Net")},
    "no_compiled_code": {"where": "Net.forward (net.py:5)", "reason": "no way {0}."},
    "too_many_models": {"count": 64},
    "thread_runs": {"line": "train.py:7 poll", "share": 0.5},
    "child_processes": {"count": 2},
    "calls_reached": {"calls": 3},
    "nothing_tried": {"passes": 16},
    "passes_sampled": {"recorded": 47, "count": 4000, "memory": True},
    "passes_chosen": {"recorded": 20, "count": 4000},
    "passes_slower": {"count": 4000, "first_ns": 7_000_000, "last_ns": 8_400_000},
    "passes_unusual": {"longest_ns": 7_000_000, "number": 1234, "line": "train.py:7 save", "extra_ns": 8_000_000},
    "start_up": {"before_ns": 3_000, "first_ns": 1_000, "calls": 2, "all_ns": 9_000},
    "memory_grows": {"nbytes": 4096},
    "long_start": {"start_ns": 3_000, "wall_ns": 5_000},
    "calls_on_other_threads": {"classes": (("Net", 2), ("Head", 1))},
    "trace_around_unread": {"where": "behind", "file": "t.json"},
    "trace_end_unread": {"file": "t.json", "reason": "it is cut"},
    "trace_goes_on": {"file": "t.json"},
    "trace_cut": {"file": "t.json", "events": 1234, "reason": ""},
    "trace_events_unread": {"file": "t.json", "lost": 2, "events": 9, "at": 12345},
    "trace_events_twice": {"file": "t.json", "count": 2},
    "nested_too_deep": {"most": 128},
    "trace_ranges_cross": {"file": "t.json", "count": 98},
    "clocks_differ": {"file": "t.json", "count": 3},
    "trace_events_missing": {"file": "t.json", "count": 2},
    "trace_of_processes": {"file": "t.json", "count": 2},
    "trace_without_numbers": {"file": "t.json"},
    "trace_without_operators": {"file": "t.json"},
    "trace_without_layers": {"file": "t.json", "has_call_stacks": True, "kinds": (("linear", 6), ("ReLU", 4))},
    "layers_by_alignment": {"count": 3},
    "ranges_as_layers": {"kinds": (("linear", 6), ("ReLU", 4))},
    "layers_in_doubt": {"share": 0.002},
    "adjacent_forwards": {"count": 2},
    "too_many_places": {"most": 4096, "modules": NAMES},
    "trace_left_out": {"file": "t.json", "why": "t.json is cut off."},
    "slow_start": {"first_ns": 900, "later_ns": 100.5, "shapes": "varying"},
    "launch_not_recorded": {"device": "CUDA", "device_ns": 40, "all_ns": 100},
    "session_outside": {"before_ns": 12_000_000, "after_ns": 100},
    "kernels_lost": {"lost": 3396, "launched": 3774, "unknown": True},
    "kernels_overlap": {"overlapping": 15, "kernels": 20, "unknown": True},
    "launched_before": {"kernels": 2, "device": "CUDA", "device_ns": 40, "all_ns": 100},
    "graph_breaks": {"places": ("net.py:3", "net.py:8")},
    "compiled_meanwhile": {"cpu_ns": 4_000, "by_layers": False},
    "layers_by_parameters": {"asked": True},
    "not_attributable": {"reason": COMPILED_BEFORE, "share": 0.25, "ns": 3_000_000},
    "machine_busy": {"delay_ns": 20_000, "wall_ns": 100_000},
    "uncounted_more": {"operators": 3, "calls": 17},
    **{code: WHERE for code in SENTENCES if code.startswith("uncounted_") and code != "uncounted_more"},
}
ALL = [RunWarning.of(code, NAMES, **FACTS.get(code, {})) for code in SENTENCES]


def test_each_code_has_a_sentence_with_its_facts(golden: Callable[..., None]) -> None:
    golden("\n".join(f"{warning.code}: {warning}" for warning in ALL))
    for warning in ALL:
        said = str(warning)
        assert said != warning.code and not said.startswith(f"{warning.code}:")
        assert said.endswith((".", "?")) and "{" not in said.replace("{0}", "")


def test_warnings_do_not_change_by_saving_and_loading(reloaded: Any) -> None:
    summed = replace(ALL[0], added=(((1, 3), 3), ((2,), 2)))
    run = run_of([row(0, cpu_ns=1)], warnings=(*ALL, summed))
    loaded = reloaded(run)
    assert loaded.meta.warnings == run.meta.warnings
    assert loaded.warnings == run.warnings and [*map(str, loaded.warnings)] == [*map(str, run.warnings)]
    assert all(warning.ranks == (0,) for warning in loaded.warnings)
    assert str(summed).startswith("Runs 1, 3 of the 3 added: Run 2 of the 2 added: Added or replaced ")


def run_of_rank(rank: int, *warnings: RunWarning) -> Run:
    return run_of([row(0, cpu_ns=1, rank=rank)], rank=rank, warnings=warnings)


def test_a_warning_of_many_ranks_is_stored_once(tmp_path: Path, reloaded: Any) -> None:
    """Each rank of a mixture of experts has the same idle experts: their names are in the file once, not per rank."""
    ranks, experts = 128, 2_000

    def never_called() -> RunWarning:  # made anew for each rank, as when each run comes from a file of its own
        return RunWarning.of("never_called", [f"Net.layers.0.experts.{number}" for number in range(experts)])

    def bytes_of(run: Run) -> int:
        assert reloaded(run) == run
        return (tmp_path / "run.json").stat().st_size

    merged = torchprof.merge(run_of_rank(rank, never_called()) for rank in range(ranks))
    without = torchprof.merge(run_of_rank(rank) for rank in range(ranks))
    names = sum(len(f'"{name}",') for name in never_called().layers)
    assert bytes_of(merged) - bytes_of(without) < names + 2 * ranks + 100
    (shown,) = merged.warnings
    assert shown == replace(never_called(), ranks=tuple(range(ranks)))
    for run in (merged, reloaded(merged)):
        assert len({id(warning) for meta in run.metas for warning in meta.warnings}) == 1


def test_lists_of_layers_that_differ_by_rank_are_stored_as_numbers(tmp_path: Path, reloaded: Any) -> None:
    """With expert parallelism each rank has its own idle experts: their names would be in the file once per rank."""
    ranks, experts = 16, 500
    paths = ["Net", "Net.experts", *(f"Net.experts.{number}" for number in range(experts))]
    layers = [Layer(tuple(path.split(".")), "Expert") for path in paths]
    idle = [[path for number, path in enumerate(paths) if number % ranks != rank] for rank in range(ranks)]
    runs = [
        run_of(
            [row(0, cpu_ns=1, rank=rank)], layers=layers, rank=rank, warnings=(RunWarning.of("never_called", names),)
        )
        for rank, names in enumerate(idle)
    ]
    merged = torchprof.merge(runs)
    assert reloaded(merged) == merged
    digits = sum(len(f"{number},") for names in idle for number in map(paths.index, names))
    without = torchprof.merge(replace(run, metas=(replace(run.meta, warnings=()),)) for run in runs)
    without.save(tmp_path / "without.json")
    assert (tmp_path / "run.json").stat().st_size - (tmp_path / "without.json").stat().st_size < digits + 100 * ranks


def test_a_warning_about_no_layer_of_the_run_keeps_its_name(reloaded: Any) -> None:
    run = run_of_rank(0, RunWarning.of("never_called", ["Net.a", "Other.gone", "7"]))
    assert reloaded(run).meta.warnings == run.meta.warnings


def test_each_rank_keeps_its_warnings_in_its_order(reloaded: Any) -> None:
    one, other = RunWarning.of("one", ["Net.a"]), RunWarning.of("other", share=0.5)
    runs = [run_of_rank(0, one, other), run_of_rank(1), run_of_rank(2, other, one, other), run_of_rank(3, one)]
    merged = torchprof.merge(runs)
    for run in (merged, reloaded(merged)):
        assert [meta.warnings for meta in run.metas] == [run.meta.warnings for run in runs]


def test_facts_that_are_equal_but_not_alike_are_stored_as_they_are(reloaded: Any) -> None:
    """1, 1.0 and True are equal in Python; their sentences differ."""
    runs = [run_of_rank(rank, RunWarning.of("x", count=count)) for rank, count in enumerate((1, True, 1.0, 1))]
    expected = ["x: count=1", "x: count=True", "x: count=1.0", "x: count=1"]
    merged = torchprof.merge(runs)
    for run in (merged, reloaded(merged)):
        assert [str(meta.warnings[0]) for meta in run.metas] == expected


def test_a_code_of_a_newer_torchprof_is_shown_with_its_facts() -> None:
    assert str(RunWarning.of("too_hot", ["Net.a"], degrees=95)) == "too_hot: Net.a; degrees=95"
    assert str(RunWarning.of("never_called", ["Net.a"], why="asleep")) == "never_called: Net.a; why='asleep'"


def test_warnings_that_follow_from_a_run_are_not_stored() -> None:
    run = run_of([row(0, cpu_ns=1)], wall_ns=100, run_delay_ns=50)
    assert run.meta.warnings == ()
    assert [warning.code for warning in run.warnings] == ["machine_busy"]


def test_a_busy_machine_matters_only_if_times_were_measured() -> None:
    run = run_of([row(0, macs=1)], wall_ns=100, run_delay_ns=50, measured=("macs", "flops"))
    assert run.warnings == ()


def test_a_code_without_its_facts_is_shown_without_a_sentence() -> None:
    assert str(RunWarning.of("slow_start")) == "slow_start"
    assert str(RunWarning.of("calls_not_recorded", calls=2)) == "calls_not_recorded: calls=2"
