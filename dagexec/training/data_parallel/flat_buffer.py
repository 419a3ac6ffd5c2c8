"""FlatBuffer: the values of several tensors as flat arrays on the host, one for each element type."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dagexec.core.device import CPU
from dagexec.core.tensor import Tensor
from dagexec.training.data_parallel.pairing import merges_of

Array = npt.NDArray[Any]


class FlatBuffer:
    """Memory for the values of some tensors.

    Attributes:
        arrays: the flat arrays, always in the same order.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        """The tensors keep their shapes and element types from now on."""
        sizes: dict[np.dtype[Any], int] = {}
        for tensor in tensors:
            dtype = np.dtype(tensor.meta.numpy)
            sizes[dtype] = sizes.get(dtype, 0) + tensor.array.size
        flat = {dtype: np.empty(size, dtype) for dtype, size in sizes.items()}
        ends = dict.fromkeys(flat, 0)
        self.arrays: tuple[Array, ...] = tuple(flat.values())
        self._parts: list[tuple[Tensor, Array]] = []
        for tensor in tensors:
            dtype = np.dtype(tensor.meta.numpy)
            start = ends[dtype]
            ends[dtype] = start + tensor.array.size
            self._parts.append((tensor, flat[dtype][start : ends[dtype]].reshape(tensor.shape)))

    def read(self) -> None:
        """Take the values from the tensors."""
        for tensor, part in self._parts:
            np.copyto(part, tensor.array if tensor.device == CPU else tensor.fetch())

    def write(self) -> None:
        """Give the values to the tensors."""
        for tensor, part in self._parts:
            tensor.feed(part)


class MergedMicroBatches:
    """Sums of the gradients of micro-batches, in the order that `pairing.merges_of` says."""

    def __init__(self, buffer: FlatBuffer, count: int) -> None:
        """`buffer` gets the gradients of each of `count` micro-batches in turn, and in the end their sum."""
        self._buffer = buffer
        self._count = count
        self._kept: dict[int, tuple[Array, ...]] = {}

    def add(self, micro_batch: int) -> None:
        """Add the micro-batch whose gradients are in the buffer now."""
        merges = merges_of(micro_batch, self._count)
        for level in merges.levels:
            for array, kept in zip(self._buffer.arrays, self._kept[level], strict=True):
                np.add(kept, array, out=array)
        if merges.keep is not None:
            if merges.keep not in self._kept:
                self._kept[merges.keep] = tuple(np.empty_like(array) for array in self._buffer.arrays)
            for array, kept in zip(self._buffer.arrays, self._kept[merges.keep], strict=True):
                np.copyto(kept, array)
