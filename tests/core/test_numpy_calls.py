"""Steps that call NumPy have the same bytes as native calls."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from dagexec.core.native import NativeStep, Phases, can_run, phases_of
from dagexec.core.numpy_calls import natively
from dagexec.core.numpy_loops import loop_of
from dagexec.core.operator import Prepared, Step, in_sequence

Array = npt.NDArray[Any]

pytestmark = pytest.mark.skipif(not can_run(), reason="no machine code runs here")

_UFUNCS = [one for name in dir(np) if isinstance(one := getattr(np, name), np.ufunc)]


@pytest.fixture(autouse=True)
def _as_in_a_run() -> Iterator[None]:
    with np.errstate(all="ignore"):
        yield


def numbers(shape: tuple[int, ...], char: str, seed: int = 0) -> Array:
    """Of any type, with zeros of both signs, infinities and NaN among floats, and numbers far beyond pi."""
    random = np.random.default_rng(seed)
    dtype = np.dtype(char)
    values = random.standard_normal(shape) * np.exp2(random.integers(-3, 18, shape))
    if dtype.kind in "fc":
        special = random.choice([0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, 2.0], shape)
        return np.where(random.random(shape) < 0.1, special, values).astype(dtype)
    if dtype.kind == "b":
        return random.random(shape) < 0.5
    return (values.astype(np.int64) % 100 if dtype.kind == "u" else values.astype(np.int64) % 200 - 100).astype(dtype)


def native(step: Step) -> Phases | None:
    return phases_of(natively(Prepared(step), "a test").step)


def run_pieces(step: Step) -> int:
    """Make the native calls of `step`, the last piece of a phase first; how many pieces there are."""
    phases = native(step)
    assert phases is not None, "it stays a call of Python"
    for phase in phases:
        for piece in reversed(phase):
            NativeStep(((piece,),))()
    return sum(map(len, phases))


def assert_same_bytes(make: Callable[[Array], Step], out: Array) -> int:
    """The step that `make` makes for an output, by NumPy and by native calls; how many pieces these are in."""
    expected, found = out.copy(), out.copy()
    make(expected)()
    pieces = run_pieces(make(found))
    assert expected.tobytes() == found.tobytes()
    return pieces


@pytest.mark.parametrize("ufunc", _UFUNCS, ids=lambda one: str(one.__name__))
def test_every_function_of_elements_has_the_bytes_of_numpy(ufunc: np.ufunc) -> None:
    for types in ufunc.types:
        chars = types.replace("->", "")
        if ufunc.nout != 1 or loop_of(ufunc, [np.dtype(char) for char in chars]) is None:
            continue
        inputs = [numbers((7, 333), char, seed) for seed, char in enumerate(chars[:-1])]
        if ufunc in (np.left_shift, np.right_shift):
            inputs[1] = (np.abs(inputs[1]) % 7).astype(chars[1])
        out = np.zeros((7, 333), chars[-1])
        assert_same_bytes(lambda y, inputs=inputs: partial(ufunc, *inputs, out=y), out)  # type: ignore[misc]


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ((5, 1, 40), (1, 3, 40)),
        ((5, 3, 40), ()),
        ((5, 3, 1), (40,)),
        ((3, 40), (5, 3, 40)),
        ((1, 1, 1), (5, 3, 40)),
        ((), ()),
    ],
)
def test_operands_broadcast(left: tuple[int, ...], right: tuple[int, ...]) -> None:
    a, b = numbers(left, "f"), numbers(right, "f", 1)
    assert_same_bytes(lambda y: partial(np.subtract, a, b, out=y), np.zeros(np.broadcast(a, b).shape, np.float32))


def test_a_plain_number_has_the_type_of_the_array() -> None:
    x = numbers((5, 40), "f")
    assert_same_bytes(lambda y: partial(np.multiply, x, 3, out=y), np.zeros_like(x))
    assert_same_bytes(lambda y: partial(np.maximum, 0.5, x, out=y), np.zeros_like(x))
    integers = numbers((5, 40), "l")
    assert native(partial(np.multiply, integers, 0.5, out=np.zeros(integers.shape))) is None


def test_strides_are_followed() -> None:
    x = numbers((8, 6, 50), "f")
    places = np.zeros((6, 10, 8), np.float32)
    assert_same_bytes(lambda y: partial(np.negative, x.T[::5], out=y.transpose(1, 0, 2)), places)
    assert_same_bytes(lambda y: partial(np.copyto, y[::2], x[:3, :, ::-5].transpose(1, 2, 0)[::2]), places[..., :3])


def test_what_takes_very_many_calls_stays_numpys(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table of them would be larger than the arrays, and take seconds to write."""
    x, out = numbers((16, 16, 5), "f")[:, ::2], np.empty((16, 8, 5), np.float32)
    step = in_sequence([partial(np.negative, x, out=out), partial(np.add, x, out, out=out)])
    for most, expected in ((1 << 16, True), (40, False)):
        monkeypatch.setattr("dagexec.core.numpy_calls._MOST_ROWS", most)
        monkeypatch.setattr("dagexec.core.numpy_calls._known", {})
        assert (native(step) is not None) == expected


def test_large_work_is_cut_and_bytes_do_not_show_where() -> None:
    x = numbers((1000003,), "f")
    for ufunc in (np.add, np.sin, np.exp, np.log, np.tanh, np.power):
        operands = [x] * ufunc.nin
        assert assert_same_bytes(lambda y: partial(ufunc, *operands, out=y), np.zeros_like(x)) > 1  # noqa: B023
    assert assert_same_bytes(lambda y: partial(np.add.reduce, x.reshape(1, -1), axis=0, keepdims=True, out=y),
                             np.zeros((1, x.size), np.float32)) > 1  # fmt: skip


@pytest.mark.parametrize("ufunc", [np.add, np.multiply, np.maximum, np.minimum], ids=lambda one: str(one.__name__))
@pytest.mark.parametrize(
    "shape", [(3, 5, 700), (40, 3, 20), (2, 3, 2, 16), (1, 9000), (6,), (5, 1, 130), (17, 8), (5, 30, 7)]
)
def test_reductions_of_any_axes_have_the_bytes_of_numpy(ufunc: np.ufunc, shape: tuple[int, ...]) -> None:
    for char in "fdl":
        x = numbers(shape, char)
        for count in range(1, len(shape) + 1):
            for axes in itertools.combinations(range(len(shape)), count):
                kept = tuple(1 if axis in axes else size for axis, size in enumerate(shape))
                out = np.zeros(kept, char)
                assert_same_bytes(
                    lambda y, x=x, axes=axes: partial(ufunc.reduce, x, axis=axes, keepdims=True, out=y), out  # type: ignore[misc]
                )  # fmt: skip


def test_a_sum_of_negative_zeros_is_that_of_numpy() -> None:
    x = np.full((3, 9), -0.0, np.float32)
    assert_same_bytes(lambda y: partial(np.add.reduce, x, axis=1, keepdims=True, out=y), np.ones((3, 1), np.float32))


@pytest.mark.parametrize("shape", [(3, 5, 700), (40, 3, 4), (4, 1, 1), (2, 9, 1), (50,)])
def test_running_sums_have_the_bytes_of_numpy(shape: tuple[int, ...]) -> None:
    for axis, char in itertools.product(range(-1, len(shape)), "fl"):
        x = numbers(shape, char)
        assert_same_bytes(
            lambda y, x=x, axis=axis: partial(np.add.accumulate, x, axis=axis, out=y), np.zeros(shape, char)
        )  # type: ignore[misc]


def test_copies_move_every_type_as_it_is() -> None:
    import ml_dtypes

    for dtype in (np.bool_, np.int8, np.float16, ml_dtypes.bfloat16, np.float32, np.float64, np.uint64):
        bits = np.random.default_rng(0).integers(0, 2, (6, 40, np.dtype(dtype).itemsize), np.uint8)
        x = bits.view(dtype)[..., 0]
        assert_same_bytes(lambda y, x=x: partial(np.concatenate, [x[:2], x, x[3:]], 0, y), np.zeros((11, 40), dtype))  # type: ignore[misc]
        assert_same_bytes(lambda y, x=x: partial(y[2:].fill, x[0, 0]), np.zeros((5, 40), dtype))  # type: ignore[misc]


def test_what_is_not_zero_is_true() -> None:
    for char in "fdlb":
        x = numbers((6, 40), char)
        assert_same_bytes(lambda y, x=x: partial(np.copyto, y, x, casting="unsafe"), np.zeros(x.shape, np.bool_))  # type: ignore[misc]


def test_limits_keep_nan() -> None:
    x = numbers((6, 400), "f")
    assert_same_bytes(lambda y: partial(x.clip, np.float32(-1), np.float32(6), out=y), np.zeros_like(x))


def test_neighbors_become_one_step() -> None:
    x = numbers((6, 40), "f")
    y = np.zeros_like(x)
    phases = native(in_sequence([partial(np.square, x, out=y), partial(np.sqrt, y, out=y)]))
    assert phases is not None
    assert len(phases) == 2


def test_steps_of_one_form_have_their_own_arrays_and_numbers() -> None:
    for seed, number in enumerate((0.0, -0.0, 1.0, np.float32(-0.0), 2)):
        x, row = numbers((6, 5, 40), "f", seed), numbers((40,), "f", seed + 9)
        assert_same_bytes(lambda y, x=x, row=row: partial(np.subtract, x[::-1], row, out=y), np.zeros_like(x))  # type: ignore[misc]
        assert_same_bytes(lambda y, n=number: partial(y.fill, n), np.ones((5, 40), np.float32))  # type: ignore[misc]
        assert_same_bytes(lambda y, x=x, n=number: partial(np.copysign, x, n, out=y), np.ones_like(x))  # type: ignore[misc]
        assert_same_bytes(
            lambda y, x=x: partial(np.add.reduce, x.T, axis=(0, 2), keepdims=True, out=y),  # type: ignore[misc]
            np.zeros((1, 5, 1), np.float32),
        )
        assert_same_bytes(lambda y, x=x: partial(np.concatenate, (x[:2], x[3:], x), 0, y), np.zeros((11, 5, 40), "f"))  # type: ignore[misc]


def test_where_arrays_lie_in_common_memory_is_of_the_form() -> None:
    for _ in range(2):
        x = numbers((6, 40), "f")
        assert native(partial(np.add, x[:3], x[3:], out=np.zeros((3, 40), np.float32))) is not None
        assert native(partial(np.add, x[:3], x[:3], out=x[:3])) is not None
        assert native(partial(np.add, x[:3], x[1:4], out=x[:3])) is None  # overwritten before it is read
        assert_same_bytes(lambda y: partial(np.add, y[:3], y[3:], out=y[:3]), x)
        assert_same_bytes(lambda y: partial(np.add, y[3:], y[:3], out=y[:3]), x)


def test_what_a_step_reads_lives_as_long_as_the_step() -> None:
    y = np.zeros((3, 1000), np.float32)
    for value in (1, 2):
        step = natively(Prepared(partial(np.add, np.full(y.shape, value, y.dtype), np.float32(value), out=y)), "a").step
        others = [np.full(y.shape, 7, y.dtype) for _ in range(9)]
        step()
        assert (y == 2 * value).all()
        assert len(others) == 9


@pytest.mark.parametrize(
    "make",
    [
        lambda x: partial(x.fill, np.ones((), np.float64)),  # converted
        lambda x: partial(np.add, x[:-1], x[1:], out=x[1:]),  # overwritten before it is read
        lambda x: partial(np.copyto, x, np.zeros(x.shape)),  # converted
        lambda x: partial(np.copyto, x, 0.0, where=np.ones(x.shape, np.bool_)),
        lambda x: partial(np.add, x, x),  # allocates
        lambda x: partial(np.add.reduce, x, axis=0, out=x[0]),
        lambda x: partial(np.subtract.reduce, x, axis=0, keepdims=True, out=np.zeros(x[:1].shape, x.dtype)),
        lambda x: partial(np.negative, np.ones((2, 9000, 2)), out=np.ones((2, 9000, 3))[..., :2]),  # many short rows
        lambda x: partial(np.power, x.astype(np.int64), -1, out=np.zeros(x.shape, np.int64)),  # raises
        lambda x: partial(np.sort, x),
    ],
)  # fmt: skip
def test_other_steps_stay_as_they_are(make: Callable[[Array], Step]) -> None:
    step = make(np.zeros((6, 40), np.float32))
    assert natively(Prepared(step), "a test").step is step
