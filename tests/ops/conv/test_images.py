"""An image's output has the bytes that it has alone, in a batch of any size and at any place in it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dagexec.core.arguments import ArgumentValue
from dagexec.ops.families.conv.im2col import IM2COL
from dagexec.ops.families.conv.images import image_by_image
from tests.ops.problems import Case, Memory
from tests.ops.running import Array, run_operator
from tests.ops.windows import Geometry

MOST = 5


def normal(*shape: int, dtype: Any = np.float32) -> Array:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(dtype)


def assert_alike(
    op_type: str, x: Array, weights: Array, engine: str, arguments: dict[str, ArgumentValue], dtype: Any = np.float32
) -> None:
    def run(some: Array) -> Array:
        (y,) = run_operator(op_type, [some.astype(dtype), weights.astype(dtype)], engine=engine, **arguments)
        return y

    alone = np.concatenate([run(x[image : image + 1]) for image in range(MOST)])
    for batch in (2, MOST):
        assert run(x[MOST - batch :]).tobytes() == alone[MOST - batch :].tobytes(), batch


@pytest.mark.parametrize("engine", ["WINOGRAD", "FFT", "DIRECT"])
def test_an_image_has_the_bytes_that_it_has_alone_by_other_algorithms(engine: str) -> None:
    assert_alike("Conv", normal(MOST, 20, 12, 12), normal(24, 20, 3, 3), engine, {"kernel": 3, "pad": 1})


def test_an_image_of_16_bits_has_the_bytes_that_it_has_alone() -> None:
    assert_alike("Conv", normal(MOST, 20, 7, 7), normal(24, 20, 3, 3), "", {"kernel": 3}, np.float16)


def test_all_images_take_the_memory_of_one() -> None:
    taken = []
    for batch in (1, 5):
        memory = Memory()
        problem = Case(Geometry((6, 6), (3, 3), (1, 1), (1, 1), (0, 0, 0, 0)), batch=batch).problem()
        image_by_image(IM2COL.steps)(problem, memory.allocate)
        taken.append(memory.nbytes)
    assert taken[0] == taken[1] > 0
