"""Errors of shapes in the words of a model as it was given: passes have put other operators in its net."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from dagexec.core.dtypes import from_numpy
from dagexec.core.feeds import Array, Feeds
from dagexec.core.inference import infer_listed
from dagexec.core.model import Model
from dagexec.core.proto import OperatorDef
from dagexec.core.schema import TensorType
from dagexec.errors import DagexecError, ShapeError

_MAX_ELEMENTS = 1 << 10  # of a constant whose values shapes may depend on


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
    operators: tuple[OperatorDef, ...]
    types: Mapping[str, TensorType]
    values: Mapping[str, Array]

    @classmethod
    def of(cls, model: Model) -> GivenTypes:
        """Those of a model before anything rewrites it."""
        parameters = model.parameters.items()
        return cls(
            model.net.name,
            (*(model.init_net.op if model.init_net is not None else ()), *model.net.op),
            {name: TensorType(tuple(array.shape), from_numpy(array.dtype)) for name, array in parameters},
            {name: array for name, array in parameters if array.size <= _MAX_ELEMENTS},
        )

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
