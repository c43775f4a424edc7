"""What a rank does in lockstep with the others of its job: its own work, step by step, and its collectives.

Knows no torch.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache

from torchprof.attribute import FORWARD, OUTSIDE, Attributed, Event, Frame, Kind, Place, Signature
from torchprof.collectives import Collective, collective_of, tells_collective
from torchprof.device_times import Work, kind_of_work
from torchprof.event_names import is_collective, is_engine, is_host_collective
from torchprof.exchanges import ASKS
from torchprof.run import GAP, STEP, WORK, GroupOfRanks, Layer, Lockstep, LockstepKey

_COMMUNICATION = ("c10d::", "_c10d_functional::", "_c10d_functional_autograd::", "record_param_comms", "FSDP::")
"""How the names of ops and ranges begin that exchange data between ranks, wait for it, or make it ready."""
_POINT_TO_POINT = ("send", "recv", "coalesced")
"""How the names begin of what only two ranks do, each something else."""


def is_communication(frames: Sequence[Frame]) -> bool:
    """Whether what the innermost of these frames, outer to inner, took was for an exchange between ranks, and no work
    of the rank's own: a collective's range or kernel, and all in torch's ops and ranges around them."""
    return any(map(_communicates, frames))


@cache
def _is_named_so(kind: str, name: str) -> bool:
    if kind == "kernel":
        return kind_of_work(name) is Work.COMMUNICATION
    return name.startswith(_COMMUNICATION) or is_collective(name)


def _communicates(frame: Frame) -> bool:
    return _is_named_so(frame.kind, frame.name) or (frame.kind == "kernel" and tells_collective(frame))


def _asked_for(frames: Sequence[Frame]) -> Collective | None:
    """The collective that torch's op around a kernel asks for, by its name: "allreduce" of ``c10d::allreduce_``."""
    names = [frame.name.removeprefix(ASKS).strip("_") for frame in frames if frame.name.startswith(ASKS)]
    return Collective(names[-1]) if names else None


class _Union:
    """Intervals that come in the order of their start, as a union."""

    def __init__(self) -> None:
        self._starts = array("q")
        self._ends = array("q")

    def add(self, start: int, end: int) -> None:
        if self._ends and start <= self._ends[-1]:
            self._ends[-1] = max(self._ends[-1], end)
        else:
            self._starts.append(start)
            self._ends.append(end)

    def within(self, start: int, end: int) -> int:
        """How much of an interval it covers."""
        covered = 0
        at = bisect_right(self._starts, end) - 1
        while at >= 0 and self._ends[at] > start:
            covered += min(end, self._ends[at]) - max(start, self._starts[at])
            at -= 1
        return covered


class _Thread:
    """The open ranges of a thread, outer to inner, each with its end; up to when its time is shared out."""

    __slots__ = ("ranges", "until")

    def __init__(self, until: int) -> None:
        self.ranges: list[tuple[int, Place]] = []
        self.until = until


class Locksteps:
    """One walk over the events of one rank, between the attribution and the fold.

    Own work on the CPU is all time in ops, and that between ops, in layers or not, in which no collective is under way:
    where one is, Python most likely waits for it. Communication is none, whatever is in it. On a device it is the time
    of all kernels, copies and sets but those of communication. Each is of the step in which it ran or was launched.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        rank: int,
        signatures: Sequence[Signature],
        group: GroupOfRanks | None,
        from_first_mark: bool = True,
    ) -> None:
        """``group``: between which ranks a collective is that does not say so itself, as on the CPU; None where it may
        be of one or another. ``from_first_mark``: whether a step begins where the session does."""
        number = {layer.path: index for index, layer in enumerate(layers)}
        self._above = [number.get(layer.path[:-1], OUTSIDE) for layer in layers]
        self._rank = rank
        self._signatures = signatures
        self._group = group
        self._from_first_mark = from_first_mark
        self._threads: dict[int, _Thread] = {}
        self._main = 0
        self._own: defaultdict[Place, int] = defaultdict(int)  # of the step that is under way
        self._gap = 0  # in it, in no range of any thread
        self._steps: list[tuple[defaultdict[tuple[int, str], int], int]] = []
        self._marks: list[int] = []
        self._launched: dict[int, int] = {}  # the number of an op → how many marks were before
        self._kernels: defaultdict[int, defaultdict[tuple[int, str], int]] = defaultdict(lambda: defaultdict(int))
        self._device_collectives: dict[Place, LockstepKey | None] = {}
        self._collectives: defaultdict[LockstepKey, list[tuple[int, int, int]]] = defaultdict(list)
        self._reach: dict[str, int] = {}  # by device: when the last of its collectives that have begun ends
        self._under_way = _Union()  # collectives
        self._elsewhere = _Union()  # these, and what other threads do than the one that takes the steps
        self._is_work: dict[Place, tuple[bool, bool]] = {}

    def watch(self, attributed: Iterable[Attributed]) -> Iterator[Attributed]:
        """Pass everything on, and note what each step took."""
        kernel, collective, step = Kind.KERNEL, Kind.COLLECTIVE, Kind.STEP
        no_ranges = (Kind.MEMORY, Kind.STOPPED, Kind.SAMPLE)
        threads = self._threads
        for item in attributed:
            yield item
            event, place, _, _, ns = item
            kind, _, start, end, number, _, _, correlation, _, _, _ = event
            if kind is kernel:
                self._note_kernel(event, place, ns)
            elif kind is collective:
                self._under_way.add(start, end)
                self._elsewhere.add(start, end)
                name = event.name.partition(":")[2]
                if is_host_collective(event.name) and not name.startswith(_POINT_TO_POINT):
                    key = LockstepKey(place.layer, place.phase, "cpu", name, self._group)
                    self._note_collective(key, start, end)
                elif correlation:
                    self._launched[correlation] = len(self._marks)
            elif kind is step:
                self._main = number
                self._mark(end)
            elif kind not in no_ranges:
                thread = threads.get(number)
                if thread is None:
                    thread = threads[number] = _Thread(start)
                    self._main = self._main or number
                self._advance(number, start)
                if not thread.ranges and number != self._main:
                    self._elsewhere.add(start, start + ns)
                thread.ranges.append((start + ns, place))
                if correlation:
                    self._launched[correlation] = len(self._marks)

    def _mark(self, at: int) -> None:
        """A step ends here, and the next begins."""
        self._threads.setdefault(self._main, _Thread(at))
        if self._marks:
            self._end_step(at)
        if self._marks or self._from_first_mark:
            self._go_on_from(at)
            self._marks.append(at)
        self._from_first_mark = True

    def _go_on_from(self, at: int) -> None:
        """What was before is of no step that is under way."""
        for number in self._threads:
            self._advance(number, at)
        self._own.clear()
        self._gap = 0

    def _end_step(self, at: int) -> None:
        for number in self._threads:
            self._advance(number, at)
        sums: defaultdict[tuple[int, str], int] = defaultdict(int)
        for place, ns in self._own.items():
            sums[place.layer, place.phase] += ns
        self._steps.append((sums, self._gap))

    def _advance(self, number: int, until: int) -> None:
        """Share out the time of a thread up to then among the innermost of its ranges."""
        thread = self._threads[number]
        ranges, at = thread.ranges, thread.until
        while ranges and ranges[-1][0] <= until:
            end, place = ranges.pop()
            if end > at:
                self._share(place, at, end)
                at = end
        if until > at:
            if ranges:
                self._share(ranges[-1][1], at, until)
            elif number == self._main:
                self._gap += until - at - self._elsewhere.within(at, until)
            at = until
        thread.until = at

    def _share(self, place: Place, start: int, end: int) -> None:
        known = self._is_work.get(place)
        if known is None:
            # A Function of the user's, and the engine around it, may call what waits: those are Python, too.
            frame = place.frame
            is_op = frame is not None and frame.kind == "op" and "::" in frame.name and not is_engine(frame.name)
            known = self._is_work[place] = not is_communication(place.frames), is_op
        is_work, is_op = known
        if is_work:
            self._own[place] += end - start - (0 if is_op else self._under_way.within(start, end))

    def _note_kernel(self, event: Event, place: Place, ns: int) -> None:
        if place not in self._device_collectives:
            self._device_collectives[place] = self._collective_of(place)
        key = self._device_collectives[place]
        if key is not None:
            self._note_collective(key, event.start_ns, event.end_ns)
        known = self._is_work.get(place)
        if known is None:
            known = self._is_work[place] = key is None and not is_communication(place.frames), False
        if known[0]:
            marks = self._launched.get(event.correlation)
            if marks is None:  # nobody knows who launched it: it counts where it ran
                marks = bisect_right(self._marks, event.start_ns)
            step = marks - 1 if len(self._marks) > 1 else 0
            self._kernels[step][place.layer, place.phase] += ns

    def _note_collective(self, key: LockstepKey, start: int, end: int) -> None:
        reach = self._reach.get(key.device, start)
        self._reach[key.device] = max(reach, end)
        marks = bisect_right(self._marks, start)
        self._collectives[key].append((end - start, max(0, min(reach, end) - start), marks))

    def _collective_of(self, place: Place) -> LockstepKey | None:
        """What a kernel of all ranks of a group does; None for other work."""
        if place.frame is None or not _communicates(place.frame._replace(signature=self._signature_of(place))):
            return None
        frames: list[Frame] = []
        outer: Place | None = place
        while outer is not None and outer.frame is not None:
            frames.insert(0, outer.frame._replace(signature=self._signature_of(outer)))
            outer = outer.outer
        found = collective_of(frames) or _asked_for(frames)
        if found is None or found.name.startswith(_POINT_TO_POINT):
            return None
        told = GroupOfRanks(found.group, found.description, found.size, found.ranks)
        return LockstepKey(place.layer, place.phase, "device", found.name, told if found.group else self._group)

    def _signature_of(self, place: Place) -> Signature | None:
        return self._signatures[place.signature] if place.signature else None

    def result(self) -> dict[LockstepKey, Lockstep]:
        """Own work, each key with a value for each step, 0 where a layer did nothing in it; and collectives."""
        if len(self._marks) < 2:  # no step: all that was recorded is one
            self._end_step(max((end for one in self._threads.values() for end, _ in one.ranges), default=0))
        count = len(self._steps)
        found: dict[LockstepKey, Lockstep] = {}

        def note(device: str, steps: Sequence[Mapping[tuple[int, str], int]], beside: Sequence[int]) -> None:
            rolled_up = [self._rolled_up(step) for step in steps]
            for layer, phase in sorted({key for step in rolled_up for key in step}):
                times = [step.get((layer, phase), 0) for step in rolled_up]
                found[LockstepKey(layer, phase, device, WORK)] = Lockstep.of(self._rank, times)
            if any(beside):
                found[LockstepKey(OUTSIDE, FORWARD, device, GAP)] = Lockstep.of(self._rank, beside)
            whole = [sum(step.values()) + more for step, more in zip(steps, beside)]
            found[LockstepKey(OUTSIDE, FORWARD, device, STEP)] = Lockstep.of(self._rank, whole)

        note("cpu", [sums for sums, _ in self._steps], [gap for _, gap in self._steps])
        if self._kernels:
            note("device", [self._kernels[number] for number in range(count)], [0] * count)
        for key, times in sorted(self._collectives.items(), key=lambda item: str(item[0])):
            # As own work, they count in steps, where there are any.
            if len(self._marks) > 1:
                times = [one for one in times if 0 < one[2] < len(self._marks)]
            if not times:
                continue
            lockstep = Lockstep.of(self._rank, [ns for ns, *_ in times], sum(beside for _, beside, _ in times))
            found[key] = lockstep if key.group is not None else replace(lockstep, last_ns=(), last_rank=())
        return found

    def _rolled_up(self, step: Mapping[tuple[int, str], int]) -> dict[tuple[int, str], int]:
        """With what the layers below took."""
        totals: defaultdict[tuple[int, str], int] = defaultdict(int)
        for (layer, phase), ns in step.items():
            at = layer
            totals[at, phase] += ns
            while at >= 0 and self._above[at] >= 0:
                at = self._above[at]
                totals[at, phase] += ns
        return totals
