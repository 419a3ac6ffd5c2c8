"""cuBLAS's own functions, by ctypes.

CuPy's wrappers of them put every product on CuPy's current stream, whatever stream the handle was given, and refuse a
stream that is captured. These do neither: a handle works on the stream `setStream` gave it. Names and parameters are
CuPy's, so that either can stand where the other does.
"""

from __future__ import annotations

import ctypes
from typing import Any

from dagexec.devices.cuda.binding import cublas

_STATUS = {
    1: "CUBLAS_STATUS_NOT_INITIALIZED",
    3: "CUBLAS_STATUS_ALLOC_FAILED",
    7: "CUBLAS_STATUS_INVALID_VALUE",
    8: "CUBLAS_STATUS_ARCH_MISMATCH",
    11: "CUBLAS_STATUS_MAPPING_ERROR",
    13: "CUBLAS_STATUS_EXECUTION_FAILED",
    14: "CUBLAS_STATUS_INTERNAL_ERROR",
    15: "CUBLAS_STATUS_NOT_SUPPORTED",
    16: "CUBLAS_STATUS_LICENSE_ERROR",
}


class CUBLASError(RuntimeError):
    """cuBLAS returned a status other than success."""

    def __init__(self, status: int) -> None:
        super().__init__(_STATUS.get(status, f"status {status}"))
        self.status = status


CUBLAS_OP_N, CUBLAS_OP_T = 0, 1
CUBLAS_POINTER_MODE_HOST, CUBLAS_POINTER_MODE_DEVICE = 0, 1
CUBLAS_GEMM_DEFAULT = -1
CUBLAS_COMPUTE_16F, CUBLAS_COMPUTE_32F, CUBLAS_COMPUTE_64F, CUBLAS_COMPUTE_32I = 64, 68, 70, 72


def create() -> int:
    """A new handle, for the current device."""
    handle = ctypes.c_void_p()
    _check(cublas().cublasCreate_v2(ctypes.byref(handle)))
    return int(handle.value or 0)


def destroy(handle: int) -> None:
    """Give a handle up."""
    _check(cublas().cublasDestroy_v2(handle))


def setStream(handle: int, stream: int) -> None:  # noqa: N802 - cuBLAS's name, as below
    """Products of `handle` go to `stream` from now on."""
    _check(cublas().cublasSetStream_v2(handle, stream))


def setWorkspace(handle: int, workspace: int, size: int) -> None:  # noqa: N802
    """Products of `handle` use this memory of the device until `setStream` is called."""
    _check(cublas().cublasSetWorkspace_v2(handle, workspace, size))


def setPointerMode(handle: int, mode: int) -> None:  # noqa: N802
    """Where alpha and beta are."""
    _check(cublas().cublasSetPointerMode_v2(handle, mode))


def setMathMode(handle: int, mode: int) -> None:  # noqa: N802
    """What precision `handle` may give up."""
    _check(cublas().cublasSetMathMode(handle, mode))


def gemmEx(handle: int, *arguments: Any) -> None:  # noqa: N802
    """C = alpha op(A) op(B) + beta C; the parameters are cublasGemmEx's."""
    _check(cublas().cublasGemmEx(handle, *arguments))


def gemmStridedBatchedEx(handle: int, *arguments: Any) -> None:  # noqa: N802
    """As `gemmEx`, for matrices in equal steps; the parameters are cublasGemmStridedBatchedEx's."""
    _check(cublas().cublasGemmStridedBatchedEx(handle, *arguments))


def _check(status: int) -> None:
    if status:
        raise CUBLASError(status)
