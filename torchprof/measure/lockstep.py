"""The own work of a rank in each step, and its collectives: what the ranks of a job do in lockstep."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import repeat
from typing import Any, NamedTuple

from torchprof.attribute.event_columns import Intervals
from torchprof.attribute.event_names import is_node_range
from torchprof.attribute.events import Attributed, Event, Kind, Place
from torchprof.attribute.op_groups import OpGroup
from torchprof.measure.busy import Covered, covered_ns
from torchprof.measure.recording import OpenStep, Pieces
from torchprof.measure.steps import RECORDING_END
from torchprof.measure.waiting import LastStep, Stall, ThreadState, Waiting, is_communication, open_until
from torchprof.run.collectives import POINT_TO_POINT, Collective, collective_of, name_of_collective
from torchprof.run.groups import sums_by_key
from torchprof.run.layers import Layer, Layers
from torchprof.run.lockstep import EXCHANGES, GAP, NOT_RECORDED, STEP, WORK, GroupOfRanks, Lockstep, LockstepKey
from torchprof.run.words import (
    BEFORE,
    FORWARD,
    INTERRUPTIONS,
    OUTSIDE,
    WAITS_FOR_THREADS,
    Frame,
    FrameKind,
    Signature,
    is_host_collective,
)

_DDP = "DistributedDataParallel."
"""The prefix of torch's ranges of this wrapper, which waits for its exchanges after the last node of backward."""
_CallTimes = tuple[int, int, int]
"""Of a call of a collective: how long it took, during how much of that an earlier one was running, and its step."""


class _WorkIn(NamedTuple):
    """What time in a place is. ``is_own``: own work of the rank. ``never_waits``: no wait, as in an op of torch."""

    is_own: bool
    never_waits: bool


class Locksteps:
    """Observes all events of one rank: its own work in each step, and its collectives.

    Own work on the CPU is all time in ops and between ops, inside and outside layers, except communication with all
    inside it, waits for an exchange (see ``Waiting``), and waits for backward on other threads. Own work on a device is
    the time of all kernels, copies and sets, except those of communication. It counts in the step in which it ran, on a
    device in the step of its launch.

    Example: in a step of 10 ms, ops run for 6 ms and Python for 1 ms; then the thread waits 3 ms for an all_reduce of
    gloo. Its own work is 7 ms.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        rank: int,
        signatures: Sequence[Signature],
        group: GroupOfRanks | None,
        from_first_mark: bool = True,
        ended_ns: int | None = None,
        is_cycle: bool = False,
        before: OpenStep | None = None,
    ) -> None:
        """``group``: of the collectives that do not name one, as on the CPU; None if there are several,
        ``NOT_RECORDED`` if no group is known. ``ended_ns``: when the recording ended, None for the end of the last
        event. The others as in ``Steps``."""
        self._ended_ns = ended_ns
        self._is_cycle = is_cycle
        self._before = before
        self._cut_ns = 0  # the end of a cycle, in the middle of a step
        self._layers = Layers.of(layers)
        self._rank = rank
        self._signatures = signatures
        self._group = group
        self._from_first_mark = from_first_mark
        self._threads: dict[int, ThreadState] = {}
        self._main = 0
        self._own_ns: defaultdict[Place, int] = defaultdict(int)  # of the current step
        self._gap_ns = 0  # of the current step: time in no range of any thread
        self._steps: list[tuple[Counter[tuple[int, str]], int]] = []  # own work by layer and phase, and gap
        self._marks: list[int] = []
        self._launched: dict[int, int] = {}  # correlation of an op → number of marks before it
        self._kernels: defaultdict[int, defaultdict[tuple[int, str], int]] = defaultdict(lambda: defaultdict(int))
        self._unknown_streams: defaultdict[str, set[int]] = defaultdict(set)  # by device: of collectives of no group
        self._of_kernels: dict[Place, tuple[LockstepKey | None, bool]] = {}  # the collective; whether it is own work
        self._host_collectives: dict[Place, LockstepKey] = {}
        # Of each call: its time, during how much of that an earlier one was running, and the number of marks before it.
        self._collectives: defaultdict[LockstepKey, list[tuple[int, int, int]]] = defaultdict(list)
        self._latest_end: dict[str, int] = {}  # by device: the latest end of a collective that has begun
        self._any_running: dict[LockstepKey, Covered] = {}  # the time in which any collective of a group runs
        self._any_running_ns: defaultdict[LockstepKey, Counter[int]] = defaultdict(Counter)  # by number of marks
        self._waiting = Waiting()
        self._elsewhere = Intervals()  # the outermost ranges of all threads but the one with the steps
        self._work_in: dict[Place, _WorkIn] = {}
        self._last = LastStep()
        self._uses_ddp = False  # so far

    def observe(self, stream: Iterable[Attributed | OpGroup]) -> Iterator[Attributed | OpGroup]:
        kernel, collective, step = Kind.KERNEL, Kind.COLLECTIVE, Kind.STEP
        no_ranges = (Kind.MEMORY, Kind.STOPPED, Kind.SAMPLE)
        threads = self._threads
        for given in stream:
            yield given
            for item in self._ranges_of(given) if isinstance(given, OpGroup) else (given,):
                event, place, _, _, ns, _ = item
                kind, _, start, end, number, _, _, correlation, *_ = event
                if kind is kernel:
                    if correlation != BEFORE:
                        self._on_kernel(event, place, ns)
                elif kind is collective:
                    name = name_of_collective(event.name)
                    is_of_all = not name.startswith(POINT_TO_POINT)
                    is_on_host = is_host_collective(event.name)
                    if is_on_host:
                        self._waiting.add(start, end, is_of_all)
                        self._last.exchanges.append((start, end, place))
                    if is_on_host and is_of_all:
                        self._add_collective(self._key_of(place, name), start, end, bisect_right(self._marks, start))
                    elif correlation:
                        self._launched[correlation] = len(self._marks)
                elif kind is step:
                    if place is RECORDING_END:
                        self._cut_ns = end
                    else:
                        self._main = number
                        self._mark(end)
                elif kind not in no_ranges:
                    if (thread := threads.get(number)) is None:
                        thread = threads[number] = ThreadState(start)
                        self._main = self._main or number
                    self._advance(number, start)
                    if thread.innermost is None and number != self._main:
                        self._elsewhere.add(start, start + ns)
                    thread.innermost = item
                    thread.last_start = start
                    if kind is not Kind.INTERRUPTION and kind is not Kind.WAIT:  # these come at any time
                        thread.has_requested = thread.has_run_backward = False
                    self._uses_ddp |= place.name.startswith(_DDP)
                    if not self._work_of(place).is_own:
                        self._last.note_request(place)
                    if correlation:
                        self._launched[correlation] = len(self._marks)

    def _ranges_of(self, group: OpGroup) -> Iterable[Attributed]:
        """The events of a group that say more than its outermost operators do: all, if any may be an autograd function
        of the user. Notes what all of them launch."""
        if group.tree.functions:
            return group.items()
        if correlations := group.columns.correlation:
            self._launched.update(zip(correlations[group.first : group.after], repeat(len(self._marks))))
            self._launched.pop(0, None)
        return group.outermost_items()

    def _mark(self, time: int) -> None:
        """A step ends here, and the next begins."""
        self._threads.setdefault(self._main, ThreadState(time))
        if self._marks:
            self._end_step(time)
        if self._marks or self._from_first_mark:
            self._advance_all(time)
            self._own_ns.clear()  # what was before does not belong to the current step
            self._gap_ns = 0
            self._marks.append(time)
            self._last = LastStep()
        self._from_first_mark = True

    def _advance_all(self, until: int) -> None:
        for number in self._threads:
            self._advance(number, until)

    def _end_step(self, time: int) -> None:
        self._advance_all(time)
        sums = sums_by_key(((place.layer, place.phase), ns) for place, ns in self._own_ns.items())
        self._steps.append((sums, self._gap_ns))

    def _advance(self, number: int, until: int) -> None:
        """Count the time of a thread up to ``until``, each part for its innermost range."""
        thread = self._threads[number]
        item, time = thread.innermost, thread.until
        while item is not None and (end := item.event.start_ns + item.ns) <= until:
            place, item = item.place, item.outer
            if end > time:
                self._add_interval(number, place, time, end)
                time = end
            if place.kind not in INTERRUPTIONS and place.kind != FrameKind.WAIT:
                thread.has_requested = not self._work_of(place).is_own
                thread.has_run_backward = self._uses_ddp and (place.is_engine or place.is_node)
        thread.innermost = item
        if until > time and (item is not None or number == self._main):
            self._add_interval(number, None if item is None else item.place, time, until)
        thread.until = max(time, until)

    def _work_of(self, place: Place) -> _WorkIn:
        if (work := self._work_in.get(place)) is None:
            # A Function of the user may call code that waits, like all Python. So may the engine's range around it.
            is_op = place.kind == FrameKind.OP and "::" in place.name and not is_node_range(place.name)
            never_waits = is_op or place.kind in INTERRUPTIONS
            waits = place.kind == FrameKind.WAIT and place.name != WAITS_FOR_THREADS  # which work for this rank
            is_own = not waits and not is_communication(place.frames)
            work = self._work_in[place] = _WorkIn(is_own, never_waits)
        return work

    def _add_interval(self, number: int, place: Place | None, start: int, end: int) -> None:
        """Count an interval in which a thread began nothing new. ``place``: of its innermost range, if it is in one."""
        thread = self._threads[number]
        has_requested = thread.has_requested
        if number == self._main:
            if end - start > self._last.longest.ns:
                self._last.longest = Stall(end - start, start, place, has_requested)
        elif end - start > self._last.longest_elsewhere.ns:
            self._last.longest_elsewhere = Stall(end - start, start, place, has_requested)
        if place is None:
            waits = self._waiting.within(start, end, True, thread.has_run_backward)
            self._gap_ns += end - start - covered_ns([*waits, *self._elsewhere.within(start, end)])
            return
        is_own, never_waits = self._work_of(place)
        if is_own and never_waits:
            self._own_ns[place] += end - start
        elif is_own:
            is_of_loop = place.kind == FrameKind.LABEL and place.layer == OUTSIDE and place.phase == FORWARD
            for_any = has_requested or is_of_loop or place.is_engine
            waits = self._waiting.within(start, end, for_any, place.is_engine or thread.has_run_backward)
            self._own_ns[place] += end - start - covered_ns(waits)

    def _on_kernel(self, event: Event, place: Place, ns: int) -> None:
        marks = self._launched.get(event.correlation)
        if marks is None:  # its launch was not recorded: it counts in the step in which it ran
            marks = bisect_right(self._marks, event.start_ns)
        if (known := self._of_kernels.get(place)) is None:
            key = self._collective_of(place)  # of some kernels only the arguments say that they are one
            known = self._of_kernels[place] = key, key is None and not is_communication(place.frames)
        key, is_work = known
        if key is not None:
            self._add_collective(key, event.start_ns, event.end_ns, marks)
            if key.group == NOT_RECORDED:
                self._unknown_streams[event.device].add(event.thread)
        if is_work:
            self._kernels[self._step_of(marks)][place.layer, place.phase] += ns

    def _step_of(self, marks: int) -> int:
        """The number of the step after this many marks. Without steps, the whole recording is one step."""
        return marks - 1 if len(self._marks) > 1 else 0

    def _add_collective(self, key: LockstepKey, start: int, end: int, marks: int) -> None:
        latest_end = self._latest_end.get(key.device, start)
        self._latest_end[key.device] = max(latest_end, end)
        self._collectives[key].append((end - start, max(0, min(latest_end, end) - start), marks))
        if key.group is not None:
            exchanges = LockstepKey(OUTSIDE, FORWARD, key.device, EXCHANGES, key.group)
            running = self._any_running.setdefault(exchanges, Covered(start))
            self._any_running_ns[exchanges][marks] += running.add(start, end)

    def _collective_of(self, place: Place) -> LockstepKey | None:
        """The collective of all ranks of a group that a kernel runs; None for other kernels."""
        frames = self._frames_of(place)
        collective = collective_of(frames) if is_communication(frames[-1:]) else None
        if collective is None or collective.name.startswith(POINT_TO_POINT):
            return None
        return LockstepKey(place.layer, place.phase, "device", collective.name, self._group_of(collective))

    def _key_of(self, place: Place, name: str) -> LockstepKey:
        """The collective of all ranks of a group that the CPU runs in a place."""
        if (key := self._host_collectives.get(place)) is None:
            collective = collective_of(self._frames_of(place)[-1:])
            group = self._group if collective is None else self._group_of(collective)
            key = self._host_collectives[place] = LockstepKey(place.layer, place.phase, "cpu", name, group)
        return key

    def _group_of(self, collective: Collective) -> GroupOfRanks | None:
        """The group that a collective names, else the one of those that name none."""
        if not collective.group:
            return self._group
        return GroupOfRanks(collective.group, collective.description, collective.size, collective.ranks)

    def _frames_of(self, place: Place) -> list[Frame]:
        """The frames of a place, outer to inner, with their signatures."""
        frames: list[Frame] = []
        outer: Place | None = place
        while outer is not None and outer.frame is not None:
            signature = self._signatures[outer.signature] if outer.signature else None
            frames.insert(0, outer.frame._replace(signature=signature))
            outer = outer.outer
        return frames

    def result(self) -> dict[str, Any]:
        """Own work in each step, and collectives; the state of the rank when the recording ended; and for a cycle, the
        part of the step that is open at its end."""
        since = self._marks[-1] if self._marks else None
        unfinished = self._last.unfinished(self._rank, self._threads, self._main, since, self._ended_ns)
        if self._is_cycle:
            unfinished = tuple(replace(step, began_before=len(self._marks) < 2) for step in unfinished)
            self._end_step(self._cut_ns)
        elif len(self._marks) < 2:  # no step: the whole recording is one
            self._end_step(max(map(open_until, self._threads.values()), default=0))
        work, calls = dict(self._work()), self._calls()
        results = self._of_cycle(work, calls) if self._is_cycle else {"lockstep": self._locksteps(work, calls)}
        return {**results, "unfinished": unfinished}

    def _of_cycle(
        self, work: dict[LockstepKey, list[int]], calls: dict[LockstepKey, list[_CallTimes]]
    ) -> dict[str, Any]:
        """``work`` and ``calls``: of the pieces of the cycle. If none of them is a whole step, all count as one."""
        count, before = len(self._steps), self._before or OpenStep(self._layers)
        pieces = Pieces(count, self._before is not None)
        whole = range(count)[pieces.whole]
        work_in_steps, open_work = pieces.cut(work, before.work)
        all_calls = dict(calls)
        for key, earlier in before.calls.items():
            all_calls[key] = [*((ns, beside, 0) for ns, beside in earlier), *calls.get(key, ())]
        calls_in_steps = {key: [call for call in of_key if call[2] in whole] for key, of_key in all_calls.items()}
        if whole:
            lockstep = self._locksteps(work_in_steps, calls_in_steps, before.steps, before.counts)
        else:
            lockstep = self._locksteps({key: [sum(times)] for key, times in work.items()}, calls)
        if not pieces.has_open:
            return {"lockstep": lockstep}
        open_step = {
            "work": open_work,
            "calls": {key: [call[:2] for call in of_key if call[2] == count - 1] for key, of_key in all_calls.items()},
            "steps": before.steps + len(whole),
            "counts": Counter(before.counts) + Counter({key: len(of_key) for key, of_key in calls_in_steps.items()}),
        }
        return {"lockstep": lockstep, "open": open_step}

    def _locksteps(
        self,
        work: Mapping[LockstepKey, Sequence[int]],
        calls: Mapping[LockstepKey, Sequence[_CallTimes]],
        steps: int = 0,
        counts: Mapping[LockstepKey, int] | None = None,
    ) -> dict[LockstepKey, Lockstep]:
        """The locksteps of work in each step, and of calls. ``steps``: how many steps were before; ``counts``: how many
        calls were in them."""
        of_key = {key: Lockstep.of(self._rank, times, first=steps) for key, times in work.items()}
        for key, of_collective in calls.items():
            if of_collective:
                times = [ns for ns, *_ in of_collective]
                beside = sum(beside for _, beside, _ in of_collective)
                lockstep = Lockstep.of(self._rank, times, beside, (counts or {}).get(key, 0))
                if key.group is None:  # it is unknown which of several groups: calls of ranks cannot be matched
                    lockstep = replace(lockstep, last_ns=(), last_rank=(), times=())
                of_key[key] = lockstep
        return of_key

    def _work(self) -> Iterator[tuple[LockstepKey, list[int]]]:
        """The time in each step, by what it was spent on. Without steps, the whole recording is one."""
        count = len(self._steps)
        of_cpu = [sums for sums, _ in self._steps]
        yield from self._work_on("cpu", of_cpu, [gap for _, gap in self._steps])
        if self._kernels:
            yield from self._work_on("device", [self._kernels[number] for number in range(count)], [0] * count)
        for key, by_marks in sorted(self._any_running_ns.items(), key=str):
            if key.group == NOT_RECORDED and not self._is_one_group:
                continue
            by_step = sums_by_key((self._step_of(marks), ns) for marks, ns in by_marks.items())
            yield key, [by_step[step] for step in range(count)]

    def _work_on(
        self, device: str, steps: Sequence[Mapping[tuple[int, str], int]], gaps: Sequence[int]
    ) -> Iterator[tuple[LockstepKey, list[int]]]:
        """The time in each step on a device: of the work by layer and phase, of the gaps, and of both."""
        rolled_up = [*map(self._layers.roll_up_by_phase, steps)]
        for layer, phase in sorted({key for step in rolled_up for key in step}):
            yield LockstepKey(layer, phase, device, WORK), [step.get((layer, phase), 0) for step in rolled_up]
        if any(gaps):
            yield LockstepKey(OUTSIDE, FORWARD, device, GAP), [*gaps]
        whole = [sum(step.values()) + gap for step, gap in zip(steps, gaps)]
        yield LockstepKey(OUTSIDE, FORWARD, device, STEP), whole

    def _calls(self) -> dict[LockstepKey, list[_CallTimes]]:
        """The calls of collectives. If there are steps, those outside them do not count, like own work."""
        calls = {}
        for key, times in sorted(self._collectives.items(), key=lambda item: str(item[0])):
            if key.group == NOT_RECORDED and not self._is_one_group:
                key = key._replace(group=None)
            of_key = [(ns, beside, self._step_of(marks)) for ns, beside, marks in times]
            calls[key] = [call for call in of_key if 0 <= call[2] < len(self._steps)]
        return calls

    @property
    def _is_one_group(self) -> bool:
        """Whether all collectives of an unknown group may be of one. Each NCCL group has its own stream
        (ProcessGroupNCCL::ncclStreams_): several streams mean several groups."""
        return all(len(streams) == 1 for streams in self._unknown_streams.values())
