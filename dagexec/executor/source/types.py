"""Types of blobs in the words of a model as it was given: passes have put other operators in its net."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
"""What is tried for the first axis and for others, where they have any size."""


@dataclass(frozen=True)
class GivenTypes:
    """What is to be known of a model to infer the shapes of a run. It keeps no large parameter in memory.

    Attributes:
        name: the name of the net.
        operators: those that compute parameters, and those of a run.
        types: of the parameters that the model came with.
        values: the small ones.
    """

    name: str
    operators: tuple[Node, ...]
    types: Mapping[str, TensorType]
    values: Mapping[str, Array]

    @classmethod
    def of(cls, model: Model) -> GivenTypes:
        """Those of a model before anything rewrites it."""
        parameters = model.parameters.items()
        return cls(
            model.program.name,
            (*model.init_program.op, *model.program.op),
            {name: TensorType(tuple(array.shape), from_numpy(array.dtype)) for name, array in parameters},
            {name: array for name, array in parameters if array.size <= _MAX_ELEMENTS},
        )

    def output_info(self, inputs: Mapping[str, InputInfo], names: Sequence[str]) -> dict[str, InputInfo]:
        """What is known of blobs from that of the inputs: sizes that are the same for several sizes of these."""
        found: dict[str, InputInfo] = {}
        free = any(size is None for info in inputs.values() for size in info.shape or ())
        for types in islice(filter(None, map(partial(self._types, inputs), _FREE_SIZES)), 4 if free else 1):
            for name in names:
                found[name] = _either(found.get(name), types.get(name))
        return {name: found.get(name, InputInfo()) for name in names}

    def _types(self, inputs: Mapping[str, InputInfo], free: tuple[int, int]) -> Mapping[str, TensorType | None] | None:
        """Types of all blobs, where inference finds them for inputs with these sizes."""
        known = {
            name: TensorType(
                tuple(free[axis > 0] if size is None else size for axis, size in enumerate(info.shape)),
                info.dtype or FLOAT32,
            )
            for name, info in inputs.items()
            if info.shape is not None and not info.is_sequence
        }
        try:
            return infer_listed(self.name, self.operators, {**self.types, **known}, self.values).blobs
        except DagexecError:
            return None

    def error_for(self, feeds: Feeds) -> ShapeError | None:
        """What is wrong with the shapes of `feeds`; None when inference finds nothing, or cannot tell."""
        arrays = {name: value for name, value in feeds.items() if isinstance(value, np.ndarray)}
        try:
            known = {name: TensorType(array.shape, from_numpy(array.dtype)) for name, array in arrays.items()}
            infer_listed(self.name, self.operators, {**self.types, **known}, self.values)
        except ShapeError as error:
            return error
        except DagexecError:
            return None
        return None


def _either(known: InputInfo | None, found: TensorType | None) -> InputInfo:
    """What may be either."""
    if found is None:
        return InputInfo() if known is None else InputInfo(known.dtype)
    if known is None:
        return InputInfo(found.meta, found.shape)
    if known.shape is None or len(known.shape) != len(found.shape):
        return InputInfo(found.meta)
    pairs = zip(known.shape, found.shape, strict=True)
    return InputInfo(found.meta, tuple(one if one == other else None for one, other in pairs))
