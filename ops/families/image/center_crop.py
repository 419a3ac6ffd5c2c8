"""CenterCropPad: the middle of a tensor, or a tensor in the middle of zeros."""

from __future__ import annotations

from functools import partial

import numpy as np

from dagexec.core.dtypes import STRING
from dagexec.core.gradient import not_differentiable
from dagexec.core.onnx_name import OnnxName
from dagexec.core.operator import Operator, Step, in_sequence, nothing_to_do
from dagexec.core.registry import new_operator
from dagexec.core.schema import OperatorCall, TensorType
from dagexec.ops.base.integers import integers_of
from dagexec.ops.families.shape.reshaping import copy_cost, distinct_axes


def infer_center_crop_pad(call: OperatorCall) -> list[TensorType]:
    """The sizes in input 1, for all axes or for `axes`. Raises ShapeError unless there is one for each."""
    shape = list(call.inputs[0].shape)
    axes = distinct_axes(call, "axes", len(shape)) if "axes" in call.arguments else tuple(range(len(shape)))
    sizes = integers_of(call, 1)
    if len(sizes) != len(axes) or min(sizes, default=0) < 0:
        raise call.fail(f"expected a size of at least 0 for each of {len(axes)} axes, found {list(sizes)}")
    for axis, size in zip(axes, sizes, strict=True):
        shape[axis] = size
    return [TensorType(tuple(shape), call.inputs[0].meta)]


@new_operator(
    "CenterCropPad",
    infer=infer_center_crop_pad,
    doc="X cut or padded with zeros to the sizes in input 1, in the middle of each axis; where that is between two "
    "places, one more is padded at the end, and one more cut off there. (dagexec's own, for ONNX.)",
    input_names=("X", "shape"),
    output_names=("Y",),
    args={"axes": "the axes that the sizes are of (default: all)"},
    cost=copy_cost,
    value_inputs=(1,),
    onnx=(OnnxName("CenterCropPad", 18, {"axes": "axes"}),),
)
class CenterCropPad(Operator):
    """A tensor brought to a size around its middle."""

    reads_strided = writes_strided = True

    def prepare(self) -> Step:
        """Zeros where something is padded, and one copy."""
        x, y = self.x(0), self.y(0)
        pairs = list(zip(x.shape, y.shape, strict=True))
        source = tuple(slice(start := max(0, a - b) // 2, start + min(a, b)) for a, b in pairs)
        target = tuple(slice(start := max(0, b - a) // 2, start + min(a, b)) for a, b in pairs)
        zero = b"" if self.input(0).meta is STRING else 0
        pads = any(b > a for a, b in pairs)
        return in_sequence([partial(y.fill, zero) if pads else nothing_to_do, partial(np.copyto, y[target], x[source])])


not_differentiable("nothing in dagexec trains through it: use Slice and Pad", "CenterCropPad")
