"""Questions about a model: runtimes side by side, what-if predictions, precision, controlled schedules."""

from dagexec.analysis.comparison import Comparison, RuntimeResult, compare
from dagexec.analysis.plot import draw_graph, plot_comparison

__all__ = ["Comparison", "RuntimeResult", "compare", "draw_graph", "plot_comparison"]
