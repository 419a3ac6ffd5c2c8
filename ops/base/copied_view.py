"""Operators whose result is a part of a tensor, or its elements in another order: a view by NumPy, which is copied.

Where a run decides the sizes, the view is found in each of them: that takes less time than to prepare anything.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from dagexec.core.device import CPU
from dagexec.core.operator import Operator, Step
from dagexec.core.schema import OperatorCall

Viewing = Callable[[npt.NDArray[Any]], npt.NDArray[Any]]


class CopiedView(Operator):
    """Base of such operators."""

    @abstractmethod
    def viewing(self, call: OperatorCall) -> Viewing | None:
        """The view of tensors with as many axes as input 0 has, of any sizes; None where it depends on more."""

    def for_any_sizes(self) -> Step | None:
        """On the host, where the values that decide shapes are constant."""
        if self.runtime.device != CPU or self.definition.output[0] in self.definition.input:
            return None
        if any(self.input(index).constant is None for index in self.values_read):
            return None
        view = self.viewing(self.call())
        return None if view is None else partial(self._copy, view, len(self.input(0).shape))

    def _copy(self, view: Viewing, rank: int) -> None:
        x = self.x(0)
        if x.ndim != rank:
            call = self.call()
            self.bind(self.infer(call), call=call).step()
            return
        part = view(x)
        np.copyto(self.output(0).resize(part.shape, self.input(0).meta), part)
