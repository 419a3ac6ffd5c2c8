"""LSTMUnit and GRUUnit against formulas in float64 sequence by sequence, and their gradients against numerical ones."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagexec.errors import ShapeError
from tests.ops.drawing import drawn
from tests.ops.gradient_checks import check_gradient
from tests.ops.running import Array, run_operator


def unit_inputs(op_type: str, batch: int, hidden: int, lengths: list[int] | None, timestep: int) -> list[Array]:
    rng = np.random.default_rng(batch + 10 * hidden)
    sizes = [hidden, hidden, 4 * hidden] if op_type == "LSTMUnit" else [hidden, 3 * hidden]
    arrays = [rng.uniform(-2, 2, (1, batch, size)) for size in sizes]
    if lengths is not None:
        arrays.append(np.array([lengths[n % len(lengths)] for n in range(batch)], np.int32))
    return [*arrays, np.array([timestep], np.int32)]


def sigmoid(x: Array) -> Array:
    return np.exp(-np.logaddexp(0, -x))


def lstm_unit(inputs: list[Array], forget_bias: float, drop: bool) -> list[Array]:
    h_prev, c_prev, gates, *lengths, timestep = inputs
    h, c = np.empty_like(h_prev), np.empty_like(c_prev)
    for n in range(h.shape[1]):
        if lengths and timestep[0] >= lengths[0][n]:
            h[0, n], c[0, n] = (0, 0) if drop else (h_prev[0, n], c_prev[0, n])
            continue
        i, f, o, g = gates[0, n].reshape(4, -1)
        c[0, n] = sigmoid(f + forget_bias) * c_prev[0, n] + sigmoid(i) * np.tanh(g)
        h[0, n] = sigmoid(o) * np.tanh(c[0, n])
    return [h, c]


def gru_unit(inputs: list[Array], _forget_bias: float, drop: bool) -> list[Array]:
    h_prev, gates, *lengths, timestep = inputs
    h = np.empty_like(h_prev)
    for n in range(h.shape[1]):
        if lengths and timestep[0] >= lengths[0][n]:
            h[0, n] = 0 if drop else h_prev[0, n]
            continue
        _, update, output = gates[0, n].reshape(3, -1)
        h[0, n] = sigmoid(update) * h_prev[0, n] + sigmoid(-update) * np.tanh(output)
    return [h]


REFERENCES = {"LSTMUnit": lstm_unit, "GRUUnit": gru_unit}


@pytest.mark.slow
@pytest.mark.parametrize("op_type", REFERENCES)
@drawn(40)
@given(
    batch=st.integers(0, 5),
    hidden=st.integers(0, 9),
    lengths=st.none() | st.lists(st.integers(0, 4), min_size=1, max_size=5),
    timestep=st.integers(0, 4),
    drop=st.booleans(),
    forget_bias=st.sampled_from([0.0, 1.5]),
    dtype=st.sampled_from([np.float64, np.float32, np.float16, ml_dtypes.bfloat16]),
)
def test_one_step(
    op_type: str,
    batch: int,
    hidden: int,
    lengths: list[int] | None,
    timestep: int,
    drop: bool,
    forget_bias: float,
    dtype: Any,
) -> None:
    inputs = unit_inputs(op_type, batch, hidden, lengths, timestep)
    expected = REFERENCES[op_type](inputs, forget_bias if op_type == "LSTMUnit" else 0, drop)
    rounded = [array.astype(dtype) if array.dtype == np.float64 else array for array in inputs]
    arguments: dict[str, Any] = {"forget_bias": forget_bias} if op_type == "LSTMUnit" else {}
    given_lengths = int(lengths is not None)
    found = run_operator(
        op_type, list(rounded), len(expected), sequence_lengths=given_lengths, drop_states=int(drop), **arguments
    )
    tolerance = {np.float64: 1e-12, np.float32: 1e-6, np.float16: 4e-3}.get(dtype, 4e-2)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == dtype
        np.testing.assert_allclose(one.astype(np.float64), other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("weighted", [[0], [1]])
def test_one_output_of_an_lstm_unit_has_a_gradient(weighted: list[int]) -> None:
    check_gradient("LSTMUnit", unit_inputs("LSTMUnit", 2, 2, [1, 5], 1), outputs=2, weighted=weighted)


def test_lengths_are_an_input_by_default() -> None:
    with pytest.raises(ShapeError, match="with sequence_lengths=1 expected 5 inputs, found 4"):
        run_operator("LSTMUnit", list(unit_inputs("LSTMUnit", 2, 3, None, 0)), 2)


@pytest.mark.parametrize(
    ("op_type", "index", "shape", "message"),
    [
        ("LSTMUnit", 0, (2, 2, 3), r"must have shape \(1, 2, 3\)"),
        ("LSTMUnit", 0, (2, 3), "must have 3 axes"),
        ("LSTMUnit", 1, (1, 2, 4), r"must have shape \(1, 2, 3\)"),
        ("LSTMUnit", 2, (1, 2, 9), r"must have shape \(1, 2, 12\)"),
        ("GRUUnit", 1, (1, 2, 12), r"must have shape \(1, 2, 9\)"),
    ],
)
def test_shapes_that_do_not_fit_are_errors(op_type: str, index: int, shape: tuple[int, ...], message: str) -> None:
    inputs = unit_inputs(op_type, 2, 3, [1], 0)
    inputs[index] = np.zeros(shape)
    with pytest.raises(ShapeError, match=message):
        run_operator(op_type, list(inputs), 2 if op_type == "LSTMUnit" else 1)


def test_more_than_one_time_step_is_an_error() -> None:
    inputs = unit_inputs("GRUUnit", 2, 3, [1], 0)
    inputs[-1] = np.zeros(2, np.int32)
    with pytest.raises(ShapeError, match=r"must have shape \(1,\) \(the number of the step\), found \(2,\)"):
        run_operator("GRUUnit", list(inputs))
