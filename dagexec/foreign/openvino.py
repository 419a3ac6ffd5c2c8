"""Islands that OpenVINO computes: compiled for the shapes of a run, in float32 wherever the operators are.

A compiled model runs once at a time, so each user compiles its own. The first shapes get a model for these alone,
which is the fastest, and all others together one for any.
"""

from __future__ import annotations

import ctypes
import functools
import os
import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from dagexec.core.profiled import Profiled, StepPart
from dagexec.foreign.island import Array, BoundIsland, IslandModel, IslandSession, Shapes, leave_behind
from dagexec.foreign.openvino_trial import may_crash, survive
from dagexec.platform.forking import without_fork
from dagexec.platform.lazy import LazyModule

if not TYPE_CHECKING:
    openvino = LazyModule("openvino")
else:
    import openvino


class OpenVinoIsland(IslandSession):
    """A model of OpenVINO whose larger constants are arrays of ours."""

    runtime = "openvino"

    def __init__(self, model: IslandModel) -> None:
        """Raises ImportError where the package is not installed, and what it raises for what it cannot read."""
        super().__init__()
        if _stranded:
            raise RuntimeError(
                "OpenVINO was in use when the process was forked, and can compute in the parent only: start the child "
                "anew (multiprocessing's spawn), or compile with islands of onnxruntime or none"
            )
        self._given = model
        with without_fork():
            self._model = _read(model)
        self._static_shapes: Shapes | None = None
        self._dynamic: Any = None

    def bound(self, inputs: Sequence[Array], outputs: Sequence[Array]) -> BoundIsland:
        shapes = tuple(array.shape for array in inputs)
        if self._static_shapes is None:
            self._static_shapes = shapes
        is_static = self._static_shapes == shapes
        if may_crash():
            survive(self._given, shapes, is_static=is_static)
        return _Bound(self, shapes if is_static else None, inputs, outputs)

    def compiled(self, shapes: Shapes | None, *, profile: bool = False) -> Any:
        """The model compiled for these shapes; None: for any."""
        if shapes is None and not profile and self._dynamic is not None:
            return self._dynamic
        with without_fork():
            model = self._model.clone()
            if shapes is not None:
                model.reshape({index: list(shape) for index, shape in enumerate(shapes)})
            found = _core().compile_model(model, "CPU", _settings(self._given.threads, profile))
        if shapes is None and not profile:
            self._dynamic = found
        return found


class _Bound(BoundIsland):
    def __init__(
        self,
        owner: OpenVinoIsland,
        shapes: Shapes | None,
        inputs: Sequence[Array],
        outputs: Sequence[Array],
    ) -> None:
        super().__init__()
        self._owner, self._shapes = owner, shapes
        self._inputs, self._outputs = list(inputs), list(outputs)
        self._request = self._bound_to(owner.compiled(shapes))

    def __call__(self) -> None:
        with without_fork():
            self._request.infer({}, share_outputs=True)

    def set_input(self, index: int, array: Array) -> None:
        self._inputs[index] = array
        self._request.set_input_tensor(index, _shared(array))

    def set_output(self, index: int, array: Array) -> None:
        self._outputs[index] = array
        self._request.set_output_tensor(index, _shared(array))

    def _bound_to(self, compiled: Any) -> Any:
        request = compiled.create_infer_request()
        for index, array in enumerate(self._inputs):
            request.set_input_tensor(index, _shared(array))
        for index, array in enumerate(self._outputs):
            request.set_output_tensor(index, _shared(array))
        return request

    def profiling(self) -> Profiled:
        return partial(_profiled, self._bound_to(self._owner.compiled(self._shapes, profile=True)))


def _profiled(request: Any) -> Sequence[StepPart]:
    """Its nodes, one after the other: OpenVINO tells how long each took, and not when."""
    begun = time.perf_counter_ns()
    with without_fork():
        request.infer({}, share_outputs=True)
    found = []
    for part in request.profiling_info:
        if part.status == openvino.ProfilingInfo.Status.EXECUTED:
            end = begun + round(part.real_time.total_seconds() * 1e9)
            found.append(StepPart(f"openvino {part.node_type} {part.node_name!r}", begun, end))
            begun = end
    return found


_stranded = False


@functools.cache
def _core() -> Any:
    return openvino.Core()


def _leave_core() -> None:
    """In a child: OpenVINO would wait for threads that stayed in the parent, whatever it is asked to do."""
    global _stranded
    if _core.cache_info().currsize:
        _stranded = True
        leave_behind(_core())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_core)


def _settings(threads: int, profile: bool) -> dict[str, object]:
    return {
        "PERFORMANCE_HINT": "LATENCY",
        "NUM_STREAMS": 1,
        "INFERENCE_NUM_THREADS": threads,
        "ENABLE_CPU_PINNING": False,
        "INFERENCE_PRECISION_HINT": "f32",
        "PERF_COUNT": profile,
    }


def _read(model: IslandModel) -> Any:
    """The message as a model of OpenVINO's, with the constants in place of inputs."""
    found = _core().read_model(model.message.SerializeToString())
    parameters = {parameter.friendly_name: parameter for parameter in found.get_parameters()}
    for name, array in model.constants.items():
        constant = openvino.op.Constant(_shared(array), shared_memory=True)
        for reader in list(parameters[name].output(0).get_target_inputs()):
            reader.replace_source_output(constant.output(0))
        found.remove_parameter(parameters[name])
    return found


def _shared(array: Array) -> Any:
    """The array as OpenVINO's tensor, on the same memory, which has to live as long as that."""
    return openvino.Tensor(array if array.flags.writeable else _writable(array), shared_memory=True)


def _writable(array: Array) -> Array:
    """The same memory without the mark that nobody writes to it, which OpenVINO takes for a reason to refuse it."""
    memory = (ctypes.c_uint8 * array.nbytes).from_address(array.ctypes.data)
    return np.frombuffer(memoryview(memory), array.dtype).reshape(array.shape)
