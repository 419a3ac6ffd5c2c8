"""An operator in a blocked order for which oneDNN has no code: the same operator in NCHW, between copies of its images.

The layout pass asks before it puts an operator into an order. This serves nets that name an order themselves, such as
one that was compiled on a processor with other instructions.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial

import numpy as np

from dagexec.core.arguments import ArgumentValue
from dagexec.core.node import Node
from dagexec.core.operator import Operator, Step, in_sequence
from dagexec.core.registry import create_operator
from dagexec.core.schema import OperatorCall
from dagexec.core.workspace import Workspace
from dagexec.errors import UnsupportedFeatureError
from dagexec.ops.base.blocks import Array
from dagexec.ops.base.layout import BLOCKS, NCHW, image_order, logical_shape
from dagexec.ops.families.conv.fused import first_operand
from dagexec.ops.families.shape.reorder import in_common_blocks
from dagexec.platform.records import dataclass

logger = logging.getLogger("dagexec")


@dataclass(frozen=True)
class NCHWFallback:
    """An operator in NCHW on the arrays of one that may be in a blocked order, and the copies around it."""

    before: list[Step]
    operator: Operator
    after: list[Step]


def in_plain_order(operator: Operator, reason: UnsupportedFeatureError) -> Step:
    """The step of `operator`, which names a blocked order, by one in NCHW on copies of its images.

    Raises `reason` for an operand whose axes do not say what it is in NCHW.
    """
    arrays = [operator.x(index) for index in range(len(operator.input_blobs))]
    results = [operator.y(index) for index in range(len(operator.output_blobs))]
    constant = [operator.input(index).constant is not None for index in range(len(arrays))]
    try:
        twin = nchw_fallback(operator.call(), arrays, results, operator.definition.engine, constant)
    except UnsupportedFeatureError:
        raise reason from None
    logger.info("%s: computed in NCHW, between copies: %s", operator.label, reason)
    in_sequence(twin.before)()  # a step may be prepared from the values
    prepared = twin.operator.bind(twin.operator.infer(), memory=operator.working_memory)
    return in_sequence([*twin.before, prepared.step, *twin.after])


def nchw_fallback(
    call: OperatorCall, arrays: Sequence[Array], results: Sequence[Array], engine: str, constant: Sequence[bool] = ()
) -> NCHWFallback:
    """The operator of `call` with engine `engine` in NCHW, if its order is a blocked one; it has prepared nothing.

    `constant` says which inputs never change. Raises UnsupportedFeatureError for an operand whose axes do not say what
    it is in NCHW.
    """
    require_clear(call, arrays, results)
    order, result = _orders(call)
    definition, names = call.definition, list(call.definition.output)
    rank = max(array.ndim for array in (*arrays, *results))
    workspace, before = Workspace(), list[Step]()
    for index, (name, array) in enumerate(zip(definition.input, arrays, strict=True)):
        own = order if index == 0 else result
        if workspace.has_blob(name):
            continue
        tensor = workspace.create_blob(name).tensor()
        blocked = own in BLOCKS and array.ndim == rank
        if blocked and array.shape[-1] == BLOCKS[own]:
            plain = tensor.resize(logical_shape(own, array.shape), call.inputs[index].meta)
            before.append(_copied(array, own, plain, NCHW))
            continue
        tensor.adopt(array[..., 0] if blocked else array, writable=name in names)
        if constant and constant[index]:
            tensor.freeze()
    images = [index for index, array in enumerate(results) if array.ndim == rank and result in BLOCKS]
    for index in set(range(len(results))) - set(images):
        workspace.create_blob(names[index]).tensor().adopt(results[index], writable=True)
    twin = create_operator(_in_nchw(definition, order, result, engine), workspace)
    after: list[Step] = [partial(_copy_image, twin, index, results[index], result) for index in images]
    return NCHWFallback(before, twin, after)


def require_clear(call: OperatorCall, arrays: Sequence[Array], results: Sequence[Array]) -> None:
    """Raise UnsupportedFeatureError where `nchw_fallback` does: for an operand that may be several things in NCHW."""
    order, result = _orders(call)
    if order not in BLOCKS and result not in BLOCKS:
        return
    rank = max(array.ndim for array in (*arrays, *results))
    for index, (name, array) in enumerate(zip(call.definition.input, arrays, strict=True)):
        if (order if index == 0 else result) in BLOCKS and _is_unclear(call, index, array, rank):
            raise UnsupportedFeatureError(f"{call.label}: input {name!r} of shape {array.shape} is ambiguous in NCHW")


def _orders(call: OperatorCall) -> tuple[str, str]:
    """Of what is read, and of what is written."""
    order = image_order(call)
    return order, image_order(call, "output_order", order)


def _is_unclear(call: OperatorCall, index: int, array: Array, rank: int) -> bool:
    """True for an operand of post-ops that is stretched along axes it does not have: these differ between orders."""
    if call.definition.type != "FusedConv" or index < first_operand(call):
        return False
    return array.size > 1 and array.ndim < rank


def _in_nchw(definition: Node, order: str, result: str, engine: str) -> Node:
    """`definition` with NCHW in place of blocked orders, on the host, with engine `engine`."""
    arguments: dict[str, ArgumentValue | None] = {}
    if order in BLOCKS or result in BLOCKS:
        arguments["order"] = NCHW if order in BLOCKS else order
        if "output_order" in definition.values:
            arguments["output_order"] = NCHW if result in BLOCKS else result
    return Node(
        definition.type, definition.input, definition.output, definition.values, name=definition.name, engine=engine
    ).changed(arguments=arguments)


def _copy_image(twin: Operator, index: int, target: Array, order: str) -> None:
    _copied(twin.y(index), NCHW, target, order)()


def _copied(source: Array, order: str, target: Array, other: str) -> Step:
    """A copy from `order` to `other`, of images that are not empty."""
    return partial(np.copyto, in_common_blocks(target, other, order), in_common_blocks(source, order, other))
