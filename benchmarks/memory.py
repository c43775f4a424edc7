"""The extra time per event to analyze memory when a recording is read."""

from __future__ import annotations

import statistics
import time

import torch

import torchprof
from benchmarks.ratios import asked_quick, say, show, take_turns, verdict
from benchmarks.subjects import Subject, subjects
from torchprof.measure.assemble import attribution_of
from torchprof.measure.fold import fold
from torchprof.measure.memory import Allocations

LIMIT_US = 3.0
STEPS = {"500 tiny Linear": 3, "AlexNet 1x3x224x224": 10, "BERT-base 1x128": 3}
ROUNDS = 15


class Recording:
    """Some training steps, recorded with memory. The events can be read many times."""

    def __init__(self, subject: Subject, steps: int) -> None:
        optimizer = torch.optim.SGD(subject.model.parameters(), lr=0.0)
        self.prof = torchprof.Profile(subject.model, profile_memory=True)
        with self.prof:
            for _ in range(steps):
                result = subject.forward()
                (result[0] if isinstance(result, tuple) else result).sum().backward()
                del result
                optimizer.step()
                optimizer.zero_grad()
        names = [raw.name() for raw in self.prof._session._read().all]
        self.events = len(names)
        self.of_memory = names.count("[memory]")

    def plain(self) -> float:
        """The CPU seconds to read, attribute and sum the events."""
        start = time.process_time()
        attribution = attribution_of(self.prof._plan.layer_plan())
        fold(attribution.attribute(self.prof._session.events()), attribution.places.all, self.prof._layers)
        return time.process_time() - start

    def analysed(self) -> float:
        """The same, with addresses, peaks, kinds of memory, and memory that is saved for backward."""
        start = time.process_time()
        attribution = attribution_of(self.prof._plan.layer_plan())
        allocations = Allocations(self.prof._layers, 0, self.prof._cycles.last._end_memory.addresses, before={})
        attributed = allocations.observe(attribution.attribute(self.prof._session.events(addresses=True)))
        fold(attributed, attribution.places.all, self.prof._layers)
        allocations.result()
        return time.process_time() - start


def measure(quick: bool) -> None:
    torch.set_num_threads(1)
    rows = []
    for subject in subjects(quick):
        say(f"recording {subject.name}")
        subject.forward()
        recording = Recording(subject, 1 if quick else STEPS[subject.name])
        took = take_turns(
            {"plain": recording.plain, "analysed": recording.analysed},
            2 if quick else ROUNDS,
            f"reading {subject.name}",
        )
        plain, analysed = ([seconds / recording.events * 1e6 for seconds in took[way]] for way in took)
        more = statistics.median(ours - theirs for ours, theirs in zip(analysed, plain))
        rows.append(
            [
                subject.name,
                f"{recording.events:,}",
                f"{recording.of_memory / recording.events:.0%}",
                f"{statistics.median(plain):.2f} us",
                f"{statistics.median(analysed):.2f} us",
                f"{more:.2f} us",
                verdict(more, LIMIT_US),
            ]
        )
    show(
        "Making the run of some training steps recorded with profile_memory=True, for each event",
        ["Model", "Events", "Of memory", "Sums alone", "With analysis", "More", "Limit (us)"],
        rows,
        "Both read the same recording, in turn, in the processor's time; the garbage collector is off.",
    )


if __name__ == "__main__":
    measure(asked_quick(__doc__))
