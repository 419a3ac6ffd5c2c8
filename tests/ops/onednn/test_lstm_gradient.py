"""The gradient of an LSTM by native calls, against NumPy's in float64."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from dagexec.ops.engines.onednn import lstm_gradient
from tests.ops.gradient_checks import analytic_gradients
from tests.ops.kernels.running import needs_kernels
from tests.ops.recurrent_layers import DIRECTIONS, Layer
from tests.ops.running import Array, operator_def


def gradients(layer: Layer, dtype: type, engine: str, given: Sequence[int]) -> dict[int, Array]:
    """Of all inputs but lengths, from random gradients of the outputs `given`."""
    inputs = layer.inputs()
    names = [f"x{index}" for index in range(len(inputs))]
    outputs = [f"y{index}" for index in range(layer.results + 2)]
    definition = operator_def("LSTM", names, outputs, **layer.arguments(), engine=engine)
    wanted = [index for index, array in enumerate(inputs) if array.dtype != np.int32]
    typed = [array.astype(dtype) if index in wanted else array for index, array in enumerate(inputs)]
    state = (layer.directions, layer.batch, layer.hidden)
    shapes = [(layer.steps, layer.directions, layer.batch, layer.hidden), state, state]
    rng = np.random.default_rng(2)
    drawn = [rng.uniform(-1, 1, shape).astype(np.float32).astype(dtype) for shape in shapes]
    return dict(analytic_gradients(definition, typed, {index: drawn[index] for index in given}, wanted))


@needs_kernels
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("shorter", [None, (0, 2, 5)])
@pytest.mark.parametrize("given", [[0, 1, 2], [1]])
@pytest.mark.parametrize(("steps", "hidden"), [(7, 12), (7, 37), (5, 160)])
def test_gradients_are_those_of_float64(
    direction: str,
    shorter: tuple[int, ...] | None,
    given: list[int],
    steps: int,
    hidden: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layer = Layer("LSTM", steps=steps, batch=3, features=9, hidden=hidden, direction=direction, shorter=shorter)
    made = []
    original = lstm_gradient.formula_call

    def counted(*arguments: object) -> object:
        made.append(original(*arguments))  # type: ignore[arg-type]
        return made[-1]

    monkeypatch.setattr(lstm_gradient, "formula_call", counted)
    found = gradients(layer, np.float32, "ONEDNN", given)
    assert made
    assert None not in made
    for index, expected in gradients(layer, np.float64, "", given).items():
        np.testing.assert_allclose(found[index], expected, atol=1e-5 * np.abs(expected).max(), rtol=0)


@needs_kernels
@pytest.mark.parametrize("steps", [1, 2, 3])
@pytest.mark.parametrize("shorter", [None, (0, 1)])
def test_few_steps_are_counted(steps: int, shorter: tuple[int, ...] | None) -> None:
    layer = Layer("LSTM", steps=steps, batch=2, features=3, hidden=20, direction="bidirectional", shorter=shorter)
    found = gradients(layer, np.float32, "ONEDNN", [0, 1, 2])
    for index, expected in gradients(layer, np.float64, "", [0, 1, 2]).items():
        np.testing.assert_allclose(found[index], expected, atol=1e-5 * np.abs(expected).max(), rtol=0)
