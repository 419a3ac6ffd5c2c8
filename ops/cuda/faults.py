"""Values that only a run can check, such as indices, on CUDA: kernels set a word, and who wants to know asks for it.

The host raises before anything is written. A kernel cannot: it never reads or writes out of bounds, gives zeros for
what a bad index picks (or adds nothing), and sets the operator's fault word. `CheckedOperator.check` reads the word,
for which it waits for the device, and raises the host's error.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from dagexec.ops.cuda.constants import uploaded
from dagexec.ops.cuda.operator import Array, CudaOperator
from dagexec.ops.index import check_indices


class CheckedOperator(CudaOperator):
    """An operator whose kernels check values that they read."""

    _fault: Array | None = None
    _explain: Callable[[], object] | None = None

    def fault_word(self, explain: Callable[[], object]) -> Array:
        """The word, an int32 that is 0; `explain` raises the error of the host, if what it reads now is wrong still."""
        word = uploaded(self, np.zeros(1, np.int32))
        self._fault, self._explain = word, explain
        return word

    def index_fault_word(self, indices: Array, low: int, high: int) -> Array:
        """The word for a kernel that wants `indices` in [low, high)."""
        return self.fault_word(partial(self._check_now, indices, low, high))

    def check(self) -> None:
        """Raise what the host would, if a run since the last check met a value that is wrong.

        Waits for what is on the calling thread's current stream. Where the values were replaced by right ones since, it
        is an IndexError that says only that there was one.
        """
        if self._fault is None or self._explain is None:
            return
        found, word = np.zeros(1, np.int32), self._fault
        self.context.copy_within(found, word)
        if not found[0]:
            return
        self.context.copy_within(word, np.zeros(1, np.int32))
        self._explain()
        raise IndexError(f"{self.label}: an index was out of range")

    def _check_now(self, indices: Array, low: int, high: int) -> None:
        check_indices(self.fetched(indices), low, high, self.label)

    def fetched(self, array: Array) -> Array:
        """A copy on the host."""
        host = np.empty(array.shape, array.dtype)
        self.context.copy_within(host, array)
        return host
