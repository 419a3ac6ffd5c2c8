"""Casts to types of at most 8 bits, against the tables of ONNX's specification and its reference."""

import ml_dtypes
import numpy as np
import pytest
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

from dagexec.core.dtypes import NARROW_TYPES, TypeMeta, from_name
from dagexec.errors import ArgumentError
from dagexec.testing import run_operator

EDGES = np.array([0.0, 0.3, 1.0, 1.5, -1.5, 3.0, 7.0, -8.0], np.float32)
BEYOND = np.array([480.0, 1e6, -1e6, np.inf, -np.inf, np.nan], np.float32)


@pytest.mark.parametrize("meta", NARROW_TYPES, ids=str)
def test_small_numbers_are_rounded_as_the_reference_does(meta: TypeMeta) -> None:
    x = EDGES if meta.name.startswith("float") else EDGES.round().clip(0, 1)
    graph = helper.make_graph(
        [helper.make_node("Cast", ["x"], ["y"], to=meta.onnx)],
        "cast",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, x.shape)],
        [helper.make_tensor_value_info("y", meta.onnx, x.shape)],
    )
    [expected] = ReferenceEvaluator(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 25)])).run(
        None, {"x": x}
    )
    [found] = run_operator("Cast", [x], to=meta.number)
    assert found.dtype == meta.numpy
    assert found.tobytes() == expected.tobytes()
    [back] = run_operator("Cast", [found], to="float32")
    assert back.tobytes() == expected.astype(np.float32).tobytes()


@pytest.mark.parametrize(
    ("name", "saturate", "expected"),
    [
        ("float8e4m3fn", 1, [448, 448, -448, 448, -448, np.nan]),
        ("float8e4m3fn", 0, [np.nan, np.nan, np.nan, np.nan, np.nan, np.nan]),
        ("float8e4m3fnuz", 1, [240, 240, -240, 240, -240, np.nan]),
        ("float8e5m2", 1, [512, 57344, -57344, 57344, -57344, np.nan]),
        ("float8e5m2", 0, [512, np.inf, -np.inf, np.inf, -np.inf, np.nan]),
    ],
)
def test_saturation_is_that_of_the_specifications_tables(name: str, saturate: int, expected: list[float]) -> None:
    [found] = run_operator("Cast", [BEYOND], to=name, saturate=saturate)
    np.testing.assert_array_equal(found.astype(np.float32), np.array(expected, np.float32))


@pytest.mark.parametrize(("mode", "power"), [("up", [2, 4, 4]), ("down", [1, 2, 4]), ("nearest", [1, 4, 4])])
def test_powers_of_two_round_as_they_are_asked_to(mode: str, power: list[int]) -> None:
    [found] = run_operator("Cast", [np.array([1.25, 3.0, 4.0], np.float32)], to="float8e8m0", round_mode=mode)
    assert found.astype(np.float32).tolist() == power
    [odd] = run_operator("Cast", [np.array([0.0, 3e38, np.inf], np.float32)], to="float8e8m0", saturate=0)
    np.testing.assert_array_equal(odd.astype(np.float32), np.array([2.0**-127, np.nan, np.nan], np.float32))


def test_a_rounding_that_does_not_exist_is_refused() -> None:
    like = np.zeros(1, ml_dtypes.float8_e8m0fnu)
    with pytest.raises(ArgumentError, match="'round_mode' must be one of up, down, nearest, not 'sideways'"):
        run_operator("CastLike", [EDGES, like], round_mode="sideways")
    assert from_name("float8e8m0").numpy == like.dtype
