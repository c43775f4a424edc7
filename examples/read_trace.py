"""Which layer, from a trace that was recorded elsewhere? ``record_trace.py`` wrote trace.json.gz beside this file.

Run it with ``python examples/read_trace.py``, or for your own trace ``python examples/read_trace.py trace.json``. It
also writes a page: report.html.
"""

import sys
from pathlib import Path

from models import LeNet5

import torchprof

OURS = Path(__file__).with_name("trace.json.gz")

trace = Path(sys.argv[1]) if len(sys.argv) > 1 else OURS
run = torchprof.from_trace(trace, with_timeline=True)

print(run.report("headline"))
print()
print(run.report("tree", depth=1))
if run.meta.steps:
    print("\nIts steps:\n")
    print(run.report("steps", depth=0))

if trace == OURS:
    print("\nWith the model at hand, classes and parameters are known, too:\n")
    run = torchprof.from_trace(trace, LeNet5(), with_timeline=True)
    print(run.report("summary"))

run.export("report.html")
print("\nWritten: report.html.")
