"""Sigmoid, tanh and relu of the gates of recurrent layers, against float64."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from dagexec.ops.engines.onednn.binding import engine_library
from dagexec.ops.kernels.gate_kernels import OUTPUT, RNN, SUMS, GateKernel
from dagexec.ops.kernels.gate_product import GateProduct, Slot
from dagexec.ops.kernels.tables import in_pieces
from tests.ops.running import Array

_found = engine_library()
pytestmark = pytest.mark.skipif(_found is None or not _found.machine.can_run, reason="no kernels run here")


def needs(lanes: int) -> None:
    """Skip the test where vectors are shorter."""
    assert _found is not None
    if _found.machine.lanes < lanes:
        pytest.skip("no vectors of that length")


POINTS = np.concatenate(
    [
        np.linspace(-12, 12, 20_001),
        np.geomspace(1e-30, 1e3, 5_000),
        -np.geomspace(1e-30, 1e3, 5_000),
        [0.0, -0.0, np.inf, -np.inf, 3.0],
    ]
).astype(np.float32)


def computed(lanes: int, function: str, x: Array, clip: float = 0.0) -> Array:
    """The function of a vector, as that of the sums of a row; what is behind the row must stay as it is."""
    padded = -(-len(x) // 8) * 8
    sums, y = np.zeros(padded, np.float32), np.full(padded, 7, np.float32)
    sums[: len(x)] = x
    kernel = GateKernel(RNN, ((function, 0.0, 0.0),), lanes, 4 * padded, 4 * padded, 4 * len(x), clip)
    fields = np.array(kernel.fields(1, len(x), {SUMS: sums.ctypes.data, OUTPUT: y.ctypes.data}), np.int64)
    address = kernel.function()
    assert address
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)(fields.ctypes.data)
    assert (y[len(x) :] == 7).all()
    return y[: len(x)]


def exact(function: str, x: Array) -> Array:
    wide = x.astype(np.float64)
    if function == "Relu":
        return np.maximum(wide, 0)
    with np.errstate(over="ignore"):
        return np.tanh(wide) if function == "Tanh" else 1 / (1 + np.exp(-wide))


@pytest.mark.parametrize("lanes", [8, 16])
@pytest.mark.parametrize("function", ["Sigmoid", "Tanh", "Relu"])
def test_functions_are_right_to_a_few_units_in_the_last_place(lanes: int, function: str) -> None:
    needs(lanes)
    found = computed(lanes, function, POINTS)
    np.testing.assert_allclose(found, exact(function, POINTS), rtol=4e-7, atol=1e-37)
    assert np.isnan(computed(lanes, function, np.array([1, np.nan, 2], np.float32))).tolist() == [False, True, False]


def test_sums_are_clipped() -> None:
    x = np.array([-3, -0.5, 0.25, 2, np.nan], np.float32)
    np.testing.assert_allclose(computed(8, "Tanh", x, 1.0), np.tanh(np.clip(x, -1, 1)), rtol=4e-7)


@pytest.mark.parametrize("lanes", [8, 16])
@pytest.mark.parametrize("sizes", [(1, 3, 5, 10), (4, 7, 13, 33), (2, 1, 128, 64), (3, 29, 40, 50)])
def test_products_with_gates(lanes: int, sizes: tuple[int, int, int, int]) -> None:
    """Gates, rows, inner, units: added to their slots, or set to the bias and the product."""
    needs(lanes)
    gates, rows, inner, units = sizes
    rng, padded = np.random.default_rng(1), -(-units // lanes) * lanes
    slots = tuple(Slot(number, adds=number % 2 == 0) for number in range(gates))
    product = GateProduct(inner, units, slots, lanes, 4 * inner, 4 * padded, 4 * padded * gates)
    x, weights = rng.standard_normal((rows, inner), np.float32), rng.standard_normal((gates, units, inner), np.float32)
    bias, sums = rng.standard_normal((gates, units), np.float32), np.ones((rows, gates, padded), np.float32)
    packed = product.pack(weights, bias, np.zeros(product.packed_elements, np.float32))
    addresses = x.ctypes.data, packed.ctypes.data, sums.ctypes.data
    in_pieces([product.calls(*addresses, rows, range(product.panels))], (x, packed, sums), "test")()
    begun = [1 if slot.adds else bias[slot.number] for slot in slots]
    for gate, start in enumerate(begun):
        expected = start + x.astype(np.float64) @ weights[gate].T
        np.testing.assert_allclose(sums[:, gate, :units], expected, rtol=1e-5, atol=1e-6 * inner)
    again = np.empty_like(weights)
    product.unpack(packed, again)
    assert again.tobytes() == weights.tobytes()
