"""Models of one operator on tables, and comparison with onnxruntime."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime
from onnx import helper

import dagexec
from dagexec.frontend.onnx.foreign_nodes import FOREIGN

Array = npt.NDArray[Any]

NUMBERS = {"f": 1, "d": 11, "q": 7, "i": 6, "O": 8}


def model_of(
    op_type: str, x: Array, outputs: int = 1, *, version: int = 3, domain: str = "ai.onnx.ml", **attributes: Any
) -> onnx.ModelProto:
    """A model of one node on rows like those of `x`."""
    names = ["y", "scores"][:outputs]
    node = helper.make_node(op_type, ["x"], names, name="the node", domain=domain, **attributes)
    shape = [None, *x.shape[1:]]
    kind = NUMBERS[np.dtype(x.dtype).char.replace("l", "q")]
    graph = helper.make_graph(
        [node], "table", [helper.make_tensor_value_info("x", kind, shape)],
        [onnx.ValueInfoProto(name=name) for name in names],
    )  # fmt: skip
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx.ml", version)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


def agrees(model: onnx.ModelProto, x: Array, **options: Any) -> Mapping[str, Any]:
    """What dagexec's own operators compute of `model`, after comparing it with onnxruntime, and rows with lone rows."""
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    expected = session.run(None, {"x": x})
    with dagexec.compile(model, **options) as executor:
        assert FOREIGN not in {operator.type for operator in executor.model.net.op}
        found = executor.run({"x": x})
        for name, values in zip([output.name for output in session.get_outputs()], expected, strict=True):
            same(found[name], values)
        for row in range(min(3, len(x))):
            alone = executor.run({"x": x[row : row + 1]})
            for name, value in found.items():
                np.testing.assert_array_equal(alone[name][0], value[row])
    return found


def same(found: Any, expected: Any) -> None:
    """Raise AssertionError unless a result is what onnxruntime gave."""
    expected = np.asarray(expected)
    assert found.shape == expected.shape
    if expected.dtype.kind == "f":
        assert found.dtype == expected.dtype
        np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-5)
    else:
        assert found.tolist() == expected.tolist()
