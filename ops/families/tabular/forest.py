"""Decision trees as arrays, checked when they are made from what a model says, and walked by NumPy.

All trees of an ensemble share one array of nodes; `dagexec.ops.kernels.tree_kernels` walks the same array as machine
code. A node asks one question, threshold < x[feature], and goes to `children[i, 0]` where that is false, else, and for
NaN, to `children[i, 1]`. All modes of ONNX become that question: "<" by the number before the threshold, ">" by
exchanged children, "==" by two nodes, membership by a search in the sorted members; and where NaN goes with the numbers
up to the threshold, by the negated feature, which stands `features` columns further on. Leaf i is -1 - i.

The structure is a graph without circles rather than a tree: exporters of set membership have several branches end in
one node.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from dagexec.errors import ModelFormatError
from dagexec.platform.records import dataclass

Array = npt.NDArray[Any]

LEQ, LT, GTE, GT, EQ, NEQ, MEMBER = range(7)
"""Questions of branches, as ONNX numbers them: x <= value, x < value and so on, and whether x is one of several."""

LEAF = -1
SUM, AVERAGE, MIN, MAX = "SUM", "AVERAGE", "MIN", "MAX"


@dataclass(frozen=True)
class Branches:
    """The branches of an ensemble as a model has them, one a row of each array; children are nodes, or leaves ~i.

    Attributes:
        features, values, modes, true, false, missing_is_true: of each branch; `values` are float32 or float64.
        members: of a branch with mode MEMBER, the values that it looks for.
        roots: of each tree, a node or a leaf.
    """

    features: Array
    values: Array
    modes: Array
    true: Array
    false: Array
    missing_is_true: Array
    members: dict[int, Array]
    roots: Array


@dataclass(frozen=True)
class Leaves:
    """What leaves give: leaf `leaf[i]` gives `weight[i]` to target `target[i]`.

    Attributes:
        tree: of each leaf, the number of its tree.
    """

    tree: Array
    leaf: Array
    target: Array
    weight: Array

    @property
    def count(self) -> int:
        """The number of leaves."""
        return len(self.tree)


@dataclass(frozen=True, eq=False)
class Forest:
    """Trees as arrays.

    Attributes:
        thresholds: of each node, float32 or float64.
        features: the column that each node looks at; those of negated columns are `columns` and more.
        children: [nodes, 2], where the comparison is false and where it is true.
        roots: of each tree.
        columns: how many columns the trees look at: one more than the last of them.
        negates: some nodes look at negated columns.
        leaves: what the leaves give.
        targets: the number of targets.
        depth: branches on the longest way.
    """

    thresholds: Array
    features: Array
    children: Array
    roots: Array
    columns: int
    negates: bool
    leaves: Leaves
    targets: int
    depth: int

    def reached(self, x: Array) -> Array:
        """The leaf that each row of `x` [rows, columns or more] ends in, in each tree: [rows, trees]."""
        rows = np.arange(len(x))[:, np.newaxis]
        values = x.astype(self.thresholds.dtype, copy=False)
        if self.negates:
            values = np.concatenate([values[:, : self.columns], -values[:, : self.columns]], axis=1)
        places = np.broadcast_to(self.roots, (len(x), len(self.roots))).copy()
        for _ in range(self.depth):
            at = np.maximum(places, 0)
            passed = ~(values[rows, self.features[at]] <= self.thresholds[at])
            places = np.where(places < 0, places, self.children[at, passed.astype(np.intp)])
        found: Array = -1 - places
        return found

    def always_given(self) -> Array:
        """For each target, whether every row gets a weight for it: all leaves of one tree have one."""
        leaves = self.leaves
        pairs = np.unique(leaves.leaf * self.targets + leaves.target)
        leaf, target = np.divmod(pairs, self.targets)
        given = np.unique(leaves.tree[leaf] * self.targets + target, return_counts=True)
        sizes = np.bincount(leaves.tree, minlength=1)
        always = given[0][given[1] == sizes[given[0] // self.targets]]
        found = np.zeros(self.targets, np.bool_)
        found[always % self.targets] = True
        return found


def grown(branches: Branches, leaves: Leaves, targets: int, label: str) -> Forest:
    """The forest of these branches. Raises ModelFormatError, with `label`, where they go round in a circle."""
    columns = int(branches.features.max(initial=-1)) + 1
    nodes = _Nodes(branches, columns)
    modes, missing = branches.modes, branches.missing_is_true
    turned = ((modes == GTE) | (modes == GT)) & ~np.isnan(branches.values)  # what is compared with NaN is never true
    strict = (modes == LT) | (modes == GTE)
    nodes.thresholds[strict] = _before(nodes.thresholds[strict])
    nodes.exchange(turned)
    for node in np.flatnonzero((modes == EQ) | (modes == NEQ)):
        nodes.equal(int(node), exchanged=bool(modes[node] == NEQ))
    for node in np.flatnonzero(modes == MEMBER):
        nodes.member(int(node), branches.members[int(node)])
    nodes.negate(np.where(turned, ~missing, missing & (modes != NEQ)))
    thresholds, features, children = nodes.arrays()
    depth = _longest_way(children, label)
    negates = bool((features >= columns).any())
    return Forest(thresholds, features, children, branches.roots, columns, negates, leaves, targets, depth)


def _before(values: Array) -> Array:
    """The greatest number below each value, NaN where there is none: x < value is x <= that."""
    with np.errstate(over="ignore"):
        before = np.nextafter(values, values.dtype.type(-np.inf))
    found: Array = np.where(values == -np.inf, values.dtype.type(np.nan), before)
    return found


def _longest_way(children: Array, label: str) -> int:
    """The most branches one after another: nodes are taken away whose parents all are (Kahn, 1962)."""
    count = len(children)
    inner = children[children >= 0]
    parents = np.bincount(inner, minlength=count) if count else np.zeros(0, np.int64)
    front, depth, seen = np.flatnonzero(parents == 0), 0, 0
    while front.size:
        seen += front.size
        depth += 1
        reached = children[front].reshape(-1)
        reached, times = np.unique(reached[reached >= 0], return_counts=True)
        parents[reached] -= times
        front = reached[parents[reached] == 0]
    if seen < count:
        raise ModelFormatError(f"{label}: its trees have {count - seen} node(s) in a circle or behind one")
    return depth


class _Nodes:
    """Nodes that are being made of branches."""

    def __init__(self, branches: Branches, columns: int) -> None:
        self.thresholds = branches.values.copy()
        self._features = branches.features.copy()
        self._children = np.stack([branches.true, branches.false], axis=1)
        self._columns = columns
        self._more: list[tuple[Any, int, int, int]] = []

    def exchange(self, chosen: Array) -> None:
        """Exchange the children of these nodes."""
        self._children[chosen] = self._children[chosen][:, ::-1]

    def equal(self, node: int, *, exchanged: bool) -> None:
        """x <= value, and not x <= the number before it."""
        true, false = (int(child) for child in self._children[node])
        if exchanged:
            true, false = false, true
        value = self.thresholds[node : node + 1]
        self._children[node] = self._add(_before(value)[0], node, false, true), false

    def member(self, node: int, members: Array) -> None:
        """A search in the members; what is above the last of them, or NaN, is none."""
        true, false = (int(child) for child in self._children[node])
        values = np.unique(members[~np.isnan(members)]).astype(self.thresholds.dtype)
        if not values.size:
            self.thresholds[node] = np.nan
            return
        before = _before(values)

        def search(first: int, end: int) -> int:
            if end - first == 1:
                return self._add(before[first], node, false, true)
            middle = (first + end) // 2
            low, high = search(first, middle), search(middle, end)
            return self._add(values[middle - 1], node, low, high)

        self.thresholds[node] = values[-1]
        self._children[node] = search(0, len(values)), false

    def negate(self, chosen: Array) -> None:
        """Have NaN go with the numbers up to the threshold: x <= t, or NaN, is -next(t) < -x, or NaN."""
        chosen = np.flatnonzero(chosen)
        values, infinity = self.thresholds[chosen], self.thresholds.dtype.type(np.inf)
        with np.errstate(over="ignore"):
            after = -np.nextafter(values, infinity)
        never, always = np.isnan(values), values == infinity
        self.thresholds[chosen] = np.where(never, infinity, np.where(always, np.nan, after))
        self._features[chosen] += self._columns
        self.exchange(chosen)

    def arrays(self) -> tuple[Array, Array, Array]:
        """Thresholds, features and children of all."""
        if not self._more:
            return self.thresholds, self._features, self._children
        thresholds, features, low, high = zip(*self._more, strict=True)
        return (
            np.concatenate([self.thresholds, np.array(thresholds, self.thresholds.dtype)]),
            np.concatenate([self._features, np.array(features, np.int64)]),
            np.concatenate([self._children, np.stack([low, high], axis=1)]),
        )

    def _add(self, threshold: Any, like: int, low: int, high: int) -> int:
        """A further node, which looks at the column that node `like` looks at."""
        self._more.append((threshold, int(self._features[like]), low, high))
        return len(self.thresholds) + len(self._more) - 1
