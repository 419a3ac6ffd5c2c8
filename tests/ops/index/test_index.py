"""Gather, OneHot and TopK, against loops over positions and sorted Python lists."""

import itertools
import math
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dagexec
from dagexec import InputInfo, Model, NetDef
from dagexec.core.dtypes import FLOAT32, INT64
from dagexec.core.node import arguments_of
from dagexec.core.registry import schema_of
from dagexec.core.schema import OperatorCall, TensorType
from dagexec.errors import DagexecError, OperatorError, ShapeError
from dagexec.ops.kernels.gather_kernel import gather_step
from dagexec.scheduler.nets.simple import SimpleNet
from tests.ops.running import operator_def, run_operator, workspace_of

Array = npt.NDArray[Any]


def numbered(shape: tuple[int, ...], dtype: npt.DTypeLike = np.float32) -> Array:
    return np.arange(int(np.prod(shape)), dtype=np.int64).reshape(shape).astype(dtype)


@st.composite
def gather_case(draw: st.DrawFn) -> tuple[Array, Array, int]:
    shape = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    axis = draw(st.integers(0, len(shape) - 1))
    index_shape = tuple(draw(st.lists(st.integers(0, 3), max_size=2)))
    count = int(np.prod(index_shape))
    picks = draw(st.lists(st.integers(0, shape[axis] - 1), min_size=count, max_size=count))
    dtype = draw(st.sampled_from([np.int32, np.int64]))
    data = draw(st.sampled_from([np.float32, np.float64, np.int8, ml_dtypes.bfloat16]))
    return numbered(shape, data), np.array(picks, dtype).reshape(index_shape), axis


@pytest.mark.slow
@given(gather_case())
@settings(max_examples=60, deadline=None)
def test_gather_replaces_the_axis_by_the_axes_of_the_indices(case: tuple[Array, Array, int]) -> None:
    data, indices, axis = case
    [y] = run_operator("Gather", [data, indices], axis=axis)
    assert y.shape == data.shape[:axis] + indices.shape + data.shape[axis + 1 :]
    assert y.dtype == data.dtype
    for before in itertools.product(*map(range, data.shape[:axis])):
        for place in itertools.product(*map(range, indices.shape)):
            for after in itertools.product(*map(range, data.shape[axis + 1 :])):
                assert y[before + place + after] == data[(*before, int(indices[place]), *after)]


def test_gather_takes_rows_by_default_also_of_strings() -> None:
    [y] = run_operator("Gather", [np.array([[b"a"], [b"b"], [b"c"]], object), np.array([2, 0])])
    assert y.tolist() == [[b"c"], [b"a"]]


@pytest.mark.parametrize("arguments", [{}, {"wrap_indices": 1}])
def test_gather_wraps_negative_indices_on_axis_0_unless_told_otherwise(arguments: dict[str, int]) -> None:
    data, indices = numbered((3, 2)), np.array([-1, -3, 2], np.int32)
    [y] = run_operator("Gather", [data, indices], **arguments)
    assert y.tolist() == [[4, 5], [0, 1], [4, 5]]
    with pytest.raises(OperatorError, match=r"Gather 'y0'.*index -1 at place 0 must be in \[0, 3\)"):
        run_operator("Gather", [data, indices], wrap_indices=0)


def test_gather_wraps_negative_indices_on_another_axis_only_when_asked() -> None:
    data, indices = numbered((2, 3)), np.array([-1, -3])
    [y] = run_operator("Gather", [data, indices], axis=1, wrap_indices=1)
    assert y.tolist() == [[2, 0], [5, 3]]
    with pytest.raises(OperatorError, match=r"Gather 'y0'.*index -1 at place 0 must be in \[0, 3\)"):
        run_operator("Gather", [data, indices], axis=1)
    with pytest.raises(OperatorError, match=r"BatchGather 'y0'.*index -1 at place 0 must be in \[0, 3\)"):
        run_operator("BatchGather", [data, indices])


@pytest.mark.parametrize("shape", [(2, 3, 5, 2), (2, 3, 4), (2, 3, 1, 1)], ids=str)
@pytest.mark.parametrize("axis", [1, 2])
def test_with_match_outer_each_place_before_the_axis_has_its_own_picks(axis: int, shape: tuple[int, ...]) -> None:
    data = numbered(shape)
    indices = np.random.default_rng(0).integers(0, shape[axis], size=(*shape[:axis], 2, 3))
    [y] = run_operator("Gather", [data, indices], axis=axis, match_outer=1)
    expected = [data[outer][indices[outer]] for outer in itertools.product(*map(range, shape[:axis]))]
    np.testing.assert_array_equal(y, np.array(expected).reshape(y.shape))
    assert y.shape == (*shape[:axis], 2, 3, *shape[axis + 1 :])
    [wrapped] = run_operator("Gather", [data, indices - shape[axis]], axis=axis, match_outer=1, wrap_indices=1)
    np.testing.assert_array_equal(wrapped, y)


def test_with_match_outer_the_indices_must_begin_with_the_axes_of_the_data() -> None:
    with pytest.raises(ShapeError, match=r"INDICES must begin with the axes \(2,\) of DATA, found \(3, 1\)"):
        run_operator("BatchGather", [numbered((2, 3)), np.zeros((3, 1), np.int64)], match_outer=1)
    with pytest.raises(OperatorError, match=r"index 3 at place 1 must be in \[0, 3\)"):
        run_operator("BatchGather", [numbered((2, 3)), np.array([[0], [3]])], match_outer=1)


@pytest.mark.parametrize(("wrap", "bad", "low"), [(0, 3, 0), (1, 3, -3), (1, -4, -3), (0, 2**40, 0)])
def test_an_index_out_of_range_names_operator_place_and_range(wrap: int, bad: int, low: int) -> None:
    with pytest.raises(OperatorError, match=rf"Gather 'y0'.*index {bad} at place 2 must be in \[{low}, 3\)") as caught:
        run_operator("Gather", [numbered((3, 2)), np.array([0, 1, bad, 9])], wrap_indices=wrap)
    assert isinstance(caught.value.__cause__, IndexError)


def test_a_net_runs_again_after_an_index_out_of_range() -> None:
    workspace = workspace_of({"data": numbered((3,)), "i": np.array([5])})
    with SimpleNet(NetDef(name="n", op=[operator_def("Gather", ["data", "i"], ["y"])]), workspace) as net:
        with pytest.raises(OperatorError):
            net.run()
        workspace.feed_blob("i", np.array([2]))
        net.run()
    assert workspace.fetch_blob("y").tolist() == [2.0]


def test_indices_into_nothing_are_out_of_range_even_when_nothing_is_copied() -> None:
    with pytest.raises(OperatorError, match=r"index 0 at place 0 must be in \[0, 0\)"):
        run_operator("Gather", [np.zeros((0, 2), np.float32), np.array([0])], wrap_indices=0)
    with pytest.raises(OperatorError, match=r"index 7 at place 0 must be in \[-2, 2\)"):
        run_operator("Gather", [np.zeros((2, 0), np.float32), np.array([7])])


def test_from_an_axis_without_elements_nothing_is_picked_as_in_caffe2() -> None:
    [y] = run_operator("Gather", [np.zeros((0, 2), np.float32), np.array([5, 3, 1])])
    assert y.shape == (0, 2)


def test_gather_refuses_indices_that_are_no_integers() -> None:
    with pytest.raises(ShapeError, match="'x1' must be one of int32, int64, found float32"):
        run_operator("Gather", [numbered((3,)), np.array([1.0], np.float32)])


def test_batch_gather_picks_the_same_from_every_batch_element() -> None:
    data = numbered((2, 3, 2))
    [y] = run_operator("BatchGather", [data, np.array([[2, 0]], np.int32)])
    assert y.shape == (2, 1, 2, 2)
    for batch in range(2):
        np.testing.assert_array_equal(y[batch, 0], [data[batch, 2], data[batch, 0]])
    with pytest.raises(ShapeError, match="at least 2 axes"):
        run_operator("BatchGather", [numbered((3,)), np.array([0])])


@pytest.mark.slow
@given(st.integers(1, 6), st.data())
@settings(max_examples=30, deadline=None)
def test_one_hot_has_a_single_one_in_each_row(size: int, data: st.DataObject) -> None:
    indices = data.draw(st.lists(st.integers(0, size - 1), max_size=5))
    [y] = run_operator("OneHot", [np.array(indices, np.int64), np.array([size], np.int64)])
    assert y.dtype == np.float32
    assert y.tolist() == [[int(column == index) for column in range(size)] for index in indices]


def test_one_hot_checks_indices_and_size() -> None:
    with pytest.raises(OperatorError, match=r"index 4 at place 1 must be in \[0, 4\)"):
        run_operator("OneHot", [np.array([1, 4]), np.array([4])])
    with pytest.raises(DagexecError, match="the row size must be one number"):
        run_operator("OneHot", [np.array([1]), np.array([4, 5])])


def top_of_list(values: list[float], k: int) -> list[int]:
    """Indices of the k largest: NaN first, then by value, then by index."""
    keys = [(0 if math.isnan(v) else 1, 0.0 if math.isnan(v) else -v, i) for i, v in enumerate(values)]
    return [i for _, _, i in sorted(keys)[:k]]


TOPK_TYPES = [np.float32, np.float64, np.float16, ml_dtypes.bfloat16, np.int8, np.uint8, np.int32, np.int64, np.uint16]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", TOPK_TYPES)
@given(data=st.data())
@settings(max_examples=20, deadline=None)
def test_topk_sorts_every_row_and_puts_the_lower_index_first(dtype: npt.DTypeLike, data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    axis = data.draw(st.integers(-len(shape), len(shape) - 1))
    k = data.draw(st.integers(0, shape[axis]))
    if np.dtype(dtype).kind == "u":
        elements = st.sampled_from([0, 1, 2, 254, 255])
    elif np.dtype(dtype).kind == "i":
        elements = st.sampled_from([-128, -2, -1, 0, 1, 2, 127])
    else:
        elements = st.sampled_from([-math.inf, -2.0, -1.0, -0.0, 0.0, 0.5, 2.0, math.inf, math.nan, -math.nan])
    count = int(np.prod(shape))
    x = np.array(data.draw(st.lists(elements, min_size=count, max_size=count))).reshape(shape).astype(dtype)
    if data.draw(st.booleans()):
        values, indices, flat = run_operator("TopK", [x], 3, k=k, axis=axis)
    else:
        values, indices, flat = run_operator("TopK", [x, np.array([k])], 3, axis=axis)
    assert values.dtype == x.dtype
    assert indices.dtype == flat.dtype == np.int64
    rows = np.moveaxis(x, axis, -1).reshape(-1, shape[axis])
    kept = np.moveaxis(indices, axis, -1).reshape(-1, k) if k else np.zeros((len(rows), 0), np.int64)
    for row, found in zip(rows, kept, strict=True):
        assert found.tolist() == top_of_list([float(v) for v in row], k)
    assert values.tobytes() == np.take_along_axis(x, indices, axis).tobytes()
    assert values.tobytes() == x.reshape(-1)[flat].tobytes()


def test_topk_orders_many_numbers() -> None:
    x = np.random.default_rng(0).standard_normal((3, 1000)).astype(np.float32)
    values, indices = run_operator("TopK", [x], 2, k=17)
    for row, found, where in zip(x, values, indices, strict=True):
        assert found.tolist() == sorted(row.tolist(), reverse=True)[:17]
        assert row[where].tolist() == found.tolist()


def test_topk_refuses_a_k_that_does_not_fit() -> None:
    x = numbered((2, 3))
    with pytest.raises(DagexecError, match=r"'k' must be one number in \[0, 3\], the size of axis 1, found \[4\]"):
        run_operator("TopK", [x], 2, k=4)
    with pytest.raises(DagexecError, match="'k' is missing"):
        run_operator("TopK", [x], 2)
    with pytest.raises(DagexecError, match="expected numbers, found bool"):
        run_operator("TopK", [np.array([True])], 2, k=1)


@pytest.mark.slow
@pytest.mark.parametrize("largest", [0, 1])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, np.int32, np.uint8])
def test_the_few_of_a_long_row_are_found_as_by_sorting_all(dtype: Any, largest: int) -> None:
    """With many equal elements, a row of one number, zeros of both signs, and NaN, also behind the last group."""
    rng = np.random.default_rng(4)
    x = rng.integers(0, 40, (6, 2500)).astype(dtype)
    x[1] = 7
    if x.dtype.kind == "f":
        x[2] = np.where(rng.random(2500) < 0.5, 0.0, -0.0)
        x[3, 100:103] = x[4, -1] = np.nan
    values, indices = run_operator("TopK", [x], outputs=2, k=30, largest=largest)
    keys = np.where(np.isnan(x), np.inf, x.astype(np.float64)) * (-1 if largest else 1)
    expected = np.argsort(keys, axis=1, kind="stable")[:, :30]
    np.testing.assert_array_equal(indices, expected)
    np.testing.assert_array_equal(values, np.take_along_axis(x, expected, axis=1))


@pytest.mark.parametrize("dtype", [np.float32, np.int8, np.float64, np.float16], ids=str)
@pytest.mark.parametrize("row", [1, 2, 3, 16, 71, 600])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("index", [np.int32, np.int64])
def test_gather_writes_what_numpy_takes_and_nothing_beside_it(dtype: type, row: int, axis: int, index: type) -> None:
    random = np.random.default_rng(0)
    data = random.integers(0, 100, (5, 7, row)[-2 - axis :]).astype(dtype)
    indices = random.integers(-7, 7, (3, 4)).astype(index)
    around = np.full(2 * 64 + data.size // 7 * indices.size, 111, dtype)
    y = around[64:-64].reshape(*data.shape[:axis], 3, 4, row)
    step = gather_step(data, indices, y, axis, wraps=True, failure=IndexError)
    if step is None:
        pytest.skip("machine code does not run here")
    step()
    np.testing.assert_array_equal(y, np.take(data, indices, axis))
    assert (around[:64] == 111).all()
    assert (around[-64:] == 111).all()
    y[...] = 55
    for bad in (7, -8):
        indices[2, 3] = bad
        with pytest.raises(IndexError):
            step()
    assert (y == 55).all()


@pytest.mark.parametrize("bad", [3, 64, -4, -64])
@pytest.mark.parametrize("index", [np.int32, np.int64])
def test_an_index_that_changes_after_all_were_checked_is_checked_where_it_is_used(index: type, bad: int) -> None:
    """Here by what the lookup writes: each result is the next index."""
    whole = np.full(256, 7, index)
    data = whole[128:131]
    data[:] = 1, bad, 2
    memory = np.zeros(4, index)
    step = gather_step(data, memory[:3], memory[1:], 0, wraps=True, failure=IndexError)
    if step is None:
        pytest.skip("machine code does not run here")
    with pytest.raises(IndexError):
        step()
    assert memory.tolist() == [0, 1, bad, 0]


def test_an_index_out_of_range_names_its_operator_among_lookups_that_are_joined() -> None:
    net = NetDef(name="n", op=[operator_def("Gather", ["data", name], [f"y_{name}"]) for name in "ijk"])
    inputs = {name: InputInfo() for name in ("data", "i", "j", "k")}
    feeds = {"data": numbered((3, 2)), "i": np.array([2, 0]), "j": np.array([1]), "k": np.array([0])}
    model = Model("n", net, inputs=inputs, outputs=("y_i", "y_j", "y_k"))
    with dagexec.compile(model, optimize=False, net_type="simple", num_workers=1) as executor:
        for _ in range(3):
            assert executor.run(feeds)["y_j"].tolist() == [[2, 3]]
        with pytest.raises(OperatorError, match=r"Gather 'y_j'.*index 3 at place 0") as caught:
            executor.run(feeds | {"j": np.array([3])})
    assert "y_j" in str(caught.value.operator)


def test_a_lookup_costs_what_it_reads_and_not_the_table() -> None:
    definition = operator_def("Gather", ["table", "i"], ["y"])
    types = TensorType((10**6, 64), FLOAT32), TensorType((2,), INT64)
    call = OperatorCall(definition, arguments_of(definition, "g"), types, (None, None), "g")
    cost = schema_of("Gather").cost(call, [TensorType((2, 64), FLOAT32)])
    assert (cost.bytes_read, cost.bytes_written) == (2 * 256 + 2 * 8, 2 * 256)
