"""OnnxSession: parts of ONNX models computed by onnxruntime, and by onnx.reference where that is not installed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import pytest
from onnx import TensorProto, helper

import dagexec
from dagexec import NetDef, Workspace, op
from dagexec.errors import ModelFormatError, OperatorError, ResourceError, ShapeError, UnsupportedOperatorError
from dagexec.foreign import onnx_runtime, opening
from dagexec.foreign.unsafe_nodes import check_for_onnxruntime
from dagexec.platform.lazy import LazyModule
from dagexec.scheduler.nets.simple import SimpleNet
from tests.forked import in_child
from tests.ops.running import workspace_of

Array = npt.NDArray[Any]
MATRICES = np.random.default_rng(0).standard_normal((4, 3, 3)).astype(np.float32)


@pytest.fixture(params=["onnxruntime", "onnx.reference"])
def runtime(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each of the runtimes in turn, with no session open."""
    monkeypatch.setattr(opening, "_opened", type(opening._opened)())
    monkeypatch.setattr(opening, "_latest", type(opening._latest)(maxlen=16))
    if request.param != "onnxruntime":
        monkeypatch.setattr(onnx_runtime, "onnxruntime", LazyModule("onnxruntime_is_not_installed"))
    return str(request.param)


def message(*nodes: onnx.NodeProto, inputs: str = "x", outputs: str = "y", opset: int = 21, **more: Any) -> bytes:
    """A message whose inputs and outputs have names only, separated by commas."""
    given, returned = ([onnx.ValueInfoProto(name=name) for name in text.split(",")] for text in (inputs, outputs))
    graph = helper.make_graph(list(nodes), "part", given, returned, **more)
    domains = {node.domain for node in nodes}
    opsets = [helper.make_opsetid(domain, {"": opset, "ai.onnx.ml": 3}.get(domain, 1)) for domain in sorted(domains)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()


def computed(content: bytes, *feeds: Any, outputs: int = 1, **arguments: Any) -> list[Array]:
    """The outputs of one operator, of which the second of two runs counts."""
    workspace, names = Workspace(), [f"x{index}" for index in range(len(feeds))]
    for name, value in zip(names, feeds, strict=True):
        workspace.feed_blob(name, value)
    results = [f"y{index}" for index in range(outputs)]
    definition = op("OnnxSession", names, results, name="part", model=content, **arguments)
    with SimpleNet(NetDef(name="net", op=[definition]), workspace) as net:
        net.run()
        for name, value in zip(names, feeds, strict=True):
            workspace.feed_blob(name, value)
        net.run()
        return [workspace.fetch_blob(name) for name in results]


DET = message(helper.make_node("Det", ["x"], ["y"]))


@pytest.mark.parametrize("inferred", [0, 1])
def test_both_runtimes_compute_what_numpy_does(runtime: str, inferred: int) -> None:
    [found] = computed(DET, MATRICES, **({"inferred": 1} if inferred else {}))
    np.testing.assert_allclose(found, np.linalg.det(MATRICES.astype(np.float64)), rtol=1e-4)
    assert {session.runtime for session in opening._latest} == {runtime}


@pytest.mark.usefixtures("tables_are_foreign")
def test_nets_of_every_kind_and_their_replicas_share_sessions(runtime: str) -> None:
    """One for each shape, and that of size 1 with which loading tries it."""
    binarizer = helper.make_node("Binarizer", ["x"], ["d"], domain="ai.onnx.ml", threshold=0.5)
    nodes = [binarizer, helper.make_node("Relu", ["d"], ["y"])]
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes, "net", [value("x", TensorProto.FLOAT, ["n", 3, 3])], [value("y", TensorProto.FLOAT, ["n", 3, 3])]
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("ai.onnx.ml", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    for net_type in ("simple", "dag", "async_dag"):
        with dagexec.compile(model, net_type=net_type, num_workers=2, replicas=2) as executor:
            for count in (4, 2, 4):
                found = executor.run({"x": MATRICES[:count]})["y"]
                np.testing.assert_array_equal(found, MATRICES[:count] > 0.5)
    assert len(opening._opened) == 3


def test_outputs_whose_sizes_depend_on_values_are_found_by_each_run(runtime: str) -> None:
    content = message(helper.make_node("Unique", ["x"], ["y"]))
    workspace = workspace_of({"x": np.array([3.0, 1, 3], np.float32)})
    operators = [op("OnnxSession", ["x"], ["y"], model=content), op("Relu", ["y"], ["z"])]
    with SimpleNet(NetDef(name="net", op=operators), workspace) as net:
        for values, expected in (([3, 1, 3], [1, 3]), ([-1, 2, 5], [0, 2, 5]), ([4, 4, 4], [4])):
            workspace.feed_blob("x", np.array(values, np.float32))
            net.run()
            assert workspace.fetch_blob("z").tolist() == expected


@pytest.mark.parametrize("inferred", [0, 1])
def test_strings_are_bytes_outside(runtime: str, inferred: int) -> None:
    content = message(helper.make_node("StringConcat", ["a", "b"], ["y"]), inputs="a,b")
    texts = [np.array(["ä".encode(), b""], object), np.array([b"b"], object)]
    [found] = computed(content, *texts, **({"inferred": 1} if inferred else {}))
    assert found.tolist() == ["äb".encode(), b"b"]


@pytest.mark.parametrize("name", ["bfloat16", "float16", "uint32", "bool", "float8e5m2", "int4", "complex64"])
@pytest.mark.parametrize("inferred", [0, 1])
def test_elements_of_every_kind_pass(runtime: str, name: str, inferred: int) -> None:
    meta = dagexec.core.dtypes.from_name(name)
    x = np.array([[1, 0, 1]]).astype(meta.numpy)
    content = message(helper.make_node("Transpose", ["x"], ["y"], perm=[1, 0]))
    [found] = computed(content, x, **({"inferred": 1} if inferred else {}))
    assert found.dtype == x.dtype
    assert found.tobytes() == x.tobytes()


def test_sequences_and_mappings_pass_from_one_session_to_the_next(runtime: str) -> None:
    split = message(helper.make_node("SplitToSequence", ["x"], ["s"], axis=0, keepdims=0), outputs="s")
    join = message(helper.make_node("ConcatFromSequence", ["s"], ["y"], axis=0), inputs="s")
    workspace = Workspace()
    workspace.create_blob("x")
    operators = [op("OnnxSession", ["x"], ["s"], model=split), op("OnnxSession", ["s"], ["y"], model=join)]
    with SimpleNet(NetDef(name="net", op=operators), workspace) as net:
        for count in (2, 3):
            x = np.arange(count * 2, dtype=np.float32).reshape(count, 2)
            workspace.feed_blob("x", x)
            net.run()
            assert workspace.fetch_blob("y").tolist() == x.reshape(-1).tolist()


def test_a_child_of_fork_runs_on(runtime: str) -> None:
    workspace = workspace_of({"x": MATRICES})
    with SimpleNet(NetDef(name="net", op=[op("OnnxSession", ["x"], ["y"], model=DET)]), workspace) as net:
        net.run()
        here = workspace.fetch_blob("y").tolist()

        def again() -> list[float]:
            net.run()
            found: list[float] = workspace.fetch_blob("y").tolist()
            return found

        assert in_child(again) == here


def external() -> bytes:
    tensor = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[1], data_location=TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value="/etc/passwd")
    return message(helper.make_node("Add", ["x", "w"], ["y"]), initializer=[tensor])


WRONG: dict[str, tuple[Callable[[], bytes], type[Exception], str]] = {
    "no message": (lambda: b"\xff\xff", ModelFormatError, "not an ONNX message"),
    "a file": (external, ModelFormatError, "tensor 'w' has external data"),
    "a file inside of a node": (
        lambda: message(
            helper.make_node("If", ["x"], ["y"], then_branch=onnx.ModelProto.FromString(external()).graph)
        ),
        ModelFormatError,
        "tensor 'w' has external data",
    ),
    "inputs of another number": (lambda: message(helper.make_node("Add", ["x", "z"], ["y"]), inputs="x,z"),
                                 ModelFormatError,
                                 "its message has 2 inputs, the operator 1"),
    "nobody's operator": (lambda: message(helper.make_node("Unknown", ["x"], ["y"], domain="com.example")),
                          OperatorError, "onnxruntime.*; onnx.reference.*"),
    "inputs that do not fit": (lambda: DET, OperatorError, "OnnxSession 'part'.*failed.*"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_named(runtime: str, case: str) -> None:
    make, error, text = WRONG[case]
    with pytest.raises(error, match=text) as caught:
        computed(make(), np.ones((2, 3), np.float32))
    assert "OnnxSession 'part'" in str(caught.value)


def test_types_that_inference_refuses_are_an_error_before_anything_runs(runtime: str) -> None:
    with pytest.raises(ShapeError, match=r"OnnxSession 'part'.*must have the same size"):
        computed(DET, np.ones((2, 3), np.float32), inferred=1)


def test_an_output_larger_than_memory_is_an_error() -> None:
    content = message(helper.make_node("ConstantOfShape", ["x"], ["y"]))
    with pytest.raises(OperatorError, match="ConstantOfShape"):
        computed(content, np.array([1 << 20, 1 << 20]))
    expand = message(helper.make_node("Upsample", ["x", "s"], ["y"], mode="nearest"), inputs="x,s", opset=9)
    scales = np.array([1e6, 1e6], np.float32)
    with pytest.raises((OperatorError, ResourceError)):
        computed(expand, np.ones((1000, 1000), np.float32), scales)


@pytest.fixture
def without_onnxruntime(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx_runtime, "onnxruntime", LazyModule("onnxruntime_is_not_installed"))


@pytest.mark.usefixtures("without_onnxruntime")
@pytest.mark.parametrize("inside", [False, True], ids=["node", "node of a body"])
def test_the_reference_allocates_nothing_that_memory_has_no_place_for(inside: bool) -> None:
    nodes = [helper.make_node("Expand", ["one", "x"], ["big"]), helper.make_node("ReduceMax", ["big"], ["y"])]
    one = onnx.numpy_helper.from_array(np.ones(1, np.int8), "one")
    if inside:
        branch = helper.make_graph(nodes, "branch", [], [onnx.ValueInfoProto(name="y")])
        condition = onnx.numpy_helper.from_array(np.array(True), "condition")
        choice = helper.make_node("If", ["condition"], ["y"], then_branch=branch, else_branch=branch)
        content = message(choice, initializer=[one, condition])
    else:
        content = message(*nodes, initializer=[one])
    assert computed(content, np.array([3, 4]))[0] == 1
    with pytest.raises(OperatorError, match=r"onnx.reference: Expand 'big' needs 1,099,511,627,776 bytes"):
        computed(content, np.array([1 << 20, 1 << 20]))


@pytest.mark.usefixtures("without_onnxruntime")
def test_the_reference_matches_no_pattern() -> None:
    """Python takes 2^n steps for this one and a text of n letters."""
    content = message(helper.make_node("RegexFullMatch", ["x"], ["y"], pattern="(a+)+b"))
    with pytest.raises(OperatorError, match="RegexFullMatch may take unbounded time there; onnxruntime's does not"):
        computed(content, np.array([b"a" * 40], object))


NGRAMS = {
    "counts that fall": ([4, 0], [0, 1, 2, 3, 4, 5, 6]),
    "counts behind the pool": ([0, 12], [0, 1, 2, 3, 4, 5, 6]),
    "part of an n-gram": ([0, 5], [0, 1, 2, 3, 4, 5, 6]),
    "too few indexes": ([0, 4], [0, 1, 2, 3, 4, 6]),
    "a negative index": ([0, 4], [0, 1, 2, 3, 4, 5, -1]),
    "an index too large": ([0, 4], [0, 1, 2, 3, 4, 5, 1 << 62]),
}


@pytest.mark.parametrize("case", NGRAMS)
def test_ngrams_that_onnxruntime_would_write_out_of_bounds_for_do_not_reach_it(case: str) -> None:
    """With too few indexes it ended the process."""

    def vectorizer(counts: list[int], indexes: list[int]) -> bytes:
        node = helper.make_node(
            "TfIdfVectorizer", ["x"], ["y"], ngram_counts=counts, ngram_indexes=indexes, min_gram_length=1,
            pool_int64s=[2, 3, 5, 4, 5, 6, 7, 8, 6, 7], max_gram_length=2, max_skip_count=5, mode="TF",
        )  # fmt: skip
        return message(node)

    tokens = np.array([[1, 1, 3, 3, 3, 7], [8, 6, 7, 5, 6, 8]], np.int32)
    [found] = computed(vectorizer([0, 4], list(range(7))), tokens)
    assert found.tolist() == [[0, 3, 0, 0, 0, 0, 0], [0, 0, 1, 0, 1, 1, 1]]
    with pytest.raises(UnsupportedOperatorError, match=r"TfIdfVectorizer 'y': .*ngram"):
        check_for_onnxruntime(onnx.ModelProto.FromString(vectorizer(*NGRAMS[case])))


def test_a_sequence_with_an_element_that_is_nothing_is_refused() -> None:
    """A node without the input that it must have, which only the reference implementation takes."""
    graph = helper.make_graph(
        [helper.make_node("SequenceConstruct", [""], ["s"])],
        "graph",
        [],
        [helper.make_tensor_sequence_value_info("s", TensorProto.FLOAT, None)],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)])
    with (
        dagexec.compile(model.SerializeToString()) as executor,
        pytest.raises(OperatorError, match="an element of the sequence 's' must be a tensor, found nothing"),
    ):
        executor.run({})
