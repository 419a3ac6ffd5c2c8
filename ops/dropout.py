"""Dropout as inference needs it: the output is the input."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from dagexec.core.dtypes import BOOL
from dagexec.core.errors import ArgumentError, UnsupportedFeatureError
from dagexec.core.operator import Operator, Step, in_sequence
from dagexec.core.proto import OperatorDef
from dagexec.core.registry import operator
from dagexec.core.schema import OperatorCall, OpSchema, TensorType, first_to_first

if TYPE_CHECKING:
    from dagexec.core.workspace import Workspace


def infer_dropout(call: OperatorCall) -> list[TensorType]:
    """Y has the type of X; the mask its shape, of bool."""
    ratio = call.arguments.float("ratio", 0.5)
    if not 0 <= ratio < 1:
        raise ArgumentError(f"{call.label}: argument 'ratio' must be in [0, 1), found {ratio:g}")
    kind = call.inputs[0]
    return [kind, TensorType(kind.shape, BOOL)][: len(call.definition.output)]


@operator(
    OpSchema(
        "Dropout",
        inputs=(1, 1),
        outputs=(1, 2),
        infer=infer_dropout,
        doc="With is_test=1: Y = X, and a mask that is all true. Training mode is not implemented.",
        input_names=("X",),
        output_names=("Y", "mask"),
        args={"is_test": "1: inference", "ratio": "part that training drops, in [0, 1) (default 0.5)"},
        required_args=("is_test",),
        inplace=first_to_first,
        view=True,
    )
)
class Dropout(Operator):
    """Dropout in inference."""

    def __init__(self, definition: OperatorDef, workspace: Workspace, *, index: int = -1, net: str = "") -> None:
        """Raises UnsupportedFeatureError for training mode."""
        super().__init__(definition, workspace, index=index, net=net)
        if not self.arguments.bool("is_test"):
            raise UnsupportedFeatureError(f"{self.label}: training mode (is_test=0) is not implemented yet")

    def prepare(self) -> Step:
        """A copy, unless the output shares the input's storage."""
        steps: list[Step] = []
        if not self.output(0).shares_storage_with(self.input(0)):
            steps.append(partial(np.copyto, self.y(0), self.x(0)))
        if len(self.output_blobs) > 1:
            steps.append(partial(self.y(1).fill, True))
        return in_sequence(steps)
