"""The result of a benchmark: the latencies for each batch size, and the machine."""

from __future__ import annotations

import math
import os
import platform
from dataclasses import dataclass, field

import torch
from torch.utils.benchmark import Measurement, TaskSpec

from torchprof.record.this_process import cpu_name
from torchprof.run.formats import UNKNOWN
from torchprof.run.outputs import output
from torchprof.run.samples import quantile


@dataclass(frozen=True)
class Latency:
    """The latencies of single calls at one ``batch_size``, in seconds.

    ``seconds``: one number for each call, in order. After an out-of-memory error it is empty, ``error`` is torch's
    message, and all figures are None.
    """

    batch_size: int
    seconds: tuple[float, ...] = field(default=(), repr=False)
    error: str | None = None

    @property
    def mean(self) -> float | None:
        return math.fsum(self.seconds) / len(self.seconds) if self.seconds else None

    @property
    def std(self) -> float | None:
        """The standard deviation of the sample (divided by n - 1)."""
        mean = self.mean
        if mean is None or len(self.seconds) < 2:
            return None
        return math.sqrt(math.fsum((value - mean) ** 2 for value in self.seconds) / (len(self.seconds) - 1))

    @property
    def median(self) -> float | None:
        return self.quantile(0.5)

    @property
    def p95(self) -> float | None:
        return self.quantile(0.95)

    @property
    def min(self) -> float | None:
        return min(self.seconds, default=None)

    @property
    def max(self) -> float | None:
        return max(self.seconds, default=None)

    @property
    def samples_per_s(self) -> float | None:
        """Throughput: the batch size divided by the mean."""
        return self.batch_size / self.mean if self.mean else None

    def quantile(self, q: float) -> float | None:
        """The quantile ``q`` (0 to 1), interpolated linearly between the two nearest calls."""
        return quantile(sorted(self.seconds), q) if self.seconds else None


@dataclass(frozen=True)
class Machine:
    """The machine of a benchmark. ``cpu``: its name; ``cpus``: logical CPUs; ``threads``: used by torch; ``gpus``: the
    names of all visible GPUs. ``torch``, ``python``: versions; ``system``: the operating system."""

    cpu: str
    cpus: int | None
    threads: int
    gpus: tuple[str, ...]
    torch: str
    python: str
    system: str

    def __str__(self) -> str:
        parts = [
            f"{self.cpu} ({UNKNOWN if self.cpus is None else self.cpus} CPUs, {self.threads} thread"
            f"{'' if self.threads == 1 else 's'})",
            *(f"{self.gpus.count(name)} × {name}" for name in dict.fromkeys(self.gpus)),
            f"torch {self.torch}",
            f"Python {self.python}",
            self.system,
        ]
        return ", ".join(parts)


@dataclass(frozen=True, repr=False)
class BenchmarkResult:
    """The result of ``benchmark``; its ``str`` is a table. ``rows``: one ``Latency`` for each batch size.

    ``warmup``, ``repeat``: the calls before, and the timed calls, at each batch size. ``machine``: where it ran.
    ``model``: class name. ``step``: "inference", "training step", or "training step with <optimizer's class>".
    ``device``: the devices of the model and its inputs. ``warnings``: sentences for the user.
    """

    model: str
    step: str
    device: str
    warmup: int
    repeat: int
    rows: tuple[Latency, ...]
    machine: Machine
    warnings: tuple[str, ...] = ()

    @property
    def measurements(self) -> tuple[Measurement, ...]:
        """The rows as torch's own measurements, without those that ran out of memory.

        ``torch.utils.benchmark.Compare`` makes one table of several results: a row for each batch size, a column for
        each model, a table for each kind of step.
        """
        return tuple(
            Measurement(
                1,
                list(row.seconds),
                TaskSpec(
                    stmt="model(inputs)",
                    setup="pass",
                    label=self.step,
                    sub_label=f"batch size {row.batch_size}",
                    description=f"{self.model} on {self.device}",
                    env=str(self.machine),
                    num_threads=self.machine.threads,
                ),
            )
            for row in self.rows
            if row.seconds
        )

    def __str__(self) -> str:
        table: str = output("text_of")(output("benchmark_table")(self))
        return table

    def __repr__(self) -> str:
        """The table: it is what Python's prompt shows."""
        return str(self)

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        html: str = output("html_of")(output("benchmark_table")(self))
        return html


def this_machine() -> Machine:
    gpus = [
        module.get_device_name(number)
        for module in (torch.cuda, torch.xpu)
        if module.is_available()
        for number in range(module.device_count())
    ]
    return Machine(
        cpu=cpu_name() or UNKNOWN,
        cpus=os.cpu_count(),
        threads=torch.get_num_threads(),
        gpus=tuple(gpus),
        torch=torch.__version__,
        python=platform.python_version(),
        system=platform.platform(),
    )
