"""Initializers that are inputs too: constants for runs that do not feed them, and inputs for those that do."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

import dagexec
from dagexec.errors import ClosedError, FeedError, ModelFormatError
from dagexec.executor.executor import Executor

X, WEIGHT, BIAS, OTHER, OTHER_BIAS = (
    np.random.default_rng(0).standard_normal(shape).astype(np.float32) for shape in ((3, 4), (4, 5), 5, (4, 5), 5)
)


def floats(name: str, *sizes: int | str) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, list(sizes) or None)


def gemm(ir_version: int = 8, *, listed: bool = True, **stated: onnx.ValueInfoProto) -> onnx.ModelProto:
    """y = (x, reshaped to rows) weight + bias, where weight, bias and rows are initializers."""
    nodes = [
        helper.make_node("Reshape", ["x", "rows"], ["r"]),
        helper.make_node("Gemm", ["r", "weight", "bias"], ["y"]),
    ]
    initializers = [numpy_helper.from_array(array, name) for name, array in (("weight", WEIGHT), ("bias", BIAS))]
    initializers.append(numpy_helper.from_array(np.array([-1, 4]), "rows"))
    rows = helper.make_tensor_value_info("rows", TensorProto.INT64, [2])
    defaults = {"weight": floats("weight", 4, 5), "bias": floats("bias", 5), "rows": rows} if listed else {}
    graph = helper.make_graph(
        nodes, "gemm", [floats("x", 3, 4), *(defaults | stated).values()], [floats("y", "n", "m")], initializers
    )
    return helper.make_model(graph, ir_version=ir_version, opset_imports=[helper.make_opsetid("", 13)])


def expected(model: onnx.ModelProto, feeds: dict[str, Any]) -> np.ndarray[Any, Any]:
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    found: np.ndarray[Any, Any] = session.run(None, feeds)[0]
    return found


FEEDS = [
    {"x": X}, {"x": X, "weight": OTHER}, {"x": X, "bias": OTHER_BIAS}, {"x": X, "weight": OTHER, "bias": OTHER_BIAS},
    {"x": X}, {"x": X, "rows": np.array([3, -1])}, {"x": X, "weight": OTHER},
]  # fmt: skip


@pytest.mark.parametrize(
    "options",
    [{}, {"net_type": "simple"}, {"net_type": "async_dag"}, {"optimize": False}, {"replicas": 2, "net_type": "dag"}],
    ids=str,
)
def test_what_a_run_feeds_overrides_initializers_as_in_onnxruntime(options: dict[str, Any]) -> None:
    with dagexec.compile(gemm(), **options) as executor:
        for feeds in FEEDS:
            target = np.empty((3, 5), np.float32)
            found = executor.run(feeds, out={"y": target})["y"]
            assert found is target
            np.testing.assert_allclose(found, expected(gemm(), feeds), rtol=1e-5)
        assert (executor.statistics().completed, list(executor.inputs)) == (len(FEEDS), ["x"])


def test_tasks_and_threads_that_override_wait_for_one_net() -> None:
    with dagexec.compile(gemm()) as executor, ThreadPoolExecutor(4) as threads:

        async def all_of_them() -> list[dict[str, Any]]:
            return await asyncio.gather(*(executor.run_async(feeds) for feeds in FEEDS))

        first = threads.submit(asyncio.run, all_of_them())
        rows = [*zip(FEEDS, first.result(), strict=True), *zip(FEEDS, threads.map(executor.run, FEEDS), strict=True)]
        for feeds, found in rows:
            np.testing.assert_allclose(found["y"], expected(gemm(), feeds), rtol=1e-5)


def test_runs_that_override_nothing_run_the_net_of_constants() -> None:
    with dagexec.compile(gemm()) as listed, dagexec.compile(gemm(listed=False)) as plain:
        listed.run({"x": X, "weight": OTHER})
        assert listed.model.net == plain.model.net
        assert plain.overridable == {}


def test_before_ir_version_4_all_initializers_are_listed_and_only_chosen_ones_overridable() -> None:
    feeds = {"x": X, "weight": OTHER}
    with dagexec.compile(gemm(3)) as executor, pytest.raises(FeedError, match=r"unknown input.s. .'weight'"):
        executor.run(feeds)
    model = dagexec.load_model(gemm(3), overridable=["weight"])
    with dagexec.compile(model) as executor:
        assert {name: str(info) for name, info in executor.overridable.items()} == {"weight": "float32[4, 5]"}
        np.testing.assert_allclose(executor.run(feeds)["y"], expected(gemm(8), feeds), rtol=1e-5)
        with pytest.raises(FeedError, match="unknown input"):
            executor.run(feeds | {"bias": BIAS})


def test_an_initializer_that_is_no_input_may_be_chosen() -> None:
    model = dagexec.load_model(gemm(listed=False), overridable=["bias"])
    feeds = {"x": X, "bias": OTHER_BIAS}
    with dagexec.compile(model) as executor:
        np.testing.assert_allclose(executor.run(feeds)["y"], expected(gemm(), feeds), rtol=1e-5)
    assert dagexec.load_model(gemm(), overridable=[]).overridable is None
    with pytest.raises(FeedError, match=r"overridable: 'x' is not an initializer; the model has \['bias', 'rows'"):
        dagexec.load_model(gemm(), overridable=["x"])


def test_sizes_that_the_file_leaves_open_are_those_of_what_is_fed() -> None:
    model, feeds = gemm(bias=floats("bias", "m")), {"x": X, "bias": OTHER_BIAS[:1]}
    with dagexec.compile(model) as executor:
        np.testing.assert_allclose(executor.run(feeds)["y"], expected(model, feeds), rtol=1e-5)


@pytest.mark.parametrize(
    ("feeds", "message"),
    [
        ({"x": X, "weight": OTHER[:2]}, r"input 'weight' must have shape \(4, 5\), found \(2, 5\)"),
        ({"x": X, "weight": OTHER.astype(np.float64)}, "input 'weight' must be float32, found float64"),
        ({"weight": OTHER}, r"missing input.s. \['x'\]"),
        ({"x": X, "weight": OTHER, "what": X}, r"unknown input.s. \['what'\]"),
    ],
)
def test_wrong_feeds_beside_an_overridden_initializer_are_refused(feeds: dict[str, Any], message: str) -> None:
    with dagexec.compile(gemm()) as executor, pytest.raises(FeedError, match=message):
        executor.run(feeds)


@pytest.mark.parametrize("stated", [floats("weight", 4, 4), floats("weight", 20), helper.make_tensor_value_info(
    "weight", TensorProto.DOUBLE, [4, 5])], ids=["size", "axes", "type"])  # fmt: skip
def test_an_initializer_that_contradicts_its_input_is_refused(stated: onnx.ValueInfoProto) -> None:
    with pytest.raises(ModelFormatError, match=r"'weight' is stated to be .*, and its initializer is float32\[4, 5\]"):
        dagexec.load_model(gemm(weight=stated))


def test_a_model_with_other_operators_or_parameters_takes_no_others() -> None:
    """What would be compiled for them is the file's."""
    model = dagexec.load_model(gemm())
    other = replace(model, parameters={**model.parameters, "weight": OTHER})
    with dagexec.compile(other) as executor:
        assert executor.overridable == {}


def test_after_close_nothing_is_compiled_for_runs_that_override() -> None:
    executor = dagexec.compile(gemm())
    executor.run({"x": X, "weight": OTHER})
    executor.close()
    for feeds in ({"x": X, "weight": OTHER}, {"x": X, "bias": BIAS}):
        with pytest.raises(ClosedError):
            executor.run(feeds)


async def test_executors_end_however_they_are_ended() -> None:
    first, second = await dagexec.compile_async(gemm()), dagexec.compile(gemm())
    async with first:
        await first.run_async({"x": X, "weight": OTHER})
    await second.run_async({"x": X, "weight": OTHER})
    assert await second.drain_async(60)
    third = dagexec.compile(gemm())
    third.warm_up({"x": X, "weight": OTHER})
    assert third.drain(60)


@pytest.mark.slow
def test_draining_gives_all_nets_one_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    now, given = [0.0], []

    def drained(executor: Executor, timeout: float | None = None) -> bool:
        given.append(timeout)
        now[0] += 4
        return True

    with dagexec.compile(gemm()) as executor:
        for name, value in (("weight", OTHER), ("bias", BIAS)):
            executor.run({"x": X, name: value})
        for wrong in (-1, float("nan")):
            with pytest.raises(ValueError, match="timeout"):
                executor.drain(wrong)
        executor.run({"x": X})  # it is open still
        with monkeypatch.context() as patch:
            patch.setattr(Executor, "drain", drained)
            patch.setattr(executor, "_now", lambda: now[0])
            assert executor.drain(10)
        assert given == [10, 6, 2]
        with pytest.raises(ClosedError):
            executor.run({"x": X})


def loop_model(fed: bool) -> onnx.ModelProto:
    """a * k * 'outside', n times, where k is an input of the body with an initializer."""
    values = [
        helper.make_tensor_value_info(*row) for row in (("i", TensorProto.INT64, []), ("c", TensorProto.BOOL, []))
    ]
    nodes = [
        helper.make_node("Identity", ["c"], ["c2"]), helper.make_node("Mul", ["a", "k"], ["b"]),
        helper.make_node("Mul", ["b", "outside"], ["a2"]),
    ]  # fmt: skip
    results = [helper.make_tensor_value_info("c2", TensorProto.BOOL, []), floats("a2")]
    if fed:
        nodes.append(helper.make_node("Identity", ["k"], ["k2"]))
        results.append(floats("k2"))
    two = numpy_helper.from_array(np.float32(2), "k")
    body = helper.make_graph(nodes, "body", [*values, floats("a"), floats("k")], results, [two])
    given = [("n", np.int64(2)), ("outside", np.float32(3)), ("five", np.float32(5))]
    inputs, outputs = (["n", "", "x", "five"], ["y", "z"]) if fed else (["n", "", "x"], ["y"])
    graph = helper.make_graph(
        [helper.make_node("Loop", inputs, outputs, body=body)], "g",
        [floats("x", 3, 4), helper.make_tensor_value_info("outside", TensorProto.FLOAT, [])],
        [floats("y")], [numpy_helper.from_array(array, name) for name, array in given],
    )  # fmt: skip
    return helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", 16)])


def test_an_input_of_a_body_that_the_node_does_not_feed_has_its_default() -> None:
    model, overriding = loop_model(fed=False), {"x": X, "outside": np.array(7, np.float32)}
    with dagexec.compile(model) as executor:
        np.testing.assert_allclose(executor.run({"x": X})["y"], expected(model, {"x": X}), rtol=1e-6)
        np.testing.assert_allclose(executor.run(overriding)["y"], expected(model, overriding), rtol=1e-6)


def test_an_input_of_a_body_that_the_node_feeds_has_what_it_feeds() -> None:
    """onnxruntime 1.31 refuses such a file; the standard calls the initializer a default."""
    with dagexec.compile(loop_model(fed=True)) as executor:
        np.testing.assert_allclose(executor.run({"x": X})["y"], X * (5 * 3) ** 2, rtol=1e-6)
