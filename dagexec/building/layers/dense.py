"""Fully connected layers, embeddings, activations, and operators that join or reshape."""

from __future__ import annotations

from collections.abc import Sequence

from dagexec.building.fillers import Filler, constant, gaussian
from dagexec.building.net_builder import WEIGHT, NetBuilder
from dagexec.building.scopes import layer


class DenseLayers(NetBuilder):
    """Products, activations, and operators that join or reshape."""

    @layer
    def fc(
        self,
        blob_in: str,
        blob_out: str,
        dim_in: int,
        dim_out: int,
        *,
        weight_init: Filler | None = None,
        bias_init: Filler | None = None,
    ) -> str:
        """Fully connected layer over all axes but the first: weights `<out>_w` (dim_out x dim_in), bias `<out>_b`."""
        weight = self._weight(blob_out, [dim_out, dim_in], dim_in, weight_init)
        return self.add_operator("FC", [blob_in, weight, self._bias(blob_out, dim_out, bias_init)], [blob_out])

    @layer
    def embedding(self, indices: str, blob_out: str, rows: int, dim: int, *, weight_init: Filler | None = None) -> str:
        """The rows of table `<out>_w` (rows x dim) that `indices` (integers of any shape) name; its gradient is sparse.

        The table starts normal with standard deviation 1 / sqrt(dim), so that a row has length 1 on average.
        """
        filler = weight_init or gaussian(dim**-0.5)
        return self.gather(self.add_parameter(f"{blob_out}_w", [rows, dim], filler, tags=(WEIGHT,)), indices, blob_out)

    @layer
    def gather(self, data: str, indices: str, blob_out: str) -> str:
        """The rows of `data` that `indices` name."""
        return self.add_operator("Gather", [data, indices], [blob_out])

    @layer
    def relu(self, blob_in: str, blob_out: str) -> str:
        """max(x, 0); may be in place."""
        return self.add_operator("Relu", [blob_in], [blob_out])

    @layer
    def prelu(self, blob_in: str, blob_out: str, channels: int = 1, *, slope_init: Filler | None = None) -> str:
        """x where it is positive, else slope * x; a slope `<out>_slope` a channel, or one for all, which is learned.

        Slopes start at 0.25 (He et al. 2015, section 2.1).
        """
        slope = self.add_parameter(f"{blob_out}_slope", [channels], slope_init or constant(0.25))
        return self.add_operator("PRelu", [blob_in, slope], [blob_out], **self._order_argument())

    @layer
    def sigmoid(self, blob_in: str, blob_out: str) -> str:
        """1 / (1 + exp(-x)); may be in place."""
        return self.add_operator("Sigmoid", [blob_in], [blob_out])

    @layer
    def tanh(self, blob_in: str, blob_out: str) -> str:
        """The hyperbolic tangent; may be in place."""
        return self.add_operator("Tanh", [blob_in], [blob_out])

    @layer
    def clip(self, blob_in: str, blob_out: str, low: float, high: float) -> str:
        """x limited to [low, high]; may be in place. ReLU6 is 0 to 6."""
        return self.add_operator("Clip", [blob_in], [blob_out], min=float(low), max=float(high))

    @layer
    def softmax(self, blob_in: str, blob_out: str) -> str:
        """Softmax over all axes but the first."""
        return self.add_operator("Softmax", [blob_in], [blob_out])

    @layer
    def concat(self, blobs_in: Sequence[str], blob_out: str) -> str:
        """Concatenates blobs along their channels; the channel counts go to `_<out>_concat_dims`."""
        outputs = [blob_out, f"_{blob_out}_concat_dims"]
        return self.add_operator("Concat", blobs_in, outputs, order=self._order)

    @layer
    def sum(self, blobs_in: Sequence[str], blob_out: str) -> str:
        """The sum of blobs; may overwrite the first."""
        return self.add_operator("Sum", blobs_in, [blob_out])

    @layer
    def flatten(self, blob_in: str, blob_out: str) -> str:
        """All axes but the first as one."""
        return self.add_operator("Flatten", [blob_in], [blob_out])

    @layer
    def reshape(self, blob_in: str, blob_out: str, shape: Sequence[int]) -> str:
        """The same elements in another shape: 0 keeps an axis, -1 is what is left. The old shape is `_<out>_shape`."""
        return self.add_operator("Reshape", [blob_in], [blob_out, f"_{blob_out}_shape"], shape=list(shape))

    @layer
    def transpose(self, blob_in: str, blob_out: str, axes: Sequence[int]) -> str:
        """Axis `axes[i]` becomes axis i."""
        return self.add_operator("Transpose", [blob_in], [blob_out], axes=list(axes))

    @layer
    def stop_gradient(self, blob_in: str, blob_out: str) -> str:
        """The blob itself; the backward pass does not go further."""
        return self.add_operator("StopGradient", [blob_in], [blob_out])
