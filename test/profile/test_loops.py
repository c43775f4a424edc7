"""Profile over a loop: beside torch.profiler.profile step by step, cycles and their sum, traces, what is left."""

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
from torchprof.attribute.events import PREFIX
from torchprof.attribute.places import Place
from torchprof.record.labels import label_of
from torchprof.record.session import refuse_if_profiled
from torchprof.run.samples import SampleKey
from torchprof.run.warnings import Caveat
from torchprof.run.words import BACKWARD, FORWARD

NONE, WARMUP, RECORD, SAVE = (
    ProfilerAction.NONE,
    ProfilerAction.WARMUP,
    ProfilerAction.RECORD,
    ProfilerAction.RECORD_AND_SAVE,
)
Schedule = Callable[[int], ProfilerAction]


def schedule(**of: int) -> Schedule:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of a schedule without warm-up
        return torch.profiler.schedule(**of)


def actions(*of: ProfilerAction) -> Schedule:
    """A schedule with these actions, and nothing after them."""
    return lambda step: of[step] if step < len(of) else NONE


# Beside torch's own


class Stop(Exception):
    """Ends a loop early."""


Told = list[tuple[int, list[str]]]
"""For each call of on_trace_ready the number of the step, and the steps that its trace holds."""


def steps_in(names: list[str]) -> list[str]:
    return sorted({name for name in names if name.startswith("pass ")})


def loop(profiler: Any, length: int, leave: str, work: Callable[[], object] = lambda: torch.ones(1)) -> None:
    """So many passes; the last one ends as ``leave`` says."""
    with profiler:
        for number in range(length):
            with record_function(f"pass {number:02}"):
                work()
            if number == length - 1 and leave == "break":
                break
            if number == length - 1 and leave == "error":
                raise Stop
            profiler.step()


def torchs(of: Schedule, length: int, leave: str) -> Told:
    told: Told = []

    def ready(profiler: Any) -> None:
        raws = profiler.profiler.kineto_results.events()  # torch 2.4's events() never forget an earlier cycle
        told.append((profiler.step_num, steps_in([raw.name() for raw in raws])))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of schedules that it calls incorrect
        profiler = torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], schedule=of, on_trace_ready=ready
        )
        try:
            loop(profiler, length, leave)
        except Stop:
            assert leave == "error"
    return told


def ours(of: Schedule, length: int, leave: str) -> tuple[Told, Profile]:
    told: Told = []

    def ready(prof: Profile) -> None:
        passes = steps_in([event.key for event in prof.key_averages()])
        assert steps_in([row.frames[0].name for row in prof.run.rows if row.frames]) == passes
        told.append((prof.step_num, passes))

    prof = Profile(Mlp(), schedule=of, on_trace_ready=ready)
    try:
        loop(prof, length, leave)
    except Stop:
        assert leave == "error"
    return told, prof


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
def test_a_schedule_does_what_it_does_in_torch(name: str, length: int, leave: str) -> None:
    told, prof = ours(SCHEDULES[name], length, leave)
    assert told == torchs(SCHEDULES[name], length, leave)
    recorded = [one for _, passes in told for one in passes]
    assert steps_in([row.frames[0].name for row in prof.run.rows if row.frames]) == recorded


@examples(25)
@given(st.lists(st.sampled_from([NONE, WARMUP, RECORD, SAVE]), min_size=1, max_size=8), st.integers(0, 2))
def test_any_schedule_does_what_it_does_in_torch(of: list[ProfilerAction], more: int) -> None:
    """Where RECORD is followed by neither RECORD nor RECORD_AND_SAVE, torch drops the cycle with a warning, and dies of
    what it records next after a warm-up. Ours is told of as any other."""
    following = list(zip(of, [*of[1:], NONE]))
    if (RECORD, WARMUP) in following:
        of = [NONE if (RECORD, action) == (before, WARMUP) else action for before, action in zip([NONE, *of], of)]
    told, prof = ours(actions(*of), len(of) + more, "end")
    theirs = torchs(actions(*of), len(of) + more, "end")
    assert [one for one in told if one in theirs] == theirs
    dropped = [passes for one in told if one not in theirs for passes in one[1]]
    recorded = [f"pass {number:02}" for number, action in enumerate(of) if action in (RECORD, SAVE)]
    assert sorted(dropped + [one for _, passes in theirs for one in passes]) == recorded
    for name in dropped:
        ended = next(at for at in range(int(name[-2:]), len(of) + 1) if at == len(of) or of[at] not in (RECORD, SAVE))
        assert of[ended - 1] is RECORD
    assert steps_in([row.frames[0].name for row in prof.run.rows if row.frames]) == recorded


def test_a_cycle_that_torch_drops_is_told_of_and_kept() -> None:
    of = actions(NONE, RECORD, RECORD, NONE, RECORD, SAVE)
    assert torchs(of, 7, "end") == [(6, ["pass 04", "pass 05"])]
    told, prof = ours(of, 7, "end")
    assert told == [(3, ["pass 01", "pass 02"]), (6, ["pass 04", "pass 05"])]
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
    """The values of each row by what tells it from the others."""
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
def test_after_the_block_the_run_is_the_sum_of_its_cycles(options: dict[str, Any]) -> None:
    cycles: list[Run] = []
    model = Mlp()
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
    assert {key: spread.sum for key, spread in run.samples.items() if key.measure != "peak_bytes"} == Counter(
        {
            key: sum(cycle.samples[key].sum for cycle in cycles)
            for key in cycles[0].samples
            if key.measure != "peak_bytes"
        }
    )
    assert [node.calls for node in run.tree().walk() if node.layer.path[1:] == ("fc1",)] == [6]
    assert run.report("steps").split("\n")[2].split()[0] == "6"


def test_inside_on_trace_ready_everything_is_of_this_cycle(tmp_path: Path) -> None:
    model = Mlp()
    seen: list[int] = []
    last: list[Any] = [None]

    def ready(prof: Profile) -> None:
        assert prof.run.tree().calls == 2
        assert str(prof) == prof.run.report("tree") == prof.display()
        assert "Backward CPU total" in str(prof)
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
def test_after_the_block_the_lists_are_of_the_last_cycle(steps: int, tmp_path: Path) -> None:
    model = Mlp()
    prof = Profile(model, schedule=schedule(wait=1, warmup=1, active=1))
    train(prof, model, steps)
    assert prof.run.tree().calls == steps // 3
    assert {event.key: event.count for event in prof.key_averages()}["aten::addmm"] == 2
    assert [len(calls) for calls in prof.raw()[1].values()] == [1, 1, 1]
    prof.export_chrome_trace(tmp_path / "trace.json")
    names = Counter(event["name"] for event in trace_of(tmp_path / "trace.json"))
    assert names[label_of(("Mlp", "fc1"))] == 1


def test_without_a_schedule_a_step_is_only_a_mark() -> None:
    model = Mlp()
    told = []
    prof = Profile(model, on_trace_ready=lambda prof: told.append((prof.step_num, prof.run.meta.steps)))
    train(prof, model, 5)
    assert told == [(5, 5)]
    assert (prof.run.meta.cycles, prof.run.tree().calls) == (1, 5)
    assert prof.run.samples[SampleKey(0, BACKWARD, 0, "cpu", "step_cpu_ns")].count == 5


def test_warmup_calls_and_steps() -> None:
    """Only steps that end while it records are counted, from the first mark on."""
    model = Mlp()
    prof = Profile(model, warmup=2)
    train(prof, model, 5)
    assert prof.run.tree().calls == 3
    assert prof.run.meta.steps == 2, "of the first it saw only the end"


def test_a_schedule_that_never_records_leaves_an_empty_run_that_says_so() -> None:
    model = Mlp()
    told: list[Profile] = []
    prof = Profile(model, schedule=schedule(wait=5, warmup=1, active=1), on_trace_ready=told.append)
    train(prof, model, 3)
    assert told == [] and prof.run.tree().calls == 0
    assert "after 3 calls of step() the schedule had not begun to record" in prof.display()
    assert prof.key_averages() == []
    with pytest.raises(TorchprofError, match="there is no trace"):
        prof.export_chrome_trace("nowhere.json")


def test_switched_off_nothing_of_it_does_anything(tmp_path: Path) -> None:
    model = Mlp()
    before = snapshot(model)
    told: list[Profile] = []
    prof = Profile(model, enabled=False, schedule=lambda step: 1 / 0, on_trace_ready=told.append)
    train(prof, model, 3)
    prof.start()
    prof.step()
    prof.stop()
    prof.export_chrome_trace(tmp_path / "trace.json")
    assert prof(lambda: 5)() == 5
    assert told == [] and list(tmp_path.iterdir()) == [] and snapshot(model) == before
    assert prof.key_averages() == [] and prof.raw() is None


# Errors


def test_a_step_outside_the_block() -> None:
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
        ({"schedule": 5}, "schedule=5 is no schedule: use torch.profiler.schedule"),
        ({"schedule": lambda step: 2}, r"schedule\(0\) gave 2, where one of ProfilerAction.NONE"),
        ({"schedule": lambda step: None}, r"schedule\(0\) gave None"),
        ({"schedule": lambda step: NONE, "warmup": 2}, "leave one out"),
        ({"on_trace_ready": "a.json"}, "cannot be called"),
    ],
)
def test_wrong_schedules_and_handlers(options: dict[str, Any], message: str) -> None:
    model = Mlp()
    before = snapshot(model)
    with pytest.raises(TorchprofError, match=message), Profile(model, **options):
        raise AssertionError("the block began")
    assert snapshot(model) == before
    with Profile(model):
        pass


@pytest.mark.skipif(not hasattr(ProfilerAction, "DEVICE_STOPPED"), reason="this torch has no such action")
def test_the_action_that_torch_has_for_itself_is_refused() -> None:
    with pytest.raises(TorchprofError, match="DEVICE_STOPPED"), Profile(Mlp(), schedule=lambda _: ProfilerAction(4)):
        pass


def test_a_schedule_that_fails_in_the_middle_changes_nothing() -> None:
    """Whoever catches the error goes on in the same step."""
    model = Mlp()
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


def raising(told: list[int]) -> Callable[[Profile], None]:
    def ready(prof: Profile) -> None:
        told.append(prof.step_num)
        raise Stop

    return ready


@pytest.mark.parametrize("active", [1, 9], ids=["at a step", "at the end"])
@pytest.mark.parametrize("warmup", [0, 1])
def test_a_handler_that_raises_leaves_nothing_behind(active: int, warmup: int) -> None:
    model = Mlp()
    before = snapshot(model)
    told: list[int] = []
    prof = Profile(model, schedule=schedule(wait=0, warmup=warmup, active=active), on_trace_ready=raising(told))
    with pytest.raises(Stop):
        train(prof, model, 4)
    assert told == [warmup + 1 if active == 1 else 4]
    assert snapshot(model) == before
    assert prof.run.tree().calls == (1 if active == 1 else 4 - warmup)
    with Profile(model) as after:  # torch and torchprof are free again
        model(torch.rand(1, 4))
    assert after.run.tree().calls == 1


def test_a_handler_that_raises_and_is_forgiven_is_asked_again() -> None:
    model = Mlp()
    told: list[int] = []
    with Profile(model, schedule=schedule(wait=0, warmup=0, active=2, repeat=3), on_trace_ready=raising(told)) as prof:
        for _ in range(6):
            model(torch.rand(1, 4))
            with contextlib.suppress(Stop):
                prof.step()
    # The step that begins where it raised is not recorded: to begin it was not come to.
    assert told == [2, 4, 6]
    assert prof.run.tree().calls == 4


def test_a_handler_that_raises_without_a_schedule_leaves_a_run() -> None:
    model = Mlp()

    def ready(prof: Profile) -> None:
        raise Stop

    prof = Profile(model, on_trace_ready=ready)
    with pytest.raises(Stop):
        train(prof, model, 2)
    assert prof.run.tree().calls == 2


def test_an_error_in_the_loop_passes_and_what_was_recorded_stays() -> None:
    model = Mlp()
    before = snapshot(model)
    told = []
    prof = Profile(
        model, schedule=schedule(wait=0, warmup=1, active=3), on_trace_ready=lambda prof: told.append(prof.step_num)
    )
    with pytest.raises(Stop), prof:
        for number in range(9):
            model(torch.rand(1, 4))
            if number == 6:
                raise Stop
            prof.step()
    assert told == [4, 6]
    assert prof.run.tree().calls == 3 + 2
    assert prof.run.meta.steps == 3 + 1  # the step with the error did not end
    assert snapshot(model) == before


def test_a_warm_up_is_over_where_the_schedule_or_the_block_ends_it() -> None:
    """While torch is warm for a session of ours, another Profile says so: nobody may begin one."""
    model = Mlp()
    with Profile(model, schedule=actions(WARMUP, NONE, WARMUP)) as prof:
        with pytest.raises(TorchprofError, match="warm-up"):
            refuse_if_profiled()
        prof.step()
        refuse_if_profiled()
        prof.step()
        with pytest.raises(TorchprofError, match="warm-up"):
            refuse_if_profiled()
    refuse_if_profiled()


def test_another_profiler_in_a_wait_is_refused_and_the_loop_goes_on() -> None:
    model = Mlp()
    with Profile(model, schedule=schedule(wait=1, warmup=0, active=1, repeat=1)) as prof:
        with pytest.raises(TorchprofError, match=r"inside a torchprof\.Profile block"), torch.profiler.profile():
            pass
        prof.step()
        model(torch.rand(1, 4))
        prof.step()
    assert prof.run.tree().calls == 1


# start and stop, decorators


def test_start_and_stop_are_the_block() -> None:
    model = Mlp()
    before = snapshot(model)
    prof = Profile(model)
    with pytest.raises(TorchprofError, match="call start"):
        prof.stop()
    prof.start()
    with pytest.raises(TorchprofError, match="not reentrant"):
        prof.start()
    model(torch.rand(1, 4))
    prof.step()
    prof.stop()
    prof.stop()  # as leaving twice: nothing
    assert prof.run.tree().calls == 1 and prof.run.meta.steps == 1
    assert snapshot(model) == before
    with pytest.raises(TorchprofError, match="not reentrant"):
        prof.start()


def test_a_decorated_function_is_profiled_in_its_first_call() -> None:
    model = Mlp()
    before = snapshot(model)
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
    assert snapshot(model) == before
    assert torch.equal(forward(x), model(x))
    assert prof.run.tree().calls == 1


def test_a_decorated_function_that_raises() -> None:
    model = Mlp()
    before = snapshot(model)
    prof = Profile(model)

    @prof
    def fails() -> None:
        model(torch.rand(1, 4))
        raise Stop

    for _ in range(2):
        with pytest.raises(Stop):
            fails()
    assert prof.run.tree().calls == 1
    assert snapshot(model) == before


def test_a_decorated_method() -> None:
    model = Mlp()
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


def test_a_decorated_coroutine_is_profiled_until_it_is_done() -> None:
    model = Mlp()
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


def test_a_decorated_generator_is_profiled_until_it_is_done() -> None:
    model = Mlp()
    before = snapshot(model)
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
    assert snapshot(model) == before


def test_an_asynchronous_generator_is_refused() -> None:
    async def outputs() -> Any:
        yield 1

    with pytest.raises(TorchprofError, match="asynchronous generator, which Profile cannot decorate"):
        Profile(Mlp())(outputs)


def test_called_with_an_input_it_calls_the_model() -> None:
    model = Mlp()
    x = torch.rand(2, 4)
    with Profile(model) as prof:
        y = prof(x)
    assert torch.equal(y, model(x))
    assert torch.equal(prof(x=x), model(x))
    assert prof.run.tree().calls == 1
    with pytest.raises(TorchprofError, match="several models"):
        Profile([model])(x)


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
    """The layers' ranges of a trace by process and thread: start, end, name."""
    found: defaultdict[tuple[int, int], list[tuple[int, int, str]]] = defaultdict(list)
    for event in trace_of(path):
        if event["name"].startswith(PREFIX) and "!" not in event["name"]:
            start = ns(event["ts"])
            found[event["pid"], event["tid"]].append((start, start + ns(event["dur"]), event["name"]))
    return found


class Hostile(nn.Module):
    """Layers with names that a format might trip over, one inside the other."""

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
def test_a_trace_has_every_layers_range_in_its_place(suffix: str, tmp_path: Path) -> None:
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


def test_a_trace_to_where_none_can_be(tmp_path: Path) -> None:
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
def test_the_handler_for_tensorboard_writes_what_torchs_writes(
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
    ours = sorted((tmp_path / "a" / "b").iterdir())
    names = [[PATTERN.fullmatch(path.name) for path in files] for files in (ours, sorted((tmp_path / "c").iterdir()))]
    assert [[match and match.groups() for match in found] for found in names[:1]] == [
        [match and match.groups() for match in found] for found in names[1:]
    ]
    assert len(ours) == 2 and None not in names[0]
    for number, path in zip((1, 3), ours):
        assert steps_in([event["name"] for event in trace_of(path)]) == [f"pass {number:02}"]
        assert len(ranges_of(path)) == 1


def test_a_folder_for_traces_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    model = Mlp()
    before = snapshot(model)
    prof = Profile(model, on_trace_ready=tensorboard_trace_handler(tmp_path / "file" / "traces"))
    with pytest.raises(TorchprofError, match="No folder for traces can be made"):
        train(prof, model, 1)
    assert snapshot(model) == before


# What is left over


@pytest.mark.parametrize("options", [{}, {"profile_memory": True, "with_flops": True}], ids=["plain", "all"])
def test_a_cycle_leaves_no_session_and_no_files(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One session is alive at a time, without help of the garbage collector."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    sessions: list[weakref.ref[Any]] = []
    model = Mlp()

    def ready(prof: Profile) -> None:
        prof.export_chrome_trace(tmp_path / "trace.json")
        prof.raw()
        assert len(list((tmp_path / "temporary").iterdir())) == 1
        assert [session() for session in sessions if session() is not None] == []
        sessions.append(weakref.ref(prof._session))

    gc.collect()
    gc.disable()
    try:
        prof = Profile(model, schedule=schedule(wait=0, warmup=1, active=1), on_trace_ready=ready, **options)
        train(prof, model, 8)
    finally:
        gc.enable()
    assert len(sessions) == 4
    del prof
    gc.collect()
    assert list((tmp_path / "temporary").iterdir()) == []


def test_torchs_own_handler_for_tensorboard_works_too(tmp_path: Path) -> None:
    """Whoever comes from torch.profiler has it in the code."""
    model = Mlp()
    handler = torch.profiler.tensorboard_trace_handler(str(tmp_path), "worker")
    with Profile(model, schedule=schedule(wait=0, warmup=0, active=1, repeat=2), on_trace_ready=handler) as prof:
        for _ in range(3):
            model(torch.rand(3, 4))
            prof.step()
    written = sorted(tmp_path.iterdir())
    assert [path.name.startswith("worker.") for path in written] == [True, True]
    assert all("torchprof:Mlp" in path.read_text() for path in written)


def test_a_cycle_leaves_nothing_for_the_garbage_collector() -> None:
    model = Mlp()
    places = []

    def ready(prof: Profile) -> None:
        places.append(sum(type(one) is Place for one in gc.get_objects()))

    gc.collect()
    gc.disable()
    try:
        train(Profile(model, schedule=schedule(wait=0, warmup=1, active=1), on_trace_ready=ready), model, 8)
    finally:
        gc.enable()
    assert places == [0] * 4


def test_the_run_of_many_cycles_is_no_larger_than_that_of_few() -> None:
    """Rows are those of one cycle, and of each measure at most so many values are kept."""
    model = Mlp()
    sizes = []
    with Profile(model, schedule=schedule(wait=0, warmup=0, active=1)) as prof:
        for number in range(400):
            model(torch.rand(1, 4))
            prof.step()
            if number in (10, 399):
                run = prof._cycles.run
                assert run is not None
                sizes.append((len(run.rows), len(run.samples), len(run.rows.frames)))
    assert sizes[0] == sizes[1]
    spread = prof.run.samples[SampleKey(0, FORWARD, 0, "cpu", "step_cpu_ns")]
    assert spread.count == 400 and len(spread.sample) == spread.SIZE == 256


def test_a_cycle_has_no_warnings_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """The run of all cycles has those of each."""
    ended: list[str] = []

    def about_clock(*_: int) -> list[Caveat]:
        ended.append(f"The clock of cycle {len(ended) + 1}.")
        return [Caveat(ended[-1])]

    monkeypatch.setattr("torchprof.profile.cycle.about_clock", about_clock)
    monkeypatch.setattr("torchprof.profile.profile.missing_device", lambda _: Caveat("No such device."))
    model, x = Mlp(), torch.rand(2, 4)
    shown: list[list[str]] = []

    def own(run: Run) -> list[str]:
        return [one for one in sentences(run) if "clock" in one or "device" in one or "Called by other" in one]

    record = torch.profiler.ProfilerAction.RECORD_AND_SAVE
    with Profile(
        model, use_cuda=True, schedule=lambda _: record, on_trace_ready=lambda prof: shown.append(own(prof.run))
    ) as prof:
        model.fc1(x)
        prof.step()
        model(x)
    general, called = (
        "No such device.",
        "Called by other than the layer above them: Mlp.fc1 by code outside the model. ",
    )
    assert [[one.startswith(called) for one in cycle] for cycle in shown] == [[False, False, True], [False, False]]
    assert [cycle[:2] for cycle in shown] == [[general, ended[0]], [general, ended[1]]]
    assert own(prof.run)[:3] == [general, *ended] and len(own(prof.run)) == 4
