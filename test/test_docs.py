"""The code on every page of the documentation names what exists: functions, arguments, reports, options, commands.

test_readme.py runs the blocks of README.md and docs/tour.md. The blocks of other pages are parts of programs: they are
compiled, and what they name is looked up.
"""

import ast
import inspect
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from build.nonempty import at_least_one

import torchprof
from torchprof.analyze.report import OPTIONS
from torchprof.cli import parser
from torchprof.reports import known, options_of

ROOT = Path(__file__).parent.parent
PAGES = sorted({*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md")} - {ROOT / "CHANGELOG.md"})
TEXTS = [page.read_text(encoding="utf-8") for page in PAGES]
BLOCK = re.compile(r"^( *)```(\w+)[^\n]*\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"(?:^|\s)torchprof(?= )|python -m torchprof(?= )")
OTHER_REPORTS = {"dot"}  # made by an example on the page
RUNS = {"run", "prof", "profile", "before", "after", "job", "merged"}


def blocks(page: Path, *languages: str) -> Iterator[str]:
    for indent, language, text in BLOCK.findall(page.read_text(encoding="utf-8")):
        if language in languages:
            yield re.sub(f"^{indent}", "", text, flags=re.MULTILINE)


def calls_in(page: Path) -> Iterator[ast.Call]:
    for block in blocks(page, "python"):
        yield from (node for node in ast.walk(ast.parse(block, str(page))) if isinstance(node, ast.Call))


def commands(text: str) -> Iterator[list[str]]:
    """The arguments of each ``torchprof`` command in a block. Lines that end in a backslash go on."""
    for line in text.replace("\\\n", " ").splitlines():
        found = COMMAND.search(line.removeprefix("$ "))
        words = shlex.split(line.removeprefix("$ ")[found.end() :], comments=True) if found else []
        cut = next((at for at, word in enumerate(words) if word in {"|", ">", "&&", ";"}), len(words))
        if words and words[0] != "…":
            yield words[:cut]


def calls_of_torchprof() -> Iterator[tuple[ast.Call, Mapping[str, inspect.Parameter]]]:
    """The calls of functions of torchprof and of methods of a run, on all pages, each with its parameters."""
    for page in PAGES:
        for call in calls_in(page):
            if not isinstance(call.func, ast.Attribute) or not isinstance(call.func.value, ast.Name):
                continue
            if call.func.value.id == "torchprof":
                yield call, inspect.signature(getattr(torchprof, call.func.attr)).parameters
            elif call.func.value.id in RUNS and hasattr(torchprof.Run, call.func.attr):
                yield call, inspect.signature(getattr(torchprof.Run, call.func.attr)).parameters


def test_calls_in_python_blocks_have_arguments_that_exist() -> None:
    for call, parameters in at_least_one(calls_of_torchprof()):
        keywords = {one.arg for one in call.keywords if one.arg is not None}
        takes_any = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
        assert takes_any or keywords <= set(parameters), f"{ast.unparse(call)}: {keywords - set(parameters)}"


def test_reports_that_are_named_exist_and_have_the_options() -> None:
    named = [name for text in TEXTS for name in re.findall(r'(?:run|prof\.run|prof|job)\.report\("([\w-]+)"', text)]
    for name in at_least_one(named):
        assert name in known() or name in OTHER_REPORTS, name
    calls = [
        (call.args[0].value, {one.arg for one in call.keywords})
        for page in PAGES
        for call in calls_in(page)
        if isinstance(call.func, ast.Attribute) and call.func.attr == "report"
        if call.args and isinstance(call.args[0], ast.Constant)
    ]
    for name, options in at_least_one(one for one in calls if one[0] in known() and one[0] not in known("diff")):
        assert options <= set(options_of(name)), name


def test_all_options_of_reports_are_declared_and_used() -> None:
    of_reports = {option for of in ("run", "diff") for name in known(of) for option in options_of(name, of=of)}
    assert of_reports == set(OPTIONS)
    assert all(option.meaning for option in OPTIONS.values())


def test_names_of_torchprof_in_the_text_exist() -> None:
    for name in at_least_one(name for text in TEXTS for name in re.findall(r"`torchprof\.(\w+)[(`]", text)):
        assert hasattr(torchprof, name), name


def test_commands_can_be_parsed(capsys: pytest.CaptureFixture[str]) -> None:
    texts = [block for page in PAGES for block in blocks(page, "sh", "bash", "console", "yaml")]
    for words in at_least_one(words for text in texts for words in commands(text)):
        try:
            parser().parse_args(words)
        except SystemExit as error:
            assert error.code == 0, f"{words}: {capsys.readouterr().err}"


def test_there_are_blocks_and_commands_to_check() -> None:
    """The tests above would pass without any."""
    assert sum(1 for page in PAGES for _ in calls_in(page)) > 100
    found = [words for page in PAGES for block in blocks(page, "sh", "bash", "console") for words in commands(block)]
    assert len(found) > 9 and {"run", "show", "profile", "flops"} <= {words[0] for words in found}


def test_a_wrong_command_is_found() -> None:
    [words] = commands("$ python -m torchprof show run.json \\\n    --depht 1 | head\n")
    assert words == ["show", "run.json", "--depht", "1"]
    with pytest.raises(SystemExit):
        parser().parse_args(words)
