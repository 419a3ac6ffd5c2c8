"""What the package adds, as dagexec finds it once the package is installed: nothing of it is imported here."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import dagexec
from dagexec.errors import ArgumentError
from dagexec.testing import check_gradient

X = np.linspace(-3, 3, 24, dtype=np.float32).reshape(4, 6)


def model(bound: float) -> onnx.ModelProto:
    """Saturate of a Relu of a Relu, as a model of ONNX."""
    nodes = [
        helper.make_node("Relu", ["x"], ["first"]),
        helper.make_node("Relu", ["first"], ["second"]),
        helper.make_node("Saturate", ["second"], ["y"], domain="com.example", bound=bound),
    ]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [4, 6]) for name in "xy"]
    graph = helper.make_graph(nodes, "saturated", ends[:1], ends[1:])
    versions = [helper.make_opsetid("", 17), helper.make_opsetid("com.example", 1)]
    return helper.make_model(graph, opset_imports=versions)


@pytest.mark.parametrize("bound", [0.5, 2.0])
def test_a_node_of_the_domain_is_the_operator(bound: float) -> None:
    """The result is that of the formula, in float64."""
    with dagexec.compile(model(bound=bound), foreign=False, passes=["relu-of-relu"]) as executor:
        found = executor.run({"x": X})["y"]
    np.testing.assert_allclose(found, bound * np.tanh(np.maximum(X, 0.0, dtype=np.float64) / bound), rtol=1e-5)


def test_the_gradient_is_the_slope() -> None:
    """As differences of the results say."""
    check_gradient("Saturate", [X.astype(np.float64)], limit=0.5)


def test_a_limit_of_zero_is_refused() -> None:
    """Before any operator runs."""
    with (
        dagexec.compile(model(bound=0.0), foreign=False) as executor,
        pytest.raises(ArgumentError, match="'limit' must be above 0"),
    ):
        executor.run({"x": X})
