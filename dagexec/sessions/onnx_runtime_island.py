"""Islands that onnxruntime computes. One session serves all shapes, and any number of threads at once."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dagexec.core.profiled import Profiled, StepPart
from dagexec.platform.forking import without_fork
from dagexec.platform.lazy import LazyModule
from dagexec.sessions.island import Array, BoundIsland, IslandModel, IslandSession
from dagexec.sessions.onnx_runtime import limit_memory, session_options, shared_value
from dagexec.sessions.unsafe_nodes import check_for_onnxruntime

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
        self._content = _with_initializers(model)
        self.inputs = [value.name for value in model.inputs]
        self.outputs = [value.name for value in model.message.graph.output]
        self._values = [shared_value(array) for array in model.constants.values()]
        self.session = self._new_session(session_options(model.threads))

    def bound(self, inputs: Sequence[Array], outputs: Sequence[Array]) -> BoundIsland:
        return _Bound(self, inputs, outputs)

    def profiling_session(self, folder: str) -> Any:
        """A session that writes its profile to a file in `folder` when it is told to end it."""
        options = session_options(self._model.threads)
        options.enable_profiling = True
        options.profile_file_prefix = f"{folder}/profile"
        return self._new_session(options)

    def _new_session(self, options: Any) -> Any:
        if self._values:
            options.add_external_initializers(list(self._model.constants), self._values)
        with without_fork():
            return onnxruntime.InferenceSession(self._content, options, providers=["CPUExecutionProvider"])


class _Bound(BoundIsland):
    def __init__(self, owner: OnnxRuntimeIsland, inputs: Sequence[Array], outputs: Sequence[Array]) -> None:
        super().__init__()
        self._owner = owner
        self._inputs, self._outputs = list(inputs), list(outputs)
        self._session = owner.session
        self._binding = self._bound_to(owner.session)

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
        return partial(self._profiled, folder, self._owner.profiling_session(folder.name))

    def _profiled(self, folder: tempfile.TemporaryDirectory[str], session: Any) -> Sequence[StepPart]:
        binding = self._bound_to(session)
        with folder:
            start = time.perf_counter_ns()
            with without_fork():
                session.run_with_iobinding(binding)
            return list(_parts(Path(session.end_profiling()), start))


def _with_initializers(model: IslandModel) -> bytes:
    """The message with its constants as initializers whose data it does not have."""
    message = onnx.ModelProto()
    message.CopyFrom(model.message)
    inputs = [value for value in message.graph.input if value.name not in model.constants]
    for value in message.graph.input:
        if value.name in model.constants:
            message.graph.initializer.append(_without_data(value, model.constants[value.name]))
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
