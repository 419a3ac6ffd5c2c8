"""Weights that passes put into another form are in memory once while a file is compiled, and never lost."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

import dagexec
from dagexec.compiler.passes.owned_parameters import OwnedParameters, owned, successors
from dagexec.core import packed_copy
from dagexec.core.constant import Array, Constant
from dagexec.core.tensor import owner_of
from dagexec.frontend.onnx import external_data
from dagexec.platform.host_memory import unshared_bytes

LAYERS, WIDTH = 6, 192
_random = np.random.default_rng(0)
WEIGHTS = [_random.standard_normal((WIDTH, WIDTH), np.float32) / np.float32(14) for _ in range(LAYERS)]
X = _random.standard_normal((3, WIDTH), np.float32)
WEIGHT_BYTES = 4 * WIDTH * WIDTH


class Accounts:
    """The bytes of weights that are read or copied and still there, at most."""

    def __init__(self) -> None:
        self.most = 0
        self._live: dict[int, int] = {}

    def take(self, nbytes: int, what: str) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        found = unshared_bytes(nbytes, what)
        if nbytes == WEIGHT_BYTES:
            owner = owner_of(found)
            self._live[id(owner)] = nbytes
            weakref.finalize(owner, self._live.pop, id(owner))
            self.most = max(self.most, sum(self._live.values()))
        return found


@pytest.fixture
def accounts(monkeypatch: pytest.MonkeyPatch) -> Accounts:
    found = Accounts()
    monkeypatch.setattr(external_data, "unshared_bytes", found.take)
    monkeypatch.setattr(packed_copy, "weight_memory", found)
    return found


@pytest.fixture
def path(tmp_path: Path) -> str:
    """A file of products with matrices, which become fully connected layers with transposed ones."""
    names = ["x", *(f"h{layer}" for layer in range(LAYERS))]
    nodes = [helper.make_node("MatMul", [names[i], f"w{i}"], [names[i + 1]]) for i in range(LAYERS)]
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [3, WIDTH]) for name in (names[0], names[-1])]
    arrays = [numpy_helper.from_array(array, f"w{i}") for i, array in enumerate(WEIGHTS)]
    graph = helper.make_graph(nodes, "products", values[:1], values[1:], initializer=arrays)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    return str(tmp_path / "m.onnx")


def check(executor: dagexec.Executor) -> None:
    expected = X.astype(np.float64)
    for weights in WEIGHTS:
        expected = expected @ weights
    [found] = executor.run({"x": X}).values()
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_transposed_weights_take_the_place_of_those_in_the_file(path: str, accounts: Accounts) -> None:
    with dagexec.compile(path, without_passes=("batch-norm-folding",)) as executor:
        assert LAYERS * WEIGHT_BYTES < accounts.most <= (LAYERS + 2) * WEIGHT_BYTES
        check(executor)


def test_a_model_that_the_caller_has_keeps_its_weights(path: str) -> None:
    model = dagexec.load_model(path)
    with dagexec.compile(model) as executor:
        check(executor)
    assert all(np.array_equal(model.parameters[f"w{i}"], weights) for i, weights in enumerate(WEIGHTS))
    with dagexec.compile(model) as executor:
        check(executor)


@pytest.mark.parametrize("options", [{"tuning_seconds": 0.2}, {"dtype": "bfloat16"}, {"keep": ("w1",)}])
def test_weights_that_are_needed_again_stay(path: str, options: dict[str, object]) -> None:
    with dagexec.compile(path, **options) as executor:  # type: ignore[arg-type]
        if "dtype" not in options:
            check(executor)
        if "keep" in options:
            assert np.array_equal(executor.run({"x": X}, outputs=["w1"])["w1"], WEIGHTS[1])


def test_what_is_let_go_of_has_a_shape_in_all_models_and_no_memory() -> None:
    large, small = np.ones((64, 128), np.float32), np.arange(4)
    first = OwnedParameters({"large": large, "twin": large, "small": small})
    second = successors(first, {"large": large, "small": small})
    assert owned(second) is second
    assert first["twin"].strides == (0, 0)
    assert second["large"] is large
    third = successors(second, {})
    assert not third
    for model in (first, second):
        assert (model["large"].shape, model["large"].dtype, model["large"].strides) == ((64, 128), np.float32, (0, 0))
        assert model["small"] is small


def test_parameters_of_a_caller_stay() -> None:
    before = {"large": np.ones((64, 128), np.float32)}
    assert successors(before, {}) == {}
    assert before["large"].strides != (0, 0)
    assert owned(before) is None


def test_what_tuning_packed_is_gone_afterwards(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    packed: list[weakref.ref[object]] = []
    pack = Constant.packed

    def noted(constant: Constant, form: Hashable, nbytes: int, compute: Callable[[], Array]) -> Array:
        packed.append(weakref.ref(constant))
        return pack(constant, form, nbytes, compute)

    monkeypatch.setattr(Constant, "packed", noted)
    with dagexec.compile(path, tuning_seconds=0.2) as executor:
        left = [one for one in packed if one() is not None]
        check(executor)
    assert packed
    assert not left
