"""What `dagexec inspect --compiled` shows: the compiled operators, and how they run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from rich.table import Table
from rich.text import Text

from dagexec.analysis.comparison import random_feeds
from dagexec.cli.progress import progress_line
from dagexec.compiler.compilation import compile_model
from dagexec.compiler.compiled import Compiled
from dagexec.core.dtypes import from_numpy
from dagexec.core.graph import build_graph
from dagexec.core.inference import infer_net
from dagexec.core.model import Model
from dagexec.core.runtime import runtime_of
from dagexec.core.schema import TensorType
from dagexec.errors import DagexecError
from dagexec.options import CompileOptions
from dagexec.scheduler.plan.dynamic import dependence


def compiled_without_measuring(model: Model, shapes: Mapping[str, Sequence[int]], device: str) -> Compiled:
    """The model as `compile` makes it for `device`, using rules and known choices.

    Raises what compiling raises, and DeviceError if there is no such device.
    """
    with progress_line(f"Compiling {model.name}") as line:
        options = CompileOptions(tuning_seconds=0, shapes=shapes, device=device, progress=line)
        runtime_of(options.default_device)
        return compile_model(model, options)


def compiled_rows(compiled: Compiled, shapes: Mapping[str, tuple[int, ...]]) -> list[dict[str, object]]:
    """For each operator: type, engine, layout, post-ops, control inputs, outputs, and what a new size means to it."""
    rows: list[dict[str, object]] = []
    for definition, new_size in zip(compiled.model.program.op, for_new_sizes(compiled.model, shapes), strict=True):
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
                "new_size": new_size,
            }
        )
    return rows


def for_new_sizes(model: Model, shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """What a size of inputs' free axes, never seen before, means to each operator; "" where that is not known.

    "kept": it is prepared for all of them; "computed": its results follow from sizes, once for each; "prepared": its
    tensors have other sizes, for which it is prepared once; "prepared in the run": only a run tells its sizes.
    """
    program, parameters = model.program, model.parameters
    graph = build_graph(program, (parameters.keys() | model.inputs.keys()).__contains__)
    if all(info.shape is not None and None not in info.shape for info in model.inputs.values()):
        return [""] * len(graph)
    try:
        sized = [infer_net(graph, input_types(model, shapes, more), parameters).blobs for more in (0, _MORE)]
    except DagexecError:
        return [""] * len(graph)  # it refuses such sizes
    depends = dependence(graph, frozenset(parameters))
    found = []
    for index, definition in enumerate(graph.operators):
        kinds, others = ([one.get(name) for name in (*definition.input, *definition.output)] for one in sized)
        if index in depends.dynamic or None in kinds:
            found.append("prepared in the run")
        elif index in depends.settled:
            found.append("computed")
        else:
            found.append("kept" if kinds == others else "prepared")
    return found


_MORE = 64
"""Elements that free axes have more in the second of two sizes: as many as strides of images divide."""


def input_types(model: Model, shapes: Mapping[str, tuple[int, ...]], more: int = 0) -> dict[str, TensorType]:
    """Types of parameters, and of the inputs whose shape the model or the caller specifies; free axes have `more`."""
    known = {name: info for name, info in model.inputs.items() if name in shapes or info.shape is not None}
    arrays = dict(model.parameters)
    arrays |= random_feeds(Model(model.name, model.net, inputs=known), shapes)
    types = {name: TensorType(tuple(array.shape), from_numpy(array.dtype)) for name, array in arrays.items()}
    for name, info in known.items():
        free = info.shape or (None,) * len(types[name].shape)
        sizes = zip(types[name].shape, free, strict=True)
        types[name] = replace(types[name], shape=tuple(size + more * (stated is None) for size, stated in sizes))
    return types


def compiled_table(rows: Sequence[Mapping[str, object]]) -> Table:
    """A table with a row for each operator."""
    table = Table(title="compiled")
    for column in ("#", "operator", "engine", "order", "post-ops", "new size", "output"):
        table.add_column(column, justify="right" if column == "#" else "left")
    for index, row in enumerate(rows):
        waits = "".join(f"\n  after {name}" for name in _names(row["waits_for"]))
        table.add_row(
            str(index),
            str(row["type"]),
            str(row["engine"]),
            str(row["order"]),
            Text(", ".join(_names(row["post_ops"]))),
            str(row["new_size"]),
            Text(", ".join(_names(row["outputs"])) + waits),
        )
    return table


def _names(found: object) -> list[str]:
    return [str(name) for name in found] if isinstance(found, list) else []


def choices_in_words(compiled: Compiled) -> list[str]:
    """Islands, layout and schedule, a line each."""
    lines = [] if compiled.report is None else compiled.report.lines()
    return [line for line in lines if line.startswith(("islands: ", "layout: ", "schedule: ", "  "))]
