"""Own work and collectives of ranks, against counts of each ns, rows, and steps."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from build.events import MAIN, engine, kernel, label, memory, node, op, step, user_label, walk_of
from build.examples import examples
from build.exchanges import GROUP, exchange
from build.models import Mlp
from hypothesis import given
from hypothesis import strategies as st

import torchprof
from torchprof import Profile, Run
from torchprof.attribute.events import Event, Site
from torchprof.attribute.launches import CollectiveOwners
from torchprof.attribute.rule import Attribution
from torchprof.measure.fold import fold
from torchprof.measure.lockstep import Locksteps
from torchprof.measure.waiting import PROMPTLY_NS, is_communication
from torchprof.ranks import balance_of
from torchprof.run.collectives import Entered, Unfinished
from torchprof.run.layers import Layer
from torchprof.run.lockstep import EXCHANGES, GAP, STEP, WORK, GroupOfRanks, Lockstep, LockstepKey
from torchprof.run.measures import SampleKey, Spread
from torchprof.run.meta import Meta
from torchprof.run.words import BACKWARD, BEFORE, FORWARD, OUTSIDE, Frame, Signature

NET, A, B = "torchprof:Net", "torchprof:Net.a", "torchprof:Net.b"
PATHS = [("Net",), ("Net", "a"), ("Net", "b")]
SITES = {NET: Site((0,)), A: Site((1,)), B: Site((2,))}
LAYERS = tuple(Layer(path, "Module") for path in PATHS)
OTHER = 2  # a thread
MS = 1_000_000
ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def found_in(
    *events: Event,
    group: GroupOfRanks | None = GROUP,
    signatures: Sequence[Signature] = (),
    from_first_mark: bool = True,
) -> dict[LockstepKey, Lockstep]:
    """The results for rank 3."""
    attribution = Attribution(SITES, PATHS, None, None, CollectiveOwners({}, PATHS, [*signatures]))
    locksteps = Locksteps(LAYERS, 3, signatures, group, from_first_mark)
    for _ in locksteps.observe(walk_of(attribution, events)):
        pass
    return locksteps.result()["lockstep"]


def work(found: dict[LockstepKey, Lockstep], device: str = "cpu") -> dict[tuple[int, str, str], tuple[int, ...]]:
    return {
        (key.layer, key.phase, key.what): one.last_ns
        for key, one in found.items()
        if not key.is_collective and key.what not in (GAP, EXCHANGES) and key.device == device
    }


def gap(found: dict[LockstepKey, Lockstep]) -> tuple[int, ...]:
    return found[LockstepKey(OUTSIDE, FORWARD, "cpu", GAP)].last_ns


# By hand


def test_own_work_by_layer_and_step() -> None:
    found = found_in(
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
        (0, FORWARD, WORK): (40, 10),  # with the layers below
        (1, FORWARD, WORK): (10, 0),
        (OUTSIDE, FORWARD, WORK): (5, 0),
        (OUTSIDE, FORWARD, STEP): (60, 40),  # all of the time: there was no wait
    }
    assert gap(found) == (15, 30)
    assert {(one.ranks, one.counts, one.last_rank) for one in found.values()} == {((3,), (2,), (3, 3))}


def in_ms(*events: Event) -> list[Event]:
    return [one._replace(start_ns=round(one.start_ns * MS), end_ns=round(one.end_ns * MS)) for one in events]


def work_in_ms(found: dict[LockstepKey, Lockstep], device: str = "cpu") -> dict[tuple[int, str, str], list[float]]:
    return {key: [ns / MS for ns in times] for key, times in work(found, device).items()}


def test_a_gap_that_ends_with_a_collective_is_a_wait() -> None:
    """In a layer, in a range of the user, and in no range. Work while a collective runs is own work: ops, and the gap
    from 14 to 20, which ends long before the collective. A wait follows the last request, however long Python runs
    after it: from 90 to 100."""
    found = found_in(
        *in_ms(
            step(0),
            label(NET, 10, 50),
            op("c10d::allreduce_", 12, 14),
            exchange("gloo:all_reduce", 15, 40),
            op("aten::mm", 20, 27),
            op("aten::mm", 40, 42),
            user_label("mine", 60, 80),
            exchange("gloo:all_reduce", 70, 80),
            op("c10d::barrier", 82, 84),
            exchange("gloo:barrier", 84, 90),
            step(100),
        )
    )
    assert work_in_ms(found) == {
        # 10 to 12, 14 to 20, the two products, and 42 to 50
        (0, FORWARD, WORK): [2 + 6 + 7 + 2 + 8],
        (OUTSIDE, FORWARD, WORK): [10],
        # 0 to 10, 50 to 60, 80 to 82 and 90 to 100 in no range
        (OUTSIDE, FORWARD, STEP): [25 + 10 + 10 + 10 + 2 + 10],
    }
    assert gap(found) == (32 * MS,)
    assert {key: one.ns[0] / MS for key, one in found.items() if key.is_collective} == {
        LockstepKey(0, FORWARD, "cpu", "all_reduce", GROUP): 25,
        LockstepKey(OUTSIDE, FORWARD, "cpu", "all_reduce", GROUP): 10,
        LockstepKey(OUTSIDE, FORWARD, "cpu", "barrier", GROUP): 6,
    }
    assert found[LockstepKey(OUTSIDE, FORWARD, "cpu", EXCHANGES, GROUP)].ns == (41 * MS,)


@pytest.mark.parametrize("received", [40, 99, 105.05, 130])
def test_a_receive_that_was_posted_ahead_does_not_hide_work(received: float) -> None:
    """``w = dist.irecv(t, 0); model(x); w.wait()``: Net.a takes 100 ms of Python, whenever the data arrives. The rest
    of the receive after that is a wait."""
    found = found_in(
        *in_ms(
            step(0),
            op("c10d::recv_", 0, 1),
            exchange("gloo:recv", 1, received),  # type: ignore[arg-type]
            label(NET, 2, 110),
            label(A, 5, 105),
            op("aten::mm", 108, 109),
            op("aten::add", max(int(received), 110), max(int(received), 110) + 1),
            step(150),
        )
    )
    own = work_in_ms(found)
    assert own[1, FORWARD, WORK] == [100]
    assert own[0, FORWARD, WORK] == [108]
    waited = max(received - 110, 0)
    assert own[OUTSIDE, FORWARD, STEP] == [150 - waited - 1]  # and the op of c10d


def test_at_the_end_of_backward_a_loop_waits_even_if_it_continues_late() -> None:
    """DistributedDataParallel waits in no range, for a collective that it requested before. The machine may be busy:
    the thread continues at 60. In a layer, this would be Python's own work."""
    ran = [
        op("c10d::allreduce_", 2, 3),
        exchange("gloo:all_reduce", 3, 50),
        op("aten::mm", 5, 20),
        op("aten::add_", 60, 65),
    ]
    for around, place, own in (
        ([], (OUTSIDE, FORWARD, STEP), 70 - 1 - 30),
        ([user_label("ProfilerStep#1", 1, 69)], (OUTSIDE, FORWARD, STEP), 70 - 1 - 30),
        ([label(A, 1, 69)], (OUTSIDE, FORWARD, STEP), 70 - 1),
        ([engine(1, 69)], (OUTSIDE, BACKWARD, WORK), 68 - 1 - 30),
    ):
        assert work_in_ms(found_in(*in_ms(step(0), *around, *ran, step(70))))[place] == [own]


def test_a_collective_that_begins_after_a_gap_shows_nothing_about_it() -> None:
    """The thread continued late after the receive: it did not wait for it."""
    later = exchange("gloo:all_reduce", 101, 104)._replace(start_ns=100 * MS + 10_000, end_ns=100 * MS + 50_000)
    received = in_ms(step(0), op("aten::mm", 0, 1), exchange("gloo:recv", 2, 20))
    for events in (received, [*received, later]):
        found = work(found_in(*events, *in_ms(op("aten::mm", 100, 110), step(110))))
        assert found[OUTSIDE, FORWARD, STEP] == (110 * MS,)


def test_the_end_of_a_long_wait_may_be_recorded_late() -> None:
    """gloo's thread wakes the waiting thread before it ends its own range. Here it ends 0.8 ms after the wait."""
    for began, waited in (10, 40), (47, 0):  # a tenth of the gap: a short gap that ends before is Python's
        events = in_ms(step(0), exchange("gloo:all_reduce", 1, 50), op("aten::mm", 2, began), op("aten::mm", 50, 60))
        *before, after = events
        found = work(found_in(*before, after._replace(start_ns=50 * MS - 800_000), *in_ms(step(70))))
        own = 70 * MS - (waited and waited * MS - 800_000)
        assert found[OUTSIDE, FORWARD, STEP] == (own,)


def test_own_work_of_an_interleaved_pipeline() -> None:
    """Each forward of a chunk runs while the next receive is posted: only the gap before it is a wait."""
    events = [step(0)]
    for at in range(0, 400, 100):
        events += [
            op("c10d::recv_", at, at + 1),
            exchange("gloo:recv", at + 1, at + 90),  # for the next chunk
            label(A, at + 2, at + 60),
            op("aten::mm", at + 10, at + 20),
            op("c10d::send", at + 61, at + 62),
            exchange("gloo:send", at + 62, at + 75),
        ]
    own = work_in_ms(found_in(*in_ms(*events, step(400))))
    assert own[1, FORWARD, WORK] == [4 * 58]
    # In no layer: 1 to 2 and 60 to 61; the gap after the send ends 10 ms after the receive has, with the next chunk.
    assert own[OUTSIDE, FORWARD, STEP] == [4 * (58 + 2 + 38)]
    late = [one._replace(end_ns=one.end_ns + 10) if one.name == "gloo:recv" else one for one in events]
    assert work_in_ms(found_in(*in_ms(*late, step(400))))[OUTSIDE, FORWARD, STEP] == [4 * (58 + 2)]


def test_a_function_of_the_user_may_wait() -> None:
    """So may the engine's range around it, and its node. Time in an op of torch at that time is work."""
    backward = node("MineBackward", 60, 90, 1)
    found = found_in(
        *in_ms(
            step(0),
            op("Mine", 10, 40, sequence=1),
            op("c10d::allreduce_", 12, 14),
            exchange("gloo:all_reduce", 15, 35),
            op("aten::mul", 35, 38),
            backward,
            exchange("gloo:all_reduce", 65, 90),
            step(100),
        )
    )
    assert work_in_ms(found)[OUTSIDE, FORWARD, WORK] == [2 + 1 + 3 + 2]
    assert work_in_ms(found)[OUTSIDE, BACKWARD, WORK] == [30 - 25]


def unfinished(*events: Event, ended: int | None = None) -> Unfinished:
    attribution = Attribution(SITES, PATHS)
    locksteps = Locksteps(LAYERS, 3, (), GROUP, ended_ns=None if ended is None else ended * MS)
    for _ in locksteps.observe(walk_of(attribution, in_ms(*events))):
        pass
    (found,) = locksteps.result()["unfinished"]
    return found


def test_the_place_of_a_rank_that_hangs_in_a_layer() -> None:
    """From 130 on it was in Net.a, until an error ended the layer. It had called the collective of this step before."""
    found = unfinished(
        step(0),
        label(NET, 10, 90),
        step(100),
        label(NET, 110, 9_000),
        op("c10d::allreduce_", 112, 114),
        exchange("gloo:all_reduce", 114, 120),
        label(A, 122, 8_999),
        op("aten::mm", 125, 130),
        ended=9_010,
    )
    called = (Entered(0, FORWARD, "all_reduce", 1),)
    assert found == Unfinished(3, 8_910 * MS, (8_999 - 130) * MS, 1, FORWARD, "", False, called)


def test_without_steps_the_whole_recording_is_the_unfinished_step() -> None:
    found = unfinished(label(NET, 10, 900), label(A, 20, 60), label(B, 70, 899), ended=950)
    assert found == Unfinished(3, 940 * MS, 829 * MS, 2, FORWARD)


def test_the_place_of_a_rank_that_waits_for_a_collective() -> None:
    """It has just called one; or one runs that it called earlier, as DistributedDataParallel does. A rank that hangs in
    an op is in the op. A receive that runs meanwhile proves nothing."""
    begun = [step(0), step(100), label(NET, 110, 5_000), op("c10d::allreduce_", 112, 114)]
    called = (Entered(0, FORWARD, "all_reduce", 1),)
    waits = Unfinished(3, 4_900 * MS, (5_000 - 114) * MS, 0, FORWARD, "all_reduce", True, called)
    assert unfinished(*begun) == waits
    under_way = exchange("gloo:all_reduce", 113, 5_000)
    found = unfinished(*begun, under_way, op("aten::mm", 120, 130))
    assert found == replace(waits, since_ns=(5_000 - 130) * MS)
    found = unfinished(*begun, under_way, op("aten::mm", 120, 4_990))
    assert (found.name, found.waits, found.since_ns) == ("aten::mm", False, (4_990 - 120) * MS)
    received = exchange("gloo:recv", 113, 5_000)
    found = unfinished(*begun[:3], op("c10d::recv_", 112, 113), received, label(A, 120, 4_900))
    assert (found.layer, found.name, found.waits, found.entered) == (1, "", False, ())


def test_exchanges_count_in_steps() -> None:
    """Like own work: exchanges after the last step do not count, nor those before the first if the session began inside
    a step. Without steps, all count."""
    events = [exchange("gloo:all_reduce", at, at + 10) for at in (5, 60, 110)]
    key = LockstepKey(OUTSIDE, FORWARD, "cpu", "all_reduce", GROUP)
    assert found_in(step(0), events[0], step(50), events[1], step(100), events[2])[key].last_ns == (10, 10)
    late = found_in(step(0), events[0], step(50), events[1], step(100), events[2], from_first_mark=False)
    assert late[key].counts == (1,)
    assert found_in(step(0), *events)[key].counts == (3,)
    assert key not in found_in(step(0), step(50), events[1])


def test_without_steps_the_whole_recording_is_one_step() -> None:
    found = found_in(step(0), label(NET, 10, 50), exchange("gloo:broadcast", 55, 60), op("aten::mm", 70, 80))
    assert work(found) == {
        (0, FORWARD, WORK): (40,),
        (OUTSIDE, FORWARD, WORK): (10,),
        (OUTSIDE, FORWARD, STEP): (80 - 5,),
    }
    assert found_in(label(NET, 10, 50))[LockstepKey(OUTSIDE, FORWARD, "cpu", STEP)].last_ns == (40,)


def test_work_before_the_first_step_is_in_no_step() -> None:
    """A session that began in the middle of a step."""
    events = [label(NET, 10, 50), step(60), label(NET, 70, 75), step(100)]
    found = found_in(step(0), *events, from_first_mark=False)
    assert work(found) == {(0, FORWARD, WORK): (5,), (OUTSIDE, FORWARD, STEP): (40,)}


def test_kernels_count_in_the_step_that_launched_them() -> None:
    found = found_in(
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
    assert found[LockstepKey(0, FORWARD, "device", "all_reduce", GROUP)].last_ns == (60,)


def test_kernels_launched_before_the_recording_do_not_count() -> None:
    """Neither as own work nor as a collective: another rank may have ended its part before its recording."""
    found = found_in(
        step(0),
        op("aten::mm", 10, 20, correlation=1),
        step(50),
        kernel(ALL_REDUCE, 1, 8, BEFORE),
        kernel("gemm", 8, 19, BEFORE),
        kernel("gemm", 30, 80, 1),
    )
    assert work(found, "device") == {(OUTSIDE, FORWARD, WORK): (50,), (OUTSIDE, FORWARD, STEP): (50,)}
    assert not [key for key in found if key.is_collective]


def test_a_kernel_that_only_its_arguments_call_a_collective_has_its_group_and_is_no_work() -> None:
    recorded = Signature(
        ((4,), (4,)), ("Float", "Float"), ("collective", "_allgather_base", "7", "mesh_tp", 4, "[0, 1, 2, 3]")
    )
    found = found_in(
        label(NET, 0, 50),
        op("my::put", 5, 10, correlation=1),
        kernel("multimem", 20, 30, 1)._replace(signature=1),
        signatures=[Signature((), ()), recorded],
    )
    group = GroupOfRanks("7", "mesh_tp", 4, "[0, 1, 2, 3]")
    assert found[LockstepKey(0, FORWARD, "device", "all_gather", group)].ns == (10,)
    assert not any(figures for (_, _, what), figures in work(found, "device").items() if what == WORK)


def test_a_collective_on_the_cpu_has_the_group_in_its_inputs() -> None:
    """It has that of the session otherwise."""
    recorded = Signature((None, None), ("", ""), ("collective", "all_reduce", "7", "mesh_tp", 2, "[0, 2]"))
    found = found_in(
        exchange("gloo:all_reduce", 20, 30, signature=1),
        exchange("gloo:all_reduce", 40, 45),
        signatures=[Signature((), ()), recorded],
    )
    group = GroupOfRanks("7", "mesh_tp", 2, "[0, 2]")
    assert found[LockstepKey(OUTSIDE, FORWARD, "cpu", "all_reduce", group)].ns == (10,)
    assert found[LockstepKey(OUTSIDE, FORWARD, "cpu", EXCHANGES, group)].ns == (10,)
    assert found[LockstepKey(OUTSIDE, FORWARD, "cpu", "all_reduce", GROUP)].ns == (5,)


def test_collectives_of_an_unknown_group_are_not_paired() -> None:
    found = found_in(step(0), exchange("gloo:all_reduce", 10, 20), step(50), group=None)
    lockstep = found[LockstepKey(OUTSIDE, FORWARD, "cpu", "all_reduce", None)]
    assert (lockstep.counts, lockstep.ns, lockstep.last_ns) == ((1,), (10,), ())
    assert not lockstep.is_paired
    assert lockstep.waiting_ns(3) is None


@pytest.mark.parametrize("name", ["gloo:send", "gloo:recv", "nccl:send 0->1", "nccl:all_reduce"])
def test_operations_on_the_cpu_that_are_no_collectives_of_a_group(name: str) -> None:
    """Two ranks do different things in a send and receive; nccl runs on devices."""
    found = found_in(*in_ms(step(0), exchange(name, 10, 20), step(50)))
    assert not any(key.is_collective for key in found)
    assert work_in_ms(found)[OUTSIDE, FORWARD, STEP] == [50]  # and nothing shows that Python waited


def test_memory_takes_no_time() -> None:
    assert work(found_in(step(0), label(NET, 10, 20), memory(15, 64), step(30)))[0, FORWARD, WORK] == (10,)


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


def rank_that_loads(rank: int, steps: int = 8, ranks: int = 4) -> Run:
    """75 ms a step: rank 2 loads data for 62 ms, the others for 2 ms. Each launches 10 ms of kernels and an all-reduce,
    which ends at the same time on all ranks."""
    group = GroupOfRanks("0", "default_pg", ranks)
    events = [step(0)]
    for at in range(0, 75 * steps, 75):
        loaded = at + (62 if rank == 2 else 2)
        events += [
            op("aten::copy_", at, loaded),
            label(NET, loaded, loaded + 2),
            op("aten::mm", loaded, loaded + 1, correlation=at + 1),
            op("c10d::allreduce_", loaded + 1, loaded + 2, correlation=at + 2),
            kernel("gemm", loaded + 1, loaded + 11, at + 1),
            kernel(ALL_REDUCE, loaded + 11, at + 75, at + 2),
            step(at + 75),
        ]
    attribution = Attribution(SITES, PATHS)
    locksteps = Locksteps(LAYERS, rank, (), group)
    found = [*locksteps.observe(walk_of(attribution, in_ms(*sorted(events, key=lambda one: one.start_ns))))]
    rows, samples, _ = fold(found, attribution.places.all, LAYERS, rank)
    samples[SampleKey(OUTSIDE, FORWARD, rank, "cpu", "step_ns")] = Spread.of([(at, 75 * MS) for at in range(steps)])
    meta = Meta(("Net",), rank, ranks, device="cuda", measured=("cpu_ns", "device_ns"), steps=steps)
    return Run((meta,), LAYERS, rows, samples, lockstep=locksteps.result()["lockstep"])


def test_a_rank_that_loads_data_for_longer_is_the_straggler_on_devices_too() -> None:
    """Its kernels take as long as those of the others, and the other ranks wait for it."""
    text = torchprof.merge(map(rank_that_loads, range(4))).report("ranks").split("\n\n")[0]
    assert text == (
        "4 ranks. Rank 2 is the straggler: in collectives the others wait 60.000ms a step longer than it (median), 80% "
        "of a step. Most of the difference is outside of all layers: 60.000ms a step."
    )
    balance = balance_of(torchprof.merge(map(rank_that_loads, range(4))))
    assert [one.last_in for one in balance.ranks] == [(0, 8), (0, 8), (8, 8), (0, 8)]
    assert [one.typical_ns for one in balance.ranks] == [10 * MS] * 4


# By counting each ns


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
@examples(300)
def test_own_work_equals_a_count_of_each_ns(session: tuple[list[Range], list[tuple[int, int]], list[int]]) -> None:
    """Times are in ms: this is how promptly a thread continues after a wait."""
    assert PROMPTLY_NS == MS
    ranges, collectives, marks = session
    events = [(one.start, 1, number, event_of(one)) for number, one in enumerate(ranges)]
    events += [(start, 2, 0, exchange("gloo:all_reduce", start, end)) for start, end in collectives]
    events += [(at, 0, 0, step(at)) for at in marks]
    events.sort(key=lambda one: one[:3])
    lockstep = found_in(*in_ms(*(event for *_, event in events)))
    found = work_in_ms(lockstep)
    # If overlapping exchanges count once, the sum is the time in which any of them ran.
    took = sum(one.ns[0] - one.beside_ns[0] for key, one in lockstep.items() if key.is_collective)
    together = sum(any(start <= at < end for start, end in collectives if start < marks[-1]) for at in range(50))
    assert took == together * MS
    whole = [one.ns[0] for key, one in lockstep.items() if key.what == EXCHANGES]
    assert sum(whole) == took

    attribution = Attribution(SITES, PATHS)
    ordered = sorted(enumerate(ranges), key=lambda one: (one[1].start, one[0]))
    items = [*walk_of(attribution, (event_of(one) for _, one in ordered))]
    places = {
        number: item.place
        for thread in (MAIN, OTHER)  # events of different threads that start at the same time have no order
        for (number, _), item in zip(
            (one for one in ordered if one[1].thread == thread), (one for one in items if one.event.thread == thread)
        )
    }

    def is_op(number: int) -> bool:
        frame = places[number].frame
        return frame is not None and frame.kind == "op"

    def communicates(number: int) -> bool:
        return is_communication(places[number].frames)

    def waits(thread: int, at: int) -> bool:
        """Whether a thread that runs no op waits at a time, by the gap around this time."""
        of_thread = [(number, one) for number, one in enumerate(ranges) if one.thread == thread]
        cuts = [*marks] + [cut for _, one in of_thread for cut in (one.start, one.end)]
        start, end = max(cut for cut in cuts if cut <= at), min(cut for cut in cuts if cut > at)
        late = end - start >= 10  # a wait may end 1 ms before the record of its collective, if it is ten times as long
        ended = [one for one in collectives if start < one[1] <= end + late and one[0] < end]
        inside = [number for number, one in of_thread if one.start <= at < one.end]
        place = places[inside[-1]] if inside else None
        in_loop = place is None or (place.layer == OUTSIDE and [frame.kind for frame in place.frames][-1:] == ["label"])
        if not any(one[1] >= end - 1 for one in ended) and not in_loop:
            before = [cut for _, one in of_thread for cut in (one.start, one.end) if cut <= start]
            # The outermost of the ranges that ended last, if none has begun since.
            last = [number for number, one in of_thread if before and one.end == max(before)]
            begun = any(before and one.start == max(before) for _, one in of_thread)
            ended = ended if last and not begun and communicates(last[0]) else []
        return any(first <= at < until for first, until in ended)

    expected: dict[tuple[int, str, str], list[int]] = defaultdict(lambda: [0] * (len(marks) - 1))
    for at in range(40):
        lap = sum(mark <= at for mark in marks) - 1
        inside = {
            thread: [number for number, one in enumerate(ranges) if one.thread == thread and one.start <= at < one.end]
            for thread in (MAIN, OTHER)
        }
        for thread, numbers in inside.items():
            if numbers:
                place = places[numbers[-1]]
                if communicates(numbers[-1]) or (not is_op(numbers[-1]) and waits(thread, at)):
                    continue
                expected[OUTSIDE, FORWARD, STEP][lap] += 1
                expected[place.layer, place.phase, WORK][lap] += 1
                if place.layer > 0:
                    expected[0, place.phase, WORK][lap] += 1
            elif thread == MAIN and not waits(MAIN, at) and not inside[OTHER]:
                expected[OUTSIDE, FORWARD, STEP][lap] += 1
                expected[OUTSIDE, FORWARD, GAP][lap] += 1
    found |= {
        (key.layer, key.phase, key.what): [ns / MS for ns in one.last_ns]
        for key, one in lockstep.items()
        if key.what == GAP
    }
    assert {key: times for key, times in found.items() if any(times)} == {
        key: times for key, times in expected.items() if any(times)
    }


# Real sessions


@pytest.fixture
def in_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its environment variables, this process is rank 0 of 2."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")


def three_steps(mark: bool = True, passes: int = 3) -> Run:
    net, x = Mlp(), torch.randn(3, 4)
    with Profile(net) as prof:
        for _ in range(passes):
            net(x).sum().backward()
            time.sleep(0.001)
            if mark:
                prof.step()
    return prof.run


@pytest.mark.usefixtures("in_job")
@pytest.mark.parametrize("mark", [True, False])
def test_without_waits_own_work_equals_rows_and_steps(mark: bool) -> None:
    """Rows have the same time, computed in another way, and so do the samples of steps."""
    run = three_steps(mark)
    assert (run.meta.rank, run.meta.world_size) == (0, 2)
    steps = run.samples[next(key for key in run.samples if key.measure == "step_ns")]
    assert sorted(run.lockstep[LockstepKey(OUTSIDE, FORWARD, "cpu", STEP)].last_ns) == list(steps.sample)
    for phase in (FORWARD, BACKWARD):
        for branch in run.tree(phase).walk():
            index = run.layers.index(branch.layer)
            key = LockstepKey(index, phase, "cpu", WORK)
            assert run.lockstep[key].ns == (branch.total.cpu_ns,)
            sample = next(
                spread
                for of, spread in run.samples.items()
                if (of.layer, of.phase, of.measure) == (index, phase, "step_cpu_ns")
            )
            assert sorted(run.lockstep[key].last_ns) == list(sample.sample)


@pytest.mark.usefixtures("in_job")
def test_a_block_without_steps_is_one() -> None:
    run = three_steps(mark=False, passes=1)
    node = run.tree(FORWARD)
    assert run.lockstep[LockstepKey(0, FORWARD, "cpu", WORK)] == Lockstep(
        (0,), (1,), (node.total.cpu_ns,), (0,), (node.total.cpu_ns,), (0,)
    )


def test_a_process_that_is_no_rank_has_no_lockstep_data() -> None:
    assert three_steps().lockstep == {}


@pytest.mark.parametrize("engine_recorded", [True, False], ids=["the engine's call", "only its nodes"])
def test_an_exchange_that_gloo_ends_late_after_backward_of_ddp_is_a_wait(engine_recorded: bool) -> None:
    """On a busy machine gloo ends its range 10 ms after the thread that waited went on to the optimizer."""
    last = [op("optimizer", 50, 65), step(70)]

    def own_ms(*wrapper: Event, call: Sequence[Event] = (), after: Sequence[Event] = ()) -> float:
        forward = [step(0), label(NET, 1, 15), *wrapper, op("add", 3, 14, sequence=1)]
        backward = [*call, node("add", 20, 30, 1), exchange("gloo:all_reduce", 25, 60), *after]
        found = found_in(*in_ms(*forward, *backward, *last))
        return found[LockstepKey(OUTSIDE, FORWARD, "cpu", STEP)].last_ns[0] / MS

    ddp = user_label("DistributedDataParallel.forward", 2, 15)
    call = [engine(20, 50)] if engine_recorded else []
    assert own_ms(ddp, call=call) == 70 - 20  # it waits from the end of the last node to the optimizer
    assert own_ms(ddp, after=[op("work", 30, 30.5)]) == 70  # something ran after the last node
    assert own_ms(call=call) == (50 if engine_recorded else 70)  # Python may run: nothing waits for the exchange here
