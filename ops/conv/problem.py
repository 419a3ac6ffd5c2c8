"""ConvProblem: the sizes and arrays of one convolution, as every way to compute it needs them; and staged input.

Input X is N, C, spatial (or N, spatial, C), filter M, C/G, kernel (or M, kernel, C/G), bias M, output N, M, spatial.
float16 and bfloat16 are computed in float32: input, filter, bias and output are staged in scratch of that type.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import as_strided

from dagexec.core.operator import Step
from dagexec.ops.geometry import Axis, output_sizes

Array = npt.NDArray[Any]
Allocate = Callable[[Sequence[int], npt.DTypeLike], Array]


@dataclass(frozen=True)
class ConvProblem:
    """One convolution.

    Attributes:
        x, weights, bias, y: the arrays; `bias` may be None.
        axes: the window along each spatial axis.
        group: number of groups.
        channels_last: NHWC.
        work: the dtype to compute in.
        allocate: gives scratch memory that is kept between runs.
    """

    x: Array
    weights: Array
    bias: Array | None
    y: Array
    axes: tuple[Axis, ...]
    group: int
    channels_last: bool
    work: np.dtype[Any]
    allocate: Allocate

    @property
    def batch(self) -> int:
        """Number of images."""
        return int(self.x.shape[0])

    @property
    def channels(self) -> int:
        """Input channels."""
        return int(self.x.shape[-1 if self.channels_last else 1])

    @property
    def filters(self) -> int:
        """Output channels."""
        return int(self.weights.shape[0])

    @property
    def out(self) -> tuple[int, ...]:
        """Spatial sizes of the output."""
        return output_sizes(self.axes)

    @property
    def narrow(self) -> bool:
        """True when the arrays are of a 16-bit float type, so that everything is staged."""
        return self.work != self.x.dtype

    def staged(self, array: Array) -> tuple[Array, list[Step]]:
        """`array` in the work dtype, and the steps that bring its present values there."""
        if not self.narrow:
            return array, []
        wide = self.allocate(array.shape, self.work)
        return wide, [partial(np.copyto, wide, array)]

    def image_source(self) -> tuple[Array, Callable[[int], list[Step]]]:
        """An array with one image and its padding, and the steps that put image n there.

        Without padding and staging it is the input itself, and `windows` picks the image. The border is zero from the
        start and is never written.
        """
        spatial = slice(0, -1) if self.channels_last else slice(1, None)
        image_shape = list(self.x.shape[1:])
        image_shape[spatial] = [axis.covered for axis in self.axes]
        padded = self.allocate(image_shape, self.work)
        padded.fill(0)
        inner: list[slice] = [slice(None)] * padded.ndim
        outer = list(inner)
        for position, axis in zip(range(padded.ndim)[spatial], self.axes, strict=True):
            start, stop = max(0, axis.head), min(axis.covered, axis.head + axis.size)
            inner[position] = slice(start, max(start, stop))
            outer[position] = slice(start - axis.head, max(start, stop) - axis.head)
        target, source = padded[tuple(inner)], tuple(outer)

        def load(image: int) -> list[Step]:
            return [partial(np.copyto, target, self.x[image][source])]

        return padded, load

    @property
    def needs_source(self) -> bool:
        """True when an image must be copied before its windows can be viewed."""
        return self.narrow or any(axis.reads_padding for axis in self.axes)

    def windows(self, image: Array) -> Array:
        """All windows of an image as a view: C, kernel, out (or out, kernel, C for NHWC)."""
        strides = image.strides[:-1] if self.channels_last else image.strides[1:]
        steps = [stride * axis.stride for stride, axis in zip(strides, self.axes, strict=True)]
        taps = [stride * axis.dilation for stride, axis in zip(strides, self.axes, strict=True)]
        kernel = [axis.kernel for axis in self.axes]
        if self.channels_last:
            return as_strided(
                image, (*self.out, *kernel, image.shape[-1]), (*steps, *taps, image.strides[-1]), writeable=False
            )
        return as_strided(
            image, (image.shape[0], *kernel, *self.out), (image.strides[0], *taps, *steps), writeable=False
        )

    def add_bias(self, output: Array, bias: Array | None) -> list[Step]:
        """Steps that add the bias (in the work dtype) to an output image or batch seen as rows, in place.

        `output` ends in (M, pixels), or in (pixels, M) for NHWC.
        """
        if bias is None:
            return []
        return [partial(np.add, output, bias if self.channels_last else bias[:, None], out=output)]
