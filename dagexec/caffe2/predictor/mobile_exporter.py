"""A trained net as a pair of nets, one of which holds the parameters: `init_net.pb` and `predict_net.pb`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from dagexec.caffe2.creation import given_tensor
from dagexec.core.proto import NetDef
from dagexec.errors import Caffe2Error

__all__ = ["Export"]


def Export(workspace: Any, net: Any, params: Iterable[Any]) -> tuple[NetDef, NetDef]:
    """The init net, which fills the parameters with what the workspace has, and the net itself.

    External inputs of the net are what it reads before it is computed, and its parameters; each input is filled with a
    single 0, so that it is there. External outputs are what no operator reads. Raises Caffe2Error for a parameter that
    the workspace does not have, or that is no tensor.
    """
    predict = NetDef()
    predict.CopyFrom(net if isinstance(net, NetDef) else net.Proto())
    parameters = [str(param) for param in params]
    written: set[str] = set()
    unread: dict[str, None] = {}
    inputs: dict[str, None] = {}
    for operator in predict.op:
        for blob in operator.input:
            unread.pop(blob, None)
            if blob not in written and blob not in parameters:
                inputs[blob] = None
        written.update(operator.output)
        unread.update(dict.fromkeys(operator.output))
    init = NetDef(name=f"{predict.name}_init")
    for blob in parameters:
        array = workspace.FetchBlob(blob)
        if isinstance(array, bytes):
            raise Caffe2Error(f"mobile_exporter: parameter {blob!r} is no tensor")
        init.op.append(given_tensor(blob, array))
    init.op.extend(given_tensor(blob, np.zeros((1, 1), np.float32)) for blob in inputs)
    predict.external_input[:] = [*inputs, *parameters]
    predict.external_output[:] = list(unread)
    return init, predict
