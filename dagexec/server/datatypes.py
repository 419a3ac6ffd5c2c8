"""The element types of the Open Inference Protocol (version 2) and those of dagexec."""

from __future__ import annotations

from typing import Any

import numpy as np

from dagexec.core import dtypes
from dagexec.core.dtypes import TypeMeta

BYTES = "BYTES"
"""Texts of any length: object arrays of `bytes`."""

_NAMES: dict[TypeMeta, str] = {
    dtypes.BOOL: "BOOL",
    dtypes.UINT8: "UINT8",
    dtypes.UINT16: "UINT16",
    dtypes.UINT32: "UINT32",
    dtypes.UINT64: "UINT64",
    dtypes.INT8: "INT8",
    dtypes.INT16: "INT16",
    dtypes.INT32: "INT32",
    dtypes.INT64: "INT64",
    dtypes.FLOAT16: "FP16",
    dtypes.FLOAT32: "FP32",
    dtypes.FLOAT64: "FP64",
    dtypes.BFLOAT16: "BF16",
    dtypes.STRING: BYTES,
}

NUMPY: dict[str, np.dtype[Any]] = {name: meta.numpy for meta, name in _NAMES.items()}
"""The dtype of arrays, by name in the protocol."""

_BY_DTYPE = {meta.numpy: name for meta, name in _NAMES.items()}


def datatype_of(meta: TypeMeta | None) -> str | None:
    """The protocol's name of a type, FP32 where the model does not specify it (Caffe2); None if it has none."""
    return _NAMES.get(meta or dtypes.FLOAT32)


def datatype_of_array(dtype: np.dtype[Any]) -> str | None:
    """The protocol's name of an array's type; None if it has none."""
    return _BY_DTYPE.get(dtype)
