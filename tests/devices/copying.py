"""Copies of whole tensors, within a device or across two."""

from __future__ import annotations

from dagexec.core.runtime import copy_between
from dagexec.core.tensor import Tensor


def copy_tensor(destination: Tensor, source: Tensor) -> None:
    """Copy shape, dtype and values. Raises DeviceError for devices of two kinds of which neither is the host."""
    copy = copy_between(destination.runtime, source.runtime)
    copy(destination.resize(source.shape, source.meta), source.array)
