"""Random rows of tables, and random ensembles of trees as attributes of ai.onnx.ml."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Attributes = dict[str, Any]

MODES = ["BRANCH_LEQ", "BRANCH_LT", "BRANCH_GTE", "BRANCH_GT", "BRANCH_EQ", "BRANCH_NEQ"]


def random_rows(random: np.random.Generator, rows: int, columns: int, dtype: str = "f") -> Array:
    """Numbers of which many are whole, and some are missing."""
    x = 2 * random.standard_normal((rows, columns))
    x = np.where(random.random(x.shape) < 0.4, np.round(x), x)
    if np.dtype(dtype).kind == "f":
        x[random.random(x.shape) < 0.15] = np.nan
    return x.astype(dtype)


def random_trees(
    random: np.random.Generator, trees: int, columns: int, depth: int, *, modes: list[str] = MODES, missing: bool = True
) -> tuple[Attributes, list[tuple[int, int]]]:
    """Attributes of nodes, and the leaves as numbers of tree and node."""
    found: Attributes = {
        f"nodes_{name}": []
        for name in (
            "treeids", "nodeids", "featureids", "values", "modes", "truenodeids", "falsenodeids",
            "missing_value_tracks_true",
        )
    }  # fmt: skip
    leaves = []

    def add(tree: int, left: int) -> int:
        place = len(found["nodes_nodeids"])
        number = place - found["nodes_treeids"].index(tree) if tree in found["nodes_treeids"] else 0
        is_leaf = left == 0 or random.random() < 0.1
        value = round(random.standard_normal()) if random.random() < 0.5 else random.standard_normal()
        row = (
            tree, number, int(random.integers(columns)), float(np.float32(value)),
            "LEAF" if is_leaf else str(random.choice(modes)), 0, 0, int(missing and random.random() < 0.5),
        )  # fmt: skip
        for values, one in zip(found.values(), row, strict=True):
            values.append(one)
        if is_leaf:
            leaves.append((tree, number))
        else:
            found["nodes_truenodeids"][place] = add(tree, left - 1)
            found["nodes_falsenodeids"][place] = add(tree, left - 1)
        return number

    for tree in range(trees):
        add(tree, depth)
    return found, leaves


def weights(
    random: np.random.Generator, kind: str, leaves: list[tuple[int, int]], targets: list[list[int]], *, positive: bool
) -> Attributes:
    """Attributes of weights: of leaf i for `targets[i % len(targets)]`."""
    rows = [(*leaf, target) for i, leaf in enumerate(leaves) for target in targets[i % len(targets)]]
    given = random.standard_normal(len(rows))
    trees, nodes, ids = (list(column) for column in zip(*rows, strict=True))
    values = np.abs(given) if positive else given
    return {
        f"{kind}_treeids": trees, f"{kind}_nodeids": nodes, f"{kind}_ids": ids,
        f"{kind}_weights": (values / max(1, trees[-1])).astype(np.float32).tolist(),
    }  # fmt: skip
