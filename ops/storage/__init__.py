"""Operators on databases: what Save and Checkpoint write, Load reads, and TensorProtosDBInput feeds from."""

from dagexec.ops.storage import databases, loading, saving, tensor_input

__all__ = ["databases", "loading", "saving", "tensor_input"]
