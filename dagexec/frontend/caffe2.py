"""Caffe2 models: a folder with `init_net.pb`, which fills the parameters, and `predict_net.pb`, which is run.

Detectron's converter calls them `model_init.pb` and `model.pb`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from dagexec.core.io_access import IO
from dagexec.core.model import InputInfo, Model
from dagexec.core.proto import Argument, NetDef, OperatorDef
from dagexec.errors import ModelFormatError
from dagexec.frontend.caffe2_int8 import without_int8
from dagexec.frontend.caffe2_weights import Array, load_init_net
from dagexec.storage.net_file import load_net

SUFFIXES = (".pb", ".pbtxt")
_PAIRS = (("init_net", "predict_net"), ("model_init", "model"))


def load_caffe2(folder: str | os.PathLike[str]) -> Model:
    """The model in `folder`: `init_net` and `predict_net`, or `model_init` and `model`, each .pb or, as text, .pbtxt.

    Its operators may read databases in that folder, as an init net does that loads parameters.
    Raises ModelFormatError, naming the folder, when a file is missing, unreadable or not a NetDef.
    """
    path = Path(folder)
    if not path.is_dir():
        raise ModelFormatError(f"{path}: not a folder; expected one that holds init_net.pb and predict_net.pb")
    pair = next((pair for pair in _PAIRS if _file(path, pair[0])), _PAIRS[0])
    init, weights = load_init_net(_find(path, pair[0]))
    predict = load_net(_find(path, pair[1]))
    model = from_nets(init, predict, name=path.resolve().name, weights=weights)
    return replace(model, folder=path, allow_io=IO.READ_FOLDER)


def from_nets(
    init: NetDef | None, predict: NetDef, *, name: str = "", weights: Mapping[str, Array] = MappingProxyType({})
) -> Model:
    """A model from a net that fills parameters (or None) and the net to run.

    Inputs are the external inputs of `predict` that `init` does not write; a predict net that lists no external
    inputs takes every blob it reads before writing it. When `init` writes them all, the placeholders among them are
    the inputs: Caffe2's mobile exporter fills an input with a single 0, so that it exists, and Detectron's with
    nothing; here it is not filled.
    Outputs are the external outputs of `predict` or, when it lists none, the blobs it writes and does not read. Element
    types and shapes are unknown: the files do not hold them. `name` serves where the predict net has no name of its
    own, and `weights` are blobs that `init` no longer fills.
    Raises ModelFormatError when there is nothing to run: an empty file is a NetDef without operators.
    """
    if not predict.op:
        raise ModelFormatError(f"net {predict.name or name!r} has no operators; there is nothing to run")
    init, predict = without_int8(init, predict)
    filled = {blob for operator in init.op for blob in operator.output} if init is not None else set()
    filled |= weights.keys()
    needed = list(predict.external_input) or _read_before_written(predict)
    placeholders = _placeholders(init, predict) if init is not None and filled.issuperset(needed) else set()
    inputs = {blob: InputInfo() for blob in needed if blob not in filled or blob in placeholders}
    outputs = tuple(predict.external_output) or _never_read(predict)
    if init is not None and placeholders:
        filling, init = init, NetDef()
        init.CopyFrom(filling)
        del init.op[:]
        init.op.extend(operator for operator in filling.op if placeholders.isdisjoint(operator.output))
    return Model(predict.name or name, predict, init, dict(weights), inputs, outputs)


def _file(folder: Path, stem: str) -> Path | None:
    return next((path for suffix in SUFFIXES if (path := folder / f"{stem}{suffix}").is_file()), None)


def _find(folder: Path, stem: str) -> Path:
    path = _file(folder, stem)
    if path is None:
        raise ModelFormatError(f"{folder}: expected init_net.pb and predict_net.pb (or .pbtxt); {stem}.pb is missing")
    return path


def _placeholders(init: NetDef, predict: NetDef) -> set[str]:
    """Blobs that `init` leaves empty, or fills with a single 0 where an operator of `predict` takes its data from."""
    data = {operator.input[0] for operator in predict.op if operator.input}
    return {
        operator.output[0]
        for operator in init.op
        if (size := _size_of_zeros(operator)) == 0 or (size == 1 and operator.output[0] in data)
    }


def _size_of_zeros(operator: OperatorDef) -> int | None:
    """0 for a filler of no elements, 1 for that of a single 0; None for other operators."""
    arguments = {argument.name: argument for argument in operator.arg}
    if (
        operator.type not in ("ConstantFill", "GivenTensorFill")
        or len(operator.output) != 1
        or "shape" not in arguments
    ):
        return None
    shape, value = arguments["shape"].ints, arguments.get("value", arguments.get("values", Argument()))
    if 0 in shape:
        return 0
    return 1 if set(shape) == {1} and not any([value.f, value.i, *value.floats, *value.ints]) else None


def _read_before_written(net: NetDef) -> list[str]:
    written: set[str] = set()
    blobs: dict[str, None] = {}
    for operator in net.op:
        blobs.update((blob, None) for blob in operator.input if blob not in written)
        written.update(operator.output)
    return list(blobs)


def _never_read(net: NetDef) -> tuple[str, ...]:
    """Blobs whose last value no operator reads, in the order they are written."""
    unread: dict[str, None] = {}
    for operator in net.op:
        for blob in operator.input:
            unread.pop(blob, None)
        unread.update((blob, None) for blob in operator.output)
    return tuple(unread)
