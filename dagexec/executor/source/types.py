"""Types of blobs in terms of the source model: passes have put other operators into the compiled net."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from functools import partial
from itertools import islice

import numpy as np

from dagexec.core.dtypes import FLOAT32, from_numpy
from dagexec.core.feeds import Array, Feeds
from dagexec.core.inference import infer_listed
from dagexec.core.model import InputInfo, Model
from dagexec.core.node import Node
from dagexec.core.schema import TensorType
from dagexec.errors import DagexecError, ShapeError
from dagexec.platform.records import dataclass

_MAX_ELEMENTS = 1 << 10  # of a constant whose values shapes may depend on
_FREE_SIZES = ((2, 16), (3, 16), (2, 224), (3, 224), (2, 256), (2, 1), (1, 1), (1, 16), (1, 224))
"""Sizes tried for the first axis and for others, where they are free."""

_MOST_RECENT = 32


@dataclass(frozen=True)
class GivenTypes:
    """The part of a model that the shapes of a run are inferred from. It keeps no large parameter in memory.

    Attributes:
        name: the name of the net.
        operators: those that compute parameters, and those of a run.
        types: of the parameters.
        values: of the small ones.
        recent: what `blobs` answered, for what it was asked.
    """

    name: str
    operators: tuple[Node, ...]
    types: Mapping[str, TensorType]
    values: Mapping[str, Array]
    recent: dict[frozenset[tuple[str, TensorType]], Mapping[str, TensorType | None] | None] = field(
        default_factory=dict, compare=False, repr=False
    )

    @classmethod
    def of(cls, model: Model) -> GivenTypes:
        """The types of a model before passes rewrite it."""
        parameters = model.parameters.items()
        return cls(
            model.program.name,
            (*model.init_program.op, *model.program.op),
            {name: TensorType(tuple(array.shape), from_numpy(array.dtype)) for name, array in parameters},
            {name: array for name, array in parameters if array.size <= _MAX_ELEMENTS},
        )

    def output_info(self, inputs: Mapping[str, InputInfo], names: Sequence[str]) -> dict[str, InputInfo]:
        """Types of blobs from those of the inputs: with the sizes that are the same for several sizes of these."""
        infos: dict[str, InputInfo] = {}
        free = any(size is None for info in inputs.values() for size in info.shape or ())
        for types in islice(filter(None, map(partial(self._types, inputs), _FREE_SIZES)), 4 if free else 1):
            for name in names:
                infos[name] = _either(infos.get(name), types.get(name))
        return {name: infos.get(name, InputInfo()) for name in names}

    def _types(self, inputs: Mapping[str, InputInfo], free: tuple[int, int]) -> Mapping[str, TensorType | None] | None:
        """Types of all blobs, where inference finds them for inputs with these sizes."""
        input_types = {
            name: TensorType(
                tuple(free[axis > 0] if size is None else size for axis, size in enumerate(info.shape)),
                info.dtype or FLOAT32,
            )
            for name, info in inputs.items()
            if info.shape is not None and not info.is_sequence
        }
        return self.blobs(input_types)

    def blobs(self, inputs: Mapping[str, TensorType]) -> Mapping[str, TensorType | None] | None:
        """Types of all blobs for inputs of these types; None where inference refuses them."""
        key, nothing = frozenset(inputs.items()), dict[str, TensorType | None]()
        found = self.recent.get(key, nothing)
        if found is nothing:
            try:
                found = infer_listed(self.name, self.operators, {**self.types, **inputs}, self.values).blobs
            except DagexecError:
                found = None
            if len(self.recent) >= _MOST_RECENT:
                self.recent.clear()
            self.recent[key] = found
        return found

    def error_for(self, feeds: Feeds) -> ShapeError | None:
        """The error in the shapes of `feeds`; None when inference finds none, or cannot tell."""
        arrays = {name: value for name, value in feeds.items() if isinstance(value, np.ndarray)}
        try:
            input_types = {name: TensorType(array.shape, from_numpy(array.dtype)) for name, array in arrays.items()}
            infer_listed(self.name, self.operators, {**self.types, **input_types}, self.values)
        except ShapeError as error:
            return error
        except DagexecError:
            return None
        return None


def _either(info: InputInfo | None, inferred: TensorType | None) -> InputInfo:
    """The type that covers both."""
    if inferred is None:
        return InputInfo() if info is None else InputInfo(info.dtype)
    if info is None:
        return InputInfo(inferred.meta, inferred.shape)
    if info.shape is None or len(info.shape) != len(inferred.shape):
        return InputInfo(inferred.meta)
    pairs = zip(info.shape, inferred.shape, strict=True)
    return InputInfo(inferred.meta, tuple(size if size == other else None for size, other in pairs))
