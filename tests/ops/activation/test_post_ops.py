"""post_ops: every kind against its formula in float64, through NumPy; parsing; and what is refused."""

from __future__ import annotations

import math
from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest

from dagexec import NetDef, Workspace
from dagexec.core.arguments import ArgumentValue
from dagexec.core.dtypes import FLOAT32, FLOAT64
from dagexec.core.node import arguments_of
from dagexec.core.registry import create_operator
from dagexec.core.schema import OperatorCall, TensorType
from dagexec.errors import ArgumentError, DagexecError, SchemaError, ShapeError
from dagexec.ops.base.layout import channel_count, spatial_sizes
from dagexec.ops.families.activation.post_ops import BINARY, FUNCTIONS, PostOp, infer_post_ops, parse_post_op
from dagexec.scheduler.nets.simple import SimpleNet
from tests.ops.running import operator_def, run_operator, workspace_of

erf = np.vectorize(math.erf)
Formula = Callable[[np.ndarray], np.ndarray]

FORMULAS: dict[str, Formula] = {
    "relu": lambda y: np.where(y > 0, y, 0),
    "leaky_relu:0.1": lambda y: np.where(y > 0, y, 0.1 * y),
    "clip:-1.0:0.5": lambda y: np.minimum(np.maximum(y, -1), 0.5),
    "clip:0.0:inf": lambda y: np.where(y > 0, y, 0),
    "sigmoid": lambda y: 1 / (1 + np.exp(-y)),
    "tanh": lambda y: (np.exp(2 * y) - 1) / (np.exp(2 * y) + 1),
    "elu:0.7": lambda y: np.where(y > 0, y, 0.7 * (np.exp(y) - 1)),
    "swish:1.0": lambda y: y / (1 + np.exp(-y)),
    "swish:1.7": lambda y: y / (1 + np.exp(-1.7 * y)),
    "swish:-0.5": lambda y: y / (1 + np.exp(0.5 * y)),
    "swish:0.0": lambda y: y / 2,
    "hardswish": lambda y: y * np.minimum(np.maximum(y + 3, 0), 6) / 6,
    "hardsigmoid:0.2:0.5": lambda y: np.minimum(np.maximum(0.2 * y + 0.5, 0), 1),
    "gelu_erf": lambda y: 0.5 * y * (1 + erf(y / math.sqrt(2))),
    "gelu_tanh": lambda y: 0.5 * y * (1 + np.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * y**3))),
    "abs": lambda y: np.where(y < 0, -y, y),
    "square": lambda y: y * y,
    "exp": np.exp,
    "linear:2.0:-0.5": lambda y: 2 * y - 0.5,
    "linear:1.0:0.0": lambda y: y,
    "pow:0.5:2.0": lambda y: 0.5 * y * y,
    "softplus": lambda y: np.log(1 + np.exp(y)),
    "mish": lambda y: y * np.tanh(np.log(1 + np.exp(y))),
}
POSITIVE: dict[str, Formula] = {"sqrt": np.sqrt, "log": np.log, "pow:2.0:-0.5": lambda y: 2 / np.sqrt(y)}


def test_every_kind_has_a_formula_here() -> None:
    assert {text.split(":")[0] for text in (*FORMULAS, *POSITIVE)} == set(FUNCTIONS)


def unit_conv(y: np.ndarray, *texts: str, engine: str = "", order: str = "NCHW") -> np.ndarray:
    """post_ops of `y`, N, C, spatial (or as `order` says), behind a 1x1 convolution with the unit matrix as filter."""
    channels, rank = channel_count(order, y.shape), len(spatial_sizes(order, y.shape))
    unit = np.eye(channels).reshape(
        (channels, *(1,) * rank, channels) if order == "NHWC" else (channels, -1, *(1,) * rank)
    )
    unit = unit.astype(y.dtype)
    (result,) = run_operator("FusedConv", [y, unit], kernel=1, order=order, post_ops=list(texts), engine=engine)
    return result


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
@pytest.mark.parametrize("text", [*FORMULAS, *POSITIVE])
def test_a_function_gives_its_formula(text: str, dtype: str) -> None:
    rng = np.random.default_rng(0)
    values = rng.uniform(-4, 4, (2, 3, 5, 7)) if text in FORMULAS else rng.uniform(0.1, 4, (2, 3, 5, 7))
    y = values.astype(dtype)
    found = unit_conv(y, text)
    assert found.dtype == y.dtype
    formula = FORMULAS.get(text) or POSITIVE[text]
    exact = formula(y.astype(np.float64))
    tolerance = {"float64": 1e-12, "float32": 2e-6}.get(dtype, 2 * float(ml_dtypes.finfo(dtype).eps))
    np.testing.assert_allclose(found.astype(np.float64), exact, rtol=tolerance, atol=tolerance)


LIMITED = ["sigmoid", "swish:1.0", "softplus", "gelu_erf", "gelu_tanh", "elu:1.0", "tanh", "mish"]


@pytest.mark.parametrize("text", LIMITED)
def test_large_values_overflow_nothing(text: str) -> None:
    y = np.array([-1e4, -200, 200, 1e4], np.float32).reshape(1, 1, 4)
    found = unit_conv(y, text)
    limits = {"sigmoid": (0, 1), "tanh": (-1, 1), "elu": (-1, None)}
    low, high = limits.get(text.split(":")[0], (0, None))
    np.testing.assert_allclose(found[0, 0, :2], low, atol=1e-6)
    np.testing.assert_allclose(found[0, 0, 2:], [200, 1e4] if high is None else high, rtol=1e-6)


def test_a_large_result_is_done_piece_by_piece_in_order() -> None:
    y = np.random.default_rng(1).standard_normal((2, 4, 130, 131)).astype(np.float32)
    found = unit_conv(y, "linear:2.0:1.0", "leaky_relu:0.5", "square")
    z = 2 * y.astype(np.float64) + 1
    np.testing.assert_allclose(found, np.where(z > 0, z, z / 2) ** 2, rtol=1e-5, atol=1e-6)


OPERANDS = [(1,), (1, 3, 1, 1), (3, 1, 1), (2, 3, 4, 5), (1, 1, 4, 5), (2, 1, 1, 1), (5,)]
EXACT: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "add": lambda a, b: a + b,
    "mul": lambda a, b: a * b,
    "sub": lambda a, b: a - b,
    "div": lambda a, b: a / b,
    "max": lambda a, b: np.where(a > b, a, b),
    "min": lambda a, b: np.where(a > b, b, a),
}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", BINARY)
@pytest.mark.parametrize("shape", OPERANDS)
def test_an_operand_broadcasts_to_the_result(shape: tuple[int, ...], kind: str, dtype: str) -> None:
    rng = np.random.default_rng(2)
    y = rng.uniform(1, 4, (2, 3, 4, 5)).astype(dtype)
    operand = rng.uniform(1, 4, shape).astype(dtype)
    unit = np.eye(3).reshape(3, 3, 1, 1).astype(dtype)
    (found,) = run_operator("FusedConv", [y, unit, operand], kernel=1, post_ops=[f"{kind}:2"])
    exact = EXACT[kind](y.astype(np.float64), operand.astype(np.float64))
    np.testing.assert_allclose(found.astype(np.float64), exact, rtol=1e-6 if dtype == "float32" else 8e-3)


@pytest.mark.parametrize("engine", ["", "ONEDNN"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sum_adds_what_the_output_held(dtype: str, engine: str) -> None:
    rng = np.random.default_rng(3)
    x, held = (rng.standard_normal((2, 32, 5, 6)).astype(dtype) for _ in range(2))
    filters = (rng.standard_normal((32, 32, 1, 1)) / 6).astype(dtype)
    definition = operator_def("FusedConv", ["x", "w", "y"], ["y"], kernel=1, post_ops=["sum:2", "relu"], engine=engine)
    workspace = workspace_of((("x", x), ("w", filters), ("y", held)))
    exact = held.astype(np.float64)
    with SimpleNet(NetDef(name="test", op=[definition]), workspace) as net:
        for _ in range(2):
            net.run()
            product = np.einsum("mc,nchw->nmhw", filters[..., 0, 0].astype(np.float64), x.astype(np.float64))
            exact = np.maximum(exact + product, 0)
    tolerance = 1e-5 if dtype == "float32" else 5e-2
    np.testing.assert_allclose(workspace.fetch_blob("y").astype(np.float64), exact, rtol=tolerance, atol=tolerance)


def test_entries_are_written_as_they_are_read() -> None:
    texts = ["relu", "clip:-1.0:inf", "linear:0.1:1e-20", "pow:1.0:-0.5", "add:3", "sum:2", "elu:0.30000000000000004"]
    assert [str(parse_post_op(text, "x")) for text in texts] == texts
    assert parse_post_op("clip:0:6", "x") == PostOp("clip", 0.0, 6.0)


REFUSED = {
    "rely": "'rely' is unknown; expected one of relu, leaky_relu",
    "relu:1": r"'relu' takes 0 number\(s\), found 'relu:1'",
    "clip:1": r"'clip' takes 2 number\(s\), found 'clip:1'",
    "elu:x": r"'elu' takes 1 number\(s\), found 'elu:x'",
    "elu:nan": "the numbers of 'elu:nan' are invalid",
    "clip:2:1": "the numbers of 'clip:2:1' are invalid",
    "add": "'add' takes 1 input number, found 'add'",
    "add:-1": "'add' takes the number of an input, found 'add:-1'",
    "add:1": "'add:1' needs an operand: expected input 2 to 3",
    "add:4": "'add:4' needs an operand: expected input 2 to 3",
    "sum:2": "'sum:2' adds to the result in place, so input 2 must be output blob 'y', found 'a'",
}


def call_with(texts: list[str], inputs: list[tuple[str, TensorType]]) -> OperatorCall:
    definition = operator_def("FusedConv", [name for name, _ in inputs], ["y"], post_ops=texts)
    types = tuple(kind for _, kind in inputs)
    return OperatorCall(definition, arguments_of(definition, "fused"), types, (None,) * len(types), "fused")


IMAGE = TensorType((2, 3, 4, 5), FLOAT32)


@pytest.mark.parametrize(("text", "message"), REFUSED.items())
def test_what_makes_no_sense_is_refused(text: str, message: str) -> None:
    inputs = [("x", IMAGE), ("w", IMAGE), ("a", IMAGE), ("b", IMAGE)]
    with pytest.raises(ArgumentError, match=f"fused: post_ops: {message}"):
        infer_post_ops(call_with([text, "add:2", "add:3"], inputs), IMAGE, 2)


WRONG: list[tuple[list[str], TensorType, str, type[DagexecError], str]] = [
    (["add:2"], TensorType((3,), FLOAT32), "a", ShapeError, r"result \(2, 3, 4, 5\), found \(3,\)"),
    (["add:2"], TensorType((1, 2, 3, 4, 5), FLOAT32), "a", ShapeError, "must broadcast to the result"),
    (["add:2"], TensorType((5,), FLOAT64), "a", ShapeError, "must be one of float32, found float64"),
    (["relu"], IMAGE, "a", ArgumentError, r"input 'a' \(number 2\) is not named in post_ops"),
    (["sum:2"], TensorType((5,), FLOAT32), "y", ShapeError, "the shape of the result"),
    (["add:2"], IMAGE, "y", ArgumentError, "input 2 is the output blob 'y': only 'sum:2' may read it"),
    (["sum:2", "sum:2"], IMAGE, "y", ArgumentError, "only 'sum:2' may read it"),
]


@pytest.mark.parametrize(("texts", "kind", "name", "error", "message"), WRONG)
def test_operands_that_do_not_fit_are_refused(
    texts: list[str], kind: TensorType, name: str, error: type[DagexecError], message: str
) -> None:
    with pytest.raises(error, match=message):
        infer_post_ops(call_with(texts, [("x", IMAGE), ("w", IMAGE), (name, kind)]), IMAGE, 2)


def test_the_image_itself_cannot_be_overwritten() -> None:
    arguments: dict[str, ArgumentValue] = {"kernel": 1, "post_ops": ["relu"]}
    with pytest.raises(SchemaError, match="output 0 may not overwrite input 0"):
        create_operator(operator_def("FusedConv", ["x", "w"], ["x"], **arguments), Workspace())
