"""Whether remedies gain in a script what their trials have measured.

Each loop of ``trained.py`` runs under ``torchprof run --try``. Then each remedy that was tried is carried out in the
script, whose steps run in turn with those of the script as it is. "Ratio": the time of the changed script as the trial
says it, over its measured time.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torchprof
from benchmarks.ratios import asked_quick, show
from torchprof.profile.in_turn import run_both
from torchprof.profile.script import Script
from torchprof.types import Trial

SCRIPT = str(Path(__file__).with_name("trained.py"))
LOOPS = ("mlp", "gpt", "small layers", "autoencoder", "double", "inference", "texts", "rows", "short passes")
REMEDIES = {
    "optimizer_step_per_tensor": "fused",
    "costly_dropout": "dropout",
    "many_small_operators": "compile",
    "double_precision": "float32",
    "bfloat16_not_used": "bfloat16",
}
LOADERS = {"num_workers=1": "workers", "BatchSampler": "rows", "(…, persistent": "keep"}
"""By a part of what was tried."""
LIMIT = 1.15
SECONDS = 40.0


def measure(quick: bool) -> int:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    rows, missed = [], 0
    for loop in LOOPS[:1] if quick else LOOPS:
        done = [trial for trial in trials(loop, quick) if not trial.why_not]
        tried = {REMEDIES[trial.rule]: trial for trial in done if trial.rule in REMEDIES}
        tried |= {name: trial for trial in done for part, name in LOADERS.items() if part in trial.how}
        for remedy, trial in tried.items():
            result = run_both(Script(SCRIPT, [loop]), Script(SCRIPT, [loop, remedy]), 1.0 if quick else SECONDS)
            gain = result.gain or 0.0
            low, high = result.interval or (gain, gain)
            ratio = max((1 - trial.gain) / (1 - gain), (1 - gain) / (1 - trial.gain))
            is_wrong = trial.has_gained and high < 0
            missed += ratio > LIMIT or is_wrong
            said, in_script = (f"{middle:.0%} ({least:.0%}–{most:.0%})" for middle, least, most in (
                (trial.gain, trial.low, trial.high), (gain, low, high)
            ))  # fmt: skip
            rows.append([loop, remedy, said, in_script, f"{ratio:.2f}", "no gain!" if is_wrong else ""])
    show(
        "The gain of a remedy, as its trial says, and in the script",
        ["Loop", "Remedy", "Trial", "In the script", "Ratio", ""],
        rows,
        f"{len(rows) - missed} of {len(rows)} within a factor of {LIMIT}, and none slower that was said to gain.",
    )
    return 1 if missed > 0.2 * len(rows) and not quick else 0


def trials(loop: str, quick: bool) -> tuple[Trial, ...]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "run.json")
        command = [sys.executable, "-m", "torchprof", "run", "--try", "--try-seconds", "2" if quick else "20"]
        subprocess.run([*command, "-o", str(file), SCRIPT, loop], check=True, stdout=subprocess.DEVNULL)
        return torchprof.load(file).trials


if __name__ == "__main__":
    sys.exit(measure(asked_quick(__doc__)))
