"""Other runtimes: an ONNX message made ready to run, a session, by onnxruntime, OpenVINO or `onnx.reference`.

`message` checks messages and completes them with types, `opening` chooses the runtime of nodes that dagexec has no
operator for and shares sessions. `island` and the modules of its runtimes are for parts of nets that dagexec could
compute itself. What a session is to a net is an operator, in `dagexec.ops.families.foreign`; which nodes and parts
become one is decided in `dagexec.frontend.onnx.foreign_nodes` and `dagexec.compiler.islands`.
"""

from typing import TYPE_CHECKING

from dagexec.foreign.message import check_for_inference, complete, infer_types, parse, tensor_type, type_of_value
from dagexec.platform.lazy import lazy_names

if not TYPE_CHECKING:
    __getattr__ = lazy_names(
        __name__,
        {
            "dagexec.foreign.island": (
                "BoundIsland",
                "IslandModel",
                "IslandRuntime",
                "IslandSession",
                "usable_runtimes",
            ),
            "dagexec.foreign.kernels": ("has_kernel",),
            "dagexec.foreign.opening": ("open_session",),
            "dagexec.foreign.opening_islands": ("open_island",),
            "dagexec.foreign.seal": ("is_sealed", "seal_of"),
            "dagexec.foreign.session": ("ForeignSession",),
        },
    )
else:
    from dagexec.foreign.island import BoundIsland, IslandModel, IslandRuntime, IslandSession, usable_runtimes
    from dagexec.foreign.kernels import has_kernel
    from dagexec.foreign.opening import open_session
    from dagexec.foreign.opening_islands import open_island
    from dagexec.foreign.seal import is_sealed, seal_of
    from dagexec.foreign.session import ForeignSession

__all__ = [
    "BoundIsland", "ForeignSession", "IslandModel", "IslandRuntime", "IslandSession", "check_for_inference", "complete",
    "has_kernel", "infer_types", "is_sealed", "open_island", "open_session", "parse", "seal_of", "tensor_type",
    "type_of_value", "usable_runtimes",
]  # fmt: skip
