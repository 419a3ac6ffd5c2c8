"""Convolution problems drawn by hypothesis, for the tests of one algorithm: arrays, what they give, and memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import ml_dtypes
import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from dagexec.core.constant import Constant
from dagexec.core.operator import Step
from dagexec.ops.base.geometry import Axis
from dagexec.ops.families.conv.problem import Algorithm, ConvProblem
from tests.ops.windows import Array, Geometry, convolve, geometries, to_channels_first, to_channels_last

DTYPES = ["float32", "float32", "float64", "float16", "bfloat16"]


@dataclass(frozen=True)
class Case:
    """A convolution; its arrays are made from `seed`: small integers, or normal numbers."""

    geometry: Geometry
    batch: int = 1
    group: int = 1
    per_group: int = 2
    filters_per_group: int = 3
    bias: bool = True
    order: str = "NCHW"
    dtype: str = "float32"
    normal: bool = False
    constant: bool = False
    half: bool = False
    limit: int = 64 << 20
    seed: int = 0

    def arrays(self) -> list[Array]:
        """X as N, C, spatial, the filter as M, C/group, kernel, and the bias if there is one."""
        rng = np.random.default_rng(self.seed)
        filters = self.group * self.filters_per_group
        shapes = [
            (self.batch, self.group * self.per_group, *self.geometry.size),
            (filters, self.per_group, *self.geometry.kernel),
            *([(filters,)] if self.bias else []),
        ]
        draw = rng.standard_normal if self.normal else lambda shape: rng.integers(-3, 4, shape)
        return [np.asarray(draw(shape)).astype(self.dtype) for shape in shapes]

    def expected(self) -> Array:
        """Y as N, M, spatial, in float64."""
        return _expected(replace(self, order="NCHW", constant=False, half=False, limit=0))

    def axes(self) -> tuple[Axis, ...]:
        """The geometry as the algorithms get it, from the windows that the reference finds by walking."""
        found = []
        for number, axis in enumerate(self.geometry.windows()):
            size, kernel = self.geometry.size[number], self.geometry.kernel[number]
            stride, dilation = self.geometry.stride[number], self.geometry.dilation[number]
            found.append(Axis(size, kernel, stride, dilation, -axis.low, axis.high - size, len(axis.taps)))
        return tuple(found)

    def problem(self) -> ConvProblem:
        """The problem, with an output of NaN and inputs that cannot be written to."""
        x, weights, *bias = self.arrays()
        axes = self.axes()
        y = np.empty((self.batch, weights.shape[0], *(axis.out for axis in axes)), x.dtype)
        last = self.order == "NHWC"
        if last:
            x, weights, y = map(to_channels_last, (x, weights, y))
        y.fill(np.nan)
        for array in (x, weights, *bias):
            array.flags.writeable = False
        return ConvProblem(
            x=x,
            weights=weights,
            bias=bias[0] if bias else None,
            y=y,
            axes=axes,
            group=self.group,
            channels_last=last,
            work=x.dtype if self.half or x.dtype.itemsize > 2 else np.dtype(np.float32),
            limit=self.limit,
            constant=Constant() if self.constant else None,
        )


@lru_cache(maxsize=16)
def _expected(case: Case) -> Array:
    x, weights, *bias = case.arrays()
    return convolve(x, weights, bias[0] if bias else None, case.geometry, case.group)


class Memory:
    """Gives memory, counts its bytes, and writes NaN to all of it when told to."""

    def __init__(self) -> None:
        self._arrays: list[Array] = []

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self._arrays)

    def allocate(self, shape: Sequence[int], dtype: npt.DTypeLike) -> Array:
        self._arrays.append(np.empty(shape, dtype))
        return self._arrays[-1]

    def spoil(self) -> None:
        for array in self._arrays:
            array.fill(np.nan)


def run_steps(problem: ConvProblem, steps: list[Step], memory: Memory) -> Array:
    """Y as N, M, spatial, of two runs that must give the same bytes; `memory` and y are NaN before each."""
    found = []
    for _ in range(2):
        problem.y.fill(np.nan)
        memory.spoil()
        for step in steps:
            step()
        found.append(problem.y.copy())
    assert found[0].tobytes() == found[1].tobytes(), "a second run gave other bytes"
    return to_channels_first(found[0]) if problem.channels_last else found[0]


def run_algorithm(algorithm: Algorithm, problem: ConvProblem) -> Array:
    """Y as N, M, spatial; the memory it asks for must keep to the limit."""
    assert algorithm.refusal(problem) == ""
    memory = Memory()
    steps = algorithm.steps(problem, memory.allocate)
    assert memory.nbytes <= problem.limit, f"{memory.nbytes} bytes, more than {problem.limit}"
    return run_steps(problem, steps, memory)


def norm_bound(case: Case) -> float:
    """The largest sum over channels of the 2-norms of image and filter, times each other.

    By the inequality of Cauchy and Schwarz no output is larger, nor any intermediate sum of its products.
    """
    x, weights, *_ = (array.astype(np.float64) for array in case.arrays())
    images = x.reshape(case.batch, case.group, 1, case.per_group, math.prod(case.geometry.size))
    filters = weights.reshape(1, case.group, case.filters_per_group, case.per_group, math.prod(case.geometry.kernel))
    norms = np.linalg.norm(images, axis=-1) * np.linalg.norm(filters, axis=-1)
    return float(norms.sum(axis=-1).max())


@st.composite
def cases(draw: st.DrawFn, *, normal: bool = False) -> Case:
    """Every geometry, group, order and type."""
    depthwise = draw(st.booleans())
    return Case(
        draw(geometries()),
        batch=draw(st.integers(1, 3)),
        group=draw(st.integers(1, 4)),
        per_group=1 if depthwise else draw(st.integers(1, 3)),
        filters_per_group=draw(st.integers(1, 3)),
        bias=draw(st.booleans()),
        order=draw(st.sampled_from(["NCHW", "NHWC"])),
        dtype=draw(st.sampled_from(DTYPES)),
        normal=normal,
        constant=draw(st.booleans()),
        seed=draw(st.integers(0, 99)),
    )


def epsilon(dtype: str) -> float:
    """The unit roundoff of a type."""
    return float(ml_dtypes.finfo(np.dtype(dtype)).eps) / 2
