"""Strided tensors: what is adopted or fed in a layout keeps it, and what cannot is packed or refused."""

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from dagexec import Workspace
from dagexec.core.descriptor import TensorDescriptor
from dagexec.core.dtypes import FLOAT32, FLOAT64
from dagexec.core.tensor import Tensor
from dagexec.errors import ResourceError, ShapeError

Array = npt.NDArray[Any]
NHWC = TensorDescriptor.ordered((2, 3, 4, 5), "NHWC")


def numbered(shape: tuple[int, ...] = (2, 3, 4, 5)) -> Array:
    return np.arange(math.prod(shape), dtype=np.float32).reshape(shape)


def columns() -> tuple[Array, Array]:
    """A matrix, and its even columns."""
    matrix = numbered((3, 6))
    return matrix, matrix[:, ::2]


def test_a_strided_array_is_adopted_with_its_memory_and_strides() -> None:
    matrix, even = columns()
    tensor = Tensor()
    tensor.adopt_strided(even)
    assert np.shares_memory(tensor.array, matrix)
    assert tensor.descriptor == TensorDescriptor((3, 3), (6, 2))
    assert not tensor.is_packed
    assert (tensor.shape, tensor.meta, tensor.nbytes, tensor.capacity) == ((3, 3), FLOAT32, 36, 0)
    matrix[0, 2] = 50
    assert tensor.fetch().tolist() == [[0, 50, 4], [6, 8, 10], [12, 14, 16]]
    assert tensor.fetch().flags.c_contiguous


def test_a_contiguous_array_is_adopted_as_ever() -> None:
    tensor, mine = Tensor(), numbered()
    tensor.adopt_strided(mine, writable=True)
    assert tensor.is_packed
    assert tensor.capacity == mine.nbytes


def test_an_empty_tensor_counts_as_packed() -> None:
    assert Tensor().is_packed
    tensor = Tensor()
    tensor.adopt_strided(np.zeros((0, 3), np.float32)[:, ::-1])
    assert tensor.is_packed


def test_arrays_that_no_descriptor_describes_are_not_adopted() -> None:
    tensor = Tensor()
    with pytest.raises(ShapeError, match=r"strides .* must be 0 or more"):
        tensor.adopt_strided(numbered((3, 4))[::-1])
    with pytest.raises(ShapeError, match="timedelta64"):
        tensor.adopt_strided(np.zeros((3, 4), "timedelta64[s]").T)
    with pytest.raises(ShapeError, match="bytes only"):
        tensor.adopt_strided(np.array([["a", b"b"], [b"c", b"d"]], object).T)
    assert tensor.is_empty


def test_an_overlapping_view_is_adopted_for_reading() -> None:
    tensor = Tensor()
    tensor.adopt_strided(np.broadcast_to(np.float32(3), (2, 2)))
    assert tensor.descriptor.is_overlapping
    assert tensor.fetch().tolist() == [[3, 3], [3, 3]]


def test_resizing_to_another_shape_never_writes_between_the_elements_of_an_adopted_array() -> None:
    for shape in [(9,), (2, 2), (4, 5), (0,)]:
        matrix, even = columns()
        tensor = Tensor()
        tensor.adopt_strided(even, writable=True)
        tensor.resize(shape, FLOAT32)[...] = -1
        assert tensor.is_packed
        np.testing.assert_array_equal(matrix, numbered((3, 6)))


def test_resizing_keeps_the_values_while_their_number_stays() -> None:
    tensor = Tensor()
    tensor.adopt_strided(columns()[1], writable=True)
    assert tensor.resize((9,), FLOAT32).tolist() == [0, 2, 4, 6, 8, 10, 12, 14, 16]
    tensor = Tensor()
    tensor.feed(numbered(), NHWC)
    np.testing.assert_array_equal(tensor.resize((6, 20), FLOAT32), numbered((6, 20)))


def test_resizing_to_the_same_keeps_a_writable_layout_and_leaves_one_that_is_not() -> None:
    matrix, even = columns()
    tensor = Tensor()
    tensor.adopt_strided(even, writable=True)
    tensor.resize((3, 3), FLOAT32)[...] = -1
    assert matrix.tolist()[0] == [-1, 1, -1, 3, -1, 5]
    matrix, even = columns()
    tensor.adopt_strided(even)
    array = tensor.resize((3, 3), FLOAT32)
    assert array.flags.c_contiguous
    assert array.tolist() == even.tolist()
    array[...] = 7
    np.testing.assert_array_equal(matrix, numbered((3, 6)))


def test_a_read_only_array_is_not_written_even_when_adopted_as_writable() -> None:
    _, even = columns()
    even.flags.writeable = False
    tensor = Tensor()
    tensor.adopt_strided(even, writable=True)
    tensor.resize((3, 3), FLOAT32)[...] = 0


def test_feeding_lays_the_values_out_as_the_descriptor_says() -> None:
    tensor = Tensor()
    tensor.feed(numbered(), NHWC)
    assert tensor.descriptor == NHWC
    assert tensor.array.transpose(0, 2, 3, 1).flags.c_contiguous
    assert tensor.fetch().tobytes() == numbered().tobytes()
    assert tensor.capacity == tensor.nbytes


def test_feeding_the_same_layout_again_goes_into_the_memory_already_there() -> None:
    tensor = Tensor()
    tensor.feed(numbered(), NHWC)
    array = tensor.array
    tensor.feed(numbered() + 1, NHWC)
    assert tensor.array is array
    np.testing.assert_array_equal(tensor.fetch(), numbered() + 1)


def test_the_layout_is_what_the_last_feed_said() -> None:
    tensor, padded = Tensor(), TensorDescriptor((2, 3, 4, 5), (96, 32, 8, 1))
    for descriptor in [NHWC, None, padded, TensorDescriptor.packed((2, 3, 4, 5)), NHWC, padded]:
        tensor.feed(numbered(), descriptor)
        assert tensor.descriptor == (descriptor or TensorDescriptor.packed((2, 3, 4, 5)))
        np.testing.assert_array_equal(tensor.fetch(), numbered())
    tensor.feed(numbered().astype(np.float64), padded)
    assert (tensor.meta, tensor.descriptor) == (FLOAT64, padded)


def test_feeding_does_not_write_to_an_adopted_array() -> None:
    for writable in (False, True):
        matrix, even = columns()
        tensor = Tensor()
        tensor.adopt_strided(even, writable)
        tensor.feed(np.zeros((3, 3), np.float32))
        assert tensor.is_packed
        np.testing.assert_array_equal(matrix, numbered((3, 6)))


def test_what_cannot_be_laid_out_is_not_fed() -> None:
    tensor = Tensor()
    tensor.feed(np.ones(2, np.float32))
    with pytest.raises(ShapeError, match=r"values of shape \(2, 3\) cannot be laid out as \[2, 3, 4, 5\] NHWC"):
        tensor.feed(numbered((2, 3)), NHWC)
    with pytest.raises(ShapeError, match=r"overlapping layout cannot be written to: shape \(2, 3\), strides \(0, 1\)"):
        tensor.feed(numbered((2, 3)), TensorDescriptor((2, 3), (0, 1)))
    with pytest.raises(ResourceError, match=r"float32 tensor of \[2, 3\] NC strides \(1099511627776, 1\) needs"):
        tensor.feed(numbered((2, 3)), TensorDescriptor((2, 3), (2**40, 1)))
    assert tensor.fetch().tolist() == [1, 1]


def test_strings_have_layouts_too() -> None:
    words = np.array([[b"a", b"bc"], [b"", b"d"]], object)
    tensor = Tensor()
    tensor.feed(words, TensorDescriptor.ordered((2, 2), "CN"))
    assert tensor.descriptor.order == "CN"
    assert tensor.fetch().tolist() == words.tolist()
    tensor.adopt_strided(words.T)
    assert tensor.fetch().tolist() == words.T.tolist()


def test_a_strided_tensor_is_shared_under_its_own_shape_only() -> None:
    x, y = Tensor(), Tensor()
    x.feed(numbered(), NHWC)
    y.share(x)
    assert y.descriptor == NHWC
    assert y.shares_storage_with(x)
    with pytest.raises(ShapeError, match=r"a view of shape \(120,\) needs a packed tensor, found one of .* NHWC"):
        y.share(x, (120,))


def test_a_frozen_strided_tensor_keeps_its_layout_and_refuses_writes() -> None:
    tensor = Tensor()
    tensor.feed(numbered(), NHWC)
    tensor.freeze()
    assert tensor.descriptor == NHWC
    with pytest.raises(ValueError, match="read-only"):
        tensor.array[0] = 0
    tensor.feed(numbered() + 1, NHWC)
    assert tensor.constant is None
    np.testing.assert_array_equal(tensor.fetch(), numbered() + 1)


def test_a_workspace_feeds_adopts_and_fetches_strided_blobs() -> None:
    parent = Workspace()
    parent.feed_blob("x", numbered(), NHWC)
    assert parent.get_blob("x").tensor().descriptor == NHWC
    child = Workspace(parent)
    np.testing.assert_array_equal(child.fetch_blob("x"), numbered())
    matrix, even = columns()
    child.adopt_strided_blob("x", even)
    assert np.shares_memory(child.get_blob("x").tensor().array, matrix)
    np.testing.assert_array_equal(parent.fetch_blob("x"), numbered())
    child.adopt_blob("x", even)
    assert child.get_blob("x").tensor().is_packed
