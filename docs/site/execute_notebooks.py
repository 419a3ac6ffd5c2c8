"""Execute the notebooks of examples/ and keep their outputs: make notebooks

What is kept names no folder of this machine and no time of day, so that only what was measured differs.
"""

from __future__ import annotations

import sys
from pathlib import Path

import nbclient
import nbformat

EXAMPLES = Path(__file__).parents[2] / "examples"
_LANGUAGE = {"name": "python"}


def executed(path: Path) -> nbformat.NotebookNode:
    """The notebook with the outputs of this code, and nothing of the process that made them."""
    notebook = nbformat.read(path, as_version=4)
    client = nbclient.NotebookClient(
        notebook, timeout=600, record_timing=False, resources={"metadata": {"path": str(path.parent)}}
    )
    client.execute()
    notebook.metadata.language_info = nbformat.from_dict(_LANGUAGE)
    for cell in notebook.cells:
        cell.metadata = nbformat.from_dict({})
        for output in cell.get("outputs", ()):
            if len(output.get("data", ())) > 1:
                del output.data["text/plain"]  # a repr beside what is shown: it may have addresses, folders and dates
    return notebook


if __name__ == "__main__":
    for path in [Path(name) for name in sys.argv[1:]] or sorted(EXAMPLES.glob("*.ipynb")):
        nbformat.write(executed(path), path)
