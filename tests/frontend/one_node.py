"""Models of one ONNX node, computed by dagexec, onnxruntime and onnx's reference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import helper
from onnx.reference import ReferenceEvaluator

import dagexec

Array = np.ndarray[Any, Any]


def one_node(
    op_type: str, opset: int, inputs: Sequence[Array | None], outputs: int = 1, **attributes: Any
) -> onnx.ModelProto:
    """A node whose inputs are fed as x0, x1, ..., but for None, which is absent; its outputs are y0, y1, ..."""
    names = ["" if array is None else f"x{index}" for index, array in enumerate(inputs)]
    node = helper.make_node(op_type, names, [f"y{index}" for index in range(outputs)], **attributes)
    infos = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
        for name, array in zip(names, inputs, strict=True)
        if array is not None
    ]
    graph = helper.make_graph([node], "g", infos, [helper.make_empty_tensor_value_info(name) for name in node.output])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)


def feeds_of(inputs: Sequence[Array | None]) -> dict[str, Array]:
    return {f"x{index}": array for index, array in enumerate(inputs) if array is not None}


def computed(model: onnx.ModelProto, inputs: Sequence[Array | None]) -> list[Array]:
    """What dagexec gives."""
    with dagexec.compile(model) as executor:
        found = executor.run(feeds_of(inputs))
    return [found[value.name] for value in model.graph.output]


def by_onnxruntime(model: onnx.ModelProto, inputs: Sequence[Array | None]) -> list[Array]:
    found: list[Array] = onnxruntime.InferenceSession(model.SerializeToString()).run(None, feeds_of(inputs))
    return found


def by_reference(model: onnx.ModelProto, inputs: Sequence[Array | None]) -> list[Array]:
    found: list[Array] = ReferenceEvaluator(model).run(None, feeds_of(inputs))
    return found


def assert_same(found: Sequence[Array], expected: Sequence[Array], rtol: float = 1e-4, atol: float = 1e-5) -> None:
    """Equal shapes and types, and values within the tolerances."""
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.shape == np.shape(theirs)
        assert ours.dtype == np.asarray(theirs).dtype
        np.testing.assert_allclose(ours, theirs, rtol=rtol, atol=atol)
