"""padded-rows: a mixture of experts, of which a router picks some for each row, against onnxruntime."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import dagexec
from dagexec.compiler.compilation import PASSES
from dagexec.compiler.passes.rewriting import run_passes
from dagexec.frontend.onnx import from_model_proto
from dagexec.ops.families.control.padded_rows import PaddedRows

onnxruntime = pytest.importorskip("onnxruntime")

Array = npt.NDArray[Any]

WIDTH, HIDDEN, EXPERTS = 6, 40, 3

node = helper.make_node


@cache
def mixture(behind: str = "", bias: float = 0.0) -> onnx.ModelProto:
    """Two of three experts for each row; operator `behind` each of them; `bias` is what the first one is ahead."""
    random = np.random.default_rng(7)
    ahead = np.array([bias, 0, 0])
    arrays: dict[str, Array] = {
        "router": random.standard_normal((WIDTH, EXPERTS)), "ahead": ahead, "root": np.array(0.5**0.5),
        "one": np.array(1), "half": np.array(0.5), "zero": np.array(0),
    }  # fmt: skip
    nodes = [
        node("MatMul", ["x", "router"], ["scores"]), node("Add", ["scores", "ahead"], ["biased"]),
        node("Softmax", ["biased"], ["probabilities"], axis=-1),
        node("TopK", ["probabilities", "two"], ["weights", "picks"], axis=-1), node("Mul", ["x", "zero"], ["y0"]),
    ]  # fmt: skip
    for expert in range(EXPERTS):
        name = "{}" + str(expert)
        arrays[f"up{expert}"] = random.standard_normal((WIDTH, HIDDEN))
        arrays[f"down{expert}"] = random.standard_normal((HIDDEN, WIDTH))
        steps: Sequence[tuple[str, Sequence[str], str, dict[str, Any]]] = [
            ("Equal", ["picks", name.format("number")], "is", {}), ("NonZero", [name.format("is")], "places", {}),
            ("Transpose", [name.format("places")], "pairs", {"perm": [1, 0]}),
            ("GatherND", ["weights", name.format("pairs")], "weight", {}),
            ("Unsqueeze", [name.format("weight"), "last"], "factor", {}),
            ("Gather", [name.format("places"), "first"], "rows", {"axis": 0}),
            ("Gather", ["x", name.format("rows")], "taken", {"axis": 0}),
            ("MatMul", [name.format("taken"), name.format("up")], "wide", {}),
            ("Mul", [name.format("wide"), "root"], "a", {}), ("Erf", [name.format("a")], "b", {}),
            ("Add", [name.format("b"), "one"], "c", {}), ("Mul", [name.format("wide"), name.format("c")], "d", {}),
            ("Mul", [name.format("d"), "half"], "gelu", {}),
            ("MatMul", [name.format("gelu"), name.format("down")], "narrow", {}),
            ("Mul", [name.format("narrow"), name.format("factor")], "made", {}),
            *([(behind, [name.format("made")], "behind", {"axis": 0})] if behind else []),
            ("Unsqueeze", [name.format("rows"), "last"], "where", {}),
        ]  # fmt: skip
        nodes += [node(kind, read, [name.format(made)], **named) for kind, read, made, named in steps]
        put = [f"y{expert}", name.format("where"), name.format("behind" if behind else "made")]
        nodes.append(node("ScatterND", put, [f"y{expert + 1}"], reduction="add"))
    numbers = {f"number{expert}": np.array(expert) for expert in range(EXPERTS)}
    numbers |= {"two": np.array([2]), "last": np.array([1]), "first": np.array(0)}
    constants = [numpy_helper.from_array(np.asarray(value, np.float32), one) for one, value in arrays.items()]
    constants += [numpy_helper.from_array(np.asarray(value, np.int64), one) for one, value in numbers.items()]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["rows", WIDTH])
    y = helper.make_tensor_value_info(f"y{EXPERTS}", TensorProto.FLOAT, ["rows", WIDTH])
    graph = helper.make_graph(nodes, "mixture", [x], [y], constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


Y = f"y{EXPERTS}"


def kinds(model: onnx.ModelProto) -> list[str]:
    """The operator types after the passes."""
    return [one.type for one in run_passes(from_model_proto(model), PASSES).model.program.op]


def test_an_expert_is_one_operator_between_its_rows_and_where_these_go() -> None:
    found = kinds(mixture())
    assert found[-4 * EXPERTS :] == ["EQ", "NonZero", "PaddedRows", "ScatterND"] * EXPERTS


def test_what_mixes_rows_stays_outside() -> None:
    found = kinds(mixture("Softmax"))
    assert found.count("PaddedRows") == found.count("Softmax") - 1 == EXPERTS


@pytest.mark.parametrize("bias", [0.0, *(pytest.param(ahead, marks=pytest.mark.slow) for ahead in (50.0, -50.0))])
@pytest.mark.parametrize("behind", ["", "Softmax"])
def test_any_rows_are_what_onnxruntime_computes(behind: str, bias: float) -> None:
    model, random = mixture(behind, bias), np.random.default_rng(1)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    feeds = [random.standard_normal((count, WIDTH)).astype(np.float32) for count in (9, 9, 30, 1, 30, 17, 0, 64, 9)]
    with (
        dagexec.compile(model, net_type="simple") as executor,
        dagexec.compile(model, net_type="async_dag", num_workers=2) as side_by_side,
    ):
        for x in feeds:
            y = executor.run({"x": x})[Y]
            if len(x) or not behind:  # onnxruntime refuses a Softmax over no rows
                [expected] = session.run(None, {"x": x})
                np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5)
            np.testing.assert_array_equal(side_by_side.run({"x": x})[Y], y)
            np.testing.assert_array_equal(executor.run({"x": x})[Y], y)


@pytest.mark.slow
def test_bytes_do_not_depend_on_the_rows_that_were_there_before() -> None:
    random = np.random.default_rng(2)
    feeds = [random.standard_normal((count, WIDTH)).astype(np.float32) for count in (40, 3, 21, 40, 11)]
    with dagexec.compile(mixture(), net_type="simple") as executor:
        found = [executor.run({"x": x})[Y] for x in feeds]
    for x, y in zip(feeds, found, strict=True):
        with dagexec.compile(mixture(), net_type="simple") as executor:
            np.testing.assert_array_equal(executor.run({"x": x})[Y], y)


def test_a_body_is_prepared_for_few_numbers_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    prepared = PaddedRows._prepared

    def noted(self: PaddedRows, size: int, *others: Any) -> Any:
        sizes.append(size)
        return prepared(self, size, *others)

    monkeypatch.setattr(PaddedRows, "_prepared", noted)
    random = np.random.default_rng(3)
    feeds = [random.standard_normal((20, WIDTH)).astype(np.float32) for _ in range(40)]
    with dagexec.compile(mixture(), net_type="simple") as executor:
        for x in feeds:
            executor.run({"x": x})
    assert set(sizes) <= {1, 2, 4, 8, 16, 24}
    assert len(sizes) <= 6 * EXPERTS
