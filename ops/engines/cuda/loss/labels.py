"""Class labels on CUDA: one that is out of range makes what depends on it NaN or 0, and fails the run."""

from __future__ import annotations

from functools import partial

from dagexec.errors import FeedError
from dagexec.ops.engines.cuda.base.faults import CheckedOperator
from dagexec.ops.engines.cuda.base.operator import Array
from dagexec.ops.families.loss.labels import check_labels

LABELS = r"""
template <class I> __device__ inline bool is_class(I label, i64 classes, int* fault) {
    if (label >= 0 && label < classes) return true;
    atomicExch(fault, 1);
    return false;
}
"""
"""`is_class(label, classes, fault)`: a label is in range; otherwise the fault word is set."""


class LabeledOperator(CheckedOperator):
    """An operator that reads class labels on the device.

    A label out of range is neither read nor written at; the run ends with the host's error.
    """

    inputs_checked = (1,)

    def label_fault(self, index: int, classes: int, least: int = 0) -> Array:
        """The word that kernels set when a label of input `index` is not in [least, classes)."""
        name = self.definition.input[index]
        otherwise = FeedError(f"{self.label}: a label of blob {name!r} was out of range: expected 0 to {classes - 1}")
        return self.fault_word(partial(self._check_labels, self.x(index), classes, least, name), otherwise)

    def _check_labels(self, labels: Array, classes: int, least: int, name: str) -> None:
        check_labels(self.fetched(labels), classes, least, self.label, name)
