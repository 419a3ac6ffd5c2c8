"""Weights that are packed are in memory once: what a run gives, and what anybody reads, is the same."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

import dagexec
from dagexec.binding.io_binding import Array
from dagexec.core.constant import MIN_BYTES
from dagexec.core.tensor import Tensor
from dagexec.executor.executor import Executor
from dagexec.ops.engines.onednn import panel_product
from dagexec.ops.engines.onednn.panel_product import pack_panels
from tests.executor import decoders
from tests.free_threading import not_free_threaded
from tests.ops.onednn.engine import needs_onednn

pytestmark = needs_onednn

WIDTH, ROWS = 256, 3
_random = np.random.default_rng(0)
WEIGHTS = {name: _random.standard_normal((WIDTH, WIDTH), np.float32) for name in ("w", "v")}
BIAS = _random.standard_normal(WIDTH, np.float32)
X = _random.standard_normal((8, WIDTH), np.float32)
counts_at_once = not_free_threaded("what another thread lets go of counts until the thread that made it goes on")


@pytest.fixture
def path(tmp_path: Path) -> Callable[[int | str], str]:
    """A file of two fully connected layers with Relu between them, for so many rows, or any number."""

    def write(rows: int | str = ROWS) -> str:
        nodes = [
            helper.make_node("Gemm", ["x", "w", "b"], ["h"], transB=1),
            helper.make_node("Relu", ["h"], ["r"]),
            helper.make_node("Gemm", ["r", "v", "b"], ["y"], transB=1),
        ]
        values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [rows, WIDTH]) for name in ("x", "y")]
        arrays = [numpy_helper.from_array(array, name) for name, array in {**WEIGHTS, "b": BIAS}.items()]
        graph = helper.make_graph(nodes, "layers", values[:1], values[1:], initializer=arrays)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
        (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
        return str(tmp_path / "m.onnx")

    return write


def in_memory(executor: Executor) -> set[str]:
    """The weights whose plain values are in memory."""
    workspace = executor._replicas.parameters
    return {name for name in WEIGHTS if workspace.get_blob(name).get(Tensor).current_array() is not None}


def expected(x: Array) -> Array:
    hidden = np.maximum(x.astype(np.float64) @ WEIGHTS["w"].T + BIAS, 0)
    return np.asarray(hidden @ WEIGHTS["v"].T + BIAS)


def check(y: Array, x: Array) -> None:
    np.testing.assert_allclose(y, expected(x), rtol=1e-4, atol=1e-2)


def test_weights_go_at_the_first_run_and_are_there_for_who_reads_them(path: Callable[..., str]) -> None:
    with dagexec.compile(path()) as executor:
        assert in_memory(executor) == {"w", "v"}
        first = executor.run(X[:ROWS])["y"]
        check(first, X[:ROWS])
        assert not in_memory(executor)
        assert executor.run(X[:ROWS])["y"].tobytes() == first.tobytes()
        assert executor.run(X[:ROWS], out={"y": np.empty_like(first)})["y"].tobytes() == first.tobytes()
        assert not in_memory(executor)
        for name, array in WEIGHTS.items():
            assert executor.model.parameters[name].tobytes() == array.tobytes()
        assert executor.run(X[:ROWS], outputs=["w", "y"])["w"].tobytes() == WEIGHTS["w"].tobytes()


def test_weights_go_one_by_one_while_a_net_is_prepared(
    path: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []

    def pack(weights: Array, lanes: int, packed: Array) -> None:
        found.append(len(in_memory(executor)))
        pack_panels(weights, lanes, packed)

    monkeypatch.setattr(panel_product, "pack_panels", pack)
    with dagexec.compile(path()) as executor:
        check(executor.run(X[:ROWS])["y"], X[:ROWS])
    assert found == list(range(len(found), 0, -1))  # layers whose weights are not in panels come first, if any


def test_other_shapes_go_by_the_packed_weights(path: Callable[..., str]) -> None:
    with dagexec.compile(path("n")) as executor:
        lone = executor.run(X[:1])["y"]
        assert not in_memory(executor)
        for count in (8, 2, 1):
            found = executor.run(X[:count])["y"]
            check(found, X[:count])
            assert found[0].tobytes() == lone[0].tobytes()
            assert not in_memory(executor)


def test_a_callers_own_arrays_stay_where_they_are(path: Callable[..., str]) -> None:
    model = dagexec.load_model(path())
    with dagexec.compile(model) as executor:
        executor.run(X[:ROWS])
        assert in_memory(executor) == {"w", "v"}
        assert np.shares_memory(executor.model.parameters["w"], model.parameters["w"])


def test_weights_of_convolutions_go_and_come_back_as_they_were(tmp_path: Path) -> None:
    filters = {"w": (512, 512, 1, 1), "v": (512, 64, 2, 2)}
    arrays = {name: _random.standard_normal(shape, np.float32) for name, shape in filters.items()}
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["h"]),
        helper.make_node("ConvTranspose", ["h", "v"], ["y"], strides=[2, 2]),
    ]
    shapes = {"x": [1, 512, 6, 6], "y": [1, 64, 12, 12]}
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in shapes.items()]
    weights = [numpy_helper.from_array(array, name) for name, array in arrays.items()]
    graph = helper.make_graph(nodes, "convolutions", values[:1], values[1:], initializer=weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    x = _random.standard_normal(shapes["x"], np.float32)
    with dagexec.compile(str(tmp_path / "m.onnx")) as executor:
        parameters = executor._replicas.parameters
        tensors = [parameters.get_blob(name).get(Tensor) for name in executor.model.parameters]
        large = [tensor for tensor in tensors if tensor.nbytes > MIN_BYTES]
        before = [tensor.array.tobytes() for tensor in large]
        first = executor.run({"x": x})["y"]
        assert len(large) == 2
        assert all(tensor.is_elsewhere for tensor in large)
        assert [tensor.array.tobytes() for tensor in large] == before
        assert executor.run({"x": x})["y"].tobytes() == first.tobytes()


def test_nan_is_kept_by_layers_whose_weights_have_gone(path: Callable[..., str]) -> None:
    x = X[:ROWS].copy()
    x[1, 5] = np.nan
    with dagexec.compile(path()) as executor:
        clean = executor.run(X[:ROWS])["y"]
        found = executor.run(x)["y"]
        assert np.isnan(found[1]).all()
        assert found[[0, 2]].tobytes() == clean[[0, 2]].tobytes()


@counts_at_once
def test_replicas_and_threads_share_weights_that_come_and_go(path: Callable[..., str]) -> None:
    with dagexec.compile(path(), replicas=3, num_workers=2) as executor, ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda _: executor.run(X[:ROWS])["y"].tobytes(), range(40)))
        executor.warm_up()
    assert len(set(found)) == 1
    assert not in_memory(executor)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_child_prepares_with_weights_that_went_in_the_parent(path: Callable[..., str]) -> None:
    with dagexec.compile(path()) as executor:
        first = executor.run(X[:ROWS])["y"].tobytes()
        child = os.fork()
        if child == 0:
            try:
                executor.reopen()
                os._exit(0 if executor.run(X[:ROWS])["y"].tobytes() == first else 1)
            except BaseException:
                os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@counts_at_once
def test_sessions_and_the_nets_of_their_steps_keep_no_weights_beside_the_packed_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(decoders, "WIDTH", 256)
    monkeypatch.setattr(decoders, "ELEMENTS", 64)
    with dagexec.compile(decoders.decoder()) as executor:
        session = executor.session()
        for count in (12, 1, 1):
            session.run({"ids": np.ones((1, count), np.int64)})
        parameters = executor._replicas.parameters
        tensors = [parameters.get_blob(name).get(Tensor) for name in executor.model.parameters]
        packed = [tensor for tensor in tensors if tensor.constant is not None and tensor.constant.forms()]
        large = [tensor for tensor in packed if tensor.nbytes >= MIN_BYTES]
        assert len(large) == 2 * 6
        assert all(tensor.is_elsewhere for tensor in large)
        assert all(len(tensor.constant.forms()) == 1 for tensor in large if tensor.constant is not None)
