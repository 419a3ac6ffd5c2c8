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


CASES: dict[str, tuple[str, tuple[int, ...], tuple[int, ...], dict[str, ArgumentValue]]] = {
    "im2col of small images": ("Conv", (20, 12, 12), (24, 20, 3, 3), {"kernel": 3}),
    "im2col of large images": ("Conv", (3, 30, 30), (16, 3, 5, 5), {"kernel": 5, "stride": 1}),
    "strides": ("Conv", (32, 14, 14), (24, 32, 3, 3), {"kernel": 3, "stride": 2, "pad": 1}),
    "1x1 of few pixels": ("Conv", (64, 7, 7), (96, 64, 1, 1), {"kernel": 1}),
    "1x1 of a pixel": ("Conv", (300, 1, 1), (20, 300, 1, 1), {"kernel": 1}),
    "groups": ("Conv", (32, 9, 9), (32, 8, 3, 3), {"kernel": 3, "group": 4}),
    "depthwise": ("Conv", (16, 9, 9), (16, 1, 3, 3), {"kernel": 3, "group": 16}),
    "one axis": ("Conv", (16, 40), (24, 16, 5), {"kernels": [5]}),
    "three axes": ("Conv", (4, 6, 6, 6), (12, 4, 3, 3, 3), {"kernels": [3, 3, 3]}),
    "fused": ("FusedConv", (20, 12, 12), (24, 20, 3, 3), {"kernel": 3, "post_ops": ["relu"]}),
    "transposed": ("ConvTranspose", (16, 7, 7), (16, 24, 4, 4), {"kernel": 4, "stride": 2}),
    "transposed, strides of 1": ("ConvTranspose", (16, 7, 7), (16, 24, 3, 3), {"kernel": 3, "stride": 1}),
    "transposed, 1x1": ("ConvTranspose", (64, 7, 7), (64, 24, 1, 1), {"kernel": 1, "stride": 1}),
}


def assert_alike(
    op_type: str, x: Array, weights: Array, engine: str, arguments: dict[str, ArgumentValue], dtype: Any = np.float32
) -> None:
    def run(some: Array) -> Array:
        (y,) = run_operator(op_type, [some.astype(dtype), weights.astype(dtype)], engine=engine, **arguments)
        return y

    alone = np.concatenate([run(x[image : image + 1]) for image in range(MOST)])
    for batch in (2, MOST):
        assert run(x[MOST - batch :]).tobytes() == alone[MOST - batch :].tobytes(), batch


@pytest.mark.parametrize("order", ["NCHW", "NHWC"])
@pytest.mark.parametrize("case", CASES)
def test_an_image_has_the_bytes_that_it_has_alone(case: str, order: str) -> None:
    op_type, of_image, of_weights, arguments = CASES[case]
    x, weights = normal(MOST, *of_image), normal(*of_weights)
    if order == "NHWC":
        x, weights = (np.moveaxis(array, 1, -1).copy() for array in (x, weights))
    assert_alike(op_type, x, weights, "", {**arguments, "order": order})


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


@pytest.mark.parametrize("order", ["NCHW", "NHWC"])
def test_an_image_of_a_locally_connected_layer_has_the_bytes_that_it_has_alone(order: str) -> None:
    x, weights = normal(MOST, 20, 5, 5), normal(3, 3, 24, 20, 3, 3)
    if order == "NHWC":
        x, weights = np.moveaxis(x, 1, -1).copy(), np.moveaxis(weights, 3, -1).copy()
    assert_alike("LC2D", x, weights, "", {"kernels": [3, 3], "order": order})
