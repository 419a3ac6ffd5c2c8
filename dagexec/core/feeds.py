"""Checks of a caller's arrays before a run: names, element types and shapes of inputs, and `out`."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.lib.array_utils import byte_bounds

from dagexec.core import dtypes
from dagexec.core.descriptor import TensorDescriptor
from dagexec.core.model import InputInfo, Model
from dagexec.core.spelling import did_you_mean
from dagexec.core.tensor import as_bytes_objects
from dagexec.core.variant import Variant
from dagexec.errors import DagexecError, FeedError
from dagexec.platform.addresses import address_of
from dagexec.platform.host_memory import check_fits

Array = npt.NDArray[Any]
Feeds = Mapping[str, npt.ArrayLike]

_MOST_HINTS = 3  # in one message
_MAX_WORK = 100_000  # of `numpy.shares_memory` on two strided arrays; beyond it they count as sharing


def named_feeds(net: str, feeds: Feeds | npt.ArrayLike, needed: Set[str]) -> Feeds:
    """The feeds by name: a mapping as it is, an array for the only input that is `needed`. Raises FeedError."""
    if isinstance(feeds, Mapping):
        return feeds
    type_name = type(feeds).__name__
    if not hasattr(feeds, "__array__"):
        raise FeedError(f"net {net!r}: feeds must be arrays by name, for {sorted(needed)}; found {type_name}")
    if len(needed) != 1:
        raise FeedError(
            f"net {net!r}: a bare array is for a net with one input, and this one has {sorted(needed)}; expected "
            f"arrays by name, found {type_name}"
        )
    return dict.fromkeys(needed, feeds)


def result_names(net: str, outputs: Iterable[str]) -> tuple[str, ...]:
    """The names of requested results. Raises FeedError unless they are a collection of strings."""
    if isinstance(outputs, str) or not isinstance(outputs, Iterable):
        raise FeedError(f"net {net!r}: outputs must be a list of names, found {outputs!r:.80}")
    names = tuple(outputs)
    for name in names:
        if not isinstance(name, str):
            raise FeedError(f"net {net!r}: outputs must be names, found {name!r:.80}")
    return names


def check_feeds(model: Model, feeds: Feeds, needed: Set[str]) -> dict[str, Array]:
    """The feeds as arrays, or Variants; inputs that are not `needed`, or are optional, may be left out.

    Raises FeedError unless they match the model's inputs by name, dtype and shape.
    """
    prefix = f"net {model.name!r}"
    unknown = sorted(set(feeds) - set(model.inputs), key=repr)
    for name in needed - feeds.keys():
        if model.inputs[name].is_optional:
            feeds = {**feeds, name: None}  # type: ignore[dict-item]
    missing = sorted(needed - set(feeds))
    if unknown or missing:
        problem = f"unknown input(s) {unknown}" if unknown else f"missing input(s) {missing}"
        hint = "".join(dict.fromkeys(did_you_mean(name, model.inputs) for name in unknown[:_MOST_HINTS]))
        raise FeedError(f"{prefix}: {problem}; expected {sorted(model.inputs)}, found {sorted(feeds, key=repr)}{hint}")
    return {name: _check_feed(prefix, name, model.inputs[name], value) for name, value in feeds.items()}


def as_arrays(net: str, feeds: Feeds) -> dict[str, Array]:
    """The feeds as arrays, without copies where they share their memory: buffers, `__array__`, `__dlpack__` and so on.

    Raises FeedError for anything else.
    """
    return {name: _as_array(f"net {net!r}", name, value) for name, value in feeds.items()}


class HeldMemory:
    """The memory of arrays by name, for fast checks whether another array overlaps them."""

    def __init__(self, arrays: Mapping[str, Array]) -> None:
        bounds = sorted((*_bounds(array), name) for name, array in arrays.items() if array.size)
        self._low = [low for low, _, _ in bounds]
        self._highest = list(itertools.accumulate((high for _, high, _ in bounds), max))
        self._names = [name for _, _, name in bounds]
        self._arrays = arrays

    def met_by(self, array: Array) -> str | None:
        """The name of an array that overlaps `array`, None where there is none."""
        low, high = _bounds(array)
        index = bisect_left(self._low, high)  # those before begin before `array` ends
        while index and self._highest[index - 1] > low:
            index -= 1
            if _meet(self._arrays[self._names[index]], array):
                return self._names[index]
        return None


def check_out(
    net: str, out: Mapping[str, Array], names: Sequence[str], feeds: Mapping[str, Array], parameters: HeldMemory
) -> None:
    """Raise FeedError unless the results `names` of a run can be written to the arrays of `out`.

    No element may share memory with another one of the same array, of another, of `feeds` or of the `parameters`.
    """
    if not isinstance(out, Mapping):
        raise FeedError(f"net {net!r}: out must be arrays by name, for {list(names)}; found {type(out).__name__}")
    for name, array in out.items():
        if name not in names:
            raise FeedError(f"net {net!r}: out: {name!r} is not among the results asked for, {list(names)}")
        if not isinstance(array, np.ndarray):
            raise FeedError(f"net {net!r}: out[{name!r}] must be a NumPy array, found {type(array).__name__}")
        if not array.flags.writeable:
            raise FeedError(f"net {net!r}: out[{name!r}] is read-only")
        if _meets_itself(array):
            raise FeedError(
                f"net {net!r}: out[{name!r}] has several elements in one place: shape {array.shape}, strides "
                f"{array.strides} bytes"
            )
        for other_name, other in feeds.items():
            if _meet(array, other):
                raise FeedError(f"net {net!r}: out[{name!r}] has memory in common with input {other_name!r}")
        parameter = parameters.met_by(array)
        if parameter is not None:
            raise FeedError(f"net {net!r}: out[{name!r}] has memory in common with parameter {parameter!r}")
    if len(out) > 1:
        for (name, array), (other_name, other) in itertools.combinations(out.items(), 2):
            if _meet(array, other):
                raise FeedError(f"net {net!r}: out[{other_name!r}] has memory in common with out[{name!r}]")


def _bounds(array: Array) -> tuple[int, int]:
    """The address of the first byte, and that after the last."""
    if not array.flags.c_contiguous:
        return byte_bounds(array)
    start = address_of(array)
    return start, start + array.nbytes


def _meet(array: Array, other: Array) -> bool:
    """True when the arrays overlap, or that would take too long to tell."""
    if not np.may_share_memory(array, other):
        return False
    try:
        return np.shares_memory(array, other, max_work=_MAX_WORK)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True


def _meets_itself(array: Array) -> bool:
    """True when two indices lead to the same byte, whatever the directions of the axes."""
    if array.flags.c_contiguous or array.flags.f_contiguous:
        return False
    shape, strides = (*array.shape, array.itemsize), (*map(abs, array.strides), 1)
    return TensorDescriptor(shape, strides).is_overlapping


def _as_array(prefix: str, name: str, value: npt.ArrayLike) -> Array:
    """`value` as an array, without a copy where it shares its memory."""
    if value.__class__ is np.ndarray:
        return value
    try:
        if hasattr(value, "__dlpack__") and not hasattr(value, "__array__"):
            return np.from_dlpack(value)  # type: ignore[arg-type]
        return np.asarray(value)
    except (ValueError, TypeError, BufferError, RuntimeError) as error:  # such as for lists of unequal lengths
        raise FeedError(f"{prefix}: input {name!r}: {error}") from None


def _check_feed(prefix: str, name: str, info: InputInfo, value: Any) -> Any:
    """The value as an array, or as a Variant where the input is a sequence or an optional."""
    if not (info.is_sequence or info.is_optional):
        return _check_array(prefix, name, info, value)
    if value is None and info.is_optional:
        return Variant(None)
    if not info.is_sequence:
        return Variant(_own(_check_array(prefix, name, info, value)))
    if not isinstance(value, list | tuple):
        raise FeedError(f"{prefix}: input {name!r} must be a list of arrays, found {type(value).__name__}")
    return Variant(tuple(_own(_check_array(prefix, f"{name}[{i}]", info, item)) for i, item in enumerate(value)))


def _own(array: Array) -> Array:
    """A private copy."""
    check_fits(array.nbytes, f"a copy of an array of shape {array.shape}")
    return np.array(array, order="C")


def _check_array(prefix: str, name: str, info: InputInfo, value: npt.ArrayLike) -> Array:
    array = _as_array(prefix, name, value)
    try:
        meta = dtypes.from_numpy(array.dtype)
        if meta is dtypes.STRING:
            array = as_bytes_objects(array)
    except (DagexecError, ValueError, TypeError) as error:
        raise FeedError(f"{prefix}: input {name!r}: {error}") from None
    if info.dtype is not None and meta is not info.dtype:
        raise FeedError(
            f"{prefix}: input {name!r} must be {info.dtype}, found {meta}; convert it with array.astype({info.dtype})"
        )
    if info.shape is not None:
        fits = len(array.shape) == len(info.shape) and all(
            expected is None or expected == size for expected, size in zip(info.shape, array.shape, strict=True)
        )
        if not fits:
            expected_shape = tuple("any" if size is None else size for size in info.shape)
            raise FeedError(f"{prefix}: input {name!r} must have shape {expected_shape}, found {array.shape}")
    return array
