"""Fillers on CUDA: constants by kernel, listed values uploaded once, random numbers drawn on the host in every run.

Random fillers draw what they draw on the host, from the generator of the operator's context, and upload it: weights do
not depend on the device. A string is no constant of a device.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from dagexec.core.operator import Step, in_sequence
from dagexec.core.shapes import element_count
from dagexec.devices.cuda.arrays import address
from dagexec.devices.cuda.binding import cupy
from dagexec.devices.cuda.current import current
from dagexec.ops.engines.cuda.base.constants import constant_step, zero_step
from dagexec.ops.engines.cuda.base.expression import computed_scalar, elementwise
from dagexec.ops.engines.cuda.base.kinds import on_cuda
from dagexec.ops.engines.cuda.base.operator import Array, CudaOperator
from dagexec.ops.families.fill import fillers as host
from dagexec.ops.families.fill.fill_values import fill_value, given_values


def filled(operator: CudaOperator, y: Array, value: float) -> Step:
    """A step that makes every element of `y`, of any strides, `value`."""
    return elementwise(operator, "fill", {}, {"y": y}, "y = value;", {"value": computed_scalar(y, value)})


def upload_step(target: Array, source: Array, draw: Step) -> Step:
    """A step that calls `draw`, which fills `source` on the host, and copies it to `target`.

    The memory of `source` is pageable: it may be drawn into again as soon as the copy has been issued.
    """
    if not target.nbytes:
        return draw
    runtime = cupy().cuda.runtime
    to, of, nbytes, kind = address(target), address(source), int(target.nbytes), runtime.memcpyDefault

    def upload() -> None:
        draw()
        runtime.memcpyAsync(to, of, nbytes, kind, current.stream_pointer)

    upload.__dict__["arrays"] = (target, source)
    return upload


@on_cuda(host.ConstantFill)
class CudaConstantFill(CudaOperator):
    """One value everywhere."""

    def prepare(self) -> Step:
        return filled(self, self.y(0), fill_value(self.call()))


@on_cuda(host.DiagonalFill)
class CudaDiagonalFill(CudaOperator):
    """A value on the diagonal."""

    def prepare(self) -> Step:
        """Clear, then fill a view of the diagonal."""
        y = self.y(0)
        length = min(y.shape)
        stride = sum(element_count(y.shape[axis + 1 :]) for axis in range(y.ndim))
        diagonal = y.reshape(-1)[: length * stride : stride]
        return in_sequence([zero_step(y), filled(self, diagonal, fill_value(self.call()))])


@on_cuda(host.RangeFill)
class CudaRangeFill(CudaOperator):
    """Consecutive numbers."""

    def prepare(self) -> Step:
        return elementwise(self, "range", {}, {"y": self.y(0)}, "y = (A)i;")


@on_cuda(
    host.GivenTensorFill,
    host.GivenTensorDoubleFill,
    host.GivenTensorIntFill,
    host.GivenTensorInt64Fill,
    host.GivenTensorInt16Fill,
    host.GivenTensorUInt8Fill,
    host.GivenTensorBoolFill,
)
class CudaGivenTensor(CudaOperator):
    """Elements listed in the def."""

    def prepare(self) -> Step:
        """They are uploaded now; the step copies them."""
        return constant_step(self, self.y(0), given_values(self.call(), self.output(0).meta))


@on_cuda(host.XavierFill, host.MSRAFill, host.GaussianFill, host.UniformFill, host.UniformIntFill)
class DrawnOnHost(CudaOperator):
    """A random filler: the step of the host's class, on arrays of the host. Bounds that are inputs are waited for."""

    waits_for_device = True
    _on_host: dict[str, Array] | None = None

    def prepare(self) -> Step:
        """Fetch the bounds, draw as on the host, and upload."""
        target = super().y(0)
        bounds = {index: super(DrawnOnHost, self).x(index) for index in range(1, len(self.input_blobs))}
        fetched = {index: np.empty(array.shape, array.dtype) for index, array in bounds.items()}
        drawn = np.empty(target.shape, target.dtype)
        self._on_host = {"y0": drawn, **{f"x{index}": array for index, array in fetched.items()}}
        try:
            draw = self.prepare_on_host()
        finally:
            self._on_host = None
        fetches: list[Step] = [partial(self.fetch_now, fetched[index], bounds[index]) for index in bounds]
        return upload_step(target, drawn, in_sequence([*fetches, draw]))

    def prepare_on_host(self) -> Step:
        """The step of the host's class, which stands behind this one."""
        return super().prepare()  # type: ignore[safe-super]

    def x(self, index: int) -> Array:
        """While the host's step is prepared, an array of the host in the place of a bound."""
        found = (self._on_host or {}).get(f"x{index}")
        return super().x(index) if found is None else found

    def y(self, index: int) -> Array:
        """While the host's step is prepared, the array that it draws into."""
        found = (self._on_host or {}).get(f"y{index}")
        return super().y(index) if found is None else found
