"""An operator in a blocked order for which oneDNN has no code: the same operator in NCHW, between copies of its images.

The layout pass asks before it puts an operator into an order. This serves nets that name an order themselves, such as
one that was compiled on a processor with other instructions.
"""

from __future__ import annotations

import logging
from functools import partial

import numpy as np

from dagexec.core.arguments import make_argument
from dagexec.core.errors import UnsupportedFeatureError
from dagexec.core.operator import Operator, Step, in_sequence
from dagexec.core.proto import OperatorDef
from dagexec.core.registry import create_operator
from dagexec.core.schema import OperatorCall
from dagexec.core.workspace import Workspace
from dagexec.ops.blocks import Array
from dagexec.ops.conv.fused import first_operand
from dagexec.ops.layout import BLOCKS, NCHW, image_order, logical_shape
from dagexec.ops.reorder import in_common_blocks

logger = logging.getLogger("dagexec")


def in_plain_order(operator: Operator, reason: UnsupportedFeatureError) -> Step:
    """The step of `operator`, which names a blocked order, by one in NCHW on copies of its images.

    Raises `reason` for an operand whose axes do not say what it is in NCHW.
    """
    call = operator.call()
    order, result = image_order(call), image_order(call, "output_order", image_order(call))
    arrays = [operator.x(index) for index in range(len(operator.input_blobs))]
    results = [operator.y(index) for index in range(len(operator.output_blobs))]
    rank = max(array.ndim for array in (*arrays, *results))
    workspace, before = Workspace(), list[Step]()
    for index, (name, array) in enumerate(zip(operator.definition.input, arrays, strict=True)):
        own = order if index == 0 else result
        if _is_unclear(call, index, array, rank):
            raise reason
        if workspace.has_blob(name):
            continue
        tensor = workspace.create_blob(name).tensor()
        blocked = own in BLOCKS and array.ndim == rank
        if blocked and array.shape[-1] == BLOCKS[own]:
            plain = tensor.resize(logical_shape(own, array.shape), operator.input(index).meta)
            before.append(_copied(array, own, plain, NCHW))
            continue
        tensor.adopt(array[..., 0] if blocked else array, writable=name in operator.definition.output)
        if operator.input(index).constant is not None:
            tensor.freeze()
    images = [index for index, array in enumerate(results) if array.ndim == rank and result in BLOCKS]
    for index in set(range(len(results))) - set(images):
        workspace.create_blob(operator.definition.output[index]).tensor().adopt(results[index], writable=True)
    twin = create_operator(_in_nchw(operator.definition, order, result), workspace)
    twin.memory_source = operator.memory_source
    logger.info("%s: computed in NCHW, between copies: %s", operator.label, reason)
    in_sequence(before)()  # a step may be prepared from the values
    step = twin.bind(twin.infer())
    operator.working_arrays += twin.working_arrays
    after = [_copied(twin.y(index), NCHW, results[index], result) for index in images]
    return in_sequence([*before, step, *after])


def _is_unclear(call: OperatorCall, index: int, array: Array, rank: int) -> bool:
    """True for an operand of post-ops that is stretched along axes it does not have: these differ between orders."""
    if call.definition.type != "FusedConv" or index < first_operand(call):
        return False
    return array.size > 1 and array.ndim < rank


def _in_nchw(definition: OperatorDef, order: str, result: str) -> OperatorDef:
    """`definition` with NCHW in place of blocked orders, on the host."""
    changed = OperatorDef()
    changed.CopyFrom(definition)
    changed.ClearField("device_option")
    del changed.arg[:]
    changed.arg.extend(argument for argument in definition.arg if argument.name not in ("order", "output_order"))
    changed.arg.append(make_argument("order", NCHW if order in BLOCKS else order))
    if any(argument.name == "output_order" for argument in definition.arg):
        changed.arg.append(make_argument("output_order", NCHW if result in BLOCKS else result))
    return changed


def _copied(source: Array, order: str, target: Array, other: str) -> Step:
    """A copy from `order` to `other`, of images that are not empty."""
    return partial(np.copyto, in_common_blocks(target, other, order), in_common_blocks(source, order, other))
