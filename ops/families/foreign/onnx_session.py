"""OnnxSession: nodes of an ONNX model that dagexec has no operators for, computed by another runtime.

Its types are inferred by ONNX's rules, where these tell them from the types of the inputs; else each run finds them.
Blobs may also hold variants: sequences, of mappings too, and optionals.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING, cast

import numpy as np

from dagexec import foreign
from dagexec.core.arguments import Arguments
from dagexec.core.blob import Blob, set_content, tensor_in
from dagexec.core.dtypes import STRING
from dagexec.core.gradient import no_gradient
from dagexec.core.node import Node
from dagexec.core.operator import Operator, Step
from dagexec.core.registry import new_operator
from dagexec.core.schema import NO_TENSOR, UNBOUNDED, OperatorCall, TensorType
from dagexec.core.variant import Content, Variant
from dagexec.core.workspace import Workspace
from dagexec.errors import ModelFormatError, ShapeError
from dagexec.ops.base.blocks import Array

if TYPE_CHECKING:
    import onnx


@lru_cache(maxsize=64)
def _parsed(content: bytes, label: str) -> onnx.ModelProto:
    return foreign.parse(content, label)


@lru_cache(maxsize=256)
def _inferred(content: bytes, inputs: tuple[TensorType, ...], label: str) -> tuple[TensorType, ...] | None:
    found = foreign.infer_types(_parsed(content, label), inputs, label)
    return None if found is None else tuple(found)


def message_of(definition: Node, arguments: Arguments, label: str) -> onnx.ModelProto:
    """The message of an operator. Raises ModelFormatError when it is none, or not for so many inputs and outputs."""
    message = _parsed(_content(arguments), label)
    for what, found, expected in (
        ("inputs", message.graph.input, definition.input),
        ("outputs", message.graph.output, definition.output),
    ):
        if len(found) != len(expected):
            raise ModelFormatError(f"{label}: its message has {len(found)} {what}, the operator {len(expected)}")
    return message


def _content(arguments: Arguments) -> bytes:
    return cast(bytes, arguments.field("model", "s") or b"")


def infer_session(call: OperatorCall) -> Sequence[TensorType]:
    """The types that ONNX's inference finds. Raises ShapeError where it does not find all."""
    message_of(call.definition, call.arguments, call.label)
    found = _inferred(_content(call.arguments), call.inputs, call.label)
    if found is None:
        raise call.fail("the types of its outputs do not follow from those of its inputs")
    return found


@new_operator(
    "OnnxSession",
    inputs=(0, UNBOUNDED),
    outputs=(1, UNBOUNDED),
    infer=infer_session,
    doc="Nodes of an ONNX model, computed by onnxruntime where it is installed and has their operators, else by "
    "onnx.reference.",
    args={
        "model": "the nodes as a serialized ModelProto, whose inputs and outputs are the operator's, in order",
        "reasons": "for each node, why dagexec has no operator for it",
        "inferred": "1: the types of the outputs follow from those of the inputs",
    },
    required_args=("model",),
    inferred_if="inferred",
    reproducible=False,
    on_host=True,
    foreign=True,
)
class OnnxSession(Operator):
    """A part of an ONNX model in a session of another runtime."""

    def __init__(self, definition: Node, workspace: Workspace, *, index: int = -1, net: str = "") -> None:
        """Raises ModelFormatError for a message that is none or that reads files, and MissingBlobError."""
        super().__init__(definition, workspace, index=index, net=net)
        self._message = message_of(definition, self.arguments, self.label)

    def input_type(self, index: int) -> TensorType:
        """The type of an input; NO_TENSOR for a variant."""
        return NO_TENSOR if isinstance(self.input_blobs[index].value, Variant) else super().input_type(index)

    def check_input_devices(self) -> None:
        """See Operator; variants are on the host."""
        for index, blob in enumerate(self.input_blobs):
            if not isinstance(blob.value, Variant):
                self._check_device("input", blob, self.input(index))

    def prepare(self) -> Step:
        """A run of the session, with inputs and outputs bound to it where their shapes are known."""
        values = [self._value(index) for index in range(len(self.input_blobs))]
        sized = self.schema.can_infer(self.definition)
        typed = foreign.complete(self._message, [foreign.type_of_value(value) for value in values], sized=sized)
        session = foreign.open_session(typed, self.label, self.arguments.int("threads", 1))
        if not sized:
            return partial(self._run, session, values)
        inputs = [value for value in values if isinstance(value, np.ndarray)]
        outputs = [self.y(index) for index in range(len(self.output_blobs))]
        if any(array.dtype == STRING.numpy for array in (*inputs, *outputs)):
            return partial(_copy_results, session, inputs, outputs)
        return session.bound(inputs, outputs)

    def _value(self, index: int) -> object:
        value = self.input_blobs[index].value
        return value.content if isinstance(value, Variant) else self.x(index)

    def _run(self, session: foreign.ForeignSession, arrays: Sequence[object]) -> None:
        """Run the session on these arrays, and on what variants hold now."""
        given = [
            blob.value.content if isinstance(blob.value, Variant) else array
            for blob, array in zip(self.input_blobs, arrays, strict=True)
        ]
        for blob, found in zip(self.output_blobs, session.run(list(map(_to_session, given))), strict=True):
            taken = _from_session(found)
            if isinstance(taken, tuple) and any(element is None for element in taken):
                what = f"an element of the sequence {blob.name!r} must be a tensor, found nothing"
                raise ShapeError(f"{self.label}: {what}")
            _take(blob, taken)


def _take(blob: Blob, found: object) -> None:
    """Have the blob hold a result: a tensor, or a variant of anything else."""
    if isinstance(found, np.ndarray):
        tensor_in(blob).adopt(np.ascontiguousarray(found).reshape(found.shape), writable=True)
    else:
        set_content(blob, cast(Content, found))


def _copy_results(session: foreign.ForeignSession, inputs: Sequence[Array], outputs: Sequence[Array]) -> None:
    """Run the session on copies, for strings, which it has in another form."""
    for target, found in zip(outputs, session.run(list(map(_to_session, inputs))), strict=True):
        np.copyto(target, np.asarray(_from_session(found)).reshape(target.shape), casting="unsafe")


def _to_session(value: object) -> object:
    """Strings as `str`, as runtimes want them."""
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, np.ndarray) and value.dtype == object:
        texts = np.empty(value.shape, object)
        texts.reshape(-1)[:] = [_to_session(item) for item in value.reshape(-1)]
        return texts
    if isinstance(value, tuple):
        return [_to_session(item) for item in value]
    return value


def _from_session(value: object) -> object:
    """Strings as `bytes`, as blobs hold them, but those of mappings; scalars of NumPy as arrays."""
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, np.ndarray) and value.dtype.kind in "OU":
        texts = np.empty(value.shape, object)
        texts.reshape(-1)[:] = [_from_session(item) for item in value.reshape(-1).tolist()]
        return texts
    if isinstance(value, np.generic):
        return np.asarray(value)
    return tuple(_from_session(item) for item in value) if isinstance(value, list | tuple) else value


no_gradient("OnnxSession")
