"""All passes on random nets of mixed operators: the same outputs, in any order that the hazards of the result allow."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagexec.compiler.passes import run_passes
from dagexec.compiler.passes.catalog import GRAPH_PASSES
from dagexec.core.model import Model
from dagexec.core.proto import OperatorDef
from tests.compiler.passes.models import Array, assert_close, feeds_for, model_of, op, other_order, outputs_of

Make = Callable[[list[str], str], list[OperatorDef]]

_random = np.random.default_rng(11)


def _parameter(*shape: int, scale: float = 0.5) -> Array:
    return (_random.standard_normal(shape) * scale).astype(np.float32)


PARAMETERS = {
    "w1": _parameter(4, 4, 1, 1), "w3": _parameter(4, 4, 3, 3, scale=0.2), "g2": _parameter(4, 2, 3, 3, scale=0.3),
    "t3": _parameter(4, 4, 3, 3, scale=0.2), "h": _parameter(4, 8, 1, 1, scale=0.3), "b": _parameter(4),
    "k": _parameter(4, 1, 1), "s": _parameter(4), "o": _parameter(4), "m": _parameter(4),
    "v": np.abs(_parameter(4)) + np.float32(0.5), "n": np.array(0.75, np.float32), "one": np.array(1, np.float32),
}  # fmt: skip


def _layer(op_type: str, filters: str, **arguments: int) -> Make:
    return lambda blobs, y: [op(op_type, [blobs[0], filters, "b"], [y], **arguments)]


def _unary(op_type: str, **arguments: float | int) -> Make:
    return lambda blobs, y: [op(op_type, [blobs[0]], [y], **arguments)]


def _with(op_type: str, constant: str) -> Make:
    return lambda blobs, y: [op(op_type, [blobs[0], constant], [y])]


KINDS: Sequence[Make] = (
    _layer("Conv", "w1", kernel=1),
    _layer("Conv", "w3", kernel=3, pad=1),
    _layer("Conv", "g2", kernel=3, pad=1, group=2),
    _layer("ConvTranspose", "t3", kernel=3, pad=1),
    lambda blobs, y: [op("SpatialBN", [blobs[0], *"somv"], [y], is_test=1)],
    _unary("Relu"),
    _unary("Tanh"),
    _unary("Clip", min=-1.0, max=1.0),
    _unary("HardSwish"),
    _unary("Dropout", is_test=1),
    _unary("Copy"),
    _unary("Softmax", axis=1),
    _unary("MaxPool", kernel=3, pad=1, stride=1),
    _unary("Reshape", shape=[2, 4, 6, 6]),
    _with("Mul", "k"),
    _with("Add", "k"),
    _with("Sub", "n"),
    _with("Div", "n"),
    lambda blobs, y: [op("Add", blobs[:2], [y])],
    lambda blobs, y: [op("Sum", blobs[:2], [y])],
    lambda blobs, y: [op("Sum", blobs[:3], [y])],
    lambda blobs, y: [op("Sigmoid", [blobs[0]], [f"{y}t"]), op("Mul", [blobs[0], f"{y}t"], [y])],
    lambda blobs, y: [
        op("Concat", blobs[:2], [f"{y}t", f"{y}i"], axis=1),
        op("Conv", [f"{y}t", "h", "b"], [y], kernel=1),
    ],
    lambda blobs, y: [
        op("Reshape", [blobs[0]], [f"{y}t"], shape=[2, 2, 2, 6, 6]),
        op("Transpose", [f"{y}t"], [f"{y}u"], axes=[0, 2, 1, 3, 4]),
        op("Reshape", [f"{y}u"], [y], shape=[2, 4, 6, 6]),
    ],
    lambda blobs, y: [op("Relu", [blobs[0]], [blobs[0]]), op("Tanh", [blobs[0]], [y])],
    lambda blobs, y: [op("Sum", [blobs[0], blobs[1]], [blobs[0]]), op("Abs", [blobs[0]], [y])],
)


@st.composite
def models(draw: st.DrawFn) -> Model:
    """Up to 16 operators on tensors of one shape; some overwrite what they read, the first reads input x."""
    blobs, operators = ["a"], [op("Abs", ["x"], ["a"])]
    for number in range(draw(st.integers(2, 16))):
        recent = st.sampled_from(blobs[-3:]) if draw(st.booleans()) else st.sampled_from(blobs)
        read = [draw(recent) for _ in range(3)]
        target = f"b{number}"
        made = draw(st.sampled_from(KINDS))(read, target)
        if any(len(set(one.input)) < len(one.input) and one.output[0] in one.input for one in made):
            continue
        operators += made
        blobs.append(target)
    outputs = sorted({blobs[-1], *draw(st.lists(st.sampled_from(blobs), max_size=2))})
    return model_of(operators, outputs, **PARAMETERS)


@pytest.mark.slow
@settings(max_examples=120, deadline=None)
@given(models())
def test_passes_change_no_output(model: Model) -> None:
    feeds = feeds_for(model)
    wanted = outputs_of(model, feeds)
    result = run_passes(model, GRAPH_PASSES).model
    assert_close(outputs_of(result, feeds), wanted, 2e-5)
    assert_close(outputs_of(result, feeds, other_order(result)), wanted, 2e-5)
    assert len(result.net.op) <= len(model.net.op)
    assert run_passes(result, GRAPH_PASSES).model.net == result.net


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(models(), st.sets(st.sampled_from([step.name for step in GRAPH_PASSES])))
def test_whichever_passes_are_left_out(model: Model, without: set[str]) -> None:
    feeds = feeds_for(model)
    result = run_passes(model, GRAPH_PASSES, without).model
    assert_close(outputs_of(result, feeds, other_order(result)), outputs_of(model, feeds), 2e-5)
