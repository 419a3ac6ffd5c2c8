"""Whether tensors have elements: known from shapes alone, so nothing is read."""

from __future__ import annotations

from abc import abstractmethod
from functools import partial

from dagexec.core.dtypes import BOOL
from dagexec.core.gradient import no_gradient
from dagexec.core.operator import Operator, Step
from dagexec.core.registry import declares
from dagexec.core.schema import UNBOUNDED, OpSchema, TensorType
from dagexec.ops.families.shape.reshaping import no_cost


@declares
def _operator(name: str, most: int, doc: str) -> OpSchema:
    return OpSchema(
        name,
        inputs=(1, most),
        infer=lambda _call: [TensorType((), BOOL)],
        doc=doc,
        input_names=("X",) if most == 1 else ("X1", "X2", "..."),
        output_names=("Y",),
        cost=no_cost,
    )


class Emptiness(Operator):
    """Base of IsEmpty and HasElements."""

    reads_strided = True

    def prepare(self) -> Step:
        """The answer is known now; the step writes it."""
        return partial(self.y(0).fill, self.answer())

    @abstractmethod
    def answer(self) -> bool:
        """What the output holds."""

    def any_elements(self) -> bool:
        """True when an input has elements."""
        return any(self.x(index).size for index in range(len(self.input_blobs)))


@_operator("IsEmpty", 1, "True when X has no elements.")
class IsEmpty(Emptiness):
    """No elements."""

    def answer(self) -> bool:
        """True for a tensor of size 0."""
        return not self.any_elements()


@_operator("HasElements", UNBOUNDED, "True when any of the inputs has elements.")
class HasElements(Emptiness):
    """Some elements."""

    def answer(self) -> bool:
        """True unless all inputs are of size 0."""
        return self.any_elements()


no_gradient("IsEmpty", "HasElements")
