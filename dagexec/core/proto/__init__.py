"""The protobuf messages, generated from `dagexec.proto` by `make proto`. Wire-compatible with Caffe2's files."""

import copyreg
from typing import Any, cast

from google.protobuf.message import Message

from dagexec.core.proto.dagexec_pb2 import (
    Argument,
    BlobProto,
    DeviceOption,
    ExecutionStep,
    MetaNetDef,
    NetDef,
    OperatorDef,
    PlanDef,
    TensorProto,
    TensorProtos,
    TensorShape,
)

__all__ = [
    "Argument",
    "BlobProto",
    "DeviceOption",
    "ExecutionStep",
    "MetaNetDef",
    "NetDef",
    "OperatorDef",
    "PlanDef",
    "TensorProto",
    "TensorProtos",
    "TensorShape",
    "missing_fields",
]


def missing_fields(message: Message) -> str:
    """The required fields that a message lacks, as text; empty when it is complete. Such a one cannot be written."""
    if message.IsInitialized():
        return ""
    return ", ".join(cast(Any, message).FindInitializationErrors()[:8])


def _net(data: bytes) -> NetDef:
    return NetDef.FromString(data)


copyreg.pickle(NetDef, lambda net: (_net, (net.SerializePartialToString(),)))  # the generated class is in no module
