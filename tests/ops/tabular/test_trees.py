"""Ensembles of trees give what onnxruntime gives, by machine code and by NumPy; broken ones are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

import dagexec
from dagexec.devices.sim import simulated
from dagexec.errors import DagexecError, ModelFormatError, ShapeError
from dagexec.ops.families.tabular.forest import Branches, Leaves, grown
from tests.ops.tabular.drawn import MODES, Attributes, random_rows, random_trees, weights
from tests.ops.tabular.models import agrees, model_of, same

TRANSFORMS = ["NONE", "LOGISTIC", "SOFTMAX", "SOFTMAX_ZERO"]
DTYPES = pytest.mark.parametrize("dtype", ["f", *(pytest.param(one, marks=pytest.mark.slow) for one in "dqi")])
ENGINES = pytest.mark.parametrize("optimize", [True, False], ids=["machine code", "NumPy"])


@ENGINES
@pytest.mark.parametrize("seed", range(12))
def test_regressors_agree_with_onnxruntime(seed: int, optimize: bool) -> None:
    random = np.random.default_rng(seed)
    trees, targets, aggregate = int(random.integers(1, 22)), (1, 2, 9, 20)[seed % 4], ("SUM", "AVERAGE", "MIN", "MAX")
    nodes, leaves = random_trees(random, trees, 5, seed % 6, missing=seed % 3 > 0)
    every = [list(range(targets))]
    own = [[leaf[0] % targets] for leaf in leaves]
    given = weights(random, "target", leaves, own if seed % 2 and targets > 1 else every, positive=False)
    base = (
        {"base_values": random.standard_normal(targets).tolist()}
        if given["target_ids"] != own and seed % 2 == 0
        else {}
    )
    x = random_rows(random, int(random.integers(1, 40)), 5, "fd"[seed % 5 == 4])
    model = model_of(
        "TreeEnsembleRegressor", x, **nodes, **given, **base, n_targets=targets,
        aggregate_function=aggregate[seed // 3], post_transform=TRANSFORMS[seed % 3],
    )  # fmt: skip
    agrees(model, x, optimize=optimize)


@ENGINES
@DTYPES
@pytest.mark.parametrize("labels", [["low", "high"], [4, 2, 7], list(range(12))])
@pytest.mark.parametrize("number", range(len(TRANSFORMS)))
def test_classifiers_agree_with_onnxruntime(number: int, labels: list[Any], dtype: str, optimize: bool) -> None:
    random = np.random.default_rng(len(labels))
    nodes, leaves = random_trees(random, 11, 4, 4)
    key = "classlabels_strings" if isinstance(labels[0], str) else "classlabels_int64s"
    x = random_rows(random, 33, 4, dtype)
    chosen = [[0]] if len(labels) == 2 else [list(range(len(labels)))]
    given = weights(random, "class", leaves, chosen, positive=number % 2 == 0)
    base = {"base_values": [0.25] * (1 if len(labels) == 2 else len(labels))} if number > 1 else {}
    model = model_of(
        "TreeEnsembleClassifier", x, 2, **nodes, **given, **base, **{key: labels}, post_transform=TRANSFORMS[number]
    )
    agrees(model, x, optimize=optimize)


@ENGINES
def test_the_second_of_two_classes_may_have_the_weights(optimize: bool) -> None:
    random = np.random.default_rng(0)
    nodes, leaves = random_trees(random, 3, 4, 3)
    x = random_rows(random, 9, 4)
    for transform in TRANSFORMS[:3]:
        given = weights(random, "class", leaves, [[1]], positive=False)
        model = model_of(
            "TreeEnsembleClassifier", x, 2, **nodes, **given, classlabels_int64s=[3, 5], post_transform=transform
        )
        agrees(model, x, optimize=optimize)


@ENGINES
def test_a_class_that_no_leaf_names_is_not_chosen(optimize: bool) -> None:
    """Its score is 0, and those of the others are negative."""
    x = np.array([[0.0], [1.0]], np.float32)
    model = model_of("TreeEnsembleClassifier", x, 2, **stump(), classlabels_int64s=[5, 6, 7], class_treeids=[0, 0, 0],
                     class_nodeids=[1, 1, 2], class_ids=[0, 1, 1], class_weights=[-0.3, -0.7, -0.2])  # fmt: skip
    assert agrees(model, x, optimize=optimize)["y"].tolist() == [5, 6]


@ENGINES
def test_two_classes_with_weights_are_named_by_the_greater_as_the_standard_says(optimize: bool) -> None:
    """Onnxruntime gives the numbers 0 and 1, which are no labels here, by the sign of the second score."""
    x = np.array([[0.0], [1.0]], np.float32)
    model = model_of("TreeEnsembleClassifier", x, 2, **stump(), classlabels_int64s=[5, 7], class_treeids=[0] * 4,
                     class_nodeids=[1, 1, 2, 2], class_ids=[0, 1] * 2, class_weights=[0.2, 0.8, 0.9, 0.1])  # fmt: skip
    with dagexec.compile(model, optimize=optimize) as executor:
        found = executor.run({"x": x})
    assert found["y"].tolist() == [7, 5]
    np.testing.assert_allclose(found["scores"], [[0.2, 0.8], [0.9, 0.1]])


def stump() -> Attributes:
    """One question, x <= 0.5, and two leaves."""
    return {
        "nodes_treeids": [0, 0, 0], "nodes_nodeids": [0, 1, 2], "nodes_featureids": [0, 0, 0],
        "nodes_values": [0.5, 0.0, 0.0], "nodes_modes": ["BRANCH_LEQ", "LEAF", "LEAF"],
        "nodes_truenodeids": [1, 0, 0], "nodes_falsenodeids": [2, 0, 0],
    }  # fmt: skip


def indexed(x: Any, **attributes: Any) -> onnx.ModelProto:
    return model_of("TreeEnsemble", x, version=5, **attributes)


@ENGINES
@pytest.mark.parametrize("dtype", ["f", "d"])
def test_trees_by_index_agree_with_the_reference_sets_included(dtype: str, optimize: bool) -> None:
    """Node 0 asks for membership in {1, 3, 4}, node 1 for x <= 0, node 2 for membership in {2}."""
    x = np.array([[value, other] for value in (0, 1, 2, 3, 4, 5, 2.5) for other in (-1, 0.5)], dtype)
    tensor = lambda values: numpy_helper.from_array(np.array(values, dtype))  # noqa: E731
    model = indexed(
        x, nodes_featureids=[0, 1, 0], nodes_splits=tensor([0, 0, 0]), aggregate_function=1, post_transform=0,
        nodes_modes=numpy_helper.from_array(np.array([6, 0, 6], np.uint8)), nodes_truenodeids=[0, 1, 3],
        nodes_trueleafs=[1, 1, 1], nodes_falsenodeids=[1, 2, 2], nodes_falseleafs=[0, 0, 1], tree_roots=[0],
        leaf_targetids=[0, 1, 0, 1], leaf_weights=tensor([1.5, 2.5, 3.5, 4.5]), n_targets=2,
        membership_values=tensor([1, 3, 4, np.nan, 2, np.nan]),
    )  # fmt: skip
    with dagexec.compile(model, optimize=optimize) as executor:
        found = executor.run({"x": x})["y"]
    same(found, ReferenceEvaluator(model).run(None, {"x": x})[0])
    agrees(model, x, optimize=optimize)


@ENGINES
def test_thresholds_in_float64_tell_numbers_apart_that_float32_does_not(optimize: bool) -> None:
    nodes = stump()
    del nodes["nodes_values"]
    near = np.float64(1) + 2.0**-40
    nodes["nodes_values_as_tensor"] = helper.make_tensor("v", onnx.TensorProto.DOUBLE, [3], [1.0, 0.0, 0.0])
    x = np.array([[1.0], [near], [np.nan]])
    weight = helper.make_tensor("w", onnx.TensorProto.DOUBLE, [2], [1.0, 2.0])
    model = model_of("TreeEnsembleRegressor", x, **nodes, target_treeids=[0, 0], target_nodeids=[1, 2],
                     target_ids=[0, 0], target_weights_as_tensor=weight, n_targets=1)  # fmt: skip
    assert agrees(model, x, optimize=optimize)["y"].tolist() == [[1], [2], [2]]


def test_branches_that_end_in_one_node_are_allowed() -> None:
    """Exporters of LightGBM's categories make them so."""
    nodes = stump()
    nodes["nodes_truenodeids"] = nodes["nodes_falsenodeids"] = [1, 0, 0]
    x = np.array([[0.0], [1.0]], np.float32)
    model = model_of("TreeEnsembleRegressor", x, **nodes, target_treeids=[0, 0], target_nodeids=[1, 2],
                     target_ids=[0, 0], target_weights=[1.0, 2.0], n_targets=1)  # fmt: skip
    with dagexec.compile(model) as executor:
        assert executor.run({"x": x})["y"].tolist() == [[1], [1]]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"nodes_truenodeids": [9, 0, 0]}, "'nodes_truenodeids' names node 9 of tree 0"),
        ({"nodes_falsenodeids": [0, 0, 0]}, "in a circle"),
        ({"nodes_featureids": [-1, 0, 0]}, "'nodes_featureids' has -1"),
        ({"nodes_featureids": [1 << 40, 0, 0]}, "'nodes_featureids' has"),
        ({"nodes_values": [0.5]}, "'nodes_values' must have 3 values, found 1"),
        ({"nodes_modes": ["BRANCH_LEQ", "LEAF"]}, "'nodes_modes' must have 3 values"),
        ({"nodes_modes": ["BRANCH_UP", "LEAF", "LEAF"]}, "BRANCH_UP"),
        ({"nodes_nodeids": [0, 1, 1]}, "'nodes_nodeids' has a node twice"),
        ({"nodes_missing_value_tracks_true": [1]}, "'nodes_missing_value_tracks_true' must have 3"),
        ({"target_nodeids": [1, 7]}, "'target_nodeids' names node 7"),
        ({"target_ids": [0, 5]}, "'target_ids' has 5"),
        ({"target_ids": [0, -5]}, "'target_ids' has -5"),
        ({"target_ids": [0]}, "'target_ids' must have 2 values"),
        ({"target_weights": [float("nan"), 1.0]}, "not finite"),
        ({"n_targets": 1 << 40}, "'n_targets'"),
        ({"n_targets": -1}, "'n_targets'"),
        ({"base_values": [1.0, 2.0]}, "'base_values' must have 1 values"),
        ({"aggregate_function": "MEDIAN"}, "MEDIAN"),
        ({"post_transform": "TWICE"}, "TWICE"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_is_no_ensemble_is_refused_by_node_and_attribute(change: Attributes, words: str) -> None:
    given = stump() | {"target_treeids": [0, 0], "target_nodeids": [1, 2], "target_ids": [0, 0],
                       "target_weights": [1.0, 2.0], "n_targets": 1}  # fmt: skip
    x = np.zeros((2, 1), np.float32)
    with pytest.raises(ModelFormatError, match="the node") as raised:
        dagexec.compile(model_of("TreeEnsembleRegressor", x, **{**given, **change}))
    assert words in str(raised.value)


@pytest.mark.parametrize("columns", [0, 1, 2])
def test_rows_without_the_columns_of_trees_are_refused(columns: int) -> None:
    nodes = stump() | {"nodes_featureids": [2, 0, 0]}
    given = {"target_treeids": [0], "target_nodeids": [1], "target_ids": [0], "target_weights": [1.0], "n_targets": 1}
    model = model_of("TreeEnsembleRegressor", np.zeros((1, 3), np.float32), **nodes, **given)
    model.graph.input[0].type.tensor_type.shape.dim[1].Clear()
    with dagexec.compile(model) as executor, pytest.raises(ShapeError, match="3 columns"):
        executor.run({"x": np.zeros((2, columns), np.float32)})


@pytest.mark.parametrize("seed", range(60))
def test_random_damage_is_refused_or_runs(seed: int) -> None:
    """Whatever the attributes are, there is an error of dagexec or a result, soon."""
    random = np.random.default_rng(seed)
    nodes, leaves = random_trees(random, 3, 3, 3)
    given = nodes | weights(random, "target", leaves, [[0, 1]], positive=False) | {"n_targets": 2}
    for name in random.choice(sorted(given), 2):
        values = given[name]
        if isinstance(values, list):
            place = int(random.integers(len(values)))
            kind = random.integers(3)
            if kind == 0:
                del values[place]
            elif kind == 1:
                values[place] = random.choice(MODES) if isinstance(values[place], str) else type(values[place])(1 << 30)
            else:
                values[place] = values[int(random.integers(len(values)))]
    x = random_rows(random, 5, 3)
    try:
        with dagexec.compile(model_of("TreeEnsembleRegressor", x, **given)) as executor:
            assert executor.run({"x": x})["y"].shape == (5, 2)
    except DagexecError:
        pass


def test_a_chain_of_many_nodes_is_walked() -> None:
    """As deep as a file says; nothing here calls itself for a branch."""
    count = 3000
    branches = Branches(
        np.zeros(count, np.int64), np.arange(count, dtype=np.float32), np.zeros(count, np.int64), -1 - np.arange(count),
        np.append(np.arange(1, count), -1 - count), np.zeros(count, np.bool_), {}, np.array([0]),
    )  # fmt: skip
    places = np.arange(count + 1)
    forest = grown(branches, Leaves(places * 0, places, places * 0, places.astype(np.float32)), 1, "chain")
    assert forest.reached(np.array([[17.5], [1e9]], np.float32)).tolist() == [[18], [count]]


def test_trees_take_part_in_nets_of_devices() -> None:
    random = np.random.default_rng(3)
    nodes, leaves = random_trees(random, 9, 4, 4)
    given = weights(random, "target", leaves, [[0]], positive=False)
    x = random_rows(random, 20, 4)
    model = model_of("TreeEnsembleRegressor", x, **nodes, **given, n_targets=1)
    with simulated("sim:0"):
        agrees(model, x, device="sim:0")
