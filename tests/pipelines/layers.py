"""Small models for pipelines, and what they compute, written with NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from dagexec import InputInfo, Model, NetDef, op
from dagexec.core.dtypes import FLOAT32

Array = npt.NDArray[Any]


def dense(name: str, inputs: int, outputs: int, seed: int = 0, rows: int | None = None) -> Model:
    """y = max(x w' + b, 0), whose blobs are called x, w, b, h and y in each of these models."""
    random = np.random.default_rng(seed)
    parameters = {
        "w": random.standard_normal((outputs, inputs)).astype(np.float32),
        "b": random.standard_normal(outputs).astype(np.float32),
    }
    net = NetDef(name=name, op=[op("FC", ["x", "w", "b"], ["h"], name="product"), op("Relu", "h", "y")])
    info = {"x": InputInfo(FLOAT32, (rows, inputs))}
    return Model(name, net, parameters=parameters, inputs=info, outputs=("y",))


def dense_by_formula(model: Model, x: Array) -> Array:
    """What `dense` computes, in float64."""
    weights = {name: array.astype(np.float64) for name, array in model.parameters.items()}
    product: Array = x.astype(np.float64) @ weights["w"].T + weights["b"]
    return np.maximum(product, 0)


def adding(name: str, width: int) -> Model:
    """total = first + second, written in the place of `first`; and twice = 2 second."""
    info = InputInfo(FLOAT32, (None, width))
    operators = [op("Add", ["first", "second"], ["first"]), op("Scale", "second", "twice", scale=2.0)]
    inputs = {"first": info, "second": info}
    return Model(name, NetDef(name=name, op=operators), inputs=inputs, outputs=("first", "twice"))
