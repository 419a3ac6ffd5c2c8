"""The interface by which the onnx package and its test suite run models on any engine (`onnx.backend.base`).

import dagexec.onnx_backend as backend

prepared = backend.prepare(onnx.load("model.onnx"), "CPU", net_type="dag")
outputs = prepared.run([array])
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx.helper
from onnx.backend.base import Backend, BackendRep, namedtupledict

from dagexec.core.device import Device
from dagexec.core.runtime import runtime_of
from dagexec.errors import DagexecError, FeedError
from dagexec.executor.compile import compile
from dagexec.executor.executor import Executor

__all__ = ["DagexecBackend", "PreparedModel", "is_compatible", "prepare", "run_model", "run_node", "supports_device"]

Inputs = Sequence[Any] | Mapping[str, Any]


class PreparedModel(BackendRep):
    """A compiled model that takes its inputs in the graph's order.

    Attributes:
        executor: what runs it; close it when it is not needed any more.
    """

    def __init__(self, executor: Executor) -> None:
        self.executor = executor

    def run(self, inputs: Inputs, **_options: Any) -> tuple[Any, ...]:
        """The outputs in the graph's order, also by name. Strings are `str`, as in the onnx package.

        `inputs` are arrays in the order of the graph's inputs, or by name. Raises FeedError for too many, and what
        `Executor.run` raises.
        """
        names = list(self.executor.inputs)
        if not isinstance(inputs, Mapping):
            if len(inputs) > len(names):
                raise FeedError(f"{len(inputs)} inputs are given; the model has {len(names)}: {names}")
            inputs = dict(zip(names, inputs, strict=False))
        found = self.executor.run({name: _fed(value) for name, value in inputs.items()})
        outputs: tuple[Any, ...] = namedtupledict("Outputs", list(found))(*found.values())
        return outputs


class DagexecBackend(Backend):
    """dagexec as a backend of ONNX models. Further keywords are options of `dagexec.compile`."""

    @classmethod
    def is_compatible(cls, model: onnx.ModelProto, device: str = "CPU", **options: Any) -> bool:
        """True when `prepare` would succeed."""
        try:
            cls.prepare(model, device, **options).executor.close()
        except DagexecError:
            return False
        return True

    @classmethod
    def prepare(cls, model: onnx.ModelProto, device: str = "CPU", **options: Any) -> PreparedModel:
        """Compile a model. Raises what `dagexec.compile` raises."""
        return PreparedModel(compile(model, device=_device(device), **options))

    @classmethod
    def run_model(cls, model: onnx.ModelProto, inputs: Inputs, device: str = "CPU", **options: Any) -> tuple[Any, ...]:
        """Compile a model and run it once."""
        prepared = cls.prepare(model, device, **options)
        with prepared.executor:
            return prepared.run(inputs)

    @classmethod
    def run_node(
        cls,
        node: onnx.NodeProto,
        inputs: Inputs,
        device: str = "CPU",
        outputs_info: Sequence[tuple[np.dtype[Any], tuple[int, ...]]] | None = None,
        **options: Any,
    ) -> tuple[Any, ...]:
        """Run one node, of the newest operator set unless the option `opset_version` says another.

        `inputs` are arrays for the inputs that the node names; `outputs_info` is not needed.
        """
        names = [name for name in node.input if name]
        given = inputs if isinstance(inputs, Mapping) else dict(zip(names, inputs, strict=True))
        arrays = {name: np.asarray(value) for name, value in given.items()}
        feeds = [
            onnx.helper.make_tensor_value_info(name, onnx.helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
            for name, array in arrays.items()
        ]
        results = [onnx.ValueInfoProto(name=name) for name in node.output if name]
        graph = onnx.helper.make_graph([node], node.op_type, feeds, results)
        version = options.pop("opset_version", onnx.defs.onnx_opset_version())
        opsets = [onnx.helper.make_opsetid(node.domain, version)]
        return cls.run_model(onnx.helper.make_model(graph, opset_imports=opsets), arrays, device, **options)

    @classmethod
    def supports_device(cls, device: str) -> bool:
        """True for "CPU", and for "CUDA" and "CUDA:N" where there is one."""
        try:
            runtime_of(Device.parse(_device(device)))
        except DagexecError:
            return False
        return True


def _device(name: str) -> str:
    """ONNX's name of a device as dagexec's: "CPU" as "cpu", "CUDA" as "cuda:0"."""
    lower = name.lower()
    return "cuda:0" if lower == "cuda" else lower


def _fed(value: Any) -> Any:
    """A value as an executor takes it: strings are bytes; sequences and absent optionals stay what they are."""
    if value is None:
        return None
    if isinstance(value, list | tuple):
        return [_fed(item) for item in value]
    array = np.asarray(value)
    if array.dtype != object:
        return array
    return _each(array, lambda text: text.encode() if isinstance(text, str) else text)


def _each(array: np.ndarray[Any, Any], change: Any) -> np.ndarray[Any, Any]:
    changed = np.empty(array.shape, np.object_)
    changed.reshape(-1)[:] = [change(item) for item in array.reshape(-1)]
    return changed


is_compatible = DagexecBackend.is_compatible
prepare = DagexecBackend.prepare
run_model = DagexecBackend.run_model
run_node = DagexecBackend.run_node
supports_device = DagexecBackend.supports_device
