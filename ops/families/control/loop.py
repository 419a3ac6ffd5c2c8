"""Loop: a net over and over, while a count and a condition allow it, with values carried between iterations."""

from __future__ import annotations

from contextlib import suppress

import numpy as np

from dagexec.core import dtypes
from dagexec.core.blob import assign, tensor_in
from dagexec.core.dtypes import BOOL, FLOAT32, INT64
from dagexec.core.gradient import no_gradient
from dagexec.core.node import Node
from dagexec.core.operator import Operator, Step
from dagexec.core.operator_with_bodies import OperatorWithBodies
from dagexec.core.registry import new_operator
from dagexec.core.rows_call import RowsCall
from dagexec.core.schema import UNBOUNDED, BodyCall, BodyTypes, TensorType
from dagexec.core.tensor import Tensor
from dagexec.core.traits import Rows
from dagexec.core.workspace import Workspace
from dagexec.errors import DagexecError, RunCancelledError, RunTimeoutError, SchemaError, ShapeError
from dagexec.ops.base.blocks import Array
from dagexec.ops.families.control.carrying import Carrying, Stacking, deliver, require_kept, with_axis
from dagexec.ops.families.control.conditional import CAPTURED, truth_of

_NET = "loop_net"
_ROUNDS = 4
"""Of inference: in each, carried values become unknown whose types change, and those that follow in the next."""

STACKED_TYPES = "the data types of rows of the stacked outputs, for when there are none to tell"
STACKED_SHAPES = "the shapes of such rows, as texts such as 2,0,3; 0 for an open size, empty without axes, ? if unknown"


def _infer_bodies(call: BodyCall) -> BodyTypes:
    """Carried values that keep their types have them in every iteration; what is stacked has as many rows as there are.

    An output that is stacked is known where the number of iterations is: a constant, of a loop without a condition.
    """
    arguments = call.arguments
    first = int(arguments.bool("trip_count")) + int(arguments.bool("condition"))
    number = TensorType((1,) * arguments.int("number_axes", 0), INT64)
    carried = list(call.inputs[first:])
    for _ in range(_ROUNDS):
        given = (number, TensorType((), BOOL), *carried)
        results = call.results(_NET, given)
        kept = [one if one == two else None for one, two in zip(carried, results[1:], strict=False)]
        if kept == carried:
            break
        carried = kept
    else:
        return BodyTypes([], {})
    rows = _iterations(call)
    stacked = [None if rows is None else with_axis(kind, 0, rows) for kind in results[1 + len(carried) :]]
    return BodyTypes([*carried, *stacked], {_NET: given})


def _rows(asked: RowsCall) -> list[Rows | None]:
    """Carried values keep their rows, and what is stacked has them behind a new axis.

    All examples have as many iterations: neither count nor condition may be an example's own.
    """
    arguments = asked.call.arguments
    first = int(arguments.bool("trip_count")) + int(arguments.bool("condition"))
    own = len(asked.rows) - len(arguments.strings("captured"))
    asked.require_shared(range(first))
    asked.require_uncounted(own)
    carried = asked.rows[first:own]
    goes_on, *results = asked.results(_NET, (None, None, *carried))
    if goes_on is not None:
        raise asked.refuse("how many iterations there are differs from row to row")
    require_kept(asked, carried, results[: len(carried)])
    stacked = [rows and rows.at(rows.axis + 1) for rows in results[len(carried) :]]
    return [*carried, *stacked]


def _iterations(call: BodyCall) -> int | None:
    """How many iterations there are in every run, if that is known."""
    count = call.values[0] if call.arguments.bool("trip_count") else None
    net = call.arguments.net(_NET)
    if count is None or count.size != 1 or call.arguments.bool("condition") or net is None:
        return None
    always = net.external_output[:1] == net.external_input[1:2]
    return int(count.item()) if always and count.item() > 0 else None


@new_operator(
    "Loop",
    inputs=(0, UNBOUNDED),
    outputs=(0, UNBOUNDED),
    infer=None,
    on_host=True,
    doc="Runs loop_net as long as fewer than trip_count iterations are done and the condition is true; each of the "
    "two is an input if the argument of its name says so, and does not end the loop otherwise. The net takes the "
    "number of the iteration (int64), the condition, and the carried values; it results in the condition for the "
    "next iteration, the carried values for it, which may change their shapes, and values to be stacked. Outputs "
    "are the carried values after the last iteration, then what was stacked, in a new first axis.",
    input_names=("trip_count", "condition", "carried...", "captured..."),
    output_names=("carried...", "stacked..."),
    args={
        "loop_net": "the net",
        "trip_count": "there is an input that says how many iterations there are at most",
        "condition": "there is an input that says whether there is a first iteration",
        "number_axes": "axes of length 1 of the iteration's number (default: 0)",
        "stacked_types": STACKED_TYPES,
        "stacked_shapes": STACKED_SHAPES,
        "captured": CAPTURED,
    },
    required_args=(_NET,),
    sub_nets=(_NET,),
    infer_bodies=_infer_bodies,
    rows=_rows,
)
class Loop(OperatorWithBodies):
    """Executes its body over and over."""

    def __init__(self, definition: Node, workspace: Workspace, *, index: int = -1, net: str = "") -> None:
        super().__init__(definition, workspace, index=index, net=net)
        self._has_count = self.arguments.bool("trip_count")
        self._has_condition = self.arguments.bool("condition")
        self._number_axes = self.arguments.int("number_axes", 0)
        if not 0 <= self._number_axes <= 1:
            raise SchemaError(f"{self.label}: number_axes must be 0 or 1, found {self._number_axes}")
        self._first = int(self._has_count) + int(self._has_condition)
        self._carried = len(self.input_blobs) - self._first - self.captured
        stacked = len(self.output_blobs) - self._carried
        if self._carried < 0 or stacked < 0:
            raise SchemaError(
                f"{self.label}: {len(self.input_blobs)} inputs and {len(self.output_blobs)} outputs do not fit: "
                f"outputs are the carried values and what is stacked"
            )
        self.expect(_NET, 2 + self._carried, 1 + self._carried + stacked)
        self._types = row_types(self, stacked)

    def prepare(self) -> Step:
        """Iterate; what an iteration leaves is for the next one alone."""
        results = self.results[_NET]
        self._next = Carrying(self.given[_NET][2:], results[1 : 1 + self._carried])
        self._stacks = [Stacking(blob, self.label) for blob in results[1 + self._carried :]]
        return self._execute

    def _execute(self) -> None:
        number, condition, *carried = self.given[_NET]
        iteration = tensor_in(number)
        iteration.resize((1,) * self._number_axes, INT64)
        tensor_in(condition).resize((), BOOL)[...] = True
        for target, source in zip(carried, self.input_blobs[self._first :], strict=False):
            assign(target, source)
        for stack in self._stacks:
            stack.clear()
        done = self._iterate(iteration)
        for target, source in zip(self.output_blobs, carried, strict=False):
            assign(target, source)
        stacked = self.output_blobs[self._carried :]
        for target, stack, kind in zip(stacked, self._stacks, self._types, strict=True):
            deliver(target, stack.stacked() if done else self._no_rows(stack, kind))

    def _iterate(self, iteration: Tensor) -> int:
        """How many iterations there were."""
        body, carry, stacks, goes_on = self.bodies[_NET], self._next, self._stacks, self.results[_NET][0]
        always = goes_on is self.given[_NET][1]  # the condition that it was given, which is true
        count = self._count()
        done = 0
        going = truth_of(self, int(self._has_count)) if self._has_condition else True
        try:
            while going and done < count:
                iteration.array[...] = done  # where it lies now: the body's preparation may have moved it
                body()
                going = always or self._condition(goes_on.get(Tensor).array)
                for stack in stacks:
                    stack.add()
                carry()
                done += 1
        except (RunCancelledError, RunTimeoutError):
            raise
        except DagexecError as error:
            raise self.failed(f"iteration {done}", error) from error
        return done

    def _count(self) -> float:
        if not self._has_count:
            return np.inf
        array = self.input(0).array
        if array.size != 1 or array.dtype.kind not in "iu":
            raise ShapeError(
                f"{self.label}: the trip count must be one integer, found {array.dtype}{list(array.shape)}"
            )
        return int(array.item())

    def _condition(self, array: Array) -> bool:
        if array.size != 1:
            raise ShapeError(f"{self.label}: the condition must be one bool, found {array.dtype}{list(array.shape)}")
        return bool(array.item())

    def _no_rows(self, stack: Stacking, kind: TensorType) -> Array:
        """No rows, of the type that the body would give if it is known before it runs."""
        with suppress(DagexecError):
            self.bodies[_NET].prepare()
        return stack.no_rows(kind)


def row_types(owner: Operator, count: int) -> list[TensorType]:
    """The types of rows that the arguments say; what they do not say is float32 without axes. Raises SchemaError."""
    numbers = owner.arguments.ints("stacked_types") or [FLOAT32.number] * count
    shapes = owner.arguments.strings("stacked_shapes") or ["?"] * count
    if len(numbers) != count or len(shapes) != count:
        raise SchemaError(
            f"{owner.label}: expected {count} stacked_types and stacked_shapes, one for each stacked output; found "
            f"{len(numbers)} and {len(shapes)}"
        )
    try:
        sizes = [tuple(map(int, shape.split(","))) if shape not in ("", "?") else () for shape in shapes]
    except ValueError:
        raise SchemaError(f"{owner.label}: stacked_shapes must be sizes with commas between, found {shapes}") from None
    return [TensorType(shape, dtypes.from_number(number)) for shape, number in zip(sizes, numbers, strict=True)]


no_gradient("Loop")
