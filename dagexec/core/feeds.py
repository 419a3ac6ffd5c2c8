"""What a caller gives for a run, checked before anything runs: names, element types and shapes of inputs, and `out`."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence, Set
from typing import Any

import numpy as np
import numpy.typing as npt

from dagexec.core import dtypes
from dagexec.core.errors import DagexecError, FeedError
from dagexec.core.model import InputInfo, Model
from dagexec.core.tensor import as_bytes_objects

Array = npt.NDArray[Any]
Feeds = Mapping[str, npt.ArrayLike]


def check_feeds(model: Model, feeds: Feeds, needed: Set[str]) -> dict[str, Array]:
    """The feeds as arrays; inputs that are not `needed` may be left out.

    Raises FeedError unless they match the model's inputs by name, dtype and shape.
    """
    prefix = f"net {model.name!r}"
    unknown = sorted(set(feeds) - set(model.inputs))
    missing = sorted(needed - set(feeds))
    if unknown or missing:
        problem = f"unknown input(s) {unknown}" if unknown else f"missing input(s) {missing}"
        raise FeedError(f"{prefix}: {problem}; expected {sorted(model.inputs)}, found {sorted(feeds)}")
    return {name: _check_feed(prefix, name, model.inputs[name], value) for name, value in feeds.items()}


def check_out(net: str, out: Mapping[str, Array], names: Sequence[str], feeds: Feeds) -> None:
    """Raise FeedError unless `out` has arrays that results of a run, those called `names`, can be written to.

    They must not have memory in common, neither among each other nor with `feeds`.
    """
    for name, array in out.items():
        if name not in names:
            raise FeedError(f"net {net!r}: out: {name!r} is not among the results asked for, {list(names)}")
        if not isinstance(array, np.ndarray):
            raise FeedError(f"net {net!r}: out[{name!r}] must be a NumPy array, found {type(array).__name__}")
        if not array.flags.writeable:
            raise FeedError(f"net {net!r}: out[{name!r}] is read-only")
        for other_name, other in feeds.items():
            if isinstance(other, np.ndarray) and np.may_share_memory(array, other) and np.shares_memory(array, other):
                raise FeedError(f"net {net!r}: out[{name!r}] has memory in common with input {other_name!r}")
    if len(out) > 1:
        for (name, array), (other_name, other) in itertools.combinations(out.items(), 2):
            if np.shares_memory(array, other):
                raise FeedError(f"net {net!r}: out[{other_name!r}] has memory in common with out[{name!r}]")


def _check_feed(prefix: str, name: str, info: InputInfo, value: npt.ArrayLike) -> Array:
    try:
        array = np.asarray(value)
        found = dtypes.from_numpy(array.dtype)
        if found is dtypes.STRING:
            array = as_bytes_objects(array)
    except (DagexecError, ValueError, TypeError) as error:  # NumPy's, for lists of unequal lengths
        raise FeedError(f"{prefix}: input {name!r}: {error}") from None
    if info.dtype is not None and found is not info.dtype:
        raise FeedError(
            f"{prefix}: input {name!r} must be {info.dtype}, found {found}; convert it with array.astype({info.dtype})"
        )
    if info.shape is not None:
        fits = len(array.shape) == len(info.shape) and all(
            expected is None or expected == size for expected, size in zip(info.shape, array.shape, strict=True)
        )
        if not fits:
            expected_shape = tuple("any" if size is None else size for size in info.shape)
            raise FeedError(f"{prefix}: input {name!r} must have shape {expected_shape}, found {array.shape}")
    return array
