"""Profile of a loop: compared with torch.profiler.profile step by step; cycles and their sum, traces, cleanup."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import gzip
import inspect
import json
import re
import tempfile
import warnings
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from build.examples import examples
from build.models import Mlp
from build.snapshots import snapshot
from build.warnings import sentences
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.profiler import ProfilerAction, record_function

from torchprof import Profile, Run, TorchprofError, tensorboard_trace_handler
from torchprof.attribute.events import PREFIX, Place
from torchprof.record.labels import label_of
from torchprof.record.session import refuse_if_profiled
from torchprof.run.measures import SampleKey
from torchprof.run.meta import RunWarning
from torchprof.run.words import BACKWARD, FORWARD

NONE, WARMUP, RECORD, SAVE = [*ProfilerAction][:4]
Schedule = Callable[[int], ProfilerAction]


def schedule(**of: int) -> Schedule:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns about a schedule without warm-up
        return torch.profiler.schedule(**of)


def actions(*of: ProfilerAction) -> Schedule:
    """A schedule with these actions for the first steps, and NONE after them."""
    return lambda step: of[step] if step < len(of) else NONE


# Compared with torch's own profiler


class Stop(Exception):
    """Ends a loop early."""


Calls = list[tuple[int, list[str]]]
"""For each call of on_trace_ready: the number of the step, and the names of the steps in its trace."""


def steps_in(names: list[str]) -> list[str]:
    return sorted({name for name in names if name.startswith("pass ")})


def loop(profiler: Any, length: int, leave: str, work: Callable[[], object] = lambda: torch.ones(1)) -> None:
    """Run ``length`` passes. ``leave``: how the last one ends: "end", "break" or "error"."""
    with profiler:
        for number in range(length):
            with record_function(f"pass {number:02}"):
                work()
            if number == length - 1 and leave == "break":
                break
            if number == length - 1 and leave == "error":
                raise Stop
            profiler.step()


def calls_of_torch(of: Schedule, length: int, leave: str) -> Calls:
    reported: Calls = []

    def ready(profiler: Any) -> None:
        raws = profiler.profiler.kineto_results.events()  # in torch 2.4, events() still has earlier cycles
        reported.append((profiler.step_num, steps_in([raw.name() for raw in raws])))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns about schedules that it calls incorrect
        profiler = torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], schedule=of, on_trace_ready=ready
        )
        try:
            loop(profiler, length, leave)
        except Stop:
            assert leave == "error"
    return reported


def calls_of_torchprof(of: Schedule, length: int, leave: str) -> tuple[Calls, Profile]:
    reported: Calls = []

    def ready(prof: Profile) -> None:
        passes = steps_in([event.key for event in prof.key_averages()])
        assert steps_in([row.frames[0].name for row in prof.run.rows if row.frames]) == passes
        reported.append((prof.step_num, passes))

    prof = Profile(Mlp(), schedule=of, on_trace_ready=ready)
    try:
        loop(prof, length, leave)
    except Stop:
        assert leave == "error"
    return reported, prof


SCHEDULES = {
    "wait, warm-up, active": schedule(wait=1, warmup=1, active=2),
    "two cycles": schedule(wait=1, warmup=1, active=2, repeat=2),
    "one cycle after five": schedule(wait=0, warmup=1, active=3, repeat=1, skip_first=5),
    "long warm-up": schedule(wait=0, warmup=3, active=1),
    "no warm-up": schedule(wait=2, warmup=0, active=2),
    "always, one by one": schedule(wait=0, warmup=0, active=1),
    "always, three by three": schedule(wait=0, warmup=0, active=3),
    "never": lambda step: NONE,
    "warm-up alone": lambda step: WARMUP,
    "saved each time": lambda step: SAVE,
    "never saved": lambda step: RECORD,
    "warm-up for nothing": actions(WARMUP, NONE, WARMUP, WARMUP, RECORD, SAVE, SAVE),
    "saved and warm again": actions(SAVE, WARMUP, SAVE, NONE, RECORD, RECORD, SAVE, SAVE),
}


@pytest.mark.parametrize("leave", ["end", "break", "error"])
@pytest.mark.parametrize("length", [1, 3, 4, 9])
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_records_the_same_steps_as_in_torch(name: str, length: int, leave: str) -> None:
    reported, prof = calls_of_torchprof(SCHEDULES[name], length, leave)
    assert reported == calls_of_torch(SCHEDULES[name], length, leave)
    recorded = [one for _, passes in reported for one in passes]
    assert steps_in([row.frames[0].name for row in prof.run.rows if row.frames]) == recorded


@examples(25)
@given(st.lists(st.sampled_from([NONE, WARMUP, RECORD, SAVE]), min_size=1, max_size=8), st.integers(0, 2))
def test_any_schedule_records_the_same_steps_as_in_torch(of: list[ProfilerAction], more: int) -> None:
    """If RECORD is followed by neither RECORD nor RECORD_AND_SAVE, torch drops the cycle with a warning, and crashes
    when it records again after a warm-up. torchprof calls on_trace_ready for this cycle, as for any other."""
    following = list(zip(of, [*of[1:], NONE]))
    if (RECORD, WARMUP) in following:
        of = [NONE if (RECORD, action) == (before, WARMUP) else action for before, action in zip([NONE, *of], of)]
    reported, prof = calls_of_torchprof(actions(*of), len(of) + more, "end")
    theirs = calls_of_torch(actions(*of), len(of) + more, "end")
    assert [one for one in reported if one in theirs] == theirs
    dropped = [passes for one in reported if one not in theirs for passes in one[1]]
    recorded = [f"pass {number:02}" for number, action in enumerate(of) if action in (RECORD, SAVE)]
    assert sorted(dropped + [one for _, passes in theirs for one in passes]) == recorded
    for name in dropped:
        ended = next(at for at in range(int(name[-2:]), len(of) + 1) if at == len(of) or of[at] not in (RECORD, SAVE))
        assert of[ended - 1] is RECORD
    assert steps_in([row.frames[0].name for row in prof.run.rows if row.frames]) == recorded


def test_a_cycle_that_torch_drops_is_kept_and_on_trace_ready_is_called() -> None:
    of = actions(NONE, RECORD, RECORD, NONE, RECORD, SAVE)
    assert calls_of_torch(of, 7, "end") == [(6, ["pass 04", "pass 05"])]
    reported, prof = calls_of_torchprof(of, 7, "end")
    assert reported == [(3, ["pass 01", "pass 02"]), (6, ["pass 04", "pass 05"])]
    assert (prof.run.meta.cycles, prof.run.meta.steps) == (2, 4)


# Cycles and their sum


def train(prof: Profile, model: nn.Module, steps: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with prof:
        for _ in range(steps):
            model(torch.rand(3, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            prof.step()


Lines = dict[tuple[Any, ...], tuple[int, ...]]


def lines_of(run: Run) -> Lines:
    """The values of each row, by the row's key."""
    return {
        (row.layer.path if row.layer else None, *row[1:7]): (row.calls, *(getattr(row.cost, name) for name in COSTS))
        for row in run.rows
    }


COSTS = ("cpu_ns", "cpu_allocated", "cpu_freed", "macs", "flops", "uncounted")


def summed(runs: list[Run]) -> Lines:
    lines: defaultdict[tuple[Any, ...], tuple[int, ...]] = defaultdict(lambda: (0,) * (1 + len(COSTS)))
    for run in runs:
        for key, values in lines_of(run).items():
            lines[key] = tuple(map(sum, zip(lines[key], values)))
    return dict(lines)


@pytest.mark.parametrize(
    "options",
    [{}, {"profile_memory": True, "with_flops": True}, {"paths": ["fc1"], "record_shapes": True}],
    ids=["plain", "memory and FLOPs", "one layer"],
)
def test_after_the_block_the_run_is_the_sum_of_its_cycles(options: dict[str, Any], model: Mlp) -> None:
    cycles: list[Run] = []
    prof = Profile(
        model,
        schedule=schedule(wait=1, warmup=1, active=2),
        on_trace_ready=lambda prof: cycles.append(prof.run),
        **options,
    )
    train(prof, model, 12)
    run = prof.run
    assert len(cycles) == run.meta.cycles == 3
    assert [cycle.meta.cycles for cycle in cycles] == [1, 1, 1]
    assert [cycle.meta.steps for cycle in cycles] == [2, 2, 2]
    assert run.meta.steps == 6
    assert lines_of(run) == summed(cycles)
    assert run.meta.wall_ns == sum(cycle.meta.wall_ns for cycle in cycles)
    after_the_block = ("peak_bytes", "ordinary_ns", "bfloat16_ns")  # a peak is no sum, products are computed once
    assert {key: spread.sum for key, spread in run.samples.items() if key.measure not in after_the_block} == Counter(
        {
            key: sum(cycle.samples[key].sum for cycle in cycles)
            for key in cycles[0].samples
            if key.measure != "peak_bytes"
        }
    )
    assert [node.calls for node in run.tree().walk() if node.layer.path[1:] == ("fc1",)] == [6]
    assert run.report("steps").split("\n")[2].split()[0] == "6"


def test_inside_on_trace_ready_all_results_are_of_this_cycle(tmp_path: Path, model: Mlp) -> None:
    seen: list[int] = []
    last: list[Any] = [None]

    def ready(prof: Profile) -> None:
        assert prof.run.tree().calls == 2
        assert prof.run.report("tree") == prof.display()
        assert "Backward CPU total" in prof.display()
        traces, lists = prof.raw()
        assert {path: len(calls) for path, calls in lists.items()} == {
            ("Mlp", name): 2 for name in ("fc1", "act", "fc2")
        }
        assert len(traces) == 4
        assert lists is not last[0]
        last[0] = lists
        averages = {event.key: event.count for event in prof.key_averages()}
        assert averages["aten::addmm"] == 4
        prof.export_chrome_trace(tmp_path / f"{prof.step_num}.json")
        seen.append(prof.step_num)

    prof = Profile(model, schedule=schedule(wait=0, warmup=1, active=2), on_trace_ready=ready)
    train(prof, model, 9)
    assert seen == [3, 6, 9]
    for number in seen:
        names = Counter(event["name"] for event in trace_of(tmp_path / f"{number}.json"))
        assert names[label_of(("Mlp",))] == 2


@pytest.mark.parametrize("steps", [3, 4, 6, 7], ids=["in a wait", "in a warm-up", "in a wait again", "and warm again"])
def test_after_the_block_torchs_lists_are_of_the_last_cycle(steps: int, tmp_path: Path, model: Mlp) -> None:
    prof = Profile(model, schedule=schedule(wait=1, warmup=1, active=1))
    train(prof, model, steps)
    assert prof.run.tree().calls == steps // 3
    assert {event.key: event.count for event in prof.key_averages()}["aten::addmm"] == 2
    assert [len(calls) for calls in prof.raw()[1].values()] == [1, 1, 1]
    prof.export_chrome_trace(tmp_path / "trace.json")
    names = Counter(event["name"] for event in trace_of(tmp_path / "trace.json"))
    assert names[label_of(("Mlp", "fc1"))] == 1


def test_without_a_schedule_a_step_is_only_marked(model: Mlp) -> None:
    reported = []
    prof = Profile(model, on_trace_ready=lambda prof: reported.append((prof.step_num, prof.run.meta.steps)))
    train(prof, model, 5)
    assert reported == [(5, 5)]
    assert (prof.run.meta.cycles, prof.run.tree().calls) == (1, 5)
    assert prof.run.samples[SampleKey(0, BACKWARD, 0, "cpu", "step_cpu_ns")].count == 5


def test_steps_during_warmup_calls_are_not_counted(model: Mlp) -> None:
    """Only steps that end during recording are counted, from the first mark on."""
    prof = Profile(model, warmup=2)
    train(prof, model, 5)
    assert prof.run.tree().calls == 3
    assert prof.run.meta.steps == 2, "of the first it saw only the end"


def test_a_schedule_that_never_records_gives_an_empty_run_with_a_warning(model: Mlp) -> None:
    reported: list[Profile] = []
    prof = Profile(model, schedule=schedule(wait=5, warmup=1, active=1), on_trace_ready=reported.append)
    train(prof, model, 3)
    assert reported == [] and prof.run.tree().calls == 0
    assert "after 3 calls of step() the schedule had not started to record" in prof.display()
    assert prof.key_averages() == []
    with pytest.raises(TorchprofError, match="there is no trace"):
        prof.export_chrome_trace("nowhere.json")


def test_a_disabled_profile_does_nothing(tmp_path: Path, model: Mlp) -> None:
    before = snapshot(model)
    reported: list[Profile] = []
    prof = Profile(model, enabled=False, schedule=lambda step: 1 / 0, on_trace_ready=reported.append)
    train(prof, model, 3)
    prof.start()
    prof.step()
    prof.stop()
    prof.export_chrome_trace(tmp_path / "trace.json")
    assert prof(lambda: 5)() == 5
    assert reported == [] and list(tmp_path.iterdir()) == [] and snapshot(model) == before
    assert prof.key_averages() == [] and prof.raw() is None


# Errors


def test_step_outside_the_block_raises() -> None:
    prof = Profile(Mlp())
    with pytest.raises(TorchprofError, match="belongs inside the block"):
        prof.step()
    with prof:
        prof.step()
    with pytest.raises(TorchprofError, match="belongs inside the block"):
        prof.step()


@pytest.mark.parametrize(
    "options, message",
    [
        ({"schedule": 5}, "schedule=5 is not a schedule: use for example torch.profiler.schedule"),
        ({"schedule": lambda step: 2}, r"schedule\(0\) gave 2, where one of ProfilerAction.NONE"),
        ({"schedule": lambda step: None}, r"schedule\(0\) gave None"),
        ({"schedule": lambda step: NONE, "warmup": 2}, "give only one"),
        ({"on_trace_ready": "a.json"}, "is not a function"),
    ],
)
def test_wrong_schedules_and_handlers_raise(options: dict[str, Any], message: str, model: Mlp) -> None:
    with pytest.raises(TorchprofError, match=message), Profile(model, **options):
        raise AssertionError("the block began")
    with Profile(model):
        pass


@pytest.mark.skipif(not hasattr(ProfilerAction, "DEVICE_STOPPED"), reason="this torch has no such action")
def test_the_private_action_of_torch_is_refused() -> None:
    with pytest.raises(TorchprofError, match="DEVICE_STOPPED"), Profile(Mlp(), schedule=lambda _: ProfilerAction(4)):
        pass


def test_after_an_error_of_the_schedule_the_step_continues(model: Mlp) -> None:
    """A caller that catches the error is still in the same step."""
    broken = True

    def of(step: int) -> Any:
        return "nonsense" if step == 2 and broken else RECORD

    with Profile(model, schedule=of) as prof:
        model(torch.rand(1, 4))
        prof.step()
        model(torch.rand(1, 4))
        with pytest.raises(TorchprofError, match=r"schedule\(2\) gave 'nonsense'"):
            prof.step()
        assert prof.step_num == 1
        broken = False
        prof.step()
    assert prof.run.meta.steps == 2
    assert prof.run.tree().calls == 2


def raising(reported: list[int]) -> Callable[[Profile], None]:
    def ready(prof: Profile) -> None:
        reported.append(prof.step_num)
        raise Stop

    return ready


@pytest.mark.parametrize("active", [1, 9], ids=["at a step", "at the end"])
@pytest.mark.parametrize("warmup", [0, 1])
def test_after_an_error_of_on_trace_ready_everything_is_switched_off(active: int, warmup: int, model: Mlp) -> None:
    reported: list[int] = []
    prof = Profile(model, schedule=schedule(wait=0, warmup=warmup, active=active), on_trace_ready=raising(reported))
    with pytest.raises(Stop):
        train(prof, model, 4)
    assert reported == [warmup + 1 if active == 1 else 4]
    assert prof.run.tree().calls == (1 if active == 1 else 4 - warmup)
    with Profile(model) as after:  # neither torch nor torchprof has an active profiler
        model(torch.rand(1, 4))
    assert after.run.tree().calls == 1


def test_on_trace_ready_is_called_again_after_its_error_was_caught(model: Mlp) -> None:
    reported: list[int] = []
    with Profile(
        model, schedule=schedule(wait=0, warmup=0, active=2, repeat=3), on_trace_ready=raising(reported)
    ) as prof:
        for _ in range(6):
            model(torch.rand(1, 4))
            with contextlib.suppress(Stop):
                prof.step()
    # The step after the error is not recorded: the error came before that step began.
    assert reported == [2, 4, 6]
    assert prof.run.tree().calls == 4


def test_an_error_in_the_loop_passes_through_and_the_run_has_what_was_recorded(model: Mlp) -> None:
    reported = []
    prof = Profile(
        model, schedule=schedule(wait=0, warmup=1, active=3), on_trace_ready=lambda prof: reported.append(prof.step_num)
    )
    with pytest.raises(Stop), prof:
        for number in range(9):
            model(torch.rand(1, 4))
            if number == 6:
                raise Stop
            prof.step()
    assert reported == [4, 6]
    assert prof.run.tree().calls == 3 + 2
    assert prof.run.meta.steps == 3 + 1  # the step with the error has not ended


def test_a_warm_up_ends_with_the_schedules_action_or_with_the_block(model: Mlp) -> None:
    """While a session of ours is in warm-up, another Profile raises: no other profiler may start."""
    with Profile(model, schedule=actions(WARMUP, NONE, WARMUP)) as prof:
        with pytest.raises(TorchprofError, match="warm-up"):
            refuse_if_profiled()
        prof.step()
        refuse_if_profiled()
        prof.step()
        with pytest.raises(TorchprofError, match="warm-up"):
            refuse_if_profiled()
    refuse_if_profiled()


def test_another_profiler_during_wait_is_refused_and_the_loop_continues(model: Mlp) -> None:
    with Profile(model, schedule=schedule(wait=1, warmup=0, active=1, repeat=1)) as prof:
        with pytest.raises(TorchprofError, match=r"inside a torchprof\.Profile block"), torch.profiler.profile():
            pass
        prof.step()
        model(torch.rand(1, 4))
        prof.step()
    assert prof.run.tree().calls == 1


# start and stop, decorators


def test_start_and_stop_do_the_same_as_the_block(model: Mlp) -> None:
    prof = Profile(model)
    with pytest.raises(TorchprofError, match="call start"):
        prof.stop()
    prof.start()
    with pytest.raises(TorchprofError, match="not reentrant"):
        prof.start()
    model(torch.rand(1, 4))
    prof.step()
    prof.stop()
    prof.stop()  # a second stop does nothing
    assert prof.run.tree().calls == 1 and prof.run.meta.steps == 1
    with pytest.raises(TorchprofError, match="not reentrant"):
        prof.start()


def test_the_first_call_of_a_decorated_function_is_profiled(model: Mlp) -> None:
    prof = Profile(model)

    @prof
    def forward(x: Tensor, *, times: int = 1) -> Tensor:
        """What it does."""
        if times > 1:
            return forward(x, times=times - 1)  # the first call is still on
        return model(x)

    assert (forward.__name__, forward.__doc__) == ("forward", "What it does.")
    x = torch.rand(2, 4)
    assert torch.equal(forward(x, times=3), model(x))
    assert torch.equal(forward(x), model(x))
    assert prof.run.tree().calls == 1


def test_an_error_of_a_decorated_function_passes_through(model: Mlp) -> None:
    prof = Profile(model)

    @prof
    def fails() -> None:
        model(torch.rand(1, 4))
        raise Stop

    for _ in range(2):
        with pytest.raises(Stop):
            fails()
    assert prof.run.tree().calls == 1


def test_a_decorated_method_is_profiled(model: Mlp) -> None:
    prof = Profile(model)

    class Trainer:
        def __init__(self, factor: float) -> None:
            self.factor = factor

        @prof
        def forward(self, x: Tensor) -> Tensor:
            return model(x) * self.factor

    x = torch.rand(2, 4)
    assert torch.equal(Trainer(2.0).forward(x), model(x) * 2)
    assert torch.equal(Profile(model)(Trainer(3.0).forward)(x), model(x) * 3)  # a bound one
    assert prof.run.tree().calls == 1


def test_a_decorated_coroutine_is_profiled_until_it_ends(model: Mlp) -> None:
    prof = Profile(model)

    @prof
    async def forward(x: Tensor) -> Tensor:
        await asyncio.sleep(0)
        return model(x)

    assert inspect.iscoroutinefunction(forward)
    x = torch.rand(2, 4)
    assert torch.equal(asyncio.run(forward(x)), model(x))
    assert torch.equal(asyncio.run(forward(x)), model(x))
    assert prof.run.tree().calls == 1


def test_a_decorated_generator_is_profiled_until_it_ends(model: Mlp) -> None:
    prof = Profile(model)

    @prof
    def outputs(times: int) -> Iterator[Any]:
        sent = None
        for _ in range(times):
            sent = yield model(torch.rand(1, 4)), sent
        return "done"

    running = outputs(2)
    assert not prof.entered
    assert next(running)[1] is None
    assert running.send("sent")[1] == "sent"
    with pytest.raises(StopIteration) as stopped:
        next(running)
    assert stopped.value.value == "done"
    assert prof.run.tree().calls == 2
    assert len(list(outputs(3))) == 3
    assert prof.run.tree().calls == 2

    left = Profile(model)(lambda: (yield model(torch.rand(1, 4))))()
    next(left)
    left.close()


def test_an_asynchronous_generator_is_refused() -> None:
    async def outputs() -> Any:
        yield 1

    with pytest.raises(TorchprofError, match="asynchronous generator, which Profile cannot decorate"):
        Profile(Mlp())(outputs)


# Traces


def trace_of(path: Path) -> list[dict[str, Any]]:
    data = path.read_bytes()
    assert (data[:2] == b"\x1f\x8b") == (path.suffix == ".gz")
    events = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)["traceEvents"]
    return [event for event in events if event.get("ph") == "X"]


def ns(us: float) -> int:
    """A trace has µs with three decimals."""
    whole = int(us)
    return whole * 1000 + round((us - whole) * 1000)


def ranges_of(path: Path) -> dict[tuple[int, int], list[tuple[int, int, str]]]:
    """The ranges of layers in a trace, by process and thread: start, end, name."""
    found: defaultdict[tuple[int, int], list[tuple[int, int, str]]] = defaultdict(list)
    for event in trace_of(path):
        if event["name"].startswith(PREFIX) and "!" not in event["name"]:
            start = ns(event["ts"])
            found[event["pid"], event["tid"]].append((start, start + ns(event["dur"]), event["name"]))
    return found


class Hostile(nn.Module):
    """Nested layers with names that a file format might not write correctly."""

    NAMES = (
        'a"b',
        "ü€",
        "back\\slash",
        "new\nline",
        "torchprof:!step",
        "a b",
        "%41",
        '{"a": [1',
        "</script>",
        "x" * 300,
    )

    def __init__(self) -> None:
        super().__init__()
        for name in self.NAMES:
            self.add_module(name, nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU())))

    def forward(self, x: Tensor) -> Tensor:
        for child in self.children():
            x = child(x)
        return x


@pytest.mark.parametrize("suffix", [".json", ".json.gz"])
def test_a_trace_has_the_range_of_each_call_inside_that_of_its_caller(suffix: str, tmp_path: Path) -> None:
    model = Hostile()
    with Profile(model) as prof:
        for _ in range(3):
            model(torch.rand(2, 4)).sum().backward()
            prof.step()
    path = tmp_path / f"trace{suffix}"
    for _ in range(2):  # torch writes a trace once
        prof.export_chrome_trace(path)
        (ranges,) = ranges_of(path).values()  # one thread
        stack: list[tuple[int, int, str]] = []
        lasted: Counter[str] = Counter()
        calls: Counter[str] = Counter()
        for start, end, name in sorted(ranges, key=lambda one: (one[0], -one[1])):
            while stack and stack[-1][1] <= start:
                stack.pop()
            if stack:
                assert end <= stack[-1][1], "it sticks out of the range around it"
                assert name.rpartition(".")[0] == stack[-1][2], "it is not in the range of the layer above"
            else:
                assert name == label_of(("Hostile",))
            stack.append((start, end, name))
            calls[name] += 1
            lasted[name] += end - start
        run = prof.run
        labels = [label_of(layer.path) for layer in run.layers]
        assert calls == dict.fromkeys(labels, 3)
        for number, label in enumerate(labels):
            assert lasted[label] == run.samples[SampleKey(number, FORWARD, 0, "cpu", "cpu_ns")].sum


def test_a_trace_that_cannot_be_written_raises(tmp_path: Path) -> None:
    prof = Profile(Mlp())
    with pytest.raises(TorchprofError, match="has not ended"):
        prof.export_chrome_trace(tmp_path / "trace.json")
    with prof:
        pass
    for path in (tmp_path / "missing" / "trace.json", tmp_path / "missing" / "trace.json.gz", tmp_path):
        with pytest.raises(OSError, match=re.escape(str(path))):
            prof.export_chrome_trace(path)
    prof.export_chrome_trace(str(tmp_path / "trace.json"))
    assert trace_of(tmp_path / "trace.json")


PATTERN = re.compile(r"(.+)\.\d{15,}\.pt\.trace\.json(\.gz)?")


@pytest.mark.parametrize("worker", [None, "worker7"])
@pytest.mark.parametrize("use_gzip", [False, True])
def test_the_tensorboard_handler_writes_the_same_files_as_torchs(
    worker: str | None, use_gzip: bool, tmp_path: Path
) -> None:
    of = schedule(wait=0, warmup=1, active=1, repeat=2)
    prof = Profile(Mlp(), schedule=of, on_trace_ready=tensorboard_trace_handler(tmp_path / "a" / "b", worker, use_gzip))
    loop(prof, 5, "end", lambda: prof(torch.rand(1, 4)))
    theirs = torch.profiler.tensorboard_trace_handler(str(tmp_path / "c"), worker, use_gzip)
    profiler = torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], schedule=of, on_trace_ready=theirs
    )
    loop(profiler, 5, "end")
    our_files = sorted((tmp_path / "a" / "b").iterdir())
    names = [
        [PATTERN.fullmatch(path.name) for path in files] for files in (our_files, sorted((tmp_path / "c").iterdir()))
    ]
    assert [[match and match.groups() for match in found] for found in names[:1]] == [
        [match and match.groups() for match in found] for found in names[1:]
    ]
    assert len(our_files) == 2 and None not in names[0]
    for number, path in zip((1, 3), our_files):
        assert steps_in([event["name"] for event in trace_of(path)]) == [f"pass {number:02}"]
        assert len(ranges_of(path)) == 1


def test_a_trace_folder_that_cannot_be_created_raises(tmp_path: Path, model: Mlp) -> None:
    (tmp_path / "file").write_text("in the way")
    prof = Profile(model, on_trace_ready=tensorboard_trace_handler(tmp_path / "file" / "traces"))
    with pytest.raises(TorchprofError, match="No folder for traces can be made"):
        train(prof, model, 1)


# Cleanup


@pytest.mark.usefixtures("garbage_is_not_collected")
@pytest.mark.parametrize("options", [{}, {"profile_memory": True, "with_flops": True}], ids=["plain", "all"])
def test_a_cycle_leaves_no_session_and_no_open_files(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: Mlp
) -> None:
    """At most one session is alive at a time, also without the garbage collector."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    sessions: list[weakref.ref[Any]] = []

    def ready(prof: Profile) -> None:
        prof.export_chrome_trace(tmp_path / "trace.json")
        prof.raw()
        assert len(list((tmp_path / "temporary").iterdir())) == 1
        assert [session() for session in sessions if session() is not None] == []
        sessions.append(weakref.ref(prof._session))

    gc.collect()
    prof = Profile(model, schedule=schedule(wait=0, warmup=1, active=1), on_trace_ready=ready, **options)
    train(prof, model, 8)
    assert len(sessions) == 4
    del prof
    gc.collect()
    assert list((tmp_path / "temporary").iterdir()) == []


def test_torchs_tensorboard_handler_works_with_our_profile(tmp_path: Path, model: Mlp) -> None:
    """Code that used torch.profiler before may still have it."""
    handler = torch.profiler.tensorboard_trace_handler(str(tmp_path), "worker")
    with Profile(model, schedule=schedule(wait=0, warmup=0, active=1, repeat=2), on_trace_ready=handler) as prof:
        for _ in range(3):
            model(torch.rand(3, 4))
            prof.step()
    written = sorted(tmp_path.iterdir())
    assert [path.name.startswith("worker.") for path in written] == [True, True]
    assert all("torchprof:Mlp" in path.read_text() for path in written)


@pytest.mark.usefixtures("garbage_is_not_collected")
def test_a_cycle_makes_no_reference_cycles(model: Mlp) -> None:
    places = []

    def ready(prof: Profile) -> None:
        places.append(sum(type(one) is Place for one in gc.get_objects()))

    gc.collect()
    train(Profile(model, schedule=schedule(wait=0, warmup=1, active=1), on_trace_ready=ready), model, 8)
    assert places == [0] * 4


def test_the_run_of_a_cycle_has_no_warnings_of_another_cycle(monkeypatch: pytest.MonkeyPatch) -> None:
    """The run of all cycles has the warnings of each cycle."""
    ended: list[str] = []

    def about_clock(*_: int) -> list[RunWarning]:
        ended.append(f"The clock of cycle {len(ended) + 1}.")
        return [RunWarning(ended[-1])]

    monkeypatch.setattr("torchprof.profile.cycle.about_clock", about_clock)
    monkeypatch.setattr("torchprof.profile.profile.missing_device", lambda _: RunWarning("No such device."))
    model, x = Mlp(), torch.rand(2, 4)
    shown: list[list[str]] = []

    def own(run: Run) -> list[str]:
        return [
            one for one in sentences(run) if "clock" in one or "device" in one or "Not called by the layer above" in one
        ]

    record = torch.profiler.ProfilerAction.RECORD_AND_SAVE
    with Profile(
        model, use_cuda=True, schedule=lambda _: record, on_trace_ready=lambda prof: shown.append(own(prof.run))
    ) as prof:
        model(x)
        for _ in range(100):
            model.fc1(x)
        prof.step()
        model(x)
    general, called = ("No such device.", "Not called by the layer above: Mlp.fc1 by code outside the model. ")
    assert [[one.startswith(called) for one in cycle] for cycle in shown] == [[False, False, True], [False, False]]
    assert [cycle[:2] for cycle in shown] == [[general, ended[0]], [general, ended[1]]]
    assert own(prof.run)[:3] == [general, *ended] and len(own(prof.run)) == 4


def test_a_cycle_may_end_inside_a_range_of_the_user(model: Mlp) -> None:
    """It is closed there and opened again: a range that is open across two sessions of torch breaks the process."""
    before = dict(vars(record_function))
    with Profile(model, schedule=schedule(wait=0, warmup=0, active=1)) as prof, record_function("loop"):
        for _ in range(4):
            model(torch.rand(2, 4))
            prof.step()
    assert dict(vars(record_function)) == before
    assert prof.run.meta.cycles >= 4
    of_layers = [row for row in prof.run.rows if row.layer is not None]
    assert {tuple(frame.name for around in row.within for frame in around.frames) for row in of_layers} == {("loop",)}
    assert sum(prof.run.rows.columns["cpu_ns"]) == prof.run.meta.wall_ns
