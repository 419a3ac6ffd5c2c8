"""Matrix products by cuBLAS, as steps prepared once.

Every stream has a handle of its own: a handle's products are reproducible as long as one stream uses it, so results do
not depend on what other streams do. cuBLAS stores matrices by columns; ours are stored by rows, so a product A B is
asked for as B^T A^T, the same memory read the other way. Within a step nothing is allocated and nothing is waited for,
so that it can be captured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt

from dagexec.core.operator import Step, nothing_to_do
from dagexec.devices.cuda import cublas_library as cublas
from dagexec.devices.cuda.arrays import address
from dagexec.devices.cuda.binding import cupy
from dagexec.devices.cuda.current import current
from dagexec.errors import DeviceError
from dagexec.platform.records import dataclass

Array = npt.NDArray[Any]

DISALLOW_REDUCED_PRECISION_REDUCTION = 16
"""The math mode (CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION) in which parts of a sum are never 16-bit floats."""

WORKSPACE, LARGE_WORKSPACE = 4 << 20, 32 << 20
"""Bytes that NVIDIA recommends for a handle; the larger one from compute capability 9 on."""

MAX_CALLS = 256
"""Products of stacks that take more calls of cuBLAS than this are another kernel's."""

_DATA_TYPES = {"float32": "CUDA_R_32F", "float64": "CUDA_R_64F", "float16": "CUDA_R_16F", "bfloat16": "CUDA_R_16BF"}
_LARGEST = (1 << 31) - 1
_HANDLE = "cuBLAS handle"


class Handle:
    """A handle of cuBLAS for one stream, with a workspace of its own, so that a capture needs no memory for it.

    Attributes:
        pointer: the cublasHandle_t.
    """

    def __init__(self, stream: Any) -> None:
        """Raises DeviceError when cuBLAS gives none."""
        runtime = self._runtime = stream.runtime
        try:
            with runtime.guard():
                major = cupy().cuda.runtime.getDeviceProperties(runtime.device.index)["major"]
                self.pointer = cublas.create()
                self._workspace = runtime.allocate(LARGE_WORKSPACE if major >= 9 else WORKSPACE)
                cublas.setStream(self.pointer, stream.pointer)
                cublas.setWorkspace(self.pointer, address(self._workspace), self._workspace.nbytes)
                cublas.setPointerMode(self.pointer, cublas.CUBLAS_POINTER_MODE_HOST)
                cublas.setMathMode(self.pointer, DISALLOW_REDUCED_PRECISION_REDUCTION)
        except cublas.CUBLASError as error:
            raise DeviceError(f"{stream.name}: cuBLAS cannot be used: {error}") from error

    @property
    def nbytes(self) -> int:
        """Bytes of device memory that it holds."""
        return int(self._workspace.nbytes)

    def close(self) -> None:
        """Give the handle up; of a device that has failed it is gone already."""
        with suppress(RuntimeError), self._runtime.guard():
            cublas.destroy(self.pointer)


def current_handle() -> int:
    """The handle of the calling thread's current stream, made at its first use. Raises DeviceError without a stream."""
    stream = current.stream
    if stream is None:
        raise DeviceError("a matrix product was requested outside any CUDA stream")
    return _handle_of(stream).pointer


def _handle_of(stream: Any) -> Handle:
    handle: Handle = stream.once(_HANDLE, lambda: _new_handle(stream))
    return handle


def _new_handle(stream: Any) -> Handle:
    stream.runtime.once(_HANDLE, _HandlesBeforeCaptures)
    return Handle(stream)


class _HandlesBeforeCaptures:
    """Stands for the use of cuBLAS on a device: a handle cannot be made within a capture, which may need one."""

    def before_capture(self, streams: Sequence[Any]) -> None:
        """Make the handles of these streams."""
        for stream in streams:
            _handle_of(stream)


def multiplies(a: Array, b: Array, c: Array) -> bool:
    """True when `matrix_product` computes products of such arrays."""
    if a.dtype.name not in _DATA_TYPES or a.dtype != b.dtype:
        return False
    if c.dtype != a.dtype and not (a.dtype.itemsize == 2 and c.dtype == np.float32):
        return False
    problem = _problem(a, b, c)
    return problem is not None and len(problem.offsets()) <= MAX_CALLS


@dataclass(frozen=True)
class _Stack:
    """A stack of matrices stored by rows (by columns if `turned`), with strides in elements.

    Attributes:
        start: the address of its first element.
        leading: from row to row (column to column).
        steps: from matrix to matrix, along each axis of the stack.
    """

    start: int
    itemsize: int
    turned: bool
    leading: int
    steps: tuple[int, ...]


@dataclass(frozen=True)
class _Problem:
    """C = A B for stacks of matrices of m x k and k x n, C stored by rows."""

    a: _Stack
    b: _Stack
    c: _Stack
    m: int
    n: int
    k: int
    sizes: tuple[int, ...]

    @property
    def batch_axis(self) -> int | None:
        """The axis of the stacks that one call goes along: the longest; None for single matrices."""
        return max(range(len(self.sizes)), key=self.sizes.__getitem__) if self.sizes else None

    def offsets(self) -> list[tuple[int, int, int]]:
        """For each call the bytes behind the starts of A, B and C."""
        axis = self.batch_axis
        others = [range(size) if number != axis else range(1) for number, size in enumerate(self.sizes)]
        stacks = (self.a, self.b, self.c)
        if math.prod(map(len, others)) > MAX_CALLS:
            return [(0, 0, 0)] * (MAX_CALLS + 1)
        return [
            tuple(  # type: ignore[misc]
                stack.itemsize * sum(i * s for i, s in zip(index, stack.steps, strict=True)) for stack in stacks
            )
            for index in product(*others)
        ]


def _strides(array: Array) -> tuple[int, ...]:
    return tuple(stride // array.itemsize for stride in array.strides)


def _order(rows: int, columns: int, by_row: int, by_column: int) -> tuple[bool, int] | None:
    """Whether a matrix with these strides is stored by columns, and its leading stride; None when it is neither."""
    if not rows or not columns:
        return False, columns
    if (by_column == 1 or columns == 1) and (rows == 1 or by_row >= columns):
        return False, by_row if rows > 1 else columns
    if (by_row == 1 or rows == 1) and (columns == 1 or by_column >= rows):
        return True, by_column if columns > 1 else rows
    return None


def _problem(a: Array, b: Array, c: Array) -> _Problem | None:
    """The product as cuBLAS can be asked for it; None when a matrix has no unit stride, or a size is beyond 31 bits."""
    (m, k), n = a.shape[-2:], b.shape[-1]
    order = _order(m, n, *_strides(c)[-2:])
    if order is not None and order[0]:
        return _problem(b.swapaxes(-1, -2), a.swapaxes(-1, -2), c.swapaxes(-1, -2))
    orders = [_order(m, k, *_strides(a)[-2:]), _order(k, n, *_strides(b)[-2:]), order]
    if None in orders:
        return None
    sizes, rows = _joined(c.shape[:-2], [_steps_over(array, c.shape[:-2]) for array in (a, b, c)])
    stacks = [
        _Stack(address(array), array.itemsize, found[0], max(1, found[1]), steps)
        for array, found, steps in zip((a, b, c), orders, rows, strict=True)
        if found is not None
    ]
    first, second, result = stacks
    if (
        len(sizes) == 1
        and second.steps == (0,)
        and not first.turned
        and first.steps == (m * first.leading,)
        and result.steps == (m * result.leading,)
    ):  # a stack times one matrix is a product of the stack's rows
        m, sizes = m * sizes[0], ()
        first, second, result = (_Stack(s.start, s.itemsize, s.turned, s.leading, ()) for s in stacks)
    if max(m, n, k, *sizes, *(stack.leading for stack in stacks)) > _LARGEST:
        return None
    return _Problem(first, second, result, m, n, k, sizes)


def _steps_over(array: Array, batch: tuple[int, ...]) -> list[int]:
    """The strides with which the axes before the last two are walked over `batch`; 0 where they are stretched."""
    missing = len(batch) - (array.ndim - 2)
    steps = [0] * missing + list(_strides(array)[:-2])
    return [0 if axis < missing or array.shape[axis - missing] == 1 else steps[axis] for axis in range(len(batch))]


def _joined(shape: Sequence[int], rows: list[list[int]]) -> tuple[tuple[int, ...], list[tuple[int, ...]]]:
    """`shape` with axes of size 1 left out and neighbors joined that all `rows` of strides go through as one."""
    sizes: list[int] = []
    kept: list[list[int]] = [[] for _ in rows]
    for axis, size in enumerate(shape):
        if size == 1:
            continue
        if sizes and all(row[-1] == found[axis] * size for row, found in zip(kept, rows, strict=True)):
            sizes[-1] *= size
            for row, found in zip(kept, rows, strict=True):
                row[-1] = found[axis]
            continue
        sizes.append(size)
        for row, found in zip(kept, rows, strict=True):
            row.append(found[axis])
    return tuple(sizes), [tuple(row) for row in kept]


def matrix_product(
    a: Array,
    b: Array,
    c: Array,
    *,
    transpose_a: bool = False,
    transpose_b: bool = False,
    alpha: float = 1.0,
    beta: float = 0.0,
    label: str = "a matrix product",
) -> Step:
    """The step C = alpha A B + beta C for stacks of matrices: device arrays of two axes or more, views included.

    The leading axes of A and B are stretched to C's as NumPy does; with `transpose_a` or `transpose_b` the last two
    axes are swapped first. Arrays are float32, float64, float16 or bfloat16; 16-bit floats are summed in float32, and
    C may be float32 for them. C is not read when beta is 0.
    A product of no terms is beta C, or 0.

    Raises DeviceError, naming `label`, for arrays that `multiplies` refuses; the step raises it when cuBLAS fails.
    """
    a = a.swapaxes(-1, -2) if transpose_a else a
    b = b.swapaxes(-1, -2) if transpose_b else b
    if not c.size:
        return nothing_to_do
    if a.shape[-2:] != (c.shape[-2], b.shape[-2]) or b.shape[-1] != c.shape[-1]:
        raise DeviceError(f"{label}: {a.shape} times {b.shape} is not {c.shape}")
    problem = _problem(a, b, c) if multiplies(a, b, c) else None
    if problem is None:
        raise DeviceError(f"{label}: cuBLAS does not multiply {a.dtype} {a.shape} by {b.dtype} {b.shape}")
    if not problem.k and beta == 1:
        return nothing_to_do
    names = [_DATA_TYPES[array.dtype.name] for array in (a, b, c)]
    if names[0] != names[1]:
        raise DeviceError(f"{label}: a product of {a.dtype} and {b.dtype}")
    return _Gemm(problem, a.dtype, c.dtype, (alpha, beta), label, (a, b, c))


class _Gemm:
    """See `matrix_product`."""

    __slots__ = ("_calls", "_failure", "_gemm", "_kept", "_label")

    def __init__(
        self,
        problem: _Problem,
        dtype: np.dtype[Any],
        result: np.dtype[Any],
        factors: tuple[float, float],
        label: str,
        arrays: tuple[Array, ...],
    ) -> None:
        runtime = cupy().cuda.runtime
        double = dtype == np.float64
        scalars = np.array(factors, np.float64 if double else np.float32)  # read by cuBLAS during the call
        alpha, beta = (int(scalars.ctypes.data) + place * scalars.itemsize for place in (0, 1))
        compute = cublas.CUBLAS_COMPUTE_64F if double else cublas.CUBLAS_COMPUTE_32F
        kind, kind_of_c = (getattr(runtime, _DATA_TYPES[one.name]) for one in (dtype, result))
        a, b, c = problem.a, problem.b, problem.c
        operations = [cublas.CUBLAS_OP_T if stack.turned else cublas.CUBLAS_OP_N for stack in (b, a)]
        axis = problem.batch_axis
        steps = [() if axis is None else (stack.steps[axis],) for stack in (b, a, c)]
        count = () if axis is None else (problem.sizes[axis],)
        self._label = label
        self._failure = cublas.CUBLASError
        self._gemm = cublas.gemmEx if axis is None else cublas.gemmStridedBatchedEx
        self._kept = (scalars, *arrays)
        self._calls = tuple(
            (
                *operations, problem.n, problem.m, problem.k, alpha,
                b.start + of_b, kind, b.leading, *steps[0],
                a.start + of_a, kind, a.leading, *steps[1], beta,
                c.start + of_c, kind_of_c, c.leading, *steps[2], *count,
                compute, cublas.CUBLAS_GEMM_DEFAULT,
            )
            for of_a, of_b, of_c in problem.offsets()
        )  # fmt: skip

    def __call__(self) -> None:
        """Put it on the calling thread's current stream."""
        handle, gemm = current_handle(), self._gemm
        try:
            for call in self._calls:
                gemm(handle, *call)
        except self._failure as error:
            raise DeviceError(f"{self._label}: cuBLAS: {error}") from error
