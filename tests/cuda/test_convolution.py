"""Convolutions of the default engine on CUDA: every geometry against sums over taps, and their working memory."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from dagexec import NetDef, OperatorDef, Workspace, create_shared_buffer
from dagexec.core.device import Device
from dagexec.core.exclusive import StreamMutex
from dagexec.core.operator import Step, in_sequence
from dagexec.core.runtime import runtime_of
from dagexec.core.shared_buffer import Allocate, SharedBuffer, shared_step
from dagexec.core.stream import Kernel, Stream
from dagexec.devices.cuda.cublas import LARGE_WORKSPACE, WORKSPACE
from dagexec.ops.engines.cuda.base.copy import copy_step
from dagexec.scheduler.nets.async_dag import AsyncDAGNet
from dagexec.scheduler.nets.captured import CapturedNet
from dagexec.scheduler.nets.simple import SimpleNet
from tests.cuda.emulated import cuda_devices, emulated
from tests.ops.running import on_device, operator_def

CUDA = Device("cuda", 0)
ROUNDING: dict[Any, float] = {np.float32: 2e-5, np.float64: 1e-11, np.float16: 4e-3, ml_dtypes.bfloat16: 3e-2}
Array = np.ndarray[Any, Any]


def windows(x: Array, taps: int, stride: int, dilation: int, pad: int) -> Array:
    """For N, C, H, W: N, C, kernel, kernel, out, out, with zeros in the padding."""
    wide = np.pad(x, [(0, 0), (0, 0), (pad, pad), (pad, pad)])
    out = [(size - dilation * (taps - 1) - 1) // stride + 1 for size in wide.shape[2:]]
    found = np.zeros((*x.shape[:2], taps, taps, *out))
    for i, j in itertools.product(range(taps), repeat=2):
        rows = slice(i * dilation, i * dilation + stride * (out[0] - 1) + 1, stride)
        columns = slice(j * dilation, j * dilation + stride * (out[1] - 1) + 1, stride)
        found[:, :, i, j] = wide[:, :, rows, columns]
    return found


def convolved(x: Array, weights: Array, group: int, stride: int, dilation: int, pad: int) -> Array:
    """The sums over taps in float64, of NCHW."""
    found = windows(x.astype(np.float64), weights.shape[2], stride, dilation, pad)
    split = found.reshape(x.shape[0], group, -1, *found.shape[2:])
    filters = weights.astype(np.float64).reshape(group, -1, *weights.shape[1:])
    y = np.einsum("ngcijhw,gmcij->ngmhw", split, filters)
    return y.reshape(x.shape[0], -1, *y.shape[3:])


def normal(shape: tuple[int, ...], dtype: Any, seed: int) -> Array:
    return np.random.default_rng([seed, *shape]).normal(size=shape).astype(dtype)


def in_order(array: Array, order: str) -> Array:
    return array if order == "NCHW" else np.ascontiguousarray(np.moveaxis(array, 1, -1))


def from_order(array: Array, order: str) -> Array:
    return array if order == "NCHW" else np.moveaxis(array, -1, 1)


def close(found: Array, expected: Array, rounding: float) -> None:
    np.testing.assert_allclose(
        found.astype(np.float64), expected, rtol=rounding, atol=rounding * max(1.0, float(np.abs(expected).max()))
    )


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("order", ["NCHW", "NHWC"])
@pytest.mark.parametrize("dilation", [1, 2])
@pytest.mark.parametrize("group", [1, 2, 4])
def test_a_convolution_and_its_gradients_are_sums_over_taps(group: int, dilation: int, order: str, dtype: Any) -> None:
    stride, pad, rounding = 2, 1, ROUNDING[dtype]
    x, weights, bias = normal((3, 4, 9, 8), dtype, 0), normal((8, 4 // group, 3, 3), dtype, 1), normal((8,), dtype, 2)
    y = convolved(x, weights, group, stride, dilation, pad)
    dy = normal(y.shape, dtype, 3)
    arrays = {"x": in_order(x, order), "w": in_order(weights, order), "b": bias, "dy": in_order(dy, order)}
    arguments: dict[str, Any] = {
        "kernel": 3, "stride": stride, "pad": pad, "dilation": dilation, "group": group, "order": order,
    }  # fmt: skip
    forward = operator_def("Conv", ["x", "w", "b"], ["y"], **arguments)
    backward = operator_def("ConvGradient", ["x", "w", "dy"], ["dw", "db", "dx"], **arguments)
    with cuda_devices():
        (found,) = on_device(CUDA, forward, {name: arrays[name] for name in "xwb"})
        dw, db, dx = on_device(CUDA, backward, {name: arrays[name] for name in ("x", "w", "dy")})
    close(from_order(found, order), y + bias.astype(np.float64)[:, None, None], rounding)
    close(db, dy.astype(np.float64).sum(axis=(0, 2, 3)), rounding)
    wide = dy.astype(np.float64)
    taps = windows(x.astype(np.float64), 3, stride, dilation, pad).reshape(3, group, 4 // group, 3, 3, *y.shape[2:])
    expected = np.einsum("ngcijhw,ngmhw->gmcij", taps, wide.reshape(3, group, -1, *y.shape[2:]))
    close(from_order(dw, order), expected.reshape(weights.shape), rounding)
    # <dX, v> is <dY, conv(v)> for every image v.
    v = normal(x.shape, np.float64, 4)
    left = float((from_order(dx, order).astype(np.float64) * v).sum())
    right = float((wide * convolved(v, weights, group, stride, dilation, pad)).sum())
    norm = np.linalg.norm(wide) * np.linalg.norm(weights.astype(np.float64)) * np.linalg.norm(v) / np.sqrt(v.size)
    assert abs(left - right) <= rounding * norm


@pytest.mark.parametrize("order", ["NCHW", "NHWC"])
@pytest.mark.parametrize("limit", [1, 1500, 4000, 1 << 20])
def test_columns_keep_to_the_limit_in_parts_of_the_batch_or_of_an_image(limit: int, order: str) -> None:
    x, weights, dtype = normal((5, 4, 7, 6), np.float32, 0), normal((6, 2, 3, 3), np.float32, 1), np.float32
    y = convolved(x, weights, 2, 1, 1, 1)
    dy = normal(y.shape, dtype, 2)
    arrays = {"x": in_order(x, order), "w": in_order(weights, order), "dy": in_order(dy, order)}
    arguments: dict[str, Any] = {"kernel": 3, "pad": 1, "group": 2, "order": order, "ws_nbytes_limit": limit}
    forward = operator_def("Conv", ["x", "w"], ["y"], **arguments)
    backward = operator_def("ConvGradient", ["x", "w", "dy"], ["dw", "dx"], no_bias=1, **arguments)
    with emulated() as machine:
        (found,) = on_device(CUDA, forward, {name: arrays[name] for name in "xw"})
        sizes = [call.arguments[0] for call in machine.calls if call.name in ("malloc", "mallocAsync")]
        dw, dx = on_device(CUDA, backward, arrays)
    close(from_order(found, order), y, 2e-5)
    taps = windows(x.astype(np.float64), 3, 1, 1, 1).reshape(5, 2, 2, 3, 3, 7, 6)
    expected = np.einsum("ngcijhw,ngmhw->gmcij", taps, dy.astype(np.float64).reshape(5, 2, 3, 7, 6))
    close(from_order(dw, order), expected.reshape(weights.shape), 2e-5)
    turned = weights.reshape(2, 3, 2, 3, 3)[..., ::-1, ::-1].swapaxes(1, 2).reshape(4, 3, 3, 3)
    close(from_order(dx, order), convolved(dy, turned, 2, 1, 1, 1), 2e-5)
    columns = [size for size in sizes if size not in (WORKSPACE, LARGE_WORKSPACE)]
    line, whole = 4 * 9 * 6 * 4, 5 * 4 * 9 * 42 * 4
    assert max(columns) <= max(limit, line, max(array.nbytes for array in arrays.values()) * 2)
    assert limit < whole or max(columns) >= whole


def test_a_1x1_convolution_is_one_product_and_a_depthwise_one_none() -> None:
    x, point, depth = (normal(shape, np.float32, 0) for shape in ((3, 4, 5, 5), (6, 4, 1, 1), (4, 1, 3, 3)))
    with emulated() as machine:
        (y,) = on_device(CUDA, operator_def("Conv", ["x", "w"], ["y"], kernel=1), {"x": x, "w": point})
        assert [call.name for call in machine.calls].count("cublasGemm") == 1
        assert [call.name for call in machine.calls].count("launchKernel") == 0
        close(y, convolved(x, point, 1, 1, 1, 0), 2e-5)
        (y,) = on_device(CUDA, operator_def("Conv", ["x", "w"], ["y"], kernel=3, group=4), {"x": x, "w": depth})
        assert [call.name for call in machine.calls].count("cublasGemm") == 1
        close(y, convolved(x, depth, 4, 1, 1, 0), 2e-5)


@pytest.mark.parametrize("order", ["NCHW", "NHWC"])
@pytest.mark.parametrize("group", [1, 2, 4])
def test_images_of_more_elements_than_a_grid_has_threads_are_computed_to_the_end(group: int, order: str) -> None:
    x, weights = normal((2, 4, 61, 53), np.float32, 0), normal((8, 4 // group, 3, 3), np.float32, 1)
    arguments: dict[str, Any] = {"kernel": 3, "pad": 1, "group": group, "order": order}
    y = convolved(x, weights, group, 1, 1, 1)
    dy = normal(y.shape, np.float32, 2)
    arrays = {"x": in_order(x, order), "w": in_order(weights, order), "dy": in_order(dy, order)}
    backward = operator_def("ConvGradient", ["x", "w", "dy"], ["dw", "db", "dx"], **arguments)
    with cuda_devices():
        (found,) = on_device(CUDA, operator_def("Conv", ["x", "w"], ["y"], **arguments), arrays)
        dw, db, dx = on_device(CUDA, backward, arrays)
    close(from_order(found, order), y, 2e-5)
    wide = dy.astype(np.float64)
    close(db, wide.sum(axis=(0, 2, 3)), 2e-5)
    taps = windows(x.astype(np.float64), 3, 1, 1, 1).reshape(2, group, 4 // group, 3, 3, 61, 53)
    expected = np.einsum("ngcijhw,ngmhw->gmcij", taps, wide.reshape(2, group, -1, 61, 53))
    close(from_order(dw, order), expected.reshape(weights.shape), 2e-5)
    split = weights.reshape(group, 8 // group, 4 // group, 3, 3)[..., ::-1, ::-1].swapaxes(1, 2)
    close(from_order(dx, order), convolved(dy, split.reshape(4, 8 // group, 3, 3), group, 1, 1, 1), 2e-5)


def test_columns_come_before_the_product_and_the_bias_after_it_on_one_stream() -> None:
    arrays = {"x": normal((2, 4, 5, 5), np.float32, 0), "w": normal((6, 4, 3, 3), np.float32, 1)}
    arrays["b"] = normal((6,), np.float32, 2)
    with emulated() as machine:
        on_device(CUDA, operator_def("Conv", ["x", "w", "b"], ["y"], kernel=3), arrays)
        work = [call for call in machine.calls if call.name in ("launchKernel", "cublasGemm")]
    assert [call.name for call in work] == ["launchKernel", "cublasGemm", "launchKernel"]
    assert len({call.stream for call in work}) == 1


def sharing(count: int = 4) -> NetDef:
    """`count` convolutions of x that share one buffer, each larger than the one before."""
    operators: list[OperatorDef] = []
    for number in range(count):
        arguments: dict[str, Any] = {"kernel": 3, "pad": 1 + number, "shared_buffer": 1}
        operators.append(operator_def("Conv", ["x", f"w{number}"], [f"y{number}"], **arguments))
    return NetDef(name="sharing", op=operators, external_input=["x"], device_option=CUDA.to_option())


def run_sharing(seed: int) -> tuple[dict[str, Array], list[str], set[int]]:
    """The outputs of `sharing` on two workers of an asynchronous device, races, and the streams products were on."""
    x = normal((2, 4, 8, 8), np.float32, 0)
    with emulated(asynchronous=True, seed=seed, kernel_seconds=1e-5) as machine:
        workspace = Workspace()
        create_shared_buffer(workspace, CUDA)
        workspace.feed_blob("x", x)
        for number in range(4):
            workspace.feed_blob(f"w{number}", normal((6, 4, 3, 3), np.float32, number))
        with AsyncDAGNet(sharing(), workspace, num_workers=2) as net:
            for _ in range(3):
                net.run()
        found = {f"y{number}": workspace.fetch_blob(f"y{number}").copy() for number in range(4)}
        streams = {call.stream for call in machine.calls if call.name == "cublasGemm"}
        return found, list(machine.races), {stream for stream in streams if stream is not None}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_streams_take_turns_at_the_shared_buffer(seed: int) -> None:
    found, races, streams = run_sharing(seed)
    assert len(streams) > 1
    assert races == []
    x = normal((2, 4, 8, 8), np.float32, 0)
    for number in range(4):
        weights = normal((6, 4, 3, 3), np.float32, number)
        close(found[f"y{number}"], convolved(x, weights, 1, 1, 1, 1 + number), 2e-5)


@pytest.mark.slow
def test_without_turns_the_shared_buffer_is_raced_for(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def no_order(self: StreamMutex, stream: Stream) -> Iterator[Stream]:
        with self._lock:
            yield stream

    monkeypatch.setattr(StreamMutex, "turn", no_order)
    assert any(run_sharing(seed)[1] for seed in range(5))


@pytest.mark.slow
def test_a_buffer_grows_while_a_stream_works_in_the_old_memory_and_nobody_waits() -> None:
    with emulated(asynchronous=True, kernel_seconds=0.05, copy_seconds=0.05) as machine:
        buffer: SharedBuffer = create_shared_buffer(Workspace(), CUDA)
        runtime, turns = runtime_of(CUDA), buffer.turns
        assert turns is not None
        first, second = runtime.lease(), runtime.lease()
        source, target = runtime.allocate(1 << 16), runtime.allocate(1 << 16)
        runtime.copy_now(source, np.full(1 << 16, 7, np.uint8))

        def through(nbytes: int, result: Array) -> Any:
            """Copy so many bytes to the buffer, and on to `result`."""

            def build(allocate: Allocate) -> Step:
                middle = allocate((nbytes,), np.uint8)
                return in_sequence([copy_step(middle, source[:nbytes]), copy_step(result, middle)])

            return shared_step(buffer, build, "it")

        small = through(1 << 12, target[: 1 << 12])
        with turns.turn(first):
            first.launch(Kernel(small, "small"))
        assert buffer.nbytes == 1 << 12
        before = len(machine.calls)
        large = through(1 << 15, target[1 << 15 :])
        with turns.turn(second):
            second.launch(Kernel(large, "large"))
        others = [runtime.allocate(1 << 12) for _ in range(8)]  # none of them is the old memory
        for array in others:
            runtime.copy(array, np.zeros(1 << 12, np.uint8), second)
        assert buffer.nbytes == 1 << 15
        later = {call.name for call in machine.calls[before:]}
        assert not later & {"streamSynchronize", "eventSynchronize", "deviceSynchronize"}
        with turns.turn(first):
            first.launch(Kernel(small, "small"))
        runtime.synchronize()
        assert machine.races == []
        found = np.empty(1 << 16, np.uint8)
        runtime.copy_now(found, target)
        assert (found[: 1 << 12] == 7).all()
        assert (found[1 << 15 :] == 7).all()


@pytest.mark.slow
def test_a_captured_net_keeps_the_buffer_it_was_captured_with_when_that_grows() -> None:
    x, wide = normal((2, 4, 8, 8), np.float32, 0), normal((2, 8, 24, 24), np.float32, 1)
    larger = operator_def("Conv", ["wide", "v"], ["z"], kernel=3, shared_buffer=1)
    with emulated(asynchronous=True) as machine:
        workspace = Workspace()
        buffer = create_shared_buffer(workspace, CUDA)
        arrays = {"x": x, "wide": wide, "v": normal((4, 8, 3, 3), np.float32, 2)}
        arrays |= {f"w{number}": normal((6, 4, 3, 3), np.float32, number) for number in range(4)}
        for name, array in arrays.items():
            workspace.feed_blob(name, array)
        other = NetDef(name="larger", op=[larger], device_option=CUDA.to_option())
        with CapturedNet(sharing(), workspace, num_workers=2) as net:
            for number in range(4):
                net.run()
                if number == 2:
                    before = buffer.nbytes
                    with SimpleNet(other, workspace) as grows:
                        grows.run()
                    assert buffer.nbytes > before
                    kept = [runtime_of(CUDA).allocate(before) for _ in range(4)]
                    for array in kept:
                        runtime_of(CUDA).copy_now(array, np.full(before, 255, np.uint8))
        assert [call.name for call in machine.calls].count("graphLaunch") >= 2
        assert machine.races == []
        for number in range(4):
            expected = convolved(x, arrays[f"w{number}"], 1, 1, 1, 1 + number)
            close(workspace.fetch_blob(f"y{number}"), expected, 2e-5)
        found = np.empty(before, np.uint8)
        runtime_of(CUDA).copy_now(found, kept[0])
        assert (found == 255).all()


def test_the_shared_buffer_gives_the_bytes_of_private_memory() -> None:
    x, weights = normal((2, 4, 6, 6), np.float32, 0), normal((6, 4, 3, 3), np.float32, 1)
    results = []
    with cuda_devices():
        for shared in (0, 1):
            workspace = Workspace()
            create_shared_buffer(workspace, CUDA)
            workspace.feed_blob("x", x)
            workspace.feed_blob("w", weights)
            definition = operator_def("Conv", ["x", "w"], ["y"], kernel=3, shared_buffer=shared)
            net = NetDef(name="test", op=[definition], device_option=CUDA.to_option())
            with SimpleNet(net, workspace) as bound:
                bound.run()
                results.append(workspace.fetch_blob("y").tobytes())
    assert results[0] == results[1]
