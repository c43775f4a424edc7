"""What whole scripts take, from start to exit: alone, under ``torchprof run``, and under other profilers.

Each script is a loop of a length that takes some 10 s, or a minute, on its own. Tools that are not installed are left
out: ``pip install py-spy pyinstrument scalene``. A tool that takes four times as long is stopped: its ratio is
infinite.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from statistics import median

import torchprof
from benchmarks.ratios import Ratio, asked_quick, say, show, take_turns
from torchprof.run.words import BACKWARD, FORWARD, OPTIMIZER_STEP, OUTSIDE, PHASES, Frame

_START = """
import sys, torch
from torch import nn
import torch.nn.functional as F
torch.manual_seed(0); torch.set_num_threads(1)
STEPS = int(sys.argv[1])
def train(model, x, y, make, loss=F.mse_loss):
    optimizer = make(model.parameters())
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step()
"""
_WITH_STOPWATCH = """
import json, time
def train(model, x, y, make, loss=F.mse_loss):
    optimizer, now, sums = make(model.parameters()), time.perf_counter, [0.0] * 3
    for number in range(STEPS):
        optimizer.zero_grad()
        began = now()
        output = model(x)
        forward = now()
        value = loss(output, y)
        ready = now()
        value.backward()
        backward = now()
        optimizer.step()
        if number > STEPS // 4:  # all steps before may be recorded
            for part, seconds in enumerate((forward - began, backward - ready, now() - backward)):
                sums[part] += seconds
    print(json.dumps([part / sum(sums) for part in sums]))
"""
"""In place of ``train``: prints the shares of forward, backward and the optimizer, by a stopwatch."""
SCRIPTS = {  # the source, and how many steps take a second
    "12 blocks of Linear, LayerNorm, ReLU; AdamW": (
        """
blocks = [nn.Sequential(nn.Linear(256, 256), nn.LayerNorm(256), nn.ReLU()) for _ in range(12)]
train(nn.Sequential(*blocks, nn.Linear(256, 10)), torch.rand(32, 256), torch.rand(32, 10), torch.optim.AdamW)
""",
        130,
    ),
    "a small transformer, training; AdamW": (
        """
layer = nn.TransformerEncoderLayer(128, 4, 512, batch_first=True)
train(nn.TransformerEncoder(layer, 4), torch.rand(4, 64, 128), torch.rand(4, 64, 128), torch.optim.AdamW)
""",
        35,
    ),
    "the same, inference": (
        """
layer = nn.TransformerEncoderLayer(128, 4, 512, batch_first=True)
model, x = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False).eval(), torch.rand(2, 32, 128)
with torch.inference_mode():
    for _ in range(STEPS):
        model(x).argmax(-1).tolist()
""",
        250,
    ),
    "6 convolutions with batch norm; SGD": (
        """
sizes = [3, 32, 32, 64, 64, 64, 64]
blocks = [nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU()) for a, b in zip(sizes, sizes[1:])]
model = nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))
train(model, torch.rand(4, 3, 32, 32), torch.rand(4, 10), lambda parameters: torch.optim.SGD(parameters, 0.01))
""",
        70,
    ),
    "a GRU cell in a loop of 20; Adam": (
        """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.head = nn.GRUCell(32, 64), nn.Linear(64, 10)
    def forward(self, x):
        h = torch.zeros(x.shape[1], 64)
        for t in range(x.shape[0]):
            h = self.cell(x[t], h)
        return self.head(h)
train(Net(), torch.rand(20, 16, 32), torch.rand(16, 10), torch.optim.Adam)
""",
        280,
    ),
    "16 tiny blocks (steps below 1 ms); SGD": (
        """
blocks = [nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(16)]
model = nn.Sequential(*blocks)
train(model, torch.rand(8, 16), torch.rand(8, 16), lambda parameters: torch.optim.SGD(parameters, 0.01))
""",
        1300,
    ),
}
_UNDER_TORCH = """
import sys, torch
del sys.argv[0]
with torch.profiler.profile() as prof:
    exec(compile(open(sys.argv[0]).read(), sys.argv[0], "exec"), {"__name__": "__main__"})
print(prof.key_averages().table(sort_by="self_cpu_time_total", row_limit=20))
"""
_LONG = [*SCRIPTS][::2]  # those that run for a minute, too
LIMITS = {10: 1.25, 60: 1.10}
"""By the seconds of the script alone: short scripts pay for their first passes, which are all recorded."""


def _ways(folder: Path) -> dict[str, list[str]]:
    """The commands before a script, by the tool."""
    under_torch = folder / "under_torch.py"
    under_torch.write_text(_UNDER_TORCH)
    python, out = sys.executable, str(folder / "out")
    ways = {
        "alone": [python],
        "torchprof run": [python, "-m", "torchprof", "run", "-o", f"{out}.json"],
        "torch.profiler": [python, str(under_torch)],
    }
    if (spy := which("py-spy", path=f"{Path(python).parent}{os.pathsep}{os.environ['PATH']}")) is not None:
        ways["py-spy"] = [spy, "record", "-o", f"{out}.svg", "--", python]
    if find_spec("pyinstrument") is not None:
        ways["pyinstrument"] = [python, "-m", "pyinstrument", "-o", f"{out}.txt"]
    if find_spec("scalene") is not None:
        ways["scalene"] = [python, "-m", "scalene", "run", "--cpu-only", "-o", f"{out}.scalene", "---"]
    return ways


def _seconds(command: Sequence[str], script: str, steps: int, most_s: float) -> float:
    before = time.perf_counter()
    try:
        is_checked = "scalene" not in command  # which ends with 1 in any case
        subprocess.run([*command, script, str(steps)], check=is_checked, capture_output=True, timeout=most_s)
    except subprocess.TimeoutExpired:
        return float("inf")
    return time.perf_counter() - before


def _shares(script: Path, steps: int, options: Sequence[str]) -> tuple[list[float], list[float]]:
    """The shares of forward, backward and the optimizer: by the script's stopwatch when it runs alone, since between
    steps and models torchprof reads what it recorded; and in the run."""
    file = script.with_suffix(".json")
    alone = subprocess.run([sys.executable, str(script), str(steps)], check=True, capture_output=True, text=True)
    command = [sys.executable, "-m", "torchprof", "run", *options, "-o", str(file), str(script), str(steps)]
    subprocess.run(command, check=True, capture_output=True)
    run = torchprof.load(file)
    of_phases = run.rows.summed(("layer", "phase"), "cpu_ns", device="cpu")
    backward = sum(ns for (_, phase), ns in of_phases.items() if PHASES[phase] == BACKWARD)
    forward = sum(ns for (layer, phase), ns in of_phases.items() if PHASES[phase] == FORWARD and layer >= 0)
    chains = run.rows.summed("frames", "cpu_ns", layer=OUTSIDE, device="cpu")
    optimizer = sum(ns for chain, ns in chains.items() if _is_step(run.rows.frames[chain]))
    return json.loads(alone.stdout), [
        part / (forward + backward + optimizer) for part in (forward, backward, optimizer)
    ]


def _is_step(frames: Sequence[Frame]) -> bool:
    """Whether this is inside an optimizer's step, which is not zero_grad."""
    return any(frame.name.startswith(OPTIMIZER_STEP) and frame.name.endswith(".step") for frame in frames)


def measure_shares(quick: bool) -> None:
    """How far the shares of a run are from those by a stopwatch, with some of the steps recorded, and with all."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name in _LONG[:1] + [*SCRIPTS][1::2]:
            source, steps_a_second = SCRIPTS[name]
            script = Path(folder) / "script.py"
            script.write_text(_START + _WITH_STOPWATCH + source)
            for options in ((), ("--all",)):
                off = [[], [], []]  # points, by part
                for number in range(1 if quick else 20):
                    say(f"shares, {name} {' '.join(options)}: {number + 1}", again=number > 0)
                    truth, seen = _shares(script, (1 if quick else 3) * steps_a_second, options)
                    for part, pair in zip(off, zip(truth, seen)):
                        part.append(100 * (pair[1] - pair[0]))
                largest = max(abs(points) for part in off for points in part)
                rows.append(
                    [name, " ".join(options) or "some", *(f"{median(part):+.1f}" for part in off), f"{largest:.1f}"]
                )
    headings = ["Script", "Recorded", "Forward", "Backward", "Optimizer", "Largest"]
    show("Shares in a run less those by a stopwatch in the script, in points: medians, and the largest", headings, rows)


def measure(quick: bool) -> None:
    measure_shares(quick)
    with tempfile.TemporaryDirectory() as folder:
        ways = _ways(Path(folder))
        for seconds, rounds in ((1, 1),) if quick else ((10, 1), (60, 1)):
            shown = ways if seconds < 60 else {name: ways[name] for name in ("alone", "torchprof run")}
            rows = []
            for name in SCRIPTS if seconds < 60 else _LONG:
                source, steps_a_second = SCRIPTS[name]
                script = Path(folder) / "script.py"
                script.write_text(_START + source)
                steps = seconds * steps_a_second
                turns: Mapping[str, Callable[[], float]] = {
                    way: partial(_seconds, command, str(script), steps, 4 * seconds) for way, command in shown.items()
                }
                took = take_turns(turns, rounds, f"{name}, {seconds} s")
                ratios = {way: Ratio.of(times, took["alone"]) for way, times in took.items() if way != "alone"}
                limit = LIMITS.get(seconds, 10.0)
                alone = f"{min(took['alone']):.1f} s"
                is_kept = ratios["torchprof run"].verdict(limit)
                rows.append([name, f"{steps:,}", alone, *map(str, ratios.values()), is_kept])
            headings = ["Script", "Steps", "Alone", *(way for way in shown if way != "alone"), "torchprof run"]
            show(f"Whole scripts of some {seconds} s, from start to exit", headings, rows)


if __name__ == "__main__":
    measure(asked_quick(__doc__))
