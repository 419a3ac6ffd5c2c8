"""Casts, against Python's own conversions and onnxruntime's float16."""

import math
import warnings
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnxruntime
import pytest
from onnx import TensorProto, helper

from dagexec.core.dtypes import ALL_TYPES, BFLOAT16, STRING
from dagexec.errors import ArgumentError, SchemaError, ShapeError
from tests.ops.running import run_operator

Array = npt.NDArray[Any]
NUMERIC = [meta for meta in ALL_TYPES if meta is not STRING]


@pytest.mark.slow
@pytest.mark.parametrize("source", NUMERIC, ids=str)
@pytest.mark.parametrize("target", NUMERIC, ids=str)
def test_small_numbers_keep_their_value_in_every_type(source: Any, target: Any) -> None:
    x = np.array([[0, 1, 5], [100, 1, 0]]).astype(source.numpy)
    [y] = run_operator("Cast", [x], to=target.number)
    assert y.dtype == target.numpy
    expected = [[bool(v) if target.name == "bool" else float(v) for v in row] for row in x.tolist()]
    assert [[float(v) for v in row] for row in y.tolist()] == expected


@pytest.mark.parametrize(("to", "dtype"), [("FLOAT", np.float32), ("int64", np.int64), ("Double", np.float64)])
def test_the_type_may_be_a_name(to: str, dtype: npt.DTypeLike) -> None:
    [y] = run_operator("Cast", [np.array([3], np.int32)], to=to)
    assert y.dtype == dtype


def test_floats_are_cut_towards_zero() -> None:
    x = np.array([-2.9, -0.5, 0.5, 2.9], np.float32)
    [y] = run_operator("Cast", [x], to="int32")
    assert y.tolist() == [math.trunc(v) for v in x.tolist()]
    [truth] = run_operator("Cast", [np.array([0.0, -0.0, 0.1, math.nan], np.float32)], to="bool")
    assert truth.tolist() == [False, False, True, True]


@pytest.mark.parametrize("source", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("target", [np.dtype(f"{kind}int{bits}") for kind in ("", "u") for bits in (8, 16, 32, 64)])
def test_what_a_float_beyond_an_integer_becomes_does_not_depend_on_its_place(source: Any, target: Any) -> None:
    with np.errstate(over="ignore"):
        x = np.array([-600, 6e4, 3e9, -3e9, 4.2e9, 1e10, -1e10, 1e19, -1e19, np.inf, -np.inf, np.nan, 7]).astype(source)
    alone = np.concatenate([run_operator("Cast", [x[i : i + 1]], to=target.name)[0] for i in range(len(x))])
    for count in range(1, 18):
        [many] = run_operator("Cast", [np.repeat(x, count)], to=target.name)
        np.testing.assert_array_equal(many, np.repeat(alone, count))
    inside = [(given, int(found)) for given, found in zip(x.tolist(), alone, strict=True) if math.isfinite(given)]
    limits = np.iinfo(target)
    assert all(math.trunc(given) == found for given, found in inside if limits.min <= given <= limits.max)


def test_overflow_and_nan_raise_no_warning() -> None:
    x = np.array([math.nan, math.inf, 1e300, -1e300])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run_operator("Cast", [x], to="int32")
        [y] = run_operator("Cast", [x], to="float32")
    assert math.isnan(y[0])
    assert y[1:].tolist() == [math.inf, math.inf, -math.inf]


def test_bfloat16_rounds_to_nearest_even() -> None:
    x = np.array([1.0, 1.0 + 2**-8, 1.0 + 3 * 2**-8, 3.14159265], np.float32)
    [y] = run_operator("Cast", [x], to=BFLOAT16.number)
    assert y.dtype == ml_dtypes.bfloat16
    assert y.astype(np.float64).tolist() == [1.0, 1.0, 1.0 + 2**-6, 3.140625]


def test_half_conversion_agrees_with_onnxruntime() -> None:
    x = np.concatenate([np.random.default_rng(0).standard_normal(200) * 10.0 ** np.arange(-8, 8).repeat(200)[:200]])
    x = np.concatenate([x, [0.0, -0.0, 65504.0, 65520.0, 6e-8, -math.inf]]).astype(np.float32)
    graph = helper.make_graph(
        [helper.make_node("Cast", ["x"], ["y"], to=TensorProto.FLOAT16)],
        "half",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, x.shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT16, x.shape)],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    [half] = run_operator("FloatToHalf", [x])
    assert half.tobytes() == session.run(None, {"x": x})[0].tobytes()
    [back] = run_operator("HalfToFloat", [half])
    assert back.dtype == np.float32
    assert back.tolist() == [float(v) for v in half]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (np.array([-1.7, 0.0, 300.7], np.float32), [b"-1.700000", b"0.000000", b"300.700012"]),
        (np.array([1e20, -np.inf, np.nan]), [b"100000000000000000000.000000", b"-inf", b"nan"]),
        (np.array([1.5], ml_dtypes.bfloat16), [b"1.500000"]),
        (np.array([-(2**63), 7]), [b"-9223372036854775808", b"7"]),
        (np.array([True, False]), [b"1", b"0"]),
    ],
)
def test_strings_have_the_number_in_decimal(values: Array, expected: list[bytes]) -> None:
    [found] = run_operator("Cast", [values], to="string")
    assert found.tolist() == expected


@pytest.mark.slow
def test_casting_names_unknown_types_and_refuses_strings() -> None:
    x = np.array([1.0], np.float32)
    with pytest.raises(ArgumentError, match=r"Cast 'y0'.*argument 'to': data type 'complex' is unknown"):
        run_operator("Cast", [x], to="complex")
    with pytest.raises(ArgumentError, match=r"Cast 'y0'.*data type number 99 is unknown"):
        run_operator("Cast", [x], to=99)
    with pytest.raises(ArgumentError, match=r"argument 'to' must be an integer; found a float"):
        run_operator("Cast", [x], to=1.0)
    with pytest.raises(SchemaError, match="argument 'to' is required"):
        run_operator("Cast", [x])
    with pytest.raises(ShapeError, match="string cannot be cast to int32: strings are not parsed as numbers"):
        run_operator("Cast", [np.array([b"1"], object)], to="int32")
    with pytest.raises(ShapeError, match="'x0' must be one of float32, found float64"):
        run_operator("FloatToHalf", [np.array([1.0])])
