"""Sessions of other runtimes: an ONNX message made ready to run by onnxruntime or `onnx.reference`.

`message` checks messages and completes them with types, `opening` chooses the runtime and shares sessions. What a
session is to a net is an operator, in `dagexec.ops.foreign`.
"""

from dagexec.sessions.kernels import has_kernel
from dagexec.sessions.message import check_for_inference, complete, infer_types, parse, tensor_type, type_of_value
from dagexec.sessions.opening import open_session
from dagexec.sessions.session import Session

__all__ = [
    "Session", "check_for_inference", "complete", "has_kernel", "infer_types", "open_session", "parse", "tensor_type",
    "type_of_value",
]  # fmt: skip
