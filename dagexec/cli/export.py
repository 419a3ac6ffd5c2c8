"""`dagexec export`: write a model as an ONNX file, or as files of Caffe2."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dagexec.cli.feeds import AllowIoOption, ModelArgument, ShapeOption, read_model, with_shapes
from dagexec.export import save_nets, save_onnx, save_predictor
from dagexec.frontend.predictor import PREDICTOR_SUFFIXES


def export_command(
    model: ModelArgument,
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE.onnx|FILE.mdl|FOLDER",
            help="What to write: an ONNX file; a predictor's database of Caffe2 (.mdl, .minidb); or, under a name "
            "without a suffix, a folder with init_net.pb and predict_net.pb.",
            show_default=False,
        ),
    ],
    shape: ShapeOption = None,
    allow_io: AllowIoOption = False,
) -> None:
    """Write MODEL as a file for other engines and tools."""
    loaded, shapes = with_shapes(read_model(model, allow_io), shape or ())
    if file.suffix in PREDICTOR_SUFFIXES:
        save_predictor(loaded, file)
    elif not file.suffix:
        save_nets(loaded, file)
    else:
        save_onnx(loaded, file, shapes=shapes)
    print(f"{loaded.name}: {len(loaded.net.op)} operators written to {file}")
