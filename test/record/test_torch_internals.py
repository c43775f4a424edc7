"""What torchprof uses of torch that is not public: all of it is listed, is there, and can be missing."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest
import torch
from build.libraries import RELEASE
from build.warm import run_warm

import torchprof
from torchprof.record.torch_internals import ATTRIBUTES, INTERNALS, Use, optional

SOURCE = Path(torchprof.__file__).parent

# Private names that are not torch's.
PYTHONS = {
    *("_asdict", "_fields", "_field_defaults", "_replace"),  # of named tuples
    *("_ActionsContainer", "_ArgumentGroup", "_SubParsersAction", "_actions", "_option_string_actions"),  # argparse
    *("_args_from_interpreter_flags", "_current_frames", "_exit", "_getframe", "_shutdown"),
    *("_run_code", "_run_exitfuncs", "_run_module_as_main"),
}
_NAME = re.compile(r"_[a-zA-Z]\w+")
# Names in texts, and those of operators.
NOT_ATTRIBUTES = {"_ns", "_torchdynamo", "_is_torchprofs", "_NoopSaveInputs"}


def trees() -> dict[Path, ast.Module]:
    return {file: ast.parse(file.read_text(encoding="utf-8")) for file in sorted(SOURCE.rglob("*.py"))}


def own_names(parsed: dict[Path, ast.Module]) -> set[str]:
    """The names that torchprof's own source defines."""
    found = set()
    for tree in parsed.values():
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                found.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls", "instance"):
                    found.add(node.attr)
            elif isinstance(node, ast.alias):
                found.add(node.asname or node.name)
            elif isinstance(node, ast.arg):
                found.add(node.arg)
    return found


def foreign_names(parsed: dict[Path, ast.Module]) -> dict[str, str]:
    """Private names that are read of objects, or asked for with getattr and hasattr: name → where."""
    own = own_names(parsed)
    found: dict[str, str] = {}
    for file, tree in parsed.items():
        for node in ast.walk(tree):
            names: list[str] = []
            if isinstance(node, ast.Attribute):
                names = [node.attr]
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                if node.func.id in ("getattr", "hasattr", "setattr"):
                    names = [arg.value for arg in node.args if isinstance(arg, ast.Constant) and type(arg.value) is str]
            elif isinstance(node, ast.ImportFrom):
                module = (node.module or "").split(".")
                if module[0] == "torch":
                    names = [*module, *(alias.name for alias in node.names)]
                    found.update({name: str(file) for name in names if _NAME.fullmatch(name)})
                    continue
            for name in names:
                if _NAME.fullmatch(name) and name not in own | PYTHONS | NOT_ATTRIBUTES:
                    found[name] = f"{file.relative_to(SOURCE)}:{node.lineno}"
    return found


def test_everything_private_of_torch_is_listed() -> None:
    listed = {part for name in INTERNALS for part in name.split(".")} | ATTRIBUTES
    found = foreign_names(trees())
    assert {name: where for name, where in found.items() if name not in listed} == {}


def test_nothing_is_listed_that_is_not_used() -> None:
    """By its last name in the source, outside of the list itself, which ends before ``optional``."""
    used_there = (SOURCE / "record" / "torch_internals.py").read_text(encoding="utf-8").partition("def optional")[2]
    source = CALLS + used_there
    names = {*ATTRIBUTES, *(name.rpartition(".")[2] for name in INTERNALS)}
    assert [name for name in sorted(names) if not re.search(rf"\b{name}\b", source)] == []


def is_in_range(use: Use) -> bool:
    first, last = (tuple(map(int, version.split("."))) for version in (use.since, use.until))
    return first <= RELEASE <= last


@pytest.mark.parametrize("name", INTERNALS)
def test_what_is_listed_for_this_version_is_there(name: str) -> None:
    if is_in_range(INTERNALS[name]):
        assert optional(name) is not None


TAKE_AWAY = """
import json, os, sys
import torch
import torch._dynamo  # ``flops`` has torch import it: once for all parts

def figures(run):
    return {
        node.layer.name: [node.calls, node.self.macs, node.self.cpu_ns > 0, node.self.cpu_allocated]
        for node in run.tree().walk()
    }

def step_without(name):
    import torchprof.record.torch_internals as internals

    real = internals.optional
    internals.optional = lambda asked, default=None: default if asked == name else real(asked, default)
    import torchprof

    try:
        from torchprof.profile.program import Program
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        x = torch.rand(3, 4)
        with torchprof.Profile(model, profile_memory=True, with_flops=True) as prof:
            model(x).sum().backward()
        with Program() as program:
            model(x).sum().backward()
        counted = torchprof.flops(model, x)
        return [figures(prof.run), figures(program.run), figures(counted), prof.run.report("tree") != ""]
    except torchprof.TorchprofError as error:
        return str(error)

for name in json.loads(sys.argv[1]):
    if not os.fork():
        print(json.dumps([name, step_without(name)]), flush=True)
        os._exit(0)
    assert os.wait()[1] == 0, name
"""
CALLS = "\n".join(file.read_text(encoding="utf-8") for file in SOURCE.rglob("*.py") if file.stem != "torch_internals")
LOOKED_UP = [name for name in INTERNALS if f'"{name}"' in CALLS or "profiler.profile._" in name]


def test_without_a_part_the_other_figures_are_the_same(tmp_path: Path) -> None:
    """In a training step, each in a process of its own. Or nothing is recorded, and the error names the part."""
    script = tmp_path / "take_away.py"
    script.write_text(TAKE_AWAY, encoding="utf-8")
    result = run_warm([str(script), json.dumps(["nothing", *LOOKED_UP])], tmp_path)
    assert result.returncode == 0, result.stderr
    found = dict(json.loads(line) for line in result.stdout.splitlines() if line.startswith('["'))
    assert list(found) == ["nothing", *LOOKED_UP]
    complete = found.pop("nothing")
    assert not isinstance(complete, str)
    for name, figures in found.items():
        if isinstance(figures, str):
            assert name in figures and torch.__version__ in figures
            assert not INTERNALS[name].without, name
        else:
            assert INTERNALS[name].without, name
            assert figures == complete, name
