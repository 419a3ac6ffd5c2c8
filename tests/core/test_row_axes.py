"""The batch axis of a model, followed through its net: where rows are, and what is refused because they are not apart.

What is found is tried: the net runs for three examples, and for each alone, and gives the same values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from dagexec import InputInfo, Model, NetDef, OperatorDef, Workspace, op
from dagexec.core.dtypes import FLOAT32, from_numpy
from dagexec.core.row_axes import RowAxes, find_row_axes
from dagexec.core.schema import TensorType
from dagexec.core.traits import Rows
from dagexec.errors import RowsError
from dagexec.scheduler.nets.simple import SimpleNet

Array = npt.NDArray[Any]
EXAMPLES = 3


def normal(*shape: int) -> Array:
    return np.random.default_rng(len(shape)).standard_normal(shape).astype(np.float32)


def model_of(operators: Sequence[OperatorDef], outputs: Sequence[str], **parameters: Array) -> Model:
    net = NetDef(name="net", op=operators)
    inputs = {"x": InputInfo(FLOAT32)}
    return Model("model", net, parameters=parameters, inputs=inputs, outputs=tuple(outputs))


def computed(model: Model, feeds: Mapping[str, Array]) -> dict[str, Array]:
    workspace = Workspace()
    for name, array in {**model.parameters, **feeds}.items():
        workspace.feed_blob(name, array)
    with SimpleNet(model.net, workspace) as net:
        net.run()
    return {name: workspace.fetch_blob(name).copy() for name in model.outputs}


def example(array: Array, rows: Rows | None, index: int) -> Array:
    """What of `array` belongs to one of EXAMPLES examples."""
    if rows is None:
        return array
    split = (*array.shape[: rows.axis], rows.before, EXAMPLES, rows.each, *array.shape[rows.axis + 1 :])
    alone = np.take(array.reshape(split), [index], axis=rows.axis + 1)
    return np.ascontiguousarray(alone.reshape(*array.shape[: rows.axis], -1, *array.shape[rows.axis + 1 :]))


def assert_apart(model: Model, feeds: Mapping[str, Array], axes: Mapping[str, int] | None = None) -> RowAxes:
    """The axes that are found, after a run of each example alone gave what it gives in a batch."""
    types = {name: TensorType(array.shape, from_numpy(array.dtype)) for name, array in feeds.items()}
    found = find_row_axes(model, types, axes)
    together = computed(model, feeds)
    for index in range(EXAMPLES):
        alone = computed(model, {name: example(feeds[name], found.inputs.get(name), index) for name in feeds})
        for name, array in together.items():
            np.testing.assert_allclose(
                example(array, found.outputs.get(name), index), alone[name], rtol=1e-4, atol=1e-5, err_msg=name
            )
    return found


def _flat(x: str, y: str) -> list[OperatorDef]:
    return [op("Reshape", [x], [y, f"shape of {x}"], shape=[-1])]


NUMBERS = [
    op("Shape", ["x"], ["n"], axes=[0]),
    op("Squeeze", ["n"], ["count"], dims=[0]),
    op("Range", ["zero", "count", "one"], ["numbers"]),
    op("ExpandDims", ["numbers"], ["row"], dims=[1]),
]
"""The numbers of the rows, an axis of N and one of 1."""

FLAT_PLACES = [*NUMBERS, op("Mul", ["row", "four"], ["first"]), op("Add", ["first", "words"], ["places"])]
"""Of elements of rows of four in x without axes: row * 4 + word."""

PAIRS = [
    *NUMBERS,
    op("Expand", ["row", "pairs"], ["rows"]),
    op("Mul", ["row", "zero"], ["none"]),
    op("Add", ["none", "words"], ["columns"]),
    op("Concat", ["rows", "columns"], ["indices", "sizes"], axis=2, add_axis=1),
]
"""Indices [row, word] of elements of x."""

CONSTANTS = {
    "zero": np.array(0), "one": np.array(1), "four": np.array(4), "words": np.array([[3, 0]]),
    "pairs": np.array([1, 2]),
}  # fmt: skip


NETS: Mapping[str, tuple[Sequence[OperatorDef], tuple[int, ...], Mapping[str, Array], Rows | None]] = {
    "a layer and an activation": (
        [op("FC", ["x", "w", "b"], ["y"]), op("Relu", ["y"], ["y"])],
        (EXAMPLES, 5), {"w": normal(4, 5), "b": normal(4)}, Rows(0),
    ),
    "a layer on rows of a reshaped sequence": (
        [
            op("Reshape", ["x"], ["r", "old"], shape=[-1, 5]),
            op("FC", ["r", "w", "b"], ["h"]),
            op("Reshape", ["h"], ["y", "old2"], shape=[-1, 7, 4]),
        ],
        (EXAMPLES, 7, 5), {"w": normal(4, 5), "b": normal(4)}, Rows(0),
    ),
    "rows that stay joined": (
        [op("Reshape", ["x"], ["y", "old"], shape=[-1, 5])], (EXAMPLES, 7, 5), {}, Rows(0, each=7),
    ),
    "rows between others": (
        [op("Transpose", ["x"], ["t"], axes=[1, 0, 2]), op("Reshape", ["t"], ["y", "old"], shape=[-1, 5])],
        (EXAMPLES, 7, 5), {}, Rows(0, before=7),
    ),
    "a convolution, pooling and a classifier": (
        [
            op("Conv", ["x", "w", "b"], ["c"], kernel=3),
            op("MaxPool", ["c"], ["p"], kernel=2, stride=2),
            op("Flatten", ["p"], ["f"]),
            op("FC", ["f", "v", "d"], ["l"]),
            op("Softmax", ["l"], ["y"]),
        ],
        (EXAMPLES, 2, 6, 6), {"w": normal(4, 2, 3, 3), "b": normal(4), "v": normal(3, 16), "d": normal(3)}, Rows(0),
    ),
    "attention by hand": (
        [
            op("Transpose", ["x"], ["k"], axes=[0, 2, 1]),
            op("BatchMatMul", ["x", "k"], ["s"]),
            op("Softmax", ["s"], ["p"], axis=-1),
            op("BatchMatMul", ["p", "x"], ["y"]),
        ],
        (EXAMPLES, 4, 5), {}, Rows(0),
    ),
    "a reduction before the rows": (
        [op("Transpose", ["x"], ["t"], axes=[1, 0, 2]), op("ReduceSum", ["t"], ["y"], axes=[0], keepdims=0)],
        (EXAMPLES, 4, 5), {}, Rows(0),
    ),
    "a recurrent layer": (
        [op("Transpose", ["x"], ["t"], axes=[1, 0, 2]), op("LSTM", ["t", "w", "r"], ["y"], hidden_size=2)],
        (EXAMPLES, 4, 5), {"w": normal(1, 8, 5), "r": normal(1, 8, 2)}, Rows(2),
    ),
    "sizes that are computed": (
        [
            op("Shape", ["x"], ["n"], axes=[0]),
            op("Concat", ["n", "rest"], ["s", "lengths"], axis=0),
            op("Reshape", ["x", "s"], ["y", "old"]),
        ],
        (EXAMPLES, 4, 5), {"rest": np.array([20], np.int64)}, Rows(0),
    ),
    "a mask of computed size": (
        [
            op("Shape", ["x"], ["n"]),
            op("ConstantFill", ["n"], ["ones"], input_as_shape=1, value=2.0),
            op("Mul", ["x", "ones"], ["y"]),
        ],
        (EXAMPLES, 4), {}, Rows(0),
    ),
    "an embedding": (
        [op("Cast", ["x"], ["i"], to="int32"), op("Gather", ["table", "i"], ["y"])],
        (EXAMPLES, 4), {"table": normal(3, 6)}, Rows(0),
    ),
    "images in parts and back": (
        [
            op("SpaceToBatch", ["x"], ["s"]),
            op("MaxPool", ["s"], ["p"], kernel=2),
            op("BatchToSpace", ["p"], ["y"]),
        ],
        (EXAMPLES, 2, 6, 6), {}, Rows(0),
    ),
    "words of its own that each row names by places in all": (
        [*FLAT_PLACES, *_flat("x", "flat"), op("Gather", ["flat", "places"], ["y"])],
        (EXAMPLES, 4), CONSTANTS, Rows(0),
    ),
    "words of its own that each row names by row and column": (
        [*PAIRS, op("GatherND", ["x", "indices"], ["y"])], (EXAMPLES, 4), CONSTANTS, Rows(0),
    ),
    "what does not depend on rows": (
        [op("Relu", ["x"], ["z"]), op("Relu", ["w"], ["y"])], (EXAMPLES, 4), {"w": normal(3, 6)}, None,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NETS)
def test_rows_are_where_they_are_found(name: str) -> None:
    operators, shape, parameters, expected = NETS[name]
    x = np.abs(normal(*shape)) if name == "an embedding" else normal(*shape)
    found = assert_apart(model_of(operators, ["y"], **parameters), {"x": x.clip(-2.5, 2.5)})
    assert found.outputs.get("y") == expected


KEPT = _flat("x", "r")
TURNED = [op("Transpose", ["x"], ["t"], axes=[1, 0]), *_flat("t", "r")]


def _net(operators: Sequence[OperatorDef], given: Sequence[str], results: Sequence[str] = ("r",)) -> NetDef:
    return NetDef(name="body", op=operators, external_input=given, external_output=results)


def _choice(condition: str, then: Sequence[OperatorDef], other: Sequence[OperatorDef]) -> OperatorDef:
    """If: nets that read x."""
    nets = {"then_net": _net(then, ["x"]), "else_net": _net(other, ["x"])}
    return op("If", [condition, "x"], ["y"], captured=["x"], **nets)


def _loop(operators: Sequence[OperatorDef], condition: str = "yes") -> OperatorDef:
    """Loop: v is carried under the name s, and the net may write `on`."""
    net = _net(operators, ["i", "on", "s"], ["on", "r"])
    return op("Loop", ["ones", condition, "v"], ["y"], loop_net=net, trip_count=1, condition=1)


LAYER = [op("MatMul", ["x", "k"], ["d"], trans_b=1)]

MIXED: Mapping[str, tuple[Sequence[OperatorDef], str]] = {
    "softmax over rows": ([op("Softmax", ["x"], ["y"], axis=0)], "works along axis 0"),
    "a reduction over rows": ([op("ReduceSum", ["x"], ["y"], axes=[0])], "works along axis 0"),
    "a mean over everything": ([op("ReduceMean", ["x"], ["y"])], "works along axis 0"),
    "rows joined with rows": ([op("Concat", ["x", "x"], ["y", "n"], axis=0)], "works along axis 0"),
    "the first row": ([op("Slice", ["x"], ["y"], starts=[0, 0], ends=[1, -1])], "works along axis 0"),
    "a Gram matrix": ([op("MatMul", ["x", "x"], ["y"], trans_b=1)], "differs from row to row"),
    "statistics of a batch": (
        [op("DynamicQuantizeLinear", ["x"], ["y", "scale", "zero"])], "takes its scale from the range of all rows",
    ),
    "an operator without a rule": (
        [op("Perplexity", ["x"], ["y"])], "Perplexity does not say whether its rows are independent$",
    ),
    "as many elements as values say": (
        [op("NonZero", ["x"], ["y"])], "and how large its outputs are follows from values of all of them",
    ),
    "images of another order": (
        [op("Reshape", ["x"], ["i", "n"], shape=[-1, 1, 1, 1]), op("BatchToSpace", ["i"], ["y"])],
        "makes one image of 4, which are not those of one example",
    ),
    "regions of images": (
        [op("Reshape", ["x"], ["i", "n"], shape=[-1, 1, 2, 2]),
         op("MaxRoiPool", ["i", "boxes"], ["y"], pooled_shape=[1, 1])], "regions count the images of all rows",
    ),
    "a condition of each row": (
        [op("GT", ["x", "x"], ["if"]), _choice("if", KEPT, KEPT)], "input 'if' differs from row to row",
    ),
    "a condition of the number of rows": (
        [op("Shape", ["x"], ["n"], axes=[0]), op("Cast", ["n"], ["if"], to="bool"), _choice("if", KEPT, KEPT)],
        "input 'if' depends on the number of rows",
    ),
    "nets that disagree": ([_choice("yes", KEPT, TURNED)], "output 'y' has other rows by one net than by the other"),
    "a net that mixes rows": (
        [_choice("yes", KEPT, [op("Softmax", ["x"], ["z"], axis=0), *_flat("z", "r")])],
        "net: else_net.*works along axis 0",
    ),
    "rows turned in a loop": (
        [*_flat("x", "v"), _loop([op("Reshape", ["s"], ["x", "p"], shape=[-1, 4]), *TURNED])],
        "carried value 0 has other rows after an iteration than before",
    ),
    "a loop as long as rows say": (
        [op("Cast", ["x"], ["go"], to="bool"), *_flat("x", "v"), _loop([op("Relu", ["s"], ["r"])], "go")],
        "'go' differs from row to row",
    ),
    "a loop until rows say": (
        [*_flat("x", "v"), _loop([op("Cast", ["s"], ["on"], to="bool"), op("Relu", ["s"], ["r"])])],
        "how many iterations there are differs from row to row",
    ),
    "a scan of the rows": (
        [op("Scan", ["s", "x"], ["y"], num_scan_inputs=1, scan_net=_net([op("Add", ["t", "i"], ["r"])], ["t", "i"]))],
        "works along axis 0",
    ),
    "indices through all rows": ([op("TopK", ["x"], ["a", "b", "y"], k=1)], "output 'y' has other sizes"),
    "rows as the steps of sequences": ([op("ReverseSequence", ["x", "ones"], ["y"])], "works along axis 0"),
    "rows as columns of a product": (
        [op("Transpose", ["x"], ["t"], axes=[1, 0]), op("BatchMatMul", ["k", "t"], ["y"])], "works along axis 1",
    ),
    "rows of one side of a stack of products": (
        [op("BatchMatMul", ["x", "c"], ["y"], broadcast=1)], "works along axis 0",
    ),
    "rows and columns exchanged": (
        [op("Transpose", ["x"], ["t"], axes=[1, 0]), op("ExpandDims", ["x"], ["e"], dims=[2]),
         op("Mul", ["e", "t"], ["y"])], "different axes",
    ),
    "the number of rows": (
        [op("Shape", ["x"], ["n"], axes=[0]), op("Cast", ["n"], ["f"], to="float"), op("Div", ["x", "f"], ["y"])],
        "depends on the number of rows",
    ),
    "an output that counts": ([op("Shape", ["x"], ["y"])], "output 'y' depends on the number of rows"),
    "an output that is a shape": (
        [op("Reshape", ["x"], ["r", "y"], shape=[-1, 2, 2])], "output 'y' depends on the number of rows",
    ),
    "batch normalization in training": (
        [op("SpatialBN", ["x", "s", "s", "s", "s"], ["y", "m", "v", "sm", "sv"], is_test=0)], "statistics of the batch",
    ),
    "random numbers": (
        [op("UniformFill", [], ["u"], shape=[4]), op("Mul", ["x", "u"], ["y"])], "the same in every run",
    ),
    "the first row for all": (
        [*NUMBERS, op("Mul", ["row", "zero"], ["first"]), op("Gather", ["x", "first"], ["y"])], "works along axis 0",
    ),
    "words of the next row": (
        [*FLAT_PLACES, *_flat("x", "z"), op("Add", ["places", "four"], ["next"]), op("Gather", ["z", "next"], ["y"])],
        "works along axis 0",
    ),
    "rows and columns in the wrong order": (
        [*PAIRS[:-1], op("Concat", ["columns", "rows"], ["indices", "sizes"], axis=2, add_axis=1),
         op("GatherND", ["x", "indices"], ["y"])], "works along axis 0",
    ),
    "the numbers of the rows": (
        [*NUMBERS, op("Cast", ["row"], ["f"], to="float"), op("Add", ["x", "f"], ["y"])], "'f' depends on the number",
    ),
    "the gradient of weights": (
        [*LAYER, op("FCGradient", ["x", "k", "d"], ["y", "db", "dx"])], "output 'y' is computed from all rows together",
    ),
    "what reads the gradient of weights": (
        [*LAYER, op("FCGradient", ["x", "k", "d"], ["dw", "db", "dx"]), op("Relu", ["dw"], ["y"])],
        "input 'dw' was computed from all rows together",
    ),
    "the gradient of what is stretched over rows": (
        [op("Add", ["x", "s"], ["d"]), op("AddGradient", ["d", "x", "s"], ["dx", "y"])], "from all rows together",
    ),
    "sums before rows of one number": (
        [op("Transpose", ["x"], ["t"], axes=[1, 0]), op("ReduceSum", ["t"], ["y"], axes=[0])],
        "in another order where only one number is behind it",
    ),
    "a shape for one batch": ([op("Reshape", ["x"], ["y", "o"], shape=[2, 4])], "shapes are not known"),
}  # fmt: skip


@pytest.mark.parametrize("name", MIXED)
def test_rows_that_are_not_apart_are_refused(name: str) -> None:
    operators, problem = MIXED[name]
    with pytest.raises(RowsError, match=problem) as caught:
        find_row_axes(
            model_of(
                operators,
                ["y"],
                s=normal(4),
                **CONSTANTS,
                ones=np.ones(4, np.int64),
                boxes=normal(3, 5),
                yes=np.array(True),
                k=normal(3, 4),
                c=normal(2, 4, 3),
            ),
            {"x": TensorType((2, 4), FLOAT32)},
        )
    assert "net" in str(caught.value) or "model" in str(caught.value)


def test_the_batch_need_not_be_the_first_axis() -> None:
    model = model_of([op("LSTM", ["x", "w", "r"], ["y"], hidden_size=2)], ["y"], w=normal(1, 8, 5), r=normal(1, 8, 2))
    found = assert_apart(model, {"x": normal(4, EXAMPLES, 5)}, {"x": 1})
    assert found.outputs == {"y": Rows(2)}


def test_the_gradient_of_an_input_has_rows_beside_that_of_weights() -> None:
    gradients = op("FCGradient", ["x", "k", "d"], ["dw", "db", "y"])
    found = assert_apart(model_of([*LAYER, gradients], ["y"], k=normal(3, 4)), {"x": normal(EXAMPLES, 4)}, {"x": 0})
    assert found.outputs == {"y": Rows(0)}


def test_an_axis_that_an_input_does_not_have_is_refused() -> None:
    with pytest.raises(RowsError, match=r"input 'x', float32\[4\], has no axis 1"):
        find_row_axes(model_of([op("Relu", ["x"], ["y"])], ["y"]), {"x": TensorType((4,), FLOAT32)}, {"x": 1})
