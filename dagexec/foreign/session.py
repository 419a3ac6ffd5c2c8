"""ForeignSession: what runs a part of a model, whichever runtime it is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy.typing as npt

Array = npt.NDArray[Any]


class ForeignSession(ABC):
    """A message made ready to run, of any number of threads at once.

    Attributes:
        runtime: the package that runs it.
        inputs, outputs: the names in the message, in order.
    """

    runtime: ClassVar[str]

    def __init__(self, inputs: Sequence[str], outputs: Sequence[str]) -> None:
        self.inputs = tuple(inputs)
        self.outputs = tuple(outputs)

    @abstractmethod
    def run(self, values: Sequence[object]) -> list[object]:
        """The outputs for these inputs: arrays, of strings as `str`, and lists, mappings or None for other values."""

    @abstractmethod
    def bound(self, inputs: Sequence[Array], outputs: Sequence[Array]) -> Callable[[], object]:
        """A call that reads `inputs` anew and writes to `outputs`, which have the shapes of the results.

        All are packed arrays of numbers or booleans. The call may not be under way twice at once.
        """
