"""Operators that compute nothing."""

from __future__ import annotations

from dagexec.core.dtypes import FLOAT32
from dagexec.core.gradient import no_gradient
from dagexec.core.operator import Operator, Step
from dagexec.core.registry import new_operator
from dagexec.core.schema import UNBOUNDED, Cost, TensorType, one_to_one


def _noop() -> None:
    """Compute nothing."""


@new_operator(
    "NoOp",
    inputs=(0, UNBOUNDED),
    outputs=(0, UNBOUNDED),
    infer=lambda call: [TensorType((0,), FLOAT32)] * len(call.definition.output),
    doc="Computes nothing; its outputs are empty tensors. Only the order counts. For scheduler benchmarks.",
    inplace=one_to_one,
    cost=lambda _call, _outputs: Cost(0, 0, 0),
)
class NoOp(Operator):
    """Computes nothing."""

    def prepare(self) -> Step:
        """A step that the scheduler still has to call."""
        return _noop


no_gradient("NoOp")
