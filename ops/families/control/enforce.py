"""Assert and EnforceFinite: a run ends with an error where values are not what they must be. They have no outputs."""

from __future__ import annotations

from abc import abstractmethod

import numpy as np

from dagexec.core.dtypes import ALL_TYPES, BOOL, FLOAT_TYPES, INT32, INT64, TypeMeta
from dagexec.core.gradient import no_gradient
from dagexec.core.operator import Operator, Step
from dagexec.core.registry import declares
from dagexec.core.schema import OperatorCall, OpSchema, TensorType
from dagexec.errors import AssertionFailedError
from dagexec.ops.base.blocks import Array
from dagexec.ops.families.control.nan_check import check_finite


@declares
def _operator(name: str, metas: tuple[TypeMeta, ...], doc: str, args: dict[str, str]) -> OpSchema:
    def infer(call: OperatorCall) -> list[TensorType]:
        call.require_types(0, *metas)
        return []

    return OpSchema(name, infer=infer, doc=doc, input_names=("X",), args=args, effects=True)


class ValueCheck(Operator):
    """Base of operators that only check the values of their input."""

    def prepare(self) -> Step:
        """The check, of memory that already exists."""
        return self.check_of(self.x(0))

    @abstractmethod
    def check_of(self, x: Array) -> Step:
        """A step that raises unless array `x`, of the host, has the values it must have."""


@_operator("Assert", (BOOL, INT32, INT64), "An error unless all elements of X are true.", {
    "error_msg": "what the error says (default: which elements are false)"
})  # fmt: skip
class Assert(ValueCheck):
    """All elements are true."""

    def check_of(self, x: Array) -> Step:
        """AssertionFailedError, which names the operator and says `error_msg`."""
        message, name = self.arguments.string("error_msg", ""), self.input_blobs[0].name

        def check() -> None:
            if not x.all():
                place = [int(index) for index in np.argwhere(x == 0)[0]]
                found = f"{np.count_nonzero(x == 0)} of {x.size} elements of blob {name!r} are false, first {place}"
                raise AssertionFailedError(f"{self.label}: {message}{': ' if message else ''}{found}")

        return check


@_operator("EnforceFinite", ALL_TYPES, "An error when X has a NaN or an infinity. Only floats can have them.", {})
class EnforceFinite(ValueCheck):
    """All elements are numbers."""

    def check_of(self, x: Array) -> Step:
        """NonFiniteError, which names the blob and its first place."""
        name = self.input_blobs[0].name
        finite = np.empty(x.shape, np.bool_)

        def check() -> None:
            if self.input(0).meta in FLOAT_TYPES:
                check_finite(x, finite, name, "what computed it", self.label)

        return check


no_gradient("Assert", "EnforceFinite")
