"""Limits on what layers cost: in a test suite, and on the command line."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from build.all_kinds import KINDS
from build.golden import message
from build.hand_made import kernel, op, row, run_of
from build.pairs import COUNTED, FC, MEMORY, calls, layer, made, simple, stepped

import torchprof
from torchprof.cli import main
from torchprof.comparison.budget import BudgetExceeded, check, limit_of
from torchprof.errors import TorchprofError
from torchprof.run.measures import SampleKey
from torchprof.run.run import Run
from torchprof.run.timeline import Memory
from torchprof.run.words import OUTSIDE, PHASES

FORWARD, BACKWARD = PHASES[:2]
PEAK = SampleKey(0, FORWARD, 0, "cpu", "peak_bytes")
OUTSIDE_PEAK = PEAK._replace(measure="device_peak_bytes")


def exceeded(run: Run, limits: Mapping[str, Any], baseline: Run | None = None) -> str:
    """The message of a budget that is exceeded; there must be no warning about noise."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(BudgetExceeded) as caught:
            torchprof.assert_budget(run, limits, baseline)
    return str(caught.value)


def kept(run: Run, limits: Mapping[str, Any], baseline: Run | None = None) -> bool:
    """Whether a budget is kept; there must be no warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torchprof.assert_budget(run, limits, baseline)
    return True


def counting(flops: int, calls: int = 2, **more: Any) -> Run:
    """Net, a and b: a has these FLOPs in all, and b 600."""
    rows = [row(0, calls=calls), row(1, calls=calls, flops=flops, macs=flops // 2), row(2, calls=calls, flops=600)]
    return run_of(rows, measured=COUNTED, requested=COUNTED, **more)


def remembering(peak: int, on: str = "cpu", **more: Any) -> Run:
    """A layer Net whose forward raised memory by ``peak``, its backward by half of it; the run by twice as much."""
    samples = {
        PEAK._replace(device=on): calls(peak, 5),
        PEAK._replace(device=on, phase=BACKWARD): calls(peak // 2),
        OUTSIDE_PEAK._replace(device=on, phase=BACKWARD): calls(2 * peak),
    }
    rows = [row(0, calls=2), row(0, op("aten::x"), phase=BACKWARD, cpu_allocated=1)]
    run = made([layer("Net")], rows, samples, measured=MEMORY, requested=MEMORY, **more)
    return replace(run, memory=(Memory(on, 0, 2 * peak),))


# What a limit is held against


def test_absolute_limits_are_for_one_call_of_the_model() -> None:
    run = counting(2400)  # 3000 in two calls
    assert kept(run, {"flops": 1500, "calls": 1, "params": 0})
    text = exceeded(run, {"flops": 1499})
    assert text == (
        "Limit exceeded: Net: flops 1.50 K, limit 1.50 K, per forward call of the model. "
        "The largest parts: Net.a (1.20 K), Net.b (300)."
    )
    assert kept(replace(run, samples={}), {"a: flops": "1.2K", "b: flops": 300.0})
    assert "Net.b: flops 300, limit 299" in exceeded(run, {"b: flops": 299})
    # However the baseline was recorded, the limit is for one call of the run itself.
    assert kept(run, {"flops": 1500}, counting(1, calls=7))
    assert exceeded(run, {"flops": 1499}, counting(1, calls=7)) == text


def test_a_relative_limit_is_exact_and_not_exceeded_by_an_equal_value() -> None:
    assert kept(counting(1040), {"a: flops": "+4%"}, counting(1000))
    assert kept(counting(1100), {"a: flops": "+10%"}, counting(1000))  # 1000 · 1.1 is no float
    text = exceeded(counting(1101), {"a: flops": "+10%"}, counting(1000))
    assert text == "Limit exceeded: Net.a: flops 1.10 K after, 1.00 K before: +10.1%, limit +10%."
    assert kept(counting(900), {"a: flops": "+0%"}, counting(1000))
    assert kept(counting(1010), {"a: flops": "+ 1.0 %".replace(" ", "")}, counting(1000))
    text = exceeded(counting(3300, calls=6), {"a: flops": "+9.9%"}, counting(1000))  # 550 a call, and 500 before
    assert "Net.a: flops 550 after, 500 before: +10.0%, limit +9.9%, per forward call of the model." in text


def test_the_layers_that_made_the_difference_are_named_largest_first() -> None:
    before = run_of([row(0, calls=1), row(1, flops=100), row(2, flops=50), row(3, flops=50)], measured=COUNTED)
    after = run_of([row(0, calls=1), row(1, flops=110), row(2, flops=40), row(3, flops=150)], measured=COUNTED)
    text = exceeded(after, {"flops": "+10%"}, before)
    assert text.endswith("Most of the difference: Net.b.0 (+100), Net.a (+10).")
    assert "Net.b: flops 190 after, 100 before: +90.0%" in exceeded(after, {"b: flops": "+10%"}, before)


def test_a_pattern_limits_each_matching_layer() -> None:
    after, before = counting(1500), counting(1000)
    text = exceeded(after, {"Net.*: flops": "+10%"}, before)
    assert text.startswith("Limit exceeded: Net.a: ") and "Net.b" not in text
    assert exceeded(after, {"*: flops": "+10%"}, before).startswith("Limit exceeded: Net: ")  # one step: the model
    assert exceeded(after, {"Net.*: flops": 10}).count("Limit exceeded") == 2
    with pytest.raises(TorchprofError, match="No module of the model matches the path 'c'"):
        torchprof.assert_budget(after, {"c: flops": 3})


def test_every_exceeded_limit_is_reported() -> None:
    text = exceeded(counting(2400), {"flops": 1, "calls": 0, "macs": "1M"})
    assert [line.split(":")[2].split()[0] for line in text.splitlines()] == ["flops", "calls"]


def test_the_peak_of_the_run_and_of_a_layer() -> None:
    run = remembering(1000)
    assert kept(run, {"peak": 2000, "Net: peak": 1000, "cpu_peak": 1000, "backward_cpu_peak": 500})
    text = exceeded(run, {"peak": "1.9KB"})
    assert text == "Limit exceeded: the run: peak 1.95 KB, limit 1.90 KB. It was reached in Net, backward."
    elsewhere = {**run.samples, OUTSIDE_PEAK._replace(layer=-1, rank=1): calls(2100)}  # another rank, and outside
    assert "reached in (outside), forward." in exceeded(replace(run, samples=elsewhere), {"peak": 1})
    assert exceeded(run, {"Net: peak": 999}) == "Limit exceeded: Net: peak 1000 B, limit 999 B."
    assert "+50.0%, limit +49%" in exceeded(remembering(1500), {"peak": "+49%"}, run)
    assert "Net: peak 1.46 KB after, 1000 B before: +50.0%" in exceeded(remembering(1500), {"Net: peak": "+49%"}, run)


def test_the_peak_is_that_of_the_device_if_there_is_one() -> None:
    cuda = remembering(1000, "cuda:0", device="cuda")
    both = replace(cuda, memory=(Memory("cpu", 0, 9000), *cuda.memory), samples={**cuda.samples, PEAK: calls(7000)})
    assert "the run: peak 1.95 KB" in exceeded(both, {"peak": 1})
    assert "Net: peak 1000 B" in exceeded(both, {"Net: peak": 1})
    assert "Net: cpu_peak 6.84 KB" in exceeded(both, {"cpu_peak": 1})


def test_an_added_layer_exceeds_every_relative_limit() -> None:
    before = made([layer("Net")], [row(0, calls=1, cpu_ns=10)])
    after = made([layer("Net"), layer("Net.fc", **FC)], [row(0, calls=1, cpu_ns=10), row(1, cpu_ns=1)])
    text = exceeded(after, {"fc: cpu_total": "+500%"}, before)
    assert "0.001us after, 0.000us before: from nothing, limit +500%" in text
    assert "Net.fc: params 40 after" in exceeded(after, {"fc: params": "+5%"}, before)


def test_a_removed_layer_does_not_pass() -> None:
    with_fc = made([layer("Net"), layer("Net.fc", **FC)], [row(0, calls=1, cpu_ns=10), row(1, cpu_ns=1)])
    without = made([layer("Net")], [row(0, calls=1, cpu_ns=10)])
    with pytest.raises(TorchprofError, match=r"Net\.fc was removed"):
        torchprof.assert_budget(without, {"fc: cpu_total": "+5%"}, with_fc)


def test_a_renamed_layer_is_found_under_both_names() -> None:
    before = made([layer("Net"), layer("Net.fc", **FC)], [row(0, calls=1), row(1, flops=10)], measured=COUNTED)
    after = made([layer("Net"), layer("Net.head", **FC)], [row(0, calls=1), row(1, flops=20)], measured=COUNTED)
    for name in ("fc", "head"):
        assert "Net.head: flops 20 after, 10 before" in exceeded(after, {f"{name}: flops": "+5%"}, before)


def test_most_of_the_difference_is_more_than_half_of_it() -> None:
    def run(*flops: int, own: int = 0) -> Run:
        layers = [layer("Net"), *(layer(f"Net.l{number}") for number in range(len(flops)))]
        rows = [row(0, calls=1, flops=own), *(row(at, calls=1, flops=one) for at, one in enumerate(flops, 1))]
        return made(layers, rows, measured=COUNTED)

    text = exceeded(run(*[20] * 6), {"flops": "+10%"}, run(*[10] * 6))  # 30 of 60
    assert text.endswith(" The largest parts of the difference: Net.l0 (+10), Net.l1 (+10), Net.l2 (+10).")
    # What a layer does by itself, those below have no part in.
    for limits, baseline in (({"self_flops": "+10%"}, run(10, own=1)), ({"self_flops": 1}, None)):
        assert "l0" not in exceeded(run(30, own=2), limits, baseline)


def test_work_outside_all_layers_can_be_limited() -> None:
    before, after = (
        run_of(
            [
                row(0, calls=2, cpu_ns=10),
                row(OUTSIDE, op("aten::loss"), cpu_ns=by, cpu_allocated=by),
                row(OUTSIDE, op("aten::add"), phase=BACKWARD, cpu_ns=7),
            ],
            measured=MEMORY,
        )
        for by in (100, 130)
    )
    text = exceeded(after, {"(outside): cpu_total": "+29%"}, before)
    assert text.startswith("Limit exceeded: (outside): cpu_total 0.130us after, 0.100us before: +30.0%, limit +29%.")
    assert "(outside): cpu_total 0.065us, limit 0.064us, per forward call" in exceeded(
        after, {"(outside): cpu_total": "64ns"}
    )
    assert "(outside): cpu_mem 65 B" in exceeded(after, {"(outside): cpu_mem": 64})
    assert kept(after, {"(outside): cpu_mem": "+30%", "(outside) : backward_cpu_total": "+0%"}, before)
    without = run_of([row(0, calls=2, cpu_ns=10)])
    assert kept(without, {"(outside): cpu_total": "1ns"})  # there was none
    assert "from nothing" in exceeded(after, {"(outside): cpu_total": "+5%"}, without)
    assert kept(run_of([row(0, calls=2, cpu_ns=10)], paths=(("Net",),)), {"(outside): cpu_total": "0ns"})
    for measure in ("params", "calls"):
        with pytest.raises(TorchprofError, match=f"outside of all layers has no {measure}"):
            torchprof.assert_budget(after, {f"(outside): {measure}": 3})
    with pytest.raises(TorchprofError, match="outside of all layers has no peak"):
        torchprof.assert_budget(remembering(9), {"(outside): peak": 3})
    with pytest.raises(TorchprofError, match="did not measure 'flops'"):
        torchprof.assert_budget(after, {"(outside): flops": 3})


# Noise


def timed(values: Sequence[int]) -> Run:
    return stepped([100] * len(values), values)


QUIET, SLOWER = [10_000 + at for at in range(10)], [13_000 + at for at in range(10)]


def test_a_time_beyond_noise_fails() -> None:
    text = exceeded(timed(SLOWER), {"cpu_total": "+10%"}, timed(QUIET))
    assert text == (
        "Limit exceeded: Net: cpu_total 131.045us after, 101.045us before: +29.7%, limit +10%. "
        "Most of the difference: Net.a (+30.000us)."
    )
    assert kept(timed(SLOWER), {"cpu_total": "+30%"}, timed(QUIET))


def test_a_time_within_noise_warns_and_does_not_fail() -> None:
    noisy = [10_000 + 2_000 * (at % 5) for at in range(10)]
    more = [value + 1_500 for value in noisy]
    with pytest.warns(UserWarning, match=r"Exceeded within noise, so it passes: Net\.a: cpu_total .*10\.7%"):
        torchprof.assert_budget(timed(more), {"a: cpu_total": "+10%"}, timed(noisy))


def test_one_call_that_met_a_busy_machine_is_noise() -> None:
    hiccup = [value + 1 for value in QUIET[:-1]] + [900_000]
    with pytest.warns(UserWarning, match=r"the median went from 10\.104us to"):
        torchprof.assert_budget(timed(hiccup), {"cpu_total": "+10%"}, timed(QUIET))
    with pytest.warns(
        UserWarning, match=r"within noise, so it passes.*the median is 10\.005us, the interquartile range 0.004us"
    ):
        torchprof.assert_budget(timed(hiccup), {"a: cpu_total": "11us"})


def test_slower_beyond_noise_but_with_a_median_within_the_limit_does_not_fail() -> None:
    little = [value + 500 for value in QUIET[:-1]] + [900_000]  # the median rose by 5 %, the sum by far more
    with pytest.warns(UserWarning, match="within noise, so it passes"):
        torchprof.assert_budget(timed(little), {"cpu_total": "+10%"}, timed(QUIET))
    assert "Limit exceeded" in exceeded(timed(little), {"cpu_total": "+4%"}, timed(QUIET))


def test_with_unknown_noise_a_time_fails_and_the_message_says_so() -> None:
    text = exceeded(simple(2), {"cpu_total": "+10%"}, simple())
    assert text.endswith("It was not compared with noise: the runs have too few calls or steps.")
    assert "It was not compared with noise" in exceeded(timed(SLOWER[:3]), {"cpu_total": "+10%"}, timed(QUIET[:3]))
    assert "It was not compared with noise" in exceeded(simple(), {"cpu_total": "1ns"})


def test_the_step_can_be_limited() -> None:
    text = exceeded(timed(SLOWER), {"step": "+10%"}, timed(QUIET))  # a step lasts twice as long as the model
    assert text == "Limit exceeded: the run: step 26.209us after, 20.209us before: +29.7%, limit +10%."
    assert kept(timed(SLOWER), {"step": "+30%"}, timed(QUIET)) and kept(timed(SLOWER), {"step": "26.209us"})
    assert "the run: step 26.209us, limit 26.000us." in exceeded(timed(SLOWER), {"step": "26us"})
    hiccup = [value + 1 for value in QUIET[:-1]] + [900_000]
    with pytest.warns(
        UserWarning, match=r"within noise, so it passes: the run: step 198.*median went from 20\.209us to"
    ):
        torchprof.assert_budget(timed(hiccup), {"step": "+10%"}, timed(QUIET))
    assert "It was not compared with noise" in exceeded(timed(SLOWER[:3]), {"step": "+10%"}, timed(QUIET[:3]))
    with pytest.raises(TorchprofError, match=r"a step belongs to the run, not to a layer\. Write 'step' alone"):
        torchprof.assert_budget(timed(QUIET), {"a: step": "1s"})
    for limits in ({"step": "1s"}, {"a: step": "1s"}):
        with pytest.raises(TorchprofError, match=r"did not measure 'step'.*the step prof\.step\(\)"):
            torchprof.assert_budget(simple(), limits)
    with pytest.raises(TorchprofError, match="'step'"):
        torchprof.assert_budget(timed(QUIET), {"stepp": "1s"})
    with pytest.raises(TorchprofError, match="as in 12ms"):
        torchprof.assert_budget(timed(QUIET), {"step": 3})


def test_an_absolute_time_has_its_own_noise() -> None:
    assert "Net.a: cpu_total 13.005us, limit 12.000us" in exceeded(timed(SLOWER), {"a: cpu_total": "12us"})
    wide = [10_000 + 1_000 * at for at in range(10)]  # median 14.5, interquartile range 4.5
    with pytest.warns(UserWarning, match=r"median is 14\.500us, the interquartile range 4\.500us"):
        torchprof.assert_budget(timed(wide), {"a: cpu_total": "11us"})
    assert "Limit exceeded" in exceeded(timed(wide), {"a: cpu_total": "9.9us"})


# What is no limit


def test_what_is_no_limit(golden: Callable[..., None], tmp_path: Path, cli: Any) -> None:
    amounts = [3, "3MB", "3", "-3ms", "3%", "-3%", "+3ms", "", None, True, "+10%"]
    names = ["", "a: b: ", 3, "nothing: params", "b.*.c: params", "<script>\x1b: params"]
    limits: list[Any] = [{}, [("cpu_total", 3)], *({"cpu_total": amount} for amount in amounts)]
    limits += [{"cpu_totl": "3ms"}, {"flops": 3}, {"cuda_total": "3ms"}, {"peak": 3}, {"a: peak": 3}]
    limits += [{"params": float("nan")}, {"params": float("inf")}, {"params": -1}, *({name: 3} for name in names)]
    said = {repr(each): message(torchprof.assert_budget, simple(), each) for each in limits}
    file = tmp_path / "a.json"
    simple().save(file)
    limits = ["", "cpu_total", ">", "> 3ms", "cpu_total >", "flops > 3 > 4", "cpu_total < 3ms", "a b > 3ms"]
    for text in (*limits, "cpu_total >= 3ms"):
        said[f"--fail-if '{text}'"] = cli("compare", str(file), str(file), "--fail-if", text, code=2).err.strip()
    golden(said)


@pytest.mark.parametrize("bad", [5, None, ["a.json"]])
def test_the_error_names_the_argument_that_is_no_run(bad: Any) -> None:
    calls = {
        "run": [(bad, {"calls": 1}), (bad, {"calls": "+1%"}, simple())],
        "baseline": [(simple(), {"calls": 1}, bad or 0)],
    }
    for name, arguments in calls.items():
        for each in arguments:
            said = message(torchprof.assert_budget, *each)
            assert re.match(rf"{name} is \w+, not a run. assert_budget takes `prof\.run`", said)


def test_an_unknown_figure_does_not_pass() -> None:
    run = run_of([row(0, calls=1), row(1, op("aten::f"), uncounted=1, flops=3)], measured=COUNTED)
    for limits in ({"a: flops": "1P"}, {"flops": "1P"}, {"b: cpu_total": "1s"}, {"*: flops": "1P"}):
        with pytest.raises(TorchprofError, match=r"is unknown in the run.*cannot pass"):
            torchprof.assert_budget(run, limits)
    known = run_of([row(0, calls=1), row(1, flops=3)], measured=COUNTED)
    with pytest.raises(TorchprofError, match="is unknown before"):
        torchprof.assert_budget(known, {"a: flops": "+10%"}, run)
    assert kept(known, {"a: flops": 3})


def test_a_lower_bound_above_an_absolute_limit_exceeds_it() -> None:
    """30 FLOPs in two calls, and an operator without a formula: at least 15 per call."""
    run = run_of([row(0, calls=2), row(1, op("aten::f"), calls=3, uncounted=3, flops=30)], measured=COUNTED)
    assert exceeded(run, {"flops": 14}) == (
        "Limit exceeded: Net: flops ≥ 15, limit 14, per forward call of the model. The largest parts: Net.a (≥ 15)."
    )
    for limits in ({"flops": 15}, {"flops": "1P"}):
        with pytest.raises(
            TorchprofError, match=r"unknown in the run, but ≥ 15\. Not counted: aten::f \(3 calls, in Ne"
        ):
            torchprof.assert_budget(run, limits)
    with pytest.raises(TorchprofError, match="unknown in the run, but"):
        torchprof.assert_budget(run, {"flops": "+0%"}, counting(2))


def test_the_error_says_why_a_figure_is_unknown() -> None:
    """Of a layer that was compiled into another, of a kernel without operator, and of one kernel for two layers."""
    layers = [layer("Net"), layer("Net.a", compiled=True), layer("Net.b")]
    rows = [row(0, calls=1, cpu_ns=9), row(2, kernel("mine"), uncounted=1, flops=3)]
    run = made(layers, rows, measured=COUNTED)
    for limits, reason in (
        ({"b: flops": "1K"}, r"≥ 3\. Not counted: 1 kernel that no operator launched: mine \(in Net\.b\)\. A limit"),
        ({"b: backward_flops": "1K"}, "did not measure"),
        ({"a: calls": 3}, r"in the run\. It was never called, or was not selected\. A limit"),
    ):
        with pytest.raises(TorchprofError, match=reason):
            torchprof.assert_budget(run, limits)
    fused = KINDS["compiled_fused"]()
    with pytest.raises(
        TorchprofError, match=r"≥ 0\.020us\. Compiled kernels that may have worked for it count for a l"
    ):
        torchprof.assert_budget(fused, {"blocks.0.fc1: cpu_total": "1s"})
    assert "fc1: cpu_total ≥ 0.020us, limit 0.010us" in exceeded(fused, {"blocks.0.fc1: cpu_total": "10ns"})


def test_a_negative_baseline_has_no_relative_limit() -> None:
    freed, more = (run_of([row(0, calls=1, cpu_freed=by)], measured=MEMORY) for by in (30, 10))
    with pytest.raises(TorchprofError, match="had -30 B before: a negative value has no increase"):
        torchprof.assert_budget(more, {"cpu_mem": "+10%"}, freed)
    assert kept(more, {"cpu_mem": 0})


def test_limits_are_parsed_as_documented() -> None:
    limit = limit_of(" features.*:cpu_total>+12.5% ")
    assert (limit.pattern, limit.measure, limit.bound, limit.share) == ("features.*", "cpu_total", "+12.5%", 0.125)
    assert limit_of("a: b.c: flops > 3G").pattern == "a: b.c"  # the last colon: names of layers may hold some
    diff = torchprof.compare(simple(), simple())
    for amount in ("75ns", "0.075us", "0.075µs", "0.001ms", "1s"):
        assert check(diff, [limit_of(f"cpu_total > {amount}")])[0].failures == ()
    for amount in ("37ns", "0.037us", "0.037 µs", "0.000037ms", "0.000000037s"):  # 75 ns in two calls
        assert len(check(diff, [limit_of(f"cpu_total > {amount}")])[0].failures) == 1


# The command, and pytest


def command(before: Run, after: Run, tmp_path: Path, *limits: str) -> int:
    before.save(tmp_path / "a.json")
    after.save(tmp_path / "b.json")
    files = [str(tmp_path / "a.json"), str(tmp_path / "b.json")]
    return main(["compare", *files, *(argument for limit in limits for argument in ("--fail-if", limit))])


def test_the_command_exits_with_1_and_says_which_layer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    limits = ("cpu_total > +10%", "calls > 1")
    assert command(timed(QUIET), timed(SLOWER), tmp_path, *limits) == 1
    seen = capsys.readouterr()
    assert seen.err.startswith("Limit exceeded: Net: cpu_total 131.045us after") and seen.err.count("\n") == 1
    assert "Net.a (+30.000us)" in seen.err
    assert seen.out.startswith("Net: CPU total 101.045us → 131.045us (+29.7%), slower")
    assert "Limit kept: calls > 1" in seen.out and "Limit kept: cpu" not in seen.out


def test_the_command_exits_with_0_within_noise_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hiccup = [value + 1 for value in QUIET[:-1]] + [900_000]
    assert command(timed(QUIET), timed(hiccup), tmp_path, "cpu_total > +10%") == 0
    seen = capsys.readouterr()
    assert "Limit kept: cpu_total > +10%\nExceeded within noise, so it passes: Net" in seen.out
    assert seen.err == ""


@pytest.mark.parametrize(
    "limit", ["flops > +1%", "zzz: cpu_total > +1%", "b: cpu_total > 1s", "cpu_total > +1", "nothing > 1"]
)
def test_the_command_exits_with_2_for_a_limit_that_cannot_be_checked(
    limit: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_of([row(0, calls=1), row(1, cpu_ns=5)])
    assert command(run, run, tmp_path, "calls > 0", limit) == 2
    assert limit.split(" >")[0].split(": ")[-1] in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [["a.json"], ["a.json", "none.json"], ["a.json", "a.json", "--top", "-1"], ["a.json", "a.json", "-o", "x.foo"]],
)
def test_bad_input_exits_with_2(arguments: list[str], here: Path) -> None:
    simple().save("a.json")
    try:
        code: object = main(["compare", *arguments])
    except SystemExit as end:
        code = end.code
    assert code == 2
    assert [path.name for path in here.iterdir()] == ["a.json"]


def test_hostile_names_in_a_failure_stay_on_their_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    layers = [layer("Net"), replace(layer("Net"), path=("Net", "x\n\x1b[31m|"))]
    runs = [made(layers, [row(0, calls=1), row(1, flops=by)], measured=COUNTED) for by in (1, 9)]
    assert command(*runs, tmp_path, "Net.*: flops > +10%") == 1
    seen = capsys.readouterr()
    assert "\x1b" not in seen.err + seen.out and seen.err.count("\n") == 1


def test_pytest_shows_the_sentences_and_the_line_of_the_test(tmp_path: Path) -> None:
    counting(2400).save(tmp_path / "run.json")
    code = """
        import torchprof

        def test_it():
            torchprof.assert_budget("run.json", {"flops": "1K", "a: flops": "1K"})
    """
    (tmp_path / "test_it.py").write_text(textwrap.dedent(code), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_it.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 1
    assert "BudgetExceeded: Limit exceeded: Net: flops 1.50 K, limit 1.00 K, per forward call" in done.stdout
    assert "budget.py" not in done.stdout.split("short test summary")[0]


def test_without_calls_of_the_model_a_limit_on_a_sum_raises() -> None:
    run = run_of([row(1, calls=10, flops=50)], measured=COUNTED, paths=(("Net", "a"),))
    for limits, baseline in (({"a: flops": 70}, None), ({"a: flops": "+0%"}, run)):
        with pytest.raises(TorchprofError, match="the run has no calls of a model and no steps"):
            torchprof.assert_budget(run, limits, baseline)
    assert kept(replace(run, metas=(replace(run.meta, steps=10),)), {"a: flops": 5})


def test_a_peak_is_the_largest_of_all_phases() -> None:
    """Forward 1 and backward 10 before, forward 5 and backward 4 after: 10 became 5."""

    def peaks(forward: int, backward: int) -> Run:
        samples = {PEAK: calls(forward), PEAK._replace(phase=BACKWARD): calls(backward)}
        return made([layer("Net")], [row(0), row(0, op("aten::x"), phase=BACKWARD, cpu_ns=1)], samples)

    assert kept(peaks(5, 4), {"Net: peak": "+0%"}, peaks(1, 10))
    assert "5 B after, 4 B before" in exceeded(peaks(5, 4), {"Net: peak": "+0%"}, peaks(4, 3))
    rows = [row(0, cpu_ns=1), row(1), row(0, op("aten::x"), phase=BACKWARD, cpu_ns=1)]
    of_a_alone = {PEAK._replace(layer=1): calls(5), PEAK._replace(phase=BACKWARD): calls(4)}
    unknown = made([layer("Net"), layer("Net.a")], rows, of_a_alone)
    with pytest.raises(TorchprofError, match="is unknown"):
        torchprof.assert_budget(unknown, {"Net: peak": "9 B"})
