"""What the first screen says about memory: the place, the cause, the remedy; and whether the remedy lowers the peak.

The scripts are as in ``benchmarks.faults``. With "fixed" a script runs with the remedy. The truth is the maximum of the
running sum of torch's own memory events over the whole script, in a process of its own: the remedy has to lower it by
half of what was said. Scripts whose names begin with "clean" have no fault.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from tabulate import tabulate

from benchmarks.faults.__main__ import KEYS, Seen, by_torchprof, faults, in_folder, mark, ran, screen

_SCRIPTS = Path(__file__).parent / "scripts"
_QUICK = ("hook_keeps_outputs", "temporaries_of_the_optimizer")
_FALSE = 0.03  # a finding of more than this share of the peak in a script without a fault is false
_SAME = 0.01  # of the peak
_LEAST_TRUE = 0.5  # of the bytes that are said

_PEAK = """
import itertools, runpy, sys
import torch
sys.argv = sys.argv[1:]
with torch.profiler.profile(profile_memory=True, acc_events=True) as prof:
    runpy.run_path(sys.argv[0], run_name="__main__")
events = (event for event in prof.profiler.kineto_results.events() if event.name() == "[memory]")
sizes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
print(max(itertools.accumulate(sizes)), file=sys.stderr)
"""


def peak_bytes(folder: Path, *arguments: str) -> int:
    """The peak of a script, by torch's events."""
    return int(ran(folder, "-c", _PEAK, "train.py", *arguments).stderr.split()[-1])


def whole_peak(seen: Seen) -> int:
    """The peak by torchprof, with what was live at the start."""
    return max((memory.bytes_at_peak for memory in seen.memory), default=0)


def _said(seen: Seen) -> dict[str, float]:
    """The share of the peak of each finding with one, by its rule."""
    peak = whole_peak(seen)
    return {each.rule: each.gain_bytes / peak for each in seen.findings if each.gain_bytes and peak}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks memory_faults", description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", help="some of the scripts")
    parser.add_argument("--quick", action="store_true", help="two scripts")
    parser.add_argument("--screens", action="store_true", help="print the first screen of each script")
    options = parser.parse_args(arguments)
    names, rows, wrong, peaks = options.names or (_QUICK if options.quick else ()), [], [], []
    for fault in faults(_SCRIPTS):
        if names and fault.name not in names:
            continue
        with in_folder(fault.path) as folder:
            seen = by_torchprof(folder, options=["--memory"])
            text = screen(seen.text)
            if options.screens:
                print(f"{fault.name}\n{text}", end="\n\n")
            right = [each for each in seen.findings if re.search(fault.remedy, each.remedy) and each.gain_bytes]
            said = right[0].gain_bytes or 0 if right else 0
            before, after = peak_bytes(folder), peak_bytes(folder, "fixed")
            named = {key: mark(is_named) for key, is_named in fault.seen_in(text).items()}
            holds = mark(before - after >= _LEAST_TRUE * said) if right else "–"
            sizes = {"said": said, "whole": whole_peak(seen), "true": before, "fixed": after, "less": before - after}
            megabytes = {name: f"{size / 1e6:.1f}" for name, size in sizes.items()}
            peaks.append((whole_peak(seen), before))
            rows.append({"fault": fault.name, **named, **megabytes, "holds": holds})
    for path in sorted(_SCRIPTS.glob("clean_*.py")):
        if names and path.stem not in names:
            continue
        with in_folder(path) as folder:
            seen = by_torchprof(folder, options=["--memory"])
            wrong += [f"{path.stem}: {rule} {share:.0%}" for rule, share in _said(seen).items() if share > _FALSE]
            peaks.append((whole_peak(seen), peak_bytes(folder)))
            if options.screens:
                print(f"{path.stem}\n{screen(seen.text)}", end="\n\n")
    print(tabulate(rows, headers="keys", tablefmt="github"))
    for key in KEYS:
        print(f"{key}: {sum(row[key] == 'yes' for row in rows)} of {len(rows)}")
    print(f"the remedy lowers the peak by half of what is said, or more: {sum(row['holds'] == 'yes' for row in rows)}")
    equal = sum(abs(ours - true) <= _SAME * true for ours, true in peaks)
    print(
        f"the whole peak is that of torch's events over the whole script, within {_SAME:.0%}: {equal} of {len(peaks)}"
    )
    print(f"findings in scripts without a fault: {', '.join(wrong) or 'none'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
