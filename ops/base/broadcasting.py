"""How two or more tensors of different shapes meet element by element: NumPy's rule, and Caffe2's older one.

NumPy's rule aligns shapes at their last axes and stretches axes of size 1, of any operand. Caffe2's older rule, asked
for with `broadcast=1`, keeps A's shape: the axes of B match a contiguous run of A's axes that begins at `axis` (by
default, A's last axes); leading and trailing axes of B of size 1, and a B of one element, are stretched.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from dagexec.core.schema import OperatorCall, TensorType
from dagexec.errors import ArgumentError

BROADCAST_ARGS = {
    "broadcast": "1: keep A's shape and match B to a run of A's axes (default 0: as NumPy)",
    "axis": "with broadcast: A's axis where B's first one belongs (default: B's axes are A's last)",
    "axis_str": "with broadcast: that axis as a letter of `order`, such as C",
    "order": "with axis_str: names of A's axes (default NCHW)",
}


def broadcast_shape(call: OperatorCall, shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """The shape that all `shapes` broadcast to by NumPy's rule. Raises ShapeError when there is none."""
    if shapes.count(shapes[0]) == len(shapes):
        return shapes[0]
    rank = max(map(len, shapes))
    padded = [(*(1,) * (rank - len(shape)), *shape) for shape in shapes]
    result = []
    for sizes in zip(*padded, strict=True):
        others = {size for size in sizes if size != 1}
        if len(others) > 1:
            raise call.fail(f"shapes {', '.join(map(str, shapes))} do not broadcast together")
        result.append(others.pop() if others else 1)
    return tuple(result)


def reduced_view(call: OperatorCall) -> tuple[int, ...]:
    """The shape under which B, which a sum is to be like, is stretched to A: `axis` needs no `broadcast` there.

    Raises ShapeError when B is not stretched to A's shape.
    """
    a, b, arguments = call.inputs[0].shape, call.inputs[1].shape, call.arguments
    if arguments.bool("broadcast") or arguments.int("axis", -1) != -1 or arguments.string("axis_str", ""):
        return _run_view(call, a, b, _run_start(call, len(a), len(b)))
    if broadcast_shape(call, [a, b]) != a:
        raise call.fail(f"B of shape {b} must broadcast to A's shape {a}")
    return b


def operand_views(call: OperatorCall) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The output shape of a binary operator, and the shape under which its B broadcasts to that by NumPy's rule.

    Raises ShapeError when the operands do not meet, ArgumentError for `axis` without `broadcast`.
    """
    a, b = call.inputs[0].shape, call.inputs[1].shape
    if not call.arguments.names():
        return broadcast_shape(call, [a, b]), b
    if call.arguments.bool("broadcast"):
        return a, _run_view(call, a, b, _run_start(call, len(a), len(b)))
    unread = "axis" if call.arguments.int("axis", -1) != -1 else "axis_str"
    if unread == "axis" or call.arguments.string("axis_str", ""):
        raise ArgumentError(f"{call.label}: argument {unread!r} requires broadcast=1")
    return broadcast_shape(call, [a, b]), b


def _run_start(call: OperatorCall, rank: int, run: int) -> int:
    """A's axis where B's first one belongs. Raises ArgumentError."""
    letter = call.arguments.string("axis_str", "")
    if not letter:
        axis = call.arguments.int("axis", -1)
        return rank - run if axis == -1 else axis
    order = call.arguments.string("order", "NCHW")
    if "axis" in call.arguments or len(letter) != 1 or letter not in order:
        raise ArgumentError(f"{call.label}: 'axis_str' must be a letter of {order!r}, without 'axis'; found {letter!r}")
    return order.index(letter)


def _run_view(call: OperatorCall, a: tuple[int, ...], b: tuple[int, ...], start: int) -> tuple[int, ...]:
    if math.prod(b) == 1:
        return (1,) * len(a)
    stretched = all(size == 1 for size in b)
    wide = [index for index, size in enumerate(b) if size != 1]
    first, last = (0, -1) if stretched else (wide[0], wide[-1])
    fits = start >= 0 and start + len(b) <= len(a)
    if not fits or b[first : last + 1] != a[start + first : start + last + 1]:
        raise call.fail(f"with broadcast=1, B of shape {b} must match a run of A's axes {a} from axis {start} on")
    return (*(1,) * start, *b, *(1,) * (len(a) - start - len(b)))


def require_inplace_fits(call: OperatorCall, output: TensorType) -> None:
    """Raise ShapeError when output 0 overwrites an input that has another shape or type than `output`."""
    result = call.definition.output[0]
    if result not in call.definition.input:
        return
    for name, kind in zip(call.definition.input, call.inputs, strict=True):
        if name == result and kind != output:
            raise call.fail(f"the output {output} cannot overwrite input {name!r}, which is {kind}")


def forward_call(call: OperatorCall, indices: Sequence[int]) -> OperatorCall:
    """What inference sees of an operator, from a call of its gradient, whose inputs `indices` are its inputs."""
    definition = call.definition.changed(inputs=[call.definition.input[index] for index in indices])
    inputs = tuple(call.inputs[index] for index in indices)
    return replace(call, definition=definition, inputs=inputs, values=(None,) * len(inputs))
