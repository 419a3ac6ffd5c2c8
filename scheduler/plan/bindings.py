"""Bindings: where the tensors of a net were when its steps were prepared, since the steps keep the arrays.

A net may be prepared for several shapes; its tensors are at the arrays of one preparation at a time.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy.typing as npt

from dagexec.core.blob import Blob
from dagexec.core.constant import Constant
from dagexec.core.tensor import Storage, Tensor, binding_epoch
from dagexec.platform.records import dataclass

Array = npt.NDArray[Any]

MIN_BYTES_BOUND = 1 << 15
"""The least size of inputs and outputs that a caller's array replaces; smaller ones are copied faster than rebound."""


@dataclass(frozen=True)
class Binding:
    """A blob, and the tensor and array that it had when the steps were prepared.

    A constant's array is not kept: steps that read it keep it themselves, and for others it may go.
    """

    blob: Blob
    tensor: Tensor
    array: Array | None
    constant: Constant | None
    storage: Storage | None
    is_view: bool

    @classmethod
    def of(cls, blob: Blob, tensor: Tensor) -> Binding:
        """The binding of `blob`, which holds `tensor`, as it is now."""
        constant = tensor.constant
        array = tensor.array if constant is None else None
        return cls(blob, tensor, array, constant, tensor.storage(), tensor.is_view)

    def holds(self) -> bool:
        """True while the blob still has that tensor, and the tensor that array."""
        if self.blob.value is not self.tensor:
            return False
        if self.array is None:
            return self.tensor.constant is self.constant
        return self.tensor.current_array() is self.array

    def is_packed(self) -> bool:
        """True when both that array and the one the tensor has now are packed; a constant's was not kept."""
        return self.array is not None and bool(self.array.flags.c_contiguous) and self.tensor.is_packed

    def may_be_written(self) -> bool:
        """True when the array is the tensor's own to write: neither adopted from a caller nor another tensor's."""
        return not self.is_view and (self.storage is None or self.storage.writable)

    def put_back(self) -> None:
        """Give the tensor that array again, if the blob still holds the tensor."""
        assert self.array is not None
        self.tensor.rebind(self.array, self.storage, is_view=self.is_view)


def _found(blobs: Iterable[Blob]) -> list[Binding]:
    return [
        Binding.of(blob, tensor) for blob in blobs if isinstance(tensor := blob.value, Tensor) and not tensor.is_empty
    ]


class Bindings:
    """The bindings of the blobs that the steps of a net read and write.

    Attributes:
        inputs: of blobs that exist before the net runs.
        outputs: of blobs that it writes.
    """

    def __init__(self, inputs: Iterable[Blob], outputs: Iterable[Blob]) -> None:
        """The bindings of those blobs that hold a tensor, as they are now."""
        self._epoch = binding_epoch()
        self.inputs = _found(inputs)
        self.outputs = _found(outputs)

    def in_place(self) -> bool:
        """True when every tensor still has its array. Cheap while nothing changed anywhere."""
        epoch = binding_epoch()
        if self._epoch == epoch:
            return True
        if all(binding.holds() for binding in self.inputs) and all(binding.holds() for binding in self.outputs):
            self._epoch = epoch
            return True
        return False

    def restore(self, own: frozenset[int]) -> bool:
        """Bring the tensors back to these arrays, with the input values they have now.

        Only tensors of blobs whose `id` is in `own` may be rebound, since others may be in use elsewhere, and only from
        a packed array to a packed one, since another layout was requested. Returns False, with nothing changed, if that
        is not enough.
        """
        moved = [binding for binding in self.inputs if not binding.holds()]
        away = [binding for binding in self.outputs if not binding.holds()]
        if any(binding.blob.value is not binding.tensor or not binding.is_packed() for binding in (*moved, *away)):
            return False
        if any(
            id(binding.blob) not in own
            or not binding.may_be_written()
            or binding.array is None
            or binding.array.shape != binding.tensor.shape
            for binding in moved
        ):
            return False
        for binding in moved:
            assert binding.array is not None
            if binding.storage is None or binding.tensor.storage() is not binding.storage:  # else it begins there, too
                binding.tensor.runtime.copy_now(binding.array, binding.tensor.array)
            binding.put_back()
        for binding in away:
            binding.put_back()
        self._epoch = binding_epoch()
        return True
