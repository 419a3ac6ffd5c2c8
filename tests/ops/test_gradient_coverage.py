"""Every operator is known to the registry of gradients, and every gradient passes a numerical check."""

from __future__ import annotations

import numpy as np
import pytest

from dagexec import NetDef, OperatorDef
from dagexec.core.device import Device
from dagexec.core.gradient import gradient, has_maker
from dagexec.core.registry import operator_module, registered_operators
from dagexec.errors import GradientError
from dagexec.scheduler.nets.simple import SimpleNet
from dagexec.training.backward import add_gradient_operators
from tests.ops.examples import Example as ForwardExample
from tests.ops.formulas import differentiable
from tests.ops.gradient_checks import analytic_gradients, check_gradient
from tests.ops.gradient_examples import Example, examples
from tests.ops.onednn.engine import ENGINES
from tests.ops.running import operator_def, workspace_of

EXAMPLES = examples()

ELSEWHERE = {
    "FloatToHalf": "float16 has too few digits for differences",
    "HalfToFloat": "float16 has too few digits for differences",
    "CopyCPUToGPU": "needs two devices",
    "CopyGPUToCPU": "needs two devices",
    "CopyFromCPUInput": "needs two devices",
    "ZeroGradient": "has no outputs: test_alias",
    "NegateGradient": "its slope is not that of what it computes: test_alias",
    "CopyRowsToTensor": "passes all gradients on, as Caffe2's does: test_lists",
    "HSoftmax": "needs a tree: test_hierarchical",
    "LambdaRankNdcg": "its slopes are those of a loss with fixed weights: test_lambda_rank",
    "Reorder": "changes the layout, not the elements: test_shape_gradient",
}


def own_operators() -> list[str]:
    """Those of the package; other tests register operators of their own."""
    return [name for name in registered_operators() if operator_module(name).startswith("dagexec.ops.")]


def is_known(op_type: str) -> bool:
    """False when nothing says what the gradient of this type is, or why there is none."""
    try:
        gradient(OperatorDef(type=op_type, output=["y"]), [None])
    except GradientError as error:
        return "no gradient maker is registered" not in str(error)
    return True


def test_every_operator_has_a_gradient_or_is_known_to_have_none() -> None:
    assert [name for name in own_operators() if not is_known(name)] == []


def test_every_differentiable_operator_has_an_example() -> None:
    differentiable = {name for name in own_operators() if has_maker(name)}
    assert differentiable == EXAMPLES.keys() | ELSEWHERE.keys()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("op_type", "example"),
    [pytest.param(name, one, id=name) for name, many in EXAMPLES.items() for one in many[name in differentiable() :]],
)
def test_gradients_are_the_numerical_ones(op_type: str, example: Example) -> None:
    """The first example of an operator with a formula is left to `test_formulas`."""
    check_gradient(
        op_type,
        example.inputs,
        wanted=example.wanted,
        outputs=example.outputs,
        inplace=example.inplace,
        statistics=example.statistics,
        **example.arguments,
    )


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("op_type", EXAMPLES)
def test_a_gradient_alone_is_what_it_is_beside_the_others(op_type: str, engine: str) -> None:
    dtype, close = (np.float32, 1e-5) if engine == "ONEDNN" else (np.float64, 1e-12)
    for one in EXAMPLES[op_type]:
        inputs = [array.astype(dtype) if array.dtype == np.float64 else array for array in one.inputs]
        positions = one.wanted or [i for i, array in enumerate(inputs) if array.dtype == dtype]
        if len(positions) < 2:
            continue
        blobs = ["x"] * len(inputs), ["y"] * one.outputs
        forward = ForwardExample.of(operator_def(op_type, *blobs, engine=engine, **one.arguments), inputs)
        slopes = {
            index: np.cos(np.arange(y.size)).reshape(y.shape).astype(dtype)
            for index, y in enumerate(forward.run())
            if y.dtype == dtype and index not in one.statistics
        }
        every = analytic_gradients(forward.definition, inputs, slopes, positions)
        for position in positions:
            alone = analytic_gradients(forward.definition, inputs, slopes, [position])[position]
            np.testing.assert_allclose(alone, every[position], rtol=close, atol=close, err_msg=f"{position} of {one}")


def test_second_derivatives_are_refused() -> None:
    definition = OperatorDef(type="SigmoidGradient", input=["y", "dy"], output=["dx"])
    with pytest.raises(GradientError, match="SigmoidGradient has no gradient: it is the gradient of Sigmoid"):
        gradient(definition, ["dx_grad"])


def test_a_missing_output_that_the_gradient_needs_is_named() -> None:
    definition = OperatorDef(type="Dropout", input=["x"], output=["y"])
    definition.arg.add(name="is_test", i=0)
    with pytest.raises(GradientError, match="Dropout 'y': its gradient needs output 1, and it has only 1"):
        gradient(definition, ["y_grad"])


def gradient_through(operators: list[OperatorDef], x: np.ndarray) -> np.ndarray:
    """The gradient of `x` in a net from `x` to the scalar `loss`."""
    net = NetDef(name="through", op=operators, external_input=["x"])
    name = str(add_gradient_operators(net, ["loss"])["x"])
    workspace = workspace_of({"x": x})
    with SimpleNet(net, workspace) as made:
        made.run()
    return workspace.fetch_blob(name)


@pytest.mark.parametrize("there", ["CopyCPUToGPU", "CopyFromCPUInput"])
def test_gradients_cross_devices_with_the_values(there: str) -> None:
    operators = [
        operator_def(there, ["x"], ["on_device"]),
        operator_def("Sqr", ["on_device"], ["squared"]),
        operator_def("CopyGPUToCPU", ["squared"], ["back"]),
        operator_def("SumElements", ["back"], ["loss"]),
    ]
    for definition in operators[:3]:
        definition.device_option.CopyFrom(Device("sim", 0).to_option())
    x = np.arange(4.0)
    np.testing.assert_array_equal(gradient_through(operators, x), 2 * x)


def test_gradients_through_half_precision_have_the_types_of_the_values() -> None:
    operators = [
        operator_def("FloatToHalf", ["x"], ["half"]),
        operator_def("Scale", ["half"], ["scaled"], scale=0.1),
        operator_def("HalfToFloat", ["scaled"], ["float"]),
        operator_def("SumElements", ["float"], ["loss"]),
    ]
    found = gradient_through(operators, np.ones(3, np.float32))
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, np.float32(np.float16(0.1)))
