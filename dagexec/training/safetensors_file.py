"""Parameters as safetensors files, in which model hubs exchange weights (extra `safetensors`)."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from dagexec.core import dtypes
from dagexec.core.dtypes import (
    BFLOAT16,
    BOOL,
    FLOAT16,
    FLOAT32,
    FLOAT64,
    INT8,
    INT16,
    INT32,
    INT64,
    UINT8,
    UINT16,
    TypeMeta,
)
from dagexec.core.tensor import Tensor
from dagexec.core.workspace import Workspace
from dagexec.errors import OutputError, StorageError
from dagexec.platform.disk import reading
from dagexec.platform.extras import install_command
from dagexec.platform.files import Unpublished, reason

__all__ = ["export_safetensors", "import_safetensors", "read_safetensors"]

Array = npt.NDArray[Any]

_NAMES = {
    FLOAT64: "F64", FLOAT32: "F32", FLOAT16: "F16", BFLOAT16: "BF16", INT64: "I64", INT32: "I32", INT16: "I16",
    INT8: "I8", UINT16: "U16", UINT8: "U8", BOOL: "BOOL",
}  # fmt: skip
_METAS = {name: meta for meta, name in _NAMES.items()}
_WRITTEN = {FLOAT64: "float64", FLOAT32: "float32", FLOAT16: "float16", BFLOAT16: "bfloat16"}


def export_safetensors(
    workspace: Workspace,
    blobs: Sequence[str],
    path: str | os.PathLike[str],
    *,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write tensors to a file at `path`, as a whole or not at all.

    Raises OutputError when it cannot be written, StorageError for a tensor of strings, MissingBlobError.
    """
    library = _library()
    arrays = {name: workspace.fetch_blob(name) for name in blobs}
    specs = {}
    for name, array in arrays.items():
        meta = dtypes.from_numpy(array.dtype)
        if meta not in _NAMES:
            raise StorageError(f"{path}: blob {name!r} holds {meta}s, which safetensors files cannot store")
        specs[name] = library.TensorSpec(
            dtype=_WRITTEN.get(meta, meta.name),
            shape=list(array.shape),
            data_ptr=array.ctypes.data,
            data_len=array.nbytes,
        )
    unpublished = Unpublished(Path(path))
    try:
        library.serialize_file(specs, unpublished.path, dict(metadata) if metadata else None)
        unpublished.publish()
    except (OSError, library.SafetensorError, TypeError) as error:
        text = reason(error) if isinstance(error, OSError) else str(error)
        raise OutputError(f"{path}: cannot be written: {text}; an earlier file was kept") from None
    finally:
        unpublished.discard()


def read_safetensors(path: str | os.PathLike[str]) -> dict[str, Array]:
    """The tensors of a file by name. Raises StorageError for one that is missing or damaged."""
    library = _library()
    try:
        with reading(path) as file:
            content = file.read()
    except (OSError, ValueError) as error:
        raise StorageError(f"{path}: cannot be read: {reason(error)}") from None
    try:
        found = library.deserialize(content)
    except library.SafetensorError as error:
        raise StorageError(f"{path}: not a safetensors file: {error}") from None
    return {name: _array(str(path), name, entry) for name, entry in found}


def import_safetensors(
    workspace: Workspace, parameters: Collection[str], path: str | os.PathLike[str], *, strict: bool = True
) -> list[str]:
    """Feed the `parameters` of a model, which are in the workspace, from a file; returns those that were fed.

    A tensor must have the shape and the element type of its blob. With `strict` the names must be the same, too;
    otherwise what only one side has is left alone. Nothing is fed when anything does not fit. Raises StorageError
    that lists all of it.
    """
    found = read_safetensors(path)
    problems = []
    if strict:
        problems += [f"{name!r} is missing" for name in parameters if name not in found]
        problems += [f"{name!r} is no parameter of the model" for name in found if name not in parameters]
    names = [name for name in parameters if name in found]
    for name in names:
        tensor, array = workspace.get_blob(name).get(Tensor), found[name]
        meta = dtypes.from_numpy(array.dtype)
        if tensor.is_empty:
            problems.append(f"{name!r} holds nothing in the workspace: run the init net first")
        elif (tensor.shape, tensor.meta) != (array.shape, meta):
            problems.append(f"{name!r} must be {tensor.meta}{list(tensor.shape)}, found {meta}{list(array.shape)}")
    if problems:
        raise StorageError(f"{path}: does not match the model: {'; '.join(problems[:20])}")
    for name in names:
        workspace.feed_blob(name, found[name])
    return names


def _array(path: str, name: str, entry: Mapping[str, Any]) -> Array:
    meta: TypeMeta | None = _METAS.get(entry["dtype"])
    if meta is None:
        raise StorageError(f"{path}: tensor {name!r} is of type {entry['dtype']}; expected one of {sorted(_METAS)}")
    stored = {BFLOAT16: np.uint16, BOOL: np.uint8}.get(meta, meta.numpy)
    bits = np.frombuffer(entry["data"], stored)
    array: Array = np.not_equal(bits, 0) if meta is BOOL else bits.view(meta.numpy)
    return array.reshape(entry["shape"])


def _library() -> ModuleType:
    try:
        import safetensors
    except ImportError:
        raise StorageError(
            f"safetensors files need the module safetensors; install it with: {install_command('safetensors')}"
        ) from None
    module: ModuleType = safetensors
    return module
