"""Gradient makers of convolutions and poolings: names, order, what is wanted, and that the pieces fit together.

What the gradient operators compute is tested beside them.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from dagexec.core.gradient import gradient
from tests.ops.gradient_checks import check_gradient
from tests.ops.running import operator_def

Array = npt.NDArray[Any]


def normal(*shape: int) -> Array:
    return np.random.default_rng(sum(shape)).standard_normal(shape)


def distinct(*shape: int) -> Array:
    return np.random.default_rng(0).permutation(math.prod(shape)).reshape(shape) / 7 + 0.5


def strings(definition: Any, name: str) -> list[bytes] | None:
    """The strings of an argument, None where there is none."""
    return next((list(arg.strings) for arg in definition.arg if arg.name == name), None)


@pytest.mark.parametrize("op_type", ["Conv", "Conv2D", "ConvTranspose", "ConvTranspose2D", "LC", "LC2D"])
def test_layers_give_the_gradients_that_are_wanted_in_caffe2s_order(op_type: str) -> None:
    definition = operator_def(op_type, ["x", "w", "b"], ["y"], kernel=3, order="NCHW")
    expected = {
        (0, 1, 2): (["w_grad", "b_grad", "x_grad"], None),
        (1, 2): (["w_grad", "b_grad"], None),
        (0,): (["x_grad"], [b"input"]),
        (2,): (["b_grad"], [b"bias"]),
        (0, 1): (["w_grad", "x_grad"], [b"filter", b"input"]),
    }
    for wanted, (outputs, argument) in expected.items():
        (made,) = gradient(definition, ["y_grad"], wanted=wanted).operators
        assert (made.type, list(made.input)) == (f"{op_type}Gradient", ["x", "w", "y_grad"])
        assert (list(made.output), strings(made, "wanted")) == (outputs, argument)
        assert [arg.i for arg in made.arg if arg.name == "kernel"] == [3]


def test_layers_without_a_bias_say_so() -> None:
    for inputs, arguments in ((["x", "w"], {}), (["x", "w"], {"no_bias": 1})):
        definition = operator_def("Conv", inputs, ["y"], kernel=1, **arguments)
        for wanted, outputs in (((0, 1), ["w_grad", "x_grad"]), ((1,), ["w_grad"]), ((0,), ["x_grad"])):
            (made,) = gradient(definition, ["y_grad"], wanted=wanted).operators
            assert list(made.output) == outputs
            assert [arg.i for arg in made.arg if arg.name == "no_bias"] == [1]
            assert strings(made, "wanted") == ([b"input"] if wanted == (0,) else None)


def test_the_gradient_operator_keeps_engine_and_device() -> None:
    definition = operator_def("Conv", ["x", "w"], ["y"], kernel=1)
    definition.engine = "WINOGRAD"
    definition.device_option.random_seed = 5
    (made,) = gradient(definition, ["y_grad"]).operators
    assert (made.engine, made.device_option.random_seed, made.is_gradient_op) == ("WINOGRAD", 5, True)


LAYERS: dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "Conv": (
        (2, 2, 4, 3),
        (4, 1, 3, 2),
        (4,),
        {"kernels": [3, 2], "strides": [2, 1], "pads": [1, 0, 1, 1], "group": 2},
    ),
    "Conv1D": ((2, 2, 5), (3, 2, 3), (3,), {"kernels": [3], "dilations": [2]}),
    "Conv3D": ((1, 2, 2, 3, 2), (2, 2, 2, 2, 1), (2,), {"kernels": [2, 2, 1]}),
    "ConvTranspose": ((1, 2, 2, 3), (2, 3, 2, 2), (3,), {"kernels": [2, 2], "strides": [2, 1]}),
    "LC": ((2, 2, 3, 3), (2, 2, 2, 2, 2, 2), (2, 2, 2), {"kernels": [2, 2]}),
}


@pytest.mark.parametrize("op_type", LAYERS)
def test_layer_gradients_equal_differences(op_type: str) -> None:
    x, weights, bias, arguments = LAYERS[op_type]
    inputs = [normal(*x), normal(*weights), normal(*bias)]
    check_gradient(op_type, inputs, **arguments)
    check_gradient(op_type, inputs[:2], **arguments)
    check_gradient(op_type, inputs, wanted=[0, 2], **arguments)


@pytest.mark.parametrize("op_type", ["MaxPool", "AveragePool", "LpPool", "MaxPool2D", "AveragePool2D", "LpPool2D"])
@pytest.mark.parametrize("arguments", [{"kernel": 2, "stride": 2}, {"kernel": 3, "pad": 1}, {"global_pooling": 1}])
@pytest.mark.parametrize("order", ["NCHW", "NHWC"])
def test_pooling_gradients_equal_differences(op_type: str, arguments: dict[str, int], order: str) -> None:
    check_gradient(op_type, [distinct(2, 4, 4, 2)], order=order, **arguments)


@pytest.mark.parametrize("flat", [0, 1])
def test_pooling_with_an_index_has_a_gradient_for_the_maxima_only(flat: int) -> None:
    check_gradient("MaxPoolWithIndex", [distinct(2, 2, 4, 3)], outputs=2, kernel=2, stride=1, flat_indices=flat)
    definition = operator_def("MaxPoolWithIndex", ["x"], ["y", "mask"], kernel=2)
    assert gradient(definition, [None, "mask_grad"]).inputs == (None,)
    (made,) = gradient(definition, ["y_grad", None]).operators
    assert (made.type, list(made.input)) == ("MaxPoolWithIndexGradient", ["x", "y_grad", "mask"])


@pytest.mark.parametrize("order", ["NCHW", "NHWC"])
def test_columns_of_an_image_have_gradients(order: str) -> None:
    window: dict[str, Any] = {"kernel": 2, "pad": 1, "stride": 2, "order": order}
    image = normal(1, 3, 4, 2)
    check_gradient("Im2Col", [image], **window)
    sizes, channels = (image.shape[2:], 3) if order == "NCHW" else (image.shape[1:3], 2)
    windows = tuple(size // 2 + 1 for size in sizes)
    columns = normal(1, 4 * channels, *windows) if order == "NCHW" else normal(1, *windows, 4 * channels)
    check_gradient("Col2Im", [columns, image], wanted=[0], **window)
