"""ONNX models by Caffe2's backend: `backend.prepare(model).run(inputs)`, which compiles them with dagexec."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx

from dagexec.caffe2.creation import given_tensor
from dagexec.caffe2.failures import failing_as_caffe2
from dagexec.core.proto import NetDef
from dagexec.executor.source.loading import load_model
from dagexec.onnx_backend import DagexecBackend, PreparedModel

__all__ = ["Caffe2Backend", "prepare", "run_model", "run_node", "supports_device"]


class Caffe2Backend(DagexecBackend):
    """The backend of `dagexec.onnx_backend`, and ONNX models as pairs of nets."""

    @classmethod
    def prepare(
        cls, model: onnx.ModelProto, device: str = "CPU", raw_values_dict: Any = None, **options: Any
    ) -> PreparedModel:
        """Compile a model. Raises Caffe2Error where that cannot be done."""
        with failing_as_caffe2("Caffe2Backend.prepare"):
            return super().prepare(model, device, **options)

    @classmethod
    def onnx_graph_to_caffe2_net(cls, model: onnx.ModelProto, device: str = "CPU") -> tuple[NetDef, NetDef]:
        """A model as an init net, which fills its parameters, and a net.

        Its operators are dagexec's, of which Caffe2 does not know all. Raises Caffe2Error.
        """
        with failing_as_caffe2("Caffe2Backend.onnx_graph_to_caffe2_net"):
            loaded = load_model(model)
            net = NetDef()
            net.CopyFrom(loaded.net)
            init = NetDef(name=f"{net.name}_init", op=loaded.init_net.op if loaded.init_net is not None else ())
            init.op.extend(given_tensor(name, np.asarray(array)) for name, array in loaded.parameters.items())
        net.external_input[:] = [*loaded.inputs, *loaded.parameters]
        net.external_output[:] = loaded.outputs
        return init, net


prepare = Caffe2Backend.prepare
run_model = Caffe2Backend.run_model
run_node = Caffe2Backend.run_node
supports_device = Caffe2Backend.supports_device
