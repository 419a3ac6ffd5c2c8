"""cuBLAS by NumPy: the library as ctypes sees it, and CuPy's module over it."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np

from tests.cuda.emulated.errors import EmulationError
from tests.cuda.emulated.machine import Machine
from tests.cuda.emulated.races import Touch
from tests.cuda.emulated.streams import Classes
from tests.cuda.emulated.work import Operation

SUCCESS, NOT_INITIALIZED, INVALID_VALUE, NOT_SUPPORTED, EXECUTION_FAILED = 0, 1, 7, 15, 13
_NAMES = {1: "CUBLAS_STATUS_NOT_INITIALIZED", 7: "CUBLAS_STATUS_INVALID_VALUE", 13: "CUBLAS_STATUS_EXECUTION_FAILED",
          15: "CUBLAS_STATUS_NOT_SUPPORTED"}  # fmt: skip
_R_32F, _R_64F, _R_16F, _R_8I, _R_32I, _R_16BF = 0, 1, 2, 3, 10, 14
_TYPES: dict[int, Any] = {_R_32F: np.float32, _R_64F: np.float64, _R_16F: np.float16, _R_8I: np.int8, _R_32I: np.int32,
                          _R_16BF: ml_dtypes.bfloat16}  # fmt: skip
_16F, _32F, _32F_FAST_16F, _32F_FAST_16BF, _32F_FAST_TF32, _64F, _32I = 64, 68, 74, 75, 77, 70, 72
_ACCUMULATED: dict[int, Any] = {64: np.float16, 65: np.float16, 68: np.float32, 69: np.float32, 70: np.float64,
                                71: np.float64, 72: np.int32, 73: np.int32, 74: np.float32, 75: np.float32,
                                77: np.float32}  # fmt: skip
_OFFERED = {
    np.float16: {(_R_16F, _R_16F)},
    np.float32: {(_R_32F, _R_32F), (_R_16F, _R_16F), (_R_16F, _R_32F), (_R_16BF, _R_16BF), (_R_16BF, _R_32F),
                 (_R_8I, _R_32F)},
    np.float64: {(_R_64F, _R_64F)},
    np.int32: {(_R_8I, _R_32I)},
}  # fmt: skip
_OPERATIONS = (0, 1, 2)


class CUBLASError(RuntimeError):
    """`cupy.cuda.cublas.CUBLASError`."""

    def __init__(self, status: int) -> None:
        super().__init__(_NAMES.get(status, str(status)))
        self.status = status


@dataclass
class Handle:
    """A handle of cuBLAS: one thread at a time, one device."""

    device: int
    stream: int = 0
    pointer_mode: int = 0
    math_mode: int = 0
    busy: threading.Lock = field(default_factory=threading.Lock)


@dataclass(frozen=True)
class Matrices:
    """Matrices stored by columns, `stride` elements apart."""

    pointer: int
    dtype: Any
    rows: int
    columns: int
    leading: int
    stride: int = 0
    count: int = 1

    def view(self) -> np.ndarray[Any, Any]:
        """All of them, as an array of count x rows x columns over the memory itself."""
        item = np.dtype(self.dtype).itemsize
        if not self.rows * self.columns * self.count:
            return np.empty((self.count, self.rows, self.columns), self.dtype)
        raw = np.frombuffer((ctypes.c_ubyte * item).from_address(self.pointer), np.uint8)
        return np.lib.stride_tricks.as_strided(
            raw.view(self.dtype), (self.count, self.rows, self.columns), (self.stride * item, item, self.leading * item)
        )

    def touches(self, machine: Machine, device: int, writes: bool) -> list[Touch]:
        """What is read or written of them: whole columns."""
        item = np.dtype(self.dtype).itemsize
        if not self.rows * self.columns * self.count:
            return []
        packed = self.leading == self.rows or self.columns == 1
        if packed and (self.count == 1 or self.stride == self.rows * self.columns):
            parts = [(0, self.rows * self.columns * self.count)]
        elif packed or self.count * self.columns > 512:
            parts = [(i * self.stride, (self.columns - 1) * self.leading + self.rows) for i in range(self.count)]
        else:
            parts = [
                (i * self.stride + j * self.leading, self.rows) for i in range(self.count) for j in range(self.columns)
            ]
        return [machine.device_touch(self.pointer + begin * item, size * item, writes, device) for begin, size in parts]


class CublasLibrary:
    """libcublas: functions that take what C takes and return a status."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def cublasCreate_v2(self, handle: Any) -> int:
        self._machine.called("cublasCreate")
        if self._machine.is_capturing:
            return NOT_INITIALIZED
        handle._obj.value = self._machine.new_handle(Handle(self._machine.device))
        return SUCCESS

    def cublasDestroy_v2(self, handle: int) -> int:
        return self._with(handle, lambda _found: self._machine.drop_handle(_number(handle)))

    def cublasGetVersion_v2(self, handle: int, version: Any) -> int:
        version._obj.value = 120900
        return SUCCESS

    def cublasSetStream_v2(self, handle: int, stream: int) -> int:
        return self._with(handle, lambda found: setattr(found, "stream", _number(stream)))

    def cublasSetPointerMode_v2(self, handle: int, mode: int) -> int:
        return self._with(handle, lambda found: setattr(found, "pointer_mode", _number(mode)))

    def cublasSetMathMode(self, handle: int, mode: int) -> int:
        return self._with(handle, lambda found: setattr(found, "math_mode", _number(mode)))

    def cublasSetWorkspace_v2(self, handle: int, workspace: int, size: int) -> int:
        return self._with(handle, lambda found: None)

    def cublasGemmEx(
        self, handle: Any, transa: Any, transb: Any, m: Any, n: Any, k: Any, alpha: Any, A: Any, Atype: Any, lda: Any,
        B: Any, Btype: Any, ldb: Any, beta: Any, C: Any, Ctype: Any, ldc: Any, computeType: Any, algo: Any,
    ) -> int:  # fmt: skip
        return self.cublasGemmStridedBatchedEx(
            handle, transa, transb, m, n, k, alpha, A, Atype, lda, 0, B, Btype, ldb, 0, beta, C, Ctype, ldc, 0, 1,
            computeType, algo,
        )  # fmt: skip

    def cublasGemmStridedBatchedEx(self, handle: Any, *given: Any) -> int:
        numbers = [_number(one) for one in given]
        return self._with(handle, lambda found: self._gemm(found, _number(handle), *numbers))

    def _with(self, handle: Any, use: Callable[[Handle], object]) -> int:
        """Do something with a handle. Raises EmulationError when another thread does so at this moment."""
        found = self._machine._handles.get(_number(handle))
        if not isinstance(found, Handle):
            return NOT_INITIALIZED
        if found.device != self._machine.device:
            raise EmulationError(f"a cuBLAS handle of device {found.device} is used on device {self._machine.device}")
        if not found.busy.acquire(blocking=False):
            raise EmulationError("a cuBLAS handle is used by two threads at once")
        try:
            status = use(found)
        finally:
            found.busy.release()
        return status if isinstance(status, int) else SUCCESS

    def _gemm(
        self, handle: Handle, number: int, transa: int, transb: int, m: int, n: int, k: int, alpha: int,
        a: int, a_type: int, lda: int, stride_a: int, b: int, b_type: int, ldb: int, stride_b: int, beta: int,
        c: int, c_type: int, ldc: int, stride_c: int, count: int, compute: int, algo: int,
    ) -> int:  # fmt: skip
        machine = self._machine
        machine.called("cublasGemm", handle.stream, number, transa, transb, m, n, k, count)
        rows_a, columns_a = (m, k) if transa == 0 else (k, m)
        rows_b, columns_b = (k, n) if transb == 0 else (n, k)
        if min(m, n, k, count) < 0 or transa not in _OPERATIONS or transb not in _OPERATIONS:
            return INVALID_VALUE
        if lda < max(1, rows_a) or ldb < max(1, rows_b) or ldc < max(1, m):
            return INVALID_VALUE
        accumulated = _ACCUMULATED.get(compute)
        if accumulated is None:
            return INVALID_VALUE
        if a_type != b_type or (a_type, c_type) not in _OFFERED[accumulated]:
            return NOT_SUPPORTED
        if not m * n * count:
            return SUCCESS
        first = Matrices(a, _TYPES[a_type], rows_a, columns_a, lda, stride_a, count)
        second = Matrices(b, _TYPES[b_type], rows_b, columns_b, ldb, stride_b, count)
        result = Matrices(c, _TYPES[c_type], m, n, ldc, stride_c, count)
        scalars: Callable[[], list[Any]] = lambda: [  # noqa: E731
            np.frombuffer((ctypes.c_ubyte * np.dtype(accumulated).itemsize).from_address(at), accumulated)[0]
            for at in (alpha, beta)
        ]
        known = scalars() if handle.pointer_mode == 0 else None

        def step() -> None:
            x, y = known or scalars()
            product = _product(first.view(), second.view(), transa, transb, accumulated, compute)
            target = result.view()
            total = x * product if k else np.zeros_like(product)
            if y != 0:
                total = total + y * target.astype(accumulated)
            target[...] = total

        # What is read of C when beta is not 0 is the same as what is written.
        touches = [
            *(first.touches(machine, handle.device, False) if k else ()),
            *(second.touches(machine, handle.device, False) if k else ()),
            *result.touches(machine, handle.device, True),
        ]
        machine.submit(handle.stream, Operation("cublasGemm", step, handle.device, touches, computes=True))
        return SUCCESS

    def gemv(
        self, handle: int, dtype: Any, trans: int, m: int, n: int, alpha: int, a: int, lda: int, x: int, incx: int,
        beta: int, y: int, incy: int,
    ) -> int:  # fmt: skip
        """y = alpha op(A) x + beta y."""
        kind = {np.float32: _R_32F, np.float64: _R_64F}[dtype]
        if incx <= 0 or incy <= 0:
            return INVALID_VALUE if not (incx and incy) else NOT_SUPPORTED
        rows, inner = (m, n) if trans == 0 else (n, m)
        # A vector with an increment is a row of a matrix stored by columns.
        return self.cublasGemmStridedBatchedEx(
            handle, 0, int(trans == 0), 1, rows, inner, alpha, x, kind, incx, 0, a, kind, lda, 0, beta, y, kind, incy,
            0, 1, _32F if dtype is np.float32 else _64F, -1,
        )  # fmt: skip


def _number(value: Any) -> int:
    found = getattr(value, "value", value)
    return 0 if found is None else int(found)


def _product(
    a: np.ndarray[Any, Any], b: np.ndarray[Any, Any], transa: int, transb: int, accumulated: Any, compute: int
) -> np.ndarray[Any, Any]:
    factors = []
    for matrix, turned in ((a, transa), (b, transb)):
        wide = np.asarray(matrix.swapaxes(1, 2) if turned else matrix)
        wide = wide.astype(np.float32 if accumulated is np.float16 else accumulated)
        factors.append(_tf32(wide) if compute == _32F_FAST_TF32 and matrix.dtype == np.float32 else wide)
    found = np.matmul(*factors)
    return found.astype(accumulated)


def _tf32(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Rounded to 10 bits of fraction, to nearest even."""
    bits = np.ascontiguousarray(x).view(np.uint32)
    rounded = (bits + np.uint32(0xFFF) + ((bits >> np.uint32(13)) & np.uint32(1))) & np.uint32(0xFFFFE000)
    return np.where(np.isfinite(x), rounded.view(np.float32), x)


class CublasModule:
    """`cupy.cuda.cublas`.

    CuPy's functions put their work on CuPy's current stream, whatever stream the handle was given, and refuse a stream
    that is captured. Here a product that so would go elsewhere than its handle says is an error.
    """

    CUBLASError = CUBLASError
    CUBLAS_OP_N, CUBLAS_OP_T, CUBLAS_OP_C = 0, 1, 2
    CUBLAS_POINTER_MODE_HOST, CUBLAS_POINTER_MODE_DEVICE = 0, 1
    CUBLAS_DEFAULT_MATH, CUBLAS_TENSOR_OP_MATH = 0, 1
    CUBLAS_GEMM_DEFAULT, CUBLAS_GEMM_DFALT, CUBLAS_GEMM_DEFAULT_TENSOR_OP = -1, -1, 99
    CUBLAS_COMPUTE_16F, CUBLAS_COMPUTE_16F_PEDANTIC = 64, 65
    CUBLAS_COMPUTE_32F, CUBLAS_COMPUTE_32F_PEDANTIC = 68, 69
    CUBLAS_COMPUTE_32F_FAST_16F, CUBLAS_COMPUTE_32F_FAST_16BF, CUBLAS_COMPUTE_32F_FAST_TF32 = 74, 75, 77
    CUBLAS_COMPUTE_64F, CUBLAS_COMPUTE_64F_PEDANTIC = 70, 71
    CUBLAS_COMPUTE_32I, CUBLAS_COMPUTE_32I_PEDANTIC = 72, 73

    def __init__(self, library: CublasLibrary, classes: Classes) -> None:
        self._library, self._classes = library, classes
        self._machine = library._machine

    def create(self) -> int:
        handle = ctypes.c_void_p()
        self.check_status(self._library.cublasCreate_v2(ctypes.byref(handle)))
        assert handle.value is not None
        return handle.value

    def destroy(self, handle: int) -> None:
        self.check_status(self._library.cublasDestroy_v2(handle))

    def check_status(self, status: int) -> None:
        if status:
            raise CUBLASError(status)

    def getVersion(self, handle: int) -> int:
        return 120900

    def setStream(self, handle: int, stream: int) -> None:
        if stream and self._machine.stream(stream).capture is not None:
            raise NotImplementedError("calling cuBLAS API during stream capture is currently unsupported")
        self.check_status(self._library.cublasSetStream_v2(handle, stream))

    def getStream(self, handle: int) -> int:
        return self._found(handle).stream

    def setMathMode(self, handle: int, mode: int) -> None:
        self.check_status(self._library.cublasSetMathMode(handle, mode))

    def getMathMode(self, handle: int) -> int:
        return self._found(handle).math_mode

    def setPointerMode(self, handle: int, mode: int) -> None:
        self.check_status(self._library.cublasSetPointerMode_v2(handle, mode))

    def getPointerMode(self, handle: int) -> int:
        return self._found(handle).pointer_mode

    def _found(self, handle: int) -> Handle:
        found: Handle = self._machine.handle(handle, Handle)
        return found

    def _to_current_stream(self, handle: int) -> None:
        current = self._classes.get_current_stream().ptr
        wanted = self._found(handle).stream
        self.setStream(handle, current)
        if wanted not in (0, current):
            raise EmulationError(
                f"CuPy's cuBLAS functions use CuPy's current stream ({current:#x}), not the handle's ({wanted:#x}): "
                "call cuBLAS by dagexec.devices.cuda.cublas_library"
            )

    def gemmEx(
        self, handle: int, transa: int, transb: int, m: int, n: int, k: int, alpha: int, A: int, Atype: int, lda: int,
        B: int, Btype: int, ldb: int, beta: int, C: int, Ctype: int, ldc: int, computeType: int, algo: int,
    ) -> None:  # fmt: skip
        self._to_current_stream(handle)
        self.check_status(
            self._library.cublasGemmEx(
                handle,
                transa,
                transb,
                m,
                n,
                k,
                alpha,
                A,
                Atype,
                lda,
                B,
                Btype,
                ldb,
                beta,
                C,
                Ctype,
                ldc,
                computeType,
                algo,
            )
        )

    def gemmStridedBatchedEx(
        self, handle: int, transa: int, transb: int, m: int, n: int, k: int, alpha: int, A: int, Atype: int, lda: int,
        strideA: int, B: int, Btype: int, ldb: int, strideB: int, beta: int, C: int, Ctype: int, ldc: int, strideC: int,
        batchCount: int, computeType: int, algo: int,
    ) -> None:  # fmt: skip
        self._to_current_stream(handle)
        self.check_status(
            self._library.cublasGemmStridedBatchedEx(
                handle,
                transa,
                transb,
                m,
                n,
                k,
                alpha,
                A,
                Atype,
                lda,
                strideA,
                B,
                Btype,
                ldb,
                strideB,
                beta,
                C,
                Ctype,
                ldc,
                strideC,
                batchCount,
                computeType,
                algo,
            )
        )

    def sgemm(
        self, handle: int, transa: int, transb: int, m: int, n: int, k: int, alpha: int, A: int, lda: int, B: int,
        ldb: int, beta: int, C: int, ldc: int,
    ) -> None:  # fmt: skip
        self.gemmEx(handle, transa, transb, m, n, k, alpha, A, 0, lda, B, 0, ldb, beta, C, 0, ldc, _32F, -1)

    def dgemm(
        self, handle: int, transa: int, transb: int, m: int, n: int, k: int, alpha: int, A: int, lda: int, B: int,
        ldb: int, beta: int, C: int, ldc: int,
    ) -> None:  # fmt: skip
        self.gemmEx(handle, transa, transb, m, n, k, alpha, A, 1, lda, B, 1, ldb, beta, C, 1, ldc, _64F, -1)

    def sgemmStridedBatched(
        self, handle: int, transa: int, transb: int, m: int, n: int, k: int, alpha: int, A: int, lda: int, strideA: int,
        B: int, ldb: int, strideB: int, beta: int, C: int, ldc: int, strideC: int, batchCount: int,
    ) -> None:  # fmt: skip
        self.gemmStridedBatchedEx(
            handle, transa, transb, m, n, k, alpha, A, 0, lda, strideA, B, 0, ldb, strideB, beta, C, 0, ldc, strideC,
            batchCount, _32F, -1,
        )  # fmt: skip

    def dgemmStridedBatched(
        self, handle: int, transa: int, transb: int, m: int, n: int, k: int, alpha: int, A: int, lda: int, strideA: int,
        B: int, ldb: int, strideB: int, beta: int, C: int, ldc: int, strideC: int, batchCount: int,
    ) -> None:  # fmt: skip
        self.gemmStridedBatchedEx(
            handle, transa, transb, m, n, k, alpha, A, 1, lda, strideA, B, 1, ldb, strideB, beta, C, 1, ldc, strideC,
            batchCount, _64F, -1,
        )  # fmt: skip

    def sgemv(
        self, handle: int, trans: int, m: int, n: int, alpha: int, A: int, lda: int, x: int, incx: int, beta: int,
        y: int, incy: int,
    ) -> None:  # fmt: skip
        self._to_current_stream(handle)
        self.check_status(self._library.gemv(handle, np.float32, trans, m, n, alpha, A, lda, x, incx, beta, y, incy))

    def dgemv(
        self, handle: int, trans: int, m: int, n: int, alpha: int, A: int, lda: int, x: int, incx: int, beta: int,
        y: int, incy: int,
    ) -> None:  # fmt: skip
        self._to_current_stream(handle)
        self.check_status(self._library.gemv(handle, np.float64, trans, m, n, alpha, A, lda, x, incx, beta, y, incy))
