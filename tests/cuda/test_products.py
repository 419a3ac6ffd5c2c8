"""Matrix products on CUDA: cuBLAS as it is asked, its handles and streams, and the kernel for integers."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from dagexec import NetDef, Workspace
from dagexec.core.device import Device
from dagexec.core.operator import Step
from dagexec.core.runtime import runtime_of
from dagexec.core.stream import Kernel
from dagexec.devices.cuda import cublas
from dagexec.devices.cuda.cublas import matrix_product
from dagexec.devices.cuda.kernels import Function, Launch
from dagexec.errors import DeviceError, OperatorError
from dagexec.scheduler.nets.simple import SimpleNet
from tests.cuda.emulated import cuda_devices, emulated
from tests.cuda.memory_copies import from_device, to_device
from tests.ops.running import on_device, operator_def

CUDA = Device("cuda", 0)
FLOATS: dict[str, tuple[Any, float]] = {
    "float32": (np.float32, 1e-5),
    "float64": (np.float64, 1e-12),
    "float16": (np.float16, 3e-3),
    "bfloat16": (ml_dtypes.bfloat16, 2e-2),
}
Array = np.ndarray[Any, Any]


def launched(step: Step, stream: Any = None) -> None:
    """Do a step on a stream of the device, and wait for it. Raises what it raises."""
    stream = stream or runtime_of(CUDA).lease()
    stream.launch(Kernel(step, "a step"))
    stream.synchronize()
    if stream.failure is not None:
        raise stream.failure.error


def normal(shape: tuple[int, ...], dtype: Any = np.float32, seed: int = 0) -> Array:
    return np.random.default_rng([seed, *shape]).normal(size=shape).astype(dtype)


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("layout", ["plain", "a turned", "b turned", "both turned", "c turned"])
def test_a_product_is_numpys_for_views_of_every_orientation(name: str, layout: str) -> None:
    (dtype, rounding), (m, k, n) = FLOATS[name], (5, 7, 3)
    a, b, c = normal((4, m, k), dtype), normal((4, k, n), dtype), normal((4, m, n), dtype)
    expected = 0.5 * a.astype(np.float64) @ b.astype(np.float64) + 2.0 * c.astype(np.float64)
    turned = {"a": layout in ("a turned", "both turned"), "b": layout in ("b turned", "both turned")}
    turned["c"] = layout == "c turned"
    with cuda_devices():
        views = []
        for key, array in (("a", a), ("b", b), ("c", c)):
            stored = np.ascontiguousarray(array.swapaxes(1, 2)) if turned[key] else array
            found = to_device(stored)
            views.append(found.swapaxes(1, 2) if turned[key] else found)
        launched(matrix_product(*views, alpha=0.5, beta=2.0))
        result = views[2].swapaxes(1, 2) if turned["c"] else views[2]
        y = from_device(result).astype(np.float64)
    y = y.swapaxes(1, 2) if turned["c"] else y
    np.testing.assert_allclose(y, expected, rtol=rounding, atol=rounding * np.abs(expected).max())


@pytest.mark.parametrize(
    ("a_shape", "b_shape", "batch", "calls"),
    [
        ((3, 4), (4, 5), (), 1),
        ((6, 3, 4), (4, 5), (6,), 1),
        ((6, 3, 4), (6, 4, 5), (6,), 1),
        ((2, 6, 3, 4), (2, 6, 4, 5), (2, 6), 1),
        ((2, 6, 3, 4), (6, 4, 5), (2, 6), 2),
        ((2, 1, 3, 4), (1, 6, 4, 5), (2, 6), 2),
        ((1, 4), (6, 4, 1), (6,), 1),
    ],
)
def test_stacks_are_stretched_in_as_few_calls_as_can_be(
    a_shape: tuple[int, ...], b_shape: tuple[int, ...], batch: tuple[int, ...], calls: int
) -> None:
    a, b = normal(a_shape), normal(b_shape, seed=1)
    with emulated() as machine:
        y = to_device(np.zeros((*batch, a_shape[-2], b_shape[-1]), np.float32))
        launched(matrix_product(to_device(a), to_device(b), y))
        asked = [call for call in machine.calls if call.name == "cublasGemm"]
        np.testing.assert_allclose(from_device(y), a.astype(np.float64) @ b, rtol=1e-5, atol=1e-5)
    assert len(asked) == calls


def test_every_stream_has_one_handle_which_works_there_and_a_step_allocates_nothing() -> None:
    with emulated() as machine:
        a, y = to_device(normal((3, 3))), to_device(np.zeros((3, 3), np.float32))
        step, streams = matrix_product(a, a, y), [runtime_of(CUDA).lease() for _ in range(2)]
        for stream in (*streams, *streams):
            launched(step, stream)
        first = len(machine.calls)
        launched(step, streams[0])
        asked = [call for call in machine.calls if call.name == "cublasGemm"]
        later = {call.name for call in machine.calls[first:]}
        handles = {call.stream: call.arguments[0] for call in asked}
        assert [call.stream for call in asked] == [stream.pointer for stream in (*streams, *streams, streams[0])]
        assert all(handles[call.stream] == call.arguments[0] for call in asked)
        assert len(set(handles.values())) == 2
        assert sum(call.name == "cublasCreate" for call in machine.calls) == 2
        assert not later & {"malloc", "mallocAsync", "cublasCreate", "memcpyAsync"}


def test_a_capture_of_streams_without_a_handle_has_one_made_before_it() -> None:
    with emulated() as machine:  # which makes no handle within a capture, and uses none with another device current
        runtime = runtime_of(Device("cuda", 1))
        first, other = runtime.lease(), runtime.lease()
        a, y = (runtime.allocate(36).view(np.float32).reshape(3, 3) for _ in range(2))
        runtime.copy_now(a, normal((3, 3)))
        step = matrix_product(a, a, y)
        with runtime.capture([first]):
            pass
        assert not any(call.name == "cublasCreate" for call in machine.calls)
        launched(step, first)
        with runtime.capture([other]) as capture:
            other.launch(Kernel(step, "a step"))
        capture.replay()
        assert other.failure is None
        assert sum(call.name == "cublasCreate" for call in machine.calls) == 2


def test_float32_is_not_rounded_to_tf32() -> None:
    a, one = np.full((1, 1), 1 + 2.0**-20, np.float32), np.ones((1, 1), np.float32)
    with emulated():
        x, w, y = to_device(a), to_device(one), to_device(one)
        launched(matrix_product(x, w, y))
        assert from_device(y)[0, 0] == a[0, 0]


def test_a_sum_of_no_terms_is_zero_or_what_was_there() -> None:
    with emulated():
        a, b = to_device(np.zeros((2, 0), np.float32)), to_device(np.zeros((0, 3), np.float32))
        y = to_device(np.ones((2, 3), np.float32))
        launched(matrix_product(a, b, y, beta=1.0))
        assert (from_device(y) == 1).all()
        launched(matrix_product(a, b, y))
        assert (from_device(y) == 0).all()


def test_a_status_of_cublas_names_the_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_arguments: Any) -> None:
        raise cublas.cublas.CUBLASError(13)

    definition = operator_def("MatMul", ["a", "a"], ["y"], name="square")
    monkeypatch.setattr(cublas.cublas, "gemmEx", refuse)
    with cuda_devices(), pytest.raises(OperatorError, match=r"MatMul.*cuBLAS.*EXECUTION_FAILED"):
        on_device(CUDA, definition, {"a": normal((2, 2))})


def test_arrays_that_cublas_does_not_multiply_are_refused_by_name() -> None:
    with emulated():
        a, b = to_device(np.ones((2, 2), np.int32)), to_device(np.ones((2, 2), np.float32))
        with pytest.raises(DeviceError, match="mine: cuBLAS does not multiply int32"):
            matrix_product(a, a, a, label="mine")
        with pytest.raises(DeviceError, match="mine: cuBLAS does not multiply float32"):
            matrix_product(b, b, a, label="mine")
        with pytest.raises(DeviceError, match=r"mine: \(2, 2\) times \(1, 4\)"):
            matrix_product(b, b.reshape(1, 4), b, label="mine")


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("sizes", [(1, 1, 1), (16, 16, 16), (17, 33, 19), (40, 5, 70)])
def test_integers_wrap_around_in_tiles_of_any_size(dtype: Any, sizes: tuple[int, int, int]) -> None:
    (m, k, n), rng = sizes, np.random.default_rng(3)
    limits = np.iinfo(dtype)
    a = rng.integers(limits.min, limits.max, (3, m, k), dtype, endpoint=True)
    b = rng.integers(limits.min, limits.max, (k, n), dtype, endpoint=True)
    with cuda_devices():
        (y,) = on_device(CUDA, operator_def("BatchMatMul", ["a", "b"], ["y"], broadcast=1), {"a": a, "b": b})
    with np.errstate(over="ignore"):
        expected = (a[:, :, :, None] * b[None, None]).sum(axis=2, dtype=dtype)
    np.testing.assert_array_equal(y, expected)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_a_16_bit_layer_is_rounded_once(dtype: Any) -> None:
    x, w, b = normal((9, 40), dtype), normal((7, 40), dtype), normal((7,), dtype)
    with cuda_devices():
        (y,) = on_device(CUDA, operator_def("FC", ["x", "w", "b"], ["y"]), {"x": x, "w": w, "b": b})
    exact = x.astype(np.float64) @ w.astype(np.float64).T + b.astype(np.float64)
    spacing = float(ml_dtypes.finfo(dtype).eps)
    np.testing.assert_allclose(y.astype(np.float64), exact, rtol=0.51 * spacing, atol=1e-5)


def test_a_sum_has_the_same_bytes_whatever_the_grid_and_the_stream() -> None:
    x, w, dy = normal((500, 6)), normal((70, 6)), normal((500, 70))
    arrays = {"x": x, "w": w, "dy": dy}
    definition = operator_def("FCGradient", ["x", "w", "dy"], ["dw", "db", "dx"])
    placed = NetDef(name="test", op=[definition], device_option=CUDA.to_option())
    results = []
    with cuda_devices():
        for _ in range(2):
            workspace = Workspace()
            for name, array in arrays.items():
                workspace.feed_blob(name, array)
            with SimpleNet(placed, workspace) as net:
                net.run()
            results.append([workspace.fetch_blob(name).tobytes() for name in definition.output])
            np.testing.assert_allclose(workspace.fetch_blob("db"), dy.sum(0, np.float64), rtol=1e-4, atol=1e-4)
    assert results[0] == results[1]


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("shape", [(70_001, 3, 1), (5, 3, 14_001), (300, 64, 1), (1, 1, 1)])
def test_sums_of_few_long_channels_are_shared_by_many_blocks(
    shape: tuple[int, int, int], dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    grids: list[int] = []

    class Recorded(Launch):
        __slots__ = ()

        def __init__(self, function: Function, *given: Any, **named: Any) -> None:
            super().__init__(function, *given, **named)
            if function.name.startswith("sums"):
                grids.append(int(np.prod(self.blocks)))

    monkeypatch.setattr("dagexec.ops.engines.cuda.base.operator.Launch", Recorded)
    dy, (outer, channels, inner) = (normal(shape) * 0.1 + 0.5).astype(dtype), shape
    x, w = np.ones((outer, 1, 1, inner), dtype), np.ones((channels, 1, 1, 1), dtype)
    arrays = {"x": x, "w": w, "dy": dy.reshape(outer, channels, 1, inner)}
    definition = operator_def("ConvGradient", ["x", "w", "dy"], ["dw", "db"], kernel=1)
    with cuda_devices():
        _, db = on_device(CUDA, definition, arrays)
    expected = dy.astype(np.float64).sum((0, 2))
    np.testing.assert_allclose(db.astype(np.float64), expected, rtol=1e-5 if dtype == np.float32 else 2e-3)
    assert (max(grids) >= 50) == (outer * inner > 10_000)
