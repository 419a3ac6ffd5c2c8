"""onnxruntime's operators (com.microsoft) on packed weights with a scale a block, against onnxruntime."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dagexec.errors import ModelFormatError, UnsupportedOperatorError
from dagexec.frontend.onnx import from_model_proto
from tests.frontend.test_onnx_microsoft import by_onnxruntime, computed, normal, of_microsoft
from tests.frontend.test_onnx_operators import Case, Const, floats
from tests.frontend.test_onnx_quantized import whole

RNG = np.random.default_rng(31)
K, N, BLOCK = 40, 6, 16
BLOCKS = 3
A = normal(2, 3, K)


def packed(bits: int) -> Const:
    return Const(whole((N, BLOCKS, BLOCK * bits // 8), np.uint8))


def sizes(bits: int, **attributes: int) -> dict[str, Any]:
    return {"K": K, "N": N, "bits": bits, "block_size": BLOCK, **attributes}


SCALES = Const(RNG.uniform(0.01, 0.1, (N, BLOCKS)).astype(np.float32))
TABLE = Const(RNG.uniform(0.01, 0.1, (11, 2)).astype(np.float32))
INDICES = RNG.integers(-11, 11, (2, 3))

CASES = [
    Case("MatMulNBits", 21, (A, packed(4), SCALES), sizes(4)),
    Case("MatMulNBits", 21, (A, packed(8), SCALES, Const(whole((N, BLOCKS), np.uint8))), sizes(8)),
    Case("MatMulNBits", 21, (A, packed(4), SCALES, Const(whole((N, 2), np.uint8)), None, floats(1, 2, 3, 4, 5, 6)),
         sizes(4, accuracy_level=1)),
    Case("MatMulNBits", 21, (A, packed(4), SCALES, Const(RNG.uniform(0, 15, (N, BLOCKS)).astype(np.float32)),
                             Const(RNG.integers(0, BLOCKS, 48).astype(np.int32))), sizes(4)),
    Case("GatherBlockQuantized", 21, (Const(whole((11, 16), np.uint8)), INDICES, TABLE), {"block_size": 16}),
    Case("GatherBlockQuantized", 21, (Const(whole((11, 16), np.uint8)), INDICES, TABLE,
                                      Const(whole((11, 1), np.uint8))), {"block_size": 16, "bits": 4}),
    Case("GatherBlockQuantized", 21, (Const(whole((11, 32), np.uint8)), INDICES, TABLE), {"block_size": 16, "bits": 8}),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_node_computes_what_onnxruntime_does(case: Case) -> None:
    proto, feeds = of_microsoft(case)
    [found], [expected] = computed(proto, feeds), by_onnxruntime(proto, feeds)
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (Case("MatMulNBits", 21, (A, packed(8), SCALES), sizes(4)), "6 x 3 blocks of 16 integers of 4 bits need as"),
        (Case("MatMulNBits", 21, (A, packed(4), SCALES), sizes(4) | {"K": 0}), "attribute 'K' must be at least 1"),
        (Case("MatMulNBits", 21, (A, packed(4), SCALES, None, Const(np.full(K, 3))), sizes(4)), "a block below 3"),
        (Case("MatMulNBits", 21, (A, packed(4), SCALES, Const(whole((N, 3), np.uint8))), sizes(4)), "other zero"),
        (Case("GatherBlockQuantized", 21, (Const(whole((11, 16), np.uint8)), INDICES, TABLE), {"block_size": 32}),
         "do not fit blocks of 32"),
    ],
    ids=str,
)  # fmt: skip
def test_sizes_that_do_not_fit_are_named(case: Case, message: str) -> None:
    with pytest.raises(ModelFormatError, match=message):
        from_model_proto(of_microsoft(case)[0])


def test_weights_that_are_computed_are_refused() -> None:
    proto, _ = of_microsoft(Case("MatMulNBits", 21, (A, packed(4).array, SCALES), sizes(4)))
    with pytest.raises(UnsupportedOperatorError, match="its weights must be a constant"):
        from_model_proto(proto, foreign=False)
