"""Conversions with engine ONEDNN: NumPy's bytes from the kernels, NumPy for the rest, and an exact GELU in bfloat16."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from tests.ops.kernels.running import needs_kernels
from tests.ops.onednn.engine import AVX512, run_fallback, run_onednn
from tests.ops.running import Array, run_operator

pytestmark = needs_kernels


def normal(seed: int, *shape: int) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("pieces", [1, 2])
@pytest.mark.parametrize(("source", "target"), [(np.float32, "bfloat16"), (ml_dtypes.bfloat16, "float32"),
                                                (np.int32, "float32"), (np.bool_, "bfloat16")])  # fmt: skip
def test_a_cast_has_the_bytes_of_numpy(source: npt.DTypeLike, target: str, pieces: int) -> None:
    x = (normal(0, 3, 5, 37) * 9).astype(source)
    (expected,) = run_operator("Cast", [x], to=target)
    (found,) = run_onednn("Cast", [x], to=target, pieces=pieces)
    assert (found.dtype, found.tobytes()) == (expected.dtype, expected.tobytes())


@pytest.mark.parametrize(("shape", "target"), [((5,), "bfloat16"), ((64,), "int32"), ((64,), "float64")])
def test_numpy_casts_what_is_short_or_has_no_kernel(shape: tuple[int, ...], target: str) -> None:
    x = normal(0, *shape) * 9
    (expected,) = run_operator("Cast", [x], to=target)
    (found,), _ = run_fallback("Cast", [x], to=target)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("scale", [0.0, 1.0, 1e-3])
def test_quantization_by_the_range_has_the_bytes_of_numpy(scale: float) -> None:
    x = normal(0, 7, 31) * np.float32(scale) + np.float32(scale)
    expected = run_operator("DynamicQuantizeLinear", [x], outputs=3)
    for one, other in zip(run_onednn("DynamicQuantizeLinear", [x], outputs=3), expected, strict=True):
        assert (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())


def test_a_layer_in_bfloat16_has_the_exact_gelu() -> None:
    """Of the product rounded to bfloat16, rounded once more; the library's own is off by 5e-4 near 5."""
    x, w, b = (normal(seed, *shape).astype(ml_dtypes.bfloat16) for seed, shape in enumerate([(9, 32), (48, 32), (48,)]))
    product, found = (
        run_onednn("FusedFC" if post_ops else "FC", [x, w, b], lanes=AVX512, **post_ops)[0]
        for post_ops in ({}, {"post_ops": ["gelu_erf"]})
    )
    halves = product.astype(np.float64)
    exact = halves * (1 + np.vectorize(math.erf)(halves / math.sqrt(2))) / 2
    np.testing.assert_allclose(found.astype(np.float64), exact, rtol=2**-8, atol=3e-7)
