"""`dagexec compare --dtype`: the accuracy lost and speed gained with fewer bits, as a table."""

from __future__ import annotations

from typing import Annotated

import typer
from rich import box
from rich.table import Table
from rich.text import Text

from dagexec.analysis.precision_report import PrecisionReport
from dagexec.compiler.passes.quantization import LayerError

DtypeOption = Annotated[
    str | None,
    typer.Option(
        "--dtype",
        metavar="bfloat16|int8",
        help="Compare errors and times of this precision with float32. int8 is calibrated on --samples inputs.",
    ),
]
SamplesOption = Annotated[
    int, typer.Option("--samples", min=1, help="With --dtype: number of random inputs, and of calibration inputs.")
]
LayersOption = Annotated[
    bool, typer.Option("--layers", help="With --dtype: the error if only this layer has fewer bits, for each layer.")
]


def precision_table(report: PrecisionReport) -> Table:
    """A table with a row for each output, narrow enough for a terminal of 80 columns."""
    caption = (
        f"\nfloat32 {report.float32_ms:.3f} ms, {report.dtype} {report.dtype_ms:.3f} ms: "
        f"{report.speed_up:.2f} times as fast\n"
        "largest, rms: errors relative to float32's output; top-1: samples with the same\nlargest element"
    )
    table = _table(f"{report.model}: {report.dtype} against float32, {report.inputs} input(s)", caption)
    table.add_column("output")
    for column in ("largest", "rms", "cosine", "top-1"):
        table.add_column(column, justify="right")
    for output in report.outputs:
        agreement = "-" if output.top_1 is None else f"{output.top_1:.1%}"
        table.add_row(
            Text(output.name), f"{output.largest:.3g}", f"{output.rms:.3g}", f"{output.cosine:.6f}", agreement
        )
    return table


def layers_table(layers: tuple[LayerError, ...]) -> Table:
    """A table with a row for each layer, the worst first."""
    table = _table("Each layer separately", "\nrms error relative to the layer's result in float32")
    table.add_column("layer")
    table.add_column("rms", justify="right")
    for layer in layers:
        table.add_row(Text(layer.operator), f"{layer.error:.3g}")
    return table


def _table(title: str, caption: str) -> Table:
    return Table(
        title=Text(title, "table.title"),
        caption=caption,
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        show_edge=False,
        pad_edge=False,
    )
