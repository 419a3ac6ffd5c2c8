"""The notebook of the examples runs from top to bottom, and shows what it says."""

from pathlib import Path

import nbclient
import nbformat
import pytest

NOTEBOOK = Path(__file__).parents[1] / "examples" / "see_a_net.ipynb"


@pytest.mark.slow
def test_the_notebook_runs_and_shows_pictures_and_tables() -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells)  # what is checked in is without them
    nbclient.NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(NOTEBOOK.parent)}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    shown = [output["data"]["text/html"] for output in outputs]
    assert ["<svg" in html for html in shown] == [True, True, True, False, False, False]
    titles = ["Model squeezenet", "Executor of squeezenet", "Trace of squeezenet", "Comparison of runtimes"]
    assert all(title in html for title, html in zip(titles, (*shown[:3], shown[4]), strict=True))
    assert "FusedConv" in shown[3]
    assert "async_dag" in shown[5]
