"""The benchmark of exporters' models keeps what it made, says where results differ, and writes its page."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper


@pytest.fixture(autouse=True)
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "benchmarks")


@pytest.fixture
def child() -> ModuleType:
    """What compares."""
    return import_module("onnx_model_child")


def absolute(file: Path) -> list[dict[str, np.ndarray[Any, Any]]]:
    """A recipe's function: the model has one operator, and two runs of it are tried."""
    types = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n"]) for name in "xy"]
    graph = helper.make_graph([helper.make_node("Abs", ["x"], ["y"])], "absolute", types[:1], types[1:])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), file)
    return [{"x": np.array(values, np.float32)} for values in ([-1.0, 2.0], [3.0])]


def test_a_made_model_is_found_with_its_feeds_and_tried(child: ModuleType, tmp_path: Path) -> None:
    recipe = import_module("model_files.recipe")
    recipe.Recipe("layers/absolute", absolute).make(tmp_path)
    assert recipe.stored_names(tmp_path) == ["layers/absolute"]
    assert [feeds["x"].tolist() for feeds in recipe.stored_feeds(tmp_path, "layers/absolute")] == [[-1, 2], [3]]
    row = child.tried(tmp_path, "layers/absolute", threads=1, seconds=0.0)
    assert (row["verdict"], row["operators"], row["adapter"]) == ("equal", 1, 0)


def test_a_recipe_that_fails_leaves_nothing_that_is_found(tmp_path: Path) -> None:
    recipe = import_module("model_files.recipe")

    def fail(file: Path) -> None:
        file.write_bytes(b"half")
        raise ValueError("no such layer")

    with pytest.raises(ValueError, match="no such layer"):
        recipe.Recipe("layers/half", fail).make(tmp_path)
    assert recipe.stored_names(tmp_path) == []
    assert not list(tmp_path.rglob("*.onnx"))


@pytest.mark.parametrize(
    ("found", "expected", "coarse", "text"),
    [
        (np.float32([1, 2]), np.float32([1, 2.0001]), 0.0, None),
        (np.float32([1, 2]), np.float32([1, 2.001]), 0.0, "1 of 2 are off, by 0.001 where the largest is 2"),
        (np.float32([1, 2]), np.float32([1, 2.001]), 0.001, None),
        (np.float32([np.nan, np.inf]), np.float32([np.nan, np.inf]), 0.0, None),
        (np.float32([np.nan]), np.float32([1]), 0.0, "1 of 1 are off, by nan where the largest is 1"),
        (np.float32([1]), np.float64([1]), 0.0, "float32[1], expected float64[1]"),
        (np.zeros((2, 0), np.float32), np.zeros((0, 2), np.float32), 0.0, "float32[2, 0], expected float32[0, 2]"),
        (np.array(["a", "b"], object), np.array(["a", "c"], object), 0.0, "1 of 2 differ"),
        (np.array([b"a", "\u00e9".encode()], object), np.array(["a", "\u00e9"], object), 0.0, None),
        ([{"a": 1.0}], [{"a": 2.0}], 0.0, "1 of 1 are off, by 1 where the largest is 2"),
        ([], [{"a": 2.0}], 0.0, "0 elements, expected 1"),
    ],
)
def test_what_differs_is_said(child: ModuleType, found: Any, expected: Any, coarse: float, text: str | None) -> None:
    assert child.difference(found, expected, coarse) == text


def test_the_page_counts_what_is_equal_native_and_refused() -> None:
    row = {"verdict": "equal", "operators": 9, "adapter": 0, "load_ms": {"dagexec": 6.0, "onnxruntime": 3.0}}
    timed = row | {"ms": {"dagexec": 1.0, "onnxruntime": 2.0}, "ratios": {"onnxruntime": 0.5}}
    rows = {
        "vision/a": timed,
        "vision/b": row | {"adapter": 3, "adapter_time": 0.25},
        "vision/c": row | {"verdict": "unstable", "detail": "1 of 2 are off"},
        "scikit/c": {"verdict": "refused", "detail": "1 node(s) cannot be run:\n  Fancy"},
    }
    environment = {"processor": "P", "cores": 2, "python": "3.11", "numpy": "2"}
    page = import_module("onnx_model_page").page({"AVX2": {"environment": environment, "rows": {"1": rows}}})
    assert "| vision | 3 | 2 | 1 | 2 | 0 | 0 | 2.00 | 0.50 |  |" in page
    assert "| all | 4 | 2 | 1 | 2 | 0 | 1 | 2.00 | 0.50 |  |" in page
    assert "| vision/c | unstable | 1 of 2 are off |" in page
    assert "| scikit/c | refused | 1 node(s) cannot be run: Fancy |" in page
    assert "| vision/b | 9 | 3 | 25% | 6.0 | 2.00 |  |  |  |" in page


def test_a_result_is_unstable_where_that_of_a_near_input_is_as_far(child: ModuleType, tmp_path: Path) -> None:
    """Y is X rounded to 0 or 1: for 0.5 a few last places decide, for 0.25 nothing does."""
    types = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in "xy"]
    graph = helper.make_graph([helper.make_node("Round", ["x"], ["y"])], "rounded", types[:1], types[1:])
    file = tmp_path / "rounded.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), file)
    session, one, zero = child._session(file, 1), np.float32([1]), np.float32([0])
    assert child._moves_as_far(session, {"x": np.float32([0.5])}, "y", one, zero)
    assert not child._moves_as_far(session, {"x": np.float32([0.25])}, "y", one, zero)
    assert not child._moves_as_far(session, {"x": np.float32([0.5])}, "y", 3 * one, zero)


def test_rows_of_the_same_commit_are_not_measured_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    benchmark = import_module("onnx_models")
    asked: list[tuple[int, list[str]]] = []

    def answers(
        _folder: Path, names: list[str], threads: int, *_seconds: float
    ) -> Iterator[tuple[str, dict[str, str]]]:
        asked.append((threads, list(names)))
        yield from ((name, {"verdict": "equal"}) for name in names)

    monkeypatch.setattr(benchmark, "answers", answers)
    monkeypatch.setattr(benchmark, "source_commit", lambda: "new")
    monkeypatch.setattr(benchmark, "RESULTS", tmp_path / "rows.json")
    options = Namespace(folder=tmp_path, threads=[1, 2], seconds=60.0, again=False)
    reports: dict[str, Any] = {}
    benchmark.measure(options, ["a"], reports)
    benchmark.measure(options, ["a", "b"], reports)
    assert asked == [(1, ["a"]), (2, ["a"]), (1, ["b"]), (2, ["b"])]
    assert json.loads((tmp_path / "rows.json").read_text()) == reports
