"""SparseDropoutWithReplacement: lists of identifiers, some of which become one identifier of their own."""

from __future__ import annotations

import numpy as np

from dagexec.core.blob import tensor_in
from dagexec.core.gradient import no_gradient
from dagexec.core.node import Node
from dagexec.core.operator import Operator, Step
from dagexec.core.registry import new_operator
from dagexec.core.workspace import Workspace
from dagexec.errors import ArgumentError, ShapeError


@new_operator(
    "SparseDropoutWithReplacement",
    infer=None,
    on_host=True,
    doc="Each list of X, of which lengths says how many identifiers it has, is dropped with probability `ratio`: it "
    "becomes the identifier `replacement_value` alone, even if it has none.",
    input_names=("X", "lengths"),
    output_names=("Y", "lengths_out"),
    args={"ratio": "the probability (default 0)", "replacement_value": "the identifier (default 0)"},
    reproducible=False,
)
class SparseDropoutWithReplacement(Operator):
    """What is drawn decides the number of identifiers, so that only a run can tell it."""

    def __init__(self, definition: Node, workspace: Workspace, *, index: int = -1, net: str = "") -> None:
        """Raises ArgumentError for a ratio outside of [0, 1]."""
        super().__init__(definition, workspace, index=index, net=net)
        self._ratio = self.arguments.float("ratio", 0.0)
        self._replacement = self.arguments.int("replacement_value", 0)
        if not 0 <= self._ratio <= 1:
            raise ArgumentError(f"{self.label}: argument 'ratio' must be in [0, 1], found {self._ratio:g}")

    def prepare(self) -> Step:
        """Draw for each list; the others keep their identifiers. Raises ShapeError for lengths that do not fit."""
        x, lengths = self.x(0), self.x(1)
        if x.dtype != np.int64 or lengths.dtype != np.int32 or x.ndim != 1 or lengths.ndim != 1:
            found = f"{x.dtype}{list(x.shape)} and {lengths.dtype}{list(lengths.shape)}"
            raise ShapeError(f"{self.label}: expected int64 identifiers and int32 lengths, vectors both, found {found}")

        def drop() -> None:
            if (lengths < 0).any() or int(lengths.sum(dtype=np.int64)) != len(x):
                raise ShapeError(f"{self.label}: lengths must be at least 0 and add up to {len(x)} identifiers")
            dropped = self.random.random(len(lengths)) < self._ratio
            longer = np.where(dropped, 1, lengths).astype(np.int32)
            found = np.full(int(longer.sum()), self._replacement, np.int64)
            found[~np.repeat(dropped, longer)] = x[~np.repeat(dropped, lengths)]
            tensor_in(self.output_blobs[0]).feed(found)
            tensor_in(self.output_blobs[1]).feed(longer)

        return drop


no_gradient("SparseDropoutWithReplacement")
