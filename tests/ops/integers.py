"""Quantized operators computed with 64-bit integers, element by element, for the tests of the fast ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


def convolution_sums(
    x: Array, weights: Array, zero_point: int, stride: int = 1, pad: int = 0, dilation: int = 1, group: int = 1
) -> Array:
    """Sums of (x - zero_point) * weights over each window of an N, C, H, W image; weights M, C/G, KH, KW."""
    centered = x.astype(np.int64) - zero_point
    padded = np.pad(centered, ((0, 0), (0, 0), (pad, pad), (pad, pad)))
    filters, inner, kh, kw = weights.shape
    height = (padded.shape[2] - dilation * (kh - 1) - 1) // stride + 1
    width = (padded.shape[3] - dilation * (kw - 1) - 1) // stride + 1
    sums = np.zeros((len(x), filters, height, width), np.int64)
    for m in range(filters):
        first = m // (filters // group) * inner
        for c in range(inner):
            for i in range(kh):
                for j in range(kw):
                    rows = slice(i * dilation, i * dilation + (height - 1) * stride + 1, stride)
                    columns = slice(j * dilation, j * dilation + (width - 1) * stride + 1, stride)
                    sums[:, m] += padded[:, first + c, rows, columns] * int(weights[m, c, i, j])
    return sums


def requantized(values: Array, zero_point: int, dtype: Any) -> Array:
    """Rounded to the nearest, ties to even, shifted and saturated, by integers."""
    limits = np.iinfo(dtype)
    whole = np.floor(values.astype(np.float64))
    fraction = values.astype(np.float64) - whole
    up = (fraction > 0.5) | ((fraction == 0.5) & (whole % 2 == 1))
    return np.clip(whole.astype(np.int64) + up + zero_point, limits.min, limits.max).astype(dtype)
