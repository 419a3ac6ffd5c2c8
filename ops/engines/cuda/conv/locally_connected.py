"""LC and its gradient on CUDA: windows become rows of taps, and one batched product multiplies those of each position.

Positions are taken in blocks that keep to the limit of working memory; for the gradient of X images are, since every
pixel is the sum of the rows of all positions that read it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from dagexec.core.operator import Operator, Step, in_sequence, nothing_to_do
from dagexec.core.registry import operator, schema_of
from dagexec.ops.base.blocks import compute_dtype
from dagexec.ops.base.geometry import output_sizes
from dagexec.ops.engines.cuda.activation.post_ops import epilogue
from dagexec.ops.engines.cuda.base.columns import col2im, im2col
from dagexec.ops.engines.cuda.base.expression import converted
from dagexec.ops.engines.cuda.base.matrices import product_of, stretched_sums
from dagexec.ops.engines.cuda.base.operator import Array, CudaOperator
from dagexec.ops.engines.cuda.base.windows import channels_first_view
from dagexec.ops.engines.cuda.conv.convolution import DEFAULT_LIMIT
from dagexec.ops.families.conv.gradient_outputs import BIAS, FILTER, INPUT, wanted_gradients
from dagexec.ops.families.conv.locally_connected import (
    Block,
    Layer,
    LocallyConnected,
    LocallyConnectedGradient,
    read_layer,
)


class CudaLayerOperator(CudaOperator):
    """What the layer and its gradient share on CUDA."""

    def layer(self) -> Layer:
        """The sizes."""
        return read_layer(self.call())

    def position_blocks(self, layer: Layer) -> tuple[list[Block], Array]:
        """All positions in blocks, and memory for the rows of taps of the largest."""
        elements = layer.batch * layer.group * layer.depth
        dtype = self.x(0).dtype
        most = max(1, min(DEFAULT_LIMIT // max(1, elements * dtype.itemsize), layer.positions))
        return layer.blocks(most), self.scratch((most * elements,), dtype)

    def row_buffer(self, layer: Layer, block: Block, memory: Array) -> Array:
        """The rows of taps of a block: P, G, N, depth."""
        shape = (block.places.stop - block.places.start, layer.group, layer.batch, layer.depth)
        return memory[: shape[0] * shape[1] * shape[2] * shape[3]].reshape(shape)

    def views(self, layer: Layer, block: Block, taps: Array, image: Array) -> list[tuple[Any, Any]]:
        """For each group a view N, C/G, spatial of an image tensor, and a view N, C/G, kernel, out of its taps."""
        rank, width = len(layer.axes), layer.channels // layer.group
        columns, pixels = layer.columns(taps, output_sizes(block.axes)), channels_first_view(image, layer.channels_last)
        order = (2 * rank, 2 * rank + 1, *range(2 * rank))
        return [
            (pixels[:, number * width : (number + 1) * width], columns[..., number, :, :].transpose(*order))
            for number in range(layer.group)
        ]

    def unroll(self, layer: Layer, block: Block, taps: Array) -> list[Step]:
        """The steps that fill the rows of taps of a block from X."""
        found = self.views(layer, block, taps, self.x(0))
        return [im2col(self, image, columns, block.axes, channels_last=layer.channels_last) for image, columns in found]


class CudaLocallyConnected(CudaLayerOperator, LocallyConnected):
    """A batched matrix product over positions and groups, all images in one."""

    def prepare(self) -> Step:
        """For each block: unroll the windows, multiply; then add the bias, in the order of Y."""
        layer, y = self.layer(), self.y(0)
        if not y.size:
            return nothing_to_do
        blocks, memory = self.position_blocks(layer)
        rows, matrices = layer.rows(y), layer.matrices(self.x(1))
        products = rows if layer.channels_last else self.scratch(rows.shape, y.dtype)
        steps: list[Step] = []
        for block in blocks:
            taps = self.row_buffer(layer, block, memory)
            steps += self.unroll(layer, block, taps)
            steps.append(product_of(self, taps, matrices[block.places].swapaxes(2, 3), products[block.places]))
        bias = layer.biases(self.x(2))[:, :, None] if len(self.input_blobs) == 3 else None
        return in_sequence([*steps, epilogue(self, products, rows, bias=bias)])


class CudaLocallyConnectedGradient(CudaLayerOperator, LocallyConnectedGradient):
    """Batched matrix products over positions and groups, for what is wanted and nothing else."""

    def prepare(self) -> Step:
        """dY by positions, then each wanted gradient."""
        layer = self.layer()
        rows, steps = layer.rows(self.x(2)), []
        if not layer.channels_last:
            collected = self.scratch(rows.shape, rows.dtype)
            steps.append(converted(self, rows, collected))
            rows = collected
        for number, name in enumerate(wanted_gradients(self.call())):
            target = self.y(number)
            if not target.size:
                continue
            if name == FILTER:
                steps += self._filter(layer, rows, layer.matrices(target))
            elif name == BIAS:
                shape = (layer.positions, layer.group, 1, layer.filters // layer.group)
                steps.append(stretched_sums(self, rows, shape, target))
            elif name == INPUT:
                steps += self._input(layer, rows, target)
        return in_sequence(steps)

    def _filter(self, layer: Layer, rows: Array, target: Array) -> list[Step]:
        """dW = D^T A, block by block."""
        steps: list[Step] = []
        blocks, memory = self.position_blocks(layer)
        for block in blocks:
            taps = self.row_buffer(layer, block, memory)
            steps += self.unroll(layer, block, taps)
            steps.append(product_of(self, rows[block.places].swapaxes(2, 3), taps, target[block.places]))
        return steps

    def _input(self, layer: Layer, rows: Array, target: Array) -> list[Step]:
        """dA = D W and its sum into dX, some images at a time; 16-bit floats in float32."""
        work = compute_dtype(target.dtype)
        elements = layer.positions * layer.group * layer.depth
        most = max(1, min(DEFAULT_LIMIT // max(1, elements * work.itemsize), layer.batch))
        memory, matrices = self.scratch((most * elements,), work), layer.matrices(self.x(1))
        whole = Block(slice(0, layer.positions), layer.axes)
        steps: list[Step] = []
        for first in range(0, layer.batch, most):
            part = replace(layer, batch=min(most, layer.batch - first))
            taps = self.row_buffer(part, whole, memory)
            steps.append(product_of(self, rows[:, :, first : first + part.batch], matrices, taps))
            found = self.views(part, whole, taps, target[first : first + part.batch])
            steps += [
                col2im(self, columns, image, layer.axes, channels_last=layer.channels_last) for image, columns in found
            ]
        return steps


def _register(op_type: str, base: type[Operator]) -> None:
    operator(schema_of(op_type), device="cuda")(type(f"Cuda{op_type}", (base,), {"__doc__": base.__doc__}))


for _suffix in ("", "1D", "2D", "3D"):
    _register(f"LC{_suffix}", CudaLocallyConnected)
    _register(f"LC{_suffix}Gradient", CudaLocallyConnectedGradient)
