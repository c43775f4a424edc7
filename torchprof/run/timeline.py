"""Single ranges of time, kept on request, and how long each device was busy."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple


class StreamTime(NamedTuple):
    """What one stream of a device did: how many ``kernels`` (copies and sets among them), and for how long it ran any,
    and any of a kind. On one stream they hardly ever overlap, but they may."""

    stream: int
    kernels: int
    busy_ns: int
    compute_ns: int
    communication_ns: int
    copy_ns: int


@dataclass(frozen=True)
class DeviceTime:
    """What one device of one rank did with its time, from the start of its first work to the end of its last.

    Each time is that of a union: what runs on several streams at once counts once. ``busy_ns``: anything ran;
    ``communication_ns``: a collective or another transfer between ranks (``torchprof.measure.devices``); ``copy_ns``:
    a copy or a set; ``compute_ns``: anything else. ``overlap_ns`` is how long it communicated and computed at once.
    In a run of several cycles all this is summed, and what lies between two cycles is in none of it.
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
        """How long nothing ran, between the first work and the last."""
        return self.span_ns - self.busy_ns

    @property
    def exposed_ns(self) -> int:
        """How long it communicated while it computed nothing: what more overlap could save, at most."""
        return self.communication_ns - self.overlap_ns

    @property
    def copy_alone_ns(self) -> int:
        """How long it copied, and neither computed nor communicated."""
        return self.busy_ns - self.compute_ns - self.exposed_ns


class Lane(NamedTuple):
    """Where one thing runs at a time, with what it calls inside of it: a thread (``device`` is "cpu"); or a ``stream``
    of a device, which has as many lanes as it ran kernels at once. ``number`` counts the threads, or the lanes of one
    stream, from 1 on. ``stream`` is None for a thread, and on a device that used one stream alone."""

    device: str
    number: int
    stream: int | None = None


@dataclass(frozen=True)
class Spans:
    """What ran when, in the last cycle, as columns: on each lane, of two spans one is inside the other, or they lie
    apart. The outer one comes first; kernels come last.

    ``start_ns`` and ``end_ns`` are after the start; ``lane`` is a number in ``lanes``, ``layer`` in the run's layers
    (negative: none), ``phase`` in ``PHASES``, and ``name`` in ``names``: of a label, on a device of a kernel. It is -1
    where the span is the layer's: a call, in backward an unbroken stretch of work of the layer and those below it (see
    ``torchprof.measure.timeline``). ``steps`` are the times when steps began, and last when the last one ended; empty
    if none did. ``dropped``: how many came after the first ``Spans.LIMIT`` and are not here.
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


@dataclass(frozen=True)
class Timeline:
    """The last cycle over time: every allocation and free, in their order, as columns, and the ``spans`` of what ran.

    ``time_ns`` after the start, signed ``nbytes``, and numbers in ``devices``, in the run's layers (negative: none), in
    ``PHASES`` and in ``KINDS`` (-1: not known). ``dropped``: how many came after the first ``Timeline.LIMIT`` and are
    not here. Without ``profile_memory`` there are none, and the length, which counts them, is 0. ``spans`` is None
    where none were recorded. ``rank``: the rank that was recorded; a run of several ranks has the timeline of one.
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
