"""Sessions of onnxruntime: on the processor, in the thread that calls, in memory that is limited to what was there.

Inputs and outputs are bound to arrays without copies. What its Python interface shows of an element type that NumPy
has not is read through the address of the values.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from dagexec.core import dtypes
from dagexec.foreign.session import Array, ForeignSession
from dagexec.foreign.unsafe_nodes import check_for_onnxruntime
from dagexec.platform.forking import without_fork
from dagexec.platform.host_memory import limits
from dagexec.platform.lazy import LazyModule

if not TYPE_CHECKING:
    onnx = LazyModule("onnx")
    onnxruntime = LazyModule("onnxruntime")
else:
    import onnx
    import onnxruntime

_BY_ONNX = {meta.onnx: meta for meta in dtypes.HELD_TYPES}
_PACKED = tuple(meta for meta in dtypes.NARROW_TYPES if meta.bits < 8)  # in their memory, not in ours
_SHARE = 0.9  # of the memory that is left when the first session is opened


class OnnxRuntimeSession(ForeignSession):
    """An InferenceSession."""

    runtime = "onnxruntime"

    def __init__(self, model: onnx.ModelProto, threads: int) -> None:
        """Raises ImportError where the package is not installed, and what it raises for a message it cannot run.

        UnsupportedOperatorError is raised for what it would do harm with.
        """
        super().__init__([value.name for value in model.graph.input], [value.name for value in model.graph.output])
        limit_memory()
        check_for_onnxruntime(model)
        with without_fork():
            self._session = onnxruntime.InferenceSession(
                model.SerializeToString(), session_options(threads), providers=["CPUExecutionProvider"]
            )
        kinds = [value.type for value in (*self._session.get_inputs(), *self._session.get_outputs())]
        if narrow := [kind for kind in kinds if any(f"({meta.name})" in kind for meta in _PACKED)]:
            raise NotImplementedError(f"values of {narrow[0]} cannot be given to it, or taken from it")
        self._plain = all(kind.startswith("tensor(") and kind != "tensor(string)" for kind in kinds)

    def run(self, values: Sequence[object]) -> list[object]:
        if not self._plain:
            with without_fork():
                return list(self._session.run(None, dict(zip(self.inputs, values, strict=True))))
        binding = self._session.io_binding()
        for name, value in zip(self.inputs, values, strict=True):
            assert isinstance(value, np.ndarray)
            binding.bind_ortvalue_input(name, shared_value(value))
        for name in self.outputs:
            binding.bind_output(name)
        self._run_bound(binding)
        return [_copied(value) for value in binding.get_outputs()]

    def bound(self, inputs: Sequence[Array], outputs: Sequence[Array]) -> Callable[[], object]:
        binding = self._session.io_binding()
        for name, array in zip(self.inputs, inputs, strict=True):
            binding.bind_ortvalue_input(name, shared_value(array))
        for name, array in zip(self.outputs, outputs, strict=True):
            binding.bind_ortvalue_output(name, shared_value(array))
        return partial(self._run_bound, binding)

    def _run_bound(self, binding: Any) -> None:
        with without_fork():
            self._session.run_with_iobinding(binding)


def session_options(threads: int) -> Any:
    """Options of a session on so many threads, none of which waits for work busily."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.execution_mode = onnxruntime.ExecutionMode.ORT_SEQUENTIAL
    options.log_severity_level = 4  # what it logs is in its exceptions, too
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.add_session_config_entry("session.use_env_allocators", "1")
    return options


@functools.cache
def limit_memory() -> None:
    """Have all sessions of this process take memory from one arena, which refuses to grow beyond a limit."""
    most = int(_SHARE * min(limit.left for limit in limits()))
    place = onnxruntime.OrtMemoryInfo(
        "Cpu", onnxruntime.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, onnxruntime.OrtMemType.DEFAULT
    )
    settings = {"max_mem": most, "arena_extend_strategy": 1}  # by what is asked for, not by powers of two
    onnxruntime.create_and_register_allocator(place, onnxruntime.OrtArenaCfg(settings))


def shared_value(array: Array) -> Any:
    """The array as onnxruntime's value, on the same memory."""
    number = dtypes.from_numpy(array.dtype).onnx
    return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(array, number)


def _copied(value: Any) -> Array:
    """The content of a tensor of onnxruntime's."""
    shape, meta = tuple(value.shape()), _BY_ONNX[value.element_type()]
    nbytes = value.tensor_size_in_bytes()
    memory = (ctypes.c_uint8 * nbytes).from_address(value.data_ptr()) if nbytes else b""
    return np.frombuffer(memory, np.uint8).view(meta.numpy).reshape(shape).copy()
