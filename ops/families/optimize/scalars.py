"""One-element inputs of the update operators: learning rates, weights and the iteration counter."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

from dagexec.core.dtypes import FLOAT32, FLOAT64, INT64, TypeMeta
from dagexec.core.schema import OperatorCall

Array = npt.NDArray[Any]


def require_one_element(call: OperatorCall, index: int, what: str, *metas: TypeMeta) -> TypeMeta:
    """Raise ShapeError unless input `index` has exactly one element, of one of `metas`; its type."""
    if call.inputs[index].elements != 1:
        shape = call.inputs[index].shape
        name = call.definition.input[index]
        raise call.fail(f"input {name!r}, {what}, must have one element, found shape {shape}")
    return call.require_types(index, *metas)


def require_rate(call: OperatorCall, index: int, what: str = "the learning rate") -> None:
    """Raise ShapeError unless input `index` is one float; float32 fits parameters of any type."""
    require_one_element(call, index, what, FLOAT32, FLOAT64)


def require_iteration(call: OperatorCall, index: int) -> None:
    """Raise ShapeError unless input `index` is one int64."""
    require_one_element(call, index, "the iteration", INT64)


def read_iteration(counter: Array, label: str) -> int:
    """The value of a one-element counter. Raises ValueError, naming the operator, when it is negative."""
    iteration = int(counter[0])
    if iteration < 0:
        raise ValueError(f"{label}: the iteration must be at least 0, found {iteration}")
    return iteration
