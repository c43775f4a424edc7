"""Pipelines from hand-made events, against calculations by hand and a count of each ns."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from build.events import MAIN, kernel, label, of_pipeline, op, run_of_events, user_label, walk_of
from build.examples import examples
from build.exchanges import exchange
from hypothesis import given
from hypothesis import strategies as st

from torchprof.attribute.event_columns import EventColumns
from torchprof.attribute.events import PIPELINE, Event, Site
from torchprof.attribute.pipeline_ranges import action_label, step_label, steps_in, with_folded_names
from torchprof.attribute.rule import Attribution
from torchprof.measure import pipelines
from torchprof.measure.pipelines import Pipelines
from torchprof.run.layers import Layer
from torchprof.run.timeline import KEPT_STEPS, Pipeline, StageAction
from torchprof.run.words import OUTSIDE

OTHER = 2  # a thread
NET, SECOND = "torchprof:Net%20(stage%201)", "torchprof:Net%20(stage%203)"
LAYERS = (Layer(("Net (stage 1)",), "Net"), Layer(("Net (stage 3)",), "Net"))
SITES = {NET: Site((0,)), SECOND: Site((1,))}
STEP = "step ScheduleInterleaved1F1B 4 6,7"
SEND_RECV = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"


def pipelines_of(*events: Event) -> dict[str, Pipeline]:
    """The pipelines of rank 7, by device. Events are given in any order, kernels last."""
    ordered = sorted(events, key=lambda event: (event.device != "cpu", event.start_ns, -event.end_ns))
    attribution = Attribution(SITES, [layer.path for layer in LAYERS])
    columns = EventColumns.of(ordered)
    observer = Pipelines(steps_in(columns), columns, 7)
    walk = [*walk_of(attribution, ordered)]
    assert [*observer.observe(walk)] == walk
    return {pipeline.device: pipeline for pipeline in observer.result().get("pipelines", ())}


def figures(pipeline: Pipeline) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    return {f"{action.stage}{action.what}{action.microbatch}": action[3:] for action in pipeline.actions}


def test_a_step_on_the_cpu() -> None:
    pipeline = pipelines_of(
        of_pipeline(STEP, 0, 100),
        of_pipeline("wait", 1, 9),
        of_pipeline("1F0", 10, 30),
        label(NET, 12, 28),
        op("aten::mse_loss", 31, 35),  # other work, as is all that the schedule does beside waiting
        of_pipeline("wait", 36, 38),
        of_pipeline("wait for sends", 38, 40),  # their receivers are late, not the senders
        of_pipeline("wait", 40, 45),
        of_pipeline("3F0", 46, 60),
        label(SECOND, 47, 59),
        of_pipeline("3B0", 60, 80),
        of_pipeline("wait for sends", 81, 90),
    )["cpu"]
    assert pipeline == Pipeline(
        "cpu",
        7,
        "ScheduleInterleaved1F1B",
        4,
        (6, 7),
        ((1, 0), (3, 1)),
        1,
        (100,),
        (
            StageAction(1, "F", 0, (20,), (8,)),
            StageAction(3, "F", 0, (14,), (2 + 5,)),
            StageAction(3, "B", 0, (20,), (0,)),
        ),
    )


def test_an_action_inside_another_counts_once() -> None:
    pipeline = pipelines_of(
        of_pipeline(STEP, 0, 100),
        of_pipeline("1F0", 10, 60),
        of_pipeline("3B0", 20, 30),
        of_pipeline("wait", 32, 35),  # a part of the forward
        of_pipeline("3B1", 40, 50),
        of_pipeline("wait", 60, 70),
        of_pipeline("1F1", 70, 80),
    )["cpu"]
    assert figures(pipeline) == {
        "1F0": ((30,), (0,)),
        "3B0": ((10,), (0,)),
        "3B1": ((10,), (0,)),
        "1F1": ((10,), (10,)),
    }


def test_actions_of_two_threads_overlap() -> None:
    pipeline = pipelines_of(
        of_pipeline(STEP, 0, 100),
        of_pipeline("wait", 0, 9),
        of_pipeline("1F0", 10, 60),
        of_pipeline("wait", 15, 19, OTHER),
        of_pipeline("3B0", 20, 90, OTHER),
    )["cpu"]
    assert figures(pipeline) == {"1F0": ((50,), (9,)), "3B0": ((70,), (0,))}


def test_the_root_of_a_stage_is_the_module_that_its_forward_calls() -> None:
    pipeline = pipelines_of(
        label(NET, 1, 2),  # outside of the step
        of_pipeline(STEP, 5, 100),
        of_pipeline("1F0", 10, 30),
        of_pipeline("3F0", 40, 60),
        label(SECOND, 41, 59),
        label(NET, 45, 50),
    )["cpu"]
    assert pipeline.roots == ((1, OUTSIDE), (3, 1))


def test_a_stage_that_calls_several_modules_has_no_root() -> None:
    """The module around them was not profiled. In one stage they are called one after the other, in one in turns."""
    pipeline = pipelines_of(
        of_pipeline(STEP, 5, 100),
        of_pipeline("1F0", 10, 30),
        label(NET, 11, 20),
        label(SECOND, 21, 29),
        of_pipeline("3F0", 40, 50),
        label(SECOND, 41, 49),
        of_pipeline("3F1", 60, 70),
        label(NET, 61, 69),
    )["cpu"]
    assert pipeline.roots == ((1, OUTSIDE), (3, OUTSIDE))


def test_the_steps_with_the_most_frequent_actions_count() -> None:
    """An evaluation between the steps of a training, and after them, is left out, and what is in no step."""
    events = []
    for at in (0, 200, 400):
        events += [of_pipeline(STEP, at, at + 100), of_pipeline("1F0", at + 10, at + 20 + at // 100)]
        events += [of_pipeline("1B0", at + 30, at + 40)]
    for at in (300, 500):
        events += [of_pipeline(STEP, at, at + 50), of_pipeline("1F0", at + 10, at + 20)]
    events += [of_pipeline("1F0", 600, 620), of_pipeline(STEP, 700, 800)]
    pipeline = pipelines_of(*events)["cpu"]
    assert (pipeline.steps, pipeline.step_ns) == (3, (100, 100, 100))
    assert figures(pipeline)["1F0"][0] == (10, 12, 14)


def test_a_step_that_the_recording_cuts_is_none_of_two() -> None:
    whole = [of_pipeline(STEP, 0, 100), of_pipeline("1F0", 10, 20), of_pipeline("1B0", 30, 40)]
    pipeline = pipelines_of(*whole, of_pipeline(STEP, 200, 220), of_pipeline("1F0", 210, 220))["cpu"]
    assert (pipeline.steps, pipeline.step_ns, len(pipeline.actions)) == (1, (100,), 2)


def test_only_the_last_steps_are_kept() -> None:
    events = []
    for number in range(KEPT_STEPS + 5):
        at = number * 1000
        events += [of_pipeline(STEP, at, at + 900), of_pipeline("1F0", at, at + number)]
    pipeline = pipelines_of(*events)["cpu"]
    assert pipeline.steps == KEPT_STEPS + 5
    assert figures(pipeline)["1F0"][0] == tuple(range(5, KEPT_STEPS + 5))


def test_cycles_add_up() -> None:
    def cycle(steps: int, *names: str) -> Pipeline:
        events = []
        for at in range(0, steps * 100, 100):
            events += [of_pipeline(STEP, at, at + 100)]
            events += [of_pipeline(name, at + index, at + index + 1) for index, name in enumerate(names)]
        return pipelines_of(*events)["cpu"]

    both = cycle(60, "1F0", "1B0") + cycle(50, "1F0", "1B0")
    assert (both.steps, len(both.step_ns), len(both.actions[0].took_ns)) == (110, KEPT_STEPS, KEPT_STEPS)
    assert (cycle(3, "1F0", "1B0") + cycle(2, "1F0")).actions[-1].what == "B"
    assert (cycle(3, "1F0", "1B0") + cycle(4, "1F0")).actions[-1].what == "F"
    whole, part = cycle(3, "1F0", "1B0"), cycle(3, "1F0")
    assert whole + part == part + whole == whole


def test_a_step_on_a_device() -> None:
    """Actions are launched in advance. What one launches on any thread is its work, and what runs meanwhile is no
    waiting, nor is a time without kernels; exchanges are."""
    found = pipelines_of(
        op("aten::a", 1, 2, correlation=1),
        of_pipeline(STEP, 10, 50),
        of_pipeline("1F0", 11, 20),
        op("aten::b", 12, 13, correlation=2),
        op("c10d::send", 22, 23, correlation=3),
        of_pipeline("1B0", 24, 40),
        op("aten::c", 25, 26, correlation=4, thread=OTHER),
        op("aten::d", 27, 28, correlation=5, thread=OTHER),
        op("aten::e", 41, 42, correlation=6),
        kernel("before", 5, 30, 1),
        kernel("forward", 40, 60, 2),
        kernel(SEND_RECV, 60, 90, 3),
        kernel("backward", 100, 110, 4),
        kernel("backward", 105, 120, 5),
        kernel("after", 130, 150, 6),
    )
    device = found["cuda:0"]
    assert figures(device) == {"1F0": ((20,), (0,)), "1B0": ((20,), (30,))}  # while the exchange runs
    assert device.step_ns == (150 - 30,)  # it waits for what was launched before
    assert figures(found["cpu"]) == {"1F0": ((9,), (0,)), "1B0": ((16,), (0,))}


def test_a_step_without_kernels_of_its_actions_is_no_step_of_the_device() -> None:
    """They were lost, or a graph launched them. An exchange alone is no action."""
    events, kernels = [], []
    for number in range(KEPT_STEPS + 4):
        at = number * 100
        events += [of_pipeline(STEP, at, at + 90), of_pipeline("1F0", at + 10, at + 40)]
        events += [op("aten::mm", at + 20, at + 21, correlation=number + 1)]
        if number % 2:
            kernels.append(kernel("gemm", at + 30, at + 60, number + 1))
        elif number == 50:
            kernels.append(kernel(SEND_RECV, at + 30, at + 60, number + 1))
    found = pipelines_of(*events, *kernels)
    device = found["cuda:0"]
    kept = KEPT_STEPS // 2
    assert (device.steps, device.step_ns) == (4 + kept, (60,) * kept)
    assert figures(device) == {"1F0": ((30,) * kept, (0,) * kept)}
    assert (found["cpu"].steps, len(found["cpu"].step_ns)) == (KEPT_STEPS + 4, KEPT_STEPS)


def test_without_kernels_no_table_of_launches_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipelines, "_launched_in", lambda *_: pytest.fail("a table"))
    assert [*pipelines_of(of_pipeline(STEP, 10, 50), of_pipeline("1F0", 11, 20), op("a", 12, 13, correlation=1))]


def test_a_device_without_actions_has_no_pipeline() -> None:
    events = of_pipeline(STEP, 10, 50), of_pipeline("1F0", 11, 20), op("aten::a", 1, 2, correlation=1)
    assert [*pipelines_of(*events, kernel("before", 5, 30, 1))] == ["cpu"]


Ran = tuple[int, int, bool, int]
"""A kernel: how long after the start of the last one it began, how long it took, whether it communicates, and which
action launched it; -1: none."""


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9), st.booleans(), st.integers(-1, 2)), max_size=12))
@examples(100)
def test_the_times_on_a_device_are_those_of_each_ns(ran: Sequence[Ran]) -> None:
    events = [of_pipeline(STEP, 10, 50), op("aten::none", 45, 46, correlation=4)]
    for index in range(3):
        events += [of_pipeline(f"1F{index}", 11 + 10 * index, 20 + 10 * index)]
        events += [op("aten::mm", 12 + 10 * index, 13 + 10 * index, correlation=index + 1)]
    at, work = 30, []
    for gap, ns, communicates, action in ran:
        at += gap
        work.append((at, at + ns, communicates, action))
        events.append(kernel(SEND_RECV if communicates else "gemm", at, at + ns, action + 1 if action >= 0 else 4))
    device = pipelines_of(*events).get("cuda:0")
    own = {index: [one for one in work if one[3] == index and not one[2]] for index in range(3)}
    if not any(own.values()):
        assert device is None
        return
    assert device is not None
    busy = {ns for start, end, communicates, _ in work if not communicates for ns in range(start, end)}
    exchanging = {ns for start, end, communicates, _ in work if communicates for ns in range(start, end)}
    since = 10  # all of these kernels were launched in the step
    for index, kernels in own.items():
        took = len({ns for start, end, _, _ in kernels for ns in range(start, end)})
        waited = len(({*range(since, kernels[0][0])} & exchanging) - busy) if kernels else 0
        assert figures(device)[f"1F{index}"] == ((took,), (waited,))
        since = max([since, *(end for _, end, _, _ in kernels)])
    assert device.step_ns == (max(end for _, end, _, _ in work) - 10,)


def test_labels_say_what_they_are_in_plain_ascii() -> None:
    assert action_label(3, "W", 12) == PIPELINE + "3W12"
    for ranks in (0, 2), (5,), ():
        name = step_label('Größer "x" Schedule', 4, ranks)
        assert name.isascii() and not {'"', "\\"} & {*name}
        columns = EventColumns.of([of_pipeline(name.removeprefix(PIPELINE), 0, 10), of_pipeline("0F1", 2, 3)])
        (step,) = steps_in(columns)
        assert step[:5] == (0, 10, 'Größer "x" Schedule', 4, ranks)
    assert steps_in(EventColumns.of([of_pipeline("step of a newer torchprof", 0, 10)])) == []


# Ranges of torch


def test_steps_from_the_ranges_of_torch() -> None:
    """A step goes from the first range that can be before its actions to the last one after them. The waits end where
    a receive ends; one that ends in no action counts for none."""
    events = []
    for at in 0, 100:
        events += [user_label("PP:1RECV_F0", at, at + 5), user_label("PP:1F0", at + 10, at + 30)]
        events += [user_label("PP:1SEND_F0", at + 31, at + 35), user_label("PP:1RECV_B0", at + 36, at + 38)]
        events += [user_label("PP:1B0", at + 40, at + 60), user_label("PP:1REDUCE_GRAD", at + 61, at + 70)]
        events += [exchange("gloo:recv", at + 4, at + 18), exchange("gloo:recv", at + 37, at + 39)]
        events += [exchange("gloo:send", at + 35, at + 55)]
    pipeline = pipelines_of(*events)["cpu"]
    assert (pipeline.steps, pipeline.step_ns) == (2, (70, 70))
    assert figures(pipeline) == {"1F0": ((12, 12), (8, 8)), "1B0": ((20, 20), (0, 0))}
    assert (pipeline.schedule, pipeline.stages, pipeline.group, pipeline.roots) == ("", 0, (), ((1, OUTSIDE),))
    assert pipelines_of(*events, user_label("PP:(1F1;1B1)OVERLAP_F_B", 200, 210)) == {}
    assert pipelines_of(user_label("PP: mine", 0, 10), user_label("Forward 3", 20, 30)) == {}


@pytest.mark.parametrize(
    "name, folded",
    [
        ("PP:0F3", "PP:forward"),
        ("PP:12B0", "PP:backward"),
        ("PP:1I2", "PP:backward_input"),
        ("PP:1W2", "PP:backward_weight"),
        ("PP:1RECV_F3", "PP:recv_f"),
        ("PP:0UNSHARD", "PP:unshard"),
        ("PP:(0F1;1B0)OVERLAP_F_B", "PP:overlap_f_b"),
        ("PP:(0SEND_F0;2RECV_F0)BATCH_P2P", "PP:batch_p2p"),
        ("Forward 3", "PP:forward"),
        ("Backward 12", "PP:backward"),
        ("PP: mine", "PP: mine"),
        ("Forward pass", "Forward pass"),
    ],
)
def test_ranges_of_torch_have_one_name_for_each_kind_of_action(name: str, folded: str) -> None:
    for others in (op("aten::mm", 1, 2), op("c10d::send", 1, 2), of_pipeline("0F0", 1, 2)):
        columns = EventColumns.of([user_label(name, 0, 10), others])
        before = [*columns.kinds]
        read = with_folded_names(columns)
        assert columns.kinds == before
        is_users = others.name == "aten::mm" and not name.startswith("PP:")  # "Forward 3" without a pipeline
        assert read.kinds[0].name == (name if is_users else folded)


def test_our_ranges_change_no_rows() -> None:
    plain = [
        label(NET, 10, 20),
        op("aten::mm", 12, 18),
        op("aten::mse_loss", 25, 30),
        user_label("mine", 40, 60),
        op("aten::mm", 50, 51, thread=MAIN),
    ]
    ours = [of_pipeline(STEP, 0, 100), of_pipeline("1F0", 9, 21), of_pipeline("wait", 22, 24)]
    ours += [of_pipeline("1B0", 45, 55)]
    ordered = sorted([*plain, *ours], key=lambda event: (event.start_ns, -event.end_ns))
    assert run_of_events(ordered, SITES, LAYERS).rows == run_of_events(plain, SITES, LAYERS).rows
