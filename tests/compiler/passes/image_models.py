"""Models of images that are put together operator by operator, and laid out anew with the same results."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

import dagexec
from dagexec.compiler.passes.layout import laid_out, layouts
from dagexec.core.model import InputInfo, Model
from dagexec.core.operator_def import op as operator_def
from dagexec.core.proto import NetDef
from dagexec.ops.engines.onednn.binding import library

needs_onednn = pytest.mark.skipif(library() is None, reason="oneDNN is not installed")

ORDERS = [name for name in layouts() if name != "NCHW"]
"""Those with kernels here."""


class Drawing:
    """A model that is put together operator by operator; every conv has engine ONEDNN, as pass `engine` leaves it."""

    def __init__(self, shape: tuple[int | None, ...] = (1, 3, 12, 12), seed: int = 0) -> None:
        self.random = np.random.default_rng(seed)
        self.net = NetDef(name="drawn")
        self.parameters: dict[str, np.ndarray] = {}
        self.shape = shape

    def add(self, kind: str, inputs: list[str], output: str, /, engine: str = "ONEDNN", **arguments: object) -> str:
        self.net.op.append(operator_def(kind, inputs, [output], engine=engine, arg=arguments))  # type: ignore[arg-type]
        return output

    def constant(self, name: str, *shape: int) -> str:
        self.parameters[name] = self.random.standard_normal(shape).astype(np.float32)
        return name

    def conv(
        self, x: str, output: str, inner: int, outer: int, kernel: int = 3, group: int = 1, stride: int = 1
    ) -> str:
        weights = self.constant(f"{output}_w", outer, inner // group, kernel, kernel)
        self.parameters[weights] /= np.sqrt(kernel * kernel * inner / group)
        inputs = [x, weights, self.constant(f"{output}_b", outer)]
        return self.add("Conv", inputs, output, kernel=kernel, pad=kernel // 2, group=group, stride=stride)

    def model(self, *outputs: str) -> Model:
        return Model("drawn", self.net, None, self.parameters, {"x": InputInfo(shape=self.shape)}, outputs)


def results(model: Model, x: np.ndarray) -> Mapping[str, np.ndarray]:
    with dagexec.compile(model, optimize=False, net_type="simple") as executor:
        return executor.run({"x": x})


def check_same(model: Model, name: str, x: np.ndarray | None = None) -> Model:
    """The model in another layout, which gives what NumPy gives for the model as it is."""
    changed = laid_out(model, name).model
    if x is None:
        x = np.random.default_rng(1).standard_normal([size or 2 for size in model.inputs["x"].shape or ()], np.float32)
    plain = NetDef()
    plain.CopyFrom(model.net)
    for definition in plain.op:
        definition.engine = ""
    expected = results(Model("plain", plain, None, model.parameters, model.inputs, model.outputs), x)
    found = results(changed, x)
    assert list(found) == list(expected)
    for blob, array in expected.items():
        assert found[blob].shape == array.shape
        np.testing.assert_allclose(found[blob], array, rtol=1e-4, atol=1e-5 * np.abs(array).max())
    return changed


def reorders(model: Model) -> list[tuple[str, str, str]]:
    """(blob, from, to) of every Reorder."""
    rows = []
    for definition in model.net.op:
        if definition.type == "Reorder":
            arguments = {argument.name: argument.s.decode() for argument in definition.arg}
            rows.append((definition.input[0], arguments["from_order"], arguments["to_order"]))
    return rows


def orders(model: Model) -> dict[str, str]:
    """By first output, the argument `order` of the operators that have it."""
    return {
        one.output[0]: argument.s.decode() for one in model.net.op for argument in one.arg if argument.name == "order"
    }


def towers() -> Drawing:
    """conv1 - relu - two convolutions - joined - pool - softmax over the channels."""
    drawing = Drawing()
    x = drawing.conv("x", "conv1", 3, 16)
    x = drawing.add("Relu", [x], "relu1")
    left = drawing.conv(x, "left", 16, 32, kernel=1)
    right = drawing.conv(x, "right", 16, 16)
    joined = drawing.add("Concat", [left, right], "joined", axis=1)
    pooled = drawing.add("MaxPool", [joined], "pooled", kernel=2, stride=2)
    drawing.add("Softmax", [pooled], "softmax", engine="", axis=1, single_axis=1)
    return drawing
