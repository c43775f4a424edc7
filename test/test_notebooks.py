"""The notebooks run, and what they show is stored in them: tables, and the page."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

FOLDER = Path(__file__).parent.parent / "docs" / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
CELL_TIMEOUT_S = 240


def kinds(notebook: nbformat.NotebookNode) -> list[list[tuple[str, list[str]]]]:
    """What each code cell shows: the kind of each output, and its formats."""
    return [
        [(output.output_type, sorted(output.get("data", {}))) for output in cell.outputs]
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]


def html_in(notebook: nbformat.NotebookNode) -> list[str]:
    return [
        output.data["text/html"]
        for cell in notebook.cells
        if cell.cell_type == "code"
        for output in cell.outputs
        if "text/html" in output.get("data", {})
    ]


def test_there_are_notebooks() -> None:
    assert {path.stem for path in NOTEBOOKS} == {"quickstart", "resnet", "vit", "language_model"}


@pytest.mark.jobs
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_shows_what_is_stored_in_it(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONWARNINGS", "ignore")  # tqdm warns that a notebook could show its bars as widgets
    stored = nbformat.read(path, 4)
    fresh = nbformat.read(path, 4)
    client = NotebookClient(fresh, timeout=CELL_TIMEOUT_S, resources={"metadata": {"path": str(FOLDER)}})
    client.execute()  # raises if a cell raises
    assert kinds(fresh) == kinds(stored), "Run `make notebooks`."
    for notebook in (stored, fresh):
        shown = html_in(notebook)
        assert sum("<table>" in html for html in shown) >= 2
        assert any("<iframe" in html for html in shown)
        assert "stderr" not in {
            output.get("name") for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs
        }
