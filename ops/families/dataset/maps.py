"""Maps from integers to integers in blobs."""

from __future__ import annotations

import numpy as np

from dagexec.core import dtypes
from dagexec.core.dtypes import INT32, INT64, TypeMeta
from dagexec.core.gradient import no_gradient
from dagexec.core.operator import Operator, Step
from dagexec.core.registry import new_operator
from dagexec.errors import ArgumentError, ShapeError
from dagexec.ops.families.storage.loading import store

_TYPES = (INT32, INT64)


class IntegerMap:
    """Values by keys.

    Attributes:
        types: of keys and of values.
        values: by key, in the order that keys came.
    """

    def __init__(self, keys: TypeMeta, values: TypeMeta) -> None:
        """A map without keys."""
        self.types = (keys, values)
        self.values: dict[int, int] = {}


def _type(operator: Operator, name: str) -> TypeMeta:
    meta = dtypes.from_number(operator.arguments.int(name, INT32.number))
    if meta not in _TYPES:
        raise ArgumentError(f"{operator.label}: argument {name!r} must be INT32 or INT64, found {meta}")
    return meta


@new_operator(
    "CreateMap",
    infer=None,
    doc="Makes a map without keys. Every run makes a new one.",
    output_names=("map",),
    args={"key_dtype": "INT32 (the default) or INT64", "value_dtype": "the same of values"},
    effects=True,
)
class CreateMap(Operator):
    """A map in a blob."""

    def prepare(self) -> Step:
        """Put a new map into the output blob."""
        keys, values, blob = _type(self, "key_dtype"), _type(self, "value_dtype"), self.output_blobs[0]

        def create() -> None:
            blob.value = IntegerMap(keys, values)

        return create


@new_operator(
    "KeyValueToMap",
    infer=None,
    doc="Makes a map of keys and as many values; of a key that is there twice the last value counts.",
    input_names=("keys", "values"),
    output_names=("map",),
    effects=True,
)
class KeyValueToMap(Operator):
    """A map of two tensors."""

    def prepare(self) -> Step:
        """Put a new map into the output blob."""
        blob = self.output_blobs[0]

        def create() -> None:
            keys, values = self.x(0), self.x(1)
            metas = dtypes.from_numpy(keys.dtype), dtypes.from_numpy(values.dtype)
            if not set(metas) <= set(_TYPES) or keys.size != values.size:
                raise ShapeError(
                    f"{self.label}: expected as many keys as values, int32 or int64; found "
                    f"{metas[0]}{list(keys.shape)}, {metas[1]}{list(values.shape)}"
                )
            made = IntegerMap(*metas)
            made.values = dict(zip(keys.reshape(-1).tolist(), values.reshape(-1).tolist(), strict=True))
            blob.value = made

        return create


@new_operator(
    "MapToKeyValue",
    infer=None,
    doc="The keys of a map, in the order that they came, and their values.",
    input_names=("map",),
    output_names=("keys", "values"),
    handles=(0,),
    reproducible=False,
)
class MapToKeyValue(Operator):
    """Two tensors of a map."""

    def prepare(self) -> Step:
        """Copy."""

        def copy() -> None:
            held = self.handle(0, IntegerMap)
            for index, numbers in enumerate((list(held.values), list(held.values.values()))):
                store(self, index, np.array(numbers, held.types[index].numpy))

        return copy


no_gradient("CreateMap", "KeyValueToMap", "MapToKeyValue")
