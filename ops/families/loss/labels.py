"""Class labels as losses and metrics take them: an integer a row, in range, which only a run can tell."""

from __future__ import annotations

from functools import partial

import numpy as np

from dagexec.core.dtypes import INT32, INT64
from dagexec.core.operator import Operator, Step
from dagexec.core.schema import OperatorCall
from dagexec.errors import FeedError
from dagexec.ops.base.blocks import Array

LABEL_TYPES = (INT32, INT64)

IGNORED = -1
"""The label that SpatialSoftmaxWithLoss passes over."""


def require_labels(call: OperatorCall, index: int, rows: int, why: str = "one for each row of X") -> None:
    """Raise ShapeError unless input `index` holds `rows` integers of a type that labels may have."""
    call.require_types(index, *LABEL_TYPES)
    found = call.inputs[index]
    if found.elements != rows:
        name = call.definition.input[index]
        raise call.fail(f"labels {name!r} must have {rows} elements ({why}), found shape {found.shape}")


def label_check(owner: Operator, index: int, classes: int, least: int = 0) -> Step:
    """A step that raises FeedError unless all labels of input `index` are in [least, classes)."""
    return partial(check_labels, owner.x(index), classes, least, owner.label, owner.definition.input[index])


def check_labels(labels: Array, classes: int, least: int, label: str, name: str) -> None:
    """Raise FeedError, naming the operator `label` and the blob `name`, unless all labels are in [least, classes)."""
    if not labels.size or (int(labels.min()) >= least and int(labels.max()) < classes):
        return
    place = tuple(int(axis[0]) for axis in np.nonzero((labels < least) | (labels >= classes)))
    ignored = f", or {IGNORED} to be ignored" if least == IGNORED else ""
    raise FeedError(
        f"{label}: label {int(labels[place])} at position {list(place)} of blob {name!r} is out of range: "
        f"expected 0 to {classes - 1} ({classes} classes){ignored}"
    )
