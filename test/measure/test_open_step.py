"""The steps of a recording in several cycles, against those of the same recording in one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from itertools import pairwise
from typing import Any
from unittest.mock import patch

from build.events import kernel, label, op, step, user_label
from build.examples import examples
from build.exchanges import GROUP, exchange
from hypothesis import example, given
from hypothesis import strategies as st

from torchprof.attribute.event_columns import EventColumns
from torchprof.attribute.events import Event, Kind, Site
from torchprof.attribute.rule import Attribution
from torchprof.measure.lockstep import Locksteps
from torchprof.measure.recording import OpenStep
from torchprof.measure.steps import Steps, with_marks
from torchprof.run.collectives import Unfinished, UnfinishedPart
from torchprof.run.layers import Layer, Layers
from torchprof.run.lockstep import STEP, Lockstep, LockstepKey, LockstepPart
from torchprof.run.measures import SampleKey, SamplesPart
from torchprof.run.words import FORWARD, OUTSIDE

NET, A = "torchprof:Net", "torchprof:Net.a"
LAYERS = Layers([Layer(("Net",), "Net"), Layer(("Net", "a"), "Linear")])
UNFINISHED = UnfinishedPart(Unfinished)
MORE_LAYERS = Layers([Layer(("Loss",), "Loss"), *LAYERS])
DATA = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
PIECE = 1_000
ENDS = {0: 500, 3: 800, 4: 950}
"""The pieces that may end a step, and where: at the end of a range."""


def events_of(what: int, at: int) -> list[Event]:
    """The events of one piece of a recording, which is 1000 ns long: one range after the other, and their kernels."""
    alike: list[list[Event]] = [
        [label(NET, at + 10, at + 500), label(A, at + 20, at + 200 + at % 37), op("aten::mm", at + 30, at + 150)],
        [op("aten::add", at + 5, at + 400, correlation=at + 1), kernel("add", at + 300, at + 900, at + 1)],
        [user_label(DATA, at + 100, at + 700), op("aten::stack", at + 150, at + 600)],
        [
            label(NET, at + 10, at + 800),
            op("c10d::allreduce_", at + 50, at + 700),
            exchange("gloo:all_reduce", at + 60, at + 300),
        ],
        [user_label("Optimizer.step#SGD.step", at + 200, at + 950)],
        [],
    ]
    return alike[what]


def cycle(pieces: Sequence[int], first: int, ends: Sequence[int], layers: Layers, before: OpenStep | None) -> Any:
    """The results of the cycle from the piece ``first`` on. ``before``: the step that was open at its start."""
    began, ended = first * PIECE, (first + len(pieces)) * PIECE
    number = layers.index_of["Net",]
    sites = {NET: Site((number,)), A: Site((number + 1,))}
    events = [event for place, what in enumerate(pieces, first) for event in events_of(what, place * PIECE)]
    events = [step(began), *sorted(events, key=lambda event: (event.kind is Kind.KERNEL, event.start_ns))]
    within = [end for end in ends if began < end <= ended]
    attributed = Attribution(sites, [layer.path for layer in layers]).attribute(EventColumns.of(events), within)
    before = None if before is None else before.on_layers(layers)
    steps = Steps(layers, 0, True, True, before)
    lockstep = Locksteps(layers, 0, (), GROUP, True, ended, True, before)
    for _ in lockstep.observe(steps.observe(with_marks(attributed, within, ended, 1))):
        pass
    of_steps, of_lockstep = steps.result(), lockstep.result()
    parts = [of_steps.get("open"), of_lockstep.get("open")]
    assert (parts[0] is None) == (parts[1] is None)
    step_at_end = None if parts[0] is None else OpenStep(layers, **parts[0], **parts[1])
    return of_steps, of_lockstep, step_at_end


def without_zeros(values: Any) -> Any:
    return {key: value for key, value in values.items() if value}


@examples(150)
@given(
    pieces=st.lists(st.integers(0, 5), min_size=1, max_size=14),
    ends=st.sets(st.integers(0, 13)),
    cuts=st.sets(st.integers(1, 13)),
)
@example(pieces=[4] * 40, ends={*range(40)}, cuts={9, 20})
@example(pieces=[3] * 40, ends={*range(40)}, cuts={1, 25})
def test_cycles_have_the_steps_of_one_recording(pieces: list[int], ends: set[int], cuts: set[int]) -> None:
    """Wherever the cycles end, and with further layers from the second on. Three single times are kept, the same."""
    with patch.object(Lockstep, "SIZE", 3):
        check_cycles(pieces, ends, cuts)


def check_cycles(pieces: list[int], ends: set[int], cuts: set[int]) -> None:
    at_ends = [PIECE * place + ENDS[what] for place, what in enumerate(pieces) if place in ends and what in ENDS]
    whole, of_whole, last = cycle(pieces, 0, at_ends, LAYERS, None)
    lockstep = of_whole["lockstep"]

    bounds = [0, *sorted(cut for cut in cuts if cut < len(pieces)), len(pieces)]
    open_step: OpenStep | None = None
    samples, locksteps, counts, unfinished = [], [], [], []
    for first, after in pairwise(bounds):
        layers = MORE_LAYERS if first else LAYERS
        of_steps, of_lockstep, open_step = cycle(pieces[first:after], first, at_ends, layers, open_step)
        to = [MORE_LAYERS.index_of[layer.path] for layer in layers] + [-2, -1]
        unfinished.append(UNFINISHED.renumbered(of_lockstep["unfinished"], to))
        if of_steps["steps"]:  # else the lockstep is of the cycle
            samples.append(SamplesPart().renumbered(of_steps["samples"], to))
            locksteps.append(LockstepPart().renumbered(of_lockstep["lockstep"], to))
        counts.append(of_steps["steps"])

    assert sum(counts) == whole["steps"] == max(len(at_ends) - 1, 0)
    to = [MORE_LAYERS.index_of[layer.path] for layer in LAYERS] + [-2, -1]
    if samples:
        added = reduce(SamplesPart().added, samples)
        assert {key: replace(spread, hashes=()) for key, spread in added.items()} == {
            key: replace(spread, hashes=()) for key, spread in SamplesPart().renumbered(whole["samples"], to).items()
        }
        assert reduce(LockstepPart().added, locksteps) == LockstepPart().renumbered(lockstep, to)
        took = added[SampleKey(OUTSIDE, FORWARD, 0, "cpu", "step_ns")]
        assert took.sum == at_ends[-1] - at_ends[0]
    (at_end,), (as_one,) = reduce(UNFINISHED.added, unfinished), UNFINISHED.renumbered(of_whole["unfinished"], to)
    assert (at_end.ns, at_end.entered, at_end.began_before) == (as_one.ns, as_one.entered, not at_ends)
    assert (open_step is None) == (last is None) == (not at_ends)
    if open_step is not None and last is not None:
        open_step, last = open_step.on_layers(MORE_LAYERS), last.on_layers(MORE_LAYERS)
        assert without_zeros(open_step.samples) == without_zeros(last.samples)
        assert without_zeros(open_step.work) == without_zeros(last.work)
        assert without_zeros(open_step.calls) == without_zeros(last.calls)
        assert (open_step.steps, open_step.counts) == (last.steps, last.counts)


def test_a_cycle_without_a_whole_step_counts_as_one() -> None:
    _, of_lockstep, open_step = cycle([0, 4], 0, [1900], LAYERS, None)
    assert of_lockstep["lockstep"][LockstepKey(OUTSIDE, FORWARD, "cpu", STEP)].last_ns == (2000,)
    assert open_step is not None
    assert open_step.samples[SampleKey(OUTSIDE, FORWARD, 0, "cpu", "step_ns")] == 100
