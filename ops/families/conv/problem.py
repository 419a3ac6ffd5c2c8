"""ConvProblem: the arrays and sizes of one convolution, as every algorithm needs them; Algorithm: a way to compute it.

Input X is N, C, spatial (or N, spatial, C), filter M, C/G, kernel (or M, kernel, C/G), bias M, output N, M, spatial.
The three directions of a convolution are described by the same arrays: forward computes `y`, the data gradient
computes `x` from `y` and `weights`, the filter gradient computes `weights` from `x` and `y`.

float16 and bfloat16 arrays are computed in float32, the work dtype: algorithms read them with a conversion into their
workspace and write their results with one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from dagexec.core.constant import Constant
from dagexec.core.operator import Step
from dagexec.ops.base.geometry import Axis, output_sizes
from dagexec.platform.records import dataclass

Array = npt.NDArray[Any]
Steps = Callable[["ConvProblem", "Allocate"], list[Step]]
"""Makes the steps that compute a convolution in memory that it asks for."""

Allocate = Callable[[Sequence[int], npt.DTypeLike], Array]
"""Gives memory of a shape and dtype. Its content is undefined at the start of every run: others use it in between."""

DEFAULT_LIMIT = 64 << 20  # bytes; Caffe2's default of ws_nbytes_limit


@dataclass(frozen=True)
class ConvProblem:
    """One convolution.

    Attributes:
        x, weights, y: the arrays; which of them is computed depends on the direction.
        bias: added to the output (to `x`, when a transposed convolution computes that); None without one.
        axes: the window along each spatial axis: `axis.size` pixels of x, `axis.out` of y.
        group: number of groups.
        channels_last: NHWC.
        work: the dtype to compute in.
        limit: the most bytes of workspace an algorithm may ask for.
        constant: keeps what is derived from `weights`, when these never change; otherwise None.
    """

    x: Array
    weights: Array
    bias: Array | None
    y: Array
    axes: tuple[Axis, ...]
    group: int
    channels_last: bool
    work: np.dtype[Any]
    limit: int = DEFAULT_LIMIT
    constant: Constant | None = None

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
    def kernel(self) -> tuple[int, ...]:
        """Taps along each axis."""
        return tuple(axis.kernel for axis in self.axes)

    @property
    def out(self) -> tuple[int, ...]:
        """Spatial sizes of the output."""
        return output_sizes(self.axes)

    @property
    def unit_strides(self) -> bool:
        """True when all strides are 1."""
        return all(axis.stride == 1 for axis in self.axes)

    def image(self, number: int) -> ConvProblem:
        """The same convolution of one image of the batch."""
        return replace(self, x=self.x[number : number + 1], y=self.y[number : number + 1])

    @property
    def half(self) -> bool:
        """True when products and sums are rounded to float16 one by one (`float16_compute`)."""
        return bool(self.work == np.float16)

    def of_data_gradient(self, weights: Array) -> ConvProblem:
        """The convolution of `y` that computes `x`, for strides of 1; `weights` is filled by `turn_weights`.

        dX[c, i] = sum over m, k of W[m, c, k] dY[m, i + head - k * dilation]: a convolution with the kernel turned
        round, channels and filters exchanged, and as much padding as is left of the window's extent.
        """
        axes = tuple(
            Axis(
                size=axis.out,
                kernel=axis.kernel,
                stride=1,
                dilation=axis.dilation,
                head=axis.extent - 1 - axis.head,
                tail=axis.size + axis.head - axis.out,
                out=axis.size,
            )
            for axis in self.axes
        )
        return replace(self, x=self.y, weights=weights, y=self.x, axes=axes, constant=None)

    @property
    def turned_shape(self) -> tuple[int, ...]:
        """The shape of the filter of `of_data_gradient`: C, M/G, kernel (or C, kernel, M/G)."""
        per_group = self.filters // self.group
        return (
            (self.channels, *self.kernel, per_group) if self.channels_last else (self.channels, per_group, *self.kernel)
        )

    def turn_weights(self, turned: Array) -> Step:
        """The step that writes the filter of `of_data_gradient` to `turned`."""
        groups, flip = self.group, (slice(None, None, -1),) * len(self.axes)
        source = self.weights.reshape(groups, self.filters // groups, *self.weights.shape[1:])
        target = turned.reshape(groups, self.channels // groups, *turned.shape[1:])
        if self.channels_last:  # G, M/G, kernel, C/G to G, C/G, kernel, M/G
            return partial(np.copyto, target, source.swapaxes(1, -1)[(slice(None), slice(None), *flip)])
        return partial(np.copyto, target, source.swapaxes(1, 2)[(slice(None),) * 3 + flip])


@dataclass(frozen=True)
class Algorithm:
    """A way to compute a convolution forward.

    Attributes:
        name: the engine that asks for it.
        refusal: why it cannot compute a problem, as a clause for the log; "" when it can.
        steps: the steps that compute `problem.y` (bias included), with all working memory from the Allocate.
        own_memory: True when what it keeps in that memory must last from run to run, so that it cannot be shared.
        keeps_apart: True for a problem whose images it computes one by one, each in the same way.
    """

    name: str
    refusal: Callable[[ConvProblem], str]
    steps: Steps
    own_memory: bool = False
    keeps_apart: Callable[[ConvProblem], bool] = lambda _: False


def add_bias(output: Array, bias: Array | None, channels_last: bool) -> list[Step]:
    """Steps that add the bias to an output image or batch, in place.

    `output` ends in (M, pixels), or in (pixels, M) for NHWC; `bias` has M entries, of any float type.
    """
    if bias is None:
        return []
    row = bias if channels_last else bias[:, None]
    return [partial(np.add, output, row, out=output, casting="same_kind")]


def wide_weights(problem: ConvProblem, allocate: Allocate) -> tuple[Array, list[Step]]:
    """The weights in the work dtype, and the steps that bring them there."""
    weights = problem.weights
    if weights.dtype == problem.work:
        return weights, []
    if problem.constant is not None:
        return problem.constant.derived(("wide", problem.work.str), lambda: weights.astype(problem.work)), []
    wide = allocate(weights.shape, problem.work)
    return wide, [partial(np.copyto, wide, weights)]
