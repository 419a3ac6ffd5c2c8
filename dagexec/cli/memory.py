"""What `dagexec inspect --memory` shows: the memory plans of a compiled model."""

from __future__ import annotations

from collections.abc import Mapping

from rich.table import Table

from dagexec.analysis.comparison import random_feeds, require_inputs
from dagexec.analysis.memory import NETS, planned
from dagexec.compiler.compilation import compile_model
from dagexec.core.model import Model
from dagexec.options import CompileOptions
from dagexec.platform.records import dataclass


@dataclass(frozen=True, slots=True)
class MemoryRow:
    """The plan of one net type, in bytes.

    Attributes:
        peak_bytes: size of one replica's arena.
        working_bytes: the part of it that working memory adds to the buffers.
        lower_bound: the maximum number of bytes that may be in use at one time.
        unshared_bytes: the size if neither buffers nor working memory shared bytes.
        own_bytes: bytes of unplanned blobs, outside the arena.
        buffers: number of planned buffers.
        joined: operands that are concatenated or split in place, without a copy.
    """

    net_type: str
    peak_bytes: int
    working_bytes: int
    lower_bound: int
    unshared_bytes: int
    own_bytes: int
    buffers: int
    joined: int


def memory_rows(model: Model, shapes: Mapping[str, tuple[int, ...]]) -> list[MemoryRow]:
    """A row for each net type; the model is compiled without measuring.

    Raises FeedError if the shape of an input is unknown, and what compiling and preparing raise.
    """
    require_inputs(model, dict(shapes))
    compiled = compile_model(model, CompileOptions(tuning_seconds=0, shapes=shapes)).model
    return [_row(compiled, net_type, shapes) for net_type in NETS]


def _row(model: Model, net_type: str, shapes: Mapping[str, tuple[int, ...]]) -> MemoryRow:
    with planned(model, net_type, random_feeds(model, dict(shapes))) as preparation:
        memory = preparation.memory
        assert memory is not None
        return MemoryRow(
            net_type,
            memory.peak_bytes,
            memory.working_bytes,
            memory.lower_bound,
            memory.unshared_bytes + memory.unshared_working_bytes,
            memory.own_bytes,
            len(memory.buffers),
            sum(len(one.inputs_in_place) + len(one.outputs_in_place) for one in preparation.prepared),
        )


def memory_table(rows: list[MemoryRow]) -> Table:
    """A table with a column for each row."""
    table = Table(title="memory of one replica's results, in bytes")
    table.add_column("net type")
    for row in rows:
        table.add_column(row.net_type, justify="right")
    lines = {
        "peak": "peak_bytes",
        "part that is working memory": "working_bytes",
        "lower bound": "lower_bound",
        "without sharing": "unshared_bytes",
        "not planned, outside the peak": "own_bytes",
        "buffers": "buffers",
        "operands joined or split in place": "joined",
    }
    for what, name in lines.items():
        table.add_row(what, *(f"{getattr(row, name):,}" for row in rows))
    return table
