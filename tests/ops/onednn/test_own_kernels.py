"""Operators of engine ONEDNN without oneDNN: by kernels of our own, against the default engine in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dagexec.ops.engines.onednn.binding import own_kernels
from tests.ops.onednn.engine import fallbacks, normal
from tests.ops.running import Array, computed, run_operator

pytestmark = pytest.mark.skipif(own_kernels() is None, reason="no kernels run here")


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """oneDNN is as if it were absent."""
    monkeypatch.setattr("dagexec.ops.engines.onednn.operator.known_library", own_kernels)


def image(channels: int, order: str = "NHWC", batch: int = 2, height: int = 9, width: int = 8) -> Array:
    return normal(1, *((batch, height, width, channels) if order == "NHWC" else (batch, channels, height, width)))


def widened(array: Array) -> Array:
    return array.astype(np.float64) if array.dtype == np.float32 else array


RELU = {"post_ops": ["relu"]}
PAIR = {"kernel": 3, "stride": 2, "pad": 1}
CASES: dict[str, tuple[str, list[Array], dict[str, Any]]] = {}
for _order in ("NHWC", "NCHW"):
    for _channels in (1, 8, 45):
        _x, _own = image(_channels, _order), {"order": _order}
        CASES |= {
            f"MaxPool {_order} {_channels}": ("MaxPool", [_x], PAIR | _own),
            f"AveragePool {_order} {_channels}": ("AveragePool", [_x], PAIR | _own),
            f"padding counts {_order} {_channels}": ("AveragePool", [_x], PAIR | _own | {"count_include_pad": 1}),
            f"dilated {_order} {_channels}": ("MaxPool", [_x], {"kernel": 2, "dilation": 3, "stride": 1} | _own),
            f"the whole {_order} {_channels}": ("AveragePool", [_x], {"global_pooling": 1} | _own),
            f"ceil {_order} {_channels}": ("MaxPool", [_x], {"kernel": 2, "stride": 2, "ceil_mode": 1} | _own),
        }
    _x, _own = normal(1, *((2, 4, 5, 6, 9) if _order == "NHWC" else (2, 9, 4, 5, 6))), PAIR | {"order": _order}
    CASES |= {f"{_kind}Pool of three axes {_order}": (f"{_kind}Pool", [_x], _own) for _kind in ("Max", "Average")}
    for _beta in (0.75, 0.5, 1.0, 0.6):
        _numbers = {"size": 5, "alpha": 0.5, "beta": _beta, "bias": 2.0, "order": _order}
        CASES[f"LRN {_order} {_beta}"] = "LRN", [image(19, _order)], _numbers
_SIZES, _LONG, _COLUMNS = [np.array([7, 8])], [np.array([9])], normal(1, 2, 45, 16)
_COLUMNS[0, 13, 6], _COLUMNS[1, 20, 3] = np.nan, np.inf
CASES |= {
    "rows of one axis": ("MaxPool", [normal(1, 2, 11, 12)], {"kernels": [3], "order": "NHWC"}),
    "softmax of rows": ("Softmax", [normal(1, 7, 33)], {"axis": 1}),
    "softmax of channels": ("Softmax", [normal(1, 2, 5, 3, 4)], {"axis": 1, "single_axis": 1}),
    "log of softmax": ("LogSoftmax", [normal(1, 2, 5, 3)], {"axis": 1, "single_axis": 1}),
    "layers": ("LayerNorm", [normal(1, 6, 24), normal(2, 24), normal(3, 24)], {"axis": 1, "elementwise_affine": 1}),
    "layers without factors": ("LayerNorm", [normal(1, 3, 5, 24)], {"axis": -1}),
    "one row and columns that fill nothing": ("FC", [normal(1, 1, 13), normal(2, 7, 13), normal(3, 7)], {}),
    "functions that products have not": (
        "FusedFC",
        [normal(1, 4, 13), normal(2, 7, 13), normal(3, 7)],
        {"post_ops": ["relu", "elu:1.5", "linear:2:0"]},
    ),
    "repeated pixels": ("Resize", [image(3)], {"sizes": [2, 18, 24, 3]}),
    "picked pixels": ("Resize", [image(3, "NCHW")], {"sizes": [2, 3, 13, 8], "rounding": "floor"}),
    "picked of all axes": ("Resize", [normal(1, 5, 3, 4)], {"scales": [1.5, 1.0, 2.0], "coordinates": "asymmetric"}),
    "columns": ("ColumnsToImage", [_COLUMNS, *_SIZES, np.array([3, 3])], {"strides": [2, 2], "pads": [1] * 4}),
    "columns of one axis": ("ColumnsToImage", [normal(1, 2, 14, 6), *_LONG, np.array([2])], {"dilations": [3]}),
    "columns apart": ("ColumnsToImage", [normal(1, 1, 8, 4), *_SIZES, np.array([2, 2])], {"strides": [4, 5]}),
    "normalized rows": ("SpatialBN", [normal(1, 5, 12), *[normal(seed, 12) ** 2 for seed in range(4)]], {"is_test": 1}),
    "a transposed one": ("FCTransposed", [normal(1, 9, 3), normal(2, 3, 21), normal(3, 21)], {}),
}
for _order in ("NHWC", "NCHW"):
    _numbers, _axis = [normal(2, 12), normal(3, 12), normal(4, 12), np.square(normal(5, 12))], {"order": _order}
    CASES |= {
        f"SpatialBN {_order}": ("SpatialBN", [image(12, _order), *_numbers], {"is_test": 1} | _axis),
        f"moved {_order}": ("ResizeNearest", [image(12, _order)], {"width_scale": 2.0, "height_scale": 3.0} | _axis),
        f"picked {_order}": ("ResizeNearest", [image(12, _order)], {"width_scale": 1.7, "height_scale": 0.6} | _axis),
        f"shuffled {_order}": ("ChannelShuffle", [image(12, _order)], {"group": 3} | _axis),
    }
for _kind in ("Mean", "Sum", "Max", "Min", "L1", "L2"):
    for _axes in ([1], [2], [0]):
        CASES[f"{_kind} of {_axes}"] = f"Reduce{_kind}", [normal(1, 4, 9, 21)], {"axes": _axes, "keepdims": 0}
for _channels, _filters, _window in ((3, 10, 3), (7, 12, 5), (16, 19, 1), (5, 33, 1), (8, 6, 3)):
    _layer = [image(_channels), normal(2, _filters, _window, _window, _channels), normal(3, _filters)]
    for _stride in (1, 2):
        CASES[f"convolution {_channels} {_filters} {_window} {_stride}"] = (
            "FusedConv",
            _layer,
            {"kernel": _window, "stride": _stride, "pad": _window // 2, "order": "NHWC", "bias": 1} | RELU,
        )


@pytest.mark.parametrize("name", CASES)
def test_an_operator_is_computed_without_onednn(name: str) -> None:
    op_type, inputs, arguments = CASES[name]
    arrays = {f"{place}": array for place, array in enumerate(inputs)}
    is_constant = name.startswith("SpatialBN") or op_type in ("FC", "FCTransposed", "FusedFC", "FusedConv")
    constant = "1234" if is_constant else ""
    with fallbacks() as reasons:
        found = [
            computed(op_type, arrays, ["y"], constant[: len(inputs) - 1], pieces=pieces, **arguments)[0]
            for pieces in (1, 3)
        ]
    assert not reasons
    [expected] = run_operator(op_type, [widened(one) for one in inputs], **arguments)
    np.testing.assert_allclose(found[0], expected, rtol=1e-5, atol=1e-5)
    assert found[0].tobytes() == found[1].tobytes()


@pytest.mark.parametrize(
    "name", [name for name in CASES if name.split()[0] in ("MaxPool", "AveragePool", "LRN", "Max")]
)
def test_what_is_no_number_stays_none_and_reaches_what_it_should(name: str) -> None:
    op_type, [x], arguments = CASES[name]
    x = x.copy()
    x.reshape(-1)[[3, 40]] = np.nan, np.inf
    [found] = computed(op_type, {"x": x}, ["y"], **arguments)
    [expected] = run_operator(op_type, [x.astype(np.float64)], **arguments)
    np.testing.assert_array_equal(np.isnan(found), np.isnan(expected))
