"""Fourier transforms, windows and losses of ONNX, against onnxruntime, onnx's reference or NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import TensorProto

from dagexec.core.dtypes import STRING
from dagexec.errors import DagexecError
from tests.frontend.one_node import Array, assert_same, by_onnxruntime, by_reference, computed, one_node
from tests.ops.running import run_operator

RNG = np.random.default_rng(8)


def normal(*shape: int) -> Array:
    return RNG.standard_normal(shape).astype(np.float32)


TRANSFORMS: list[tuple[int, list[Any], dict[str, Any]]] = [
    (17, [normal(2, 6, 3, 1)], {"axis": 1}),
    (17, [normal(2, 6, 3, 1), np.array(9)], {"axis": 2, "onesided": 1}),
    (17, [normal(2, 6, 3, 2)], {"inverse": 1}),
    (20, [normal(2, 6, 2), np.array(5)], {}),
    (20, [normal(2, 6, 1), None, np.array(1)], {"onesided": 1}),
    (20, [normal(2, 6, 3, 2), np.array(6), np.array(-3)], {"inverse": 1}),
    (20, [normal(2, 5, 2)], {"inverse": 1, "onesided": 1}),
]


@pytest.mark.parametrize("case", range(len(TRANSFORMS)))
def test_transforms_compute_what_onnx_says(case: int) -> None:
    opset, inputs, attributes = TRANSFORMS[case]
    model = one_node("DFT", opset, inputs, **attributes)
    assert_same(computed(model, inputs), by_reference(model, inputs))


@pytest.mark.parametrize("onesided", [0, 1])
@pytest.mark.parametrize("window", [None, np.hanning(8).astype(np.float32)])
def test_transforms_of_frames_compute_what_onnxruntime_does(onesided: int, window: Array | None) -> None:
    inputs = [normal(2, 30, 1), np.array(3), window, np.array(8)]
    model = one_node("STFT", 17, inputs, onesided=onesided)
    assert_same(computed(model, inputs), by_onnxruntime(model, inputs))


@pytest.mark.parametrize("periodic", [0, 1])
@pytest.mark.parametrize("op_type", ["HannWindow", "HammingWindow", "BlackmanWindow"])
def test_windows_are_those_of_onnxruntime(op_type: str, periodic: int) -> None:
    for count in (1, 2, 9):
        model = one_node(op_type, 17, [np.array(count)], periodic=periodic, output_datatype=TensorProto.DOUBLE)
        expected = by_onnxruntime(model, [np.array(count)]) if count > 1 or periodic else [np.full(1, np.nan)]
        found = computed(model, [np.array(count)])
        assert_same(found, [np.where(np.isnan(one), found[0], one) for one in expected], atol=1e-3)


def test_mel_weights_are_those_of_onnxruntime() -> None:
    inputs = [np.array(8), np.array(64), np.array(8192), np.array(0, np.float32), np.array(4000, np.float32)]
    model = one_node("MelWeightMatrix", 17, inputs)
    assert_same(computed(model, inputs), by_onnxruntime(model, inputs))


@pytest.mark.parametrize("op_type", ["NegativeLogLikelihoodLoss", "SoftmaxCrossEntropyLoss"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("ignored", [None, 1, -5])
@pytest.mark.parametrize("weighted", [False, True])
def test_losses_compute_what_onnxruntime_does(
    op_type: str, reduction: str, ignored: int | None, weighted: bool
) -> None:
    labels = RNG.integers(0, 4, (3, 2, 5))
    if ignored is not None:
        labels[0, 0, :2] = ignored
    inputs = [normal(3, 4, 2, 5), labels, *([RNG.random(4, np.float32)] if weighted else [])]
    attributes = {} if ignored is None else {"ignore_index": ignored}
    outputs = 2 if op_type.startswith("Softmax") else 1
    model = one_node(op_type, 13, inputs, outputs, reduction=reduction, **attributes)
    assert_same(computed(model, inputs), by_onnxruntime(model, inputs))


WRONG: list[tuple[str, list[Any], dict[str, Any], str]] = [
    ("DFT", [normal(2, 6, 3)], {}, "the last axis must be real parts"),
    ("DFT", [normal(2, 6, 1)], {"axis": 2}, "the axis must be one of 3 but the last"),
    ("DFT", [normal(2, 6, 1)], {"length": -1}, "at least one element, found -1"),
    ("DFT", [normal(2, 6, 1), np.array(1 << 60)], {"length_input": 1}, "bytes|overflows|memory"),
    ("DFT", [normal(2, 6, 2)], {"onesided": 1}, "only where the signal is real"),
    ("STFT", [normal(2, 30), np.array(0)], {}, "no frames of 30 each 0"),
    ("STFT", [normal(2, 30), np.array(1), np.array(31)], {"length_input": 1}, "no frames of 31 each 1"),
    ("HannWindow", [np.array(-1)], {}, "a window cannot have -1 elements"),
    ("HannWindow", [np.array(4)], {"dtype": STRING.number}, "must be a type of numbers"),
    ("ClassLoss", [normal(2, 3), np.array([0, 3])], {}, r"a label must be in \[0, 2\], found 3"),
    ("ClassLoss", [normal(2, 3), np.array([0, 1])], {"reduction": "max"}, "'reduction' must be one of mean"),
    ("SoftmaxClassLoss", [normal(2, 3, 4), np.array([0, 1])], {}, "a class for each place"),
]


@pytest.mark.parametrize(("op_type", "inputs", "arguments", "message"), WRONG)
def test_what_does_not_fit_is_refused(op_type: str, inputs: list[Any], arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(DagexecError, match=f"{op_type} 'y0'.*({message})"):
        run_operator(op_type, inputs, **arguments)


@pytest.mark.parametrize(("edges", "message"), [((9, 1), "rising edges"), ((0, 90), "90 hertz is above what 8")])
def test_edges_that_a_spectrum_does_not_have_are_refused(edges: tuple[int, int], message: str) -> None:
    inputs = [*map(np.array, (4, 8, 100)), *(np.array(edge, np.float32) for edge in edges)]
    with pytest.raises(DagexecError, match=f"MelWeightMatrix 'y0'.*{message}"):
        computed(one_node("MelWeightMatrix", 17, inputs), inputs)
