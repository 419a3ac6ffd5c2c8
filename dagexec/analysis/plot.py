"""Plots with matplotlib: times of a comparison, and the DAG of a net colored by chain. Needs `dagexec[plot]`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from dagexec.analysis.comparison import Comparison
from dagexec.errors import DagexecError, OutputError
from dagexec.platform.extras import install_command
from dagexec.platform.files import write_atomically, written_atomically
from dagexec.platform.lazy import LazyModule
from dagexec.scheduler.plan.plan import Plan

if not TYPE_CHECKING:
    nx = LazyModule("networkx")
else:
    import networkx as nx


def plot_comparison(comparison: Comparison, path: Path) -> None:
    """Draw a bar of the median time, with quartiles, for each runtime. Raises DagexecError without matplotlib."""
    figure, [axes] = new_figure(8, 0.5 * len(comparison.rows) + 1.5)
    names = [row.runtime for row in comparison.rows]
    medians = [row.median_ms for row in comparison.rows]
    below = [row.median_ms - row.quartile_1_ms for row in comparison.rows]
    above = [row.quartile_3_ms - row.median_ms for row in comparison.rows]
    axes.barh(names, medians, xerr=[below, above], color="tab:blue", capsize=3)
    for position, row in enumerate(comparison.rows):
        axes.text(0, position, f"  {row.median_ms:.1f} ms, x{row.speed_up:.2f}", va="center", color="white")
    axes.invert_yaxis()
    axes.set_xlabel("ms per run (median and quartiles)")
    axes.set_title(f"{comparison.model}: runtimes side by side")
    save_figure(figure, path)


def draw_graph(plan: Plan, path: Path) -> None:
    """Draw the reduced DAG from top to bottom, with one color per chain. `.dot` needs no matplotlib.

    Raises DagexecError without matplotlib, OutputError if the file cannot be written.
    """
    if path.suffix == ".dot":
        write_atomically(path, to_dot(plan).encode())
        return
    digraph = plan.graph.to_networkx(reduced=True)
    positions = layered_positions(digraph)
    depths = 1 + max((round(-y) for _, y in positions.values()), default=0)
    figure, [axes] = new_figure(10, max(3.0, 0.45 * depths))
    axes.margins(x=0.08, y=1.5 / (depths + 3))
    chain_of = plan.chain_of
    nx.draw_networkx(
        digraph,
        positions,
        ax=axes,
        labels={index: plan.graph.operators[index].type for index in digraph},
        node_color=[chain_of[index] % 20 for index in digraph],
        cmap="tab20",
        vmin=0,
        vmax=19,
        node_size=220,
        font_size=6,
        arrowsize=7,
        width=0.6,
    )
    axes.set_title(f"{plan.graph.name}: {len(plan.graph)} operators in {len(plan.chains)} chains")
    axes.set_axis_off()
    save_figure(figure, path)


def layered_positions(digraph: nx.DiGraph[int]) -> dict[int, tuple[float, float]]:
    """The position of every operator: its depth downwards, and within a layer ordered by its parents' mean position.

    This is one sweep of the barycenter method of Sugiyama, Tagawa and Toda, 1981.
    """
    positions: dict[int, tuple[float, float]] = {}
    for depth, layer in enumerate(nx.topological_generations(digraph)):

        def barycenter(index: int) -> float:
            places = [positions[parent][0] for parent in digraph.predecessors(index)]
            return sum(places) / len(places) if places else 0.0

        ordered = sorted(sorted(layer), key=barycenter)
        for place, index in enumerate(ordered):
            positions[index] = (place - (len(ordered) - 1) / 2, -float(depth))
    return positions


def to_dot(plan: Plan) -> str:
    """The reduced DAG in Graphviz's language, with one color per chain."""
    chain_of = plan.chain_of
    lines = ["digraph net {", "  node [style=filled, colorscheme=set312, shape=box];"]
    for index, definition in enumerate(plan.graph.operators):
        name = (definition.name or ", ".join(definition.output)).replace("\\", "\\\\").replace('"', '\\"')
        lines.append(f'  {index} [label="{definition.type}\\n{name}", fillcolor={chain_of[index] % 12 + 1}];')
    for index, children in enumerate(plan.graph.reduced_children):
        lines.extend(f"  {index} -> {child};" for child in children)
    return "\n".join([*lines, "}", ""])


def new_figure(width: float, height: float, rows: int = 1) -> tuple[Any, list[Any]]:
    """A figure of the given size in inches, and its axes, one below another. Raises DagexecError without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise DagexecError(f"drawing needs matplotlib; install it with: {install_command('plot')}") from None
    figure = Figure(figsize=(width, min(height, 200.0)), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, [figure.add_subplot(rows, 1, row + 1) for row in range(rows)]


def check_picture(path: Path) -> None:
    """Raise DagexecError if no picture can be drawn to `path`, before hours of work that would end with one."""
    figure, _ = new_figure(1, 1)
    kinds = figure.canvas.get_supported_filetypes()
    kind = path.suffix.removeprefix(".").lower()
    if kind and kind not in kinds:
        raise DagexecError(f"{path}: cannot be drawn: expected a name that ends with one of {', '.join(sorted(kinds))}")
    _check_folder(path)


def check_drawing(path: Path) -> None:
    """Like `check_picture`, for `draw_graph`, which needs no matplotlib for `.dot`."""
    if path.suffix == ".dot":
        _check_folder(path)
    else:
        check_picture(path)


def _check_folder(path: Path) -> None:
    if not path.parent.is_dir():
        raise OutputError(f"{path}: cannot be drawn: {path.parent} is not a folder")


def save_figure(figure: Any, path: Path) -> None:
    """Write the picture. Raises OutputError if that fails."""
    with written_atomically(path) as file:
        figure.savefig(file, dpi=120, format=path.suffix.removeprefix(".").lower() or None)
