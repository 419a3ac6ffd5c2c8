"""Caffe2's int8 nets for phones, bit by bit against integers of Python by gemmlowp's published rule.

gemmlowp, doc/quantization.md and fixedpoint.h: a factor is q * 2^(e - 31). Its product with a number is rounded twice:
as the upper half of twice the product, ties upward, and as that is divided by a power of two, ties away from 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

import dagexec
from dagexec import NetDef, OperatorDef, op
from dagexec.caffe2 import core, workspace
from dagexec.errors import Caffe2Error, ModelFormatError, UnsupportedOperatorError

Bytes = npt.NDArray[np.uint8]
RNG = np.random.default_rng(0)
X_SCALE, W_SCALE, Y_SCALE = 0.05, 0.013, 0.11
X_ZERO, W_ZERO, Y_ZERO = 120, 131, 100


def rounded(value: Fraction) -> int:
    """The nearest integer, ties away from zero."""
    return int(math.copysign(1, value)) * math.floor(abs(value) + Fraction(1, 2))


def times(number: int, factor: float) -> int:
    fraction, exponent = math.frexp(factor)
    q = rounded(Fraction(fraction) * 2**31)
    if q == 2**31:
        q, exponent = q // 2, exponent + 1
    shifted = max(-(2**31), min(2**31 - 1, number * 2 ** max(exponent, 0)))
    return rounded(Fraction(math.floor(Fraction(shifted * q, 2**31) + Fraction(1, 2)), 2 ** max(-exponent, 0)))


def stored(sums: npt.NDArray[np.int64], factor: float, zero_point: int = Y_ZERO, low: int = 0) -> Bytes:
    results = [min(255, max(low, times(int(one), factor) + zero_point)) for one in sums.ravel()]
    return np.array(results, np.uint8).reshape(sums.shape)


def single(*numbers: float) -> float:
    """(a * b) / c in float32."""
    a, b, c = map(np.float32, numbers)
    return float(a * b / c)


def filled(name: str, array: npt.NDArray[np.integer], scale: float, zero_point: int) -> OperatorDef:
    if array.dtype == np.uint8:
        return op(
            "Int8GivenTensorFill",
            [],
            name,
            shape=array.shape,
            values=array.tobytes(),
            Y_scale=scale,
            Y_zero_point=zero_point,
        )
    values = array.ravel().tolist()
    return op(
        "Int8GivenIntTensorFill", [], name, shape=array.shape, values=values, Y_scale=scale, Y_zero_point=zero_point
    )


def run(
    operators: list[OperatorDef], given: Mapping[str, tuple[npt.NDArray[np.integer], float, int]]
) -> npt.NDArray[np.generic]:
    """Y of a net whose blobs of bytes an init net makes, as files for phones have them."""
    init = NetDef(name="init", op=[filled(name, *what) for name, what in given.items()])
    predict = NetDef(name="predict", op=operators, external_input=list(given), external_output=["Y"])
    with dagexec.compile((init, predict)) as executor:
        return executor.run({})["Y"]


def some(*shape: int) -> Bytes:
    return RNG.integers(0, 256, shape, dtype=np.uint8)


Y = {"Y_scale": Y_SCALE, "Y_zero_point": Y_ZERO}


@pytest.mark.parametrize("kind", ["Int8Conv", "Int8ConvRelu"])
@pytest.mark.parametrize("group", [1, 2])
def test_convolutions(kind: str, group: int) -> None:
    x, w, b = some(2, 5, 4, 4), some(6, 3, 3, 4 // group), RNG.integers(-5000, 5000, 6, dtype=np.int32)
    given = {"X": (x, X_SCALE, X_ZERO), "W": (w, W_SCALE, W_ZERO), "B": (b, X_SCALE * W_SCALE, 0)}
    conv = op(kind, ["X", "W", "B"], ["Y"], kernel=3, stride=2, pad=1, group=group, order="NHWC", **Y)
    wide = np.pad(x.astype(int) - X_ZERO, ((0, 0), (1, 1), (1, 1), (0, 0)))
    filters, sums = w.astype(int) - W_ZERO, np.zeros((2, 3, 2, 6), int)
    for n, i, j, m in np.ndindex(sums.shape):
        channels = slice(m // (6 // group) * (4 // group), (m // (6 // group) + 1) * (4 // group))
        sums[n, i, j, m] = (wide[n, 2 * i : 2 * i + 3, 2 * j : 2 * j + 3, channels] * filters[m]).sum() + b[m]
    expected = stored(sums, single(X_SCALE, W_SCALE, Y_SCALE), low=Y_ZERO if kind.endswith("Relu") else 0)
    np.testing.assert_array_equal(run([conv], given), expected)
    assert len(np.unique(expected)) > 10


def test_fully_connected_layers() -> None:
    x, w, b = some(3, 2, 2, 3), some(5, 12), RNG.integers(-5000, 5000, 5, dtype=np.int32)
    given = {"X": (x, X_SCALE, X_ZERO), "W": (w, W_SCALE, W_ZERO), "B": (b, X_SCALE * W_SCALE, 0)}
    sums = (x.reshape(3, 12).astype(int) - X_ZERO) @ (w.astype(int) - W_ZERO).T + b
    result = run([op("Int8FC", ["X", "W", "B"], ["Y"], **Y)], given)
    np.testing.assert_array_equal(result, stored(sums, single(X_SCALE, W_SCALE, Y_SCALE)))


@pytest.mark.parametrize("kind", ["Int8Add", "Int8AddRelu", "Int8SumRelu"])
@pytest.mark.parametrize("scale", [0.02, 0.4])
def test_sums(kind: str, scale: float) -> None:
    a, b = some(1, 4, 5, 3), some(1, 4, 5, 3)
    unit = 2 * max(float(np.float32(X_SCALE)), float(np.float32(scale)))
    sums = [
        sum(
            times((int(value) - zero) << 20, float(np.float32(own)) / unit)
            for value, zero, own in ((one, X_ZERO, X_SCALE), (other, 7, scale))
        )
        for one, other in zip(a.ravel(), b.ravel(), strict=True)
    ]
    expected = stored(
        np.array(sums).reshape(a.shape),
        unit / (2**20 * float(np.float32(Y_SCALE))),
        low=Y_ZERO if kind.endswith("Relu") else 0,
    )
    given = {"A": (a, X_SCALE, X_ZERO), "B": (b, scale, 7)}
    np.testing.assert_array_equal(run([op(kind, ["A", "B"], ["Y"], **Y)], given), expected)


@pytest.mark.parametrize("window", [{"kernel": 3, "stride": 2, "pad": 1}, {"global_pooling": 1}])
def test_average_pooling_gives_its_own_scale(window: dict[str, int]) -> None:
    x = some(2, 5, 5, 3)
    size = window.get("kernel", 5)
    pad = window.get("pad", 0)
    wide = np.pad(x.astype(int) - X_ZERO, ((0, 0), (pad, pad), (pad, pad), (0, 0)))
    starts = range(0, wide.shape[1] - size + 1, window.get("stride", 1))
    sums = np.array([[wide[:, i : i + size, j : j + size].sum((1, 2)) for j in starts] for i in starts]).transpose(
        2, 0, 1, 3
    )
    factor = float(np.float32(X_SCALE) / (np.float32(size * size) * np.float32(0.02)))
    pool = op("Int8AveragePoolRelu", "X", "Y", order="NHWC", Y_scale=0.02, Y_zero_point=90, arg=window)
    result = run([pool], {"X": (x, X_SCALE, X_ZERO)})
    np.testing.assert_array_equal(result, stored(sums, factor, 90, 90))


def test_softmax_is_that_of_tables() -> None:
    x = some(4, 10)
    table = [round(min(0xFFFFFFFF / 10, 8388607.0) * math.exp((i - 255) * float(np.float32(0.1)))) for i in range(256)]
    expected = []
    for row in x.tolist():
        values = [table[255 - max(row) + value] for value in row]
        expected.append([min(255, (256 * value + sum(values) // 2) // sum(values)) for value in values])
    softmax = op("Int8Softmax", "X", "Y", Y_scale=1 / 256, Y_zero_point=0)
    np.testing.assert_array_equal(run([softmax], {"X": (x, 0.1, 30)}), expected)


def test_functions_of_one_number() -> None:
    x = np.arange(256, dtype=np.uint8).reshape(4, 64)
    real = (x.astype(float) - X_ZERO) * float(np.float32(X_SCALE))
    given = {"X": (x, X_SCALE, X_ZERO)}
    sigmoid = run([op("Int8Sigmoid", "X", "Y", Y_scale=1 / 256, Y_zero_point=0)], given)
    np.testing.assert_array_equal(sigmoid, np.minimum(np.rint(256 / (1 + np.exp(-real))), 255))
    leaky = run([op("Int8LeakyRelu", "X", "Y", alpha=0.3, **Y)], given)
    slope, scale = float(np.float32(0.3)), float(np.float32(Y_SCALE))
    np.testing.assert_array_equal(
        leaky, np.clip(np.rint(np.where(real < 0, slope * real, real) / scale) + Y_ZERO, 0, 255)
    )
    np.testing.assert_array_equal(run([op("Int8Relu", "X", "Y")], given), np.maximum(x, X_ZERO))


def test_what_moves_bytes_keeps_their_scale() -> None:
    """Each is followed by Int8Dequantize, which must know the scale of its input."""
    x = some(1, 4, 6, 4)
    cases = {
        "Int8Reshape": ({"shape": [0, -1]}, x.reshape(1, -1)),
        "Int8Flatten": ({"axis": 1}, x.reshape(1, -1)),
        "Int8Slice": ({"starts": [0, 1, 0, 1], "ends": [-1, 3, -1, -1]}, x[:, 1:3, :, 1:]),
        "Int8Transpose": ({"axes": [0, 3, 1, 2]}, x.transpose(0, 3, 1, 2)),
        "Int8MaxPool": ({"kernel": 2, "stride": 2}, x.reshape(1, 2, 2, 3, 2, 4).max((2, 4))),
        "Int8ResizeNearest": ({"height_scale": 2.0, "width_scale": 2.0}, x.repeat(2, 1).repeat(2, 2)),
        "Int8ChannelShuffle": ({"group": 2}, x[..., [0, 2, 1, 3]]),
        "Int8Concat": ({}, x),
    }
    operators = []
    for kind, (arguments, _) in cases.items():
        second = [f"{kind}/second"] if kind in ("Int8Reshape", "Int8Concat") else []
        operators += [op(kind, "X", [kind, *second], arg=arguments), op("Int8Dequantize", kind, f"{kind}/real")]
    init = NetDef(name="init", op=[filled("X", x, X_SCALE, X_ZERO)])
    outputs = [f"{kind}/real" for kind in cases]
    predict = NetDef(name="predict", op=operators, external_input=["X"], external_output=outputs)
    with dagexec.compile((init, predict)) as executor:
        results = executor.run({})
    for kind, (_, expected) in cases.items():
        real = (expected.astype(np.float32) - X_ZERO) * np.float32(X_SCALE)
        np.testing.assert_array_equal(results[f"{kind}/real"], real, kind)


def test_a_folder_for_phones_runs_from_floats_to_floats(tmp_path: Path) -> None:
    x = RNG.standard_normal((2, 6, 6, 3)).astype(np.float32)
    w, b = some(4, 1, 1, 3), np.zeros(4, np.int32)
    init = NetDef(name="init", op=[filled("W", w, W_SCALE, W_ZERO), filled("B", b, X_SCALE * W_SCALE, 0)])
    operators = [
        op("Int8Quantize", "data", "q", Y_scale=X_SCALE, Y_zero_point=X_ZERO),
        op("Int8Conv", ["q", "W", "B"], "c", kernel=1, order="NHWC", **Y),
        op("Int8Dequantize", "c", "Y"),
    ]
    predict = NetDef(name="predict", op=operators, external_input=["data", "W", "B"], external_output=["Y"])
    for name, net in (("init_net.pb", init), ("predict_net.pb", predict)):
        (tmp_path / name).write_bytes(net.SerializeToString())
    with dagexec.compile(tmp_path) as executor:
        result = executor.run({"data": x})["Y"]
    q = np.clip(np.rint(x / np.float32(X_SCALE)) + X_ZERO, 0, 255).astype(int)
    sums = (q - X_ZERO) @ (w.reshape(4, 3).astype(int) - W_ZERO).T
    integers = stored(sums, single(X_SCALE, W_SCALE, Y_SCALE)).astype(np.float32)
    np.testing.assert_array_equal(result, (integers - Y_ZERO) * np.float32(Y_SCALE))


def test_what_cannot_be_known_is_refused() -> None:
    conv = op("Int8Conv", ["X", "W", "B"], "Y", kernel=1, **Y)
    with pytest.raises(
        ModelFormatError, match=r"Int8Conv \(operator 0\) of net 'n': input 0 must be made by an operator"
    ):
        dagexec.load_model(NetDef(name="n", op=[conv]))
    two = {"A": (some(1, 1, 1, 2), 0.1, 3), "B": (some(1, 1, 1, 2), 0.1, 4)}
    with pytest.raises(ModelFormatError, match="must have one scale and zero point"):
        run([op("Int8Concat", ["A", "B"], ["Y", "split"])], two)
    with pytest.raises(ModelFormatError, match="must have the scale 1/256"):
        run([op("Int8Softmax", "A", "Y", **Y)], two)


def test_products_are_rounded_as_gemmlowp_rounds() -> None:
    """Ties of both roundings among them: by the operator and by fractions."""
    sums = np.array(
        [0, 1, -1, 2, -2, 3, -3, 5, -5, 6, -6, 7, 101, -101, 2**30, -(2**30), 2**31 - 1, -(2**31)], np.int64
    )
    for factor in (0.5, 0.25, 0.75, 1 / 3, 1.5, 3.0, 2.0**-20, 0.9999999):
        net = NetDef(
            name="n",
            op=[op("RequantizeFixedPoint", "sums", "Y", multiplier=factor, y_zero_point=128)],
            external_input=["sums"],
        )
        with dagexec.compile(net) as executor:
            result = executor.run({"sums": sums.astype(np.int32)})["Y"]
        np.testing.assert_array_equal(result, stored(sums, float(np.float32(factor)), 128))


def test_transposed_convolutions() -> None:
    x, w, b = some(2, 3, 4, 5), some(5, 3, 2, 6), RNG.integers(-5000, 5000, 6, dtype=np.int32)
    given = {"X": (x, X_SCALE, X_ZERO), "W": (w, W_SCALE, W_ZERO), "B": (b, X_SCALE * W_SCALE, 0)}
    conv = op("Int8ConvTranspose", ["X", "W", "B"], ["Y"], kernel_h=3, kernel_w=2, stride=2, pad=1, order="NHWC", **Y)
    wide = np.zeros((2, 7, 8, 6), int)
    for n, i, j, k, m in np.ndindex(2, 3, 4, 3, 2):
        wide[n, 2 * i + k, 2 * j + m] += (x[n, i, j].astype(int) - X_ZERO) @ (w[:, k, m].astype(int) - W_ZERO)
    expected = stored(wide[:, 1:-1, 1:-1] + b, single(X_SCALE, W_SCALE, Y_SCALE))
    np.testing.assert_array_equal(run([conv], given), expected)
    assert len(np.unique(expected)) > 10


@pytest.mark.parametrize("ratio", [-1, 2])
def test_regions(ratio: int) -> None:
    """Of corners that give samples whose places float32 has exactly."""
    x, rois = some(2, 6, 7, 3), np.array([[0, 1, 2, 13, 9], [1, 3.25, 0.25, 6.25, 5], [1, -9, 4, 9, 28]], np.float32)
    align = op(
        "Int8RoIAlign", ["X", "rois"], ["Y"], order="NHWC", spatial_scale=0.5, pooled_h=2, pooled_w=3,
        sampling_ratio=ratio, **Y,
    )  # fmt: skip
    boxes = op("GivenTensorFill", [], "rois", shape=rois.shape, values=rois.reshape(-1).tolist())
    result = run([boxes, align], {"X": (x, X_SCALE, X_ZERO)})
    for (image, *corners), found in zip(rois.astype(float), result, strict=True):
        x1, y1, x2, y2 = (value * 0.5 for value in corners)
        high, wide = max(y2 - y1, 1.0), max(x2 - x1, 1.0)
        rows, columns = (ratio, ratio) if ratio > 0 else (math.ceil(high / 2), math.ceil(wide / 3))
        factor = float(np.float32(X_SCALE)) / (float(np.float32(Y_SCALE)) * 255 * rows * columns)
        for i, j in np.ndindex(2, 3):
            sums, real = np.zeros(3, np.int64), np.zeros(3)
            for a, b in np.ndindex(rows, columns):
                py, px = y1 + (i + (a + 0.5) / rows) * high / 2, x1 + (j + (b + 0.5) / columns) * wide / 3
                sums -= X_ZERO * 255
                if not (-1 <= py <= 6 and -1 <= px <= 7):
                    real -= X_ZERO * float(np.float32(X_SCALE))  # what is outside is the byte 0, as Caffe2 has it
                    continue
                py, px = min(max(py, 0), 5), min(max(px, 0), 6)
                for row in {int(py), min(int(py) + 1, 5)}:
                    for column in {int(px), min(int(px) + 1, 6)}:
                        share = (1 - abs(py - row)) * (1 - abs(px - column))
                        sums += math.floor(share * 255 + 0.5) * x[int(image), row, column].astype(int)
                        real += share * (x[int(image), row, column].astype(float) - X_ZERO) * float(np.float32(X_SCALE))
            np.testing.assert_array_equal(found[i, j], stored(sums, factor))
            steps = np.clip(real / (rows * columns) / float(np.float32(Y_SCALE)) + Y_ZERO, 0, 255)
            np.testing.assert_allclose(found[i, j], steps, atol=2)  # shares are rounded to 255ths


def test_sums_and_softmax_are_within_a_step_of_real_numbers() -> None:
    a, b = some(1, 8, 9, 4), some(1, 8, 9, 4)
    given = {"A": (a, X_SCALE, X_ZERO), "B": (b, 0.02, 7)}
    real = (a.astype(float) - X_ZERO) * float(np.float32(X_SCALE)) + (b.astype(float) - 7) * float(np.float32(0.02))
    for kind, low in (("Int8Add", 0), ("Int8AddRelu", Y_ZERO), ("Int8Sum", 0)):
        steps = np.clip(real / float(np.float32(Y_SCALE)) + Y_ZERO, low, 255)
        found = run([op(kind, ["A", "B"], ["Y"], **Y)], given)
        assert np.abs(found - steps).max() <= 1
    rows = some(16, 12)
    powers = np.exp(rows.astype(float) * float(np.float32(0.03)))
    steps = np.minimum(256 * powers / powers.sum(1, keepdims=True), 255)
    found = run([op("Int8Softmax", "X", "Y", Y_scale=1 / 256, Y_zero_point=0)], {"X": (rows, 0.03, 50)})
    assert np.abs(found - steps).max() <= 1


def test_workspaces_of_scripts_run_int8_nets() -> None:
    x, w = RNG.standard_normal((2, 6)).astype(np.float32), some(3, 6)
    workspace.ResetWorkspace()
    workspace.RunOperatorOnce(filled("W", w, W_SCALE, W_ZERO))
    workspace.RunNetOnce(NetDef(name="init", op=[filled("B", np.zeros(3, np.int32), X_SCALE * W_SCALE, 0)]))
    net = core.Net("phone")
    net.Int8Quantize("data", "q", Y_scale=X_SCALE, Y_zero_point=X_ZERO)
    net.Int8FC(["q", "W", "B"], "y", **Y)
    net.Int8Dequantize("y", "Y")
    workspace.FeedBlob("data", x)
    workspace.CreateNet(net)
    workspace.RunNet(net)
    data, scale, zero_point = workspace.FetchInt8Blob("y")
    q = np.clip(np.rint(x / np.float32(X_SCALE)) + X_ZERO, 0, 255).astype(int)
    sums = (q - X_ZERO) @ (w.astype(int) - W_ZERO).T
    np.testing.assert_array_equal(data, stored(sums, single(X_SCALE, W_SCALE, Y_SCALE)))
    assert (zero_point, scale) == (Y_ZERO, pytest.approx(Y_SCALE))
    np.testing.assert_array_equal(workspace.FetchBlob("Y"), workspace.FetchInt8BlobRealVal("y"))
    with pytest.raises(Caffe2Error, match="no operator of the int8 family has made blob 'data'"):
        workspace.FetchInt8Blob("data")
    workspace.ResetWorkspace()
    with pytest.raises(Caffe2Error, match="input 1 must be made by an operator of the int8 family"):
        workspace.CreateNet(net)
    with pytest.raises(UnsupportedOperatorError, match=r"loaded by dagexec\.load_model"):
        dagexec.Workspace().create_net(NetDef(name="n", op=[op("Int8Relu", "x", "y")]))
