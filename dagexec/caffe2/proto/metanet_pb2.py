"""The message of a predictor's file."""

from dagexec.core.proto.dagexec_pb2 import MetaNetDef

__all__ = ["MetaNetDef"]
