"""What `dagexec inspect --compiled` shows: the compiled operators, and how they run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.table import Table
from rich.text import Text

from dagexec.cli.progress import progress_line
from dagexec.compiler.compilation import compile_model
from dagexec.compiler.compiled import Compiled
from dagexec.core.model import Model
from dagexec.core.runtime import runtime_of
from dagexec.options import CompileOptions


def compiled_without_measuring(model: Model, shapes: Mapping[str, Sequence[int]], device: str) -> Compiled:
    """The model as `compile` makes it for `device`, using rules and known choices.

    Raises what compiling raises, and DeviceError if there is no such device.
    """
    with progress_line(f"Compiling {model.name}") as line:
        options = CompileOptions(tuning_seconds=0, shapes=shapes, device=device, progress=line)
        runtime_of(options.default_device)
        return compile_model(model, options)


def compiled_rows(compiled: Compiled) -> list[dict[str, object]]:
    """For each operator: type, engine, layout of its images, post-ops, control inputs and outputs."""
    rows: list[dict[str, object]] = []
    for definition in compiled.model.program.op:
        arguments = definition.arguments()
        order = arguments.string("order", "") or arguments.string("from_order", "")
        target = arguments.string("output_order", "") or arguments.string("to_order", "")
        rows.append(
            {
                "type": definition.type,
                "engine": definition.engine,
                "order": f"{order or 'NCHW'} to {target}" if target else order,
                "post_ops": arguments.strings("post_ops"),
                "waits_for": list(definition.control_input),
                "outputs": list(definition.output),
            }
        )
    return rows


def compiled_table(rows: Sequence[Mapping[str, object]]) -> Table:
    """A table with a row for each operator."""
    table = Table(title="compiled")
    for column in ("#", "operator", "engine", "order", "post-ops", "output"):
        table.add_column(column, justify="right" if column == "#" else "left")
    for index, row in enumerate(rows):
        waits = "".join(f"\n  after {name}" for name in _names(row["waits_for"]))
        table.add_row(
            str(index),
            str(row["type"]),
            str(row["engine"]),
            str(row["order"]),
            Text(", ".join(_names(row["post_ops"]))),
            Text(", ".join(_names(row["outputs"])) + waits),
        )
    return table


def _names(found: object) -> list[str]:
    return [str(name) for name in found] if isinstance(found, list) else []


def choices_in_words(compiled: Compiled) -> list[str]:
    """Islands, layout and schedule, a line each."""
    lines = [] if compiled.report is None else compiled.report.lines()
    return [line for line in lines if line.startswith(("islands: ", "layout: ", "schedule: ", "  "))]
