"""Tensor descriptors: strides by order, packed or overlapping as the cuDNN guide defines it, views and conversions."""

import itertools
import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagexec.core.descriptor import TensorDescriptor, _addresses_meet, axis_order, convert
from dagexec.errors import ResourceError, ShapeError

Array = npt.NDArray[Any]
SHAPE = (4, 3, 2, 5)  # N, C, H, W


def numbered(shape: tuple[int, ...]) -> Array:
    return np.arange(math.prod(shape), dtype=np.int32).reshape(shape)


def addresses(descriptor: TensorDescriptor) -> list[int]:
    """The address of every index, by the definition of a stride."""
    indices = itertools.product(*map(range, descriptor.shape))
    return [sum(i * stride for i, stride in zip(index, descriptor.strides, strict=True)) for index in indices]


@st.composite
def small_descriptors(draw: st.DrawFn) -> TensorDescriptor:
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=4)))
    return TensorDescriptor(shape, tuple(draw(st.integers(0, 40)) for _ in shape))


def test_a_packed_stride_is_the_size_times_the_stride_of_the_next_axis_and_the_last_is_1() -> None:
    assert TensorDescriptor.packed((4, 3, 2, 1)).strides == (6, 2, 1, 1)
    assert TensorDescriptor.packed((4, 3, 2, 5)).strides == (30, 10, 5, 1)
    assert TensorDescriptor.packed((4, 3, 2, 5)).is_packed


@pytest.mark.parametrize(
    ("order", "strides"),
    [("NCHW", (30, 10, 5, 1)), ("NHWC", (30, 1, 15, 3)), ("CHWN", (1, 40, 20, 4)), ((1, 2, 3, 0), (1, 40, 20, 4))],
)
def test_an_order_gives_the_strides_of_the_transposed_packed_array(order: Any, strides: tuple[int, ...]) -> None:
    descriptor = TensorDescriptor.ordered(SHAPE, order)
    assert descriptor.strides == strides
    assert descriptor.is_fully_packed()
    assert descriptor.is_fully_packed(order)
    assert descriptor.is_packed == (order == "NCHW")


@pytest.mark.parametrize(
    ("shape", "order", "name", "strides"),
    [
        ((2, 3, 7), "NCW", "NCW", (21, 7, 1)),
        ((2, 3, 7), "NHWC", "NWC", (21, 1, 3)),
        ((2, 3, 4, 5, 6), "NHWC", "NDHWC", (360, 1, 90, 18, 3)),
        ((2, 3, 4, 5, 6), "NDHWC", "NDHWC", (360, 1, 90, 18, 3)),
        ((2, 3), "CN", "CN", (1, 2)),
        ((7,), "N", "N", (1,)),
        ((), "", "", ()),
        ((2, 3, 2, 2, 2, 2), (5, 4, 3, 2, 1, 0), "5 4 3 2 1 0", (1, 2, 6, 12, 24, 48)),
    ],
)
def test_orders_of_other_ranks(shape: tuple[int, ...], order: Any, name: str, strides: tuple[int, ...]) -> None:
    descriptor = TensorDescriptor.ordered(shape, order)
    assert (descriptor.order, descriptor.strides) == (name, strides)


@pytest.mark.parametrize(
    ("order", "rank", "message"),
    [
        ("NCHH", 4, "order 'NCHH' must hold each of the letters 'NCHW' of 4 axes once"),
        ("NHWC", 2, "letters 'NC' of 2 axes"),
        ("NCDHW", 4, "'NCDHW' must hold"),
        ((0, 0), 2, r"order \(0, 0\) must be a permutation of 0..1"),
        ("NCHW", 6, "up to 5 of them .* found 6: give a permutation"),
    ],
)
def test_an_order_that_is_none_is_refused(order: Any, rank: int, message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        axis_order(order, rank)


@given(st.permutations(range(4)), st.lists(st.integers(1, 4), min_size=4, max_size=4))
def test_the_order_found_is_one_that_makes_these_strides(order: list[int], shape: list[int]) -> None:
    descriptor = TensorDescriptor.ordered(shape, order)
    again = TensorDescriptor.ordered(shape, descriptor.order)
    assert again.is_same_layout(descriptor)
    assert sorted(addresses(descriptor)) == list(range(math.prod(shape)))


def test_where_sizes_of_one_leave_a_choice_the_logical_order_is_named_first() -> None:
    for strides in [(6, 2, 1, 1), (6, 2, 77, 1), (6, 2, 0, 3)]:
        assert TensorDescriptor((5, 3, 1, 2), (6, 2, 9, 1)).order == "NCHW"
        assert TensorDescriptor((1, 3, 1, 1), strides).order == "NCHW"
    assert TensorDescriptor((1, 3, 4, 5), (999, 1, 15, 3)).order == "NHWC"
    assert TensorDescriptor((2, 3, 1, 4), (12, 1, 0, 3)).order == "NHWC"
    assert TensorDescriptor((2, 1, 3, 4), (12, 5, 1, 3)).order == "NCWH"


def test_a_padded_row_leaves_an_image_unpacked_in_w_and_packed_in_what_surrounds_it() -> None:
    rows = TensorDescriptor((4, 3, 2, 5), (48, 16, 8, 1))  # rows of 5 in places of 8
    assert rows.is_partially_packed("W")
    assert rows.is_partially_packed("NC")
    assert not rows.is_partially_packed("HW")
    assert not rows.is_partially_packed("H")
    assert not rows.is_fully_packed()
    assert not rows.is_overlapping
    assert not rows.is_spatially_packed
    assert rows.span == 3 * 48 + 2 * 16 + 8 + 5


def test_the_wc_packed_nhwc_example_of_the_guide() -> None:
    rows = TensorDescriptor((4, 3, 2, 5), (50, 1, 20, 3))  # NHWC, rows of 5 pixels in places of 20 elements
    assert rows.order == "NHWC"
    assert rows.is_partially_packed("WC")
    assert not rows.is_partially_packed("HWC")
    assert not rows.is_partially_packed("CW")  # not in the order of this tensor
    assert not rows.is_spatially_packed


def test_the_n_packed_nchw_example_of_the_guide() -> None:
    descriptor = TensorDescriptor((4, 3, 2, 5), (60, 20, 10, 2))
    assert descriptor.is_partially_packed("N")
    assert descriptor.is_partially_packed("NCH")
    assert not descriptor.is_partially_packed("W")
    assert not descriptor.is_fully_packed()


@pytest.mark.parametrize(
    ("strides", "spatially"),
    [
        ((30, 10, 5, 1), True),
        ((64, 20, 5, 1), True),  # gaps between planes: NCHW HW-packed
        ((10, 40, 5, 1), True),  # CNHW HW-packed
        ((30, 1, 15, 3), False),  # channels last
        ((30, 10, 1, 2), False),  # W outside H
        ((30, 5, 5, 1), False),  # planes overlap
    ],
)
def test_spatially_packed_is_hw_packed_in_nchw_or_cnhw(strides: tuple[int, ...], spatially: bool) -> None:
    assert TensorDescriptor((4, 3, 2, 5), strides).is_spatially_packed == spatially


def test_tensors_of_one_and_of_three_spatial_axes_may_be_spatially_packed() -> None:
    assert TensorDescriptor((2, 3, 7), (50, 10, 1)).is_spatially_packed
    assert TensorDescriptor((2, 3, 2, 4, 5), (999, 40, 20, 5, 1)).is_spatially_packed
    assert not TensorDescriptor.packed((2, 3)).is_spatially_packed
    assert not TensorDescriptor.packed((2,) * 6).is_spatially_packed


@pytest.mark.parametrize("run", ["WX", "WW", "HD", (1, 1), (4,)])
def test_a_run_of_axes_that_are_not_there_is_refused(run: Any) -> None:
    with pytest.raises(ShapeError, match="named once"):
        TensorDescriptor.packed(SHAPE).is_partially_packed(run)


@pytest.mark.slow
@settings(max_examples=400)
@given(small_descriptors())
def test_overlapping_is_two_indices_with_one_address(descriptor: TensorDescriptor) -> None:
    found = addresses(descriptor)
    assert descriptor.is_overlapping == (len(set(found)) < len(found))
    assert descriptor.span == (max(found) + 1 if found else 0)
    dense = descriptor.elements == descriptor.span and not descriptor.is_overlapping
    assert descriptor.is_fully_packed() == dense
    assert descriptor.is_packed == (found == list(range(len(found))))


@pytest.mark.slow
@settings(max_examples=300)
@given(
    st.lists(st.tuples(st.integers(2, 7), st.integers(8, 120)), min_size=2, max_size=5).filter(
        lambda axes: math.prod(size for size, _ in axes) < 3000
    )
)
def test_overlapping_is_exact_where_sorted_strides_do_not_settle_it(axes: list[tuple[int, int]]) -> None:
    descriptor = TensorDescriptor(tuple(size for size, _ in axes), tuple(stride for _, stride in axes))
    found = addresses(descriptor)
    overlapping = len(set(found)) < len(found)
    assert descriptor.is_overlapping == overlapping
    by_stride = sorted(((stride, size) for size, stride in axes), reverse=True)
    assert _addresses_meet(by_stride) == overlapping  # what large cases use


@pytest.mark.parametrize(
    ("shape", "strides", "overlapping"),
    [
        ((3, 4), (0, 1), True),  # broadcast
        ((1, 4), (0, 1), False),
        ((0, 4), (0, 0), False),
        ((2, 3), (3, 2), False),  # 0 2 4, 3 5 7
        ((3, 3), (3, 2), False),
        ((3, 4), (3, 2), True),  # two steps of 3 are three of 2
        ((3, 3, 32, 32), (34, 1, 34, 1), True),  # windows of an image
        ((10**6, 10**6), (10**6, 10**6 - 1), False),
        ((10**6, 10**6 + 1), (10**6, 10**6 - 1), True),
        ((3, 3, 3), (2**59 + 4, 2**59 + 2, 2**59), True),
        ((2, 2, 2), (2**60 + 5, 2**60 + 2, 2**60), False),
    ],
)
def test_overlapping_of_particular_layouts(shape: tuple[int, ...], strides: tuple[int, ...], overlapping: bool) -> None:
    assert TensorDescriptor(shape, strides).is_overlapping == overlapping


def test_overlap_of_many_axes_takes_no_time_exponential_in_their_number() -> None:
    powers = [3**k for k in range(20)]
    assert not TensorDescriptor((2,) * 20, tuple(powers)).is_overlapping
    shifted = [2**20 + 2**k for k in range(12)]  # sums of equally many differ
    assert TensorDescriptor((2,) * 12, tuple(shifted)).is_overlapping == (len(set(map(sum, _subsets(shifted)))) < 2**12)
    mixed = tuple(2**19 + 12_347 * k * k % 400_009 for k in range(20))
    assert TensorDescriptor((2,) * 20, mixed).is_overlapping  # more sums than numbers below 2**22 leave apart


def _subsets(values: list[int]) -> list[tuple[int, ...]]:
    return [subset for count in range(len(values) + 1) for subset in itertools.combinations(values, count)]


def test_bad_descriptors_are_refused_with_their_numbers() -> None:
    with pytest.raises(ShapeError, match=r"strides \(4, -1\) of shape \(2, 4\) must be 0 or more"):
        TensorDescriptor((2, 4), (4, -1))
    with pytest.raises(ShapeError, match=r"shape \(2, 4\) has 2 axes, strides \(4,\) are 1"):
        TensorDescriptor((2, 4), (4,))
    with pytest.raises(ResourceError, match="negative size"):
        TensorDescriptor((2, -4), (4, 1))
    with pytest.raises(ResourceError, match="overflows: it spans"):
        TensorDescriptor((2**31, 2**31), (2**40, 1))
    with pytest.raises(ResourceError, match="overflows"):
        TensorDescriptor.packed((2**40, 2**40))
    with pytest.raises(ShapeError, match="must be 0 or more: copy"):
        TensorDescriptor.of(np.zeros((3, 4))[:, ::-1])
    fields = np.zeros(3, [("a", np.int32), ("b", np.int16)])
    with pytest.raises(ShapeError, match=r"stride of 6 bytes; expected a multiple of the 4 bytes"):
        TensorDescriptor.of(fields["a"])


def test_the_layout_of_an_array_is_found_and_sizes_of_one_have_no_say() -> None:
    x = numbered(SHAPE)
    assert TensorDescriptor.of(x.transpose(0, 2, 3, 1)).strides == (30, 5, 1, 10)
    assert TensorDescriptor.of(x[::2, :, :, 1:4]) == TensorDescriptor((2, 3, 2, 3), (60, 10, 5, 1))
    assert TensorDescriptor.of(np.broadcast_to(np.int32(3), (2, 2))).strides == (0, 0)
    assert TensorDescriptor.of(x[:1, :, ::-1][:, :, :1]).strides == (30, 10, 5, 1)
    assert TensorDescriptor.of(np.zeros((0, 3))[:, ::-1]).is_packed


@pytest.mark.slow
@settings(max_examples=200)
@given(st.permutations(range(4)), st.lists(st.integers(0, 4), min_size=4, max_size=4), st.permutations(range(4)))
def test_a_conversion_between_orders_is_a_transpose(source: list[int], shape: list[int], target: list[int]) -> None:
    values = numbered(tuple(shape))
    laid_out = convert(values, TensorDescriptor.ordered(shape, source))
    memory = np.empty(values.size, np.int32)
    converted = convert(laid_out, TensorDescriptor.ordered(shape, target), memory)
    np.testing.assert_array_equal(converted, values)
    np.testing.assert_array_equal(memory, values.transpose(target).reshape(-1))
    assert np.shares_memory(converted, memory) == (values.size > 0)


def test_a_conversion_leaves_the_gaps_of_its_target_alone() -> None:
    memory = np.full(14, -1, np.int32)
    convert(numbered((2, 3)), TensorDescriptor((2, 3), (8, 2)), memory)
    assert memory.tolist() == [0, -1, 1, -1, 2, -1, -1, -1, 3, -1, 4, -1, 5, -1]


def test_a_conversion_that_cannot_be_made_says_why() -> None:
    values = numbered((2, 3))
    with pytest.raises(ShapeError, match=r"values of shape \(2, 3\) cannot be laid out as \[3, 2\] NC fully packed"):
        convert(values, TensorDescriptor.packed((3, 2)))
    with pytest.raises(ShapeError, match=r"overlapping layout cannot be written to: shape \(2, 3\), strides \(1, 1\)"):
        convert(values, TensorDescriptor((2, 3), (1, 1)))
    with pytest.raises(ShapeError, match="int32 cannot be laid out in a buffer of float32"):
        convert(values, TensorDescriptor.packed((2, 3)), np.empty(6, np.float32))


def test_a_view_reads_and_writes_its_buffer() -> None:
    memory = np.arange(20)
    view = TensorDescriptor((2, 3), (10, 2)).view(memory)
    assert view.tolist() == [[0, 2, 4], [10, 12, 14]]
    view[1, 2] = -1
    assert memory[14] == -1
    assert TensorDescriptor((0, 3), (7, 7)).view(np.empty(0)).shape == (0, 3)


def test_the_view_of_an_overlapping_layout_is_read_only() -> None:
    view = TensorDescriptor((3, 2), (1, 1)).view(np.arange(4))
    assert view.tolist() == [[0, 1], [1, 2], [2, 3]]
    with pytest.raises(ValueError, match="read-only"):
        view[0, 0] = 5


def test_a_view_of_memory_that_does_not_fit_is_refused() -> None:
    descriptor = TensorDescriptor((2, 3), (10, 2))
    with pytest.raises(ShapeError, match=r"14 elements is too small .* strides \(10, 2\): expected at least 15"):
        descriptor.view(np.zeros(14))
    assert descriptor.view(np.zeros(15)).shape == (2, 3)
    with pytest.raises(ShapeError, match="must be contiguous"):
        descriptor.view(np.zeros(40)[::2])


@pytest.mark.parametrize(
    ("strides", "words"),
    [
        ((30, 10, 5, 1), "NCHW fully packed"),
        ((30, 1, 15, 3), "NHWC fully packed, strides (30, 1, 15, 3)"),
        ((64, 20, 5, 1), "NCHW spatially packed, strides (64, 20, 5, 1)"),
        ((64, 20, 8, 1), "NCHW strides (64, 20, 8, 1)"),
        ((0, 10, 5, 1), "overlapping, strides (0, 10, 5, 1)"),
    ],
)
def test_a_layout_in_words(strides: tuple[int, ...], words: str) -> None:
    descriptor = TensorDescriptor(SHAPE, strides)
    assert descriptor.layout == words
    assert str(descriptor) == f"[4, 3, 2, 5] {words}"
