"""The code on every page of the documentation names what exists: functions, arguments, reports, options, commands.

test_readme.py runs the blocks of README.md and docs/tour.md. The blocks of other pages are parts of programs: they are
compiled, and what they name is looked up.
"""

import ast
import inspect
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

import torchprof
from torchprof.cli import parser
from torchprof.reports import known, options_of

ROOT = Path(__file__).parent.parent
PAGES = sorted({*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md")} - {ROOT / "CHANGELOG.md"})
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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_calls_in_python_blocks_have_arguments_that_exist(page: Path) -> None:
    for call in calls_in(page):
        if not isinstance(call.func, ast.Attribute) or not isinstance(call.func.value, ast.Name):
            continue
        name, keywords = call.func.attr, [one.arg for one in call.keywords if one.arg is not None]
        if call.func.value.id == "torchprof":
            parameters = inspect.signature(getattr(torchprof, name)).parameters
        elif call.func.value.id in RUNS and hasattr(torchprof.Run, name):
            parameters = inspect.signature(getattr(torchprof.Run, name)).parameters
        else:
            continue
        takes_any = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
        assert takes_any or set(keywords) <= set(parameters), f"{name}: {set(keywords) - set(parameters)}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_reports_that_are_named_exist_and_have_the_options(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for name in re.findall(r'(?:run|prof\.run|prof|job)\.report\("([\w-]+)"', text):
        assert name in known() or name in OTHER_REPORTS, name
    for call in calls_in(page):
        is_report = isinstance(call.func, ast.Attribute) and call.func.attr == "report" and call.args
        name = getattr(call.args[0], "value", None) if is_report else None
        if name in known() and name not in known("diff"):
            assert {one.arg for one in call.keywords} <= set(options_of(name)), name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_names_of_torchprof_in_the_text_exist(page: Path) -> None:
    for name in re.findall(r"`torchprof\.(\w+)[(`]", page.read_text(encoding="utf-8")):
        assert hasattr(torchprof, name), name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_can_be_parsed(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for block in blocks(page, "sh", "bash", "console", "yaml"):
        for words in commands(block):
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
