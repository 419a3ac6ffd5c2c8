"""The processor's flag of invalid operations, as native calls see it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np
import pytest

from dagexec.core.native import NativeCall, NativeStep, phases_of
from dagexec.core.native_tables import merged
from dagexec.errors import DagexecError
from dagexec.ops.kernels.builder import Builder
from dagexec.ops.kernels.invalid_operations import Watch, can_be_seen
from dagexec.platform.assembly.instructions import RESULT
from dagexec.platform.assembly.native import GeneralAssembler
from dagexec.platform.machine_code import executable

pytestmark = pytest.mark.skipif(not can_be_seen(), reason="no machine code runs here")


def maximum_code() -> bytes:
    """Of a function that replaces the first of two float32 numbers by the greater one."""
    build = Builder(8)
    left, right = build.arguments(2)
    build.store_first(build.maximum(build.broadcast(left), build.broadcast(right)), left)
    return build.code()


def failing_code() -> bytes:
    """Of a function that returns 1."""
    code = GeneralAssembler()
    code.set_number(RESULT, 1)
    code.end_call()
    return code.code()


def call(code: bytes, *arrays: np.ndarray) -> NativeCall:
    address = executable(code)
    assert address is not None
    places = [array.ctypes.data for array in arrays] + [0] * (4 - len(arrays))
    return NativeCall(address, tuple(places), None, lambda: DagexecError("it failed"), arrays)


def guarded(watch: Watch, call: NativeCall, recover: Callable[[], None]) -> NativeStep:
    return NativeStep(watch.guarded((((call,),),), recover))


def maximum(x: float, y: float) -> tuple[NativeCall, np.ndarray]:
    left, right = np.array([x], np.float32), np.array([y], np.float32)
    return call(maximum_code(), left, right), left


@pytest.mark.parametrize(("x", "y"), [(1.0, 2.0), (-np.inf, np.inf), (-0.0, 0.0), (1e-45, -1e-45), (3e38, -3e38)])
def test_a_maximum_of_numbers_leaves_no_note(x: float, y: float) -> None:
    watch, (greatest, left) = Watch(), maximum(x, y)
    guarded(watch, greatest, lambda: pytest.fail("it recovers"))()
    assert (left[0], watch.note[0]) == (max(x, y), 0)


@pytest.mark.parametrize(("x", "y"), [(np.nan, 0.0), (0.0, np.nan)])
def test_a_maximum_that_meets_a_nan_is_noted_each_time(x: float, y: float) -> None:
    watch, (greatest, left), seen = Watch(), maximum(x, y), list[float]()
    step = guarded(watch, greatest, lambda: seen.append(left[0]))
    for _ in range(2):
        left[0] = x
        step()
        assert watch.note[0] == 0
    assert len(seen) == 2


def test_what_happened_before_does_not_count() -> None:
    watch, (greatest, _), (bad, _) = Watch(), maximum(1, 2), maximum(np.nan, 0)
    ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)(bad.function)(*bad.arguments[:2])
    guarded(watch, greatest, lambda: pytest.fail("it recovers"))()
    watch.around(lambda: None)()
    assert watch.note[0] == 0


def test_a_step_of_python_is_watched() -> None:
    watch, (bad, _) = Watch(), maximum(np.nan, 0)
    function = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)(bad.function)
    watch.around(lambda: function(*bad.arguments[:2]))()
    assert watch.note[0] == 1


def test_a_call_that_fails_is_no_nan() -> None:
    step = guarded(Watch(), call(failing_code()), lambda: pytest.fail("it recovers"))
    with pytest.raises(DagexecError, match="it failed"):
        step()
    with pytest.raises(DagexecError, match="it failed"):
        merged([step, step])[0]()


def test_a_row_of_calls_goes_on_behind_the_one_that_recovers() -> None:
    watch, seen, steps, results = Watch(), list[int](), [], []
    for number, x in enumerate((1.0, np.nan, 2.0, np.nan)):
        greatest, left = maximum(x, 1.5)
        steps.append(guarded(watch, greatest, lambda number=number: seen.append(number)))
        results.append(left)
    assert all(phases_of(step) is not None for step in steps)
    (row,) = merged(steps)
    row()
    assert seen == [1, 3]
    assert [left[0] for left in results] == [1.5, 1.5, 2.0, 1.5]
