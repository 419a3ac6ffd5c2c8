"""Ensembles of decision trees: TreeEnsembleClassifier, TreeEnsembleRegressor and TreeEnsemble, by NumPy.

Machine code walks the same trees with engine ONEDNN (`dagexec.ops.engines.onednn.tabular`). A result depends on its row
alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from dagexec.core.arguments import Arguments
from dagexec.core.dtypes import FLOAT32, FLOAT64, INT32, INT64, STRING, TypeMeta
from dagexec.core.gradient import no_gradient
from dagexec.core.node import Node
from dagexec.core.onnx_name import OnnxName
from dagexec.core.operator import Operator, Step
from dagexec.core.registry import new_operator
from dagexec.core.rows import first_axis
from dagexec.core.schema import Cost, OperatorCall, TensorType
from dagexec.core.workspace import Workspace
from dagexec.errors import ModelFormatError
from dagexec.ops.families.tabular.attributes import DOMAIN, check_finite, numbers, onnx_name, texts
from dagexec.ops.families.tabular.forest import AVERAGE, MAX, MIN, SUM, Forest
from dagexec.ops.families.tabular.scores import (
    HELP,
    LOGISTIC,
    NONE,
    PROBIT,
    SOFTMAX,
    SOFTMAX_ZERO,
    Finish,
    ManyScores,
    OneScore,
    transform_of,
)
from dagexec.ops.families.tabular.tree_attributes import indexed_forest, numbered_forest
from dagexec.ops.kernels.tree_kernels import WalkedTrees, walked_trees
from dagexec.platform.cached import cached_property

Array = npt.NDArray[Any]

NUMBERS = (FLOAT32, FLOAT64, INT32, INT64)
"""Element types of what trees look at; integers are compared as float32, unless thresholds are float64."""

_BLOCK_ROWS = 64
_MOST_SPREAD = 16  # numbers of rows of weights for each weight that a model has
_FEW_WEIGHTS = 1 << 22


class Ensemble:
    """Trees, and how what their leaves give is put together; one for all operators that have the same.

    Attributes:
        forest: the trees.
        aggregate: SUM, AVERAGE, MIN or MAX.
        finish: what becomes of the sums.
    """

    def __init__(self, forest: Forest, aggregate: str, finish: Finish | OneScore | ManyScores) -> None:
        self.forest, self.aggregate, self.finish = forest, aggregate, finish
        leaves = forest.leaves
        order = np.argsort(leaves.leaf, kind="stable")
        self._target, self._weight = leaves.target[order], leaves.weight[order]
        self._starts = np.searchsorted(leaves.leaf[order], np.arange(leaves.count + 1))

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of thresholds and sums."""
        return self.forest.thresholds.dtype

    def put_together(self, reached: Array) -> tuple[Array, Array]:
        """For the leaves that rows reached [rows, trees], what weights come to, and which targets have any."""
        rows, targets = len(reached), self.forest.targets
        first = self._starts[reached].reshape(-1)
        counts = self._starts[reached + 1].reshape(-1) - first
        ends = np.cumsum(counts)
        entries = np.arange(ends[-1] if ends.size else 0) + np.repeat(first - (ends - counts), counts)
        row = np.repeat(np.repeat(np.arange(rows), reached.shape[1]), counts)
        at = row * targets + self._target[entries]
        weight = self._weight[entries].astype(self.dtype)
        start, join = {MIN: (np.inf, np.minimum), MAX: (-np.inf, np.maximum)}.get(self.aggregate, (0, np.add))
        found = np.full(rows * targets, start, self.dtype)
        join.at(found, at, weight)
        given = np.zeros(rows * targets, np.bool_)
        given[at] = True
        found[~given] = 0
        return found.reshape(rows, targets), given.reshape(rows, targets)

    @cached_property
    def adds_up(self) -> bool:
        """Results follow from sums in float32 alone, whichever leaves give nothing."""
        if (
            self.dtype != np.float32
            or self.aggregate not in (SUM, AVERAGE)
            or self.forest.leaves.weight.dtype != np.float32
        ):
            return False
        is_chosen = isinstance(self.finish, ManyScores) and not self.finish.finish.base.size
        return not is_chosen or bool(self.forest.always_given().all())

    @cached_property
    def walked(self) -> WalkedTrees | None:
        """For machine code, which adds weights up where it can, else finds places."""
        forest = self.forest
        weights, targets = self._weights() if self.adds_up else (None, None)
        if weights is None or targets is None:
            weights, targets = np.empty((forest.leaves.count, 0), np.float32), np.zeros(len(forest.roots), np.int64)
        nodes = forest.thresholds, forest.features, forest.children
        return walked_trees(
            nodes, forest.roots, forest.columns, negates=forest.negates, weights=weights, targets=targets,
            width=forest.targets,
        )  # fmt: skip

    def _weights(self) -> tuple[Array | None, Array | None]:
        """Weights of leaves and targets of trees as `walked_trees` takes them; None where rows would be too sparse."""
        leaves, targets = self.forest.leaves, self.forest.targets
        trees = len(self.forest.roots)
        pairs = np.unique(leaves.tree[leaves.leaf] * targets + leaves.target)
        own = np.bincount(pairs // targets, minlength=trees)
        narrow = trees == len(own) and bool((own <= 1).all())
        width = 1 if narrow else targets
        if leaves.count * width > max(_FEW_WEIGHTS, _MOST_SPREAD * len(leaves.weight)):
            return None, None
        weights = np.zeros((leaves.count, width), np.float32)
        at: Array = leaves.leaf * width + (0 if narrow else leaves.target)
        np.add.at(weights.reshape(-1), at, leaves.weight)
        target = np.zeros(trees, np.int64)
        target[pairs // targets] = pairs % targets if narrow else 0
        return weights, target


class TreeOperator(Operator):
    """Base of operators that walk trees.

    Attributes:
        for_numbers: the trees for float32 and integers.
    """

    def __init__(self, definition: Node, workspace: Workspace, *, index: int = -1, net: str = "") -> None:
        """Raises ModelFormatError for attributes that are no trees."""
        super().__init__(definition, workspace, index=index, net=net)
        self.for_numbers = ensemble_of(definition, self.arguments, self.label)

    def ensemble(self) -> Ensemble:
        """The trees for the type of input 0."""
        if self.x(0).dtype != np.float64 or self.for_numbers.dtype == np.float64:
            return self.for_numbers
        return ensemble_of(self.definition, self.arguments, self.label, is_double=True)

    def rows(self) -> Array:
        """Input 0 [rows, columns]."""
        x = self.x(0)
        return x.reshape(1, -1) if x.ndim == 1 else x

    def prepare(self) -> Step:
        """By NumPy, a block of rows at a time."""
        return partial(self._compute, self.ensemble(), self.rows(), self.finishing(self.ensemble()))

    def _compute(self, ensemble: Ensemble, x: Array, finish: Any) -> None:
        for first in range(0, len(x), _BLOCK_ROWS):
            block = slice(first, first + _BLOCK_ROWS)
            reached = ensemble.forest.reached(x[block].astype(ensemble.dtype, copy=False))
            finish(block, *ensemble.put_together(reached))

    def finishing(self, ensemble: Ensemble) -> Any:
        """A function of a slice of rows, their sums, and which of these there are, that writes results."""
        raise NotImplementedError


def ensemble_of(definition: Node, arguments: Arguments, label: str, *, is_double: bool = False) -> Ensemble:
    """The trees of an operator, found once for all that have the same. Raises ModelFormatError."""
    return arguments.once(("trees", is_double), lambda: _READERS[definition.type](arguments, label, is_double))


def _finish(arguments: Arguments, label: str, targets: int, trees: int) -> Finish:
    base = numbers(arguments, label, "base_values", "base_values_as_tensor")
    check_finite(base, label, "base_values")
    if base.size and base.size != targets:
        raise ModelFormatError(f"{label}: attribute 'base_values' must have {targets} values, found {base.size}")
    return Finish(base, trees, transform_of(arguments, label))


def _aggregate(arguments: Arguments, label: str) -> str:
    name = arguments.string("aggregate_function", SUM)
    if name not in (SUM, AVERAGE, MIN, MAX):
        raise ModelFormatError(
            f"{label}: attribute 'aggregate_function' is {name!r}; expected SUM, AVERAGE, MIN or MAX"
        )
    return name


def _regressor(arguments: Arguments, label: str, is_double: bool) -> Ensemble:
    targets = target_count(arguments, label, "target_ids")
    forest = numbered_forest(arguments, label, "target", targets, is_double=is_double)
    return _regressing(forest, arguments, label)


def _regressing(forest: Forest, arguments: Arguments, label: str) -> Ensemble:
    check_finite(forest.leaves.weight, label, "weights")
    aggregate = _aggregate(arguments, label)
    count = len(forest.roots) if aggregate == AVERAGE else 1
    return Ensemble(forest, aggregate, _finish(arguments, label, forest.targets, count))


def _indexed(arguments: Arguments, label: str, is_double: bool) -> Ensemble:
    targets = target_count(arguments, label, "leaf_targetids")
    return _regressing(indexed_forest(arguments, label, targets, is_double=is_double), arguments, label)


def target_count(arguments: Arguments, label: str, ids: str) -> int:
    """Argument `n_targets`, or one more than the last target that is named. Raises ModelFormatError."""
    count = arguments.int("n_targets", max(arguments.ints(ids), default=0) + 1)
    if not 0 < count <= _MOST_TARGETS:
        raise ModelFormatError(f"{label}: attribute 'n_targets' must be from 1 to {_MOST_TARGETS}, found {count}")
    return count


_MOST_TARGETS = 1 << 20


def labels_of(arguments: Arguments, label: str) -> Array:
    """The labels of classes, int64 or bytes objects. Raises ModelFormatError when there are none, or of both kinds."""
    names = texts(arguments, label, "classlabels_strings")
    values = np.array(arguments.ints("classlabels_int64s") or arguments.ints("classlabels_ints"), np.int64)
    if bool(names.size) == bool(values.size):
        raise ModelFormatError(f"{label}: it must have either 'classlabels_strings' or 'classlabels_int64s'")
    return names if names.size else values


def _classifier(arguments: Arguments, label: str, is_double: bool) -> Ensemble:
    count = len(labels_of(arguments, label))
    forest = numbered_forest(arguments, label, "class", count, is_double=is_double)
    leaves = forest.leaves
    check_finite(leaves.weight, label, "class_weights")
    weighted = np.unique(leaves.target)
    if count != 2 or len(weighted) != 1:
        return Ensemble(forest, SUM, ManyScores(_finish(arguments, label, count, 1)))
    second = bool(weighted[0])
    base = numbers(arguments, label, "base_values", "base_values_as_tensor")
    check_finite(base, label, "base_values")
    if base.size > count:
        raise ModelFormatError(f"{label}: attribute 'base_values' must have {count} values, found {base.size}")
    finish = Finish(base[1:] if second else base[:1], 1, transform_of(arguments, label))
    is_positive = bool((leaves.weight >= 0).all())
    one = replace(forest, leaves=replace(leaves, target=np.zeros_like(leaves.target)), targets=1)
    return Ensemble(one, SUM, OneScore(finish, 0.5 if is_positive else 0.0, is_positive, second))


_READERS = {
    "TreeEnsembleClassifier": _classifier, "TreeEnsembleRegressor": _regressor, "TreeEnsemble": _indexed,
}  # fmt: skip


def _rows_of(call: OperatorCall) -> int:
    """The number of rows of X. Raises ShapeError unless it has the columns that trees look at."""
    call.require_types(0, *NUMBERS)
    *rows, columns = call.require_rank(0, 1, 2)
    needed = ensemble_of(call.definition, call.arguments, call.label).forest.columns
    if columns < needed:
        raise call.fail(f"the trees look at {needed} columns, and X has {columns}")
    return rows[0] if rows else 1


def infer_regressor(call: OperatorCall) -> Sequence[TensorType]:
    """[rows, targets], float32."""
    rows = _rows_of(call)
    return [TensorType((rows, ensemble_of(call.definition, call.arguments, call.label).forest.targets), FLOAT32)]


def infer_indexed(call: OperatorCall) -> Sequence[TensorType]:
    """[rows, targets], of the type of X."""
    [kind] = infer_regressor(call)
    return [TensorType(kind.shape, FLOAT64 if call.inputs[0].meta is FLOAT64 else FLOAT32)]


def infer_classes(call: OperatorCall) -> Sequence[TensorType]:
    """Labels [rows], and scores [rows, classes]."""
    return class_types(call, _rows_of(call))


def class_types(call: OperatorCall, rows: int) -> Sequence[TensorType]:
    """Labels [rows] of the type of the class labels, and float32 scores [rows, classes]."""
    labels = labels_of(call.arguments, call.label)
    meta: TypeMeta = STRING if labels.dtype == np.object_ else INT64
    return [TensorType((rows,), meta), TensorType((rows, len(labels)), FLOAT32)]


def _cost(call: OperatorCall, outputs: Sequence[TensorType]) -> Cost:
    """A comparison for each branch on the longest way through half of the trees, and as many bytes of nodes."""
    forest = ensemble_of(call.definition, call.arguments, call.label).forest
    steps = outputs[0].shape[0] * len(forest.roots) * max(1, forest.depth // 2)
    written = sum(kind.nbytes for kind in outputs)
    return Cost(8 * steps, call.inputs[0].nbytes + min(24 * len(forest.thresholds), 24 * steps), written)


_NODES = {
    "nodes_treeids": "of each node, the number of its tree; a tree begins with its root",
    "nodes_nodeids": "of each node, its number in the tree",
    "nodes_featureids": "of each node, the column that it looks at",
    "nodes_values": "of each node, what it compares with",
    "nodes_values_as_tensor": "the same in float64",
    "nodes_hitrates": "not read",
    "nodes_hitrates_as_tensor": "not read",
    "nodes_modes": "of each node, BRANCH_LEQ, _LT, _GTE, _GT, _EQ, _NEQ or LEAF",
    "nodes_truenodeids": "of each node, where it goes if that is true",
    "nodes_falsenodeids": "of each node, where it goes else",
    "nodes_missing_value_tracks_true": "of each node, 1 if it is true for NaN",
}
_RESULTS = {
    "base_values": "added to the results",
    "base_values_as_tensor": "the same in float64",
    "post_transform": HELP,
}


def _weight_help(kind: str) -> dict[str, str]:
    return {
        f"{kind}_treeids": "of each weight, the tree of the leaf that gives it",
        f"{kind}_nodeids": "of each weight, the leaf",
        f"{kind}_ids": "of each weight, what it is for",
        f"{kind}_weights": "the weights",
        f"{kind}_weights_as_tensor": "the same in float64",
    }


LABEL_ARGS = {
    "classlabels_strings": "labels of the classes",
    "classlabels_int64s": "labels of the classes, if they are numbers",
}
_CLASSIFIER_ARGS = _NODES | _weight_help("class") | LABEL_ARGS | _RESULTS
_REGRESSOR_ARGS = (
    _NODES
    | _weight_help("target")
    | _RESULTS
    | {"n_targets": "the number of results of a row", "aggregate_function": "SUM (default), AVERAGE, MIN or MAX"}
)
_INDEXED_ARGS = {
    "aggregate_function": "SUM (1, default), AVERAGE, MIN or MAX",
    "leaf_targetids": "of each leaf, what its weight is for",
    "leaf_weights": "of each leaf, its weight",
    "membership_values": "sets, with NaN behind each, for nodes with mode 6 in order",
    "n_targets": "the number of results of a row",
    "nodes_falseleafs": "of each node, 1 if it goes to a leaf where it is false",
    "nodes_falsenodeids": "of each node, the node or leaf where it goes else",
    "nodes_featureids": "of each node, the column that it looks at",
    "nodes_hitrates": "not read",
    "nodes_missing_value_tracks_true": "of each node, 1 if it is true for NaN",
    "nodes_modes": "of each node, what it asks: <= (0), <, >=, >, ==, != or membership (6)",
    "nodes_splits": "of each node, what it compares with",
    "nodes_trueleafs": "of each node, 1 if it goes to a leaf where it is true",
    "nodes_truenodeids": "of each node, the node or leaf where it goes if that is true",
    "post_transform": HELP,
    "tree_roots": "the first node of each tree",
}


class Regressing(TreeOperator):
    """Base of those that give numbers."""

    def finishing(self, ensemble: Ensemble) -> Any:
        """Scores of sums."""
        y, finish = self.y(0), ensemble.finish
        assert isinstance(finish, Finish)

        def write(block: slice, sums: Array, _given: Array) -> None:
            y[block] = finish.scores(sums)

        return write


@new_operator(
    "TreeEnsembleRegressor",
    infer=infer_regressor,
    doc="For each row of X the weights of the leaves that it reaches, put together for each target. (ai.onnx.ml.)",
    input_names=("X",),
    output_names=("Y",),
    args=_REGRESSOR_ARGS,
    cost=_cost,
    rows=first_axis,
    onnx=onnx_name("TreeEnsembleRegressor", 3, *_REGRESSOR_ARGS),
)
class TreeEnsembleRegressor(Regressing):
    """Numbers from trees whose nodes are numbered."""


@new_operator(
    "TreeEnsemble",
    infer=infer_indexed,
    doc="For each row of X the weights of the leaves that it reaches, put together for each target; the trees are "
    "arrays. (ai.onnx.ml.)",
    input_names=("X",),
    output_names=("Y",),
    args=_INDEXED_ARGS,
    cost=_cost,
    rows=first_axis,
    onnx=(
        OnnxName(
            "TreeEnsemble",
            5,
            {name: name for name in _INDEXED_ARGS},
            domain=DOMAIN,
            values={
                "aggregate_function": dict(enumerate((AVERAGE, SUM, MIN, MAX))),
                "post_transform": dict(enumerate((NONE, SOFTMAX, LOGISTIC, SOFTMAX_ZERO, PROBIT))),
            },
        ),
    ),
)
class TreeEnsemble(Regressing):
    """Numbers from trees whose nodes refer to each other by index."""


@new_operator(
    "TreeEnsembleClassifier",
    infer=infer_classes,
    doc="For each row of X the class with the greatest sum of weights of the leaves that it reaches, and the score "
    "of each class. (ai.onnx.ml.)",
    input_names=("X",),
    output_names=("labels", "scores"),
    args=_CLASSIFIER_ARGS,
    cost=_cost,
    rows=first_axis,
    onnx=onnx_name("TreeEnsembleClassifier", 3, *_CLASSIFIER_ARGS),
)
class TreeEnsembleClassifier(TreeOperator):
    """Classes from trees whose nodes are numbered."""

    def finishing(self, ensemble: Ensemble) -> Any:
        """Labels and scores of sums."""
        labels, scores, finish = self.y(0), self.y(1), ensemble.finish
        names = labels_of(self.arguments, self.label)

        def write(block: slice, sums: Array, given: Array) -> None:
            if isinstance(finish, OneScore):
                chosen, found = finish.classes(sums)
            else:
                assert isinstance(finish, ManyScores)
                chosen, found = finish.classes(sums, given)
            labels[block], scores[block] = names[chosen], found

        return write


no_gradient("TreeEnsembleClassifier", "TreeEnsembleRegressor", "TreeEnsemble")
