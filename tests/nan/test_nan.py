"""Optimized nets have NaN and infinities where they have them as given, by NumPy's operators (docs/precision.md)."""

from __future__ import annotations

import numpy as np
import pytest

from dagexec import InputInfo, Model, NetDef, OperatorDef, op
from dagexec.core.dtypes import FLOAT32
from tests.nan.comparison import Array, compared, differences, run


@pytest.mark.parametrize("first", range(0, 120, 6))
def test_nets_of_a_layer(first: int) -> None:
    for seed in range(first, first + 6):
        assert not compared(seed, 1), f"net {seed}"


@pytest.mark.slow
@pytest.mark.parametrize("layers", [1, 2, 4])
@pytest.mark.parametrize("first", range(1000, 1200, 50))
def test_more_nets(first: int, layers: int) -> None:
    for seed in range(first, first + 50):
        assert not compared(seed, layers), f"net {seed} of {layers} layers"


@pytest.mark.parametrize("gate", ["Swish", "HardSwish", "Mish", "Gelu", "fast Gelu"])
def test_a_gate_of_minus_infinity_is_no_number(gate: str) -> None:
    """-infinity times 0, as IEEE has it: by NumPy, by oneDNN, and by kernels behind products."""
    activation = op(gate.removeprefix("fast "), ["x"], ["y"], **({"fast_gelu": 1} if "fast" in gate else {}))
    model = _model([activation], (None,))
    x = np.array([-np.inf, np.inf, -3e38, 3e38, 0, np.nan] * 7, np.float32)
    expected = np.array([np.nan, np.inf, 0, 3e38, 0, np.nan] * 7, np.float32)
    for options in ({"optimize": False}, {}, {"intra_op_threads": 2}):
        np.testing.assert_allclose(run(model, {"x": x}, **options)["y"], expected, rtol=1e-6, atol=1e-15)


def test_a_sigmoid_behind_a_convolution_keeps_nan() -> None:
    w = np.ones((3, 3, 1, 1), np.float32)
    layer = [op("Conv", ["x", "w"], ["t"], kernel=1), op("Sigmoid", ["t"], ["y"])]
    model = _model(layer, (None, 3, 8, 8), w=w)
    x = np.ones((2, 3, 8, 8), np.float32)
    x[1, 2, 3, 4] = np.nan
    found = run(model, {"x": x})["y"]
    assert np.isnan(found[1, :, 3, 4]).all()
    assert np.isnan(found).sum() == 3


def test_a_difference_is_seen() -> None:
    model = _model([op("Relu", ["x"], ["y"])], (None, 64))
    x = np.ones((3, 64), np.float32)
    x[1, 2] = np.nan
    [found] = differences(run(model, {"x": x}, optimize=False), {"y": np.ones((3, 64), np.float32)})
    assert (found.missing, found.extra, found.infinities) == (1, 0, 0)


def _model(operators: list[OperatorDef], shape: tuple[int | None, ...], **parameters: Array) -> Model:
    net = NetDef(name="nan", op=operators, external_input=["x", *parameters])
    return Model("nan", net, None, parameters, {"x": InputInfo(FLOAT32, shape)}, ("y",))
