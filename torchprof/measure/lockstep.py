"""What a rank does in lockstep with the others of its job: its own work, step by step, and its collectives.

Knows no torch.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right, insort
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from operator import itemgetter

from torchprof.attribute.event_names import is_engine
from torchprof.attribute.events import Event, Kind
from torchprof.attribute.places import Attributed, Place
from torchprof.run.collectives import ASKS, collective_of, name_of_collective, tells_collective
from torchprof.run.kernels import KernelWork, kind_of_work
from torchprof.run.layers import Layer, Layers
from torchprof.run.lockstep import EXCHANGES, GAP, NOT_RECORDED, STEP, WORK, GroupOfRanks, Lockstep, LockstepKey
from torchprof.run.unfinished import Entered, Unfinished
from torchprof.run.words import BEFORE, FORWARD, OUTSIDE, Frame, Signature, is_collective, is_host_collective

_COMMUNICATION = ("c10d::", "_c10d_functional::", "_c10d_functional_autograd::", "record_param_comms", "FSDP::")
"""How the names of ops and ranges begin that exchange data between ranks, wait for it, or make it ready."""
_POINT_TO_POINT = ("send", "recv", "coalesced")
"""How the names begin of what only two ranks do, each something else."""
PROMPTLY_NS = 1_000_000
"""A thread that goes on so soon after an exchange has ended had waited for it."""
_RECORDED_LATE_NS = 100_000
"""By so much later than a thread goes on a collective may be recorded to end."""


def is_communication(frames: Sequence[Frame]) -> bool:
    """Whether what the innermost of these frames, outer to inner, took was for an exchange between ranks, and no work
    of the rank's own: a collective's range or kernel, and all in torch's ops and ranges around them."""
    return any(map(_communicates, frames))


@cache
def _is_named_so(kind: str, name: str) -> bool:
    if kind == "kernel":
        return kind_of_work(name) is KernelWork.COMMUNICATION
    return name.startswith(_COMMUNICATION) or is_collective(name)


def _communicates(frame: Frame) -> bool:
    return _is_named_so(frame.kind, frame.name) or (frame.kind == "kernel" and tells_collective(frame))


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

    def within(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """What it covers of an interval, the last piece first."""
        at = bisect_right(self._starts, end) - 1
        while at >= 0 and self._ends[at] > start:
            yield max(start, self._starts[at]), min(end, self._ends[at])
            at -= 1


def _covered(pieces: Iterable[tuple[int, int]]) -> int:
    """How much intervals cover together."""
    covered = until = 0
    for start, end in sorted(pieces):
        covered += max(0, end - max(start, until))
        until = max(until, end)
    return covered


class _Waiting:
    """When the threads of the CPU waited for the exchanges between ranks that the CPU carries out.

    torch records no event for a wait. An exchange may be posted long before somebody needs it, so that one is under way
    says nothing: a thread that works meanwhile does not wait. What tells is how a gap ends, a stretch in which a thread
    runs no operator and calls nothing:

    - with the end of an exchange, so that the thread goes on within ``PROMPTLY_NS``: until then it waited;
    - later, but in the gap a collective ended that the thread most likely waited for: the last thing that it did before
      the gap was to ask for one, or the gap is in the loop around the model, as at the end of backward, where
      DistributedDataParallel waits. Until then it waited, and the rest is Python. Sends and receives are posted ahead
      as a rule, and for them this does not hold.

    In all other gaps Python itself was at work.
    """

    def __init__(self) -> None:
        self._by_end: list[tuple[int, int, bool]] = []

    def add(self, start: int, end: int, is_collective: bool) -> None:
        insort(self._by_end, (end, start, is_collective))

    def within(self, start: int, end: int, for_any: bool) -> list[tuple[int, int]]:
        """The parts of a gap in which its thread waited; ``for_any``: for any collective that ended in it."""
        at = bisect_right(self._by_end, (end + _RECORDED_LATE_NS, end, True))
        ended = []
        while at and self._by_end[at - 1][0] > start:
            at -= 1
            # A receive is recorded until somebody waits for it, which may be soon after a gap that was none.
            if self._by_end[at][2] or self._by_end[at][0] <= end:
                ended.append(self._by_end[at])
        if not ended or ended[0][0] < end - PROMPTLY_NS:
            ended = [one for one in ended if for_any and one[2]]
        return [(max(start, begun), min(until, end)) for until, begun, _ in ended if begun < end]


class _Thread:
    """The open ranges of a thread, outer to inner, each with its end; up to when its time is shared out; whether what
    it did last was to ask for an exchange; when its first range began, and its last."""

    __slots__ = ("began", "first", "has_asked", "ranges", "until")

    def __init__(self, until: int) -> None:
        self.ranges: list[tuple[int, Place]] = []
        self.first = self.began = self.until = until
        self.has_asked = False


class _LastStep:
    """What a rank did since its last step ended, as far as it tells where the rank was if that is never to end: in
    what its thread was for the longest without beginning anything else."""

    def __init__(self) -> None:
        self.longest: _Stay = (0, 0, None, False)
        self.longest_elsewhere: _Stay = (0, 0, None, False)  # on other threads than that which takes the steps
        self._entered: Counter[tuple[int, str, str]] = Counter()
        self._request: Place | None = None  # the last
        self._exchanges: list[tuple[int, int, Place]] = []

    def note_request(self, place: Place) -> None:
        """An op or range that communicates has begun."""
        name = _requested(place)
        if name is not None:
            self._request = place
            if not name.startswith(_POINT_TO_POINT):
                self._entered[place.layer, place.phase, name] += 1

    def note_exchange(self, place: Place, start: int, end: int) -> None:
        self._exchanges.append((start, end, place))

    def unfinished(
        self, rank: int, threads: Mapping[int, _Thread], main: int, since: int | None, ended: int | None
    ) -> tuple[Unfinished, ...]:
        if main not in threads:
            return ()
        since = min(one.first for one in threads.values()) if since is None else since
        ends = [end for one in threads.values() for end, _ in one.ranges] + [end for _, end, _ in self._exchanges]
        ended = max([since, *ends, *([] if ended is None else [ended])])
        longest, elsewhere = self.longest, self.longest_elsewhere
        for number, thread in threads.items():
            for stay in _tail(thread, since, ended):
                if number == main:
                    longest = max(longest, stay, key=itemgetter(0))
                elif stay[2] is not None:
                    elsewhere = max(elsewhere, stay, key=itemgetter(0))
        if longest[2] is None and 2 * elsewhere[0] > longest[0]:
            longest = elsewhere  # as autograd's, where the first thread waits for it
        ns, start, place, has_asked = longest
        waits = self._waits_in(ns, start, place, has_asked)
        at = waits or place
        name = "" if at is None or at.frame is None else at.frame.name
        entered = tuple(Entered(*key, times) for key, times in self._entered.items())
        layer, phase = (OUTSIDE, FORWARD) if at is None else (at.layer, at.phase)
        name = name if waits is None else _exchange_of(waits)
        return (Unfinished(rank, ended - since, ns, layer, phase, name, waits is not None, entered),)

    def _waits_in(self, ns: int, start: int, place: Place | None, has_asked: bool) -> Place | None:
        """The exchange in which the rank waits, if it is in one: it has called it, or one is under way nearly all the
        time; sends and receives are under way ahead of time, and tell nothing."""
        if place is not None and is_communication(place.frames):
            return place
        if has_asked and self._request is not None:
            return self._request
        if place is not None and place.frame is not None and place.frame.kind == "op" and "::" in place.frame.name:
            return None
        beside = [
            (min(end, start + ns) - max(begun, start), number)
            for number, (begun, end, of) in enumerate(self._exchanges)
            if not _exchange_of(of).startswith(_POINT_TO_POINT)
        ]
        most, number = max(beside, default=(0, 0))
        return self._exchanges[number][2] if 2 * most > ns else None


_Stay = tuple[int, int, "Place | None", bool]
"""How long a thread did nothing new, from when on, in which place (None: in no range), and whether it had just asked
for an exchange."""


def _tail(thread: _Thread, since: int, ended: int) -> Iterator[_Stay]:
    """What a thread was in after its last range had begun."""
    at = max(thread.began, since)
    has_asked = thread.has_asked
    for end, place in reversed(thread.ranges):
        if end > at:
            yield end - at, at, place, has_asked
            at = end
        has_asked = is_communication(place.frames)
    if ended > at:
        yield ended - at, at, None, has_asked


def _is_of_loop(place: Place) -> bool:
    """Whether this is a range of the user's, or of torch's, around what a loop does in no layer."""
    return place.layer == OUTSIDE and place.phase == FORWARD and place.frame is not None and place.frame.kind == "label"


def _is_collection(place: Place) -> bool:
    """Whether it is a collection of Python's garbage collector."""
    return place.frame is not None and place.frame.kind == "gc"


def _requested(place: Place) -> str | None:
    """The collective that an op of torch's asks for."""
    frame = place.frame
    return name_of_collective(frame.name) if frame is not None and frame.name.startswith(ASKS) else None


def _exchange_of(place: Place) -> str:
    return "" if place.frame is None else name_of_collective(place.frame.name)


class Locksteps:
    """One walk over the events of one rank, between the attribution and the fold.

    Own work on the CPU is all time in ops, and that between ops, in layers or not, in which the thread did not wait for
    an exchange (see ``_Waiting``). Communication is none, whatever is in it. On a device it is the time of all kernels,
    copies and sets but those of communication. Each is of the step in which it ran or was launched.
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
        be of one or another, ``NOT_RECORDED`` where nothing is known of groups. ``from_first_mark``: whether a step
        begins where the session does."""
        self._layers = Layers.of(layers)
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
        self._streams: defaultdict[str, set[int]] = defaultdict(set)  # by device: of collectives of an unknown group
        self._device_collectives: dict[Place, LockstepKey | None] = {}
        self._collectives: defaultdict[LockstepKey, list[tuple[int, int, int]]] = defaultdict(list)
        self._reach: dict[str, int] = {}  # by device: when the last of its collectives that have begun ends
        self._reach_of_group: dict[LockstepKey, int] = {}
        self._together: defaultdict[LockstepKey, Counter[int]] = defaultdict(Counter)  # by step
        self._waiting = _Waiting()
        self._elsewhere = _Union()  # what other threads do than the one that takes the steps
        self._is_work: dict[Place, tuple[bool, bool]] = {}
        self._last = _LastStep()

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
                if correlation != BEFORE:
                    self._note_kernel(event, place, ns)
            elif kind is collective:
                name = name_of_collective(event.name)
                is_of_all = not name.startswith(_POINT_TO_POINT)
                if is_host_collective(event.name):
                    self._waiting.add(start, end, is_of_all)
                    self._last.note_exchange(place, start, end)
                if is_host_collective(event.name) and is_of_all:
                    key = LockstepKey(place.layer, place.phase, "cpu", name, self._group)
                    self._note_collective(key, start, end, bisect_right(self._marks, start))
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
                thread.began = start
                thread.has_asked &= kind is Kind.GARBAGE  # a collection comes whenever it is due
                if not self._kind_of(place)[0]:
                    self._last.note_request(place)
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
            self._last = _LastStep()
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
                self._share(number, place, at, end, thread.has_asked)
                at = end
            if not _is_collection(place):
                thread.has_asked = not self._kind_of(place)[0]
        if until > at:
            if ranges:
                self._share(number, ranges[-1][1], at, until, thread.has_asked)
            elif number == self._main:
                if until - at > self._last.longest[0]:
                    self._last.longest = until - at, at, None, thread.has_asked
                waits = self._waiting.within(at, until, True)
                self._gap += until - at - _covered([*waits, *self._elsewhere.within(at, until)])
            at = until
        thread.until = at

    def _kind_of(self, place: Place) -> tuple[bool, bool]:
        """Whether time in a place is own work, and whether an op of torch's takes it, which does not wait."""
        known = self._is_work.get(place)
        if known is None:
            # A Function of the user's, and the engine around it, may call what waits: those are Python, too.
            frame = place.frame
            is_op = frame is not None and frame.kind == "op" and "::" in frame.name and not is_engine(frame.name)
            is_op |= _is_collection(place)  # it waits for nobody, whatever it interrupts
            known = self._is_work[place] = not is_communication(place.frames), is_op
        return known

    def _share(self, thread: int, place: Place, start: int, end: int, has_asked: bool) -> None:
        if thread == self._main:
            if end - start > self._last.longest[0]:
                self._last.longest = end - start, start, place, has_asked
        elif end - start > self._last.longest_elsewhere[0]:
            self._last.longest_elsewhere = end - start, start, place, has_asked
        is_work, is_op = self._kind_of(place)
        if is_work:
            for_any = has_asked or _is_of_loop(place)
            waits = 0 if is_op else _covered(self._waiting.within(start, end, for_any))
            self._own[place] += end - start - waits

    def _note_kernel(self, event: Event, place: Place, ns: int) -> None:
        marks = self._launched.get(event.correlation)
        if marks is None:  # nobody knows who launched it: it counts where it ran
            marks = bisect_right(self._marks, event.start_ns)
        if place not in self._device_collectives:
            self._device_collectives[place] = self._collective_of(place)
        key = self._device_collectives[place]
        if key is not None:
            self._note_collective(key, event.start_ns, event.end_ns, marks)
            if key.group == NOT_RECORDED:
                self._streams[event.device].add(event.thread)
        known = self._is_work.get(place)
        if known is None:
            known = self._is_work[place] = key is None and not is_communication(place.frames), False
        if known[0]:
            self._kernels[self._step_of(marks)][place.layer, place.phase] += ns

    def _step_of(self, marks: int) -> int:
        """The number of the step before which so many marks were; without steps all is one."""
        return marks - 1 if len(self._marks) > 1 else 0

    def _note_collective(self, key: LockstepKey, start: int, end: int, marks: int) -> None:
        reach = self._reach.get(key.device, start)
        self._reach[key.device] = max(reach, end)
        self._collectives[key].append((end - start, max(0, min(reach, end) - start), marks))
        if key.group is not None:
            whole = LockstepKey(OUTSIDE, FORWARD, key.device, EXCHANGES, key.group)
            self._together[whole][marks] += max(0, end - max(start, self._reach_of_group.get(whole, start)))
            self._reach_of_group[whole] = max(self._reach_of_group.get(whole, end), end)

    def _collective_of(self, place: Place) -> LockstepKey | None:
        """What a kernel of all ranks of a group does; None for other work."""
        if place.frame is None or not _communicates(place.frame._replace(signature=self._signature_of(place))):
            return None
        frames: list[Frame] = []
        outer: Place | None = place
        while outer is not None and outer.frame is not None:
            frames.insert(0, outer.frame._replace(signature=self._signature_of(outer)))
            outer = outer.outer
        found = collective_of(frames)
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
            rolled_up = [*map(self._layers.roll_up_by_phase, steps)]
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
        # Each group of NCCL's has a stream of its own (ProcessGroupNCCL::ncclStreams_): on several there are several.
        is_one_group = all(len(streams) == 1 for streams in self._streams.values())
        for key, by_marks in sorted(self._together.items(), key=str):
            if key.group == NOT_RECORDED and not is_one_group:
                continue
            by_step: Counter[int] = Counter()
            for marks, ns in by_marks.items():
                by_step[self._step_of(marks)] += ns
            found[key] = Lockstep.of(self._rank, [by_step[step] for step in range(count)])
        for key, times in sorted(self._collectives.items(), key=lambda item: str(item[0])):
            if key.group == NOT_RECORDED and not is_one_group:
                key = key._replace(group=None)
            # As own work, they count in steps, where there are any.
            if len(self._marks) > 1:
                times = [one for one in times if 0 < one[2] < len(self._marks)]
            if not times:
                continue
            lockstep = Lockstep.of(self._rank, [ns for ns, *_ in times], sum(beside for _, beside, _ in times))
            found[key] = lockstep if key.group is not None else replace(lockstep, last_ns=(), last_rank=())
        return found

    def unfinished(self, ended: int | None = None) -> tuple[Unfinished, ...]:
        """Where the rank was when the recording ended, at a time that the events need not tell. Before ``result``."""
        since = self._marks[-1] if self._marks else None
        return self._last.unfinished(self._rank, self._threads, self._main, since, ended)
