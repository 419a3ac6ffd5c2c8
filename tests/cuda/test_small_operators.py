"""Operators of few lines on CUDA against the host: what passes, checks, counts, or maps each channel."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dagexec.core.registry import registered_engines
from tests.cuda.emulated import has_compiler, has_gpu
from tests.ops.running import check_on_cuda, operator_def, run_operator

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (has_compiler() or has_gpu()), reason="needs g++ or a GPU"),
]

RNG = np.random.default_rng(12)


def floats(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype(np.float32)


def integers(*shape: int) -> np.ndarray:
    return RNG.integers(-20, 20, shape)


IMAGE, FOUR = floats(2, 4, 3, 3), floats(4)
HOLES = np.array([1, np.nan, np.inf, -2], np.float32)
TRUTHS = RNG.random((2, 3)) < 0.5

CALLS: list[tuple[str, list[np.ndarray], int, dict[str, Any]]] = [
    ("Alias", [IMAGE], 1, {}),
    ("CopyOnDeviceLike", [IMAGE, FOUR], 1, {}),
    ("IsEmpty", [IMAGE], 1, {}),
    ("HasElements", [np.zeros((0,), np.float32), IMAGE], 1, {}),
    ("IsNaN", [HOLES], 1, {}),
    ("ReplaceNaN", [HOLES], 1, {"value": 2.5}),
    ("BitwiseAnd", [integers(2, 3), integers(3)], 1, {}),
    ("BitwiseOr", [TRUTHS, TRUTHS[:1]], 1, {}),
    ("BitwiseXor", [integers(2, 3), integers(2, 1)], 1, {}),
    ("BitwiseNot", [integers(5).astype(np.uint8)], 1, {}),
    ("BitwiseNot", [TRUTHS], 1, {}),
    ("Mod", [integers(9)], 1, {"divisor": -7}),
    ("Mod", [integers(9)], 1, {"divisor": -7, "sign_follow_divisor": 1}),
    ("Mod", [floats(4, 3), floats(3)], 1, {"sign_follow_divisor": 1}),
    ("Mod", [integers(9), np.array([0])], 1, {}),
    ("Logit", [floats(2, 3)], 1, {"eps": 0.1}),
    ("LogitGradient", [floats(2, 3), floats(2, 3)], 1, {"eps": 0.1}),
    ("ThresholdedRelu", [HOLES], 1, {}),
    ("ThresholdedReluGradient", [floats(6), floats(6)], 1, {}),
    ("Glu", [IMAGE], 1, {"dim": 1}),
    ("LpNorm", [IMAGE], 1, {"p": 1, "average": 1}),
    ("LpNorm", [IMAGE], 1, {}),
    ("LpNormGradient", [IMAGE, floats(1)], 1, {"p": 1}),
    ("LpNormGradient", [IMAGE, floats(1)], 1, {"average": 1}),
    ("Moments", [IMAGE], 2, {"axes": [0, 2], "keepdims": 0}),
    ("MomentsGradient", [floats(4, 3), floats(4, 3), IMAGE, floats(4, 3)], 1, {"axes": [0, 2], "keepdims": 0}),
    ("ElementwiseLinear", [floats(3, 4), FOUR, FOUR], 1, {}),
    ("ElementwiseLinearGradient", [floats(3, 4), floats(3, 4), FOUR], 3, {}),
    ("AffineChannel", [IMAGE, FOUR, FOUR], 1, {}),
    ("AffineChannelGradient", [IMAGE, IMAGE, FOUR], 3, {"is_learnable": 1}),
    ("RowMul", [floats(4, 2, 2), FOUR], 1, {}),
    ("ReduceTailSum", [floats(4, 2, 2)], 1, {}),
    ("Range", [np.array([7])], 1, {}),
    ("Range", [np.array([1.5]), np.array([-3.0]), np.array([-0.5])], 1, {}),
    ("LengthsRangeFill", [np.array([2, 0, 3], np.int32)], 1, {}),
    ("Summarize", [IMAGE], 1, {}),
    ("SparseLengthsMean", [floats(4, 3), np.array([0, 3, 3]), np.array([2, 0, 1], np.int32)], 1, {}),
    ("BooleanMask", [floats(4, 3), np.array([True, False, True, True])], 2, {}),
    ("FloatToFused4BitRowwiseQuantized", [floats(4, 6)], 1, {}),
    ("SegmentIdsToLengths", [np.array([0, 0, 2])], 1, {}),
]


@pytest.mark.parametrize(
    ("op_type", "inputs", "outputs", "arguments"),
    [pytest.param(*call, id=f"{number}-{call[0]}") for number, call in enumerate(CALLS)],
)
def test_on_cuda_it_computes_what_the_host_does(
    op_type: str, inputs: list[np.ndarray], outputs: int, arguments: dict[str, Any]
) -> None:
    expected = run_operator(op_type, list(inputs), outputs, **arguments)
    names = [f"x{index}" for index in range(len(inputs))]
    definition = operator_def(op_type, names, [f"y{index}" for index in range(outputs)], **arguments)
    assert registered_engines(op_type, "cuda")
    check_on_cuda(definition, dict(zip(names, inputs, strict=True)), expected)
