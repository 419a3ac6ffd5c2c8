"""The transforms of Winograd's algorithm along one axis: each kernel is its matrix, and what finishes it."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from dagexec.ops.engines.onednn.binding import engine_library
from dagexec.ops.families.conv.toom_cook import Matrix, minimal_filter
from dagexec.ops.kernels import winograd_kernels
from dagexec.ops.kernels.winograd_kernels import ADD_OTHER, CLIP, RELU, Epilogue, line_kernel

_found = engine_library()
pytestmark = pytest.mark.skipif(_found is None or not _found.machine.can_run, reason="no kernels run here")


@pytest.mark.parametrize(
    "matrix",
    [minimal_filter(2, 3).data, minimal_filter(4, 3).data, minimal_filter(2, 3).output, minimal_filter(4, 3).output],
)
@pytest.mark.parametrize(
    "finish", [None, Epilogue(), Epilogue(True, ((ADD_OTHER, 0, 0), (CLIP, -1, 0.5))), Epilogue(False, ((RELU, 0, 0),))]
)
def test_a_kernel_is_its_matrix(matrix: Matrix, finish: Epilogue | None) -> None:
    matrix = matrix if finish is None else matrix[:3]
    rng = np.random.default_rng(0)
    read = rng.standard_normal((len(matrix[0]), 3, 40), np.float32)
    written = np.full((len(matrix) + 1, 3, 40), 7, np.float32)
    other, bias = rng.standard_normal((len(matrix), 3, 40), np.float32), rng.standard_normal(40, np.float32)
    lines = np.zeros(winograd_kernels.FIELDS, np.int64)
    lines[: len(read)] = [line.ctypes.data for line in read]
    lines[winograd_kernels.WRITTEN :][: len(matrix)] = [line.ctypes.data for line in written[:-1]]
    lines[winograd_kernels.INNER :] = 160, 3, 160, 160, bias.ctypes.data, other.ctypes.data - written.ctypes.data
    kernel = line_kernel(matrix, finish)
    assert kernel is not None
    assert ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(kernel)(lines.ctypes.data) == 0
    expected = np.tensordot(np.array(matrix, float), read.astype(float), 1)
    if finish is not None and finish.bias:
        expected = np.clip(expected + bias + other, -1, 0.5)
    elif finish is not None and finish.post_ops:
        expected = np.maximum(expected, 0)
    assert np.abs(written[:-1] - expected).max() < 5e-6
    assert (written[-1] == 7).all(), "no line but its own is written"
