"""Constants whose plain values go when they can be made anew: nobody can tell, and nobody's memory goes."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable

import numpy as np
import pytest

from dagexec.core.constant import Array, Constant
from dagexec.core.dtypes import FLOAT32
from dagexec.core.tensor import Tensor, owner_of
from dagexec.errors import ResourceError

SHAPE = (128, 256)
VALUES = np.arange(128 * 256, dtype=np.float32).reshape(SHAPE)


def values() -> Array:
    return VALUES.copy()


def frozen(make: Callable[[], Array] = values, most_returns: int = 100) -> Tensor:
    tensor = Tensor()
    tensor.adopt(VALUES.copy())
    tensor.freeze()
    constant = tensor.constant
    assert constant is not None
    constant.most_returns = most_returns
    constant.can_be_made_by(make)
    return tensor


def test_values_go_and_come_back() -> None:
    tensor = frozen()
    memory = weakref.ref(owner_of(tensor.array))
    assert tensor.let_go()
    assert memory() is None
    assert tensor.current_array() is None
    assert (tensor.is_empty, tensor.is_packed, tensor.shape, tensor.nbytes) == (False, True, SHAPE, VALUES.nbytes)
    assert not tensor.let_go()
    assert tensor.array.tobytes() == VALUES.tobytes()
    assert not tensor.array.flags.writeable
    assert tensor.array is tensor.current_array()


def test_the_address_is_that_of_the_values_that_came_back() -> None:
    tensor = frozen()
    assert tensor.address == tensor.array.ctypes.data
    assert tensor.let_go()
    taken = values()  # what was there may be elsewhere now
    assert tensor.address == tensor.array.ctypes.data != taken.ctypes.data


@pytest.mark.parametrize("held", [lambda one: one.array, lambda one: one.array.T, lambda one: view(one)])
def test_values_stay_as_they_are_while_somebody_has_them(held: Callable[[Tensor], object]) -> None:
    tensor = frozen()
    before = tensor.array
    kept = held(tensor)
    address = before.ctypes.data
    del before
    assert not tensor.let_go()
    assert tensor.array.ctypes.data == address
    del kept
    assert tensor.let_go()


def view(tensor: Tensor) -> Tensor:
    other = Tensor()
    other.share(tensor, (VALUES.size,))
    return other


def test_a_holder_that_no_count_shows_has_the_same_array_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Constant, "can_go", lambda *_: True)
    tensor = frozen()
    array = tensor.array
    assert not tensor.let_go()
    assert tensor.array is array
    part = array[3:]
    del array
    assert not tensor.let_go()
    assert np.shares_memory(tensor.array, part)
    assert tensor.array.tobytes() == VALUES.tobytes()
    assert not tensor.array.flags.writeable


def flushed() -> Array:
    """Not the same bytes: a zero is negative."""
    found = values()
    found[0, 0] = -0.0
    return found


def refused() -> Array:
    raise ResourceError("no memory")


@pytest.mark.parametrize(
    "make", [refused, flushed, lambda: VALUES.astype(np.float64), lambda: VALUES.reshape(-1).copy()]
)
def test_values_stay_where_other_bytes_would_come_back(make: Callable[[], Array]) -> None:
    tensor = frozen(make)
    assert not tensor.let_go()
    assert tensor.current_array() is not None


def test_values_stay_unless_something_makes_them_and_may() -> None:
    for tensor in (frozen(most_returns=-1), Tensor()):
        assert not tensor.let_go()
    tensor = Tensor()
    tensor.adopt(VALUES.copy())
    tensor.freeze()
    assert not tensor.let_go()


def test_values_that_came_back_too_often_stay() -> None:
    tensor = frozen(most_returns=1)
    for _ in range(2):
        assert tensor.let_go()
        assert tensor.array[1, 1] == VALUES[1, 1]
    assert not tensor.let_go()


@pytest.mark.parametrize("descriptor", [False, True])
def test_what_has_gone_can_be_fed_resized_and_read(descriptor: bool) -> None:
    tensor = frozen()
    tensor.let_go()
    assert tensor.fetch().tobytes() == VALUES.tobytes()
    tensor.let_go()
    assert view(tensor).array.tobytes() == VALUES.tobytes()
    assert tensor.let_go()
    if descriptor:
        tensor.feed(-VALUES, tensor.descriptor)
    else:
        tensor.feed(-VALUES)
    assert tensor.constant is None
    np.testing.assert_array_equal(tensor.array, -VALUES)
    tensor = frozen()
    tensor.let_go()
    array = tensor.resize(SHAPE, FLOAT32)
    assert array.flags.writeable
    np.testing.assert_array_equal(array, VALUES)
    tensor = frozen()
    tensor.let_go()
    tensor.clear()
    assert tensor.is_empty


def test_threads_that_read_while_values_go_find_them() -> None:
    tensor = frozen(most_returns=10_000)
    wrong: list[Array] = []
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            array = tensor.array
            if array[7, 9] != VALUES[7, 9] or array.shape != SHAPE:
                wrong.append(array)

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(300):
        tensor.let_go()
    done.set()
    for thread in threads:
        thread.join()
    assert not wrong
    assert tensor.array.tobytes() == VALUES.tobytes()
