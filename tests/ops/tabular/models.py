"""Models of one operator on tables, random ensembles of trees, and comparison with onnxruntime."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime
from onnx import helper

import dagexec
from dagexec.frontend.onnx.foreign import FOREIGN

Array = npt.NDArray[Any]
Attributes = dict[str, Any]

MODES = ["BRANCH_LEQ", "BRANCH_LT", "BRANCH_GTE", "BRANCH_GT", "BRANCH_EQ", "BRANCH_NEQ"]
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


def random_rows(random: np.random.Generator, rows: int, columns: int, dtype: str = "f") -> Array:
    """Numbers of which many are whole, and some are missing."""
    x = 2 * random.standard_normal((rows, columns))
    x = np.where(random.random(x.shape) < 0.4, np.round(x), x)
    if np.dtype(dtype).kind == "f":
        x[random.random(x.shape) < 0.15] = np.nan
    return x.astype(dtype)


def random_trees(
    random: np.random.Generator, trees: int, columns: int, depth: int, *, modes: list[str] = MODES, missing: bool = True
) -> tuple[Attributes, list[tuple[int, int]]]:
    """Attributes of nodes, and the leaves as numbers of tree and node."""
    found: Attributes = {
        f"nodes_{name}": []
        for name in (
            "treeids", "nodeids", "featureids", "values", "modes", "truenodeids", "falsenodeids",
            "missing_value_tracks_true",
        )
    }  # fmt: skip
    leaves = []

    def add(tree: int, left: int) -> int:
        place = len(found["nodes_nodeids"])
        number = place - found["nodes_treeids"].index(tree) if tree in found["nodes_treeids"] else 0
        is_leaf = left == 0 or random.random() < 0.1
        value = round(random.standard_normal()) if random.random() < 0.5 else random.standard_normal()
        row = (
            tree, number, int(random.integers(columns)), float(np.float32(value)),
            "LEAF" if is_leaf else str(random.choice(modes)), 0, 0, int(missing and random.random() < 0.5),
        )  # fmt: skip
        for values, one in zip(found.values(), row, strict=True):
            values.append(one)
        if is_leaf:
            leaves.append((tree, number))
        else:
            found["nodes_truenodeids"][place] = add(tree, left - 1)
            found["nodes_falsenodeids"][place] = add(tree, left - 1)
        return number

    for tree in range(trees):
        add(tree, depth)
    return found, leaves


def weights(
    random: np.random.Generator, kind: str, leaves: list[tuple[int, int]], targets: list[list[int]], *, positive: bool
) -> Attributes:
    """Attributes of weights: of leaf i for `targets[i % len(targets)]`."""
    rows = [(*leaf, target) for i, leaf in enumerate(leaves) for target in targets[i % len(targets)]]
    given = random.standard_normal(len(rows))
    trees, nodes, ids = (list(column) for column in zip(*rows, strict=True))
    values = np.abs(given) if positive else given
    return {
        f"{kind}_treeids": trees, f"{kind}_nodeids": nodes, f"{kind}_ids": ids,
        f"{kind}_weights": (values / max(1, trees[-1])).astype(np.float32).tolist(),
    }  # fmt: skip
