"""Native calls made one step: order, arguments, failures, and what stays as it is."""

from __future__ import annotations

import ctypes
import platform
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from dagexec.core import native
from dagexec.core.native import NativeCall, declare, native_call
from dagexec.core.native_tables import merged
from dagexec.core.operator import Step, nothing_to_do

JOINS = sys.platform == "linux" and platform.machine() == "x86_64"
needs_joining = pytest.mark.skipif(not JOINS, reason="calls are joined on x86-64 Linux")

FUNCTION = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)

PRELUDE = ctypes.CFUNCTYPE(None, ctypes.c_size_t)


class Calls:
    """Steps that call a C function which notes its arguments. It fails when the third is in `failing`."""

    def __init__(self) -> None:
        self.seen: list[tuple[int | None, ...]] = []
        self.failing: set[int] = set()
        self.before: list[tuple[int, int]] = []
        """Arguments of what was called before, and how many calls there had been."""
        self._function = FUNCTION(self._note)
        self._before = PRELUDE(self.note_before)

    def _note(self, *arguments: int | None) -> int:
        self.seen.append(arguments)
        return -5 if arguments[2] in self.failing else 0

    def note_before(self, argument: int) -> None:
        self.before.append((argument, len(self.seen)))

    def step(self, number: int, before: int | None = None) -> Step:
        """A step that was declared, and must not be called once it is part of another."""

        def alone() -> None:
            self.seen.append((number,))

        arguments = (2**63 + number, 7, number, 2**40)
        prelude = None if before is None else (address_of(self._before), before)
        failure = partial(ValueError, f"call {number}")
        declare(alone, NativeCall(address_of(self._function), arguments, prelude, failure, self))
        return alone


def address_of(function: object) -> int:
    address = ctypes.cast(function, ctypes.c_void_p).value  # type: ignore[arg-type]
    assert address is not None
    return address


@needs_joining
def test_neighbors_become_one_step_that_calls_them_in_order_with_their_arguments() -> None:
    calls = Calls()
    [step] = merged([calls.step(number) for number in range(1, 300)])
    for _ in range(2):
        calls.seen.clear()
        step()
        assert calls.seen == [(2**63 + number, 7, number, 2**40) for number in range(1, 300)]


@needs_joining
@pytest.mark.parametrize("failing", [1, 3, 5])
def test_the_first_call_that_fails_is_the_last(failing: int) -> None:
    calls = Calls()
    [step] = merged([calls.step(number) for number in (1, 2, 3, 4, 5)])
    calls.failing = {failing, 5}
    with pytest.raises(ValueError, match=f"call {failing}"):
        step()
    assert [seen[2] for seen in calls.seen] == list(range(1, failing + 1))
    calls.failing = set()
    step()


@needs_joining
def test_what_is_called_before_is_called_when_it_changes() -> None:
    calls = Calls()
    rows = [(1, None), (2, 9), (3, 9), (4, 8), (5, None), (6, 8), (7, 9)]
    [step] = merged([calls.step(number, before) for number, before in rows])
    step()
    assert calls.before == [(9, 1), (8, 3), (9, 6)]
    assert [seen[2] for seen in calls.seen] == [1, 2, 3, 4, 5, 6, 7]
    calls.failing = {4}
    with pytest.raises(ValueError, match="call 4"):
        step()


@needs_joining
def test_other_steps_stay_where_they_are() -> None:
    calls = Calls()

    def plain() -> None:
        calls.seen.append(("plain",))  # type: ignore[arg-type]

    steps = merged([calls.step(1), calls.step(2), plain, calls.step(3), nothing_to_do, calls.step(4), calls.step(5)])
    assert steps[1] is plain
    assert steps[3] is nothing_to_do
    for step in steps:
        step()
    assert [seen[2] if len(seen) > 1 else seen[0] for seen in calls.seen] == [1, 2, "plain", 3, 4, 5]


@needs_joining
def test_threads_may_call_joined_steps_at_once() -> None:
    calls = Calls()
    steps = [merged([calls.step(number) for number in range(1, 50)])[0] for _ in range(4)]
    with ThreadPoolExecutor(4) as threads:
        for call in [threads.submit(step) for step in steps * 20]:
            call.result()
    assert len(calls.seen) == 80 * 49


def test_steps_stay_as_they_are_where_calls_cannot_be_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "table_code", lambda: None)
    calls = Calls()
    steps = [calls.step(1), calls.step(2)]
    assert merged(steps) == steps


@pytest.mark.slow
@pytest.mark.parametrize(("value", "count"), [("off", 2), ("on", 1 if JOINS else 2)])
def test_an_environment_variable_turns_joining_off(value: str, count: int) -> None:
    program = "\n".join(
        (
            "from tests.ops.kernels.test_native import Calls",
            "from dagexec.core.native_tables import merged",
            "calls = Calls()",
            "print(len(merged([calls.step(1), calls.step(2)])))",
        )
    )
    environment = {"DAGEXEC_JOIN": value, "PATH": ""}
    found = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert found.stdout.split() == [str(count)]


def test_only_what_was_declared_is_a_native_call() -> None:
    calls = Calls()
    assert native_call(nothing_to_do) is None
    assert native_call(partial(print, "x")) is None
    found = native_call(calls.step(3))
    assert found is not None
    assert found.arguments[2] == 3
