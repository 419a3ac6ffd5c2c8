"""OwnedParameters: parameters that nobody but the compilation needs, so that memory of those replaced goes at once.

Passes make models from models, and whoever holds an earlier one would keep weights that a later one has in another
form. So a parameter that is replaced leaves an array of its shape without memory in all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

_MIN_BYTES = 1 << 14
"""Smaller parameters stay: their values may be shapes, which inference asks for."""


class OwnedParameters(dict[str, Array]):
    """Parameters of a model, and of the models that it was made from."""

    def __init__(self, arrays: Mapping[str, Array], before: OwnedParameters | None = None) -> None:
        """`before` are those of the model that this one is made from."""
        super().__init__(arrays)
        self._before = before

    def let_go(self, name: str) -> None:
        """No model needs the values of parameter `name` any more: from now on it has a shape and no memory."""
        array = self.get(name)
        if array is None or array.nbytes < _MIN_BYTES or array.dtype.hasobject:
            return
        hollow = np.broadcast_to(np.zeros((), array.dtype), array.shape)
        owner: OwnedParameters | None = self
        while owner is not None:
            if owner.get(name) is array:
                owner[name] = hollow
            owner = owner._before


def owned(parameters: Mapping[str, Array]) -> OwnedParameters | None:
    """`parameters` if they may be let go of."""
    return parameters if isinstance(parameters, OwnedParameters) else None


def successors(before: Mapping[str, Array], parameters: dict[str, Array]) -> dict[str, Array]:
    """`parameters` of a model made from one with those `before`; owned ones that are not among them are let go of."""
    own = owned(before)
    if own is None:
        return parameters
    for name in before.keys() - parameters.keys():
        own.let_go(name)
    return OwnedParameters(parameters, own)
