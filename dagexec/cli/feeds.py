"""The model argument, and the options for its inputs, shared by the commands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import typer
from numpy.lib.npyio import NpzFile

from dagexec.analysis.comparison import random_feeds, require_inputs
from dagexec.binding.parameters import initialized
from dagexec.cli.completion import complete_model
from dagexec.cli.progress import progress_line
from dagexec.core.device import CPU
from dagexec.core.dtypes import TypeMeta, from_name
from dagexec.core.host_placement import model_on_host
from dagexec.core.model import Model
from dagexec.errors import ArgumentError, FeedError
from dagexec.executor.source.loading import load_model
from dagexec.pipelines import load_pipeline

_MODEL = typer.Argument(
    metavar="MODEL",
    help="A .onnx file, a plan (.dagexec), a folder with init_net.pb and predict_net.pb, a NetDef file, zoo:NAME, or a "
    ".toml file that describes a pipeline, with Python functions that are called.",
    show_default=False,
    autocompletion=complete_model,
)
ModelArgument = Annotated[str, _MODEL]
OptionalModelArgument = Annotated[str | None, _MODEL]
AllowIoOption = Annotated[
    bool,
    typer.Option(
        "--allow-io",
        help="Allow operators of MODEL to read and write files and to communicate with other processes, with your "
        "permissions. By default they can only read databases in the folder of MODEL.",
    ),
]
InputOption = Annotated[
    Path | None,
    typer.Option("--input", metavar="FILE.npz", help="Input arrays by name. Default: random numbers."),
]
ShapeOption = Annotated[
    list[str] | None,
    typer.Option(
        "--shape",
        metavar="NAME=1,3,224,224",
        help="Shape of a random input, with its type unless it is float32: label=int32:4. May be repeated.",
    ),
]
SeedOption = Annotated[int, typer.Option("--seed", min=0, help="Seed of the random inputs.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


def read_model(source: str, allow_io: bool, device: str | None = None) -> Model:
    """The model with its parameters initialized, which takes seconds for large ones. Raises what `load_model` does.

    For device "cpu" the model is moved to the host, as in `dagexec.compile`, before its init net runs.
    """
    with progress_line(f"Loading {source}"):
        is_pipeline = source.endswith(".toml")
        loaded = load_model(load_pipeline(source) if is_pipeline else source, allow_io=allow_io)
        return initialized(model_on_host(loaded) if device == str(CPU) else loaded)


def read_feeds(model: Model, file: Path | None, shapes: Sequence[str] | None, seed: int) -> dict[str, npt.NDArray[Any]]:
    """The feeds that the options ask for. Raises FeedError."""
    if file is None:
        return random_feeds(*with_shapes(model, shapes or ()), seed)
    return read_arrays(file)


def read_arrays(file: Path) -> dict[str, npt.NDArray[Any]]:
    """The arrays of an .npz file. Raises FeedError."""
    try:
        arrays = np.load(file, allow_pickle=False)
        if not isinstance(arrays, NpzFile):
            raise FeedError(f"{file}: not an .npz file of arrays but a single array")
        with arrays:
            return {name: arrays[name] for name in arrays.files}
    except FeedError:
        raise
    except Exception as error:  # zipfile, zlib and NumPy raise many kinds for broken files
        raise FeedError(f"{file}: not an .npz file of arrays: {error}") from None


def with_shapes(model: Model, texts: Sequence[str]) -> tuple[Model, dict[str, tuple[int, ...]]]:
    """The model with the element types from the options `--shape`, and the shapes from these options.

    Raises FeedError, also for inputs that the model does not have.
    """
    shapes, types = parse_shapes(texts)
    require_inputs(model, shapes)
    typed = {name: replace(model.inputs[name], dtype=meta) for name, meta in types.items()}
    return replace(model, inputs={**model.inputs, **typed}), shapes


def parse_shapes(texts: Sequence[str]) -> tuple[dict[str, tuple[int, ...]], dict[str, TypeMeta]]:
    """`data=1,3,224,224` as {"data": (1, 3, 224, 224)}, and types, as in `label=int32:4`. Raises FeedError."""
    shapes: dict[str, tuple[int, ...]] = {}
    types: dict[str, TypeMeta] = {}
    for text in texts:
        name, separator, value = text.rpartition("=")
        kind, typed, sizes = value.rpartition(":")
        try:
            shape = tuple(int(size) for size in sizes.split(",")) if sizes else ()
            if typed:
                types[name] = from_name(kind)
        except (ValueError, ArgumentError):
            shape = (-1,)
        if not separator or not name or any(size < 0 for size in shape):
            raise FeedError(
                f"--shape {text!r}: expected NAME=SIZE,SIZE,... with sizes of 0 or more, or NAME=TYPE:SIZE,SIZE,..."
            )
        shapes[name] = shape
    return shapes, types
