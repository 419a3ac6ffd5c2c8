"""CudaOperator: the base of operators on CUDA devices.

Its `x` and `y` are `cupy.ndarray`s, of which only pointer, shape, dtype and strides are used: what is computed is
computed by our own kernels, cuBLAS and cuDNN. CuPy's functions would allocate and choose streams on their own.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy.typing as npt

from dagexec.core import dtypes
from dagexec.core.operator import MemorySource, Operator, Prepared, Step
from dagexec.core.schema import OperatorCall, TensorType
from dagexec.devices.cuda.current import current
from dagexec.devices.cuda.kernels import BLOCK, Launch, compiled
from dagexec.devices.cuda.prelude import c_type
from dagexec.devices.cuda.runtime import CudaRuntime

Array = npt.NDArray[Any]


def c_type_of(array: Array) -> str:
    """The C type of an array's elements, as kernels see it."""
    return c_type(dtypes.from_numpy(array.dtype))


class CudaOperator(Operator):
    """An operator on a CUDA device. `prepare` is called with that device current."""

    @property
    def device_index(self) -> int:
        """N of `cuda:N`."""
        return self.runtime.device.index

    def bind(
        self,
        types: Sequence[TensorType] | None,
        *,
        as_view: bool = False,
        placed: Collection[int] = (),
        memory: MemorySource | None = None,
        call: OperatorCall | None = None,
    ) -> Prepared:
        assert isinstance(self.runtime, CudaRuntime)
        with self.runtime.guard():
            return super().bind(types, as_view=as_view, placed=placed, memory=memory, call=call)

    def host_value(self, index: int) -> Array:
        """See Operator: a copy, made after what computes the values; within a run the host waits for its stream."""
        found = self.input(index).fetch()
        if current.stream is not None:
            current.stream.synchronize()
        return found

    def fetch_now(self, destination: Array, source: Array) -> None:
        """Copy an array of the device to one of the host; within a run the host waits for its stream."""
        self.runtime.copy_now(destination, source)
        if current.stream is not None:
            current.stream.synchronize()

    def launch(
        self,
        name: str,
        source: str,
        arguments: Sequence[Any],
        *,
        elements: int | None = None,
        blocks: int | tuple[int, int, int] | None = None,
        threads: int = BLOCK,
        shared_bytes: int = 0,
        **types: str,
    ) -> Step:
        """A step that launches kernel `name` of `source`; see `kernels.compiled` and `kernels.Launch`."""
        function = compiled(name, source, self.device_index, **types)
        return Launch(
            function,
            arguments,
            elements=elements,
            blocks=blocks,
            threads=threads,
            shared_bytes=shared_bytes,
            device=self.device_index,
        )
