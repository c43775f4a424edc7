"""The examples run, and the pages' blocks of Python do, too."""

import contextlib
import io
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from torchprof import reports
from torchprof.reports import known

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize(
    ("name", "needs", "says"),
    [
        ("operators.py", [], ["aten::", "CPU avg"]),
        ("memory.py", [], ["memory rose by", "The same with the blocks checkpointed:"]),
        ("training_loop.py", [], ["data loading", "optimizer"]),
        ("compare_two_versions.py", [], ["Added: Net.features.1 (BatchNorm2d)", "computes 2 times as much"]),
        ("budget_in_pytest.py", [], ["3 passed"]),
        ("lightning_callback.py", ["lightning"], ["Number of Calls"]),
        ("trainer_callback.py", ["transformers", "accelerate"], ["Number of Calls"]),
    ],
)
def test_an_example_runs(name: str, needs: list[str], says: list[str], tmp_path: Path) -> None:
    missing = [package for package in needs if find_spec(package) is None]
    if missing:
        pytest.skip(f"{missing} not installed")
    result = subprocess.run(
        [sys.executable, str(ROOT / "examples" / name)], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert result.returncode == 0, result.stderr
    for words in says:
        assert words in result.stdout


@pytest.mark.parametrize(
    ("page", "needs"), [("memory.md", []), ("compare.md", []), ("training-loops.md", []), ("exports.md", ["pandas"])]
)
def test_the_blocks_of_a_page_run_in_order(
    page: str, needs: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    missing = [package for package in needs if find_spec(package) is None]
    if missing:
        pytest.skip(f"{missing} not installed")
    monkeypatch.syspath_prepend(str(ROOT))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(reports, "_reports", {of: dict(known(of)) for of in ("run", "diff")})  # a page may add its own
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert blocks
    space: dict[str, object] = {}
    with contextlib.redirect_stdout(io.StringIO()):
        for block in blocks:
            exec(compile(block, page, "exec"), space)
