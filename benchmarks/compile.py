"""What compile_layers=True finds out about a compiled model, and what it costs: in a call, on reading, when compiling.

It runs on the CPU with one thread, in float32, with Inductor's C++ kernels, which need a C++ compiler.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import torchprof
from benchmarks.ratios import Ratio, median_ms, say, show, take_turns, verdict
from examples.models import MLP, Bert
from torchprof.run.layers import Layer
from torchprof.run.rows import Row
from torchprof.run.run import Run

STEPS = 5
ROUNDS = {"24 tiny blocks": 60, "encoder, 6 layers": 10}
COMPILATIONS = 3
OF_MLP, OF_TRANSFORMER = 0.95, 0.85
"""The lower limits of the share of the kernels' time that is assigned to a single block."""


class Compiled(NamedTuple):
    """A compiled model and its input ``x``.

    ``blocks``: the path from the root to its blocks. ``limit``: the lower limit of the share of the kernels' time that
    is assigned to a single block.
    """

    name: str
    model: nn.Module
    x: Tensor
    blocks: tuple[str, ...]
    limit: float


class ResidualMLP(nn.Module):
    """A normalization and an MLP, with a residual connection."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mlp = MLP(width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


class Blocks(nn.Module):
    """Several ResidualMLP, one after the other."""

    def __init__(self, count: int, width: int, hidden: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(ResidualMLP(width, hidden) for _ in range(count)))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.blocks(x)
        return result


class OutputAlone(nn.Module):
    """A model of Hugging Face that returns only its first output."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        first: Tensor = self.model(tokens)[0]
        return first


def models(quick: bool) -> list[Compiled]:
    """The models, in train mode; with those of Hugging Face if transformers is installed."""
    torch.manual_seed(0)
    found = [Compiled("MLP, 4 blocks", Blocks(4, 256, 1024), torch.rand(128, 256), ("blocks",), OF_MLP)]
    if quick:
        return found
    tokens = torch.randint(1000, (4, 128))
    encoder = OutputAlone(Bert(vocabulary=1000, width=256, layers=6, heads=4, hidden=1024))
    found.append(Compiled("encoder, 6 layers", encoder, tokens, ("model", "encoder"), OF_TRANSFORMER))
    if find_spec("transformers"):
        from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM

        sizes = {
            "vocab_size": 1000,
            "hidden_size": 256,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "intermediate_size": 1024,
        }
        bert = OutputAlone(BertModel(BertConfig(**sizes), add_pooling_layer=False))
        llama = OutputAlone(LlamaForCausalLM(LlamaConfig(**sizes, use_cache=False)))
        found.append(Compiled("BertModel, 4 layers", bert, tokens, ("model", "encoder", "layer"), OF_TRANSFORMER))
        found.append(Compiled("Llama, 4 layers", llama, tokens, ("model", "model", "layers"), OF_TRANSFORMER))
    return found


def tiny() -> Compiled:
    """A model whose kernels do very little, so that the overhead of each kernel is measured."""
    return Compiled("24 tiny blocks", Blocks(24, 16, 32), torch.rand(4, 16), ("blocks",), OF_MLP)


def step(model: Callable[[Tensor], Tensor], x: Tensor) -> None:
    model(x).sum().backward()


# What is known about compiled graphs


def of_shares(quick: bool) -> None:
    rows = []
    for one in models(quick):
        say(f"compiling and recording {one.name}")
        compiled = torch.compile(one.model)
        with torchprof.Profile(compiled, compile_layers=True, schedule=after(2)) as prof:
            for _ in range(2 + STEPS):
                step(compiled, one.x)
                prof.step()
        for phase in ("forward", "backward"):
            took = shares(prof.run, phase, one.blocks)
            whole = sum(took.values())
            layer, block, blocks, unknown = (took[what] / whole for what in WHAT)
            rows.append(
                [
                    one.name,
                    phase,
                    f"{whole / STEPS / 1e6:.2f} ms",
                    *(f"{share:.1%}" for share in (layer, layer + block, blocks, unknown)),
                    verdict(layer + block, one.limit, at_least=True),
                ]
            )
        torch.compiler.reset()
    show(
        "Whose the time in kernels of compiled graphs is, in training",
        ["Model", "Phase", "Kernels, a step", "One layer", "One block", "Several blocks", "Unknown", "Limit"],
        rows,
        "One block: all layers that a kernel works for are in it; those outside of the blocks (embedding, head) are "
        "each one of their own.",
    )


def after(steps: int) -> Callable[[int], torch.profiler.ProfilerAction]:
    """A schedule that records after ``steps`` steps; the first of these compiles."""
    return torch.profiler.schedule(wait=steps - 1, warmup=1, active=STEPS, repeat=1)


WHAT = ("one layer", "one block", "several blocks", "unknown")


def shares(run: Run, phase: str, blocks: tuple[str, ...]) -> dict[str, int]:
    """The nanoseconds in kernels of compiled graphs, by what is known of a kernel: a layer, or several in a block."""
    took = dict.fromkeys(WHAT, 0)
    for row in run.rows:
        if row.phase == phase and is_in_kernel(row):
            took[known_of(row, blocks)] += row.cost.cpu_ns
    return took


def is_in_kernel(row: Row) -> bool:
    """Whether a row is inside a call of a compiled graph."""
    frames = [frame for around in row.within for frame in around.frames] + list(row.frames)
    return "CompiledFxGraph" in [frame.name for frame in frames[:-1]]


def known_of(row: Row, blocks: tuple[str, ...]) -> str:
    if any(frame.name == "not attributable" for frame in row.frames):
        return "unknown"
    if row.layer is None:  # several layers, and one of them is the code of the compiled function itself
        return "several blocks"
    if not row.shared_by:
        return "one layer"
    return "one block" if len({block_of(layer, blocks) for layer in row.shared_by}) == 1 else "several blocks"


def block_of(layer: Layer, blocks: tuple[str, ...]) -> tuple[str, ...]:
    """The path of the block that contains a layer; outside of all blocks, the path of the layer itself."""
    above = (layer.path[0], *blocks)
    return layer.path[: len(above) + 1] if layer.path[: len(above)] == above else layer.path


# What a call costs


def measured_calls(one: Compiled, rounds: int) -> tuple[dict[str, list[float]], dict[str, Reading]]:
    """The CPU seconds of a step of each variant, and what it took to read the profiled ones."""
    say(f"compiling {one.name}, twice")
    without, ranged = (torch.compile(with_code_of_its_own(one.model)) for _ in range(2))
    for _ in range(2):
        step(without, one.x)
    with torchprof.Profile(ranged, compile_layers=True, schedule=after(2)) as prof:
        for _ in range(3):
            step(ranged, one.x)
            prof.step()
    graphs = count_graphs()
    read = {way: Reading() for way in ("without", "with")}
    took = take_turns(
        {
            "plain": partial(processor_time, without, one.x),
            "profiled": partial(profiled, without, one.x, False, read["without"]),
            "ranges": partial(processor_time, ranged, one.x),
            "layers": partial(profiled, ranged, one.x, True, read["with"]),
        },
        rounds,
        f"calls of {one.name}",
    )
    assert count_graphs() == graphs, "a graph was compiled meanwhile"
    return took, read


def of_calls(quick: bool) -> None:
    calls, reading = [], []
    for one in [tiny(), *models(quick)[1:2]]:
        took, read = measured_calls(one, 2 if quick else ROUNDS[one.name])
        calls.append(
            [
                one.name,
                *(median_ms(seconds) for seconds in took.values()),
                *(str(Ratio.of(took[way], took["plain"])) for way in ("profiled", "ranges", "layers")),
                Ratio.of(took["layers"], took["profiled"]).spread,
            ]
        )
        reading.append(
            [one.name]
            + [text for found in read.values() for text in (f"{found.events:,}", median_ms(found.seconds))]
            + [str(Ratio.of(read["with"].seconds, read["without"].seconds))]
        )
    show(
        "A training step of a compiled model",
        [
            "Model",
            "Not profiled",
            "Profiled",
            "Ranges in it",
            "With layers",
            "Profiled",
            "Ranges in it",
            "With layers",
            "With layers / profiled",
        ],
        calls,
        "Profiled: inside a block, compiled before it. Ranges in it: compiled in a block with compile_layers=True, and "
        "profiled no more. With layers: that\nprofiled with compile_layers=True. Ratios are to what is not profiled; "
        "the last column has quartiles. In the processor's time. No graph was compiled meanwhile.",
    )
    show(
        "From the end of that block to its run",
        ["Model", "Events", "Without layers", "Events", "With layers", "Ratio"],
        reading,
        "In the processor's time.",
    )


def with_code_of_its_own(model: nn.Module) -> nn.Module:
    """A copy of a model, with a copied class and a copied forward, since torch.compile caches by the code object."""
    copied = deepcopy(model)
    kind = type(model)
    forward = kind.forward
    code = FunctionType(forward.__code__.replace(), forward.__globals__, "forward", closure=forward.__closure__)
    copied.__class__ = type(kind.__name__, (kind,), {"forward": code})
    return copied


@dataclass
class Reading:
    """The times to make runs from recordings, and the number of events in a recording."""

    seconds: list[float] = field(default_factory=list)
    events: int = 0


def profiled(compiled: Any, x: Tensor, compile_layers: bool, reading: Reading) -> float:
    """The CPU seconds of a step inside a block."""
    with torchprof.Profile(compiled, compile_layers=compile_layers) as prof:
        took = processor_time(compiled, x)
    start = time.process_time()
    assert prof.run.rows
    reading.seconds.append(time.process_time() - start)
    reading.events = len(prof._session._read().all)
    return took


def processor_time(compiled: Callable[[Tensor], Tensor], x: Tensor) -> float:
    """The CPU seconds of a step."""
    start = time.process_time()
    step(compiled, x)
    return time.process_time() - start


def count_graphs() -> int:
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


# What compiling costs


def of_compiling(quick: bool) -> None:
    number = len(models(quick)[:2]) - 1
    name = models(quick)[number].name
    seconds: dict[str, list[float]] = {"without": [], "with": []}
    took = take_turns(
        {way: partial(first_step_elsewhere, number, way, seconds[way]) for way in seconds},
        1 if quick else COMPILATIONS,
        f"compiling {name}, in fresh processes",
    )
    ratio = Ratio.of(took["with"], took["without"])
    times = [statistics.median(found) for of_way in (seconds, took) for found in of_way.values()]
    show(
        "The first step of a model, which compiles it",
        [
            "Model",
            "Without layers",
            "With layers",
            "Processor, without",
            "Processor, with",
            "Ratio of these",
            "Quartiles",
        ],
        [[name, *(f"{median:.1f} s" for median in times), str(ratio), ratio.spread]],
        "Each in a fresh process with empty caches, from torch.compile to the end of the step, inside a block that "
        "records nothing yet. The processor's\ntime is that of the whole process, and of the compilers that it starts.",
    )


def first_step_elsewhere(number: int, way: str, seconds: list[float]) -> float:
    """The CPU seconds of a new process with empty caches that runs a first step.

    The wall-clock time of the step is appended to ``seconds``.
    """
    before = of_children()
    with tempfile.TemporaryDirectory() as folder:
        answer = subprocess.run(
            [sys.executable, "-m", "benchmarks.compile", "--first-step", str(number), way],
            check=True,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": folder},
        )
    seconds.append(float(json.loads(answer.stdout)))
    return of_children() - before


def of_children() -> float:
    """The CPU seconds of all child processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def first_step(number: int, way: str) -> float:
    one = models(quick=number == 0)[number]
    start = time.perf_counter()
    compiled = torch.compile(one.model)
    with torchprof.Profile(compiled, compile_layers=way == "with", schedule=after(2)):
        step(compiled, one.x)
        return time.perf_counter() - start


def measure(quick: bool) -> None:
    torch.set_num_threads(1)
    of_shares(quick)
    of_calls(quick)
    of_compiling(quick)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few repeats: shows that it runs, not what it costs")
    parser.add_argument("--first-step", nargs=2, metavar=("MODEL", "WAY"), help=argparse.SUPPRESS)
    options: Any = parser.parse_args()
    if options.first_step is None:
        measure(options.quick)
        return
    torch.set_num_threads(1)
    number, way = options.first_step
    print(json.dumps(first_step(int(number), way)))


if __name__ == "__main__":
    main()
