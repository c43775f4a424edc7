"""docs/flops.md names every operator that has a formula and no other, and its example runs."""

from __future__ import annotations

import re
from pathlib import Path

from build.places import ROOT
from build.warm import run_warm

from torchprof.measure.flops.operation import FORMULAS

PAGE = (ROOT / "docs" / "flops.md").read_text(encoding="utf-8")
FENCE = re.compile(r"```.*?```", re.DOTALL)
TABLES = PAGE.partition("## Operator → formula → source")[2].partition("## What differs elsewhere")[0]
NAMED = set(re.findall(r"`([^`]+)`", FENCE.sub("", TABLES)))
# Operators made of others that count, and words of the text that are no operators.
NO_FORMULA = {
    "linear",
    "matmul",
    "einsum",
    "bilinear",
    "tensordot",
    "multi_dot",
    "aten::",
    "add_",
    "alpha",
    "prims::",
    "_foreach_",
    "torch.utils.flop_counter",
}


def test_every_formula_is_on_the_page() -> None:
    assert [name for name in FORMULAS if name not in NAMED and name.removeprefix("_foreach_") not in NAMED] == []


def test_every_name_on_the_page_has_a_formula() -> None:
    assert NAMED - NO_FORMULA - FORMULAS.keys() == set()


def test_the_example_runs(tmp_path: Path) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    use = """
import torchprof
class Net(torch.nn.Module):
    def forward(self, x):
        return scan(x)
with torchprof.Profile(Net(), with_flops=True) as prof:
    prof(torch.rand(3, 5))
print(prof.run.tree().total.flops, prof.run.tree().total.macs, prof.run.tree().total.uncounted)
"""
    (tmp_path / "example.py").write_text(example + use, encoding="utf-8")
    result = run_warm(["example.py"], tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["30", "15", "0"]
