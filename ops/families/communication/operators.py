"""Operators of ranks that work together. Input 0 is the common world, which they change: so all operators of one world
run in the order of the list on every rank, and no two ranks ever wait for each other in different collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from dagexec.core.gradient import no_gradient
from dagexec.core.io_access import IO
from dagexec.core.operator import Operator, Step
from dagexec.core.registry import new_operator, operator
from dagexec.core.schema import UNBOUNDED, OperatorCall, OpSchema, TensorType
from dagexec.errors import ArgumentError
from dagexec.ops.families.communication.collectives import (
    ALGORITHMS,
    Array,
    all_gather,
    all_reduce,
    barrier,
    broadcast,
    reduce,
)
from dagexec.ops.families.communication.common_world import DEFAULT_TIMEOUT, CommonWorld, connect


def _one_after_the_world(input_index: int, output_index: int) -> bool:
    """Output i may overwrite input i + 1."""
    return input_index == output_index + 1


def infer_as_tensors(call: OperatorCall) -> Sequence[TensorType]:
    """Each output has the type of the tensor it belongs to. Raises ShapeError when the numbers differ."""
    tensors = call.inputs[1:]
    if len(tensors) != len(call.definition.output):
        raise call.fail(f"expected an output for each of {len(tensors)} tensors, found {len(call.definition.output)}")
    if _divides(call) and any(kind.meta.numpy.kind in "iub" for kind in tensors):
        raise call.fail("the mean of integers is not an integer: only sums are supported")
    return tensors


def _divides(call: OperatorCall) -> bool:
    divisor = call.arguments.int("divisor", 1)
    if divisor < 1:
        raise ArgumentError(f"{call.label}: argument 'divisor' must be at least 1, found {divisor}")
    algorithm = call.arguments.string("algorithm", "tree")
    if algorithm not in ALGORITHMS:
        raise ArgumentError(
            f"{call.label}: argument 'algorithm' must be one of {', '.join(ALGORITHMS)}, found {algorithm!r}"
        )
    return divisor > 1 or call.arguments.bool("average")


def _collective(op_type: str, doc: str, args: dict[str, str]) -> OpSchema:
    return OpSchema(
        op_type,
        inputs=(2, UNBOUNDED),
        outputs=(1, UNBOUNDED),
        infer=infer_as_tensors,
        doc=doc,
        input_names=("comm_world", "X0, X1, ..."),
        output_names=("Y0, Y1, ... (each may overwrite its X)",),
        args=args,
        inplace=_one_after_the_world,
        handles=(0,),
        mutates=(0,),
        effects=True,
    )


@new_operator(
    "CreateCommonWorld",
    infer=None,
    inputs=(0, 1),
    doc="Joins a group of ranks that work together; ranks that give one name find each other. To be run once. A store, "
    "by which ranks of Caffe2 find each other, is not read.",
    input_names=("kv_handler",),
    handles=(0,),
    output_names=("comm_world",),
    args={
        "size": "how many ranks there are",
        "rank": "this one's number, from 0",
        "transport": "how they reach each other (default threads: those of this process)",
        "name": "of the group (default: the name of the output)",
        "timeout_ms": f"milliseconds that a rank waits for another (default {DEFAULT_TIMEOUT * 1000:.0f})",
    },
    unread_args=("interface", "mpi_rendezvous", "sync", "status_blob"),
    required_args=("size", "rank"),
    effects=True,
    does_io=IO.ANY,
)
class CreateCommonWorld(Operator):
    """Puts a rank's handle in its output."""

    def prepare(self) -> Step:
        """Joins when it runs; a second run leaves the first group and joins anew."""
        arguments = self.arguments
        rank, size = arguments.int("rank", 0), arguments.int("size", 1)
        blob = self.output_blobs[0]
        name = arguments.string("name", blob.name)
        kind = arguments.string("transport", "threads")
        timeout = arguments.float("timeout_ms", DEFAULT_TIMEOUT * 1000) / 1000

        def join() -> None:
            if isinstance(blob.value, CommonWorld):
                blob.value.close()
            blob.value = connect(kind, name, rank, size, timeout)

        return join


class WorldOperator(Operator):
    """One whose input 0 is the common world."""

    def world(self) -> CommonWorld:
        """The handle, as it is now."""
        return self.handle(0, CommonWorld)  # type: ignore[type-abstract]

    def in_place(self, action: Callable[[CommonWorld, Array], object]) -> Step:
        """Copy each tensor to its output, unless it is there, and have `action` change it."""
        outputs = [self.y(index) for index in range(len(self.output_blobs))]
        inputs = [self.x(index + 1) for index in range(len(outputs))]
        copied = [(y, x) for y, x in zip(outputs, inputs, strict=True) if y is not x]

        def run() -> None:
            for y, x in copied:
                np.copyto(y, x)
            world = self.world()
            for y in outputs:
                action(world, y)

        return run


@operator(
    _collective(
        "Allreduce",
        "Y_i = the sum of X_i over all ranks; the same bytes on every rank, and in every run.",
        {
            "algorithm": "tree (default; short tensors) or ring (long ones)",
            "average": "1 divides by the number of ranks",
            "divisor": "divides by this number (default 1), and by the number of ranks too with `average`",
        },
    )
)
class Allreduce(WorldOperator):
    """One all-reduce a tensor."""

    def prepare(self) -> Step:
        """In the order of the tensors."""
        algorithm = self.arguments.string("algorithm", "tree")
        divisor, average = self.arguments.int("divisor", 1), self.arguments.bool("average")

        def sum_up(world: CommonWorld, array: Array) -> None:
            all_reduce(world, array, algorithm=algorithm, divisor=divisor * (world.size if average else 1))

        return self.in_place(sum_up)


@operator(_collective("Broadcast", "Y_i = the X_i of rank `root`.", {"root": "the rank that has it (default 0)"}))
class Broadcast(WorldOperator):
    """One broadcast a tensor."""

    def prepare(self) -> Step:
        """In the order of the tensors."""
        root = self.arguments.int("root", 0)
        return self.in_place(lambda world, array: broadcast(world, array, root))


@operator(
    _collective(
        "Reduce",
        "On rank `root`, Y_i = the sum of X_i over all ranks; on others Y_i holds nothing of use.",
        {
            "root": "the rank that gets it (default 0)",
            "average": "1 divides by the number of ranks",
            "divisor": "divides by this number (default 1), and by the number of ranks too with `average`",
        },
    )
)
class Reduce(WorldOperator):
    """One reduction a tensor."""

    def prepare(self) -> Step:
        """In the order of the tensors."""
        root, average = self.arguments.int("root", 0), self.arguments.bool("average")
        divisor = self.arguments.int("divisor", 1)

        def sum_up(world: CommonWorld, array: Array) -> None:
            reduce(world, array, root, divisor=divisor * (world.size if average else 1))

        return self.in_place(sum_up)


@new_operator(
    "Allgather",
    infer=None,
    doc="Y[r] = the X of rank r, which has the same shape on all ranks.",
    input_names=("comm_world", "X"),
    output_names=("Y (size, *X's shape)",),
    handles=(0,),
    mutates=(0,),
    effects=True,
)
class Allgather(WorldOperator):
    """An all-gather."""

    def prepare(self) -> Step:
        """The output has a row for each rank of the world there is now."""
        x, tensor = self.x(1), self.input(1)
        self.output(0).resize((self.world().size, *x.shape), tensor.meta)
        y = self.y(0)
        return lambda: all_gather(self.world(), x, y)


def _world_only(op_type: str, doc: str) -> OpSchema:
    return OpSchema(
        op_type, infer=lambda _call: [], doc=doc, input_names=("comm_world",), handles=(0,), mutates=(0,), effects=True
    )


@operator(_world_only("Barrier", "Ends on no rank before it has begun on all."))
class Barrier(WorldOperator):
    """A barrier."""

    def prepare(self) -> Step:
        return lambda: barrier(self.world())


@operator(_world_only("DestroyCommonWorld", "Leaves the group: other ranks that wait for this one get an error."))
class DestroyCommonWorld(WorldOperator):
    """The end of a rank's part."""

    def prepare(self) -> Step:
        return lambda: self.world().close()


no_gradient("CreateCommonWorld", "DestroyCommonWorld", "Allreduce", "Broadcast", "Reduce", "Allgather", "Barrier")
