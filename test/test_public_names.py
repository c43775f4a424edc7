"""Every class that a user can get from a public call is a public name, with an entry in docs/api.md."""

from __future__ import annotations

import ast
import functools
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import torchprof
from torchprof import types

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
CLASSES = {
    node.name: ".".join(file.relative_to(ROOT).with_suffix("").parts)
    for file in (ROOT / "torchprof").rglob("*.py")
    for node in ast.parse(file.read_text(encoding="utf-8")).body
    if isinstance(node, ast.ClassDef)
} | {"Trace": "torchprof.record.modules"}
"""The classes of all our files, by name; a name stands in one file (test_packages)."""
NOT_FOR_USERS = {"Callback", "ProfileCallback"}
PUBLIC = {name: getattr(torchprof, name) for name in torchprof.__all__ if name not in ("__version__", "types")}
PUBLIC |= {name: getattr(types, name) for name in types.__all__}


def words(annotation: Any) -> set[str]:
    """The names in an annotation, which is a string in our files."""
    return set(re.findall(r"\w+", annotation if isinstance(annotation, str) else repr(annotation)))


def annotations_of(value: Any, *, with_arguments: bool) -> Iterator[Any]:
    """What a function returns and, if wanted, takes; what a property returns."""
    if isinstance(value, property):
        value = value.fget
    elif isinstance(value, functools.cached_property):
        value = value.func
    elif isinstance(value, (classmethod, staticmethod)):
        value = value.__func__
    if inspect.isfunction(value):
        found = inspect.unwrap(value).__annotations__
        yield from (hint for name, hint in found.items() if with_arguments or name == "return")


def reachable_from(value: Any) -> set[str]:
    """The names in the annotations of a function, or of a class with its attributes, properties and methods."""
    if not isinstance(value, type):
        return {word for hint in annotations_of(value, with_arguments=True) for word in words(hint)}
    found: set[str] = set()
    for cls in value.__mro__:
        if not cls.__module__.startswith("torchprof"):
            continue
        members = [*vars(cls).items()]
        for name, member in members:
            if not name.startswith("_") or name in ("__init__", "__iter__", "__getitem__"):
                hints = annotations_of(member, with_arguments=value is torchprof.Profile)
                found |= {word for hint in hints for word in words(hint)}
        attributes = vars(cls).get("__annotations__", {})
        found |= {word for name, hint in attributes.items() if not name.startswith("_") for word in words(hint)}
        found |= {word for base in getattr(cls, "__orig_bases__", ()) for word in words(base)}
    return found


def test_every_class_of_a_public_annotation_is_public() -> None:
    missing = {}
    for name, value in PUBLIC.items():
        ours = reachable_from(value) & CLASSES.keys() - NOT_FOR_USERS
        missing |= {one: f"from {name}" for one in ours if one not in PUBLIC and not one.startswith("_")}
    assert missing == {}


def test_the_walk_finds_what_it_should() -> None:
    """It follows returns, attributes, properties and bases."""
    assert "Diff" in reachable_from(torchprof.compare)
    assert {"Meta", "Layers", "Spread", "RunWarning", "Node", "Op", "Cost"} <= reachable_from(torchprof.Run)
    assert "Held" in reachable_from(types.Memory)
    assert "Layer" in reachable_from(types.Layers)
    assert "Row" in reachable_from(types.Rows)
    assert "Noise" in reachable_from(types.Change)


def test_the_page_has_an_entry_for_every_name_and_no_other() -> None:
    entries = re.findall(r"^::: torchprof\.((?:types\.)?\w+)$", PAGE, re.MULTILINE)
    at_the_top = {*torchprof.__all__} - {"__version__", "types"}
    assert sorted(entries) == sorted(at_the_top | {f"types.{name}" for name in types.__all__})


def test_at_the_top_is_what_one_calls_and_the_values_that_one_passes_on() -> None:
    classes = {name for name in torchprof.__all__ if isinstance(getattr(torchprof, name), type)}
    assert classes == {"BudgetExceeded", "Diff", "Profile", "Run", "TorchprofError"}
    assert all(isinstance(getattr(types, name), type) for name in types.__all__)
    assert not {*torchprof.__all__} & {*types.__all__}


@pytest.mark.parametrize("name", PUBLIC)
def test_a_name_is_that_of_its_file_and_is_described(name: str) -> None:
    value = PUBLIC[name]
    assert name in dir(types if name in types.__all__ else torchprof)
    text = inspect.getdoc(value) or ""
    assert text and not text.startswith(f"{name}("), "the docstring that dataclasses and NamedTuples get by themselves"
    if name in CLASSES:
        assert value is getattr(import_module(CLASSES[name]), name)


@pytest.mark.parametrize("name", [name for name in PUBLIC if name in CLASSES])
def test_attributes_are_described(name: str) -> None:
    cls = PUBLIC[name]
    text = inspect.getdoc(cls) or ""
    attributes = [one for one in vars(cls).get("__annotations__", {}) if re.match("[a-z]", one)]
    assert [one for one in attributes if not re.search(rf"\b{one}\b", text)] == []


def test_names_of_saved_runs_import_no_torch() -> None:
    needs_torch = {"BenchmarkResult", "Latency", "Profile", "Trace", "annotate", "benchmark", "flops"}
    needs_torch |= {"from_profiler", "log_stragglers", "peak", "sampled", "tensorboard_trace_handler"}
    needs_torch |= {"Watch", "watch"}
    code = "import sys, torchprof\nassert 'torchprof.types' not in sys.modules\n"
    for module in (torchprof, types):
        names = sorted({*module.__all__} - needs_torch)
        code += f"for name in {names}: getattr({module.__name__}, name)\n"
    code += "assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_python_suggests_a_near_name() -> None:
    for module, wrong, meant in (("torchprof", "Profil", "Profile"), ("torchprof.types", "Layrs", "Layers")):
        code = f"import torchprof\n{module}.{wrong}"
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.stderr.endswith(
            f"AttributeError: module '{module}' has no attribute '{wrong}'. Did you mean: '{meant}'?\n"
        )
