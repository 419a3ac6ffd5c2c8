"""Gradient makers of convolutions and poolings: names, order, what is wanted, and that the pieces fit together.

What the gradient operators compute is tested beside them.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from dagexec import NetDef
from dagexec.core.gradient import gradient
from dagexec.scheduler.nets.simple import SimpleNet
from dagexec.training.backward import add_gradient_operators
from tests.ops.gradient_checks import check_gradient
from tests.ops.running import operator_def, workspace_of

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
    definition = operator_def("Conv", ["x", "w"], ["y"], kernel=1, engine="WINOGRAD")
    definition.device_option.random_seed = 5
    (made,) = gradient(definition, ["y_grad"]).operators
    assert (made.engine, made.device_option.random_seed, made.is_gradient_op) == ("WINOGRAD", 5, True)


@pytest.mark.parametrize("flat", [0, 1])
def test_pooling_with_an_index_has_a_gradient_for_the_maxima_only(flat: int) -> None:
    check_gradient("MaxPoolWithIndex", [distinct(2, 2, 4, 3)], outputs=2, kernel=2, stride=1, flat_indices=flat)
    definition = operator_def("MaxPoolWithIndex", ["x"], ["y", "mask"], kernel=2)
    assert gradient(definition, [None, "mask_grad"]).inputs == (None,)
    (made,) = gradient(definition, ["y_grad", None]).operators
    assert (made.type, list(made.input)) == ("MaxPoolWithIndexGradient", ["x", "y_grad", "mask"])


NETS = {
    "pads, then a convolution": (
        [
            operator_def("PadImage", ["x"], ["p"], pad=1, mode="reflect"),
            operator_def("Conv", ["p", "w"], ["y"], kernel=2),
        ],
        (3, 2, 2, 2),
    ),
    "a convolution, then maxima": (
        [
            operator_def("Conv", ["x", "w"], ["c"], kernel=2, order="NCHW"),
            operator_def("MaxPool", ["c"], ["y"], kernel=2, stride=1),
        ],
        (3, 2, 2, 2),
    ),
    "columns, then a matrix product": (
        [operator_def("Im2Col", ["x"], ["c"], kernel=2), operator_def("BatchMatMul", ["w", "c"], ["y"], broadcast=1)],
        (4, 3),
    ),
    "a transposed convolution, then means": (
        [
            operator_def("ConvTranspose", ["x", "w"], ["c"], kernel=2, stride=2),
            operator_def("AveragePool", ["c"], ["y"], kernel=3, stride=2, pad=1),
        ],
        (2, 3, 2, 2),
    ),
    "a layer of its own filters, then a fully connected one": (
        [operator_def("LC", ["x", "w"], ["c"], kernel=3), operator_def("FC", ["c", "v", "b"], ["y"])],
        (2, 2, 2, 2, 3, 3),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", NETS)
def test_nets_of_two_operators_have_the_gradients_of_differences(name: str) -> None:
    operators, shape = NETS[name]
    x = {"x": distinct(2, 2, 4, 4) / 10}
    values = x | {"w": normal(*shape), "v": normal(3, 8), "b": normal(3)}
    used = {blob: values[blob] for blob in values if any(blob in operator.input for operator in operators)}

    def run(net: NetDef, varied: dict[str, Array], *fetch: str) -> list[Array]:
        workspace = workspace_of(varied)
        with SimpleNet(net, workspace) as built:
            built.run()
        return [workspace.fetch_blob(blob) for blob in fetch]

    forward = NetDef(name="forward", op=operators, external_input=list(used))
    (y,) = run(forward, used, "y")
    training = NetDef()
    training.CopyFrom(forward)
    gradients = add_gradient_operators(training, {"y": "y_weights"})
    weights = np.random.default_rng(9).uniform(-1, 1, y.shape)
    found = run(training, used | {"y_weights": weights}, *(str(gradients[blob]) for blob in used))
    for (blob, value), analytic in zip(used.items(), found, strict=True):
        for place in list(np.ndindex(value.shape))[:: max(1, value.size // 20)]:
            sides = []
            for step in (1e-6, -1e-6):
                varied = value.copy()
                varied[place] += step
                sides.append(np.sum(run(forward, used | {blob: varied}, "y")[0] * weights))
            assert analytic[place] == pytest.approx((sides[0] - sides[1]) / 2e-6, 1e-5, 1e-7), (blob, place)


def test_the_first_layer_of_a_net_gives_no_gradient_of_its_images() -> None:
    net = NetDef(name="net", op=NETS["a convolution, then maxima"][0], external_input=["x", "w"])
    add_gradient_operators(net, ["y"], wanted=["w"])
    made = [operator for operator in net.op if operator.type == "ConvGradient"]
    assert [list(operator.output) for operator in made] == [["w_grad"]]
