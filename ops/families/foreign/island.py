"""Island: a connected part of a net in a session of onnxruntime or OpenVINO, in place of operators of dagexec.

It has what they say of themselves: the types of its outputs are inferred by the operators that it stands for, which it
has as a net. Constants are inputs, so they are in memory once for all who read them. Only the compiler makes islands,
which a seal shows: what a model file says is one is refused.

What the runtime refuses, when it is opened or in a run, the operators of that net compute instead (`falls_back`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import TYPE_CHECKING, cast

import numpy as np

from dagexec import foreign
from dagexec.core.arguments import Arguments
from dagexec.core.body import NET_TYPE, Body
from dagexec.core.dtypes import from_numpy
from dagexec.core.gradient import no_gradient
from dagexec.core.inference import infer_listed
from dagexec.core.node import Node
from dagexec.core.operator import Operator, Prepared
from dagexec.core.profiled import ProfiledStep, StepPart
from dagexec.core.program import program_of
from dagexec.core.proto import NetDef
from dagexec.core.registry import new_operator
from dagexec.core.schema import UNBOUNDED, Cost, OperatorCall, TensorType
from dagexec.core.workspace import Workspace
from dagexec.errors import ModelFormatError
from dagexec.ops.base.blocks import Array
from dagexec.platform.forking import reset_after_fork
from dagexec.platform.lazy import LazyModule

if not TYPE_CHECKING:
    numpy_helper = LazyModule("onnx.numpy_helper")
else:
    import onnx
    from onnx import numpy_helper


logger = logging.getLogger("dagexec")


def _net(arguments: Arguments) -> NetDef:
    return arguments.net("net") or NetDef()


def _content(arguments: Arguments) -> bytes:
    return cast(bytes, arguments.field("model", "s") or b"")


@lru_cache(maxsize=64)
def _parsed(content: bytes, label: str) -> onnx.ModelProto:
    return foreign.parse(content, label)


@lru_cache(maxsize=64)
def _small_constants(content: bytes, label: str) -> Mapping[str, Array]:
    """The constants that the message itself has, by the names of the blobs."""
    found = _parsed(content, label).graph.initializer
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in found}


def check_sealed(arguments: Arguments, label: str) -> None:
    """Raise ModelFormatError for an island that the compiler of this process has not made."""
    net = _net(arguments).SerializeToString(deterministic=True)
    if not foreign.is_sealed(arguments.string("seal", ""), _content(arguments), net):
        raise ModelFormatError(f"{label}: islands are made by dagexec.compile, and not read from models")


def _inferred(call: OperatorCall) -> tuple[Sequence[TensorType], Cost]:
    """The types of the outputs and the work of the operators that the island stands for."""
    small = _small_constants(_content(call.arguments), call.label)
    types = {name: TensorType(array.shape, from_numpy(array.dtype)) for name, array in small.items()}
    types |= dict(zip(call.definition.input, call.inputs, strict=True))
    found = infer_listed(call.label, program_of(_net(call.arguments)).op, types, small)
    outputs = [kind for name in call.definition.output if (kind := found.blobs.get(name)) is not None]
    if len(outputs) < len(call.definition.output):
        raise call.fail("the types of its outputs do not follow from those of its inputs")
    return outputs, _sum([cost for cost in found.costs if cost is not None])


def _sum(costs: Sequence[Cost]) -> Cost:
    return Cost(*(sum(getattr(cost, name) for cost in costs) for name in ("flops", "bytes_read", "bytes_written")))


def infer_island(call: OperatorCall) -> Sequence[TensorType]:
    """The types of what the operators write that others read."""
    return call.once(_inferred)[0]


def island_cost(call: OperatorCall, _outputs: Sequence[TensorType]) -> Cost:
    """What the operators cost together."""
    return call.once(_inferred)[1]


@new_operator(
    "Island",
    inputs=(0, UNBOUNDED),
    outputs=(1, UNBOUNDED),
    infer=infer_island,
    cost=island_cost,
    doc="Operators of a net, computed by a session of onnxruntime or OpenVINO. `dagexec.compile` makes it.",
    args={
        "runtime": "onnxruntime or openvino",
        "version": "of the runtime",
        "model": "the operators as a serialized ModelProto; its inputs and outputs are the operator's, in order",
        "net": "the operators that it stands for",
        "constants": "how many of the last inputs never change",
        "specialized": "1 for a session for the first shapes of inputs, where the runtime can serve any with one",
        "falls_back": "1 to have the net compute what the runtime refuses",
        "reasons": "why the runtime computes them",
        "seal": "shows that the compiler made it",
    },
    required_args=("runtime", "model", "net", "seal"),
    foreign=True,
)
class Island(Operator):
    """A part of a net in a session of another runtime."""

    def __init__(self, definition: Node, workspace: Workspace, *, index: int = -1, net: str = "") -> None:
        """Raises ModelFormatError for one that the compiler did not make, and MissingBlobError."""
        super().__init__(definition, workspace, index=index, net=net)
        check_sealed(self.arguments, self.label)
        self._session: foreign.IslandSession | None = None
        reset_after_fork(self, Island._forget_session)

    def _forget_session(self) -> None:
        """In a child: the session is of the parent."""
        self._session = None

    def prepare(self) -> Prepared:
        """A run of the session, with inputs and outputs bound to it."""
        count = len(self.input_blobs) - self.arguments.int("constants", 0)
        inputs = [self.x(index) for index in range(count)]
        outputs = [self.y(index) for index in range(len(self.output_blobs))]
        refused = self._fall_back if self.arguments.int("falls_back", 0) else None
        bound = _BoundStep(self._open, inputs, outputs, refused)
        return Prepared(
            ProfiledStep(bound, bound.profiling),
            {index: partial(bound.set_input, index) for index in range(count)},
            {index: partial(bound.set_output, index) for index in range(len(self.output_blobs))},
        )

    def _open(self) -> foreign.IslandSession:
        if self._session is None:
            count = self.arguments.int("constants", 0)
            first = len(self.input_blobs) - count
            names = self.definition.input[first:]
            constants = {name: self.x(first + place) for place, name in enumerate(names)}
            message = _parsed(_content(self.arguments), self.label)
            specialized = self.arguments.int("specialized", 0) > 0
            model = foreign.IslandModel(message, constants, 1, specialized)
            runtime = cast(foreign.IslandRuntime, self.arguments.string("runtime", ""))
            self._session = foreign.open_island(runtime, model, self.label, self.definition.output)
        return self._session

    def _fall_back(self, error: Exception) -> _OwnKernels:
        """The operators that the island stands for, after an `error` of the runtime, which is logged."""
        runtime = self.arguments.string("runtime", "")
        logger.warning(
            "%s: %s does not compute it, the operators in its place do, slowly: %s: %s",
            self.label, runtime, type(error).__name__, error,
        )  # fmt: skip
        message = _parsed(_content(self.arguments), self.label)
        count = len(self.input_blobs) - self.arguments.int("constants", 0)
        names = [value.name for value in message.graph.input]
        inside = Workspace()
        for name, blob in zip(names[count:], self.input_blobs[count:], strict=True):
            inside.link_blob(name, blob)
        for name, array in _small_constants(_content(self.arguments), self.label).items():
            inside.feed_blob(name, array)
        return _OwnKernels(inside, _net(self.arguments), names[:count], [value.name for value in message.graph.output])


class _OwnKernels:
    """The operators that an island stands for, as a net in a workspace that has the constants."""

    def __init__(self, workspace: Workspace, net: NetDef, inputs: Sequence[str], outputs: Sequence[str]) -> None:
        definition = NetDef()
        definition.CopyFrom(net)
        definition.external_output[:] = outputs
        for name in inputs:
            workspace.create_local_blob(name)
        self._workspace, self._inputs, self._outputs = workspace, inputs, outputs
        self._body = cast(Body, workspace.build_net(definition, NET_TYPE))

    def __call__(self, inputs: Sequence[Array], outputs: Sequence[Array]) -> None:
        for name, array in zip(self._inputs, inputs, strict=True):
            self._workspace.feed_blob(name, array)
        self._body()
        for name, array in zip(self._outputs, outputs, strict=True):
            np.copyto(array, self._workspace.fetch_blob(name))


class _BoundStep:
    """The step of an island. In a child made by `os.fork` it is bound anew, to a session of the child's own."""

    def __init__(
        self,
        open_session: Callable[[], foreign.IslandSession],
        inputs: list[Array],
        outputs: list[Array],
        refused: Callable[[Exception], _OwnKernels] | None,
    ) -> None:
        """What `refused` makes of an error of the runtime computes from then on; without it the error is raised."""
        self._open = open_session
        self._inputs, self._outputs = inputs, outputs
        self._refused = refused
        self._own: _OwnKernels | None = None
        self._bound: foreign.BoundIsland | None = None
        with self._falling_back():
            self._bound = open_session().bound(inputs, outputs)
        reset_after_fork(self, _BoundStep._forget)

    def __call__(self) -> None:
        if self._own is None:
            with self._falling_back():
                if self._bound is None:
                    self._bound = self._open().bound(self._inputs, self._outputs)
                self._bound()
        if self._own is not None:
            self._own(self._inputs, self._outputs)

    @contextmanager
    def _falling_back(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # each runtime has its own
            if self._refused is None:
                raise
            self._own, self._bound = self._refused(error), None

    def set_input(self, index: int, array: Array) -> None:
        self._inputs[index] = array
        if self._bound is not None:
            self._bound.set_input(index, array)

    def set_output(self, index: int, array: Array) -> None:
        self._outputs[index] = array
        if self._bound is not None:
            self._bound.set_output(index, array)

    def profiling(self) -> Callable[[], Sequence[StepPart]]:
        """See `ProfiledStep`."""
        if self._own is None:
            with self._falling_back():
                return self._open().bound(self._inputs, self._outputs).profiling()
        return self._run_unprofiled

    def _run_unprofiled(self) -> Sequence[StepPart]:
        self()
        return ()

    def _forget(self) -> None:
        self._bound = None


no_gradient("Island")
