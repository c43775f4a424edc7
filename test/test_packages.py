"""Which package may import which: the rule in CONTRIBUTING.md."""

import ast
import functools
import inspect
import pickle
import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from importlib import import_module
from pathlib import Path

import pytest
from build.processes import run_fresh

ROOT = Path(__file__).parent.parent / "torchprof"

# Package: the packages it may import, in addition to itself and to the files that import nothing of ours.
MAY_IMPORT = {
    "run": "",
    "attribute": "run",
    "measure": "run attribute",
    "record": "run attribute measure",
    "traces": "run attribute measure record",
    "profile": "run attribute measure record traces",
    "analyze": "run",
    "ranks": "run analyze",
    "comparison": "run analyze ranks",
    "advise": "run analyze ranks comparison",
    "first_screen": "run analyze ranks comparison advise",
    "reports": "run analyze ranks comparison advise first_screen",
    "integrations": "torchprof types",
    "cli": "torchprof run traces profile analyze ranks comparison advise first_screen reports",
}
WITHOUT_IMPORTS = {"errors", "version"}
IMPORT_TORCH = {"record", "profile", "integrations", "cli"}
# Public names that several files have: the two functions of a command, and what two integrations both must offer.
IN_SEVERAL_FILES = {"add_to", "execute", "get_model_profile", "ProfileCallback"}
MOST_LINES = 480
MOST_FILES = 194


def package_of(module: str) -> str:
    """The second part of a module's name; "torchprof" for the package itself, which has the public names."""
    return module.split(".")[1] if "." in module else module


def name_of(file: Path) -> str:
    parts = ("torchprof", *file.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(file: Path, for_types: bool) -> Iterator[str]:
    """Every module that a file imports, at its top or inside a function. ``for_types``: also under TYPE_CHECKING."""
    waiting: list[ast.AST] = [ast.parse(file.read_text(encoding="utf-8"))]
    while waiting:
        node = waiting.pop()
        if not for_types and isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            waiting += node.orelse
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file} has a relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from names
            if not all(name in FILES for name in names):  # else only files of the package are imported
                yield str(node.module)
        else:
            waiting += ast.iter_child_nodes(node)


FILES = {name_of(file): file for file in sorted(ROOT.rglob("*.py"))}


@functools.cache  # not when the file is imported: every process that runs tests imports it
def imports(for_types: bool = False) -> dict[str, set[str]]:
    return {name: set(imports_of(file, for_types)) for name, file in FILES.items()}


@functools.cache
def ours(for_types: bool = False) -> dict[str, set[str]]:
    return {name: {one for one in found if one in FILES and one != name} for name, found in imports(for_types).items()}


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_a_package_imports_only_what_its_row_allows(package: str) -> None:
    allowed = {package, *MAY_IMPORT[package].split(), *WITHOUT_IMPORTS}
    found = {(name, one) for name in FILES if package_of(name) == package for one in ours()[name]}
    # ``from torchprof.run.run import Run`` imports that file, and of its packages only what they hold themselves.
    assert not [(name, one) for name, one in found if package_of(one) not in allowed and one != "torchprof"]
    if "torchprof" not in allowed:
        assert not [name for name, one in found if one == "torchprof"]


def test_every_package_has_a_row() -> None:
    assert {package_of(name) for name in FILES} == {*MAY_IMPORT, *WITHOUT_IMPORTS, "torchprof", "types", "__main__"}
    assert not {one for name in WITHOUT_IMPORTS for one in ours()[f"torchprof.{name}"]}


def test_benchmarks_and_pictures_import_what_there_is() -> None:
    """Nothing else runs them often enough to notice a file that moved."""
    files = [file for folder in ("benchmarks", "docs", "examples") for file in (ROOT.parent / folder).rglob("*.py")]
    assert len(files) > 20
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] == "torchprof":
                module = import_module(str(node.module))
                for alias in node.names:
                    assert hasattr(module, alias.name) or f"{node.module}.{alias.name}" in FILES, (file, alias.name)


def test_there_are_no_circular_imports() -> None:
    try:
        TopologicalSorter(ours(for_types=True)).prepare()
    except CycleError as circle:
        pytest.fail(" → ".join(circle.args[1]))


def test_the_check_finds_a_circle() -> None:
    with pytest.raises(CycleError):
        TopologicalSorter({"a": {"b"}, "b": {"c"}, "c": {"a"}}).prepare()


def public_names(file: Path) -> Iterator[str]:
    """The classes, functions and constants of a file without a leading underscore."""
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        found: list[str] = []
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            found = [node.name]
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found = [one.id for target in targets for one in ast.walk(target) if isinstance(one, ast.Name)]
        yield from (name for name in found if not name.startswith("_"))


def test_no_two_files_share_a_public_name() -> None:
    files: dict[str, set[str]] = {}
    for module, file in FILES.items():
        for name in public_names(file):
            files.setdefault(name, set()).add(module)
    assert {name: found for name, found in files.items() if len(found) > 1 and name not in IN_SEVERAL_FILES} == {}


def test_there_are_not_too_many_files() -> None:
    assert len(FILES) <= MOST_FILES


def test_no_file_is_too_long() -> None:
    assert [
        name for name, file in FILES.items() if len(file.read_text(encoding="utf-8").splitlines()) > MOST_LINES
    ] == []


def test_only_some_packages_import_torch() -> None:
    knowing = {name for name, found in imports().items() if any(one.split(".")[0] == "torch" for one in found)}
    others = {name for name in knowing if package_of(name) not in IMPORT_TORCH}
    # These import torch only when it is needed: for FLOP formulas of users, and for the model of a trace.
    assert others == {"torchprof.measure.flops.torch_registry", "torchprof.traces.reference"}


def test_only_two_files_import_torchs_profiler() -> None:
    touching = {name for name, found in imports().items() if "torch.autograd.profiler" in found}
    assert touching == {"torchprof.record.session_events", "torchprof.record.session"}


def test_importing_torchprof_does_not_import_torch() -> None:
    code = (
        "import sys, torchprof; torchprof.load, torchprof.Run, torchprof.TorchprofError; print('torch' in sys.modules)"
    )
    assert run_fresh(code) == "False"


def test_the_names_of_torchprof_1_can_be_imported() -> None:
    """After ``import torchprof``, ``torchprof.profile`` has the names of torchprof 1.4.0."""
    assert run_fresh("import torchprof; print(torchprof.profile.Trace._fields)") == "('path', 'leaf', 'module')"
    code = (
        "from torchprof.profile import Profile, Trace, walk_modules; import torchprof, torch;"
        "print(Profile is torchprof.Profile, [one.path for one in walk_modules(torch.nn.Linear(1, 1))])"
    )
    assert run_fresh(code) == "True [('Linear',)]"


def test_tracebacks_show_the_error_under_the_name_that_users_import() -> None:
    import torchprof

    assert repr(torchprof.TorchprofError) == "<class 'torchprof.TorchprofError'>"


@pytest.mark.parametrize("name", ["Profile", "Run"])
def test_tools_find_the_source_and_the_types_of_a_public_class(name: str) -> None:
    """They look into the module that a class names: IPython's ``??``, editors, documentation."""
    import torchprof

    cls = getattr(torchprof, name)
    assert f"class {name}" in inspect.getsource(cls)
    assert pickle.loads(pickle.dumps(cls)) is cls


def test_a_pickled_error_is_loaded_where_torchprof_is_not_imported_yet() -> None:
    import torchprof

    data = pickle.dumps(torchprof.TorchprofError("what went wrong"))
    assert run_fresh(f"import pickle; print(repr(pickle.loads({data!r})))") == "TorchprofError('what went wrong')"


def test_showing_a_saved_run_does_not_import_torch(tmp_path: Path) -> None:
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


def test_the_version_is_the_same_everywhere() -> None:
    version = re.search(r'__version__ = "(.*)"', (ROOT / "version.py").read_text(encoding="utf-8"))
    assert version is not None
    project = ROOT.parent
    assert f"\nversion: {version[1]}\n" in (project / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\n## {version[1]}\n" in (project / "CHANGELOG.md").read_text(encoding="utf-8")
