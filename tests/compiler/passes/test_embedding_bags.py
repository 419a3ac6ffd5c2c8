"""embedding-bags: loops as PyTorch's exporters write an EmbeddingBag, against onnxruntime."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import dagexec
from dagexec.compiler.passes.catalog import SIMPLIFYING
from dagexec.compiler.passes.rewriting import run_passes
from dagexec.frontend.onnx import from_model_proto

onnxruntime = pytest.importorskip("onnxruntime")

Array = npt.NDArray[Any]

TABLE = np.random.default_rng(4).standard_normal((50, 19)).astype(np.float32)
CONSTANTS = {
    "zero": np.int64(0), "one": np.int64(1), "two": np.int64(2), "yes": np.bool_(True), "zero_list": np.array([0]),
    "one_list": np.array([1]), "two_list": np.array([2]), "minus_list": np.array([-1]), "end_list": np.array([2**62]),
    "none": np.zeros((1, 19), np.float32), "ones": np.ones((1, 1), np.float32), "table": TABLE,
}  # fmt: skip

node = helper.make_node


def value(name: str, kind: int, shape: Sequence[int | str] | None) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, shape)


def graph(nodes: list[Any], name: str, inputs: list[Any], outputs: list[Any], constants: Sequence[str] = ()) -> Any:
    arrays = [numpy_helper.from_array(np.asarray(CONSTANTS[one]), one) for one in constants]
    return helper.make_graph(nodes, name, inputs, outputs, arrays)


def model_of(nodes: list[Any]) -> onnx.ModelProto:
    """Of indices of any number in bags of any number, and an offset for each bag."""
    inputs = [value("indices", TensorProto.INT64, ["n"]), value("offsets", TensorProto.INT64, ["bags"])]
    outputs = [value("y", TensorProto.FLOAT, ["bags", 19])]
    whole = graph(nodes, "bags", inputs, outputs, list(CONSTANTS))
    return helper.make_model(whole, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


BOUNDS = [node("Shape", ["indices"], ["size"]), node("Concat", ["offsets", "size"], ["bounds"], axis=0)]


def stacked(reduction: str = "ReduceSum", count: str = "ends", keepdims: int = 0) -> onnx.ModelProto:
    """As the exporter of TorchScript does it: what an iteration results in is stacked."""
    body = graph(
        [
            node("Gather", ["bounds", "i"], ["first"]), node("Gather", ["ends", "i"], ["behind"]),
            node("Unsqueeze", ["first", "zero_list"], ["start"]), node("Unsqueeze", ["behind", "zero_list"], ["end"]),
            node("Slice", ["indices", "start", "end", "zero_list"], ["picked"]),
            node("Gather", ["table", "picked"], ["rows"]),
            node(reduction, ["rows", "zero_list"], ["row"], keepdims=keepdims),
            node("Cast", ["yes"], ["on"], to=TensorProto.BOOL),
        ],
        "body", [value("i", TensorProto.INT64, []), value("going", TensorProto.BOOL, [])],
        [value("on", TensorProto.BOOL, []), value("row", TensorProto.FLOAT, None)],
    )  # fmt: skip
    return model_of([
        *BOUNDS, node("Slice", ["bounds", "one_list", "end_list", "zero_list"], ["ends"]),
        node("Shape", [count], ["counted"]), node("Gather", ["counted", "zero"], ["count"]),
        node("Loop", ["count", "yes"], ["y"], body=body),
    ])  # fmt: skip


def branch(nodes: list[Any], result: str) -> Any:
    return graph(nodes, f"{result}_branch", [], [value(result, TensorProto.FLOAT, None)])


def inserted(mean: bool = False, last: str = "one", rows: str = "indices", counted: str = "one") -> onnx.ModelProto:
    """As the newer exporter does it: rows are inserted into a sequence, and an empty bag is zeros."""
    summed = [node("Slice", ["rows", "start", "end"], ["part"])]
    if not mean:
        summed += [node("ReduceSum", ["part", "zero_list"], ["sum"])]
    else:
        divided = branch(
            [node("Cast", ["length"], ["divisor"], to=TensorProto.FLOAT), node("Div", ["total", "divisor"], ["some"])],
            "some",
        )
        rest = branch(
            [
                node("ReduceSum", ["part", "zero_list"], ["total"]), node("Shape", [rows], ["whole"], start=0, end=1),
                node("Sub", ["whole", "start"], ["length"]), node("Greater", ["length", "zero"], ["any"]),
                node("If", ["any"], ["rest"], then_branch=divided,
                     else_branch=branch([node("Identity", ["total"], ["all"])], "all")),
            ],
            "rest",
        )  # fmt: skip
        average = branch([node("ReduceMean", ["part", "zero_list"], ["mean"])], "mean")
        summed += [
            node("Sub", ["count", last], ["last"]), node("Equal", ["i", "last"], ["is_last"]),
            node("If", ["is_last"], ["sum"], then_branch=rest, else_branch=average),
        ]  # fmt: skip
    body = graph(
        [
            node("Reshape", ["i", "minus_list"], ["place"]), node("CastLike", ["one", "place"], ["step"]),
            node("Add", ["place", "step"], ["behind"]), node("Slice", ["bounds", "place", "behind"], ["start"]),
            node("Add", ["place", "two_list"], ["further"]), node("Slice", ["bounds", "behind", "further"], ["end"]),
            node("Equal", ["start", "end"], ["is_empty"]),
            node("If", ["is_empty"], ["row"], then_branch=branch([node("Identity", ["none"], ["nothing"])], "nothing"),
                 else_branch=branch(summed, "sum")),
            node("SequenceInsert", ["found", "row"], ["more"]),
            node("Add", ["i", counted], ["next"]), node("Less", ["next", "count"], ["on"]),
        ],
        "body",
        [
            value("number", TensorProto.INT64, []), value("going", TensorProto.BOOL, []),
            helper.make_tensor_sequence_value_info("found", TensorProto.FLOAT, None), value("i", TensorProto.INT64, []),
        ],
        [
            value("on", TensorProto.BOOL, []),
            helper.make_tensor_sequence_value_info("more", TensorProto.FLOAT, None),
            value("next", TensorProto.INT64, []),
        ],
    )  # fmt: skip
    return model_of([
        *BOUNDS, node("Gather", ["table", "indices"], ["picked"]), node("Mul", ["picked", "ones"], ["rows"]),
        node("Size", ["offsets"], ["count"]), node("SequenceEmpty", [], ["empty"]),
        node("Less", ["zero", "count"], ["begins"]),
        node("Loop", ["", "begins", "empty", "zero"], ["all", "left"], body=body),
        node("ConcatFromSequence", ["all"], ["y"], axis=0),
    ])  # fmt: skip


MODELS = {
    "stacked sums": stacked(), "stacked means": stacked("ReduceMean"), "inserted sums": inserted(),
    "inserted means": inserted(mean=True),
}  # fmt: skip
OTHERS = {
    "maxima": stacked("ReduceMax"), "another number": stacked(count="indices"),
    "another last bag": inserted(mean=True, last="two_list"), "another divisor": inserted(mean=True, rows="offsets"),
    "every second bag": inserted(counted="two"),
}  # fmt: skip


def kinds(model: onnx.ModelProto) -> list[str]:
    """The operator types after the passes."""
    return [one.type for one in run_passes(from_model_proto(model), SIMPLIFYING).model.program.op]


@pytest.mark.parametrize("name", MODELS)
def test_a_loop_over_bags_becomes_one_operator(name: str) -> None:
    found = kinds(MODELS[name])
    assert "EmbeddingBag" in found
    assert "Loop" not in found


@pytest.mark.parametrize("name", OTHERS)
def test_other_loops_stay(name: str) -> None:
    found = kinds(OTHERS[name])
    assert "Loop" in found
    assert "EmbeddingBag" not in found


@pytest.mark.parametrize("name", MODELS)
def test_bags_of_any_sizes_are_what_onnxruntime_computes(name: str) -> None:
    session = onnxruntime.InferenceSession(MODELS[name].SerializeToString(), providers=["CPUExecutionProvider"])
    random = np.random.default_rng(0)
    results: list[list[Array]] = []
    for net_type in ("simple", "async_dag"):
        with dagexec.compile(MODELS[name], net_type=net_type) as executor:
            results.append([])
            for count, bags in ((20, 6), (1, 1), (33, 40), (20, 6), (0, 3)):
                feeds = {
                    "indices": random.integers(-50, 50, count),
                    "offsets": np.sort(np.append(random.integers(0, count + 1, bags - 1), 0)),
                }
                y = executor.run(feeds)["y"]
                [expected] = session.run(None, feeds)
                np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)
                results[-1].append(y)
        random = np.random.default_rng(0)
    for one, other in zip(*results, strict=True):
        np.testing.assert_array_equal(one, other)
