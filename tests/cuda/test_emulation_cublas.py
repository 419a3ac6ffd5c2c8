"""The emulated cuBLAS: column-major products, the checks of arguments, streams and threads."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from dagexec.devices.cuda import cublas_library as cublas
from dagexec.devices.cuda.binding import cupy
from tests.cuda.emulated import emulated
from tests.cuda.emulated.errors import EmulationError
from tests.cuda.memory_copies import from_device, to_device

TYPES = {0: np.float32, 1: np.float64, 2: np.float16, 14: ml_dtypes.bfloat16}


def scalars(*values: float, dtype: Any = np.float32) -> tuple[list[int], Any]:
    held = np.array(values, dtype)
    return [held.ctypes.data + i * held.itemsize for i in range(len(values))], held


@pytest.mark.parametrize("kind", TYPES)
def test_a_stack_of_products_is_numpys_in_every_type_and_orientation(kind: int) -> None:
    dtype, m, n, k, count = TYPES[kind], 5, 3, 4, 2
    wide = np.float64 if kind == 1 else np.float32
    rng = np.random.default_rng(kind)
    with emulated():
        handle = cublas.create()
        (alpha, beta), _held = scalars(2.0, 0.5, dtype=wide)
        for transa, transb in itertools.product((0, 1), (0, 1)):
            a = rng.normal(size=(count, *((k, m) if transa == 0 else (m, k)))).astype(dtype)
            b = rng.normal(size=(count, *((n, k) if transb == 0 else (k, n)))).astype(dtype)
            c = rng.normal(size=(count, n, m + 1)).astype(dtype)
            arrays = [to_device(x) for x in (a, b, c)]
            cublas.gemmStridedBatchedEx(
                handle, transa, transb, m, n, k, alpha, arrays[0].data.ptr, kind, a.shape[2], a.shape[1] * a.shape[2],
                arrays[1].data.ptr, kind, b.shape[2], b.shape[1] * b.shape[2], beta, arrays[2].data.ptr, kind, m + 1,
                n * (m + 1), count, cublas.CUBLAS_COMPUTE_64F if kind == 1 else cublas.CUBLAS_COMPUTE_32F, -1,
            )  # fmt: skip
            # A matrix stored by columns is, by rows, its transpose.
            first = a.astype(np.float64) if transa == 0 else a.astype(np.float64).swapaxes(1, 2)
            second = b.astype(np.float64) if transb == 0 else b.astype(np.float64).swapaxes(1, 2)
            expected = c.astype(np.float64)
            expected[:, :, :m] = 2 * second @ first + 0.5 * expected[:, :, :m]
            found = from_device(arrays[2]).astype(np.float64)
            np.testing.assert_allclose(found, expected, rtol=2.0 ** (-7 if kind == 14 else -9), atol=0.05)
            assert (found[:, :, m] == c[:, :, m].astype(np.float64)).all()


def test_a_factor_beta_of_zero_reads_no_nan_of_c() -> None:
    with emulated():
        one, c = to_device(np.ones((1, 1), np.float32)), to_device(np.full((1, 1), np.nan, np.float32))
        (alpha, beta), _held = scalars(1.0, 0.0)
        cublas.gemmEx(
            cublas.create(),
            0,
            0,
            1,
            1,
            1,
            alpha,
            one.data.ptr,
            0,
            1,
            one.data.ptr,
            0,
            1,
            beta,
            c.data.ptr,
            0,
            1,
            68,
            -1,
        )
        assert from_device(c) == 1


def test_wrong_arguments_are_refused_as_cublas_refuses_them() -> None:
    with emulated():
        held = to_device(np.ones((4, 4), np.float32))
        x = held.data.ptr
        (alpha, beta), _held = scalars(1.0, 0.0)
        handle = cublas.create()
        good: list[Any] = [0, 0, 4, 4, 4, alpha, x, 0, 4, x, 0, 4, beta, x, 0, 4, 68, -1]
        for place, value in ((2, -1), (8, 3), (11, 3), (15, 3), (0, 7), (16, 1)):
            wrong = [*good]
            wrong[place] = value
            with pytest.raises(cublas.CUBLASError, match="INVALID_VALUE"):
                cublas.gemmEx(handle, *wrong)
        for place, value in ((7, 1), (14, 2), (16, 70)):
            wrong = [*good]
            wrong[place] = value
            with pytest.raises(cublas.CUBLASError, match="NOT_SUPPORTED"):
                cublas.gemmEx(handle, *wrong)
        cublas.destroy(handle)
        with pytest.raises(cublas.CUBLASError, match="NOT_INITIALIZED"):
            cublas.gemmEx(handle, *good)


def test_a_product_beyond_its_memory_is_an_error() -> None:
    with emulated():
        held = to_device(np.ones(16, np.float32))
        x = held.data.ptr
        (alpha, beta), _held = scalars(1.0, 0.0)
        with pytest.raises(EmulationError, match="bytes 0 to 80"):
            cublas.gemmEx(cublas.create(), 0, 0, 5, 4, 4, alpha, x, 0, 5, x, 0, 4, beta, x, 0, 5, 68, -1)


def test_a_handle_that_two_threads_use_at_once_is_an_error() -> None:
    with emulated() as gpu:
        handle = cublas.create()
        found = gpu.handle(handle, object)
        with found.busy, pytest.raises(EmulationError, match="two threads at once"):
            cublas.setMathMode(handle, 0)
        met: list[BaseException] = []

        def elsewhere() -> None:
            cupy().cuda.runtime.setDevice(1)
            held = to_device(np.ones((1, 1), np.float32))
            x = held.data.ptr
            (alpha, beta), _held = scalars(1.0, 0.0)
            try:
                cublas.gemmEx(handle, 0, 0, 1, 1, 1, alpha, x, 0, 1, x, 0, 1, beta, x, 0, 1, 68, -1)
            except EmulationError as error:
                met.append(error)

        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        assert "device 0 is used on device 1" in str(met[0])


def test_cupys_own_functions_go_to_cupys_current_stream_and_refuse_a_captured_one() -> None:
    with emulated():
        module = cupy().cuda.cublas
        stream = cupy().cuda.Stream(non_blocking=True)
        held = to_device(np.ones((1, 1), np.float32))
        x = held.data.ptr
        (alpha, beta), _held = scalars(1.0, 0.0)
        call = (0, 0, 1, 1, 1, alpha, x, 1, x, 1, beta, x, 1)
        handle = module.create()
        module.setStream(handle, stream.ptr)
        with pytest.raises(EmulationError, match="CuPy's current stream"):
            module.sgemm(handle, *call)
        with stream:
            module.sgemm(handle, *call)
            stream.begin_capture()
            with pytest.raises(NotImplementedError, match="stream capture"):
                module.sgemm(handle, *call)
