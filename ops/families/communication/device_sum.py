"""NCCLAllreduce and NCCLBroadcast: tensors that one net has on several devices. The names are Caffe2's."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from dagexec.core.gradient import no_gradient
from dagexec.core.operator import Operator, Step, in_sequence
from dagexec.core.registry import new_operator, operator
from dagexec.core.schema import UNBOUNDED, OperatorCall, OpSchema, TensorType, one_to_one
from dagexec.core.tensor import Tensor
from dagexec.core.traits import Crossing
from dagexec.errors import ArgumentError


def infer_device_sum(call: OperatorCall) -> Sequence[TensorType]:
    """Each output is like its input; all are alike. Raises ShapeError."""
    call.require_same_type()
    if len(call.definition.output) != len(call.inputs):
        found = len(call.definition.output)
        raise call.fail(f"expected an output for each of {len(call.inputs)} inputs, found {found}")
    for index in range(1, len(call.inputs)):
        call.require_shape(index, call.inputs[0].shape, "that of the first input")
    return call.inputs


DEVICE_SUM = OpSchema(
    "NCCLAllreduce",
    inputs=(1, UNBOUNDED),
    outputs=(1, UNBOUNDED),
    infer=infer_device_sum,
    doc="Y_i = X0 + X1 + ..., on the device of X_i. On CUDA by NCCL; on the host the sum is made from left to right.",
    input_names=("X0, X1, ... (each on a device of its own)",),
    output_names=("Y0, Y1, ... (each may overwrite its X)",),
    inplace=one_to_one,
    crossing=Crossing.IN_PLACE,
)


class DeviceSum(Operator):
    """Inputs and outputs stay on their devices, whichever the operator's own is."""

    crosses_devices = True

    def output(self, index: int) -> Tensor:
        """Output `index`, made where its input is."""
        return self.output_blobs[index].tensor(self.input(index).device)


@operator(DEVICE_SUM)
class HostDeviceSum(DeviceSum):
    """On the host."""

    def prepare(self) -> Step:
        """The sum, then a copy for each output."""
        inputs = [self.x(index) for index in range(len(self.input_blobs))]
        outputs = [self.y(index) for index in range(len(self.output_blobs))]
        total = self.scratch(inputs[0].shape, inputs[0].dtype)

        def run() -> None:
            np.copyto(total, inputs[0])
            for x in inputs[1:]:
                np.add(total, x, out=total)
            for y in outputs:
                np.copyto(y, total)

        return run


def infer_device_broadcast(call: OperatorCall) -> Sequence[TensorType]:
    """As of the sum. Raises ArgumentError for a root that is no input."""
    root = call.arguments.int("root", 0)
    if not 0 <= root < len(call.inputs):
        raise ArgumentError(f"{call.label}: 'root' must be an input, 0 to {len(call.inputs) - 1}, found {root}")
    return infer_device_sum(call)


@new_operator(
    "NCCLBroadcast",
    inputs=(1, UNBOUNDED),
    outputs=(1, UNBOUNDED),
    infer=infer_device_broadcast,
    doc="Y_i = X_root, on the device of X_i. The copies are made by the host.",
    input_names=("X0, X1, ... (each on a device of its own)",),
    output_names=("Y0, Y1, ... (each may overwrite its X)",),
    args={"root": "which of the inputs is copied (default 0)"},
    inplace=one_to_one,
)
class HostDeviceBroadcast(Operator):
    """On the host."""

    def prepare(self) -> Step:
        """The root's first, as its output may be another's input."""
        x = self.x(self.arguments.int("root", 0))
        copy = self.scratch(x.shape, x.dtype)
        outputs = [self.y(index) for index in range(len(self.output_blobs))]
        return in_sequence([partial(np.copyto, copy, x), *(partial(np.copyto, y, copy) for y in outputs)])


no_gradient("NCCLAllreduce", "NCCLBroadcast")
