"""The figures of one of the two runs that are compared, by layer."""

from __future__ import annotations

from collections import defaultdict
from itertools import repeat
from operator import add, sub

from torchprof.analyze.figures import Figures, figures_of_layers, measured_by_all
from torchprof.run.run import Run
from torchprof.run.samples import SampleKey, Spread
from torchprof.run.words import FORWARD, PHASES

_NEARLY_ALL = 0.99  # times of steps and of calls differ slightly by the cost of measuring them


class Side:
    """One of the two runs, with its figures by layer.

    Lists are indexed as ``run.layers``, and end with the work of ``NOT_SELECTED`` (-2) and ``OUTSIDE`` (-1).
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        layers = run.layers
        self.below: list[list[int]] = [*layers.children, [], []]
        of_layers = figures_of_layers(run, PHASES)
        self.figures = [of_layers[layer.path] for layer in layers]
        for selected_only in (False, True):
            costs = {phase: run.no_layer(phase, selected=selected_only) for phase in PHASES}
            self.figures.append(Figures(costs, costs))
        self.known = [bool(figures.total) and not figures.unknown for figures in self.figures]
        self.params = run.total_params()
        self.knows_params = any(layer.params is not None for layer in layers)
        self.peaks = self._peaks()
        self.measured = measured_by_all(run)
        self.steps = sum(meta.marked_steps for meta in run.metas)
        self._steps_of = self._sampled_steps() if self.steps and self._steps_hold_all() else {}
        self._device_keys: defaultdict[tuple[int, str, int], list[SampleKey]] = defaultdict(list)
        self._call_spreads: defaultdict[tuple[int, str], list[Spread]] = defaultdict(list)
        for key, spread in run.samples.items():
            if key.measure == "step_device_ns":
                self._device_keys[key.layer, key.phase, key.rank].append(key)
            elif key.measure == "cpu_ns":
                self._call_spreads[key.layer, key.phase].append(spread)

    def worked(self, index: int, phase: str) -> bool:
        """Whether a layer that was selected, or one below it, did anything in a phase."""
        _, calls = self.run.rows.by_layer.get((index, PHASES.index(phase)), (None, 0))
        return bool(calls or self.figures[index].cost(phase))

    def _peaks(self) -> dict[tuple[int, str, bool], int]:
        """Peaks of memory above the start of a call, in bytes, by layer, phase and whether it is that of a device: the
        largest of all calls, devices and ranks."""
        peaks: dict[tuple[int, str, bool], int] = {}
        for key, spread in self.run.samples.items():
            of = (key.layer, key.phase, key.device != "cpu")
            if key.measure == "peak_bytes":
                peaks[of] = max(spread.max, peaks.get(of, spread.max))
            elif key.measure == "kept_bytes":  # memory was recorded: without a peak it allocated nothing
                peaks.setdefault(of, 0)
        return peaks

    def _steps_hold_all(self) -> bool:
        """Whether all forward work of the models was in steps. Work after the last step, such as an evaluation, is in
        the totals and in no step."""
        in_steps: defaultdict[int, int] = defaultdict(int)
        for key, spread in self.run.samples.items():
            if key.measure == "step_cpu_ns" and key.phase == FORWARD:
                in_steps[key.layer] += spread.sum
        totals = [self.run.tree(FORWARD, number).total.cpu_ns for number in range(len(self.run.roots))]
        return all(in_steps[root] >= _NEARLY_ALL * total for root, total in zip(self.run.layers.roots, totals))

    def _sampled_steps(self) -> dict[int, tuple[int, ...]]:
        """The steps in the samples, by rank: each is identified by the hash of its start time."""
        steps = {}
        for key, spread in self.run.samples.items():
            if key.measure == "step_ns":
                if len(set(spread.hashes)) < len(spread.hashes):  # values cannot be assigned to steps
                    return {}
                steps[key.rank] = spread.hashes
        return steps

    def of_steps(self, index: int, phase: str, field: str, is_self: bool = False) -> list[float]:
        """The total or self time of a layer in each step, in the order of ``_sampled_steps``; empty without steps."""
        values: list[float] = []
        for rank, steps in self._steps_of.items():
            if field == "cpu_ns":
                keys = [SampleKey(index, phase, rank, "cpu", "step_cpu_ns")]
            else:
                keys = self._device_keys[index, phase, rank]
            taken = [0] * len(steps)
            for key in keys:
                spread = self.run.samples.get(key)
                if spread is not None:
                    by_step = dict(zip(spread.hashes, spread.sample))
                    taken = list(map(add, taken, map(by_step.get, steps, repeat(0))))
            values += taken
        for child in self.below[index] if is_self else ():
            values = list(map(sub, values, self.of_steps(child, phase, field)))
        return values

    def of_calls(self, index: int, phase: str) -> list[float]:
        """The time of each sampled call of a layer, times the number of its calls: so they compare to totals."""
        spreads = self._call_spreads[index, phase]
        count = sum(spread.count for spread in spreads)
        return [value * count for spread in spreads for value in spread.sample]
