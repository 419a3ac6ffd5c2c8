"""Inference over a net: every type it can know, nothing it cannot, and errors that name the operator."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagexec import NetDef, OperatorDef, Workspace
from dagexec.core.dtypes import FLOAT32, INT64, TypeMeta
from dagexec.core.graph import build_graph
from dagexec.core.inference import NetTypes, infer_net
from dagexec.core.schema import Cost, TensorType
from dagexec.errors import ArgumentError, ShapeError
from tests.ops.running import operator_def


def infer(*ops: OperatorDef, values: dict[str, Any] | None = None, **inputs: tuple[int, ...]) -> NetTypes:
    types = {name: TensorType(shape, FLOAT32) for name, shape in inputs.items()}
    types |= {name: TensorType(value.shape, INT64) for name, value in (values or {}).items()}
    return infer_net(build_graph(NetDef(name="n", op=ops)), types, values)


def floats(*shape: int, meta: TypeMeta = FLOAT32) -> TensorType:
    return TensorType(shape, meta)


def test_types_follow_through_a_net() -> None:
    found = infer(
        operator_def("Relu", ["x"], ["y"]),
        operator_def("Concat", ["x", "y"], ["z", "info"], axis=0),
        operator_def("Shape", ["z"], ["s"]),
        x=(2, 3),
    )
    assert found.blobs["z"] == floats(4, 3)
    assert found.blobs["s"] == floats(2, meta=INT64)
    assert found.outputs[1][0] == floats(4, 3)
    assert found.costs[0] == Cost(6, 24, 24)
    assert found.flops == 6


def test_a_blob_has_the_type_of_its_last_write() -> None:
    found = infer(
        operator_def("ConstantFill", [], ["a"], shape=[2]),
        operator_def("ConstantFill", [], ["a"], shape=[3], value=1),
    )
    assert found.blobs["a"] == floats(3, meta=INT64)
    assert found.outputs == ((floats(2),), (floats(3, meta=INT64),))


def test_what_only_a_run_can_tell_is_unknown_and_stays_local() -> None:
    found = infer(
        operator_def("Cast", ["sizes"], ["s"], to="int64"),
        operator_def("Reshape", ["x", "s"], ["r", "old"]),
        operator_def("Relu", ["r"], ["after"]),
        operator_def("Concat", ["r", "x"], ["mixed"], axis=0),
        operator_def("Relu", ["x"], ["other"]),
        operator_def("Reshape", ["after"], ["known_again"], shape=[6]),
        operator_def("ConstantFill", [], ["r"], shape=[1]),
        operator_def("Relu", ["r"], ["fresh"]),
        x=(2, 3),
        sizes=(2,),
    )
    assert {name for name, kind in found.blobs.items() if kind is None} == {"old", "after", "mixed", "known_again"}
    assert found.outputs[1] == (None, None)
    assert found.costs[1] is None
    assert found.blobs["other"] == floats(2, 3)
    assert found.blobs["fresh"] == floats(1)


def test_an_input_nobody_described_is_unknown() -> None:
    found = infer(operator_def("Relu", ["x"], ["y"]), operator_def("Relu", ["q"], ["z"]), x=(2,))
    assert found.blobs["y"] == floats(2)
    assert found.blobs["z"] is None


def test_a_constant_value_gives_the_shape_until_its_blob_is_written() -> None:
    reshape = operator_def("Reshape", ["x", "s"], ["y", "old"])
    constants = {"s": np.array([3, 2])}
    types = {"x": floats(2, 3), "s": floats(2, meta=INT64), "unknown": floats(2, meta=INT64)}
    before = infer_net(build_graph(NetDef(name="n", op=[reshape])), types, constants)
    assert before.blobs["y"] == floats(3, 2)
    assert before.blobs["old"] == floats(2, meta=INT64)
    overwrite = operator_def("Abs", ["unknown"], ["s"])
    after = infer_net(build_graph(NetDef(name="n", op=[overwrite, reshape])), types, constants)
    assert after.blobs["y"] is None
    assert list(constants) == ["s"], "the caller's values were changed"


def test_shapes_follow_from_values_that_follow_from_shapes() -> None:
    found = infer(
        operator_def("Shape", ["x"], ["sizes"]),
        operator_def("Gather", ["sizes", "first"], ["batch"]),
        operator_def("Mul", ["batch", "two"], ["double"]),
        operator_def("Concat", ["double", "rest"], ["target", "lengths"], axis=0),
        operator_def("Reshape", ["x", "target"], ["y", "old"]),
        x=(4, 6, 5),
        values={"first": np.array([0]), "two": np.array(2), "rest": np.array([3, -1])},
    )
    assert found.blobs["y"] == floats(8, 3, 5)


def test_what_fails_on_the_way_to_a_shape_is_left_to_the_run() -> None:
    found = infer(
        operator_def("Shape", ["x"], ["sizes"]),
        operator_def("Gather", ["sizes", "place"], ["batch"]),
        operator_def("Reshape", ["x", "batch"], ["y", "old"]),
        x=(4, 6, 5),
        values={"place": np.array([9])},
    )
    assert found.blobs["y"] is None


@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [
        (operator_def("Concat", ["x", "w"], ["y"], axis=1), ShapeError, r"'w' must have shape \(2, 5\).*found \(4"),
        (operator_def("Cast", ["x"], ["y"], to="complex"), ArgumentError, "data type 'complex' is unknown"),
        (operator_def("Transpose", ["x"], ["y"], axes=[0]), ShapeError, r"permutation of 0\.\.1, found \[0\]"),
    ],
)
def test_an_error_names_operator_place_and_net(bad: OperatorDef, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=rf"^{bad.type} 'y' \(operator 1\) of net 'n': .*{message}"):
        infer(operator_def("Relu", ["x"], ["q"]), bad, x=(2, 3), w=(4, 5))


SHAPE_KEEPERS = [("Relu", {}), ("Copy", {}), ("Transpose", {}), ("FlattenToVec", {}), ("ExpandDims", {"dims": [0]})]


@given(st.lists(st.integers(0, 3), min_size=1, max_size=3), st.lists(st.sampled_from(SHAPE_KEEPERS), max_size=6))
@settings(max_examples=40, deadline=None)
def test_inference_agrees_with_a_run(shape: list[int], kinds: list[tuple[str, dict[str, Any]]]) -> None:
    ops = [operator_def(kind, [f"b{i}"], [f"b{i + 1}"], **arguments) for i, (kind, arguments) in enumerate(kinds)]
    found = infer(*ops, b0=tuple(shape))
    workspace = Workspace()
    workspace.feed_blob("b0", np.zeros(shape, np.float32))
    workspace.run_net_once(NetDef(name="n", op=ops))
    for name, kind in found.blobs.items():
        array = workspace.fetch_blob(name)
        assert kind == TensorType(array.shape, FLOAT32)
