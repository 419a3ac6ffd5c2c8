"""What attributes of tree ensembles say, checked: nodes with numbers (up to ai.onnx.ml 3), or by index (5)."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from dagexec.core.arguments import Arguments
from dagexec.errors import ModelFormatError
from dagexec.ops.families.tabular.attributes import check_length, integers, numbers, texts
from dagexec.ops.families.tabular.forest import LEAF, LEQ, MEMBER, Branches, Forest, Leaves, grown

Array = npt.NDArray[Any]

_MODES = {
    b"LEAF": LEAF, b"BRANCH_LEQ": 0, b"BRANCH_LT": 1, b"BRANCH_GTE": 2, b"BRANCH_GT": 3, b"BRANCH_EQ": 4,
    b"BRANCH_NEQ": 5,
}  # fmt: skip
_MAX_COLUMNS = 1 << 30


def numbered_forest(arguments: Arguments, label: str, kind: str, targets: int, *, is_double: bool) -> Forest:
    """The trees of a TreeEnsembleClassifier (`kind` "class") or TreeEnsembleRegressor ("target").

    With `is_double` they compare float64, else what they are given as.

    Raises ModelFormatError, naming the attribute, for lists of unequal lengths, numbers of nodes that are given twice
    or do not exist, columns and targets out of range, and circles.
    """
    values = _floats(numbers(arguments, label, "nodes_values", "nodes_values_as_tensor"), is_double=is_double)
    count = len(arguments.ints("nodes_nodeids"))
    check_length(values, label, "nodes_values", count)
    tree, node, feature, true, false = (
        integers(arguments, label, f"nodes_{name}", count)
        for name in ("treeids", "nodeids", "featureids", "truenodeids", "falsenodeids")
    )
    modes = _modes(texts(arguments, label, "nodes_modes"), label)
    check_length(modes, label, "nodes_modes", count)
    missing = integers(arguments, label, "nodes_missing_value_tracks_true") != 0
    if missing.size:
        check_length(missing, label, "nodes_missing_value_tracks_true", count)
    else:
        missing = np.zeros(count, np.bool_)
    if not count:
        raise ModelFormatError(f"{label}: attribute 'nodes_nodeids' is empty; expected at least one tree")

    numbering = _Numbering(tree, node, label)
    is_leaf = modes == LEAF
    place = np.where(is_leaf, -np.cumsum(is_leaf), np.cumsum(~is_leaf) - 1)
    branch = np.flatnonzero(~is_leaf)
    _check_range(feature[branch], _MAX_COLUMNS, label, "nodes_featureids")
    branches = Branches(
        feature[branch], values[branch], modes[branch],
        place[numbering.find(tree[branch], true[branch], "nodes_truenodeids")],
        place[numbering.find(tree[branch], false[branch], "nodes_falsenodeids")],
        missing[branch], {}, place[numbering.first],
    )  # fmt: skip
    weights = _floats(numbers(arguments, label, f"{kind}_weights", f"{kind}_weights_as_tensor"))
    tree_of, node_of, target = (
        integers(arguments, label, f"{kind}_{name}", len(weights)) for name in ("treeids", "nodeids", "ids")
    )
    _check_range(target, targets, label, f"{kind}_ids")
    at = place[numbering.find(tree_of, node_of, f"{kind}_nodeids")]
    kept = at < 0  # what branches give nobody gets
    leaves = Leaves(numbering.tree[is_leaf], -1 - at[kept], target[kept], weights[kept])
    return grown(branches, leaves, targets, label)


def indexed_forest(arguments: Arguments, label: str, targets: int, *, is_double: bool) -> Forest:
    """The trees of a TreeEnsemble, as `numbered_forest` gives those of others. Raises ModelFormatError."""
    values = _floats(numbers(arguments, label, "nodes_splits"), is_double=is_double)
    count = values.size
    feature, true, false, to_true_leaf, to_false_leaf = (
        integers(arguments, label, f"nodes_{name}", count)
        for name in ("featureids", "truenodeids", "falsenodeids", "trueleafs", "falseleafs")
    )
    modes = numbers(arguments, label, "nodes_modes").astype(np.int64)
    check_length(modes, label, "nodes_modes", count)
    if count and (modes.min() < LEQ or modes.max() > MEMBER):
        raise ModelFormatError(f"{label}: attribute 'nodes_modes' has values that are not from {LEQ} to {MEMBER}")
    _check_range(feature, _MAX_COLUMNS, label, "nodes_featureids")
    missing = integers(arguments, label, "nodes_missing_value_tracks_true") != 0
    if missing.size:
        check_length(missing, label, "nodes_missing_value_tracks_true", count)
    else:
        missing = np.zeros(count, np.bool_)
    target = integers(arguments, label, "leaf_targetids")
    weights = _floats(numbers(arguments, label, "leaf_weights"))
    check_length(weights, label, "leaf_weights", target.size)
    _check_range(target, targets, label, "leaf_targetids")
    roots = integers(arguments, label, "tree_roots")
    _check_range(roots, count, label, "tree_roots")
    children = [
        _child(places, leafs != 0, count, target.size, label, f"nodes_{name}")
        for places, leafs, name in ((true, to_true_leaf, "truenodeids"), (false, to_false_leaf, "falsenodeids"))
    ]
    members = _members(_floats(numbers(arguments, label, "membership_values")), np.flatnonzero(modes == MEMBER), label)
    branches = Branches(feature, values, modes, children[0], children[1], missing, members, roots)
    leaves = Leaves(np.zeros(target.size, np.int64), np.arange(target.size), target, weights)
    return grown(branches, leaves, targets, label)


class _Numbering:
    """Nodes by the numbers of their trees and their own.

    Attributes:
        tree: of each node, the number of its tree, counted from 0 in the order in which trees begin.
        first: of each tree, its first node, which is its root.
    """

    def __init__(self, tree: Array, node: Array, label: str) -> None:
        self._label = label
        self._trees, first, self._rank = np.unique(tree, return_index=True, return_inverse=True)
        self._nodes, node_rank = np.unique(node, return_inverse=True)
        keys = self._rank * len(self._nodes) + node_rank
        self._keys, self._places = np.unique(keys, return_index=True)
        if len(self._keys) < len(keys):
            raise ModelFormatError(f"{label}: attribute 'nodes_nodeids' has a node twice in one tree")
        order = np.argsort(first)
        self.first = first[order]
        position = np.empty(len(order), np.int64)
        position[order] = np.arange(len(order))
        self.tree = position[self._rank]

    def find(self, tree: Array, node: Array, name: str) -> Array:
        """The nodes of these trees with these numbers. Raises ModelFormatError, naming the attribute."""
        rank, node_rank = (
            np.minimum(np.searchsorted(known, wanted), len(known) - 1)
            for known, wanted in ((self._trees, tree), (self._nodes, node))
        )
        keys = rank * len(self._nodes) + node_rank
        found = np.minimum(np.searchsorted(self._keys, keys), len(self._keys) - 1)
        wrong = (self._trees[rank] != tree) | (self._nodes[node_rank] != node) | (self._keys[found] != keys)
        if wrong.any():
            at = int(np.argmax(wrong))
            raise ModelFormatError(
                f"{self._label}: attribute {name!r} names node {node[at]} of tree {tree[at]}, which does not exist"
            )
        places: Array = self._places[found]
        return places


def _floats(values: Array, *, is_double: bool = False) -> Array:
    """float64 as it is, all else as float32, unless `is_double`."""
    return values.astype(np.float64 if is_double or values.dtype == np.float64 else np.float32)


def _modes(names: Array, label: str) -> Array:
    try:
        return np.array([_MODES[name] for name in names], np.int64)
    except KeyError as error:
        raise ModelFormatError(f"{label}: attribute 'nodes_modes' has {error}; expected {list(_MODES)}") from None


def _check_range(values: Array, end: int, label: str, name: str) -> None:
    wrong = (values < 0) | (values >= end)
    if wrong.any():
        raise ModelFormatError(
            f"{label}: attribute {name!r} has {values[np.argmax(wrong)]}; expected numbers from 0 to {end - 1}"
        )


def _child(places: Array, is_leaf: Array, nodes: int, leaves: int, label: str, name: str) -> Array:
    """Indices of nodes as they are, of leaves as ~index."""
    _check_range(places[~is_leaf], nodes, label, name)
    _check_range(places[is_leaf], leaves, label, name)
    return np.where(is_leaf, -1 - places, places)


def _members(values: Array, nodes: Array, label: str) -> dict[int, Array]:
    """The members of each node that asks for membership; each set ends with NaN, the last one may do without."""
    ends = np.flatnonzero(np.isnan(values))
    sets = np.split(values, ends + 1)
    if sets and not sets[-1].size:
        sets.pop()
    if len(sets) != len(nodes):
        raise ModelFormatError(
            f"{label}: attribute 'membership_values' has {len(sets)} sets; expected {len(nodes)}, as many as nodes "
            f"with mode {MEMBER}"
        )
    return {int(node): members for node, members in zip(nodes, sets, strict=True)}
