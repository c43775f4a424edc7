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
from torchprof.record.torch_internals import INTERNALS, Use, optional

SOURCE = Path(torchprof.__file__).parent

# Private names that are not torch's.
PYTHONS = {
    *("_asdict", "_fields", "_field_defaults", "_replace"),  # of named tuples
    *("_ActionsContainer", "_ArgumentGroup", "_SubParsersAction", "_actions", "_option_string_actions"),  # argparse
    *("_args_from_interpreter_flags", "_current_frames", "_exit", "_getframe", "_shutdown"),
    *("_run_code", "_run_exitfuncs", "_run_module_as_main"),
}
_NAME = re.compile(r"_[a-zA-Z]\w+")
OF_PURPOSE = {
    "the modules, tensors and hooks of a module": "_modules _parameters _buffers _forward_hooks _forward_pre_hooks",
    "a module's name in the pages of replaced profilers": "_get_name",
    "what a wrapper wraps, else it is a layer": "_orig_mod _fsdp_wrapped_module _checkpoint_wrapped_module",
    "hooks on all modules and optimizers, else they run in trials, too": (
        "_global_forward_hooks _global_forward_pre_hooks _global_backward_hooks "
        "_global_optimizer_pre_hooks _global_optimizer_post_hooks"
    ),
    "that a layer is quantized, else its parameters count as 0": "_packed_params",
    "that a hook exchanges gradients, else they have no bucket": "_delay_all_reduce_all_params",
    "the class of a module of torch.export.unflatten, else it has torch's class": "_ty",
    "that a module was compiled in place, else it is taken for one that was not": "_compiled_call_impl",
    "the arguments and results of an operator, else a registered formula is not used": "_schema",
    "whether a parameter was written to": "_version",
    "the part of a DTensor on this rank, else the size of the whole is taken": "_local_tensor",
    "a custom op without a dispatcher, else it has no events in torch 2.15": "_opoverload _pyobj_dispatcher",
    "the whole mesh of a job, else the mesh is that of the parameter": "_get_root_mesh",
    "the parameters that FSDP2 gathers, else compiled code of them is unknown": (
        "_get_fsdp_state _fsdp_param_groups _fsdp_param_group _unsharded_param _module_info"
    ),
    "the stages of a schedule": "_stage _stages",
    "the data set of a loop and its options, else another loader is not tried": (
        "_num_yielded _index_sampler _dataset _collate_fn _auto_collation _num_workers _worker_init_fn "
        "_prefetch_factor _persistent_workers _pin_memory _workers _shutdown_workers"
    ),
    "which module a compiled function took, else its layers are unknown": "_dynamo_source",
    "that a forward is never compiled, else source lines are left out": "_torchdynamo_disable",
    "what torch.compile compiles instead, else labels are compiled": "_torchdynamo_inline",
    "the class that a wrapper replaces, else it has its own name": "_torchdynamo_orig_callable",
    "the layers of compiled kernels, else they are unknown": (
        "_compile_fx_inner _fx_graph_cache_key source_code _inductor_triton_kernel_to_post_grad_node_info"
    ),
    "the work of compiled graphs, else it is not counted": "inductor_post_grad_graph_str",
}
"""Private attributes of torch's objects, by their purpose, and what happens without them."""
ATTRIBUTES = frozenset(name for names in OF_PURPOSE.values() for name in names.split())
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
