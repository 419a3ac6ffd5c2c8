"""The notebooks of the examples are kept with outputs, which are those that they still have."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import nbformat
import pytest

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))


@pytest.fixture(scope="module")
def executing() -> ModuleType:
    spec = importlib.util.spec_from_file_location("execute_notebooks", ROOT / "docs/site/execute_notebooks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _outputs(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [output for cell in notebook.cells for output in cell.get("outputs", ())]


def _form(output: nbformat.NotebookNode) -> object:
    """What does not depend on what was measured: kinds, tags, columns, and titles without their numbers."""
    shown = "".join(map(str, output.data.values()))
    titles = re.findall(r"<(th|strong)>(.*?)</\1>", shown)
    return output.output_type, sorted(output.data), {*re.findall(r"<(\w+)", shown)}, re.sub(r"\d+", "", str(titles))


def _check_see_a_net(notebook: nbformat.NotebookNode) -> None:
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
    assert all("no measurable" in row or "times as" in row for row in sentences.split("<tr>")[1:])
    assert "<svg" in plot["image/svg+xml"]


CHECKS = {"see_a_net": _check_see_a_net, "policies": _check_policies}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_kept_with_outputs_that_name_no_machine_and_no_time(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    CHECKS[path.stem](notebook)
    assert [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"] == list(
        range(1, 1 + sum(cell.cell_type == "code" for cell in notebook.cells))
    )
    assert all(cell.metadata == {} for cell in notebook.cells)
    assert notebook.metadata.language_info == {"name": "python"}
    text = path.read_text()
    assert re.findall(r"/(?:home|root|tmp|work|usr)/| at 0x|20\d\d-\d\d-\d\dT|\.py:\d+", text) == []
    assert len(text) < 150_000


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_kept_outputs_are_those_of_the_code_in_form(path: Path, executing: ModuleType) -> None:
    kept, fresh = nbformat.read(path, as_version=4), executing.executed(path)
    CHECKS[path.stem](fresh)
    assert list(map(_form, _outputs(fresh))) == list(map(_form, _outputs(kept)))
