"""Which arrays a formula's kernel is given: those that share no element, however they lie in memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from dagexec.ops.kernels.builder import Builder, Vector
from dagexec.ops.kernels.formulas import formula_step
from tests.ops.kernels.running import each_size, needs_kernels
from tests.ops.running import the_library


def twice_and_square(build: Builder, read: Callable[[int], Vector]) -> list[Vector]:
    x = read(0)
    return [x * 2.0, x * x]


@needs_kernels
@each_size
def test_results_may_be_columns_between_those_that_are_read(lanes: int) -> None:
    machine = replace(the_library().machine, lanes=lanes)
    memory = np.random.default_rng(1).standard_normal((5, 4, 37)).astype(np.float32)
    before = memory.copy()
    x, twice, square = (memory[:, column] for column in range(3))
    step = formula_step(machine, twice_and_square, [x], [twice, square], "formula")
    assert step is not None
    step()
    expected = before[:, 0]
    np.testing.assert_array_equal(twice, expected * 2)
    np.testing.assert_array_equal(square, expected * expected)
    np.testing.assert_array_equal(memory[:, [0, 3]], before[:, [0, 3]])


@needs_kernels
@each_size
def test_results_that_share_elements_are_refused(lanes: int) -> None:
    machine = replace(the_library().machine, lanes=lanes)
    memory = np.zeros((5, 150), np.float32)
    x, y, z = memory[:, :37], memory[:, 40:77], memory[:, 80:117]
    for results in ([memory[:, 36:73], z], [y, memory[:, 76:113]], [memory[:, 1:38], z]):
        assert formula_step(machine, twice_and_square, [x], results, "formula") is None
    assert formula_step(machine, twice_and_square, [x], [x, y], "formula") is not None  # in place
