"""The evidence that rules read: the rows of a run, indexed by their frames and summed by layer; shared by all rules."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from functools import cached_property
from operator import add
from typing import NamedTuple

from torchprof.advise.chains import Among, Frames, Having, Holds, always
from torchprof.analyze.steps import spreads_of
from torchprof.run.groups import lists_by_key, sums_by_key
from torchprof.run.measures import SampleKey, Spread
from torchprof.run.run import Run
from torchprof.run.timeline import DeviceTime
from torchprof.run.words import BACKWARD, FORWARD, OUTSIDE, PHASES, RECOMPUTE, Frame, FrameKind, is_left_over

_GENERATES = 10
_LITTLE = 0.2  # of a time: what else it could be
_COLUMNS = ("layer", "phase", "calls", "cpu_ns", "device_ns", "cpu_allocated", "device_allocated")
_WITH_RECOMPUTE = (PHASES.index(FORWARD), PHASES.index(RECOMPUTE))


class Took(NamedTuple):
    """The sums of the matching rows of a layer: self costs, and the ``calls`` of the outermost matches."""

    calls: int = 0
    cpu_ns: int = 0
    device_ns: int = 0
    allocated: int = 0


class MatchingRow(NamedTuple):
    """A row that matches: the number of its layer (negative: no layer), its phase, and its self."""

    layer: int
    phase: str
    frames: tuple[Frame, ...]
    calls: int
    cpu_ns: int
    device_ns: int
    allocated: int


class Evidence:
    """A run, and the indexes over its rows that rules share. Each index is made when a rule first needs it.

    A run may have 200,000 rows, so a rule does not loop over them. It selects chains of frames with a predicate (there
    are few chains), and gets their rows, or the sums of these rows by layer.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        # Many rules ask for the same. By predicate: the chains of frames that match, and the sums of their rows by the
        # phases; by function: the chains that have each of the traits that it returns.
        self._chains: dict[Holds, Sequence[int]] = {}
        self._sums: dict[tuple[Holds, Set[str]], Mapping[int, Took]] = {}
        self._rows_of_chain: dict[int, list[MatchingRow]] = {}
        self._chains_with: dict[Callable[[Frames], Collection[str]], defaultdict[str, list[int]]] = {}

    @cached_property
    def recorded_ns(self) -> int:
        """The elapsed time of the recording, summed over ranks. All shares and thresholds of time are of it."""
        return sum(meta.wall_ns for meta in self.run.metas)

    @property
    def notable_ns(self) -> float:
        """5 % of the recorded time: less is not reported of what a program needs to some degree, such as loading."""
        return 0.05 * self.recorded_ns

    @cached_property
    def steps(self) -> int:
        """The number of steps of all ranks: those that were marked, or of a loop that trains; 0 without any."""
        marked = sum(meta.marked_steps for meta in self.run.metas)
        if marked or BACKWARD not in self.run.phases():
            return marked
        return sum(spread.count for _, spread in self.samples["step_ns"])

    @cached_property
    def passes(self) -> float:
        """The number of steps, and the part of another one before them.

        In a loop that marks no steps, the pass in which the recording begins is in no step. It counts by its length, as
        one step at most: what is longer is work before or after the loop.
        """
        passes: float = self.steps
        unmarked = {meta.rank: meta.wall_ns for meta in self.run.metas if not meta.marked_steps}
        for key, spread in self.samples["step_ns"]:
            if key.rank in unmarked and spread.sum:
                passes += min(max(unmarked[key.rank] / spread.sum - 1, 0) * spread.count, 1)
        return passes

    def per_step(self, ns: int, *, in_layers: bool = False) -> float | None:
        """A part of the recorded time per step, as the same share of a step. None with fewer than two steps, or if it
        may not be in each of them: it is longer than all steps; it is not ``in_layers``, and could be after them; or it
        is in layers, which are also called without gradients."""
        if self.steps < 2 or (in_layers and self.samples["no_grad_ns"]):
            return None
        in_steps = [spread for _, spread in self.samples["step_ns"]]
        steps = sum(spread.count for spread in in_steps)
        all_steps_ns = sum(spread.sum for spread in in_steps)
        after_ns = self.recorded_ns - all_steps_ns * self.passes / steps if steps else 0
        may_be_after = after_ns >= _LITTLE * ns and not in_layers
        is_in_steps = not steps or (not may_be_after and ns <= all_steps_ns * self.passes / steps)
        return ns / self.passes if is_in_steps else None

    @cached_property
    def ops_recorded(self) -> bool:
        """Whether operators on the CPU were recorded: a trace of device activity alone has none."""
        return any(
            frame.kind == FrameKind.OP and "::" in frame.name for chain in self.run.rows.frames for frame in chain
        )

    @cached_property
    def peak_bytes(self) -> int:
        """The live bytes at the peaks, over all devices and ranks, with what the model had allocated before, if that is
        known; 0 if memory was not recorded. Gains in memory are shares of it."""
        return sum(memory.bytes_at_peak for memory in self.run.memory)

    @cached_property
    def device(self) -> str:
        """The kind of device whose time was measured, such as "cuda"; "cpu" without one."""
        meta = self.run.meta
        return meta.device if meta.device is not None and "device_ns" in meta.measured else "cpu"

    @cached_property
    def idle_ns(self) -> int:
        """How long the busiest device was idle between its first and its last work, summed over ranks. All of the
        recorded time of a rank without any."""
        return sum(busiest.idle_ns for busiest in self.busiest)

    @cached_property
    def busiest(self) -> list[DeviceTime]:
        """The busiest device of each rank."""
        busiest = {meta.rank: DeviceTime("", meta.rank, meta.wall_ns, 0, 0, 0, 0, 0, ()) for meta in self.run.metas}
        for time in self.run.device_use:
            if time.busy_ns > busiest[time.rank].busy_ns:
                busiest[time.rank] = time
        return [*busiest.values()]

    def while_idle(self, ns: int) -> int:
        """What a shorter time on the CPU saves: at most the idle time of the device, if its time was measured."""
        return ns if self.device == "cpu" else min(ns, self.idle_ns)

    @cached_property
    def trainable_params(self) -> int:
        """The trainable parameters of all layers."""
        return sum(layer.trainable_params or 0 for layer in self.run.layers)

    @cached_property
    def switches(self) -> dict[str, str]:
        """The settings of torch's switches, by name; empty if the run did not record them."""
        return dict(self.run.meta.switches)

    @cached_property
    def shapes_recorded(self) -> bool:
        """Whether the shapes and dtypes of the inputs of ops were recorded."""
        return any(on for meta in self.run.metas for name, on in meta.flags if name == "record_shapes")

    @cached_property
    def compute_capability(self) -> tuple[int, ...]:
        """The compute capability of the CUDA device, such as (8, 0); () if unknown."""
        numbers = self.switches.get("compute_capability", "").split(".")
        return tuple(map(int, numbers)) if all(number.isdecimal() for number in numbers) else ()

    @cached_property
    def forward_calls(self) -> list[int]:
        """How often the forward of each layer was called."""
        return [*map(self.run.rows.forward_calls, range(len(self.run.layers)))]

    @cached_property
    def calls(self) -> dict[int, int]:
        """The same with the calls that were recomputed in backward; only of layers with rows."""
        calls = sums_by_key(
            (layer, times) for (layer, phase), (_, times) in self.run.rows.by_layer.items() if phase in _WITH_RECOMPUTE
        )
        return dict(calls)

    @cached_property
    def noted(self) -> list[int]:
        """The models whose calls were looked at, and the layers directly below a container that is not called itself.
        None is below another one."""
        layers = self.run.layers
        called = [number for number, layer in enumerate(layers) if layer.noted_calls]
        return [number for number in called if layers.parent[number] not in called]

    @cached_property
    def of_class(self) -> dict[str, list[int]]:
        """The layers of each class, by its name."""
        of_class = lists_by_key((layer.kind, number) for number, layer in enumerate(self.run.layers))
        return dict(of_class)

    @cached_property
    def called_above(self) -> list[int]:
        """For each layer the nearest layer above that was called (a ModuleList is not), -1 for none."""
        nearest: list[int] = []
        for above in self.run.layers.parent:  # parents come before their children
            nearest.append(above if above < 0 or self.forward_calls[above] else nearest[above])
        return nearest

    @cached_property
    def calls_below(self) -> Counter[int]:
        """By layer, the forward calls of layers for which it is the nearest layer above that was called."""
        return sums_by_key((above, calls) for calls, above in zip(self.forward_calls, self.called_above))

    @cached_property
    def samples(self) -> defaultdict[str, list[tuple[SampleKey, Spread]]]:
        """The samples of each measure, over all layers, phases, ranks and devices."""
        return lists_by_key((key.measure, (key, spread)) for key, spread in self.run.samples.items())

    def measured_again(self, measure: str) -> dict[tuple[int, str], int]:
        """By layer and phase, what a call took that was computed again after the recording, on the first rank."""
        return {key[:2]: spread.sum for key, spread in self.samples[measure] if key.rank == self.run.meta.rank}

    def durations(self, layer: int) -> list[Spread]:
        """The durations of the forward calls of a layer, for each rank that called it."""
        return spreads_of(self.run, layer, "cpu_ns")

    def timed_calls(self, *layers: int) -> int:
        """The number of the forward calls of some layers whose durations are known."""
        return sum(spread.count for layer in layers for spread in self.durations(layer))

    def beyond_median_ns(self, *layers: int) -> int:
        """The time of the forward calls of some layers beyond the median call of each: start-up and interruptions."""
        spreads = (spread for layer in layers for spread in self.durations(layer))
        return sum(max(0, round(spread.sum - spread.median * spread.count)) for spread in spreads)

    # The chains of frames that match a predicate

    @cached_property
    def _numbers_of_rows(self) -> dict[int, list[int]]:
        """The numbers of the rows of each chain, but for work launched before the recording."""
        frames = self.run.rows.frames
        numbers = lists_by_key((chain, row) for row, chain in enumerate(self.run.rows.columns["frames"]))
        return {chain: rows for chain, rows in numbers.items() if not is_left_over(frames[chain])}

    def _rows_of(self, chain: int) -> list[MatchingRow]:
        """The rows of a chain. They are made for the chains that a rule asks for: few of all."""
        if chain not in self._rows_of_chain:
            frames = self.run.rows.frames[chain]
            layer, phase, calls, cpu_ns, device_ns, on_cpu, on_device = map(self.run.rows.columns.__getitem__, _COLUMNS)
            self._rows_of_chain[chain] = [
                MatchingRow(
                    layer[row],
                    PHASES[phase[row]],
                    frames,
                    calls[row],
                    cpu_ns[row],
                    device_ns[row],
                    on_cpu[row] + on_device[row],
                )
                for row in self._numbers_of_rows[chain]
            ]
        return self._rows_of_chain[chain]

    def _matching(self, holds: Holds) -> Sequence[int]:
        """The numbers of the chains that match and have rows, in their order."""
        if holds not in self._chains:
            frames = self.run.rows.frames
            if holds is always:
                self._chains[holds] = sorted(self._numbers_of_rows)
            elif isinstance(holds, Having):
                chains_of = self._chains_by(holds.traits)
                self._chains[holds] = sorted({chain for trait in holds.wanted for chain in chains_of[trait]})
            else:
                wider, test = (holds.wider, holds.test) if isinstance(holds, Among) else (always, holds)
                self._chains[holds] = [chain for chain in self._matching(wider) if test(frames[chain])]
        return self._chains[holds]

    def _chains_by(self, traits: Callable[[Frames], Collection[str]]) -> defaultdict[str, list[int]]:
        """The chains that have rows, by each of their traits."""
        if traits not in self._chains_with:
            self._chains_with[traits] = lists_by_key(
                (trait, chain) for chain in self._matching(always) for trait in traits(self.run.rows.frames[chain])
            )
        return self._chains_with[traits]

    # Their rows, and the sums of these

    def any_row(self, holds: Holds) -> bool:
        """Whether the frames of any row match."""
        return bool(self._matching(holds))

    def rows(self, holds: Holds, *, phases: Collection[str] = PHASES) -> Iterator[MatchingRow]:
        """The rows whose frames match. Work launched before the recording never matches, here and in ``took``."""
        for _, rows in self._rows_by_chain(holds, phases):
            yield from rows

    def chains(self, holds: Holds, *, phases: Collection[str] = PHASES) -> Iterator[tuple[Frames, Took]]:
        """The chains of frames that match, with the sums of their rows, whatever the layer."""
        for frames, rows in self._rows_by_chain(holds, phases):
            if rows:
                yield frames, Took(*map(sum, zip(*(row[3:] for row in rows))))

    def _rows_by_chain(self, holds: Holds, phases: Collection[str]) -> Iterator[tuple[Frames, list[MatchingRow]]]:
        """The chains of frames that match, and their rows in some phases."""
        for chain in self._matching(holds):
            rows = self._rows_of(chain)
            yield self.run.rows.frames[chain], [row for row in rows if row.phase in phases]

    def took(self, holds: Holds, *, phases: Iterable[str] = PHASES) -> Mapping[int, Took]:
        """The sums of the rows whose frames match, by the number of their layer (negative: no layer).

        ``calls`` counts a row only if its frames without the innermost do not match. For "an ``aten::softmax`` is among
        the frames" it is the number of calls of softmax, and the times are those of these calls with all ops inside
        them, but without layers that they call.
        """
        wanted = self._phases.intersection(phases)
        if not wanted or not self._matching(holds):
            return {}
        if (holds, wanted) not in self._sums:
            self._sums[holds, wanted] = self._all_sums(wanted) if holds is always else self._sums_of(holds, wanted)
        return self._sums[holds, wanted]

    @cached_property
    def _phases(self) -> frozenset[str]:
        return frozenset(self.run.phases())

    def whole_of(self, holds: Holds) -> Took:
        """The same for all layers and the work of no layer together."""
        return Took(*map(sum, zip(*self.took(holds).values())))

    def took_outside(self, holds: Holds, phase: str) -> Took:
        """The same for the work outside all layers."""
        return self.took(holds, phases=(phase,)).get(OUTSIDE, Took())

    def _all_sums(self, wanted: Set[str]) -> Mapping[int, Took]:
        """The sums of all rows, by layer, from those that the run has by layer and phase."""
        sums: dict[int, Took] = {}
        for (layer, phase), (cost, calls) in self.run.rows.by_layer.items():
            if PHASES[phase] in wanted:
                took = Took(calls, cost.cpu_ns, cost.device_ns, cost.cpu_allocated + cost.device_allocated)
                before = sums.get(layer)
                sums[layer] = took if before is None else Took(*map(add, before, took))
        return sums

    def _sums_of(self, holds: Holds, wanted: Set[str]) -> Mapping[int, Took]:
        """The sums of the rows whose frames match, by layer."""
        sums: defaultdict[int, list[int]] = defaultdict(lambda: [0] * len(Took._fields))
        for frames, rows in self._rows_by_chain(holds, wanted):
            is_outermost = not (frames and holds(frames[:-1]))
            for layer, _, _, calls, cpu_ns, device_ns, allocated in rows:
                of_layer = sums[layer]
                of_layer[0] += calls * is_outermost
                of_layer[1] += cpu_ns
                of_layer[2] += device_ns
                of_layer[3] += allocated
        return {layer: Took(*of_layer) for layer, of_layer in sums.items()}

    def time_of(self, took: Took | MatchingRow) -> int:
        """The time that counts: that of the device if it was measured, else that of the CPU."""
        return took.cpu_ns if self.device == "cpu" else took.device_ns

    def times_with_below(self, phases: Iterable[str]) -> list[int]:
        """The time of each layer in these phases, with all layers below it."""
        own = [0] * len(self.run.layers)
        for number, took in self.took(always, phases=phases).items():
            if number >= 0:
                own[number] = self.time_of(took)
        return self.run.layers.roll_up(own)

    def gets_one_token(self, layer: int) -> bool:
        """Whether the model of a layer was called ten times or more with one token: its first input has two or three
        dimensions, the second of size 1."""
        root = self.run.layers.lineage(layer)[0]
        shapes = self.run.layers[root].input_shapes
        is_sound = "Conv1d" in self.of_class  # (batch, channel, time)
        if self.forward_calls[root] < _GENERATES or is_sound or not shapes:
            return False
        return len(shapes[0]) in (2, 3) and shapes[0][1] == 1

    def name_of(self, layer: int) -> str:
        """The dotted path of a layer by its number, or the name for work of no layer."""
        return self.run.layers.name_of(layer)
