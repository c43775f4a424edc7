"""What whole scripts take, from start to exit: alone, under ``torchprof run``, and under other profilers.

Each script is a loop of a length that takes some 10 s, or a minute, on its own. Tools that are not installed are left
out: ``pip install py-spy pyinstrument scalene``. A tool that takes four times as long is stopped: its ratio is
infinite.
"""

from __future__ import annotations

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

from benchmarks.ratios import Ratio, asked_quick, show, take_turns

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


def measure(quick: bool) -> None:
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
