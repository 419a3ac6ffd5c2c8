"""Tensors: memory that is kept, shared, adopted and left; what is fed is what is fetched."""

from collections.abc import Hashable
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from dagexec.core.descriptor import TensorDescriptor
from dagexec.core.dtypes import ALL_TYPES, FLOAT32, FLOAT64, INT32, STRING, TypeMeta
from dagexec.core.tensor import Tensor, as_bytes_objects, binding_epoch
from dagexec.errors import MissingBlobError, ResourceError, ShapeError
from dagexec.platform.host_memory import aligned_bytes
from tests.memory_limits import leave

Array = npt.NDArray[Any]


def filled(shape: tuple[int, ...], meta: TypeMeta = FLOAT32) -> Tensor:
    tensor = Tensor()
    tensor.feed(np.arange(int(np.prod(shape))).reshape(shape).astype(meta.numpy))
    return tensor


def address(array: Array) -> int:
    return int(array.ctypes.data)


def test_a_new_tensor_is_empty_and_says_so() -> None:
    tensor = Tensor()
    assert tensor.is_empty
    assert tensor.capacity == 0
    assert tensor.current_array() is None
    with pytest.raises(MissingBlobError, match="the tensor is empty: feed it"):
        _ = tensor.array


def test_a_cleared_tensor_is_empty_and_keeps_no_memory() -> None:
    tensor, other = Tensor(), Tensor()
    tensor.resize((3,), FLOAT32)[...] = 7
    other.share(tensor)
    epoch = binding_epoch()
    tensor.clear()
    assert tensor.is_empty
    assert tensor.capacity == 0
    assert binding_epoch() != epoch
    assert (other.array == 7).all()


def test_resize_keeps_memory_while_the_capacity_suffices() -> None:
    tensor = Tensor()
    first = address(tensor.resize((4, 6), FLOAT32))
    assert tensor.nbytes == tensor.capacity == 96
    assert address(tensor.resize((2, 3), FLOAT32)) == first
    assert (tensor.nbytes, tensor.capacity) == (24, 96)
    assert address(tensor.resize((12,), FLOAT64)) == first
    tensor.resize((5, 6), FLOAT32)
    assert tensor.capacity == 120


def test_resize_to_the_same_is_free_and_keeps_the_array() -> None:
    tensor = filled((2, 3))
    array, epoch = tensor.array, binding_epoch()
    assert tensor.resize((2, 3), FLOAT32) is array
    assert binding_epoch() == epoch


@pytest.mark.parametrize("change", ["resize", "adopt", "share", "retype"])
def test_the_epoch_changes_whenever_a_tensor_is_given_another_array(change: str) -> None:
    tensor, other = filled((2, 3)), filled((6,))
    before = binding_epoch()
    if change == "resize":
        tensor.resize((3, 2), FLOAT32)
    elif change == "retype":
        tensor.resize((2, 3), INT32)
    elif change == "adopt":
        tensor.adopt(np.zeros(2))
    else:
        tensor.share(other, (2, 3))
    assert binding_epoch() != before


def test_memory_is_aligned_to_a_cache_line() -> None:
    for size in (1, 7, 1000):
        assert address(Tensor().resize((size,), FLOAT32)) % 64 == 0


def test_a_view_shares_storage_under_another_shape() -> None:
    x, y = filled((2, 3)), Tensor()
    y.share(x, (3, 2))
    assert y.is_view
    assert y.shares_storage_with(x)
    x.array[0, 1] = 50
    assert y.array.tolist() == [[0, 50], [2, 3], [4, 5]]
    with pytest.raises(ShapeError, match=r"view of shape \(4,\) cannot share the storage of a tensor of shape \(2, 3"):
        y.share(x, (4,))
    with pytest.raises(MissingBlobError):
        y.share(Tensor())


def test_feeding_a_view_takes_memory_of_its_own() -> None:
    x, y = filled((2, 3)), Tensor()
    y.share(x)
    y.feed(np.full((2, 3), 9, np.float32))
    assert not y.is_view
    assert not y.shares_storage_with(x)
    assert x.fetch().tolist() == [[0, 1, 2], [3, 4, 5]]
    assert y.fetch().tolist() == [[9, 9, 9], [9, 9, 9]]


@pytest.mark.parametrize("shape", [(2, 3), (6,), (3,), (4, 4)])
def test_resizing_a_view_never_gives_the_memory_of_the_viewed_tensor(shape: tuple[int, ...]) -> None:
    x, y = filled((2, 3)), Tensor()
    y.share(x)
    y.resize(shape, FLOAT32)[...] = -1
    assert not y.is_view
    assert x.fetch().tolist() == [[0, 1, 2], [3, 4, 5]]


def test_a_view_that_leaves_keeps_its_values_when_their_number_stays() -> None:
    x, y = filled((2, 3)), Tensor()
    y.share(x)
    assert y.resize((3, 2), FLOAT32).tolist() == [[0, 1], [2, 3], [4, 5]]


def test_adopt_uses_the_array_itself_and_never_writes_to_it() -> None:
    mine = np.arange(6, dtype=np.float32).reshape(2, 3)
    tensor = Tensor()
    tensor.adopt(mine)
    assert np.shares_memory(tensor.array, mine)
    tensor.feed(np.zeros((2, 3), np.float32))
    assert mine.tolist() == [[0, 1, 2], [3, 4, 5]]
    tensor.adopt(mine)
    written = tensor.resize((2, 3), FLOAT32)
    assert written.tolist() == mine.tolist()
    written[...] = 7
    assert mine.tolist() == [[0, 1, 2], [3, 4, 5]]


def test_an_array_adopted_as_writable_is_resized_in_its_own_memory() -> None:
    mine = np.arange(6, dtype=np.float32)
    tensor = Tensor()
    tensor.adopt(mine, writable=True)
    assert tensor.capacity == 24
    tensor.resize((2, 2), FLOAT32)[...] = 8
    assert mine.tolist() == [8, 8, 8, 8, 4, 5]


def test_adopted_strings_count_their_capacity_in_elements() -> None:
    tensor = Tensor()
    tensor.adopt(np.array([b"a", b"b"], object), writable=True)
    assert tensor.resize((5,), STRING).shape == (5,)


def test_adopt_copies_what_is_not_contiguous_and_refuses_unknown_dtypes() -> None:
    mine = np.arange(6, dtype=np.float32).reshape(2, 3).T
    tensor = Tensor()
    tensor.adopt(mine)
    assert tensor.array.flags.c_contiguous
    np.testing.assert_array_equal(tensor.array, mine)
    with pytest.raises(ShapeError, match="timedelta64"):
        tensor.adopt(np.zeros(2, "timedelta64[s]"))


def test_adopt_keeps_a_scalar_a_scalar() -> None:
    tensor = Tensor()
    tensor.adopt(np.array(3.0))
    assert tensor.shape == ()


@pytest.mark.parametrize("meta", [meta for meta in ALL_TYPES if meta is not STRING], ids=str)
@given(data=st.data())
@settings(max_examples=15, deadline=None)
def test_what_is_fed_is_fetched_bit_for_bit(meta: TypeMeta, data: st.DataObject) -> None:
    shape = data.draw(arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3))
    carrier = np.dtype(np.uint16) if meta.numpy == ml_dtypes.bfloat16 else meta.numpy
    value = data.draw(arrays.arrays(carrier, shape)).view(meta.numpy)
    tensor = filled((2, 2))
    tensor.feed(value)
    fetched = tensor.fetch()
    assert (fetched.shape, fetched.dtype) == (shape, meta.numpy)
    assert fetched.tobytes() == value.tobytes()
    assert fetched.base is None


@pytest.mark.parametrize("given_as", [np.array(["a", "µ", ""]), np.array([b"a", "µ", b""], object)])
def test_strings_are_fetched_as_bytes(given_as: Array) -> None:
    tensor = Tensor()
    tensor.feed(given_as)
    assert tensor.meta is STRING
    assert tensor.fetch().tolist() == [b"a", "µ".encode(), b""]
    assert tensor.nbytes == 3 * STRING.itemsize


def test_objects_that_are_no_strings_are_refused() -> None:
    with pytest.raises(ShapeError, match="holds str or bytes, found int at element 1"):
        Tensor().feed(np.array([b"a", 5], object))


def test_strings_and_numbers_never_share_memory() -> None:
    tensor = filled((100,))
    tensor.feed(np.array(["a"]))
    assert tensor.fetch().tolist() == [b"a"]
    tensor.feed(np.zeros(2, np.float32))
    assert tensor.fetch().tolist() == [0.0, 0.0]


def test_feed_copies_into_memory_already_there_and_fetch_copies_out() -> None:
    tensor = filled((2, 3))
    where = address(tensor.array)
    source = np.ones((2, 3), np.float32)
    tensor.feed(source)
    assert address(tensor.array) == where
    source[...] = 5
    out = tensor.fetch()
    out[...] = 6
    assert tensor.array.tolist() == [[1, 1, 1], [1, 1, 1]]


def test_feeding_a_tensor_from_itself_backwards_is_safe() -> None:
    tensor = filled((5,))
    tensor.feed(tensor.array[::-1])
    assert tensor.fetch().tolist() == [4, 3, 2, 1, 0]


@pytest.mark.parametrize("meta", [FLOAT32, STRING], ids=str)
@pytest.mark.parametrize(
    ("shape", "message"), [((2**45,), "needs [0-9,]+ bytes"), ((2**62, 2**62), "overflows"), ((2, -1), "negative size")]
)
def test_a_size_that_does_not_fit_is_refused_and_the_tensor_stays(
    shape: tuple[int, ...], message: str, meta: TypeMeta
) -> None:
    tensor = filled((2,))
    with pytest.raises(ResourceError, match=message):
        tensor.resize(shape, meta)
    assert tensor.fetch().tolist() == [0, 1]


def test_rebind_returns_to_an_earlier_array() -> None:
    tensor = filled((2, 3))
    array, storage = tensor.array, tensor.storage()
    tensor.resize((100,), FLOAT64)
    tensor.rebind(array, storage)
    assert tensor.array is array
    assert (tensor.shape, tensor.meta) == ((2, 3), FLOAT32)


def test_a_constant_tensor_is_read_only_and_keeps_what_was_derived_from_it() -> None:
    tensor = filled((3,))
    before = binding_epoch()
    tensor.freeze()
    assert binding_epoch() != before
    with pytest.raises(ValueError, match="read-only"):
        tensor.array[0] = 5
    constant = tensor.constant
    assert constant is not None
    calls: list[int] = []
    for key in ("double", "double", "again"):
        found = constant.derived(key, lambda: calls.append(1) or tensor.array * 2)  # type: ignore[func-returns-value]
        assert found.tolist() == [0, 2, 4]
    assert len(calls) == 2
    tensor.freeze()
    assert tensor.constant is constant


def test_a_packed_form_of_a_constant_is_kept_or_computed_once() -> None:
    tensor, kept = filled((3,)), aligned_bytes(12, "weights")
    tensor.freeze()
    constant, calls = tensor.constant, list[str]()
    assert constant is not None
    assert constant.find("kept", 12) is None
    constant.keep({"kept": kept, "short": kept[:8], "elsewhere": np.zeros(13, np.uint8)[1:]}.get)

    def computed(form: Hashable) -> Array:
        def compute() -> Array:
            calls.append(str(form))
            return np.zeros(12, np.uint8)

        return constant.packed(form, 12, compute)

    assert constant.find("kept", 12) is kept
    assert constant.find("short", 12) is None
    forms = ("kept", "short", "elsewhere", "other", "other", ("kept",))
    found = [computed(form) for form in forms]
    assert calls == ["short", "elsewhere", "other", "('kept',)"]
    assert found[0] is kept
    assert not any(array.flags.writeable for array in found)
    assert constant.find("other", 12) is found[3]
    assert constant.find("not yet", 12) is None
    assert set(constant.forms()) == set(forms)


def test_feeding_a_constant_tensor_makes_it_an_ordinary_one_with_other_memory() -> None:
    tensor = filled((3,))
    tensor.freeze()
    frozen = tensor.array
    tensor.feed(np.full(3, 7, np.float32))
    assert tensor.constant is None
    assert frozen.tolist() == [0, 1, 2]
    assert tensor.array.tolist() == [7, 7, 7]


def test_resizing_a_constant_tensor_leaves_its_memory() -> None:
    tensor = filled((4,))
    tensor.freeze()
    frozen = tensor.array
    tensor.resize((4,), FLOAT32)[...] = 9
    assert tensor.constant is None
    assert frozen.tolist() == [0, 1, 2, 3]


def test_only_a_tensor_with_memory_of_its_own_can_be_constant() -> None:
    view = Tensor()
    view.share(filled((2,)))
    with pytest.raises(ShapeError, match="a view cannot be made constant"):
        view.freeze()
    with pytest.raises(MissingBlobError):
        Tensor().freeze()


def test_what_must_fit_is_the_bytes_of_the_elements(monkeypatch: pytest.MonkeyPatch) -> None:
    leave(monkeypatch, 4000)
    assert Tensor().resize((10, 100), FLOAT32).nbytes == 4000
    with pytest.raises(ResourceError, match=r"tensor of shape \(11, 91\) needs 4,004 bytes; this machine has 4,000"):
        Tensor().resize((11, 91), FLOAT32)
    with pytest.raises(ResourceError, match="needs 4,004 bytes"):
        Tensor().feed(np.zeros((11, 91), np.float32), TensorDescriptor.ordered((11, 91), (1, 0)))


def test_more_strings_of_no_length_than_there_is_room_for_are_refused() -> None:
    array = np.lib.stride_tricks.as_strided(np.zeros(1, "S1").astype("S1"), (1 << 41,), (0,))
    with pytest.raises(ResourceError, match="2,199,023,255,552 strings"):
        as_bytes_objects(array)
