"""The protobuf messages, generated from `dagexec.proto` by `make proto`. Wire-compatible with Caffe2's files."""

from dagexec.core.proto.dagexec_pb2 import (
    Argument,
    BlobProto,
    DeviceOption,
    MetaNetDef,
    NetDef,
    OperatorDef,
    TensorProto,
    TensorProtos,
    TensorShape,
)

__all__ = [
    "Argument",
    "BlobProto",
    "DeviceOption",
    "MetaNetDef",
    "NetDef",
    "OperatorDef",
    "TensorProto",
    "TensorProtos",
    "TensorShape",
]
