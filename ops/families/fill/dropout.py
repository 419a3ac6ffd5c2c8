"""Dropout: in training some elements are set to zero at random, by a mask that the gradient uses; in inference none.

A mask comes from Philox (Salmon et al., 2011, "Parallel random numbers: as easy as 1, 2, 3"), whose stream is a pure
function of a key and a counter, so no schedule changes it. With the iteration as second input the key is the seed and
the name of the output (or another that is given), and the counter the iteration: a run that is resumed draws what it
would have drawn. Without it the operator's own generator, made from the seed, continues from run to run.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from dagexec.core.arguments import Arguments
from dagexec.core.dtypes import BOOL, FLOAT_TYPES, INT64, TypeMeta
from dagexec.core.gradient import GradientOperators, GradientRequest, gradient_of
from dagexec.core.operator import Operator, Step, in_sequence, nothing_to_do
from dagexec.core.registry import new_operator
from dagexec.core.rows import elementwise
from dagexec.core.schema import OperatorCall, TensorType, first_to_first, memory_cost
from dagexec.core.traits import ImageRole
from dagexec.errors import ArgumentError
from dagexec.ops.base.blocks import BLOCK, Array, Scratch, block_indices, compute_dtype, convert, is_narrow
from dagexec.ops.base.pieces import is_same_memory
from dagexec.platform.lazy import LazyModule

if not TYPE_CHECKING:
    hashlib = LazyModule("hashlib")
else:
    import hashlib

_WORDS = 1 << 32  # values of a random word of 32 bits
_DRAWN = 1 << 14  # elements of a mask that are drawn at a time, an even number: 64 KiB of random words


def _ratio(call: OperatorCall) -> float:
    """The part that is dropped. Raises ArgumentError outside of [0, 1)."""
    ratio = call.arguments.float("ratio", 0.5)
    if not 0 <= ratio < 1:
        raise ArgumentError(f"{call.label}: argument 'ratio' must be in [0, 1), found {ratio:g}")
    return ratio


def infer_dropout(call: OperatorCall) -> list[TensorType]:
    """Y has the type of X; the mask its shape, of bool."""
    _ratio(call)
    kind = call.inputs[0]
    if not call.arguments.bool("is_test"):
        call.require_types(0, *FLOAT_TYPES)
        if len(call.definition.output) != 2:
            raise call.fail("training (is_test=0) needs two outputs, Y and the mask; found 1")
    if len(call.inputs) > 1:
        call.require_types(1, INT64)
        if call.inputs[1].elements != 1:
            raise call.fail(f"the iteration must be one int64, found shape {call.inputs[1].shape}")
    return [kind, TensorType(kind.shape, BOOL)][: len(call.definition.output)]


def _in_test_mode(arguments: Arguments, _meta: TypeMeta, _count: int) -> tuple[str, ...] | None:
    return () if arguments.bool("is_test") else None


ARGUMENTS = {
    "is_test": "1: inference",
    "ratio": "part that training drops, in [0, 1) (default 0.5)",
    "drawn_as": "the name that decides the mask (default: that of Y), the same for a layer wherever it is",
}


@new_operator(
    "Dropout",
    inputs=(1, 2),
    outputs=(1, 2),
    infer=infer_dropout,
    doc="Y = X * mask / (1 - ratio), an element of the mask being true with probability 1 - ratio; with is_test=1, "
    "Y = X and a mask that is all true. Hinton et al., 2012, arXiv:1207.0580. The mask of a run is decided by "
    "device_option.random_seed, the name of Y (or `drawn_as`) and the iteration; without an iteration by the seed "
    "and the number of runs before; without a seed it is another in each process.",
    input_names=("X", "iteration (int64; may be left out)"),
    output_names=("Y", "mask"),
    args=ARGUMENTS,
    required_args=("is_test",),
    inplace=first_to_first,
    view=True,
    view_if="is_test",
    cost=lambda call, outputs: memory_cost(call, outputs, 4),
    reproducible=False,
    results=1,
    post_ops=_in_test_mode,
    image_role=ImageRole.ELEMENTWISE,
    moves_elements=True,
)
class Dropout(Operator):
    """Dropout."""

    def prepare(self) -> Step:
        """In inference a copy, unless the output shares the input's storage; in training mask and product by pieces."""
        if not self.arguments.bool("is_test"):
            return self._training()
        steps: list[Step] = []
        if not self.output(0).shares_storage_with(self.input(0)):
            steps.append(partial(np.copyto, self.y(0), self.x(0)))
        if len(self.output_blobs) > 1:
            steps.append(partial(self.y(1).fill, True))
        return in_sequence(steps)

    def _training(self) -> Step:
        """Draw the mask, then multiply."""
        ratio = _ratio(self.call())
        mask = self.y(1)
        product = masked(self, self.x(0), mask, self.y(0), ratio)
        if ratio == 0:
            return in_sequence([partial(mask.fill, True), product])
        draw = draw_step(mask, last_kept(ratio), self._generator())
        return in_sequence([draw, product])

    def _generator(self) -> Callable[[], Callable[[int], Array]]:
        """What gives, in each run, the function that draws so many random words of 64 bits."""
        if len(self.input_blobs) == 1:
            generator = self.random.bit_generator
            return lambda: generator.random_raw
        given = self.definition.seed
        seed = int.from_bytes(os.urandom(8), "little") if given is None else given
        key = philox_key(seed, self.arguments.string("drawn_as", self.definition.output[0]))
        iteration = self.x(1).reshape(-1)

        def at_iteration() -> Callable[[int], Array]:
            counter = [0, 0, int(iteration[0]) % (1 << 64), 0]
            return np.random.Philox(counter=counter, key=key).random_raw

        return at_iteration


def last_kept(ratio: float) -> np.uint32:
    """The largest random word of 32 bits that keeps an element."""
    return np.uint32(max(0, round((1 - ratio) * _WORDS) - 1))


def draw_step(mask: Array, last: np.uint32, generator: Callable[[], Callable[[int], Array]]) -> Step:
    """A step that fills `mask`, true where a random word is at most `last`.

    `generator` gives, in each run, the function that draws so many words of 64 bits.
    """
    flat = mask.reshape(-1)
    pieces = [flat[start : start + _DRAWN] for start in range(0, flat.size, _DRAWN)]

    def draw() -> None:
        raw = generator()
        for piece in pieces:
            words = raw((piece.size + 1) // 2).view(np.uint32)
            np.less_equal(words[: piece.size], last, out=piece)

    return draw


def philox_key(seed: int, name: str) -> tuple[int, int]:
    """The key of the masks of the operator whose output is called `name`: operators with one seed draw others."""
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return seed % (1 << 64), int.from_bytes(digest, "little")


def masked(owner: Operator, x: Array, mask: Array, y: Array, ratio: float) -> Step:
    """A step that computes `y = x * mask / (1 - ratio)`, piece by piece; `y` may be `x`."""
    if x.size == 0:
        return nothing_to_do
    x, mask, y = x.reshape(-1), mask.reshape(-1), y.reshape(-1)
    work = compute_dtype(x.dtype)
    scale: np.ndarray[Any, Any] = np.asarray(1 / (1 - ratio), work)
    scratch = Scratch(owner, min(x.size, BLOCK), work)
    steps: list[Step] = []
    for index in block_indices(x.shape):
        source, target = x[index], y[index]
        factor = scratch(0, source.shape)
        steps.append(partial(np.multiply, mask[index], scale, out=factor))
        if is_narrow(x.dtype):
            wide = scratch(1, source.shape)
            steps += [convert(source, wide), partial(np.multiply, wide, factor, out=wide), convert(wide, target)]
        else:
            steps.append(partial(np.multiply, source, factor, out=target))
    return in_sequence(steps)


def infer_dropout_gradient(call: OperatorCall) -> list[TensorType]:
    """The type of dY."""
    call.require_types(0, *FLOAT_TYPES)
    _ratio(call)
    if not call.arguments.bool("is_test"):
        if len(call.inputs) != 2:
            raise call.fail("training (is_test=0) needs two inputs, dY and the mask; found 1")
        call.require_types(1, BOOL)
        call.require_shape(1, call.inputs[0].shape, "the shape of dY")
    return [call.inputs[0]]


@new_operator(
    "DropoutGrad",
    inputs=(1, 2),
    infer=infer_dropout_gradient,
    doc="dX = dY * mask / (1 - ratio); with is_test=1, dX = dY.",
    input_names=("dY", "mask"),
    output_names=("dX",),
    args=ARGUMENTS,
    required_args=("is_test",),
    inplace=first_to_first,
    cost=lambda call, outputs: memory_cost(call, outputs, 2),
    rows=elementwise,
)
class DropoutGrad(Operator):
    """The gradient of Dropout."""

    def prepare(self) -> Step:
        """A product, or a copy."""
        dy, dx = self.x(0), self.y(0)
        if not self.arguments.bool("is_test"):
            return masked(self, dy, self.x(1), dx, _ratio(self.call()))
        return nothing_to_do if is_same_memory(dy, dx) else partial(np.copyto, dx, dy)


@gradient_of("Dropout")
def dropout_gradient(request: GradientRequest) -> GradientOperators:
    """DropoutGrad(dY, [mask]) -> dX."""
    masks = [] if request.arguments.bool("is_test") else [request.y(1)]
    return request.single("DropoutGrad", [request.dy(0), *masks], [0])
