"""Indices in blobs: dictionaries that number the keys they are asked for, from 1; 0 stands for unknown ones."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dagexec.core import dtypes
from dagexec.core.dtypes import BOOL, INT32, INT64, STRING, TypeMeta
from dagexec.core.gradient import no_gradient
from dagexec.core.operator import Operator, Step
from dagexec.core.registry import declares, new_operator
from dagexec.core.schema import OperatorCall, OpSchema, TensorType
from dagexec.errors import ArgumentError, ShapeError
from dagexec.ops.base.array_function import array_function
from dagexec.ops.base.blocks import Array
from dagexec.ops.families.storage.loading import store
from dagexec.platform.forking import ProcessLock

_MAX = np.iinfo(np.int32).max


class Index:
    """Numbers of keys. Threads may share one.

    Attributes:
        meta: the type of keys.
    """

    def __init__(self, meta: TypeMeta, most: int) -> None:
        """Without keys; the number after the last one is at most `most`."""
        self.meta = meta
        self._most = most
        self._numbers: dict[object, int] = {}
        self._frozen = False
        self._lock = ProcessLock()

    def __len__(self) -> int:
        """Keys, and one for those that are unknown."""
        return len(self._numbers) + 1

    def get(self, keys: Array) -> list[int]:
        """The numbers of keys: the next one for a new key, 0 once it is frozen. Raises ArgumentError when it is full.

        Then the keys before are there.
        """
        with self._lock.own:
            return [self._number(key) for key in self._checked(keys)]

    def _number(self, key: object) -> int:
        number = self._numbers.get(key, 0)
        if not number and not self._frozen:
            if len(self) >= self._most:
                raise ArgumentError(f"the index is full: argument 'max_elements' of its maker is {self._most}")
            number = self._numbers[key] = len(self)
        return number

    def load(self, keys: Array) -> None:
        """Have these keys, in order, and no others. Raises ArgumentError for too many, or one that is there twice."""
        found = self._checked(keys)
        numbers = {key: 1 + place for place, key in enumerate(found)}
        if len(found) > self._most or len(numbers) != len(found):
            raise ArgumentError(
                f"expected at most {self._most} different keys, found {len(found)}: {len(numbers)} differ"
            )
        with self._lock.own:
            self._numbers = numbers

    def keys(self) -> Array:
        """All keys, in the order of their numbers."""
        with self._lock.own:
            keys = np.empty(len(self._numbers), self.meta.numpy)
            keys[:] = list(self._numbers)
            return keys

    def freeze(self) -> None:
        """Number no new keys from now on."""
        with self._lock.own:
            self._frozen = True

    def _checked(self, keys: Array) -> list[object]:
        if dtypes.from_numpy(keys.dtype) is not self.meta:
            raise ShapeError(f"the keys of the index are {self.meta}; found {dtypes.from_numpy(keys.dtype)}")
        return list(keys.reshape(-1).tolist())


@declares
def _makes_index(name: str, what: str) -> OpSchema:
    return OpSchema(
        name,
        infer=None,
        doc=f"Makes an index of {what}, without keys. Every run makes a new one.",
        output_names=("index",),
        args={"max_elements": "what its numbers stay below (default: 2^31 - 1)"},
        effects=True,
    )


class _Create(Operator):
    """An index in a blob."""

    meta: TypeMeta

    def prepare(self) -> Step:
        """Put a new index into the output blob."""
        most, blob = self.arguments.int("max_elements", _MAX), self.output_blobs[0]
        if most < 1:
            raise ArgumentError(f"{self.label}: argument 'max_elements' must be 1 or more, found {most}")

        def create() -> None:
            blob.value = Index(self.meta, most)

        return create


@_makes_index("IntIndexCreate", "int32 keys")
class IntIndexCreate(_Create):
    """Keys of int32."""

    meta = INT32


@_makes_index("LongIndexCreate", "int64 keys")
class LongIndexCreate(_Create):
    """Keys of int64."""

    meta = INT64


@_makes_index("StringIndexCreate", "strings")
class StringIndexCreate(_Create):
    """Strings."""

    meta = STRING


def infer_get(call: OperatorCall) -> list[TensorType]:
    """A number for each key."""
    call.require_types(1, INT32, INT64, STRING)
    return [TensorType(call.inputs[1].shape, INT64)]


@new_operator(
    "IndexGet",
    infer=infer_get,
    doc="The numbers of keys in an index, int64; a new key gets the next one, or 0 once the index is frozen.",
    input_names=("index", "keys"),
    output_names=("numbers",),
    handles=(0,),
    mutates=(0,),
    effects=True,
)
class IndexGet(Operator):
    """Numbers of keys."""

    def prepare(self) -> Step:
        """Look them up."""
        keys, numbers = self.x(1), self.y(0)

        def get() -> None:
            try:
                numbers[...] = np.reshape(self.handle(0, Index).get(keys), numbers.shape)
            except (ArgumentError, ShapeError) as error:
                raise type(error)(f"{self.label}: {error}") from None

        return get


@new_operator(
    "IndexLoad",
    infer=None,
    doc="Has an index, in place, have these keys in order, and no others.",
    input_names=("index", "keys"),
    output_names=("index",),
    args={"skip_first_entry": "leave out the first, which stands for unknown keys (default 0)"},
    enforced_inplace=((0, 0),),
    handles=(0,),
    effects=True,
)
class IndexLoad(Operator):
    """An index of a tensor."""

    def prepare(self) -> Step:
        """Number them anew."""
        skipped = self.arguments.bool("skip_first_entry")

        def load() -> None:
            keys = self.x(1).reshape(-1)
            if skipped and not keys.size:
                raise ShapeError(f"{self.label}: there is no first entry to skip: input 'keys' has no elements")
            try:
                self.handle(0, Index).load(keys[skipped:])
            except (ArgumentError, ShapeError) as error:
                raise type(error)(f"{self.label}: {error}") from None

        return load


@new_operator(
    "IndexStore",
    infer=None,
    doc="The keys of an index, in the order of their numbers.",
    input_names=("index",),
    output_names=("keys",),
    handles=(0,),
    reproducible=False,
)
class IndexStore(Operator):
    """A tensor of an index."""

    def prepare(self) -> Step:
        return lambda: store(self, 0, self.handle(0, Index).keys())


@new_operator(
    "IndexFreeze",
    infer=None,
    doc="Has an index, in place, number no new keys from now on.",
    input_names=("index",),
    output_names=("index",),
    enforced_inplace=((0, 0),),
    handles=(0,),
    effects=True,
)
class IndexFreeze(Operator):
    """No more keys."""

    def prepare(self) -> Step:
        return lambda: self.handle(0, Index).freeze()


def infer_size(_call: OperatorCall) -> list[TensorType]:
    """A scalar."""
    return [TensorType((), INT64)]


@new_operator(
    "IndexSize",
    infer=infer_size,
    doc="How many numbers an index has given: one for each key, and 0.",
    input_names=("index",),
    output_names=("size",),
    handles=(0,),
    reproducible=False,
)
class IndexSize(Operator):
    """The number after the last."""

    def prepare(self) -> Step:
        size = self.y(0)

        def count() -> None:
            size[...] = len(self.handle(0, Index))

        return count


def infer_member(call: OperatorCall) -> list[TensorType]:
    """A bool for each element."""
    meta = call.require_types(0, INT32, INT64, BOOL, STRING)
    said = call.arguments.int("dtype", 0)
    if said and dtypes.from_number(said) is not meta:
        raise call.fail(f"argument 'dtype' must be the type of X, {meta}; found {said}")
    return [TensorType(call.inputs[0].shape, BOOL)]


@array_function(
    "IsMemberOf",
    infer=infer_member,
    doc="For each element of X, an integer, a bool or a string, whether it is one of `value`.",
    input_names=("X",),
    output_names=("Y",),
    args={"value": "the elements that are", "dtype": "their type, which is X's"},
)
def is_member_of(call: OperatorCall, x: Array) -> Sequence[Array]:
    """Compare with all."""
    if call.inputs[0].meta is not STRING:
        return [np.isin(x, call.arguments.ints("value"))]
    values = {text.encode(errors="surrogateescape") for text in call.arguments.strings("value")}
    return [np.array([text in values for text in x.reshape(-1).tolist()], np.bool_)]


no_gradient(
    "IntIndexCreate", "LongIndexCreate", "StringIndexCreate", "IndexGet", "IndexLoad", "IndexStore", "IndexFreeze",
    "IndexSize", "IsMemberOf",
)  # fmt: skip
