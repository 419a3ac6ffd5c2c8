"""If: one of two nets, as a value decides."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import numpy as np

from dagexec.core.blob import assign, tensor_in
from dagexec.core.body import InferredBody, SettledBody
from dagexec.core.dtypes import STRING
from dagexec.core.gradient import no_gradient
from dagexec.core.node import Node
from dagexec.core.operator import Operator, Prepared, Step
from dagexec.core.operator_with_bodies import OperatorWithBodies
from dagexec.core.registry import new_operator
from dagexec.core.rows_call import RowsCall
from dagexec.core.schema import UNBOUNDED, BodyCall, BodyTypes, OperatorCall
from dagexec.core.tensor import Storage, Tensor
from dagexec.core.traits import Rows
from dagexec.core.workspace import Workspace
from dagexec.errors import DagexecError, ShapeError
from dagexec.ops.base.blocks import Array
from dagexec.platform.records import dataclass

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


@new_operator(
    "If",
    inputs=(1, UNBOUNDED),
    outputs=(0, UNBOUNDED),
    infer=None,
    decided_by=(0,),
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
class If(OperatorWithBodies):
    """Executes one of its bodies."""

    def __init__(self, definition: Node, workspace: Workspace, *, index: int = -1, net: str = "") -> None:
        super().__init__(definition, workspace, index=index, net=net)
        for argument in self.bodies:
            self.expect(argument, 0, len(self.output_blobs))

    def infer_by_bodies(self, call: OperatorCall) -> InferredBody | None:
        """What the net results in that the condition chooses; where a run chooses, what both result in."""
        types = dict(zip(map(id, self.input_blobs[1:]), call.inputs[1:], strict=True))
        if call.values[0] is not None:
            chosen = self._chosen()
            return self.bodies[chosen].infer(types, self.results[chosen])
        try:
            found = [body.infer(types, self.results[name]) for name, body in self.bodies.items()]
        except DagexecError:  # of a net that may be there for other shapes
            return None
        then, other = found
        if then is None or other is None or then[0] != other[0]:
            return None
        return then[0], max(then[1], other[1])

    def prepare(self) -> Step:
        """Choose, execute, copy; where shapes decide, the chosen net's own steps."""
        if not self.is_inferred:
            return self._execute
        return self._chooser() if self.call().values[0] is None else self._settled(self._chosen()).prepared()

    def _chosen(self) -> str:
        return "then_net" if truth_of(self, 0) else "else_net"

    def _chooser(self) -> Step:
        """Executes the chosen net, which is prepared when it is chosen for the first time."""
        known: dict[str, _Branch] = {}

        def step() -> None:
            chosen = self._chosen()
            branch = known.get(chosen)
            if branch is None or not branch.body.in_place():
                with self.naming(chosen):
                    branch = known[chosen] = self._settled(chosen)
            branch()

        return step

    def _settled(self, chosen: str) -> _Branch:
        """A net that writes its results where the outputs are, as far as it can."""
        outside = set(map(id, self.input_blobs))
        inside = [
            (tensor_in(target), tensor_in(source))
            for target, source in zip(self.output_blobs, self.results[chosen], strict=True)
            if id(source) not in outside
        ]
        with _placed(inside):
            body = self.bodies[chosen].settle()
            pairs = [
                (tensor_in(target).array, tensor_in(source).array)
                for target, source in zip(self.output_blobs, self.results[chosen], strict=True)
            ]
        copies = tuple(partial(np.copyto, target, source) for target, source in pairs if target is not source)
        return _Branch(self, chosen, body, copies)

    def _execute(self) -> None:
        chosen = self._chosen()
        with self.naming(chosen):
            self.bodies[chosen]()
        for target, source in zip(self.output_blobs, self.results[chosen], strict=True):
            assign(target, source)


@dataclass(frozen=True, eq=False)
class _Branch:
    """A net of an If, prepared for shapes that stay; `copies` bring results that lie elsewhere to the outputs."""

    owner: If
    name: str
    body: SettledBody
    copies: tuple[Step, ...]

    def __call__(self) -> None:
        """Execute it once."""
        try:
            self.body.execute()
        except BaseException:
            with self.owner.naming(self.name):
                raise
        for copy in self.copies:
            copy()

    def prepared(self) -> Prepared:
        """As an operator is prepared that always executes it."""
        body = self.body
        parts: tuple[Step, ...] = (*body.parts, *self.copies) if body.parts else ()
        return Prepared(self, nbytes=body.nbytes, keeps=body, parts=parts, name_part=self._name_part, blobs=body.blobs)

    def _name_part(self, part: Step) -> str:
        place = f"{self.owner.label}, {self.name}"
        return place if part in self.copies else f"{place}: {self.body.name_part(part)}"


@contextmanager
def _placed(pairs: Iterable[tuple[Tensor, Tensor]]) -> Iterator[None]:
    """Within it, results may be prepared in the memory of packed outputs; `pairs` are of an output and a result.

    Afterwards that memory is not theirs to write in another preparation.
    """
    placed: list[tuple[Tensor, Array]] = []
    for output, result in pairs:
        array = output.array
        if result.constant is None and output.is_packed and output.meta is not STRING:
            result.rebind(array, _memory_of(array, writable=True))
            placed.append((result, array))
    try:
        yield
    finally:
        for result, array in placed:
            if result.current_array() is array:
                result.rebind(array, _memory_of(array, writable=False))


def _memory_of(array: Array, *, writable: bool) -> Storage:
    buffer = array.reshape(-1).view(np.uint8)
    return Storage(buffer, buffer.size, writable)


no_gradient("If")
