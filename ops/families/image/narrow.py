"""SpatialNarrowAs: images cut to the size of others, as Detectron cuts labels to its feature maps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dagexec.core.dtypes import FLOAT_TYPES, INT32
from dagexec.core.gradient import gradient_by
from dagexec.core.schema import OperatorCall, TensorType
from dagexec.ops.base.array_function import array_function
from dagexec.ops.base.blocks import Array


def infer_spatial_narrow_as(call: OperatorCall) -> list[TensorType]:
    """A with the rows and columns of B."""
    meta = call.require_types(0, INT32, *FLOAT_TYPES)
    a, b = call.inputs[0].shape, call.inputs[1].shape
    if len(a) not in (3, 4) or len(b) not in (3, 4):
        raise call.fail(f"A and B must have 3 or 4 axes, found shapes {a} and {b}")
    if a[0] != b[0] or b[-2] > a[-2] or b[-1] > a[-1]:
        raise call.fail(f"B must have as many images as A, and no more rows or columns; found shapes {a} and {b}")
    return [TensorType((*a[:-2], *b[-2:]), meta)]


@array_function(
    "SpatialNarrowAs",
    infer=infer_spatial_narrow_as,
    doc="The first rows and columns of A, as many as B has.",
    input_names=("A, N x (C) x H0 x W0", "B, N x (C) x H1 x W1"),
    output_names=("C",),
)
def spatial_narrow_as(_call: OperatorCall, a: Array, b: Array) -> Sequence[Array]:
    """A window."""
    return [a[..., : b.shape[-2], : b.shape[-1]]]


def infer_spatial_narrow_as_gradient(call: OperatorCall) -> list[TensorType]:
    """The type of A."""
    [result] = infer_spatial_narrow_as(call)
    call.require_same_type(0, 2)
    call.require_shape(2, result.shape, "the shape of C")
    return [call.inputs[0]]


@array_function(
    "SpatialNarrowAsGradient",
    infer=infer_spatial_narrow_as_gradient,
    doc="The gradient of SpatialNarrowAs by A, whose values are not read: zeros outside of the window.",
    input_names=("A", "B", "dC"),
    output_names=("dA",),
)
def spatial_narrow_as_gradient(_call: OperatorCall, a: Array, b: Array, dy: Array) -> Sequence[Array]:
    """dC in its place."""
    da = np.zeros_like(a)
    da[..., : b.shape[-2], : b.shape[-1]] = dy
    return [da]


gradient_by("SpatialNarrowAs", "SpatialNarrowAsGradient", ("X0", "X1", "dY"))
