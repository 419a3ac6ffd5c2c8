"""Operators that move data on CUDA: what the tests of the host's operators, run there, do not show."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagexec import NetDef, Workspace
from dagexec.core.device import Device
from dagexec.devices.cuda.runtime import cuda_runtime
from dagexec.errors import OperatorError, ShapeError
from dagexec.ops.base.layout import BLOCKS
from dagexec.ops.engines.cuda.base import indices as indices_module
from dagexec.ops.engines.cuda.base.indices import divider, index_type
from dagexec.ops.engines.cuda.base.operator import CudaOperator
from dagexec.ops.engines.cuda.base.pieces import in_place
from dagexec.ops.engines.cuda.index import sorted_indices as sorting_module
from dagexec.scheduler.nets.simple import SimpleNet
from tests.cuda.emulated import cuda_devices
from tests.ops.running import on_device, operator_def, run_operator

Array = npt.NDArray[Any]

CUDA = Device("cuda", 0)
TYPES: list[Any] = [np.bool_, np.int8, np.float16, ml_dtypes.bfloat16, np.float32, np.int64, np.float64]


ROWS = np.array([[1, 2], [3, 4], [5, 6]], np.float32)


@pytest.fixture(autouse=True, scope="module")
def _devices() -> Iterator[None]:
    with cuda_devices():
        yield


def run(op_type: str, inputs: list[Array], outputs: int = 1, **arguments: Any) -> list[Array]:
    """The outputs of an operator on CUDA."""
    names = [f"x{index}" for index in range(len(inputs))]
    definition = operator_def(op_type, names, [f"y{index}" for index in range(outputs)], **arguments)
    return on_device(CUDA, definition, dict(zip(names, inputs, strict=True)))


def numbers(shape: tuple[int, ...], dtype: Any = np.float32, seed: int = 0) -> Array:
    """Whole numbers from -100 to 100."""
    return np.random.default_rng(seed).integers(-100, 101, shape).astype(dtype)


@given(size=st.integers(1, (1 << 31) - 1), number=st.integers(0, (1 << 31) - 1))
def test_a_divider_gives_the_quotient_of_any_index_below_2_to_31(size: int, number: int) -> None:
    fields = divider(size)
    assert fields[0] == size
    assert all(0 <= field < 1 << 32 for field in fields)
    high = fields[1] * number >> 32
    assert high + number < 1 << 32
    assert (high + number) >> fields[2] == number // size


def test_indices_have_64_bits_where_32_may_not_do() -> None:
    assert index_type((1 << 31) - 1) == "int"
    assert index_type(1 << 31) == "i64"
    assert index_type(5, -(1 << 31)) == "i64"


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_transpose_of_any_type_moves_every_element(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.sampled_from([1, 2, 3, 8, 9, 33, 40]), min_size=1, max_size=4)))
    axes = data.draw(st.permutations(range(len(shape))))
    x = numbers(shape, data.draw(st.sampled_from(TYPES)))
    (y,) = run("Transpose", [x], axes=list(axes))
    assert y.tobytes() == x.transpose(axes).tobytes()


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", [(5, 70, 90), (2, 33, 7, 11), (3, 0, 4), (1, 64, 64)])
def test_images_change_their_order_and_back(shape: tuple[int, ...], dtype: Any) -> None:
    x = numbers(shape, dtype)
    (y,) = run("NCHW2NHWC", [x])
    assert y.tobytes() == np.moveaxis(x, 1, -1).tobytes()
    assert run("NHWC2NCHW", [y])[0].tobytes() == x.tobytes()


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_more_pieces_than_a_launch_takes_are_joined_and_cut(axis: int, dtype: Any) -> None:
    sizes = [3, 0, 1, 4, 8, 2, *[5, 16] * 8, 0, 7]
    parts = [
        numbers(tuple(size if at == axis else 6 for at in range(3)), dtype, seed) for seed, size in enumerate(sizes)
    ]
    whole, info = run("Concat", parts, 2, axis=axis)
    assert whole.tobytes() == np.concatenate(parts, axis).tobytes()
    assert info.tolist() == sizes
    for op_type, inputs, arguments in (("Split", [whole], {"split": sizes}), ("ConcatGradient", [whole, *parts], {})):
        found = run(op_type, inputs, len(sizes), axis=axis, **arguments)
        assert [part.tobytes() for part in found] == [part.tobytes() for part in parts]


@pytest.mark.parametrize("steps", [[1, 2], [-1, -3], [2, -1]])
def test_slices_of_more_elements_than_a_grid_has_threads(steps: list[int]) -> None:
    x = numbers((150, 130), np.int8)
    bounds = [(0, 150) if steps[0] > 0 else (149, -151), (1, 130) if steps[1] > 0 else (128, -131)]
    starts, ends = [low for low, _ in bounds], [high for _, high in bounds]
    (y,) = run("Slice", [x], starts=starts, ends=ends, steps=steps, onnx_style=1)
    expected = x[:: steps[0], (1 if steps[1] > 0 else 128) :: steps[1]]
    assert y.tobytes() == expected.tobytes()
    dy = numbers(expected.shape, np.float16)
    wide = np.zeros(x.shape, np.float16)
    wide[:: steps[0], (1 if steps[1] > 0 else 128) :: steps[1]] = dy
    (dx,) = run(
        "SliceGradient", [np.zeros(x.shape, np.float16), dy], starts=starts, ends=ends, steps=steps, onnx_style=1
    )
    np.testing.assert_array_equal(dx, wide)


@pytest.mark.parametrize("pads", [[1, 3, 2, 0], [0, 12, 7, 9], [-1, 2, 0, -2]])
def test_a_tensor_that_wraps_begins_anew_at_its_ends(pads: list[int]) -> None:
    x = numbers((3, 5))
    kept = x[max(0, -pads[0]) : 3 + min(0, pads[2]), max(0, -pads[1]) : 5 + min(0, pads[3])]
    expected = np.pad(kept, [(max(0, pads[axis]), max(0, pads[axis + 2])) for axis in (0, 1)], mode="wrap")
    np.testing.assert_array_equal(run("Pad", [x], pads=pads, mode="wrap")[0], expected)


@pytest.mark.slow
def test_indices_of_64_bits_give_what_those_of_32_give_and_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    x, picks = numbers((2, 16, 9, 10)), np.array([3, 0, 3, 1, -1])
    pooled = numbers((2, 16, 5, 5))
    calls: list[tuple[str, list[Array], int, dict[str, Any]]] = [
        ("Transpose", [x], 1, {"axes": [1, 3, 0, 2]}),
        ("NCHW2NHWC", [x], 1, {}),
        ("Concat", [x, x], 1, {"axis": 2}),
        ("Tile", [x], 1, {"tiles": 3, "axis": 1}),
        ("Gather", [x, picks], 1, {"axis": 1, "wrap_indices": 1}),
        ("GatherGradient", [x[0], picks, numbers((5, 9, 10))], 1, {"wrap_indices": 1}),
        ("PadImage", [x], 1, {"pad": 2, "mode": "reflect"}),
        ("PadImageGradient", [x], 1, {"pad": 2, "mode": "edge"}),
        ("SliceGradient", [x, x[:, 1:3]], 1, {"starts": [1], "ends": [3], "axes": [1]}),
        ("ResizeNearest", [x], 1, {"height_scale": 1.5, "width_scale": 2.0}),
        ("ResizeNearestGradient", [numbers((2, 16, 13, 20)), x], 1, {"height_scale": 1.5, "width_scale": 2.0}),
        ("OneHot", [np.array([3, 1]), np.array([5])], 1, {}),
        ("Im2Col", [x], 1, {"kernel": 3, "pad": 1, "dilation": 2}),
        ("Col2Im", [numbers((2, 144, 5, 5)), x], 1, {"kernel": 3, "stride": 2, "pad": 1}),
        ("MaxPoolWithIndex", [x], 2, {"kernel": 3, "stride": 2, "pad": 1}),
        ("AveragePool", [x], 1, {"kernel": 3, "stride": 2, "pad": 1, "dilation": 2}),
        ("AveragePoolGradient", [x, pooled, pooled], 1, {"kernel": 3, "stride": 2, "pad": 1}),
    ]
    expected = [run(op_type, inputs, outputs, **arguments) for op_type, inputs, outputs, arguments in calls]
    for (op_type, inputs, outputs, arguments), arrays in zip(calls, expected, strict=True):
        for one, other in zip(arrays, run_operator(op_type, list(inputs), outputs, **arguments), strict=True):
            np.testing.assert_allclose(one, other, 1e-6, 1e-5, err_msg=op_type)
    monkeypatch.setattr(indices_module, "INT_LIMIT", 0)
    assert index_type(0) == "i64"
    for (op_type, inputs, outputs, arguments), arrays in zip(calls, expected, strict=True):
        for one, other in zip(run(op_type, inputs, outputs, **arguments), arrays, strict=True):
            np.testing.assert_array_equal(one, other, op_type)


def sums_in_order(indices: Array, values: Array, rows: int) -> Array:
    """Row i of the values added to row indices[i], one after another, in the type of the values."""
    total = np.zeros((rows, *values.shape[1:]), values.dtype)
    for index, value in zip(indices, values, strict=True):
        total[index] += value
    return total


@pytest.mark.slow
@pytest.mark.parametrize(("count", "rows"), [(4096, 3), (4097, 700), (9000, 17), (5000, 1), (33, 40_000)])
def test_rows_that_meet_are_added_in_the_order_of_the_indices(count: int, rows: int) -> None:
    rng = np.random.default_rng(count)
    indices, values = rng.integers(0, rows, count), rng.standard_normal((count, 3)).astype(np.float32)
    (found,) = run("SparseToDense", [indices.astype(np.int32), values, np.zeros(rows, np.float32)])
    assert found.tobytes() == sums_in_order(indices, values, rows).tobytes()


def test_sorting_by_digits_and_by_counting_give_the_same_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(7)
    data, indices = np.zeros((4, 300, 5), np.float32), rng.integers(-300, 300, (6, 50))
    dy = rng.standard_normal((4, 6, 50, 5)).astype(np.float32)
    counted = run("GatherGradient", [data, indices, dy], axis=1, wrap_indices=1)[0]
    monkeypatch.setattr(sorting_module, "COUNTED", 10)
    assert run("GatherGradient", [data, indices, dy], axis=1, wrap_indices=1)[0].tobytes() == counted.tobytes()
    np.testing.assert_allclose(counted.sum((0, 1)), dy.sum((0, 1, 2)), rtol=1e-3)


def net_of(op_type: str, inputs: list[Array], **arguments: Any) -> tuple[SimpleNet, Workspace]:
    """A net of one operator on CUDA, from x0, x1, ... to y."""
    names = [f"x{index}" for index in range(len(inputs))]
    definition = operator_def(op_type, names, ["y"], **arguments)
    definition.device_option.CopyFrom(CUDA.to_option())
    workspace = Workspace()
    for name, array in zip(names, inputs, strict=True):
        workspace.feed_blob(name, array)
    logging.disable()
    net = SimpleNet(NetDef(name="test", op=[definition]), workspace)
    logging.disable(logging.NOTSET)
    return net, workspace


@pytest.mark.parametrize(
    ("op_type", "inputs", "expected", "message"),
    [
        ("Gather", [ROWS, np.array([2, 3])], [*ROWS[2:].tolist(), [0, 0]], r"index 3 at place 1 .*\[-3, 3\)"),
        ("OneHot", [np.array([1, -1]), np.array([2])], [[0, 1], [0, 0]], r"index -1 at place 1 .*\[0, 2\)"),
        ("SparseToDense", [np.array([5, 1]), np.ones((2, 2), np.float32), np.zeros(2)], [[0, 0], [1, 1]], "index 5 at"),
    ],
)
def test_a_bad_index_fails_the_run_and_gives_zeros(
    op_type: str, inputs: list[Array], expected: list[Any], message: str
) -> None:
    net, workspace = net_of(op_type, inputs)
    with net:
        with pytest.raises(OperatorError, match=message):
            net.run()
        assert workspace.fetch_blob("y").tolist() == expected
        number = next(at for at, array in enumerate(inputs) if array.dtype == np.int64)
        workspace.feed_blob(f"x{number}", np.zeros_like(inputs[number]))
        net.run()


def test_bounds_of_another_slice_fail_the_run() -> None:
    x, dy = np.zeros((4, 3), np.float32), np.ones((2, 3), np.float32)
    net, workspace = net_of("SliceGradient", [x, np.array([1, 0]), np.array([3, 3]), dy])
    with net:
        net.run()
        assert workspace.fetch_blob("y").tolist() == [[0] * 3, [1] * 3, [1] * 3, [0] * 3]
        workspace.feed_blob("x2", np.array([4, 3]))
        with pytest.raises(OperatorError, match=r"dY must have the shape \(3, 3\) of the slice of X, found \(2, 3\)"):
            net.run()


def test_axes_that_cannot_be_joined_are_refused() -> None:
    x = np.zeros((2,) * 10, np.float32)
    axes = [0, 2, 4, 6, 8, 1, 3, 5, 7, 9]
    with pytest.raises(ShapeError, match="10 axes that cannot be merged; a CUDA kernel supports at most 8"):
        run("Transpose", [x], axes=axes)


def test_no_elements_are_no_launch() -> None:
    empty = np.zeros((2, 0, 3), np.float32)
    assert run("Transpose", [empty])[0].shape == (3, 0, 2)
    assert run("Concat", [empty, empty], axis=1)[0].shape == (2, 0, 3)
    assert run("Gather", [numbers((3, 2)), np.zeros((0,), np.int64)])[0].shape == (0, 2)
    (dx,) = run("SparseToDense", [np.zeros(0, np.int64), np.zeros((0, 2), np.float32), np.zeros(3)])
    assert dx.tolist() == [[0, 0]] * 3
    (y,) = run("Pad", [empty], pads=[0, 1, 0, 0, 1, 0], value=2.0)
    assert y.tolist() == np.full((2, 2, 3), 2.0).tolist()


def test_pieces_that_lie_where_they_belong_are_seen() -> None:
    memory = cuda_runtime(CUDA).allocate(64).view(np.float32).reshape(4, 4)
    other = cuda_runtime(CUDA).allocate(32).view(np.float32).reshape(2, 4)
    assert in_place(memory, [memory[:1], other, memory[3:]], 0) == (0, 2)
    assert in_place(memory.reshape(1, 4, 4), [memory[:1], other, memory[2:3]], 1) == (0,)
    assert in_place(memory, [memory[:, :2], memory[:, 2:]], 1) == ()


@pytest.mark.parametrize(
    ("shape", "axes", "kernel"),
    [
        ((2, 40, 50), [0, 2, 1], "tiled_copy"),
        ((40, 3, 50), [2, 1, 0], "tiled_copy"),
        ((2, 3, 50), [0, 2, 1], "strided_copy"),
        ((5, 6, 7), [1, 0, 2], "strided_copy"),
    ],
)
def test_tiles_serve_transposes_of_long_axes(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], axes: list[int], kernel: str
) -> None:
    names: list[str] = []
    launch = CudaOperator.launch

    def watched(self: CudaOperator, name: str, *rest: Any, **options: Any) -> Any:
        names.append(name)
        return launch(self, name, *rest, **options)

    monkeypatch.setattr(CudaOperator, "launch", watched)
    run("Transpose", [numbers(shape)], axes=axes)
    assert names == [kernel]


@pytest.mark.parametrize("scales", [(2.0, 3.0), (1.5, 0.6)])
@pytest.mark.parametrize(("order", "block"), BLOCKS.items())
def test_images_in_blocks_of_channels_are_resized(order: str, block: int, scales: tuple[float, float]) -> None:
    x = numbers((2, 32, 5, 6))

    def blocked(array: Array) -> Array:
        split = array.reshape(2, -1, block, *array.shape[2:])
        return np.ascontiguousarray(np.moveaxis(split, 2, -1))

    arguments: dict[str, Any] = {"height_scale": scales[0], "width_scale": scales[1]}
    (y,) = run("ResizeNearest", [x], **arguments)
    np.testing.assert_array_equal(run("ResizeNearest", [blocked(x)], order=order, **arguments)[0], blocked(y))
    (dx,) = run("ResizeNearestGradient", [y, x], **arguments)
    (found,) = run("ResizeNearestGradient", [blocked(y), blocked(x)], order=order, **arguments)
    np.testing.assert_array_equal(found, blocked(dx))
