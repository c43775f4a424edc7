"""What ranks do in lockstep: own work and collectives, against counts of single ns, rows, and steps."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_attribute import MAIN, kernel, label, memory, op, user_label
from torch import nn

from torchprof import Profile, Run
from torchprof.attribute import (
    BACKWARD,
    FORWARD,
    OUTSIDE,
    Attribution,
    Event,
    Frame,
    Kind,
    Signature,
    Site,
)
from torchprof.lockstep import Locksteps, is_communication
from torchprof.run import GAP, STEP, WORK, GroupOfRanks, Layer, Lockstep, LockstepKey

NET, A, B = "torchprof:Net", "torchprof:Net.a", "torchprof:Net.b"
PATHS = [("Net",), ("Net", "a"), ("Net", "b")]
SITES = {NET: Site((0,)), A: Site((1,)), B: Site((2,))}
LAYERS = tuple(Layer(path, "Module") for path in PATHS)
GROUP = GroupOfRanks("0", "default_pg", 2)
OTHER = 2  # a thread
ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def step(at: int) -> Event:
    return Event(Kind.STEP, "torchprof:!step", at, at, MAIN)


def exchange(name: str, start: int, end: int, thread: int = 9) -> Event:
    return Event(Kind.COLLECTIVE, name, start, end, thread)


def seen(
    *events: Event,
    group: GroupOfRanks | None = GROUP,
    signatures: Sequence[Signature] = (),
    from_first_mark: bool = True,
) -> dict[LockstepKey, Lockstep]:
    """By what is in lockstep, of rank 3."""
    attribution = Attribution(SITES, PATHS)
    locksteps = Locksteps(LAYERS, 3, signatures, group, from_first_mark)
    for _ in locksteps.watch(attribution.attribute(events)):
        pass
    return locksteps.result()


def work(found: dict[LockstepKey, Lockstep], device: str = "cpu") -> dict[tuple[int, str, str], tuple[int, ...]]:
    return {
        (key.layer, key.phase, key.what): one.last_ns
        for key, one in found.items()
        if not key.is_collective and key.what != GAP and key.device == device
    }


def gap(found: dict[LockstepKey, Lockstep]) -> tuple[int, ...]:
    return found[LockstepKey(OUTSIDE, FORWARD, "cpu", GAP)].last_ns


# By hand


def test_own_work_by_layer_and_step() -> None:
    found = seen(
        step(0),
        op("aten::empty", 5, 10),
        label(NET, 10, 50),
        label(A, 20, 30),
        op("aten::mm", 22, 28),
        step(60),
        label(NET, 60, 70),
        step(100),
        op("aten::late", 110, 120),
    )
    assert work(found) == {
        (0, FORWARD, WORK): (40, 10),  # with what is below
        (1, FORWARD, WORK): (10, 0),
        (OUTSIDE, FORWARD, WORK): (5, 0),
        (OUTSIDE, FORWARD, STEP): (60, 40),  # all there was: nobody waited
    }
    assert gap(found) == (15, 30)
    assert {(one.ranks, one.counts, one.last_rank) for one in found.values()} == {((3,), (2,), (3, 3))}


def test_what_is_between_ops_while_a_collective_is_under_way_is_waiting() -> None:
    """In a layer, in a range of the user's, and in no range; what ops do meanwhile is work."""
    found = seen(
        step(0),
        label(NET, 10, 50),
        op("c10d::allreduce_", 12, 14),
        exchange("gloo:all_reduce", 15, 40),
        op("aten::mm", 20, 27),
        user_label("mine", 60, 80),
        exchange("gloo:all_reduce", 70, 90),
        step(100),
    )
    assert work(found) == {
        # 10 to 12, 14 to 15, the product, and 40 to 50
        (0, FORWARD, WORK): (2 + 1 + 7 + 10,),
        (OUTSIDE, FORWARD, WORK): (10,),
        (OUTSIDE, FORWARD, STEP): (20 + 10 + 10 + 10 + 10,),  # 0 to 10, 50 to 60, and 90 to 100 in no range
    }
    assert gap(found) == (30,)
    assert {key: one.ns for key, one in found.items() if key.is_collective} == {
        LockstepKey(0, FORWARD, "cpu", "all_reduce", GROUP): (25,),
        LockstepKey(OUTSIDE, FORWARD, "cpu", "all_reduce", GROUP): (20,),
    }


def test_while_another_thread_works_the_first_one_waits_for_it() -> None:
    """That is autograd's; what it does counts once, and its own gaps are nobody's."""
    found = seen(
        step(0),
        op("aten::a", 10, 20),
        op("aten::b", 30, 50, thread=OTHER),
        op("aten::c", 60, 70, thread=OTHER),
        op("aten::d", 80, 90),
        step(100),
    )
    assert work(found) == {
        (OUTSIDE, FORWARD, WORK): (10 + 20 + 10 + 10,),
        (OUTSIDE, FORWARD, STEP): (100,),
    }


def test_a_function_of_the_users_waits_as_python_does() -> None:
    """And the engine around it, and a node that is one: what an op of torch's own does meanwhile is work."""
    backward = Event(Kind.NODE, "autograd::engine::evaluate_function: MineBackward", 60, 90, MAIN, 1, MAIN)
    found = seen(
        step(0),
        op("Mine", 10, 40, sequence=1),
        op("c10d::allreduce_", 12, 14),
        exchange("gloo:all_reduce", 15, 35),
        op("aten::mul", 20, 23),
        backward,
        exchange("gloo:all_reduce", 65, 80),
        step(100),
    )
    assert work(found)[OUTSIDE, FORWARD, WORK] == (2 + 1 + 3 + 5,)
    assert work(found)[OUTSIDE, BACKWARD, WORK] == (30 - 15,)


def test_exchanges_count_in_steps() -> None:
    """As own work: what comes after the last step, or before the first of a session that began inside of one, does
    not; without steps all does."""
    events = [exchange("gloo:all_reduce", at, at + 10) for at in (5, 60, 110)]
    key = LockstepKey(OUTSIDE, FORWARD, "cpu", "all_reduce", GROUP)
    assert seen(step(0), events[0], step(50), events[1], step(100), events[2])[key].last_ns == (10, 10)
    late = seen(step(0), events[0], step(50), events[1], step(100), events[2], from_first_mark=False)
    assert late[key].counts == (1,)
    assert seen(step(0), *events)[key].counts == (3,)
    assert key not in seen(step(0), step(50), events[1])


def test_without_steps_all_is_one() -> None:
    found = seen(step(0), label(NET, 10, 50), exchange("gloo:broadcast", 55, 60), op("aten::mm", 70, 80))
    assert work(found) == {
        (0, FORWARD, WORK): (40,),
        (OUTSIDE, FORWARD, WORK): (10,),
        (OUTSIDE, FORWARD, STEP): (80 - 5,),
    }
    assert seen(label(NET, 10, 50))[LockstepKey(OUTSIDE, FORWARD, "cpu", STEP)].last_ns == (40,)


def test_what_comes_before_the_first_step_is_in_none() -> None:
    """A session that began in the middle of a step."""
    events = [label(NET, 10, 50), step(60), label(NET, 70, 75), step(100)]
    found = seen(step(0), *events, from_first_mark=False)
    assert work(found) == {(0, FORWARD, WORK): (5,), (OUTSIDE, FORWARD, STEP): (40,)}


def test_a_range_that_is_open_at_a_step_is_shared_out() -> None:
    found = seen(step(0), user_label("epoch", 10, 95), op("aten::mm", 20, 30), step(50), step(100))
    assert work(found) == {(OUTSIDE, FORWARD, WORK): (40, 45), (OUTSIDE, FORWARD, STEP): (50, 50)}


def test_kernels_count_in_the_step_that_launched_them() -> None:
    found = seen(
        step(0),
        label(NET, 5, 40),
        op("aten::mm", 10, 20, correlation=1),
        op("c10d::allreduce_", 25, 30, correlation=2),
        step(50),
        op("aten::mm", 60, 70, correlation=3),
        step(100),
        op("aten::mm", 105, 110, correlation=4),
        kernel("gemm", 30, 80, 1),
        kernel(ALL_REDUCE, 80, 140, 2),
        kernel("gemm", 140, 150, 3),
        kernel("late", 150, 160, 4),
        kernel("of nobody", 60, 67, 0),
    )
    assert work(found, "device") == {
        (0, FORWARD, WORK): (50, 0),
        (OUTSIDE, FORWARD, WORK): (0, 10 + 7),
        (OUTSIDE, FORWARD, STEP): (50, 17),
    }
    assert found[LockstepKey(0, FORWARD, "device", "allreduce", GROUP)].last_ns == (60,)


def test_a_kernel_says_its_group_itself() -> None:
    told = Signature(
        ((4,), (4,)), ("Float", "Float"), ("collective", "_allgather_base", "7", "mesh_tp", 4, "[0, 1, 2, 3]")
    )
    found = seen(
        label(NET, 0, 50),
        op("c10d::_allgather_base_", 5, 10, correlation=1),
        kernel(ALL_REDUCE, 20, 30, 1)._replace(signature=1),
        signatures=[Signature((), ()), told],
    )
    group = GroupOfRanks("7", "mesh_tp", 4, "[0, 1, 2, 3]")
    assert found[LockstepKey(0, FORWARD, "device", "_allgather_base", group)].ns == (10,)


def test_of_an_unknown_group_nothing_is_paired() -> None:
    found = seen(step(0), exchange("gloo:all_reduce", 10, 20), step(50), group=None)
    lockstep = found[LockstepKey(OUTSIDE, FORWARD, "cpu", "all_reduce", None)]
    assert (lockstep.counts, lockstep.ns, lockstep.last_ns) == ((1,), (10,), ())
    assert not lockstep.is_paired
    assert lockstep.waiting_ns(3) is None


@pytest.mark.parametrize("name", ["gloo:send", "gloo:recv", "nccl:send 0->1", "nccl:all_reduce"])
def test_what_is_no_collective_of_a_group_on_the_cpu(name: str) -> None:
    """What two ranks do is something else for each; nccl works on devices."""
    found = seen(step(0), exchange(name, 10, 20), step(50))
    assert not any(key.is_collective for key in found)
    assert work(found)[OUTSIDE, FORWARD, STEP] == (40,)


def test_memory_takes_no_time() -> None:
    assert work(seen(step(0), label(NET, 10, 20), memory(15, 64), step(30)))[0, FORWARD, WORK] == (10,)


@pytest.mark.parametrize(
    ("frames", "expected"),
    [
        ([("op", "aten::mm")], False),
        ([], False),
        ([("op", "c10d::allreduce_")], True),
        ([("op", "_c10d_functional::wait_tensor")], True),
        ([("op", "FSDP::pre_forward (layers.0)"), ("op", "aten::copy_")], True),
        ([("op", "aten::mm"), ("collective", "gloo:all_reduce")], True),
        ([("op", "aten::mm"), ("kernel", "gemm")], False),
        ([("op", "aten::mm"), ("kernel", ALL_REDUCE)], True),
        ([("label", "gloom")], False),
        ([("label", "record_param_comms")], True),
    ],
)
def test_what_is_communication(frames: list[tuple[str, str]], expected: bool) -> None:
    assert is_communication([Frame(*frame) for frame in frames]) is expected


# By counting single ns


class Range(NamedTuple):
    start: int
    end: int
    name: str
    thread: int


def _nested(draw: Any, start: int, end: int, depth: int, thread: int) -> list[Range]:
    """Ranges on one thread, outer before inner."""
    found: list[Range] = []
    at = start
    while at < end and draw(st.booleans()):
        first = draw(st.integers(at, end - 1))
        last = draw(st.integers(first + 1, end))
        name = draw(st.sampled_from([NET, A, B, "aten::mm", "c10d::barrier", "mine"]))
        found.append(Range(first, last, name, thread))
        if depth:
            found += _nested(draw, first, last, depth - 1, thread)
        at = last
    return found


@st.composite
def sessions(draw: Any) -> tuple[list[Range], list[tuple[int, int]], list[int]]:
    """Ranges of two threads, collectives, and the marks of steps, the first at 0."""
    ranges = _nested(draw, 0, 40, 3, MAIN) + _nested(draw, 0, 40, 1, OTHER)
    starts = draw(st.lists(st.integers(0, 39), max_size=3))
    collectives = [(start, draw(st.integers(start + 1, 50))) for start in starts]
    return ranges, collectives, [0, *sorted(draw(st.sets(st.integers(1, 39), max_size=2))), 40]


def event_of(one: Range) -> Event:
    if one.name in SITES:
        return label(one.name, one.start, one.end, one.thread)
    return (user_label if one.name == "mine" else op)(one.name, one.start, one.end, thread=one.thread)


@given(sessions())
@settings(max_examples=300, deadline=None)
def test_own_work_is_what_counting_each_ns_gives(
    session: tuple[list[Range], list[tuple[int, int]], list[int]],
) -> None:
    ranges, collectives, marks = session
    events = [(one.start, 1, number, event_of(one)) for number, one in enumerate(ranges)]
    events += [(start, 2, 0, exchange("gloo:all_reduce", start, end)) for start, end in collectives]
    events += [(at, 0, 0, step(at)) for at in marks]
    events.sort(key=lambda one: one[:3])
    lockstep = seen(*(event for *_, event in events))
    found = work(lockstep)
    # What exchanges take beside others counted once, it is how long any of them was under way.
    took = sum(one.ns[0] - one.beside_ns[0] for key, one in lockstep.items() if key.is_collective)
    assert took == sum(any(start <= at < end for start, end in collectives) for at in range(50))

    attribution = Attribution(SITES, PATHS)
    ordered = sorted(enumerate(ranges), key=lambda one: (one[1].start, one[0]))
    places = {
        number: item.place
        for (number, _), item in zip(ordered, attribution.attribute(event_of(one) for _, one in ordered))
    }
    expected: dict[tuple[int, str, str], list[int]] = defaultdict(lambda: [0] * (len(marks) - 1))
    for at in range(40):
        lap = sum(mark <= at for mark in marks) - 1
        waits = any(start <= at < end for start, end in collectives)
        inside = {
            thread: [number for number, one in enumerate(ranges) if one.thread == thread and one.start <= at < one.end]
            for thread in (MAIN, OTHER)
        }
        for thread, numbers in inside.items():
            if numbers:
                place = places[numbers[-1]]
                is_op = place.frame is not None and place.frame.kind == "op"
                if is_communication(place.frames) or (waits and not is_op):
                    continue
                expected[OUTSIDE, FORWARD, STEP][lap] += 1
                expected[place.layer, place.phase, WORK][lap] += 1
                if place.layer > 0:
                    expected[0, place.phase, WORK][lap] += 1
            elif thread == MAIN and not waits and not inside[OTHER]:
                expected[OUTSIDE, FORWARD, STEP][lap] += 1
                expected[OUTSIDE, FORWARD, GAP][lap] += 1
    found |= {(key.layer, key.phase, key.what): one.last_ns for key, one in lockstep.items() if key.what == GAP}
    assert {key: times for key, times in found.items() if any(times)} == {
        key: tuple(times) for key, times in expected.items() if any(times)
    }


# Of real sessions


@pytest.fixture
def in_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is rank 0 of 2, as far as variables tell."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Sequential(nn.Linear(8, 16), nn.ReLU())
        self.b = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x))


def three_steps(mark: bool = True) -> Run:
    net, x = Net(), torch.randn(3, 8)
    with Profile(net) as prof:
        for _ in range(3):
            net(x).sum().backward()
            time.sleep(0.001)
            if mark:
                prof.step()
    return prof.run


@pytest.mark.usefixtures("in_job")
def test_where_nobody_waits_it_is_what_rows_and_steps_say() -> None:
    """Rows hold the same time by another way, and the steps' own walk gave what each took."""
    run = three_steps()
    assert (run.meta.rank, run.meta.world_size) == (0, 2)
    steps = run.samples[next(key for key in run.samples if key.measure == "step_ns")]
    assert sorted(run.lockstep[LockstepKey(OUTSIDE, FORWARD, "cpu", STEP)].last_ns) == list(steps.sample)
    for phase in (FORWARD, BACKWARD):
        for node in run.tree(phase).walk():
            index = run.layers.index(node.layer)
            key = LockstepKey(index, phase, "cpu", WORK)
            assert run.lockstep[key].ns == (node.total.cpu_ns,)
            sample = next(
                spread
                for of, spread in run.samples.items()
                if (of.layer, of.phase, of.measure) == (index, phase, "step_cpu_ns")
            )
            assert sorted(run.lockstep[key].last_ns) == list(sample.sample)


@pytest.mark.usefixtures("in_job")
def test_a_block_without_steps_is_one() -> None:
    run = three_steps(mark=False)
    node = run.tree(FORWARD)
    assert run.lockstep[LockstepKey(0, FORWARD, "cpu", WORK)] == Lockstep(
        (0,), (1,), (node.total.cpu_ns,), (0,), (node.total.cpu_ns,), (0,)
    )


def test_a_process_that_is_no_rank_keeps_nothing_of_it() -> None:
    assert three_steps().lockstep == {}
