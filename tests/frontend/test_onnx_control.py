"""Control flow of ONNX models: random nests of If, Loop and Scan against onnxruntime; sequences and optionals."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, parser

import dagexec
from dagexec.errors import FeedError, OperatorError
from dagexec.frontend.onnx.model import from_model_proto

Array = npt.NDArray[Any]

NETS = [
    {"net_type": "simple", "optimize": False},
    {"net_type": "dag", "num_workers": 1, "optimize": True},
    {"net_type": "dag", "num_workers": 2, "optimize": False},
    {"net_type": "async_dag", "num_workers": 2, "optimize": True},
]
SIZE = 3


class Writer:
    """Writes a random graph on vectors of SIZE floats, with nests of control flow that read tensors around them."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self._names = 0

    def name(self) -> str:
        self._names += 1
        return f"t{self._names}"

    def vector(self, name: str) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, [SIZE])

    def pick(self, known: Sequence[str]) -> str:
        return known[int(self.random.integers(len(known)))]

    def nodes(self, known: list[str], depth: int) -> list[onnx.NodeProto]:
        """Nodes; what they compute is added to `known`."""
        made: list[onnx.NodeProto] = []
        for _ in range(int(self.random.integers(2, 5))):
            kinds = [self.plain] if depth == 0 else [self.plain, self.branches, self.loop, self.scan]
            found = kinds[int(self.random.integers(len(kinds)))](known, depth)
            made += found
        return made

    def plain(self, known: list[str], _depth: int) -> list[onnx.NodeProto]:
        result = self.name()
        kind = self.pick(["Add", "Sub", "Mul", "Tanh", "Identity"])
        inputs = [self.pick(known) for _ in range(1 if kind in ("Tanh", "Identity") else 2)]
        known.append(result)
        if kind == "Mul":  # keep values small
            return [helper.make_node("Mul", inputs, [f"{result}m"]), helper.make_node("Tanh", [f"{result}m"], [result])]
        return [helper.make_node(kind, inputs, [result])]

    def condition(self, known: list[str]) -> tuple[list[onnx.NodeProto], str]:
        """Nodes that compute a bool from the data."""
        total, result = self.name(), self.name()
        return [
            helper.make_node("ReduceSum", [self.pick(known)], [total], keepdims=0),
            helper.make_node("Less", [total, "limit"], [result]),
        ], result

    def graph(self, known: list[str], inputs: list[Any], outputs: int, first: list[str], depth: int) -> onnx.GraphProto:
        inner = list(known)
        inner += [value.name for value in inputs if value.type.tensor_type.elem_type == TensorProto.FLOAT]
        nodes = self.nodes(inner, depth)
        results = []
        for _ in range(outputs):
            result = self.name()
            nodes.append(helper.make_node("Identity", [self.pick(inner)], [result]))
            results.append(self.vector(result))
        head = [helper.make_tensor_value_info(name, TensorProto.BOOL, []) for name in first]
        return helper.make_graph(nodes, self.name(), inputs, [*head, *results])

    def branches(self, known: list[str], depth: int) -> list[onnx.NodeProto]:
        before, condition = self.condition(known)
        then, other = (self.graph(known, [], 1, [], depth - 1) for _ in range(2))
        known.append(self.name())
        return [*before, helper.make_node("If", [condition], [known[-1]], then_branch=then, else_branch=other)]

    def loop(self, known: list[str], depth: int) -> list[onnx.NodeProto]:
        number, going, value = self.name(), self.name(), self.name()
        inputs = [
            helper.make_tensor_value_info(number, TensorProto.INT64, []),
            helper.make_tensor_value_info(going, TensorProto.BOOL, []),
            self.vector(value),
        ]
        body = self.graph(known, inputs, 2, [], depth - 1)
        tests, condition = self.condition([body.output[0].name])
        body.node.extend(tests)
        results = list(body.output)
        del body.output[:]
        body.output.extend([helper.make_tensor_value_info(condition, TensorProto.BOOL, []), *results])
        last, rows, total = self.name(), self.name(), self.name()
        made = helper.make_node("Loop", [self.pick(["count", "none"]), "", self.pick(known)], [last, rows], body=body)
        if self.random.random() < 0.3:
            made.input[1] = "truth"
        known += [last, total]
        return [made, helper.make_node("ReduceSum", [rows, "zero"], [total], keepdims=0)]

    def scan(self, known: list[str], depth: int) -> list[onnx.NodeProto]:
        state, row = self.name(), self.name()
        body = self.graph(known, [self.vector(state), self.vector(row)], 2, [], depth - 1)
        last, rows, total = self.name(), self.name(), self.name()
        flags = {
            key: [int(self.random.integers(2))]
            for key in ("scan_input_axes", "scan_input_directions", "scan_output_axes", "scan_output_directions")
        }
        axis = "one" if flags["scan_output_axes"][0] else "zero"
        inputs = [self.pick(known), "square"]
        known += [last, total]
        return [
            helper.make_node("Scan", inputs, [last, rows], body=body, num_scan_inputs=1, **flags),
            helper.make_node("ReduceSum", [rows, axis], [total], keepdims=0),
        ]

    def model(self) -> onnx.ModelProto:
        constants = {
            "limit": np.float32(0.5), "count": np.int64(4), "none": np.int64(0), "zero": np.int64([0]),
            "one": np.int64([1]), "truth": np.bool_(True),
            "square": self.random.standard_normal((SIZE, SIZE)).astype(np.float32),
        }  # fmt: skip
        known = ["x", "w"]
        nodes: list[onnx.NodeProto] = []
        while not any(node.attribute for node in nodes if node.op_type in ("If", "Loop", "Scan")):
            nodes += self.nodes(known, 2)
        tensors = [onnx.numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()]
        tensors.append(onnx.numpy_helper.from_array(np.float32([0.5, -1, 2]), "w"))
        outputs = [self.vector(name) for name in known[-3:]]
        graph = helper.make_graph(nodes, "random", [self.vector("x")], outputs, tensors)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def reference(model: onnx.ModelProto, feeds: dict[str, Any]) -> list[Any]:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    return list(onnxruntime.InferenceSession(model.SerializeToString(), options).run(None, feeds))


def check_random(seed: int, settings: Sequence[dict[str, Any]]) -> None:
    """Nets give what onnxruntime gives, for several inputs one after another."""
    model = Writer(seed).model()
    feeds = [{"x": np.random.default_rng(seed + k).standard_normal(SIZE).astype(np.float32)} for k in range(3)]
    expected = [reference(model, feed) for feed in feeds]
    for options in settings:
        with dagexec.compile(model, **options) as executor:
            for feed, values in zip(feeds, expected, strict=True):
                found = executor.run(feed)
                for name, value in zip(executor.outputs, values, strict=True):
                    np.testing.assert_allclose(found[name], value, 1e-4, 1e-5, err_msg=f"{seed} {options} {name}")


@pytest.mark.parametrize("seed", range(len(NETS)))
def test_a_random_nest_agrees_with_onnxruntime(seed: int) -> None:
    check_random(seed, [NETS[seed]])


@pytest.mark.slow
@pytest.mark.parametrize("first", range(100, 150, 10))
def test_many_random_nests_agree_with_onnxruntime(first: int) -> None:
    for seed in range(first, first + 10):
        check_random(seed, NETS)


def compiled(text: str, **options: Any) -> dagexec.Executor:
    head = '<ir_version: 8, opset_import: ["" : 18]>\n'
    return dagexec.compile(parser.parse_model(head + text), optimize=False, **options)


def test_sequences_are_fed_and_returned_as_lists() -> None:
    text = """
    g (seq(float[a, b]) s, float[a, b] x) => (seq(float[a, b]) t, int64 n) {
        t = SequenceInsert (s, x)
        n = SequenceLength (t)
    }"""
    a, b, c = np.ones((1, 2), "f4"), np.zeros((3, 1), "f4"), np.full((2, 2), 7, "f4")
    with compiled(text, replicas=2) as executor:
        for _ in range(2):
            found = executor.run({"s": [a, b], "x": c})
            assert [one.tolist() for one in found["t"]] == [a.tolist(), b.tolist(), c.tolist()]
            assert found["n"] == 3
        found["t"][0][...] = 5  # the caller's own
        assert executor.run({"s": [], "x": c})["t"][0].tolist() == c.tolist()
        with pytest.raises(FeedError, match=r"input 's' must be a list of arrays, found ndarray"):
            executor.run({"s": a, "x": c})
        with pytest.raises(FeedError, match=r"input 's\[1\]' must be float32, found int64"):
            executor.run({"s": [a, b.astype(np.int64)], "x": c})


def test_a_loop_carries_sequences() -> None:
    text = """
    g (int64 n, float[k] x) => (seq(float[a]) s, float[b] joined) {
        first = SequenceConstruct (x)
        s = Loop (n, , first) <body = b (int64 i, bool c, seq(float[a]) t) => (bool d, seq(float[a]) u) {
            zero = Constant <value_int = 0> ()
            old = SequenceAt (t, zero)
            longer = Concat <axis = 0> (old, x)
            u = SequenceInsert (t, longer, zero)
            d = Identity (c)
        }>
        joined = ConcatFromSequence <axis = 0> (s)
    }"""
    with compiled(text) as executor:
        for count in (0, 2):
            found = executor.run({"n": np.int64(count), "x": np.float32([1, 2])})
            assert [len(one) for one in found["s"]] == [2 * (k + 1) for k in reversed(range(count + 1))]
            assert len(found["joined"]) == sum(map(len, found["s"]))


def test_replicas_run_loops_side_by_side() -> None:
    text = """
    g (int64 n, float[2] x) => (float[2] y) <float[2] one = {1, 1}> {
        y = Loop (n, , x) <body = b (int64 i, bool c, float[2] v) => (bool d, float[2] w) {
            w = Add (v, one)
            d = Identity (c)
        }>
    }"""
    with compiled(text, replicas=3, num_workers=3) as executor, ThreadPoolExecutor(3) as callers:
        feeds = [{"n": np.int64(20 * k), "x": np.full(2, k, np.float32)} for k in range(12)]
        for k, found in enumerate(callers.map(executor.run, feeds)):
            assert found["y"].tolist() == [21 * k] * 2


def test_an_optional_input_may_be_none_or_left_out() -> None:
    text = """
    g (optional(float[n]) o) => (float[m] y) {
        has = OptionalHasElement (o)
        y = If (has) <
            then_branch = some () => (float[k] r) { r = OptionalGetElement (o) },
            else_branch = no () => (float[k] r) { r = Constant <value_floats = [-1.0]> () }
        >
    }"""
    with compiled(text) as executor:
        assert executor.run({"o": np.float32([1, 2])})["y"].tolist() == [1, 2]
        assert executor.run({"o": None})["y"].tolist() == [-1]
        assert executor.run({})["y"].tolist() == [-1]


def test_an_empty_optional_is_returned_as_none() -> None:
    text = """
    g (float[n] x, bool c) => (optional(float[n]) o) {
        o = If (c) <
            then_branch = some () => (optional(float[n]) r) { r = Optional (x) },
            else_branch = no () => (optional(float[n]) r) { r = Optional <type = float[n]> () }
        >
    }"""
    with compiled(text) as executor:
        assert executor.run({"x": np.float32([3]), "c": np.bool_(True)})["o"].tolist() == [3]
        assert executor.run({"x": np.float32([3]), "c": np.bool_(False)})["o"] is None


def test_a_known_condition_leaves_only_its_branch() -> None:
    text = """
    g (float[n] x) => (float[n] y) <bool c = {1}> {
        y = If (c) <
            then_branch = a () => (float[n] r) { r = Relu (x) },
            else_branch = b () => (float[n] r) { r = NoSuchThing (x) }
        >
    }"""
    model = parser.parse_model('<ir_version: 8, opset_import: ["" : 18]>\n' + text)
    assert [operator.type for operator in from_model_proto(model).net.op] == ["Relu", "Copy"]


def test_constants_of_a_body_are_parameters() -> None:
    text = """
    g (float[2] x, int64 n) => (float[2] y) {
        y = Loop (n, , x) <body = b (int64 i, bool c, float[2] v) => (bool d, float[2] w) {
            one = Constant <value_floats = [1.0, 2.0]> ()
            w = Add (v, one)
            d = Identity (c)
        }>
    }"""
    with compiled(text) as executor:
        assert list(executor.model.parameters) == ["one"]
        assert executor.run({"x": np.float32([0, 0]), "n": np.int64(3)})["y"].tolist() == [3, 6]


def test_what_a_sequence_lacks_is_an_error_that_names_it() -> None:
    text = """
    g (seq(float[n]) s, int64 i) => (float[n] x) {
        x = SequenceAt (s, i)
    }"""
    with compiled(text) as executor, pytest.raises(OperatorError, match="there is no array 2; the sequence has 1"):
        executor.run({"s": [np.ones(1, "f4")], "i": np.int64(2)})
