"""Values that only a run can check, such as indices, on CUDA: kernels set a word of the host, which a run's end reads.

The host's operators raise before anything is written. A kernel cannot: it never reads or writes out of bounds, gives
zeros for what a bad index picks (or adds nothing), and sets a fault word. When a run's work is done its net calls
`CheckedOperator.run_check`, which then gives the error that the host raises. The word is in pinned memory, so a good
run costs a plain read of the host, and nothing on the device.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from dagexec.core import dtypes
from dagexec.core.operator import Step
from dagexec.devices.cuda.pinned_flags import PinnedFlag, PinnedFlags
from dagexec.devices.cuda.runtime import CudaRuntime
from dagexec.ops.engines.cuda.base.operator import Array, CudaOperator, c_type_of
from dagexec.ops.families.index.indexing import check_indices

_CHECK = r"""
extern "C" __global__ void check_values(const J* values, int* fault, K low, K high, i64 n) {
    FOR_EACH(i, n) {
        const K value = (K)get(values, i);
        if (!(value >= low && value < high)) atomicExch(fault, 1);
    }
}
"""


class Fault:
    """What kernels of one prepared step tell by a word; it lives as long as they have the word.

    Attributes:
        word: not 0 after a run that met a wrong value.
        explain: raises the error of the host, if what it reads on the device now is wrong still.
        otherwise: the error when it is not.
    """

    __slots__ = ("__weakref__", "explain", "otherwise", "word")

    def __init__(self, word: PinnedFlag, explain: Callable[[], object], otherwise: Exception) -> None:
        self.word = word
        self.explain = explain
        self.otherwise = otherwise

    def error(self) -> Exception:
        """What the host would have raised."""
        try:
            self.explain()
        except Exception as error:
            return error
        return self.otherwise


class CheckedOperator(CudaOperator):
    """An operator whose kernels check values that they read."""

    _faults: tuple[weakref.ref[Fault], ...] = ()

    def fault_word(self, explain: Callable[[], object], otherwise: Exception) -> Array:
        """The word, an int32 that is 0, for kernels of the step that is prepared. See Fault for the arguments."""
        runtime = self.runtime
        assert isinstance(runtime, CudaRuntime)
        fault = Fault(runtime.once("host words", partial(PinnedFlags, runtime)).take(), explain, otherwise)
        self._faults = (*(known for known in self._faults if known() is not None), weakref.ref(fault))
        return fault.word.on_device(fault)

    def index_fault_word(self, indices: Array, low: int, high: int) -> Array:
        """The word for a kernel that wants `indices` in [low, high)."""
        explain = partial(self._check_indices, indices, low, high)
        return self.fault_word(explain, IndexError(f"{self.label}: an index was not in [{low}, {high})"))

    def index_check(self, indices: Array, low: int, high: int) -> Step:
        """A step that does nothing but check that `indices` are in [low, high)."""
        return self.values_check(indices, low, high, self.index_fault_word(indices, low, high))

    def values_check(self, values: Array, low: float, high: float, fault: Array) -> Step:
        """A step that does nothing but set `fault` unless low <= values < high; the limits are of the values' type."""
        limit = np.float64 if dtypes.from_numpy(values.dtype).is_float else np.int64
        arguments: list[Any] = [values, fault, limit(low), limit(high), np.int64(values.size)]
        kind = "double" if limit is np.float64 else "i64"
        return self.launch("check_values", _CHECK, arguments, elements=int(values.size), J=c_type_of(values), K=kind)

    def run_check(self) -> Exception | None:
        """See Operator."""
        error: Exception | None = None
        for known in self._faults:
            fault = known()
            if fault is not None and fault.word.value:
                if error is None:
                    assert isinstance(self.runtime, CudaRuntime)
                    with self.runtime.guard():
                        error = fault.error()
                fault.word.clear()
        return error

    def _check_indices(self, indices: Array, low: int, high: int) -> None:
        check_indices(self.fetched(indices), low, high, self.label)

    def fetched(self, array: Array) -> Array:
        """A copy on the host."""
        host = np.empty(array.shape, array.dtype)
        self.fetch_now(host, array)
        return host
