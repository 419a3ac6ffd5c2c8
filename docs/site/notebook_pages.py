"""The notebooks of examples/ as pages: their cells and the outputs that are kept with them."""

from __future__ import annotations

import html
import json
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).parents[2] / "examples"


def notebook_pages() -> dict[str, str]:
    """A page for each notebook, by path."""
    return {
        f"notebooks/{path.stem}.md": page_of(json.loads(path.read_text())) for path in sorted(EXAMPLES.glob("*.ipynb"))
    }


def page_of(notebook: dict[str, Any]) -> str:
    """A notebook in Markdown, with what its cells show as HTML."""
    return "\n\n".join(part for cell in notebook["cells"] for part in _cell(cell)) + "\n"


def _cell(cell: dict[str, Any]) -> list[str]:
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        return [source.replace("](../docs/", "](../")]
    return [f"```python\n{source}\n```", *map(_output, cell["outputs"])]


def _output(output: dict[str, Any]) -> str:
    """What a browser shows of it, in one line, as Markdown ends a block of HTML at an empty one."""
    data = {kind: "".join(text) for kind, text in output.get("data", {}).items()}
    for kind in ("text/html", "image/svg+xml"):
        if kind in data:
            shown = data[kind][data[kind].index("<") :]
            return f'<div class="output">{" ".join(shown.partition("?>")[2 if "<?xml" in shown else 0].split())}</div>'
    text = data.get("text/plain", "".join(output.get("text", ())))
    return f'<pre class="output">{html.escape(text)}</pre>'
