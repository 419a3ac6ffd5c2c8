"""Dropout on CUDA: the masks of the host, bit for bit.

With the iteration as second input the words come from Philox on the device: a thread computes a block of four words of
64 bits, which decide eight elements, from the block's number and the iteration, as NumPy's `Philox.random_raw` counts
them. Without it the operator's own generator draws on the host, and the mask is uploaded.
"""

from __future__ import annotations

import secrets

import numpy as np

from dagexec.core.operator import Step, in_sequence, nothing_to_do
from dagexec.devices.cuda.arrays import address
from dagexec.ops.engines.cuda.base.copy import copy_step
from dagexec.ops.engines.cuda.base.expression import computed_scalar, elementwise
from dagexec.ops.engines.cuda.base.kinds import on_cuda
from dagexec.ops.engines.cuda.base.operator import Array, CudaOperator
from dagexec.ops.engines.cuda.fill.fillers import filled, upload_step
from dagexec.ops.families.fill.dropout import Dropout, DropoutGrad, draw_step, last_kept, philox_key

_MASK = r"""
extern "C" __global__ void dropout_mask(const i64* iteration, bool* mask, u64 key0, u64 key1, u32 last_kept, i64 n) {
    FOR_EACH(block, (n + 7) / 8) {
        u64 c0 = (u64)block + 1, c1 = 0, c2 = (u64)iteration[0], c3 = 0, k0 = key0, k1 = key1;
        for (int round = 0; round < 10; ++round) {
            const u64 m0 = 0xD2E7470EE14C6C93ull, m1 = 0xCA5A826395121157ull;
            u64 high0 = __umul64hi(m0, c0), low0 = m0 * c0, high1 = __umul64hi(m1, c2), low1 = m1 * c2;
            c0 = high1 ^ c1 ^ k0;
            c1 = low1;
            c2 = high0 ^ c3 ^ k1;
            c3 = low0;
            k0 += 0x9E3779B97F4A7C15ull;
            k1 += 0xBB67AE8584CAA73Bull;
        }
        const u64 words[4] = {c0, c1, c2, c3};
        for (int j = 0; j < 8 && block * 8 + j < n; ++j)
            mask[block * 8 + j] = (u32)(words[j >> 1] >> (32 * (j & 1))) <= last_kept;
    }
}
"""
"""Philox 4x64 with 10 rounds, Salmon et al., 2011; NumPy increments the counter before it computes a block."""


@on_cuda(Dropout)
class CudaDropout(CudaOperator):
    """Dropout."""

    def prepare(self) -> Step:
        """In inference a copy, unless the output shares the input's storage; in training mask and product."""
        x, y = self.x(0), self.y(0)
        if self.arguments.bool("is_test"):
            copy = nothing_to_do if self.output(0).shares_storage_with(self.input(0)) else copy_step(y, x)
            return in_sequence([copy, *([filled(self, self.y(1), True)] if len(self.output_blobs) > 1 else [])])
        ratio, mask = self.arguments.float("ratio", 0.5), self.y(1)
        draw = filled(self, mask, True) if ratio == 0 else self._mask(mask, last_kept(ratio))
        return in_sequence([draw, masked(self, x, mask, y, ratio)])

    def _mask(self, mask: Array, last: np.uint32) -> Step:
        """The step that draws the mask: true where a word of 32 bits is at most `last`."""
        if len(self.input_blobs) == 1:
            drawn = np.empty(mask.shape, np.bool_)
            return upload_step(mask, drawn, draw_step(drawn, last, lambda: self.random.bit_generator.random_raw))
        given = self.definition.seed
        seed = secrets.randbits(64) if given is None else given
        key = philox_key(seed, self.arguments.string("drawn_as", self.definition.output[0]))
        key0, key1 = np.random.Philox(key=key).state["state"]["key"]  # as NumPy reads a pair of numbers
        arguments = [self.x(1), mask, key0, key1, last, np.int64(mask.size)]
        return self.launch("dropout_mask", _MASK, arguments, elements=-(-mask.size // 8))


def masked(operator: CudaOperator, x: Array, mask: Array, y: Array, ratio: float) -> Step:
    """A step that computes `y = x * mask / (1 - ratio)`; `y` may be `x`."""
    scalars = {"scale": computed_scalar(x, 1 / (1 - ratio))}
    code = "y = x * (mask ? scale : A(0));"
    return elementwise(operator, "masked", {"x": x, "mask": mask}, {"y": y}, code, scalars)


@on_cuda(DropoutGrad)
class CudaDropoutGrad(CudaOperator):
    """The gradient of Dropout."""

    def prepare(self) -> Step:
        """A product, or a copy."""
        dy, dx = self.x(0), self.y(0)
        if not self.arguments.bool("is_test"):
            return masked(self, dy, self.x(1), dx, self.arguments.float("ratio", 0.5))
        return nothing_to_do if address(dy) == address(dx) else copy_step(dx, dy)
