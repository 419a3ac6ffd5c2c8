"""Models as files of Caffe2: a predictor's database (`.mdl`), or an init net and a predict net for mobile devices.

Operators keep their types: a model that came from Caffe2 has those of Caffe2.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dagexec.binding.parameters import initialized
from dagexec.core.model import Model
from dagexec.core.operator_def import op
from dagexec.core.proto import MetaNetDef, NetDef, OperatorDef
from dagexec.errors import ArgumentError, OutputError
from dagexec.frontend import predictor as file
from dagexec.platform.disk import make_folders
from dagexec.platform.files import write_atomically
from dagexec.storage.blob_file import write_blobs

Array = npt.NDArray[Any]

_FILLERS = {
    "float32": "GivenTensorFill",
    "float64": "GivenTensorDoubleFill",
    "int32": "GivenTensorIntFill",
    "int64": "GivenTensorInt64Fill",
    "bool": "GivenTensorBoolFill",
}


def filler(name: str, array: Array) -> OperatorDef:
    """The operator that fills a blob with an array. Raises ArgumentError for elements of other types."""
    fill, values = _FILLERS.get(array.dtype.name), array.reshape(-1).tolist()
    if array.dtype.kind in "SUO":
        fill = "GivenTensorStringFill"
    elif array.dtype == np.uint8:
        fill, values = "GivenTensorByteStringToUInt8Fill", [array.tobytes()]
    if fill is None:
        raise ArgumentError(f"blob {name!r}: no operator fills a blob with elements of type {array.dtype}")
    return op(fill, [], name, shape=list(array.shape), values=values)


def predictor_message(
    net: NetDef,
    parameters: Sequence[str],
    inputs: Sequence[str],
    outputs: Sequence[str],
    *,
    shapes: Mapping[str, Sequence[int]] | None = None,
    predict_init: Iterable[OperatorDef] = (),
    global_init: Iterable[OperatorDef] = (),
) -> MetaNetDef:
    """The record with the nets of a predictor's file, and lists of blobs.

    One net loads the parameters; another makes room for inputs and outputs, of `shapes` where these are known. More
    operators of theirs may be given.
    """
    sizes = shapes or {}
    room = [op("ConstantFill", [], blob, shape=list(sizes.get(blob, [0])), value=0.0) for blob in (*inputs, *outputs)]
    load = op("Load", [file.DB_READER], list(parameters))
    meta = MetaNetDef()
    for key, name, operators in (
        (file.GLOBAL_INIT, "global-init", [load, *global_init]),
        (file.PREDICT_INIT, "predict-init", [*room, *predict_init]),
    ):
        made = NetDef(name=f"{net.name}-{name}", op=operators)
        made.external_output.extend(blob for operator in made.op for blob in operator.output)
        meta.nets.add(key=key, value=made)
    meta.nets[0].value.external_input.append(file.DB_READER)
    predict = meta.nets.add(key=file.PREDICT_NET, value=net).value
    predict.external_input[:] = [*inputs, *parameters]
    predict.external_output[:] = outputs
    for key, blobs in ((file.INPUTS, inputs), (file.OUTPUTS, outputs), (file.PARAMETERS, parameters)):
        meta.blobs.add(key=key, value=blobs)
    return meta


def save_predictor(model: Model, path: str | os.PathLike[str]) -> None:
    """Write a model as a predictor's database, with its parameters.

    Raises OutputError, naming the file, when it cannot be written.
    """
    full = initialized(model)
    shapes = {name: info.shape for name, info in full.inputs.items() if info.shape and None not in info.shape}
    meta = predictor_message(_net(full), list(full.parameters), list(full.inputs), full.outputs, shapes=shapes)  # type: ignore[arg-type]
    strings = {file.META_NET_DEF: meta.SerializeToString()}
    write_blobs("minidb", os.fspath(path), full.parameters.items(), strings=strings)


def save_nets(model: Model, folder: str | os.PathLike[str]) -> None:
    """Write a model as `init_net.pb`, which fills the parameters and leaves inputs empty, and `predict_net.pb`.

    Raises ArgumentError for parameters of types that no operator fills, and OutputError when a file cannot be written.
    """
    full, place = initialized(model), Path(folder)
    empty = {name: np.zeros(0, np.float32) for name in full.inputs}
    init = NetDef(name=f"{full.name}_init", op=[filler(*pair) for pair in (dict(full.parameters) | empty).items()])
    predict = _net(full)
    predict.external_input[:] = [*full.inputs, *full.parameters]
    predict.external_output[:] = full.outputs
    try:
        make_folders(place)
    except OSError as error:
        raise OutputError(f"{place}: {error.strerror}") from None
    for name, net in (("init_net.pb", init), ("predict_net.pb", predict)):
        write_atomically(place / name, net.SerializeToString())


def _net(model: Model) -> NetDef:
    """A copy of the model's net, under its name."""
    made = NetDef()
    made.CopyFrom(model.net)
    made.name = model.name
    return made
