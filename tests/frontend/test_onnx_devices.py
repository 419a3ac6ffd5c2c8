"""ONNX models on devices: what runs on the host alone has copies around it, and the rest runs where it was asked for.

Numbers are small integers, so that every engine computes them exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import pytest
from onnx import TensorProto, helper

import dagexec
from dagexec.core.device import CPU
from dagexec.core.proto import NetDef
from dagexec.devices.sim import simulated
from dagexec.errors import UnsupportedOperatorError
from dagexec.frontend.onnx import forms
from dagexec.frontend.onnx import graph as graphs
from dagexec.frontend.onnx import node as nodes
from dagexec.frontend.onnx.foreign_nodes import FOREIGN
from dagexec.scheduler.hazards import check_net
from dagexec.testing import detecting
from tests.cuda.emulated import emulated

Array = npt.NDArray[Any]
Expected = Callable[[Array], dict[str, Any]]

X = np.array([[3, -1, 2, 3], [0, 5, -2, 1], [-3, -1, 4, 4]], np.float32)

node = helper.make_node


def model_of(*nodes: onnx.NodeProto, outputs: str, **constants: Any) -> onnx.ModelProto:
    """A model of these nodes with an input x of (n, 4), and arrays for `constants`."""
    given = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 4])]
    returned = [helper.make_empty_tensor_value_info(name) for name in outputs.split(",")]
    arrays = [onnx.numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()]
    graph = helper.make_graph(list(nodes), "net", given, returned, arrays)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("ai.onnx.ml", 3)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def body(*nodes: onnx.NodeProto, inputs: str = "", outputs: str) -> onnx.GraphProto:
    given = [helper.make_empty_tensor_value_info(name) for name in inputs.split(",") if name]
    return helper.make_graph(
        list(nodes), "body", given, [helper.make_empty_tensor_value_info(one) for one in outputs.split(",")]
    )


def sizes_that_a_run_finds() -> tuple[onnx.ModelProto, Expected]:
    parts = node("Relu", ["x"], ["a"]), node("Unique", ["a"], ["u"], sorted=1), node("Neg", ["u"], ["y"])
    return model_of(*parts, outputs="y"), lambda x: {"y": -np.unique(np.maximum(x, 0))}


def a_chain_of_the_host() -> tuple[onnx.ModelProto, Expected]:
    """What nothing on the device reads stays on the host."""
    parts = (
        node("Abs", ["x"], ["a"]), node("Unique", ["a"], ["u"], sorted=1), node("SplitToSequence", ["u"], ["parts"]),
        node("SequenceLength", ["parts"], ["n"]), node("ConcatFromSequence", ["parts"], ["c"], axis=0, new_axis=0),
        node("Unique", ["c"], ["v"], sorted=1), node("Neg", ["v"], ["y"]),
    )  # fmt: skip

    def expected(x: Array) -> dict[str, Any]:
        return {"y": -np.unique(np.abs(x)), "n": np.unique(np.abs(x)).size}

    return model_of(*parts, outputs="y,n"), expected


def strings_between_numbers() -> tuple[onnx.ModelProto, Expected]:
    """Names of the largest in each row, joined, and counted again; sizes between are known in a run alone."""
    label = node(
        "LabelEncoder", ["i"], ["s"], domain="ai.onnx.ml", keys_int64s=[0, 1, 2, 3], values_strings=list("abcd")
    )
    count = node("LabelEncoder", ["t"], ["k"], domain="ai.onnx.ml", keys_strings=["aa", "bb"], values_int64s=[7, 9])
    parts = (
        node("Neg", ["x"], ["a"]), node("ArgMin", ["a"], ["i"], axis=1, keepdims=0), label,
        node("Unique", ["s"], ["u"], sorted=1), node("Reshape", ["u", "column"], ["r"]),
        node("StringConcat", ["r", "r"], ["t"]), count, node("Add", ["k", "one"], ["y"]),
        node("Equal", ["t", "t"], ["e"]),
    )  # fmt: skip

    def expected(x: Array) -> dict[str, Any]:
        twice = [name * 2 for name in sorted({"abcd"[place] for place in x.argmax(1)})]
        values = np.array([{"aa": 7, "bb": 9}.get(name, -1) for name in twice])[:, None]
        return {"t": np.array([[name] for name in twice], object), "y": values + 1, "e": values == values}

    return model_of(*parts, outputs="t,y,e", column=np.array([-1, 1]), one=np.int64(1)), expected


def a_classifier() -> tuple[onnx.ModelProto, Expected]:
    classifier = node(
        "LinearClassifier", ["a"], ["label", "scores"], domain="ai.onnx.ml", classlabels_strings=["low", "high"],
        coefficients=[-1.0, 0, 0, 0, 1, 0, 0, 0], intercepts=[0.0, 0.0], multi_class=1, post_transform="NONE",
    )  # fmt: skip
    zipped = node("ZipMap", ["doubled"], ["z"], domain="ai.onnx.ml", classlabels_strings=["low", "high"])
    parts = node("Neg", ["x"], ["a"]), classifier, node("Add", ["scores", "scores"], ["doubled"]), zipped

    def expected(x: Array) -> dict[str, Any]:
        first = -x[:, 0]
        scores = np.stack([-first, first], 1)
        label = np.array(["low" if one[0] >= one[1] else "high" for one in scores], object)
        return {"label": label, "z": [{"low": 2 * low, "high": 2 * high} for low, high in scores]}

    return model_of(*parts, outputs="label,z"), expected


def a_branch() -> tuple[onnx.ModelProto, Expected]:
    """Its session reads what the device computed, and what it gives goes back there."""
    yes = body(node("Unique", ["a"], ["u"], sorted=1), outputs="u")
    no = body(node("Flatten", ["a"], ["f"]), outputs="f")
    parts = (
        node("Abs", ["x"], ["a"]), node("ReduceMax", ["a", "all"], ["m"], keepdims=0),
        node("Greater", ["m", "four"], ["c"]), node("If", ["c"], ["b"], then_branch=yes, else_branch=no),
        node("Neg", ["b"], ["y"]),
    )  # fmt: skip

    def expected(x: Array) -> dict[str, Any]:
        return {"y": -np.unique(np.abs(x)) if np.abs(x).max() > 4 else -np.abs(x)}

    return model_of(*parts, outputs="y", all=np.array([0, 1]), four=np.float32(4)), expected


def a_loop() -> tuple[onnx.ModelProto, Expected]:
    step = body(
        node("Add", ["carried", "a"], ["sum"]), node("Unique", ["sum"], ["u"], sorted=1),
        node("Identity", ["go"], ["on"]), node("ReduceMax", ["u"], ["seen"], keepdims=0),
        inputs="index,go,carried", outputs="on,sum,seen",
    )  # fmt: skip
    parts = (
        node("Relu", ["x"], ["a"]),
        node("Loop", ["three", "", "a"], ["s", "m"], body=step),
        node("Neg", ["s"], ["y"]),
    )

    def expected(x: Array) -> dict[str, Any]:
        positive = np.maximum(x, 0)
        return {"y": -4 * positive, "m": positive.max() * np.arange(2, 5, dtype=np.float32)}

    return model_of(*parts, outputs="y,m", three=np.int64(3)), expected


def a_scan() -> tuple[onnx.ModelProto, Expected]:
    step = body(
        node("Add", ["state", "row"], ["next"]), node("Unique", ["row"], ["u"], sorted=1),
        node("ReduceMin", ["u"], ["least"], keepdims=0), inputs="state,row", outputs="next,least",
    )  # fmt: skip
    parts = (
        node("Neg", ["x"], ["a"]), node("Scan", ["zeros", "a"], ["s", "l"], body=step, num_scan_inputs=1),
        node("Abs", ["s"], ["y"]),
    )  # fmt: skip
    model = model_of(*parts, outputs="y,l", zeros=np.zeros(4, np.float32))
    return model, lambda x: {"y": np.abs(x.sum(0)), "l": -x.max(1)}


def an_optional() -> tuple[onnx.ModelProto, Expected]:
    parts = (
        node("Neg", ["x"], ["a"]), node("Optional", ["a"], ["o"]), node("OptionalHasElement", ["o"], ["has"]),
        node("OptionalGetElement", ["o"], ["g"]), node("Unique", ["g"], ["u"], sorted=1), node("Neg", ["u"], ["y"]),
    )  # fmt: skip
    return model_of(*parts, outputs="y,has"), lambda x: {"y": -np.unique(-x), "has": True}


MODELS = [
    sizes_that_a_run_finds, a_chain_of_the_host, strings_between_numbers, a_classifier, a_branch, a_loop, a_scan,
    an_optional,
]  # fmt: skip


@pytest.fixture(params=["operators of its own", "sessions"])
def in_sessions(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether onnxruntime computes what the tests here are about, as if dagexec had no operators for it."""
    if request.param == "sessions":

        def converter_of(op_type: str, domain: str) -> Any:
            lacking = domain == "ai.onnx.ml" or op_type in ("Unique", "StringConcat")
            return None if lacking else nodes.converter_of(op_type, domain)

        monkeypatch.setattr(graphs, "converter_of", converter_of)
        monkeypatch.setattr(forms, "_known", {})
    return bool(request.param == "sessions")


@pytest.fixture(params=["sim:0", "cuda:0"])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    with simulated("sim:0") if request.param == "sim:0" else emulated(record=False):
        yield request.param


def assert_equal(found: Any, expected: Any) -> None:
    if isinstance(expected, list | dict):
        assert found == expected
    else:
        assert np.asarray(found).tolist() == np.asarray(expected).tolist()


@pytest.mark.parametrize("net_type", ["simple", "async_dag"])
@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_what_the_host_alone_computes_takes_part_in_nets_of_devices(
    device: str, net_type: Any, make: Any, in_sessions: bool
) -> None:
    model, expected = make()
    with dagexec.compile(model, device=device, net_type=net_type, num_workers=2) as executor:
        for x in (X, X[::-1].copy(), X[:1], X):
            found = executor.run({"x": x}, timeout=60)
            for name, value in expected(x).items():
                assert_equal(found[name], value)
        graph = executor.net().graph
    assert device in {str(graph.device(number)) for number in range(len(graph))}
    sessions = [number for number, one in enumerate(graph.operators) if one.type == FOREIGN]
    assert all(graph.device(number) == CPU for number in sessions)
    assert (
        sessions
        or not in_sessions
        or any(isinstance(one, NetDef) for op in graph.operators for one in op.values.values())
    )


def test_elements_that_a_device_has_no_type_for_stay_on_the_host() -> None:
    """Weights of 4 bits, and float8 between two operators of the device."""
    parts = (
        node("DequantizeLinear", ["w", "one"], ["weights"]), node("MatMul", ["x", "weights"], ["p"]),
        node("Cast", ["p"], ["small"], to=TensorProto.FLOAT8E5M2), node("Reshape", ["small", "row"], ["r"]),
        node("Cast", ["r"], ["large"], to=TensorProto.FLOAT), node("Neg", ["large"], ["y"]),
    )  # fmt: skip
    model = model_of(*parts, outputs="y", one=np.float32(1), row=np.array([-1]))
    model.graph.initializer.append(helper.make_tensor("w", TensorProto.UINT4, [4, 1], [1, 0, 2, 0]))
    with emulated(record=False), dagexec.compile(model, device="cuda:0") as executor:
        assert executor.run({"x": X})["y"].tolist() == [-7, 4, -5]
        graph = executor.net().graph
        on_device = {one.type for number, one in enumerate(graph.operators) if graph.device(number) != CPU}
    assert "Negative" in on_device
    assert on_device.isdisjoint({"DequantizeLinear", "Cast", "Reshape"})


@pytest.mark.parametrize("in_sessions", ["sessions"], indirect=True)
def test_operators_of_the_host_that_follow_one_another_have_no_copies_between_them(in_sessions: bool) -> None:
    model, _ = a_chain_of_the_host()
    with simulated("sim:0"), dagexec.compile(model, device="sim:0") as executor:
        executor.run({"x": X})
        graph = executor.net().graph
        kinds = [(one.type, graph.device(number) == CPU) for number, one in enumerate(graph.operators)]
    copies = [kind for kind, _ in kinds if kind in ("CopyFromCPUInput", "EnsureCPUOutput", "Copy")]
    assert copies == ["CopyFromCPUInput", "EnsureCPUOutput", "CopyFromCPUInput"]  # x; what Abs gives; what Neg reads
    assert {kind for kind, on_host in kinds if not on_host} - set(copies) == {"Abs", "Negative"}


@pytest.mark.usefixtures("in_sessions")
@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_the_proof_and_the_detector_find_no_race_in_them(make: Any) -> None:
    model, _ = make()
    options: dict[str, Any] = {"device": "sim:0", "net_type": "async_dag", "num_workers": 2}
    with simulated("sim:0"), dagexec.compile(model, **options) as executor:
        with detecting() as detector:
            executor.run({"x": X}, trace=detector)
        assert check_net(executor.net(), 4).holds


@pytest.mark.parametrize("in_sessions", ["sessions"], indirect=True)
def test_without_other_runtimes_devices_refuse_the_nodes_that_the_host_does(device: str, in_sessions: bool) -> None:
    model, _ = sizes_that_a_run_finds()
    for place in ("cpu", device):
        with pytest.raises(UnsupportedOperatorError, match="Unique"):
            dagexec.compile(model, device=place, foreign=False)
