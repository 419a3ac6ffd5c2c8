"""Sessions of other runtimes: an ONNX message made ready to run by onnxruntime, OpenVINO or `onnx.reference`.

`message` checks messages and completes them with types, `opening` chooses the runtime of nodes that dagexec has no
operator for and shares sessions. `island` and the modules of its runtimes are for parts of nets that dagexec could
compute itself. What a session is to a net is an operator, in `dagexec.ops.families.foreign`.
"""

from typing import TYPE_CHECKING

from dagexec.platform.lazy import lazy_names
from dagexec.sessions.message import check_for_inference, complete, infer_types, parse, tensor_type, type_of_value

if not TYPE_CHECKING:
    __getattr__ = lazy_names(
        __name__,
        {
            "dagexec.sessions.island": (
                "BoundIsland",
                "IslandModel",
                "IslandRuntime",
                "IslandSession",
                "usable_runtimes",
            ),
            "dagexec.sessions.kernels": ("has_kernel",),
            "dagexec.sessions.opening": ("open_session",),
            "dagexec.sessions.opening_islands": ("open_island",),
            "dagexec.sessions.seal": ("is_sealed", "seal_of"),
            "dagexec.sessions.session": ("Session",),
        },
    )
else:
    from dagexec.sessions.island import BoundIsland, IslandModel, IslandRuntime, IslandSession, usable_runtimes
    from dagexec.sessions.kernels import has_kernel
    from dagexec.sessions.opening import open_session
    from dagexec.sessions.opening_islands import open_island
    from dagexec.sessions.seal import is_sealed, seal_of
    from dagexec.sessions.session import Session

__all__ = [
    "BoundIsland", "IslandModel", "IslandRuntime", "IslandSession", "Session", "check_for_inference", "complete",
    "has_kernel", "infer_types", "is_sealed", "open_island", "open_session", "parse", "seal_of", "tensor_type",
    "type_of_value", "usable_runtimes",
]  # fmt: skip
