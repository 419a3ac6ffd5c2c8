"""Element-wise operators on CUDA: what the tests of the host's operators, run there, do not show."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagexec import NetDef, OperatorDef, Workspace
from dagexec.core.arguments import ArgumentValue
from dagexec.core.device import CPU, Device
from dagexec.devices.cuda import kernels
from dagexec.errors import NonFiniteError, OperatorError
from dagexec.ops.engines.cuda.base import broadcast_reduction, expression
from dagexec.scheduler.nets.simple import SimpleNet
from tests.cuda.emulated import cuda_devices
from tests.ops.running import assert_rounds_to, on_device, operator_def

Array = npt.NDArray[Any]

CUDA = Device("cuda", 0)
NARROW: list[Any] = [np.float16, ml_dtypes.bfloat16]
INTEGERS: list[Any] = [np.int8, np.uint8, np.int16, np.uint16, np.int32, np.int64, np.uint32, np.uint64]
rng = np.random.default_rng(7)


@pytest.fixture(autouse=True, scope="module")
def _devices() -> Iterator[None]:
    with cuda_devices():
        yield


def run(
    op_type: str, inputs: list[Array], outputs: int = 1, *, device: Device = CUDA, seed: int | None = None,
    **arguments: ArgumentValue,
) -> list[Array]:  # fmt: skip
    """The outputs of an operator on `device`."""
    names = [f"x{index}" for index in range(len(inputs))]
    definition = operator_def(op_type, names, [f"y{index}" for index in range(outputs)], **arguments)
    return on(device, definition, dict(zip(names, inputs, strict=True)), seed)


def on(device: Device, definition: OperatorDef, arrays: dict[str, Array], seed: int | None = None) -> list[Array]:
    """The outputs on `device`, with the seed of random numbers."""
    if seed is None:
        return on_device(device, definition, arrays)
    option = device.to_option()
    option.random_seed = seed
    definition.device_option.CopyFrom(option)
    workspace = Workspace()
    for name, array in arrays.items():
        workspace.feed_blob(name, array)
    with SimpleNet(NetDef(name="test", op=[definition]), workspace) as net:
        net.run()
        net.run()
        return [workspace.fetch_blob(name) for name in definition.output]


def same(found: Array, expected: Array) -> None:
    """The bytes are equal."""
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("op_type", ["Gelu", "Swish", "Tanh", "Abs", "Sqr", "Softplus", "HardSigmoid", "Clip", "Erf"])
def test_16_bit_floats_are_computed_in_float_and_rounded_once(op_type: str, dtype: Any) -> None:
    x = rng.normal(size=515).astype(dtype)
    (found,) = run(op_type, [x])
    (wide,) = run(op_type, [x.astype(np.float32)])
    same(found, wide.astype(dtype))


@pytest.mark.parametrize("dtype", NARROW)
def test_16_bit_sums_of_many_tensors_round_once(dtype: Any) -> None:
    inputs = [rng.normal(size=(3, 50)).astype(dtype) for _ in range(37)]
    (found,) = run("Sum", inputs)
    same(found, sum(x.astype(np.float32) for x in inputs).astype(dtype))  # type: ignore[union-attr]
    (mean,) = run("Mean", inputs)
    total = np.zeros((3, 50), np.float32)
    for x in inputs:
        total += x.astype(np.float32)
    same(mean, (total / np.float32(37)).astype(dtype))


@pytest.mark.parametrize("size", [0, 1, 255, 257, 16 * 256, 16 * 256 * 3 + 5])
def test_sizes_that_fill_no_block_and_more_than_a_grid(size: int) -> None:
    x = rng.normal(size=size).astype(np.float32)
    same(run("Sqr", [x])[0], x * x)


SHAPE_PAIRS = [
    ((4, 1, 5), (3, 1)), ((1,), (2, 3)), ((2, 3, 4, 5), (3, 1, 1)), ((6, 1), (1, 7)), ((), (2, 2)), ((0, 3), (1, 3)),
    ((2, 1, 2, 1, 2, 1, 2), (1, 3, 1, 3, 1, 3, 1)),
]  # fmt: skip


@pytest.mark.parametrize("wide_indices", [False, True])
@pytest.mark.parametrize(("a", "b"), SHAPE_PAIRS)
def test_operands_broadcast_with_indices_of_both_sizes(
    a: tuple[int, ...], b: tuple[int, ...], wide_indices: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if wide_indices:
        monkeypatch.setattr(expression, "MAX_ELEMENTS_32", 1)
    x, y = (rng.normal(size=shape).astype(np.float32) for shape in (a, b))
    same(run("Sub", [x, y])[0], np.asarray(x - y))
    same(run("LT", [x, y])[0], np.asarray(x < y))


@given(st.lists(st.sampled_from([1, 2, 3]), min_size=1, max_size=5), st.data())
@settings(max_examples=25, deadline=None)
def test_where_selects_from_any_shapes(sizes: list[int], data: st.DataObject) -> None:
    shapes = [[data.draw(st.sampled_from([1, size])) for size in sizes] for _ in range(3)]
    condition = rng.random(shapes[0]) < 0.5
    x, y = (rng.normal(size=shape) for shape in shapes[1:])
    same(run("Where", [condition, x, y])[0], np.where(condition, x, y))


@pytest.mark.parametrize("dtype", INTEGERS)
def test_integers_wrap_and_divide_as_on_the_host(dtype: Any) -> None:
    limits = np.iinfo(dtype)
    values = np.array([limits.min, limits.min + 1, 0, 1, 2, 7, limits.max - 1, limits.max], dtype)
    values = np.concatenate([values, -np.arange(1, 4).astype(dtype)])
    a, b = values[:, None], values[None, :]
    for op_type in ("Add", "Sub", "Mul", "Div", "Max", "Min", "GE"):
        same(run(op_type, [a, b])[0], run(op_type, [a, b], device=CPU)[0])
    if np.issubdtype(dtype, np.signedinteger):
        for op_type in ("Negative", "Abs", "Sign", "Sqr", "Cube"):
            same(run(op_type, [values])[0], run(op_type, [values], device=CPU)[0])


@pytest.mark.exact
def test_nan_is_kept_by_extremes_and_comparisons_are_false() -> None:
    x = np.array([np.nan, 1, np.nan, -np.inf, np.inf, -0.0], np.float32)
    y = np.array([1, np.nan, np.nan, np.inf, 3, 0.0], np.float32)
    for op_type in ("Max", "Min", "LE", "EQ", "NE"):
        same(run(op_type, [x, y])[0], run(op_type, [x, y], device=CPU)[0])
    same(run("Clip", [x], min=-1.0, max=2.0)[0], run("Clip", [x], device=CPU, min=-1.0, max=2.0)[0])
    same(run("Sign", [x])[0], np.sign(x))


ENDS = np.array([0, -0.0, 1, -1, 600, -600, 6e4, 1e6, -1e6, 3e9, -3e9, 1e19, -1e19, np.inf, -np.inf, np.nan, 2.5, -2.5])


@pytest.mark.parametrize("source", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("target", [*INTEGERS, np.bool_])
def test_floats_beyond_an_integer_are_cut_as_on_the_host(source: Any, target: Any) -> None:
    with np.errstate(all="ignore"):
        x = ENDS.astype(source)
    number = {np.bool_: "bool"}.get(target, np.dtype(target).name)
    same(run("Cast", [x], to=number)[0], run("Cast", [x], device=CPU, to=number)[0])


def test_float64_is_rounded_to_float16_once() -> None:
    between = np.float16(1) + np.float64(2.0**-11)  # half way: float32 would hide what is added to it
    x = np.concatenate(
        [[between, between + 2.0**-40, between - 2.0**-40], rng.normal(size=400) * 10.0 ** rng.integers(-9, 6, 400)]
    )
    with np.errstate(over="ignore"):
        same(run("Cast", [x], to="float16")[0], x.astype(np.float16))


@pytest.mark.parametrize("shape", [(70000,), (3, 700, 40), (2, 5, 9), (1, 3000), (9000, 3)])
@pytest.mark.parametrize("axes", [(0,), (-1,), (0, -1), "all"])
def test_sums_over_stretched_axes_are_accurate_and_do_not_depend_on_the_grid(
    shape: tuple[int, ...], axes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    axes = tuple(range(len(shape))) if axes == "all" else tuple({axis % len(shape) for axis in axes})
    a = rng.normal(size=shape).astype(np.float32)
    b = np.zeros([1 if axis in axes else size for axis, size in enumerate(shape)], np.float32)
    (found,) = run("SumReduceLike", [a, b])
    scale = np.abs(a.astype(np.float64)).sum(axes, keepdims=True).max()
    np.testing.assert_allclose(found, a.astype(np.float64).sum(axes, keepdims=True), rtol=0, atol=1e-6 * scale)
    monkeypatch.setattr(kernels, "_BLOCKS_PER_MULTIPROCESSOR", 3)
    same(run("SumReduceLike", [a, b])[0], found)
    monkeypatch.setattr(broadcast_reduction, "MAX_ELEMENTS_32", 1)
    same(run("SumReduceLike", [a, b])[0], found)


@pytest.mark.parametrize("dtype", [np.float64, *NARROW])
def test_gradients_of_stretched_operands_in_other_types(dtype: Any) -> None:
    dc, a, b = (rng.normal(size=shape).astype(dtype) for shape in ((4, 6, 5), (4, 6, 5), (6, 1)))
    for one, other in zip(
        run("MulGradient", [dc, a, b], 2), run("MulGradient", [dc, a, b], 2, device=CPU), strict=True
    ):
        assert_rounds_to(one, other, "MulGradient", [dc, a, b])


def test_an_operand_is_overwritten() -> None:
    a, b = rng.normal(size=(5, 3)).astype(np.float32), rng.normal(size=(1, 3)).astype(np.float32)
    definition = operator_def("Mul", ["a", "b"], ["a"])
    (found,) = on(CUDA, definition, {"a": a, "b": b})
    same(found, a * b)


def test_a_chain_adds_what_its_output_held() -> None:
    x, held = rng.normal(size=(2, 3, 400)).astype(np.float32)
    definition = operator_def("FusedElementwise", ["x", "y"], ["y"], post_ops=["square", "sum:1", "linear:2.0:1.0"])
    (found,) = on(CUDA, definition, {"x": x, "y": held})
    np.testing.assert_allclose(found, 2 * (x * x + held) + 1, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("size", [1, 7, 8, 9, 250, 33001])
@pytest.mark.parametrize("iteration", [0, 41])
def test_masks_of_dropout_are_the_hosts(size: int, iteration: int) -> None:
    x, counter = rng.normal(size=size).astype(np.float32), np.array([iteration])
    for inputs in ([x, counter], [x]):
        host = run("Dropout", inputs, 2, device=CPU, seed=99, is_test=0, ratio=0.3)
        found = run("Dropout", inputs, 2, seed=99, is_test=0, ratio=0.3)
        same(found[1], host[1])
        np.testing.assert_allclose(found[0], host[0], rtol=1e-6)
    if size > 100:
        assert 0.6 < found[1].mean() < 0.8


@pytest.mark.exact
@pytest.mark.parametrize(
    ("op_type", "arguments"),
    [
        ("XavierFill", {}), ("MSRAFill", {}), ("GaussianFill", {"mean": 1.0, "std": 2.0}),
        ("UniformFill", {"min": -1.0, "max": 3.0}), ("UniformIntFill", {"min": -5, "max": 9}),
    ],
)  # fmt: skip
def test_random_fillers_draw_what_the_host_draws(op_type: str, arguments: dict[str, Any]) -> None:
    host = run(op_type, [], device=CPU, seed=5, shape=[7, 33], **arguments)
    same(run(op_type, [], seed=5, shape=[7, 33], **arguments)[0], host[0])


@pytest.mark.exact
def test_bounds_of_a_filler_may_be_on_the_device() -> None:
    inputs = [np.array([3, 4], np.int32), np.array([-2.0], np.float32), np.array([-1.0], np.float32)]
    host = run("UniformFill", inputs, device=CPU, seed=5, input_as_shape=1)
    same(run("UniformFill", inputs, seed=5, input_as_shape=1)[0], host[0])


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.float64])
def test_what_is_not_finite_stops_the_run(dtype: Any) -> None:
    x = np.ones((5, 300), dtype)
    same(run("NanCheck", [x])[0], x)
    x[3, 7], x[4, 0] = np.inf, np.nan
    with pytest.raises(OperatorError, match=r"2 of 1500 elements of blob 'x0.* the first at \[3, 7\]: inf") as raised:
        run("NanCheck", [x])
    assert isinstance(raised.value.__cause__, NonFiniteError)


def test_buckets_hold_more_tensors_than_a_kernel_takes() -> None:
    tensors = [rng.normal(size=size).astype(np.float32) for size in range(40)]
    (bucket,) = run("PackBucket", tensors)
    same(bucket, np.concatenate(tensors))
    for found, expected in zip(run("UnpackBucket", [bucket, *tensors], 40), tensors, strict=True):
        same(found, expected)
    (mean,) = run("BucketSum", [bucket] * 20, divisor=20)
    np.testing.assert_allclose(mean, bucket, rtol=1e-6)
