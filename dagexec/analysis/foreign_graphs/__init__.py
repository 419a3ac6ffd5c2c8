"""Graphs of other systems as files, for the proof of `dagexec check --graph` (docs/hazards.md)."""

from dagexec.analysis.foreign_graphs.fx import export_fx
from dagexec.analysis.foreign_graphs.read import read_graph

__all__ = ["export_fx", "read_graph"]
