"""Report: sections of plain data, written into one HTML file with the scripts and the style that draw them.

The page comes without a network: a Content-Security-Policy refuses every request. Data is JSON in an element that no
browser executes, and scripts put it into the page as text, so that names from a model file are never markup.
"""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import field
from hashlib import sha256
from html import escape
from pathlib import Path
from typing import Protocol

from dagexec.analysis.environment import environment
from dagexec.core.drawing.pages import page_file
from dagexec.errors import DagexecError
from dagexec.platform.files import write_atomically
from dagexec.platform.records import dataclass

Json = dict[str, object]

_SCRIPTS = ("svg.js", "details.js")
"""Used by every section's script."""


class Section(Protocol):
    """A part of a report.

    Attributes:
        kind: names the script in `page/` that draws it.
        title: its heading.
    """

    @property
    def kind(self) -> str: ...

    @property
    def title(self) -> str: ...

    def as_json(self) -> Json:
        """The data that the script draws."""
        ...


@dataclass(frozen=True)
class Figure:
    """A number that is seen at a glance: `value` in large letters, below it its `label`, and a `detail`."""

    value: str
    label: str
    detail: str = ""


@dataclass(frozen=True)
class Report:
    """A page.

    Attributes:
        title: the heading.
        lines: of text, the most important first.
        sections: in order.
        figures: large numbers, between the first line and the others.
        foot: what the page was made with.
    """

    title: str
    lines: Sequence[str]
    sections: Sequence[Section]
    figures: Sequence[Figure] = ()
    foot: Mapping[str, object] = field(default_factory=environment)

    def html(self) -> str:
        """The file's text."""
        kinds = dict.fromkeys(section.kind for section in self.sections)
        own = map(_page_file, ("viewport.js", *(f"{kind}.js" for kind in kinds), "page.js"))
        script = "\n".join((*map(page_file, _SCRIPTS), *own))
        style = page_file("page.css")
        parts = {
            "title": escape(self.title),
            "policy": f"default-src 'none'; script-src {_allowed(script)}; style-src {_allowed(style)}",
            "style": style,
            "verdict": "".join(f'<p class="verdict">{escape(line)}</p>' for line in self.lines[:1]),
            "figures": _figures(self.figures),
            "lines": "".join(f"<p>{escape(line)}</p>" for line in self.lines[1:]),
            "foot": "".join(
                f"<dt>{escape(name)}</dt><dd>{escape(_text(value))}</dd>" for name, value in self.foot.items()
            ),
            "sections": "".join(_place(number, section) for number, section in enumerate(self.sections)),
            "data": _embedded([{"kind": section.kind, "data": section.as_json()} for section in self.sections]),
            "script": script,
        }
        page = _page_file("page.html")
        head, *rest = page.split("{{")
        filled = [head]
        for piece in rest:
            name, _, after = piece.partition("}}")
            filled += (parts[name], after)
        return "".join(filled)

    def write(self, path: Path) -> None:
        """Write the file. Raises OutputError if it cannot be written."""
        write_atomically(path, self.html().encode())


def check_report(path: Path) -> None:
    """Raise DagexecError if no report can be written to `path`, before the work that a report would end."""
    if path.suffix.lower() not in (".html", ".htm"):
        raise DagexecError(f"{path}: a report is a page: expected a name that ends with .html")
    if not path.parent.is_dir():
        raise DagexecError(f"{path}: cannot be written: {path.parent} is not a folder")


def _text(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _figures(figures: Sequence[Figure]) -> str:
    if not figures:
        return ""
    parts = (
        f'<div><dt>{escape(figure.label)}</dt><dd class="detail">{escape(figure.detail)}</dd>'
        f'<dd class="value">{escape(figure.value)}</dd></div>'
        for figure in figures
    )
    return f'<dl class="figures">{"".join(parts)}</dl>'


def _place(number: int, section: Section) -> str:
    return (
        f'<section id="{section.kind}" aria-labelledby="heading-{number}"><h2 id="heading-{number}">'
        f"{escape(section.title)}</h2></section>"
    )


def _embedded(data: object) -> str:
    """JSON that cannot end the element which it stands in (HTML Living Standard, 4.12.1.3)."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _allowed(text: str) -> str:
    """The source expression for an inline element of just this text (Content Security Policy Level 3)."""
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"


def _page_file(name: str) -> str:
    return page_file(name, "dagexec.report")
