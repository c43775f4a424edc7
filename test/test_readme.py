"""Every block of these pages runs, and prints tables of the same form as on the page."""

import contextlib
import io
import re
import shlex
from pathlib import Path

import pytest
from build.warm import run_warm, warm_job

ROOT = Path(__file__).parent.parent
PAGES = ("README.md", "docs/tour.md", "docs/shell.md", "docs/inference.md", "docs/ci.md", "docs/coming-from-1.4.0.md")
ALEXNET_LAYERS = 24
BLOCKS = {
    page: re.findall(r"^```(\w+)\n(.*?)^```$", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    for page in PAGES
}


def shape(text: str) -> list[str]:
    """The first column and the headings: they are the same in each run. Shares and times are not."""
    lines = [line for line in text.splitlines() if " | " in line and "---" not in line]
    headings = [cell.strip() for cell in lines[0].split(" | ")] if lines else []
    return headings + [line.split(" | ")[0].rstrip() for line in lines[1:]]


@pytest.fixture
def in_root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """As for a user in a clone: the repository can be imported, and files are written to another folder."""
    monkeypatch.syspath_prepend(str(ROOT))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    return tmp_path


@pytest.mark.parametrize(
    ("page", "count"),
    [
        ("README.md", 1),
        ("docs/tour.md", 11),
        ("docs/shell.md", 1),
        ("docs/inference.md", 3),
        ("docs/ci.md", 0),
        ("docs/coming-from-1.4.0.md", 1),
    ],
)
def test_python_blocks_run_in_order_and_print_what_is_shown(
    page: str, count: int, in_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    space: dict[str, object] = {}
    printed = code = ""
    compared = 0
    for language, block in BLOCKS[page]:
        if language == "python":
            out = io.StringIO()
            with contextlib.redirect_stdout(out):
                exec(compile(block, page, "exec"), space)
            printed, code = out.getvalue(), block
        elif language == "text":
            if "from_trace(" in code:  # the trace is in the repository: its figures never change
                assert printed == block
            elif "print(prof)\n" in code:  # the overview: the largest places depend on the machine, the layers do not
                tables = [text[text.index("\nModule") :] for text in (printed, block)]
                assert shape(tables[0])[: len(shape(tables[1]))] == shape(tables[1])
            elif "with the layers above" in block:
                # Which layers are the largest depends on the machine; the headings and the last line do not.
                assert shape(printed)[:8] == shape(block)[:8]
                hidden, said = printed.rstrip().splitlines()[-1].split(" ", 1)
                assert said == block.rstrip().splitlines()[-1].split(" ", 1)[1]
                assert int(hidden) == ALEXNET_LAYERS - sum("|" in line for line in printed.splitlines()[2:]) + 1
            elif "hidden: shown" in block:  # the rows of a flat table depend on the machine
                headings = len(block.splitlines()[0].split(" | "))
                assert shape(printed)[:headings] == shape(block)[:headings]
                assert len(shape(printed)) == len(shape(block))
            elif "Verdict" in block:  # which differences are shown depends on noise
                assert shape(printed)[:6] == shape(block)[:6]
                names = [
                    [line.split(" | ")[0] for line in text.splitlines() if " | " in line] for text in (printed, block)
                ]
                assert names[0][: len(names[1])] == names[1]
                assert printed.splitlines()[0] == block.splitlines()[0]
            elif "show_events=True" in code:  # which operator comes first depends on where a sample fell
                assert {*shape(block)} <= {*shape(printed)}
            elif block.startswith("Trace("):
                assert printed.splitlines()[0] == block.splitlines()[0]
            else:
                shown = shape(block)
                assert shape(printed)[: len(shown)] == shown
                assert ("..." in block) or shape(printed) == shown
            compared += 1
    assert compared == count


@pytest.mark.jobs
@pytest.mark.parametrize(("page", "count"), [("README.md", 1), ("docs/tour.md", 1), ("docs/shell.md", 5)])
def test_console_blocks_run_and_print_what_is_shown(
    page: str, count: int, in_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    commands = 0
    for language, block in BLOCKS[page]:
        if language != "console":
            continue
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            line, _, shown = part.partition("\n")
            words = shlex.split(line)
            if words[:3] == ["torchrun", "--nproc-per-node", "2"]:
                job = warm_job(in_root, 2, *words[3:])
                code, printed, errors = job.code, "".join(job.out), str(job)
            else:
                assert words[:3] == ["python", "-m", "torchprof"]
                done = run_warm(words[1:], in_root)
                code, printed, errors = done.returncode, done.stdout, done.stderr
            assert code == 0, errors
            if words[3] == "run":
                largest = next(line for line in printed.splitlines() if "% | " in line)
                assert "MASK INDICES" in largest and "numpy_mask.py:27 f" in largest  # the rest may be shortened
                assert (
                    largest.split(" | ")[2:4]
                    == next(line for line in shown.splitlines() if "% | " in line).split(" | ")[2:4]
                )
            elif "trace.json.gz" in line:  # from a trace in the repository: its figures never change
                assert printed == shown
            elif "two_ranks" in line:  # the straggler and its extra work; the rest depends on the machine
                for text in (shown, printed):
                    assert text.startswith("2 ranks. Rank 1 is the straggler: ")
                    assert "It has more work: 3.24 times the FLOPs of the others (median)." in text
                # FLOPs of 16 sentences of 96 words, and of 32: three times as many, and nine times in what compares
                # each word with each. They stand in the last column of a rank, in units of 1000.
                ranks = {line[0]: line for line in printed.splitlines() if re.match(r"[01]  +\| 8 ", line)}
                flops = {rank: float(line.split("|")[-1].split()[0]) for rank, line in ranks.items()}
                assert 3 < flops["1"] / flops["0"] < 9
                headings = [[part for part in text.splitlines() if "---|" in part] for text in (shown, printed)]
                assert [len(part.split("|")) for part in headings[0]] == [9, 12]
                assert [len(part.split("|")) for part in headings[1]] == [9, 12, 10]
            else:
                expected = shape(shown)
                assert shape(printed)[: len(expected)] == expected
            commands += 1
    assert commands == count


def test_the_two_commands_are_in_the_makefile_and_in_ci() -> None:
    shell = next(block for language, block in BLOCKS["README.md"] if language == "sh")
    commands = [line.split("#")[0].split() for line in shell.splitlines()]
    assert commands == [["make", "demo"], ["make", "test"]]
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for _, target in commands:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)
    ci = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert re.search(r"^make .* lint types docs test test-slow$", ci, re.MULTILINE)
    assert "bash .ci/run" in (ROOT / ".circleci" / "config.yml").read_text(encoding="utf-8")


def test_links_in_the_documentation_have_targets() -> None:
    for document in [ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)\)", document.read_text(encoding="utf-8")):
            assert (document.parent / target).exists(), f"{document.name} links to {target}"
