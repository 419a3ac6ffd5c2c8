"""What a trial of OpenVINO (`openvino_trial`) runs in a process of its own: the model in standard input, once."""

from __future__ import annotations

import json
import os
import sys
from base64 import b64decode
from collections.abc import Mapping
from typing import Any

import numpy as np

from dagexec.core import dtypes
from dagexec.foreign.island import IslandModel
from dagexec.foreign.message import parse
from dagexec.foreign.openvino import OpenVinoIsland

_BY_ONNX = {meta.onnx: meta.numpy for meta in dtypes.HELD_TYPES}


def main() -> None:
    """Compile and run it on zeros; constants are made up, too. Ends the process without waiting for threads."""
    told: Mapping[str, Any] = json.load(sys.stdin)
    constants = {name: np.full(shape, 0.01).astype(kind) for name, (shape, kind) in told["constants"].items()}
    model = IslandModel(parse(b64decode(told["message"]), "trial"), constants, told["threads"])
    shapes = tuple(tuple(shape) for shape in told["shapes"])
    kinds = [_BY_ONNX[value.type.tensor_type.elem_type] for value in model.inputs]
    inputs = [np.zeros(shape, kind) for shape, kind in zip(shapes, kinds, strict=True)]
    request = OpenVinoIsland(model).compiled(shapes if told["is_static"] else None).create_infer_request()
    request.infer(dict(enumerate(inputs)))
    os._exit(0)


if __name__ == "__main__":
    main()
