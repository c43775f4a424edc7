"""The time to import torchprof without torch, and whether a saved run can be read without torch."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.ratios import asked_quick, say, show, verdict

LIMIT_S = 0.1

IMPORT = """
import time
start = time.perf_counter()
import torchprof
took = time.perf_counter() - start
"""
LOAD = """
import sys
run = torchprof.load(sys.argv[1])
run.report("tree")
loaded = time.perf_counter() - start
"""
ANSWER = """
import json, sys
print(json.dumps([took, "torch" in sys.modules]))
"""
FIRST = """
import time, torch
model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(3)))
start = time.perf_counter()
import torchprof
with torchprof.Profile(model) as prof:
    model(torch.rand(1, 8))
str(prof)
first = time.perf_counter() - start
start = time.perf_counter()
with torchprof.Profile(model) as prof:
    model(torch.rand(1, 8))
str(prof)
took = first - (time.perf_counter() - start)
import json
print(json.dumps([took, False]))
"""
RECORD = """
import sys, torch, torchprof
model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(100)))
with torchprof.Profile(model) as prof:
    model(torch.rand(1, 8))
prof.run.save(sys.argv[1])
"""


def measure(quick: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        saved = str(Path(folder) / "run.json")
        subprocess.run([sys.executable, "-c", RECORD, saved], check=True, capture_output=True)
        scripts = {
            "import torchprof": IMPORT + ANSWER,
            "and load a run of 100 layers and draw it": IMPORT + LOAD + "took = loaded" + ANSWER,
            "the first Profile and its table, beyond the second": FIRST,
        }
        rows = []
        for name, script in scripts.items():
            found = []
            for number in range(3 if quick else 9):
                say(name, again=number > 0)
                answer = subprocess.run(
                    [sys.executable, "-c", script, saved], check=True, capture_output=True, text=True
                )
                found.append(json.loads(answer.stdout))
            took = statistics.median(seconds for seconds, _ in found)
            with_torch = any(torch for _, torch in found)
            rows.append(
                [
                    name,
                    f"{took * 1e3:.1f} ms",
                    f"{max(seconds for seconds, _ in found) * 1e3:.1f} ms",
                    verdict(took, LIMIT_S) if name == "import torchprof" else "",
                    "MISSED: torch was imported" if with_torch else "met (torch was not imported)",
                ]
            )
    say("")
    show("Importing, in fresh processes (limit in seconds)", ["", "Median", "Slowest", "Limit", "Without torch"], rows)


if __name__ == "__main__":
    measure(asked_quick(__doc__))
