"""The notebooks of the examples run from top to bottom, and show what they say."""

from pathlib import Path

import nbclient
import nbformat
import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


def _read(name: str) -> nbformat.NotebookNode:
    return nbformat.read(EXAMPLES / name, as_version=4)


def _execute(notebook: nbformat.NotebookNode) -> None:
    nbclient.NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(EXAMPLES)}}).execute()


def _outputs(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [output for cell in notebook.cells for output in cell.get("outputs", ())]


@pytest.mark.slow
def test_the_notebook_runs_and_shows_pictures_and_tables() -> None:
    notebook = _read("see_a_net.ipynb")
    assert not _outputs(notebook)  # what is checked in is without them
    _execute(notebook)
    shown = [output["data"]["text/html"] for output in _outputs(notebook)]
    assert ["<svg" in html for html in shown] == [True, True, True, False, False, False]
    titles = ["Model squeezenet", "Executor of squeezenet", "Trace of squeezenet", "Comparison of runtimes"]
    assert all(title in html for title, html in zip(titles, (*shown[:3], shown[4]), strict=True))
    assert "FusedConv" in shown[3]
    assert "async_dag" in shown[5]


def _check_policies(notebook: nbformat.NotebookNode) -> None:
    *tables, plot = [output["data"] for output in _outputs(notebook)]
    graphs, times, sentences = [table["text/html"] for table in tables]
    assert graphs.count("<tr>") == 4  # of the laboratory; the header's has a style
    assert all(name in times for name in ("fft", "squeezenet_towers", "critical_path", "fifo", "heft"))
    assert sentences.count("<tr>") == 2 * 5
    assert all(finding in ("no measurable", "times as") for finding in _findings(sentences))
    assert "<svg" in plot["image/svg+xml"]


def _findings(html: str) -> list[str]:
    rows = html.split("<tr>")[1:]
    return [next((words for words in ("no measurable", "times as") if words in row), row) for row in rows]


def test_the_notebook_of_policies_is_kept_with_its_outputs() -> None:
    _check_policies(_read("policies.ipynb"))


@pytest.mark.slow
def test_the_notebook_of_policies_runs_from_start_to_plot() -> None:
    notebook = _read("policies.ipynb")
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = []
    _execute(notebook)
    _check_policies(notebook)
