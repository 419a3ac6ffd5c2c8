"""Nets, operators and scopes under the names of `caffe2.python.core`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from dagexec.caffe2 import native as C
from dagexec.caffe2 import scope
from dagexec.caffe2.creation import CreateOperator
from dagexec.caffe2.creation import make_device_option as DeviceOption
from dagexec.caffe2.net import Net
from dagexec.caffe2.plans import ExecutionStep, Plan, add_nets_in_order, execution_step, to_execution_step
from dagexec.caffe2.references import BlobReference, GradientSlice, ScopedBlobReference, ScopedName, plain_gradient
from dagexec.caffe2.scope import CurrentDeviceScope, CurrentNameScope, DeviceScope, EmptyDeviceScope, NameScope
from dagexec.core.gradient import Gradient, SparseGradient
from dagexec.core.proto import DeviceOption as DeviceOptionMessage
from dagexec.core.proto import OperatorDef, TensorProto
from dagexec.core.registry import has_engine, is_registered, registered_operators
from dagexec.core.subnets import ONLY_IN_MESSAGES
from dagexec.frontend.caffe2_int8 import OPERATORS as INT8
from dagexec.training.backward import gradient_of_operator

__all__ = [
    "BlobReference",
    "C",
    "CreateOperator",
    "CurrentDeviceScope",
    "CurrentNameScope",
    "DataType",
    "DeviceOption",
    "DeviceScope",
    "EmptyDeviceScope",
    "ExecutionStep",
    "GlobalInit",
    "GradientRegistry",
    "GradientSlice",
    "IsGPUDeviceType",
    "IsOperator",
    "IsOperatorWithEngine",
    "NameScope",
    "Net",
    "Plan",
    "RefreshRegisteredOperators",
    "RegisteredOperators",
    "ScopedBlobReference",
    "ScopedName",
    "add_nets_in_order",
    "device_option_equal",
    "execution_step",
    "scope",
    "to_execution_step",
]

_GPU_KINDS = (1, 6)  # CUDA and HIP


class DataType:
    """The numbers of element types, for arguments such as `to=core.DataType.FLOAT`."""

    UNDEFINED = TensorProto.UNDEFINED
    FLOAT = TensorProto.FLOAT
    INT32 = TensorProto.INT32
    BYTE = TensorProto.BYTE
    STRING = TensorProto.STRING
    BOOL = TensorProto.BOOL
    UINT8 = TensorProto.UINT8
    INT8 = TensorProto.INT8
    UINT16 = TensorProto.UINT16
    INT16 = TensorProto.INT16
    INT64 = TensorProto.INT64
    FLOAT16 = TensorProto.FLOAT16
    DOUBLE = TensorProto.DOUBLE


def GlobalInit(args: Iterable[str]) -> bool:
    """Caffe2 reads its flags here. There are none in dagexec: nothing is done with `args`."""
    return True


def IsOperator(op_type: str) -> bool:
    """True when there is an operator of this type."""
    return is_registered(op_type) or op_type in ONLY_IN_MESSAGES or op_type in INT8


def IsOperatorWithEngine(op_type: str, engine: str) -> bool:
    """True when an operator of this type may be computed by this engine."""
    return is_registered(op_type) and (engine in ("", "DEFAULT") or has_engine(op_type, engine))


def RegisteredOperators() -> list[str]:
    """The types of all operators."""
    return registered_operators()


def RefreshRegisteredOperators() -> None:
    """Nothing: the operator types are looked up when they are asked for, so no list of them can be out of date."""


def IsGPUDeviceType(device_type: int) -> bool:
    """True for the numbers of CUDA and of HIP."""
    return device_type in _GPU_KINDS


def device_option_equal(first: DeviceOptionMessage, second: DeviceOptionMessage, ignore_node_name: bool = True) -> bool:
    """True when both name the same device."""
    same_node = ignore_node_name or first.node_name == second.node_name
    return same_node and (first.device_type, first.device_id) == (second.device_type, second.device_id)


class GradientRegistry:
    """The gradients of operators."""

    @staticmethod
    def GetGradientForOp(op: OperatorDef, g_output: Iterable[Any]) -> tuple[list[OperatorDef], list[Any]]:
        """The gradient operators of `op`, and the gradient of each of its inputs, or None.

        `g_output` has the gradient of each output, or None: a name, or a GradientSlice. Raises GradientError.
        """
        made = gradient_of_operator(op, [None if one is None else plain_gradient(one) for one in g_output])
        return list(made.operators), [_as_reference(one) for one in made.inputs]

    @staticmethod
    def GetBackwardPass(operators: Iterable[OperatorDef], ys: Any) -> tuple[list[OperatorDef], dict[str, Any]]:
        """The gradient operators of a list of operators, and the gradient of each blob that has one.

        `ys` are the losses, as for `Net.AddGradientOperators`. Raises GradientError.
        """
        net = Net("backward_pass")
        net.extend_ops(operators)
        forward = len(net.Proto().op)
        gradients = net.AddGradientOperators(ys)
        return list(net.Proto().op[forward:]), gradients


def _as_reference(made: Gradient | None) -> Any:
    if isinstance(made, SparseGradient):
        return GradientSlice(BlobReference(made.indices), BlobReference(made.values))
    return None if made is None else BlobReference(made)
