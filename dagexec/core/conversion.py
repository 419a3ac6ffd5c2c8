"""Conversion: a copy between a strided tensor and an operator that reads or writes only packed arrays.

`Operator.bind` makes conversions where layouts ask for them; a trace gives each a span of its own. Layouts themselves
are described in `dagexec.core.descriptor`.
"""

from __future__ import annotations

from collections.abc import Callable

from dagexec.core.descriptor import TensorDescriptor
from dagexec.platform.records import dataclass


@dataclass(frozen=True, slots=True)
class Conversion:
    """A copy of one tensor's elements to memory of another layout, made in every run."""

    blob: str
    source: TensorDescriptor
    target: TensorDescriptor
    copy: Callable[[], object]


class ConvertedStep:
    """A step with the conversions of its strided inputs before it, and of its strided outputs after it."""

    __slots__ = ("after", "before", "step")

    def __init__(
        self, before: tuple[Conversion, ...], step: Callable[[], object], after: tuple[Conversion, ...]
    ) -> None:
        self.before = before
        self.step = step
        self.after = after

    def __call__(self) -> None:
        """Convert, compute, convert."""
        for conversion in self.before:
            conversion.copy()
        self.step()
        for conversion in self.after:
            conversion.copy()
