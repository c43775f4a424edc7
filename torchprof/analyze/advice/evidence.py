"""What rules look at: a run's rows by what they hold, summed by layer, found once and shared by all rules."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

from torchprof.analyze.records import layer_name
from torchprof.run.run import Run
from torchprof.run.samples import SampleKey, Spread
from torchprof.run.words import (
    LAUNCH_NOT_RECORDED,
    PHASES,
    Frame,
    is_left_over,
)

Holds = Callable[[Sequence[Frame]], bool]
"""Whether the frames of a row, outer to inner, are what a rule looks for. Asked once for each distinct chain."""


class Took(NamedTuple):
    """What the rows of a layer took that hold something: self costs, added up; ``calls`` of the outermost that do."""

    calls: int = 0
    cpu_ns: int = 0
    device_ns: int = 0
    allocated: int = 0


class Evidence:
    """A run, and the indexes over its rows that rules share. Each is made once, when a rule first asks for it.

    A run may have 200,000 rows: a rule never walks them, and looks at no ``Row``. It says which chains of frames it is
    after (there are few), and gets their rows, or what these took in each layer.
    """

    def __init__(self, run: Run) -> None:
        self.run = run

    @cached_property
    def recorded_ns(self) -> int:
        """How long was recorded by the clock, summed over ranks: the base of every share of time, and of every
        threshold, whichever device and however many threads and streams the time is of."""
        return sum(meta.wall_ns for meta in self.run.metas)

    @cached_property
    def ops_recorded(self) -> bool:
        """Whether operators of the CPU were recorded: a trace of a device alone has none."""
        return any(frame.kind == "op" and "::" in frame.name for chain in self.run.rows.frames for frame in chain)

    @cached_property
    def peak_bytes(self) -> int:
        """What a gain in memory is a share of: what was alive at the peaks, over all devices and ranks, with what the
        model had there before, where that is known; 0 where memory was not recorded."""
        before = sum(size for memory in self.run.memory for _, size in memory.before or ())
        return before + sum(memory.peak_bytes for memory in self.run.memory)

    @cached_property
    def starts_known(self) -> bool:
        """Whether every device says what the model had there before, so that the peak is all that it held."""
        return all(memory.before is not None for memory in self.run.memory)

    @cached_property
    def device(self) -> str:
        """The kind of device whose time was measured ("cuda"), "cpu" where there was none."""
        meta = self.run.meta
        return meta.device if meta.device is not None and "device_ns" in meta.measured else "cpu"

    @cached_property
    def switches(self) -> dict[str, str]:
        """How torch's own switches were set, by name; empty for a run that does not know it."""
        return dict(self.run.meta.switches)

    @cached_property
    def shapes_recorded(self) -> bool:
        """Whether ops know the shapes and types of what they were called on."""
        return any(on for meta in self.run.metas for name, on in meta.flags if name == "record_shapes")

    @cached_property
    def compute_capability(self) -> tuple[int, ...]:
        """Of the CUDA device: (8, 0); () where none is known."""
        numbers = self.switches.get("compute_capability", "").split(".")
        return tuple(map(int, numbers)) if all(number.isdecimal() for number in numbers) else ()

    @cached_property
    def _rows_of_chain(self) -> list[list[int]]:
        rows: list[list[int]] = [[] for _ in self.run.rows.frames]
        left_over = [*map(is_left_over, self.run.rows.frames)]
        for at, chain in enumerate(self.run.rows.columns["frames"]):
            if not left_over[chain]:
                rows[chain].append(at)
        return rows

    @cached_property
    def _samples_of_measure(self) -> dict[str, list[tuple[SampleKey, Spread]]]:
        found: defaultdict[str, list[tuple[SampleKey, Spread]]] = defaultdict(list)
        for key, spread in self.run.samples.items():
            found[key.measure].append((key, spread))
        return found

    def samples(self, measure: str) -> list[tuple[SampleKey, Spread]]:
        """The samples of one measure, over all layers, phases, ranks and devices."""
        return self._samples_of_measure.get(measure, [])

    def rows(self, holds: Holds, *, phases: Iterable[str] = PHASES) -> Iterator[int]:
        """The numbers of the rows whose frames hold what is looked for. What was launched before the recording is in
        none, here and in ``took``: it is no work of what was recorded."""
        wanted = {PHASES.index(phase) for phase in phases}
        of_phase = self.run.rows.columns["phase"]
        for frames, rows in zip(self.run.rows.frames, self._rows_of_chain):
            if rows and holds(frames):
                yield from (at for at in rows if of_phase[at] in wanted)

    def took(self, holds: Holds, *, phases: Iterable[str] = PHASES) -> dict[int, Took]:
        """What the rows took whose frames hold what is looked for, by the number of their layer (negative: of none).

        ``calls`` counts a row only where the frames around its innermost do not hold it themselves. So for "an
        ``aten::softmax`` is among the frames" it is how often softmax was called, whatever softmax calls, and the times
        are what these calls took with all inside of them, but for layers that they call.
        """
        columns = self.run.rows.columns
        wanted = {PHASES.index(phase) for phase in phases}
        layers, of_phase, calls = columns["layer"], columns["phase"], columns["calls"]
        cpu_ns, device_ns = columns["cpu_ns"], columns["device_ns"]
        on_cpu, on_device = columns["cpu_allocated"], columns["device_allocated"]
        found: dict[int, list[int]] = {}
        for frames, rows in zip(self.run.rows.frames, self._rows_of_chain):
            if not rows or not holds(frames):
                continue
            outermost = not frames or not holds(frames[:-1])
            for at in rows:
                if of_phase[at] in wanted:
                    sums = found.setdefault(layers[at], [0, 0, 0, 0])
                    sums[0] += calls[at] * outermost
                    sums[1] += cpu_ns[at]
                    sums[2] += device_ns[at]
                    sums[3] += on_cpu[at] + on_device[at]
        return {layer: Took(*sums) for layer, sums in found.items()}

    def time_of(self, took: Took) -> int:
        """The time that counts: the device's where that was measured, else the CPU's."""
        return took.cpu_ns if self.device == "cpu" else took.device_ns

    def name_of(self, layer: int) -> str:
        """The dotted path of a layer by its number, or what work of no layer is called."""
        return layer_name(self.run, layer)


def inside(*names: str) -> Holds:
    """Whether an op of one of these names is among the frames."""
    wanted = frozenset(names)
    return lambda frames: any(frame.kind == "op" and frame.name in wanted for frame in frames)


def has_no_launch(frames: Sequence[Frame]) -> bool:
    """Whether it is work of a device whose launch should be in the recording, and is not."""
    return bool(frames) and frames[0].kind == "label" and frames[0].name == LAUNCH_NOT_RECORDED


def is_collection(frames: Sequence[Frame]) -> bool:
    """Whether it is a collection of Python's garbage collector."""
    return bool(frames) and frames[0].kind == "gc"


def input_shape(frame: Frame, index: int) -> tuple[int, ...]:
    """The sizes of one of the tensors that an op was called on; ``()`` where they were not recorded, where it is no
    tensor, and where it has no dimension."""
    shapes = frame.signature.shapes if frame.signature is not None else ()
    shape = shapes[index] if index < len(shapes) else None
    return tuple(shape) if shape and all(type(size) is int for size in shape) else ()
