"""What onnxruntime has kernels for, from its own table: before a node is put beside others into one session."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dagexec.core.dtypes import BFLOAT16, FLOAT16, FLOAT32, TypeMeta
from dagexec.platform.lazy import LazyModule

if not TYPE_CHECKING:
    onnx = LazyModule("onnx")
else:
    import onnx

_Kernels = Mapping[tuple[str, str], Sequence[Any]]
_WIDENED = (FLOAT16, BFLOAT16)  # where there is no kernel for them, onnxruntime has them computed as float32


def has_kernel(node: onnx.NodeProto, opset: int, metas: Mapping[str, TypeMeta]) -> bool:
    """False when onnxruntime is installed and has no kernel for a node of this operator set.

    `metas` are element types of its inputs, as far as they are known. True for operators that it may expand into
    others, and where it does not say what it has.
    """
    kernels = _kernels()
    domain = "" if node.domain == "ai.onnx" else node.domain
    if kernels is None or not onnx.defs.has(node.op_type, opset, domain):
        return True
    schema: Any = onnx.defs.get_schema(node.op_type, opset, domain)
    if schema.has_function or schema.has_context_dependent_function:
        return True
    variables = [one.type_str for one in schema.inputs]
    wanted = {
        variable: metas[name] for name, variable in zip(node.input, variables, strict=False) if name in metas
    }  # of an operator with any number of inputs those that are named
    return any(
        kernel.version_range[0] <= schema.since_version <= kernel.version_range[1]
        and all(_allows(kernel.type_constraints.get(variable), meta) for variable, meta in wanted.items())
        for kernel in kernels.get((domain, node.op_type), ())
    )


def _allows(types: Sequence[str] | None, meta: TypeMeta) -> bool:
    return types is None or _name(meta) in types or (meta in _WIDENED and _name(FLOAT32) in types)


def _name(meta: TypeMeta) -> str:
    return f"tensor({onnx.TensorProto.DataType.Name(meta.onnx).lower()})"


@functools.cache
def _kernels() -> _Kernels | None:
    """The kernels for processors, by domain and operator; None where they cannot be listed."""
    try:
        from onnxruntime.capi.onnxruntime_pybind11_state import get_all_opkernel_def
    except ImportError:
        return None
    found: dict[tuple[str, str], list[Any]] = {}
    for kernel in get_all_opkernel_def():
        if kernel.provider == "CPUExecutionProvider":
            found.setdefault((kernel.domain, kernel.op_name), []).append(kernel)
    return found
