"""Islands that onnxruntime computes: one session for all shapes, or one of its own for the first shapes.

Known sizes let it fold what computes with them, but choose other kernels as well. A session serves any number of
threads at once.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dagexec.core.profiled import Profiled, StepPart
from dagexec.foreign.island import Array, BoundIsland, IslandModel, IslandSession, Shapes
from dagexec.foreign.onnx_runtime import limit_memory, session_options, shared_value
from dagexec.foreign.unsafe_nodes import check_for_onnxruntime
from dagexec.platform.forking import ProcessLock, without_fork
from dagexec.platform.lazy import LazyModule

if not TYPE_CHECKING:
    onnx = LazyModule("onnx")
    onnxruntime = LazyModule("onnxruntime")
else:
    import onnx
    import onnxruntime

_KERNEL = "_kernel_time"  # what the profile appends to the name of a node


class OnnxRuntimeIsland(IslandSession):
    """An InferenceSession whose larger initializers are arrays of ours."""

    runtime = "onnxruntime"

    def __init__(self, model: IslandModel) -> None:
        """Raises ImportError where the package is not installed, and what it raises for what it cannot run."""
        super().__init__()
        limit_memory()
        check_for_onnxruntime(model.message)
        self._model = model
        self.inputs = [value.name for value in model.inputs]
        self.outputs = [value.name for value in model.message.graph.output]
        self._values = [shared_value(array) for array in model.constants.values()]
        self._first: Shapes | None = None
        self._sessions: dict[Shapes | None, Any] = {}
        self._turn = ProcessLock()

    def bound(self, inputs: Sequence[Array], outputs: Sequence[Array]) -> BoundIsland:
        with self._turn.own:
            shapes: Shapes | None = tuple(array.shape for array in inputs)
            if self._first is None:
                self._first = shapes
            if not self._model.specialized or shapes != self._first:
                shapes = None
            session = self._sessions.get(shapes)
            if session is None:
                session = self._sessions[shapes] = self._new_session(shapes, session_options(self._model.threads))
        return _Bound(self, session, shapes, inputs, outputs)

    def profiling_session(self, shapes: Shapes | None, folder: str) -> Any:
        """A session that writes its profile to a file in `folder` when it is told to end it."""
        options = session_options(self._model.threads)
        options.enable_profiling = True
        options.profile_file_prefix = f"{folder}/profile"
        return self._new_session(shapes, options)

    def _new_session(self, shapes: Shapes | None, options: Any) -> Any:
        """A session for inputs of these shapes; None: of any that the message allows."""
        if self._values:
            options.add_external_initializers(list(self._model.constants), self._values)
        content = _with_initializers(self._model, shapes)
        with without_fork():
            return onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])


class _Bound(BoundIsland):
    def __init__(
        self,
        owner: OnnxRuntimeIsland,
        session: Any,
        shapes: Shapes | None,
        inputs: Sequence[Array],
        outputs: Sequence[Array],
    ) -> None:
        super().__init__()
        self._owner, self._session, self._shapes = owner, session, shapes
        self._inputs, self._outputs = list(inputs), list(outputs)
        self._binding = self._bound_to(session)

    def __call__(self) -> None:
        with without_fork():
            self._session.run_with_iobinding(self._binding)

    def set_input(self, index: int, array: Array) -> None:
        self._inputs[index] = array
        self._binding.bind_ortvalue_input(self._owner.inputs[index], shared_value(array))

    def set_output(self, index: int, array: Array) -> None:
        self._outputs[index] = array
        self._binding.bind_ortvalue_output(self._owner.outputs[index], shared_value(array))

    def _bound_to(self, session: Any) -> Any:
        binding = session.io_binding()
        for name, array in zip(self._owner.inputs, self._inputs, strict=True):
            binding.bind_ortvalue_input(name, shared_value(array))
        for name, array in zip(self._owner.outputs, self._outputs, strict=True):
            binding.bind_ortvalue_output(name, shared_value(array))
        return binding

    def profiling(self) -> Profiled:
        folder = tempfile.TemporaryDirectory(prefix="dagexec-profile-")
        return partial(self._profiled, folder, self._owner.profiling_session(self._shapes, folder.name))

    def _profiled(self, folder: tempfile.TemporaryDirectory[str], session: Any) -> Sequence[StepPart]:
        binding = self._bound_to(session)
        with folder:
            start = time.perf_counter_ns()
            with without_fork():
                session.run_with_iobinding(binding)
            return list(_parts(Path(session.end_profiling()), start))


def _with_initializers(model: IslandModel, shapes: Shapes | None) -> bytes:
    """The message with its constants as initializers whose data it does not have, and inputs of these shapes."""
    message = onnx.ModelProto()
    message.CopyFrom(model.message)
    inputs = [value for value in message.graph.input if value.name not in model.constants]
    for value in message.graph.input:
        if value.name in model.constants:
            message.graph.initializer.append(_without_data(value, model.constants[value.name]))
    for value, shape in zip(inputs, shapes or (), strict=shapes is not None):
        for dim, size in zip(value.type.tensor_type.shape.dim, shape, strict=True):
            dim.dim_value = size
    del message.graph.input[:]
    message.graph.input.extend(inputs)
    content: bytes = message.SerializeToString()
    return content


def _without_data(value: onnx.ValueInfoProto, array: Array) -> onnx.TensorProto:
    tensor = onnx.TensorProto(
        name=value.name, data_type=value.type.tensor_type.elem_type, data_location=onnx.TensorProto.EXTERNAL
    )
    tensor.dims.extend(array.shape)
    tensor.external_data.add(key="location", value="given")
    tensor.external_data.add(key="length", value=str(array.nbytes))
    return tensor


def _parts(path: Path, start: int) -> Iterator[StepPart]:
    """The nodes of the one run that a profile tells of, which began at `start`."""
    events: list[Mapping[str, Any]] = json.loads(path.read_bytes())
    run = next((event for event in events if event.get("name") == "model_run"), None)
    if run is None:
        return
    offset = start - run["ts"] * 1000
    for event in sorted(events, key=lambda event: float(event.get("ts", 0))):
        if event.get("cat") == "Node" and event["name"].endswith(_KERNEL):
            begun = offset + event["ts"] * 1000
            kind = event.get("args", {}).get("op_name", "")
            label = f"onnxruntime {kind} {event['name'].removesuffix(_KERNEL)!r}"
            yield StepPart(label, begun, begun + event["dur"] * 1000)
