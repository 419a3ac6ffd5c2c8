"""Predictor: a pair of nets, one that fills parameters and one to be run, compiled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dagexec.caffe2.failures import failing_as_caffe2
from dagexec.core.proto import NetDef
from dagexec.errors import Caffe2Error
from dagexec.executor.compile import compile as compile_model
from dagexec.frontend.caffe2 import from_nets

Array = npt.NDArray[Any]


class Predictor:
    """Runs `predict_net` with the parameters that `init_net` computes, in a workspace of its own."""

    def __init__(self, init_net: Any, predict_net: Any) -> None:
        """The nets are messages, objects that have one, or the bytes of one. Raises Caffe2Error for bad ones."""
        with failing_as_caffe2("Predictor"):
            model = from_nets(_message(init_net), _message(predict_net))
            self._inputs = list(model.inputs)
            self._outputs = model.outputs
            self._executor = compile_model(model)

    def run(self, inputs: Sequence[Array] | Mapping[str, Array]) -> list[Array]:
        """The outputs, in the order of the net's external outputs.

        `inputs` are arrays by name, or in the order of those external inputs that the init net does not fill.
        Raises Caffe2Error where they do not fit.
        """
        if isinstance(inputs, Mapping):
            feeds = {str(name): np.asarray(value) for name, value in inputs.items()}
        elif len(inputs) == len(self._inputs):
            feeds = dict(zip(self._inputs, map(np.asarray, inputs), strict=True))
        else:
            raise Caffe2Error(f"Predictor: expected {len(self._inputs)} inputs, {self._inputs}, found {len(inputs)}")
        with failing_as_caffe2("Predictor"):
            results = self._executor.run(feeds)
        return [results[name] for name in self._outputs]


def _message(net: Any) -> NetDef:
    """The net as a message. Raises Caffe2Error for bytes that are none."""
    if isinstance(net, bytes):
        return NetDef.FromString(net)
    made: NetDef = net.Proto() if hasattr(net, "Proto") else net
    return made
