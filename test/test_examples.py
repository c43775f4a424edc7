"""The examples run, and so do the Python blocks of the documentation."""

import contextlib
import io
import re
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest
from build.inductor import kernels_of_zeros
from build.warm import run_warm
from build.warnings import sentences

import torchprof
from torchprof.analyze.report import REPORTS
from torchprof.reports import known

ROOT = Path(__file__).parent.parent


def skip_without(needs: list[str]) -> None:
    """Skip a test if some packages or programs are missing."""
    missing = [name for name in needs if find_spec(name) is None and shutil.which(name) is None]
    if missing:
        pytest.skip(f"{missing} not installed")


@pytest.mark.jobs
@pytest.mark.parametrize(
    ("name", "needs", "says"),
    [
        ("operators.py", [], ["aten::", "CPU avg"]),
        ("deepspeed_dropin.py", [], ["step 5", "Number of multiply-adds:        429.25 KMac"]),
        ("memory.py", [], ["above the start", "The same with the blocks checkpointed:"]),
        ("compiled.py", ["g++"], ["(region ", "├── blocks", "Overhead"]),
        ("training_loop.py", [], ["data loading", "optimizer"]),
        ("record_trace.py", [], ["Written: trace.json.gz."]),
        (
            "read_trace.py",
            [],
            ["54% of the time is in the backward", "Params                   61.71 K", "report.html"],
        ),
        ("compare_two_versions.py", [], ["Added: Net.features.1 (BatchNorm2d)", "computes 2 times as much"]),
        ("budget_in_pytest.py", [], ["3 passed"]),
        ("lightning_callback.py", ["lightning"], ["Number of Calls"]),
        ("trainer_callback.py", ["transformers", "accelerate"], ["Number of Calls"]),
    ],
)
def test_each_example_runs(name: str, needs: list[str], says: list[str], tmp_path: Path) -> None:
    skip_without(needs)
    runner = ["-m", "build.inductor"] if name == "compiled.py" else []
    result = run_warm([*runner, str(ROOT / "examples" / name)], tmp_path)
    assert result.returncode == 0, result.stderr
    for words in says:
        assert words in result.stdout


def test_the_example_with_two_ranks_says_how_to_start_it(tmp_path: Path) -> None:
    alone = run_warm([str(ROOT / "examples" / "two_ranks.py")], tmp_path)
    assert alone.returncode == 1 and "torchrun --nproc-per-node 2 examples/two_ranks.py" in alone.stderr


@pytest.mark.jobs
def test_the_trace_of_the_examples_is_what_record_trace_writes(tmp_path: Path) -> None:
    """Compares layers, calls, MACs and FLOPs. Times and bytes depend on the machine."""
    recorded = run_warm([str(ROOT / "examples" / "record_trace.py")], tmp_path)
    assert recorded.returncode == 0, recorded.stderr
    committed = ROOT / "examples" / "trace.json.gz"
    assert committed.stat().st_size < 60_000
    runs = [torchprof.from_trace(trace) for trace in (committed, tmp_path / "trace.json.gz")]
    told = [
        [
            (node.layer.path, phase, node.calls, node.total.macs, node.total.flops)
            for phase in ("forward", "backward")
            for node in run.tree(phase).walk()
        ]
        for run in runs
    ]
    assert told[0] == told[1]
    assert [run.meta.steps for run in runs] == [3, 3]
    assert sentences(runs[0]) == ()
    # 3 steps of 16 images; by hand, LeNet-5 takes 416,520 multiply-accumulates an image.
    assert told[0][0] == (("LeNet5",), "forward", 3, 3 * 16 * 416_520, runs[0].tree("forward").total.flops)


@pytest.mark.parametrize(
    ("page", "needs"),
    [
        ("memory.md", []),
        ("merging.md", []),
        ("compare.md", []),
        ("training-loops.md", []),
        ("traces.md", []),
        ("exports.md", ["pandas"]),
        pytest.param("compile.md", ["g++"], marks=pytest.mark.compiler),
    ],
)
def test_the_python_blocks_of_each_page_run_in_order(
    page: str, needs: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    skip_without(needs)
    monkeypatch.syspath_prepend(str(ROOT))
    monkeypatch.chdir(tmp_path)
    for of in ("run", "diff"):  # a page may add names
        monkeypatch.setitem(REPORTS, of, dict(known(of)))
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert blocks
    space: dict[str, object] = {}
    compiler = kernels_of_zeros() if page == "compile.md" else contextlib.nullcontext()
    with compiler, contextlib.redirect_stdout(io.StringIO()):
        for block in blocks:
            exec(compile(block, page, "exec"), space)
