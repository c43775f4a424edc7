"""The timeline (allocations, frees and spans), recorded on request; and the busy time of each device."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple


class StreamTime(NamedTuple):
    """The work of one ``stream`` of a device: the number of ``kernels`` (including copies and sets), how long any ran
    (``busy_ns``), and how long any of a kind ran (``compute_ns``, ``communication_ns``, ``copy_ns``). Kernels of one
    stream may overlap, but rarely do."""

    stream: int
    kernels: int
    busy_ns: int
    compute_ns: int
    communication_ns: int
    copy_ns: int


@dataclass(frozen=True)
class DeviceTime:
    """How one device of one rank used its time. ``span_ns`` is from the start of its first work to the end of its last.

    Each time is the length of a union of intervals: work on several streams at once counts once.

    - ``busy_ns``: any work ran. ``streams``: the same for each stream.
    - ``communication_ns``: a collective or another transfer between ranks (see ``torchprof.measure.devices``).
    - ``copy_ns``: a copy or a set. ``compute_ns``: any other work.
    - ``overlap_ns``: it communicated and computed at the same time.

    Over several cycles all times are added up; the time between two cycles is not included.
    """

    device: str
    rank: int
    span_ns: int
    busy_ns: int
    compute_ns: int
    communication_ns: int
    copy_ns: int
    overlap_ns: int
    streams: tuple[StreamTime, ...]

    @property
    def idle_ns(self) -> int:
        """How long nothing ran between the first and the last work."""
        return self.span_ns - self.busy_ns

    @property
    def exposed_ns(self) -> int:
        """How long it communicated without computing: the most that more overlap could save."""
        return self.communication_ns - self.overlap_ns

    @property
    def copy_alone_ns(self) -> int:
        """How long it copied without computing or communicating."""
        return self.busy_ns - self.compute_ns - self.exposed_ns


class Lane(NamedTuple):
    """One line of the timeline, in which spans are nested and never cross.

    It is a thread (``device`` is "cpu") or a part of a ``stream`` of a device: a stream has as many lanes as kernels
    ran on it at once. ``number`` counts the threads, or the lanes of a stream, from 1 on. ``stream`` is None for a
    thread, and on a device that used only one stream.
    """

    device: str
    number: int
    stream: int | None = None


@dataclass(frozen=True)
class Spans:
    """What ran when, in the last cycle, as columns. Spans of a lane are nested or apart; outer spans come before inner
    ones, kernels last.

    - ``start_ns``, ``end_ns``: in ns after the start of the recording.
    - ``lane``: index in ``lanes``. ``layer``: index in the run's layers, negative for none. ``phase``: index in
      ``PHASES``.
    - ``name``: index in ``names``, which has the names of labels and kernels. It is -1 for a span of a layer: a call,
      or in backward an unbroken stretch of work of the layer and those below it (see ``torchprof.measure.timeline``).
    - ``steps``: when each step began, and last when the last one ended; empty without steps.
    - ``dropped``: how many spans came after the first ``Spans.LIMIT``; they are left out.
    """

    lanes: tuple[Lane, ...]
    names: tuple[str, ...]
    columns: Mapping[str, array[int]] = field(repr=False)
    steps: tuple[int, ...] = ()
    dropped: int = 0

    COLUMNS = ("start_ns", "end_ns", "lane", "layer", "phase", "name")
    LIMIT = 1_000_000

    def __len__(self) -> int:
        return len(self.columns["start_ns"])

    def renumbered(self, to: Sequence[int]) -> Spans:
        """See ``Memory.renumbered``."""
        return replace(self, columns={**self.columns, "layer": array("q", map(to.__getitem__, self.columns["layer"]))})


@dataclass(frozen=True)
class Timeline:
    """The last cycle over time: every allocation and free, in their order, as columns; and the ``spans`` of what ran.

    - ``time_ns``: in ns after the start of the recording. ``nbytes``: negative for a free.
    - ``device``, ``layer``, ``phase``, ``kind``: indices in ``devices``, in the run's layers (negative: none), in
      ``PHASES`` and in ``KINDS`` (-1: unknown).
    - ``dropped``: how many allocations and frees came after the first ``Timeline.LIMIT``; they are left out.
    - ``spans``: None if they were not recorded.
    - ``rank``: the rank that was recorded; a run of several ranks has the timeline of one.

    The length is the number of allocations and frees. It is 0 without ``profile_memory``.
    """

    devices: tuple[str, ...]
    columns: Mapping[str, array[int]] = field(repr=False)
    dropped: int = 0
    spans: Spans | None = None
    rank: int = 0

    COLUMNS = ("time_ns", "nbytes", "device", "layer", "phase", "kind")
    LIMIT = 1_000_000

    def __len__(self) -> int:
        return len(self.columns["time_ns"])

    def renumbered(self, to: Sequence[int]) -> Timeline:
        """See ``Memory.renumbered``."""
        columns = {**self.columns, "layer": array("q", map(to.__getitem__, self.columns["layer"]))}
        return replace(self, columns=columns, spans=None if self.spans is None else self.spans.renumbered(to))
