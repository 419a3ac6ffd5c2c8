"""Guarded memory: nobody touches what is beside it and lives, and all memory of a net is such."""

from __future__ import annotations

import ctypes
import random
import signal
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

import dagexec
from dagexec import InputInfo, Model, NetDef
from dagexec.core import dtypes, registry
from dagexec.core.operator import Operator, Prepared, Step
from dagexec.core.schema import OpSchema
from dagexec.platform.weight_memory import weight_memory
from dagexec.scheduler.plan.bindings import MIN_BYTES_BOUND
from tests.forked import end_of
from tests.fuzz.case import Cases
from tests.fuzz.runner import run_cases
from tests.fuzz.seeds import DRAWN
from tests.guarded import ALIGNMENTS, Guards, guarded_memory
from tests.ops.running import operator_def

Array = np.ndarray
GUARDS = [Guards(behind, alignment) for behind in (True, False) for alignment in ALIGNMENTS]


def read(array: Array, place: int) -> int:
    return ctypes.c_ubyte.from_address(array.ctypes.data + place).value


def write(array: Array, place: int) -> None:
    ctypes.c_ubyte.from_address(array.ctypes.data + place).value = 1


@pytest.mark.parametrize("touch", [read, write])
@pytest.mark.parametrize("guards", GUARDS, ids=str)
def test_a_byte_beside_the_page_of_an_array_cannot_be_touched(
    guards: Guards, touch: Callable[[Array, int], object]
) -> None:
    for nbytes in (1, 100, 4096, 5000):
        memory = guards.memory(nbytes)
        assert (memory == 0xFF).all()
        touch(memory, 0)
        touch(memory, nbytes - 1)
        beside = -(-nbytes // guards.alignment) * guards.alignment if guards.behind else -1
        assert end_of(lambda: touch(memory, beside)) == -signal.SIGSEGV  # noqa: B023 - called here
        if guards.behind:
            assert memory.ctypes.data % guards.alignment == 0


def test_a_copy_has_the_elements_the_shape_and_the_type() -> None:
    strided = np.arange(24, dtype=np.int16).reshape(4, 6).T[::2]
    found = Guards(behind=True).copy(strided)
    assert (found.dtype, found.flags.c_contiguous) == (np.int16, True)
    np.testing.assert_array_equal(found, strided)
    assert Guards(behind=True).copy(np.array([b"text", b""], object)).tolist() == [b"text", b""]


def touching(op_type: str, kind: str, is_beside: bool) -> Model:
    """y = op(op(x, w), w): an operator reads the last byte, or the one beside it, of memory of one kind."""
    schema = OpSchema(op_type, inputs=(2, 2), outputs=(1, 1), infer=lambda call: [call.inputs[0]], doc="Test.")

    class Touch(Operator):
        def prepare(self) -> Step:
            x, y = [self.x(0)], [self.y(0)]
            own = {"input": x[0], "between": x[0], "result": y[0], "parameter": self.x(1)}
            own["working"], own["scratch"] = self.working_memory(100), self.scratch((100,), np.uint8)
            own["packed"] = weight_memory.take(100)
            is_first = self.definition.output[0] == "h"
            is_looking = is_first == (kind in ("input", "fed"))

            def step() -> None:
                np.copyto(y[0], x[0])
                array = own.get(kind, x[0] if kind == "fed" else y[0])
                is_callers = array is not own["input"] and array is not own["result"]
                if is_looking and (kind in own or is_callers):
                    read(array, array.nbytes - 1 + is_beside)

            return Prepared(step, {0: partial(x.__setitem__, 0)}, {0: partial(y.__setitem__, 0)})

    registry.operator(schema)(Touch)
    net = NetDef(name="touch", op=[operator_def(op_type, ["x", "w"], ["h"]), operator_def(op_type, ["h", "w"], ["y"])])
    inputs = {"x": InputInfo(dtypes.FLOAT32)}
    return Model("touch", net, parameters={"w": np.ones(5, np.float32)}, inputs=inputs, outputs=("y",))


KINDS = ("input", "parameter", "between", "result", "working", "scratch", "packed", "fed", "returned")
"""What an operator has in its hands; the last two only where it works on the caller's array in place of the net's."""


def run_touching(kind: str, is_beside: bool) -> None:
    guards, model = Guards(behind=True), touching(f"Touch{kind}", kind, is_beside)
    with guarded_memory(guards):
        model = replace(model, parameters=guards.copies(model.parameters))
        feeds = {"x": guards.copy(np.ones(MIN_BYTES_BOUND + 1, np.float32))}
        with dagexec.compile(model, net_type="simple", num_workers=1) as executor:
            executor.run(feeds)
            executor.run(feeds)


@pytest.mark.parametrize("kind", KINDS)
def test_all_memory_of_a_net_is_guarded(kind: str) -> None:
    assert end_of(lambda: run_touching(kind, is_beside=True)) == -signal.SIGSEGV


def test_all_memory_of_a_net_may_be_touched() -> None:
    assert end_of(lambda: list(map(partial(run_touching, is_beside=False), KINDS))) == 0


@pytest.mark.parametrize(
    "numbers",
    [range(8), *(pytest.param(range(first, first + 40), marks=pytest.mark.slow) for first in range(8, 488, 40))],
    ids=str,
)
def test_drawn_operators_and_nets_touch_nothing_beside_their_memory(numbers: range) -> None:
    """`python -m tests.fuzz --kind drawn` tries more, and `make fuzz` others with each commit."""
    summary = run_cases(Cases([DRAWN], ["drawn"]), numbers)
    assert not summary.failures, summary.alike()
    assert summary.words() == {"ok": len(numbers)}


def test_a_number_decides_where_arrays_lie() -> None:
    drawn = [Guards.drawn(random.Random(number)) for number in range(100)]
    assert drawn == [Guards.drawn(random.Random(number)) for number in range(100)]
    assert set(drawn) == set(GUARDS)
