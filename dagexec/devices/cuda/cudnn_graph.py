"""Convolutions as graphs of cuDNN: what is computed, on which layouts, and the graph that says so.

Tensors are N, C and two or three spatial axes, whatever their order in memory, which their strides say. A convolution
may go on, in one graph, with a residual that is added, a bias, and a ReLU: in this order, which is the one that
cuDNN's compiled engines know, in every layout and type (docs/cudnn.md). Without a bias they know none of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dagexec.devices.cuda.binding import cudnn
from dagexec.platform.records import dataclass

Array = npt.NDArray[Any]

FORWARD, DATA_GRADIENT, FILTER_GRADIENT = "forward", "data gradient", "filter gradient"
X, FILTER, Y, BIAS, RESIDUAL = 1, 2, 3, 4, 5
"""The numbers (cuDNN's uids) of a convolution's tensors. A gradient writes X or FILTER, and reads its dY as Y."""

DATA_TYPES = {"float32": "FLOAT", "float16": "HALF", "bfloat16": "BFLOAT16"}
"""cuDNN's names of the element types that it computes convolutions of, all in float32."""

ALIGNMENT = 16
"""Bytes: cuDNN's engines read and write vectors of so many."""

_MIN_SPATIAL = 2


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """N, C, spatial sizes and, in elements, strides."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def of(cls, array: Array, *, channels_last: bool) -> TensorLayout:
        """That of an image, or of a filter (whose M is N here)."""
        sizes = list(array.shape)
        strides = [stride // array.itemsize for stride in array.strides]
        if channels_last:
            sizes.insert(1, sizes.pop())
            strides.insert(1, strides.pop())
        while len(sizes) < 2 + _MIN_SPATIAL:
            strides.insert(2, sizes[2] * strides[2])
            sizes.insert(2, 1)
        return cls(tuple(sizes), tuple(strides))

    @classmethod
    def of_vector(cls, length: int, axes: int) -> TensorLayout:
        """That of a packed vector with an entry for each channel, beside images of so many axes."""
        return cls((1, length, *(1,) * (axes - 2)), (length, 1, *(length,) * (axes - 2)))

    def __str__(self) -> str:
        return f"{'x'.join(map(str, self.sizes))}({','.join(map(str, self.strides))})"


@dataclass(frozen=True, slots=True)
class ConvParameters:
    """Along each spatial axis: pixels of padding before and behind, stride, dilation."""

    before: tuple[int, ...]
    behind: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]

    def __str__(self) -> str:
        parts = (self.before, self.behind, self.stride, self.dilation)
        return " ".join(",".join(map(str, part)) for part in parts)


@dataclass(frozen=True, slots=True)
class ConvGraph:
    """A convolution of X with FILTER to Y, or one of its gradients.

    Attributes:
        operation: FORWARD, DATA_GRADIENT or FILTER_GRADIENT.
        dtype: of all tensors, by its name.
        bias, residual, relu: what follows a forward one. The last two need the first.
    """

    operation: str
    dtype: str
    x: TensorLayout
    filter: TensorLayout
    y: TensorLayout
    windows: ConvParameters
    bias: bool = False
    residual: TensorLayout | None = None
    relu: bool = False

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return 4 if self.dtype == "float32" else 2

    @property
    def layouts(self) -> dict[int, TensorLayout]:
        """The layout of each of its tensors, by number."""
        found = {X: self.x, FILTER: self.filter, Y: self.y}
        if self.bias:
            found[BIAS] = TensorLayout.of_vector(self.y.sizes[1], len(self.y.sizes))
        if self.residual is not None:
            found[RESIDUAL] = self.residual
        return found

    @property
    def key(self) -> str:
        """All that it is, as text."""
        tensors = " ".join(f"{number}:{layout}" for number, layout in self.layouts.items())
        return f"{self.operation}{' relu' if self.relu else ''} {self.dtype} {tensors} windows {self.windows}"

    @property
    def name(self) -> str:
        """How messages call it."""
        parts = ["residual"] * (self.residual is not None) + ["bias"] * self.bias + ["ReLU"] * self.relu
        more = f" with {', '.join(parts)}" if parts else ""
        return (
            f"{self.operation} convolution{more} of {self.dtype} {self.x.sizes} with filter {self.filter.sizes}, "
            f"windows {self.windows}, strides of X {self.x.strides}"
        )

    def nbytes(self, number: int) -> int:
        """Bytes that tensor `number` spans."""
        layout = self.layouts[number]
        last = sum((size - 1) * stride for size, stride in zip(layout.sizes, layout.strides, strict=True))
        return (last + 1) * self.itemsize

    def build(self, **options: Any) -> Any:
        """The `cudnn.pygraph`, not validated yet; `options` are those of its constructor, such as `handle`."""
        library = cudnn()
        single = library.data_type.FLOAT
        own = getattr(library.data_type, DATA_TYPES[self.dtype])
        graph = library.pygraph(
            io_data_type=own, intermediate_data_type=single, compute_data_type=single, name="dagexec", **options
        )

        def tensor(number: int, name: str) -> Any:
            layout = self.layouts[number]
            sizes, strides = list(layout.sizes), list(layout.strides)
            return graph.tensor(dim=sizes, stride=strides, data_type=own, name=name, uid=number)

        windows = {
            "pre_padding": list(self.windows.before),
            "post_padding": list(self.windows.behind),
            "stride": list(self.windows.stride),
            "dilation": list(self.windows.dilation),
        }
        if self.operation == DATA_GRADIENT:
            result, written = graph.conv_dgrad(loss=tensor(Y, "dY"), filter=tensor(FILTER, "filter"), **windows), X
        elif self.operation == FILTER_GRADIENT:
            result, written = graph.conv_wgrad(image=tensor(X, "X"), loss=tensor(Y, "dY"), **windows), FILTER
        else:
            result = graph.conv_fprop(image=tensor(X, "X"), weight=tensor(FILTER, "filter"), **windows)
            written = Y
            if self.residual is not None:
                result.set_data_type(single)
                result = graph.add(a=result, b=tensor(RESIDUAL, "residual"))
            if self.bias:
                result.set_data_type(single)
                result = graph.bias(input=result, bias=tensor(BIAS, "bias"))
            if self.relu:
                result.set_data_type(single)
                result = graph.relu(input=result)
        layout = self.layouts[written]
        result.set_output(True).set_data_type(own).set_dim(list(layout.sizes)).set_stride(list(layout.strides))
        result.set_name("result").set_uid(written)
        return graph


def aligned(arrays: Sequence[int]) -> bool:
    """True when every address is one that cuDNN's engines can read and write at."""
    return not any(address % ALIGNMENT for address in arrays)


def element_type(dtype: np.dtype[Any]) -> str | None:
    """The name of an element type that cuDNN computes convolutions of; None for others."""
    return dtype.name if dtype.name in DATA_TYPES else None
