"""Maps of one factor and summand a channel on CUDA, and their gradients."""

from __future__ import annotations

from dagexec.core.operator import Step, in_sequence
from dagexec.ops.engines.cuda.base.broadcast_reduction import reduced
from dagexec.ops.engines.cuda.base.expression import elementwise
from dagexec.ops.engines.cuda.base.kinds import on_cuda, registered_kinds
from dagexec.ops.engines.cuda.base.operator import CudaOperator
from dagexec.ops.families.normalization.channel_affine import ChannelAffine, ChannelAffineGradient


@on_cuda(*registered_kinds(ChannelAffine))
class _CudaChannelAffine(CudaOperator):
    """A line for each channel."""

    def prepare(self) -> Step:
        assert isinstance(self, ChannelAffine)
        view = type(self).view(self.call())
        inputs = {"x": self.x(0).reshape(view), "scale": self.x(1).reshape(1, view[1], 1)}
        code = "y = x * scale;"
        if len(self.input_blobs) == 3:
            inputs["bias"], code = self.x(2).reshape(1, view[1], 1), "y = x * scale + bias;"
        return elementwise(self, "channel_affine", inputs, {"y": self.y(0).reshape(view)}, code)


@on_cuda(*registered_kinds(ChannelAffineGradient))
class _CudaChannelAffineGradient(CudaOperator):
    """The gradients of such a map."""

    def prepare(self) -> Step:
        """The sums first, where they are outputs, as dX may overwrite dY."""
        assert isinstance(self, ChannelAffineGradient)
        view = type(self).view(self.call())
        row = (1, view[1], 1)
        dy, scale = self.x(0).reshape(view), self.x(len(self.input_blobs) - 1).reshape(row)
        steps: list[Step] = []
        if len(self.output_blobs) == 3:
            pair = {"dy": dy, "x": self.x(1).reshape(view)}
            dscale, dbias = (self.y(index).reshape(row) for index in (1, 2))
            steps.append(reduced(self, "channel_products", view, pair, dscale, "value = dy * x;"))
            steps.append(reduced(self, "channel_sums", view, {"dy": dy}, dbias))
        dx = {"dx": self.y(0).reshape(view)}
        return in_sequence(
            [*steps, elementwise(self, "channel_scaled", {"dy": dy, "scale": scale}, dx, "dx = dy * scale;")]
        )
