"""What the first screen says about a fault: the place, the cause, the remedy.

Each script in ``scripts`` has one fault. Its first lines say, as patterns, what a reviewer would accept as the place,
the cause and the remedy. With the argument "fixed" it runs without the fault: its speed then is the truth about the
gain, and nothing should be found in it that is worth a change. Each script is copied to ``train.py``, so that its name
says nothing, and runs under ``torchprof run``. Beside it: the first lines of ``print(prof)`` of a block around its
loop, of ``key_averages().table()``, of cProfile and, where they are installed, of pyinstrument and scalene.

The scripts in ``unforeseen`` were written by someone who had not seen the rules; ``--scripts`` names the folder.

A screen has 24 lines of 100 columns; the other tools get 25.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from tabulate import tabulate

import torchprof
from torchprof.advise import Advice, advise
from torchprof.profile.in_turn import InTurn, run_both
from torchprof.profile.script import Script
from torchprof.types import Memory

_SCRIPTS = Path(__file__).parent / "scripts"
_LINES, _COLUMNS = 24, 100
_OF_OTHERS = 25
_TIMEOUT_S = 180
_SECONDS_IN_TURN = 15.0
_FALSE = 0.03  # a finding of more than this share in a script without a fault is false
_TRUE_OF_THE_MACHINE = ("bfloat16_not_used",)  # of scripts without a fault, too: it was timed
KEYS = ("place", "cause", "remedy")
_QUICK = ("slow_getitem", "attention_by_hand")
_GOALS = {"place": 1.0, "cause": 0.95, "remedy": 0.9}

_TIMED = """
import runpy, sys, time
import torch, torch.utils.data
layer = torch.nn.Linear(2, 2)
adam = torch.optim.Adam(layer.parameters())
layer(torch.rand(2, 2)).sum().backward()  # what the first step of a process loads
adam.step()
begin = time.perf_counter()
runpy.run_path(sys.argv[1], run_name="__main__")
print(time.perf_counter() - begin, file=sys.stderr)
"""
_TABLE = """
import runpy, sys
import torch
with torch.profiler.profile() as prof:
    runpy.run_path(sys.argv[1], run_name="__main__")
print(prof.key_averages().table(sort_by="self_cpu_time_total"))
"""


_BLOCK = """
import ast, sys
import torchprof
body = ast.parse(open(sys.argv[1]).read()).body
last = max(number for number, one in enumerate(body) if isinstance(one, (ast.For, ast.With)))
names = {"__name__": "__main__"}
exec(compile(ast.Module(body[:last], []), "train.py", "exec"), names)
with torchprof.Profile(names["model"]) as prof:
    exec(compile(ast.Module(body[last:], []), "train.py", "exec"), names)
print(prof)
"""


class Fault(NamedTuple):
    """A script, and the patterns of what is wrong in it."""

    path: Path
    place: str
    cause: str
    remedy: str

    @classmethod
    def of(cls, path: Path) -> Fault:
        found = dict(re.findall(r"^# (place|cause|remedy): (.+)$", path.read_text(), re.M))
        return cls(path, *(found[key] for key in KEYS))

    @property
    def name(self) -> str:
        return self.path.stem

    def seen_in(self, text: str) -> dict[str, bool]:
        """Which of place, cause and remedy a text names."""
        plain = " ".join(text.split())
        return {key: re.search(getattr(self, key), plain) is not None for key in KEYS}


class Seen(NamedTuple):
    """What torchprof says about a script: its output, its findings, and the peaks of its memory."""

    text: str
    findings: list[Advice]
    recorded_ns: int
    memory: Sequence[Memory]


def faults(scripts: Path = _SCRIPTS) -> list[Fault]:
    return [Fault.of(path) for path in sorted(scripts.glob("*.py")) if not path.stem.startswith("clean_")]


def screen(text: str, lines: int = _LINES) -> str:
    """What fits on a screen: a long line takes several lines."""
    rows = [line[at : at + _COLUMNS] for line in text.splitlines() for at in range(0, max(len(line), 1), _COLUMNS)]
    return "\n".join(rows[:lines])


def ran(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    environment = {"COLUMNS": str(_COLUMNS), "KINETO_LOG_LEVEL": "99", "PYTHONPATH": str(Path.cwd())}
    return subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=True,
    )


def by_torchprof(folder: Path, *arguments: str, options: Sequence[str] = ()) -> Seen:
    out = ran(folder, "-m", "torchprof", "run", *options, "-o", "run.json", "train.py", *arguments).stdout
    run = torchprof.load(folder / "run.json")
    text = out[out.index("torchprof: train.py ended") :]
    return Seen(text, advise(run), sum(meta.wall_ns for meta in run.metas), run.memory)


def _by_module(module: str, *options: str) -> Callable[[Path], str]:
    return lambda folder: ran(folder, "-m", module, *options, "train.py").stdout


OTHERS: dict[str, Callable[[Path], str]] = {
    "Profile block": lambda folder: ran(folder, "-c", _BLOCK, "train.py").stdout,
    "profiler table": lambda folder: ran(folder, "-c", _TABLE, "train.py").stdout,
    "cProfile": _by_module("cProfile", "-s", "tottime"),
    **({"pyinstrument": _by_module("pyinstrument")} if find_spec("pyinstrument") else {}),
    **({"scalene": _by_module("scalene", "run", "--cli")} if find_spec("scalene") else {}),
}


def seconds(folder: Path, rounds: int) -> tuple[float, float]:
    """The median time of the script with and without its fault, without a profiler."""
    times: dict[str, list[float]] = {"": [], "fixed": []}
    for _ in range(rounds):
        for way, found in times.items():
            found.append(float(ran(folder, "-c", _TIMED, "train.py", *filter(None, [way])).stderr.split()[-1]))
    return statistics.median(times[""]), statistics.median(times["fixed"])


def in_turn(folder: Path) -> InTurn:
    """What ``torchprof try`` says of the script with and without its fault."""
    plain = Script("train.py", folder=str(folder))
    return run_both(plain, replace(plain, args=["fixed"]), _SECONDS_IN_TURN)


def _share(one: Advice, seen: Seen) -> float:
    return (one.gain_ns or 0) / seen.recorded_ns


@contextmanager
def in_folder(script: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        shutil.copy(script, Path(name) / "train.py")
        yield Path(name)


def judged(fault: Fault, folder: Path, rounds: int) -> dict[str, str | float]:
    """A row of the table."""
    seen = by_torchprof(folder)
    named = fault.seen_in(screen(seen.text))
    right = [
        number
        for number, one in enumerate(seen.findings, 1)
        if re.search(fault.cause, one.finding) and re.search(fault.remedy, one.remedy)
    ]
    row: dict[str, str | float] = {"fault": fault.name, **{key: mark(named[key]) for key in KEYS}}
    row["rank"] = right[0] if right else "–"
    row["said"] = f"{_share(seen.findings[right[0] - 1], seen):.0%}" if right else "–"
    tried = [one.trial for one in by_torchprof(folder, options=["--try"]).findings if one.trial is not None]
    row["measured"] = ", ".join(f"{trial.rule} {trial.result}" for trial in tried) or "–"
    plain, fixed = seconds(folder, rounds)
    row["gain"] = f"{1 - fixed / plain:.0%}"
    row["in turn"] = "–" if (gain := in_turn(folder).gain) is None else f"{gain:.0%}"
    clean = by_torchprof(folder, "fixed")
    row["false"] = ", ".join(
        f"{one.rule} {_share(one, clean):.0%}"
        for one in clean.findings
        if _share(one, clean) > _FALSE and one.rule not in _TRUE_OF_THE_MACHINE
    )
    for name, way in OTHERS.items():
        named = fault.seen_in(screen(way(folder), _OF_OTHERS))
        row[name] = "".join(key[0] if named[key] else "·" for key in KEYS)
    return row


def mark(named: bool) -> str:
    return "yes" if named else "no"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks faults", description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", help="some of the scripts")
    parser.add_argument("--quick", action="store_true", help="two scripts")
    parser.add_argument("--rounds", type=int, default=3, help="how often each script is timed")
    parser.add_argument("--scripts", type=Path, default=_SCRIPTS, help="the folder with the scripts")
    parser.add_argument("--screens", action="store_true", help="print the first screen of each script")
    options = parser.parse_args(arguments)
    names = options.names or (_QUICK if options.quick else [fault.name for fault in faults(options.scripts)])
    rows = []
    for fault in faults(options.scripts):
        if fault.name not in names:
            continue
        with in_folder(fault.path) as folder:
            rows.append(judged(fault, folder, 1 if options.quick else options.rounds))
            print(f"{fault.name}: {rows[-1]}", file=sys.stderr)
            if options.screens:
                print(screen(by_torchprof(folder).text), end="\n\n")
    print(tabulate(rows, headers="keys", tablefmt="github"))
    missed = False
    for key in KEYS:
        share = sum(row[key] == "yes" for row in rows) / len(rows)
        missed |= share < _GOALS[key]
        print(f"{key}: {share:.0%} (goal {_GOALS[key]:.0%})")
    for name in OTHERS:
        print(f"{name}: " + ", ".join(f"{key} {sum(key[0] in str(row[name]) for row in rows)}" for key in KEYS))
    wrong = sum(bool(row["false"]) for row in rows)
    print(f"scripts without a fault in which something above {_FALSE:.0%} is found: {wrong} of {len(rows)} (goal 0)")
    return 1 if (missed or wrong) and not options.quick else 0


if __name__ == "__main__":
    sys.exit(main())
