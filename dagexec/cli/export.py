"""`dagexec export`: write a model as an ONNX file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dagexec.cli.feeds import AllowIoOption, ModelArgument, ShapeOption, read_model, with_shapes
from dagexec.export import save_onnx


def export_command(
    model: ModelArgument,
    file: Annotated[Path, typer.Argument(metavar="FILE.onnx", help="The file to write.", show_default=False)],
    shape: ShapeOption = None,
    allow_io: AllowIoOption = False,
) -> None:
    """Write MODEL as an ONNX file, for other engines and tools."""
    loaded, shapes = with_shapes(read_model(model, allow_io), shape or ())
    save_onnx(loaded, file, shapes=shapes)
    print(f"{loaded.name}: {len(loaded.net.op)} operators written to {file}")
