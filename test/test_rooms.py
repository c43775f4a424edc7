"""Which file may import which: the picture in CONTRIBUTING.md, held."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "torchprof"

# Room → the rooms of torchprof it may import. What is not here may import nothing of ours.
ALLOWED = {
    "__init__": {
        "annotation",
        "budget",
        "diff",
        "errors",
        "latency",
        "merging",
        "peaks",
        "profile",
        "run",
        "run_file",
        "shapes",
        "tensorboard",
        "trace",
        "version",
    },
    "__main__": {"cli"},
    "advice": {"advice.evidence", "cost", "run"},
    "advice.communication": {"advice", "advice.evidence", "attribute", "collectives", "cost", "device_times", "run"},
    "advice.evidence": {"attribute", "run"},
    "advice.fusion": {"advice", "advice.evidence", "advice.python", "attribute", "cost", "run"},
    "advice.gradients": {"advice", "advice.evidence", "advice.host", "attribute", "cost", "run"},
    "advice.host": {"advice", "advice.evidence", "attribute", "cost", "run"},
    "advice.layout": {"advice", "advice.evidence", "attribute", "cost"},
    "advice.loading": {"advice", "advice.evidence", "advice.host", "advice.python", "attribute", "cost"},
    "advice.memory": {"advice", "advice.evidence", "attribute", "cost"},
    "advice.modes": {"advice", "advice.evidence", "attribute", "cost", "run"},
    "advice.optimizer": {"advice", "advice.evidence", "attribute", "cost", "run"},
    "advice.precision": {"advice", "advice.evidence", "advice.fusion", "attribute", "cost"},
    "advice.python": {"advice", "advice.evidence", "advice.host", "attribute", "cost", "run"},
    "advice.recording": {"advice", "advice.evidence", "attribute", "cost"},
    "allocations": {"attribute", "run"},
    "annotation": {
        "assemble",
        "collect",
        "compiled_code",
        "environment",
        "errors",
        "held",
        "holding",
        "instrument",
        "job",
        "modules",
        "run",
        "sigterm",
    },
    "assemble": {
        "allocations",
        "at_rest",
        "attribute",
        "caveats",
        "compiled",
        "cost",
        "cpu_time",
        "device_times",
        "doubts",
        "estimate",
        "event_names",
        "exchanges",
        "fold",
        "holding",
        "lockstep",
        "run",
        "spans",
        "steps",
    },
    "at_rest": set(),
    "attribute": {"compiled", "exchanges"},
    "budget": {"attribute", "cost", "diff", "errors", "figures", "matching", "noise", "paths", "run", "uncounted"},
    "call_order": set(),
    "caveats": {"doubts", "run", "uncounted"},
    "cpu_time": set(),
    "cli": {
        "",
        "advice",
        "budget",
        "encoding",
        "errors",
        "program",
        "reports",
        "reports.advice",
        "reports.tree",
        "run_file",
        "script",
        "trace",
    },
    "collect": {"attribute", "collectives", "cpu_time", "errors", "event_names", "exchanges", "launches"},
    "collectives": {"attribute", "exchanges"},
    "compared_ranks": {"attribute", "run"},
    "cost": set(),
    "diff": {"attribute", "cost", "errors", "figures", "matching", "noise", "reports", "run", "run_file"},
    "dataframe": {"errors", "records", "run"},
    "device_times": {"attribute", "run"},
    "doubts": {"compiled", "attribute", "cost", "regions", "run", "varying"},
    "encoding": set(),
    "environment": {"job", "peaks", "run", "version"},
    "errors": set(),
    "event_names": {"attribute", "compiled"},
    "estimate": {"attribute", "compiled", "device_times", "formulas", "no_arithmetic", "registered"},
    "exchanges": set(),
    "fold": {"attribute", "collectives", "cost", "run"},
    "figures": {"attribute", "cost", "regions", "run"},
    "formulas": {"attribute"},
    "forwards": {"collect"},
    "groups": {"run"},
    "garbage": {"collect", "event_names"},
    "gathering": {"errors", "merging", "run", "run_file", "sigterm"},
    "held": {"holding"},
    "holding": {"attribute", "event_names"},
    "imbalance": {"attribute", "compared_ranks", "run", "slow_ranks"},
    "instrument": {"attribute", "collect", "compiled_code", "event_names", "forwards", "garbage"},
    "integrations": set(),
    "integrations.convention": {""},
    "integrations.deepspeed": {"", "encoding", "integrations.convention", "integrations.flops_profiler"},
    "integrations.flops_profiler": {"", "encoding", "integrations.convention"},
    "integrations.lightning": {"", "integrations.loop"},
    "integrations.loop": {""},
    "integrations.transformers": {"", "integrations.loop"},
    "job": {"groups", "run"},
    "latency": {"cost", "doubts", "errors", "reports.tree"},
    "launches": set(),
    "lockstep": {"attribute", "collectives", "device_times", "event_names", "exchanges", "run"},
    "matching": {"run"},
    "merging": {"at_rest", "caveats", "errors", "fold", "run"},
    "modules": {
        "attribute",
        "call_order",
        "compiled",
        "compiled_code",
        "errors",
        "exchanges",
        "instrument",
        "paths",
        "run",
        "trace_matching",
    },
    "no_arithmetic": set(),
    "noise": set(),
    "operators": {"attribute", "cost", "errors", "paths", "run"},
    "outermost": {"forwards"},
    "paths": {"errors"},
    "peaks": {"errors", "run"},
    "profile": {
        "assemble",
        "attribute",
        "collect",
        "compiled",
        "compiled_code",
        "doubts",
        "encoding",
        "environment",
        "errors",
        "fold",
        "gathering",
        "held",
        "holding",
        "instrument",
        "job",
        "modules",
        "provenance",
        "run",
        "sigterm",
    },
    "program": {
        "assemble",
        "collect",
        "compiled_code",
        "cost",
        "doubts",
        "environment",
        "errors",
        "fold",
        "held",
        "holding",
        "instrument",
        "job",
        "modules",
        "outermost",
        "provenance",
        "run",
        "sampling",
        "sigterm",
    },
    "records": {"attribute", "cost", "errors", "figures", "merging", "run"},
    "registered": {"attribute", "formulas"},
    "reports": {"errors"},
    "reports.advice": {"advice", "advice.evidence", "cost", "reports", "reports.tree", "run"},
    "reports.between": {"attribute", "cost", "doubts", "reports", "reports.top", "reports.tree", "run"},
    "reports.chrome_trace": {"attribute", "cost", "errors", "reports", "run"},
    "reports.compare": {"attribute", "cost", "diff", "errors", "matching", "reports", "reports.tree"},
    "reports.compare_json": {"diff", "reports", "reports.compare"},
    "reports.compare_markdown": {"diff", "reports", "reports.compare", "reports.markdown"},
    "reports.calls": {"attribute", "cost", "reports", "reports.tree", "run"},
    "reports.headline": {"attribute", "doubts", "reports", "reports.ranking", "reports.top", "reports.tree", "run"},
    "reports.device": {"cost", "doubts", "errors", "reports", "reports.tree", "run"},
    "reports.collectives": {
        "attribute",
        "collectives",
        "cost",
        "device_times",
        "doubts",
        "event_names",
        "reports",
        "reports.kernels",
        "reports.tree",
        "run",
    },
    "reports.csv": {"records", "reports", "run"},
    "reports.folded": {"attribute", "records", "reports", "reports.tree", "run", "stacks"},
    "reports.compare_html": {
        "attribute",
        "cost",
        "diff",
        "matching",
        "reports",
        "reports.compare",
        "reports.html",
        "reports.page_data",
        "run",
    },
    "reports.html": {
        "advice",
        "advice.evidence",
        "cost",
        "errors",
        "reports",
        "reports.advice",
        "reports.page_data",
        "reports.tree",
        "run",
        "version",
    },
    "reports.page_cells": {"attribute", "cost", "figures", "reports.tree", "run"},
    "reports.page_data": {
        "attribute",
        "cost",
        "doubts",
        "imbalance",
        "merging",
        "operators",
        "reports.page_cells",
        "reports.ranks",
        "reports.tree",
        "run",
        "varying",
    },
    "reports.json": {"reports", "run", "run_file"},
    "reports.summary": {"attribute", "cost", "doubts", "figures", "reports", "reports.tree", "run", "varying"},
    "reports.kernels": {"attribute", "cost", "operators", "reports", "reports.ranking", "run"},
    "reports.layers": {"cost", "errors", "operators", "reports", "reports.ranking", "run"},
    "reports.markdown": {"cost", "reports", "reports.tree", "run"},
    "reports.memory": {"attribute", "cost", "doubts", "errors", "figures", "reports", "reports.tree", "run", "varying"},
    "reports.notebook": {"errors", "reports", "reports.tree", "run"},
    "reports.ops": {"attribute", "cost", "doubts", "operators", "reports", "reports.ranking", "reports.tree", "run"},
    "reports.ranking": {"attribute", "cost", "doubts", "figures", "operators", "reports.tree", "run"},
    "reports.hangs": {"attribute", "cost", "reports.tree", "run"},
    "reports.ranks": {
        "attribute",
        "compared_ranks",
        "cost",
        "doubts",
        "imbalance",
        "reports",
        "reports.hangs",
        "reports.tree",
        "run",
        "slow_ranks",
        "stragglers",
    },
    "reports.speedscope": {"attribute", "cost", "errors", "records", "reports", "run", "stacks", "version"},
    "reports.steps": {"attribute", "cost", "doubts", "errors", "reports", "reports.tree", "run"},
    "reports.top": {"attribute", "cost", "doubts", "event_names", "reports", "reports.kernels", "reports.tree", "run"},
    "reports.tree": {"attribute", "compiled", "cost", "doubts", "errors", "figures", "regions", "reports", "run"},
    "run": {
        "attribute",
        "compiled",
        "cost",
        "dataframe",
        "errors",
        "merging",
        "reports",
        "reports.notebook",
        "run_file",
    },
    "run_file": {"attribute", "errors", "event_names", "exchanges", "run"},
    "sampling": {"errors"},
    "script": set(),
    "shapes": {"errors", "modules", "profile", "run"},
    "sigterm": set(),
    "slow_ranks": {"attribute", "compared_ranks", "run", "stragglers"},
    "spans": {"attribute", "run"},
    "stacks": {"attribute", "cost", "errors", "run"},
    "steps": {"attribute", "run"},
    "stragglers": set(),
    "tensorboard": {"errors"},
    "trace": {
        "assemble",
        "at_rest",
        "attribute",
        "doubts",
        "errors",
        "exchanges",
        "fold",
        "groups",
        "merging",
        "modules",
        "run",
        "run_file",
        "trace_events",
        "trace_file",
        "trace_layers",
        "trace_matching",
        "version",
    },
    "trace_columns": set(),
    "trace_events": {
        "attribute",
        "collectives",
        "event_names",
        "exchanges",
        "launches",
        "trace_columns",
        "trace_layers",
    },
    "trace_file": {"errors"},
    "trace_layers": {"attribute", "doubts", "event_names", "run"},
    "trace_matching": {"attribute", "doubts", "errors", "run", "trace_layers"},
    "compiled": set(),
    "compiled_code": {"run"},
    "provenance": {"attribute", "collect", "compiled", "errors"},
    "regions": {"attribute", "compiled", "cost", "run"},
    "reports.compiled": {"attribute", "cost", "doubts", "regions", "reports", "reports.tree", "run"},
    "varying": {"attribute", "run"},
    "uncounted": {"attribute", "compiled", "doubts", "run"},
    "version": set(),
}
KNOWS_TORCH = {
    "annotation",
    "collect",
    "compiled_code",
    "environment",
    "forwards",
    "gathering",
    "held",
    "instrument",
    "integrations.deepspeed",
    "integrations.flops_profiler",
    "integrations.lightning",
    "integrations.loop",
    "integrations.transformers",
    "job",
    "latency",
    "modules",
    "outermost",
    "peaks",
    "profile",
    "program",
    "provenance",
    "registered",
    "shapes",
    "trace",
}
TOUCHES_THE_PROFILER = {"collect"}


def room_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def imports_of(path: Path) -> set[str]:
    """Every module that a file imports, at its top or inside a function, except under TYPE_CHECKING."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        for name, value in ast.iter_fields(node):
            if isinstance(value, list):
                kept = [
                    one for one in value if not (isinstance(one, ast.If) and ast.unparse(one.test) == "TYPE_CHECKING")
                ]
                setattr(node, name, kept)
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            found.add(node.module or "")
            if node.module in ("torch.autograd", "torch"):
                found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


FILES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=room_of)
def test_a_room_imports_only_what_the_picture_allows(path: Path) -> None:
    ours = {
        name.removeprefix("torchprof").removeprefix(".")
        for name in imports_of(path)
        if name.split(".")[0] == "torchprof"
    }
    assert ours <= ALLOWED[room_of(path)]


@pytest.mark.parametrize("path", FILES, ids=room_of)
def test_only_the_left_half_knows_torch(path: Path) -> None:
    if room_of(path) not in KNOWS_TORCH | {"cli"}:
        assert not {name for name in imports_of(path) if name.split(".")[0] == "torch"}


@pytest.mark.parametrize("path", FILES, ids=room_of)
def test_only_collect_touches_the_profiler(path: Path) -> None:
    if room_of(path) not in TOUCHES_THE_PROFILER:
        assert "torch.autograd.profiler" not in imports_of(path)


def test_every_room_is_in_the_picture() -> None:
    assert {room_of(path) for path in FILES} == set(ALLOWED)


def run_fresh(code: str) -> str:
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=300)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_importing_torchprof_imports_no_torch() -> None:
    code = (
        "import sys, torchprof; torchprof.load, torchprof.Run, torchprof.TorchprofError; print('torch' in sys.modules)"
    )
    assert run_fresh(code) == "False"


def test_the_profile_room_is_an_attribute_of_the_package() -> None:
    assert run_fresh("import torchprof; print(torchprof.profile.Trace._fields)") == "('path', 'leaf', 'module')"


def test_showing_a_saved_run_imports_no_torch(tmp_path: Path) -> None:
    import torch

    import torchprof

    model = torch.nn.Linear(2, 2)
    with torchprof.Profile(model) as prof:
        model(torch.rand(1, 2))
    prof.run.save(tmp_path / "run.json")
    code = (
        "import sys\n"
        "from torchprof.cli import main\n"
        f"assert main(['show', {str(tmp_path / 'run.json')!r}]) == 0\n"
        "print('torch' in sys.modules)"
    )
    lines = run_fresh(code).splitlines()
    assert any(line.split(" | ")[1:] == ["Self CPU total", "CPU total", "Number of Calls"] for line in lines)
    assert lines[-1] == "False"
