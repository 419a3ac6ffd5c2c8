"""`dagexec check --graph`: the proof for a graph of another system."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dagexec.analysis.foreign_graphs import read_graph
from dagexec.cli.json_output import print_json
from dagexec.scheduler.hazards.foreign import check_graph

_MAX_SHOWN = 20


def check_foreign(path: Path, as_json: bool) -> bool:
    """Print what the proof of the graph in `path` finds; True if it holds. Raises ModelFormatError, ResourceError."""
    start = time.perf_counter()
    graph = read_graph(path)
    proof = check_graph(graph)
    counts = {
        "operators": proof.operators,
        "streams": proof.chains,
        "dependencies": proof.dependencies,
        "events": proof.events,
        "waits": proof.waits,
        "resources": proof.resources,
        "pairs_checked": proof.pairs_checked,
    }
    if as_json:
        found = [asdict(one) | {"kind": one.kind.name} for one in proof.unordered]
        seconds = time.perf_counter() - start
        print_json({"graph": graph.name} | counts | {"holds": proof.holds, "unordered": found, "seconds": seconds})
        return proof.holds
    table = Table(title=Text(graph.name, "table.title"), show_header=False)
    table.add_column()
    table.add_column(justify="right")
    words = ("operators", "streams and threads of the host", "dependencies", "events recorded", "waits for an event",
             "memories that operators compete for", "pairs of accesses checked")  # fmt: skip
    for what, count in zip(words, counts.values(), strict=True):
        table.add_row(what, f"{count:,}")
    table.add_row("unordered", f"{len(proof.unordered):,}")
    table.add_row("seconds", f"{time.perf_counter() - start:.3f}")
    console = Console()
    console.print(table)
    for one in proof.unordered[:_MAX_SHOWN]:
        console.print(Text(str(one), "red"), soft_wrap=True)
    if len(proof.unordered) > _MAX_SHOWN:
        console.print(f"and {len(proof.unordered) - _MAX_SHOWN:,} more: --json has all", style="red")
    if proof.holds:
        console.print("Proved: every pair is ordered, in any schedule.", style="green")
    return proof.holds
