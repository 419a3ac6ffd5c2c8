"""Small pictures and tables in HTML, for notebooks: without scripts, and the same for any names in a model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from html import escape

from dagexec.core.drawing.layers import layered
from dagexec.core.drawing.modules import Group, module_tree

_ACROSS, _DOWN, _WIDTH, _HEIGHT = 30, 16, 24, 10  # pixels of a place, and of the node on it
_TALLEST = 420
_MOST_ROWS = 30


def hue(number: int) -> int:
    """Degrees on the color wheel, a golden angle apart."""
    return round(number * 137.508) % 360


def net_picture(
    types: Sequence[str], names: Sequence[str], edges: Iterable[tuple[int, int]], chain_of: Sequence[int] | None = None
) -> str:
    """The operators of these types and names from top to bottom; a tooltip names each.

    They are colored by chain where these are given. A net of more than 200 operators is drawn as its modules.
    """
    tree = module_tree(names)
    inside = [list(node.operators()) if isinstance(node, Group) else [node] for node in tree.members]
    place_of = {operator: place for place, operators in enumerate(inside) for operator in operators}
    pairs = {(place_of[parent], place_of[child]) for parent, child in edges}
    lines = sorted({(min(pair), max(pair)) for pair in pairs if pair[0] != pair[1]})
    layout = layered(len(inside), lines)
    left = min((x for x, _ in layout.nodes), default=0.0)
    points = [((x - left) * _ACROSS + _WIDTH / 2 + 2, y * _DOWN + _HEIGHT / 2 + 2) for x, y in layout.nodes]
    width = max((x for x, _ in points), default=0.0) + _WIDTH / 2 + 2
    height = max((y for _, y in points), default=0.0) + _HEIGHT / 2 + 2
    paths = "".join(
        f'<path d="M{points[a][0]:.0f} {points[a][1]:.0f}L{points[b][0]:.0f} {points[b][1]:.0f}"/>' for a, b in lines
    )
    boxes = "".join(
        f'<rect x="{x - _WIDTH / 2:.0f}" y="{y - _HEIGHT / 2:.0f}" width="{_WIDTH}" height="{_HEIGHT}" rx="2" '
        f'fill="{_fill(operators, chain_of)}"><title>{escape(_label(types, names, operators, member))}</title></rect>'
        for (x, y), operators, member in zip(points, inside, tree.members, strict=True)
    )
    shown = min(height, _TALLEST)
    return (
        f'<svg role="img" aria-label="the DAG of the net" width="{width * shown / height:.0f}" height="{shown:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}" stroke="currentColor" stroke-width="0.6" fill="none">'
        f"{paths}{boxes}</svg>"
    )


def _fill(operators: Sequence[int], chain_of: Sequence[int] | None) -> str:
    return "#8888" if chain_of is None or len(operators) > 1 else f"hsl({hue(chain_of[operators[0]])} 55% 60%)"


def _label(types: Sequence[str], names: Sequence[str], operators: Sequence[int], member: int | Group) -> str:
    if isinstance(member, Group):
        return f"{member.name}: {len(operators)} operators"
    return f"{types[member]} {names[member]}"


def lanes_picture(lanes: Sequence[tuple[str, Sequence[tuple[float, float, str, int]]]]) -> str:
    """Lanes with spans of (start, end, name, number for the color), on one scale."""
    end = max((span[1] for _, spans in lanes for span in spans), default=1.0) or 1.0
    width, label, row = 640, 130, 22
    parts = []
    for number, (name, spans) in enumerate(lanes):
        y = number * row
        parts.append(f'<text x="0" y="{y + 14}" font-size="11" fill="currentColor">{escape(name[-20:])}</text>')
        parts += (
            f'<rect x="{label + start / end * (width - label):.2f}" y="{y + 3}" height="{row - 7}" '
            f'width="{max((stop - start) / end * (width - label), 0.3):.2f}" fill="hsl({hue(color)} 55% 60%)">'
            f"<title>{escape(what)}</title></rect>"
            for start, stop, what, color in spans
        )
    height = max(len(lanes), 1) * row
    picture = f'<svg role="img" aria-label="lanes of workers" viewBox="0 0 {width} {height}" width="{width}" '
    return f'{picture}height="{height}">{"".join(parts)}</svg>'


def table(columns: Sequence[str], rows: Sequence[Sequence[object]], show: Callable[[object], str] = str) -> str:
    """A table; if there are very many rows, the first ones and the number of the others."""
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "".join(f"<tr>{_cells(map(show, row))}</tr>" for row in rows[:_MOST_ROWS])
    more = f"<p>and {len(rows) - _MOST_ROWS} more</p>" if len(rows) > _MOST_ROWS else ""
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{more}"


def _cells(texts: Iterable[str]) -> str:
    return "".join(f"<td>{escape(text)}</td>" for text in texts)


def summary(title: str, *parts: str) -> str:
    """A heading, and parts below it. `parts` are HTML already."""
    return f"<div><strong>{escape(title)}</strong>{''.join(f'<div>{part}</div>' for part in parts)}</div>"
