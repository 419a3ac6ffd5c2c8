"""If: one of two nets, as a value decides."""

from __future__ import annotations

from collections.abc import Sequence

from dagexec.core.blob import assign
from dagexec.core.body import OperatorWithBodies
from dagexec.core.gradient import no_gradient
from dagexec.core.operator import Operator, Step
from dagexec.core.proto import OperatorDef
from dagexec.core.registry import operator
from dagexec.core.schema import UNBOUNDED, BodyCall, BodyTypes, OpSchema, RowsCall
from dagexec.core.traits import Rows
from dagexec.core.workspace import Workspace
from dagexec.errors import ShapeError

CAPTURED = "names in the nets of the last inputs, which these read from outside"


def truth_of(owner: Operator, index: int) -> bool:
    """Input `index`, which must be one truth value. Raises ShapeError."""
    array = owner.input(index).array
    if array.size != 1 or array.dtype.kind != "b":
        found = f"{array.dtype}{list(array.shape)}"
        raise ShapeError(f"{owner.label}: {owner.input_blobs[index].name!r} must be one bool, found {found}")
    return bool(array.item())


def _infer_bodies(call: BodyCall) -> BodyTypes:
    """Outputs have the type that both nets give them."""
    then, other = call.results("then_net", ()), call.results("else_net", ())
    outputs = [one if one == two else None for one, two in zip(then, other, strict=False)]
    return BodyTypes(outputs, {"then_net": (), "else_net": ()})


def _rows(asked: RowsCall) -> Sequence[Rows | None]:
    """What both nets give: examples take the same one, so the condition is no example's own."""
    asked.require_shared([0])
    asked.require_uncounted(1)
    then, other = asked.results("then_net", ()), asked.results("else_net", ())
    for name, one, two in zip(asked.call.definition.output, then, other, strict=False):
        if one != two:
            raise asked.refuse(f"output {name!r} has other rows by one net than by the other: {one} and {two}")
    return then


@operator(
    OpSchema(
        "If",
        inputs=(1, UNBOUNDED),
        outputs=(0, UNBOUNDED),
        infer=None,
        on_host=True,
        doc="Runs then_net if the condition, one bool, is true, else else_net. The outputs are what that net results "
        "in; types and shapes may differ between the two.",
        input_names=("condition", "captured..."),
        output_names=("results...",),
        args={
            "then_net": "a net that takes nothing",
            "else_net": "the other",
            "captured": CAPTURED,
        },
        required_args=("then_net", "else_net"),
        sub_nets=("then_net", "else_net"),
        infer_bodies=_infer_bodies,
        rows=_rows,
    )
)
class If(OperatorWithBodies):
    """Executes one of its bodies."""

    def __init__(self, definition: OperatorDef, workspace: Workspace, *, index: int = -1, net: str = "") -> None:
        super().__init__(definition, workspace, index=index, net=net)
        for argument in self.bodies:
            self.expect(argument, 0, len(self.output_blobs))

    def prepare(self) -> Step:
        """Choose, execute, copy."""
        return self._execute

    def _execute(self) -> None:
        chosen = "then_net" if truth_of(self, 0) else "else_net"
        with self.naming(chosen):
            self.bodies[chosen]()
        for target, source in zip(self.output_blobs, self.results[chosen], strict=True):
            assign(target, source)


no_gradient("If")
