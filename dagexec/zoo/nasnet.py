"""NASNet-A (4 @ 1056): Zoph et al. 2018, "Learning transferable architectures for scalable image recognition".

The cells are those of figure 4, stacked as in figure 2 for ImageNet, with the filter counts of the authors' release for
mobile sizes: 44 filters, doubled at each reduction, and two reduction cells as a stem. A cell joins what its blocks of
two operations give, so that up to ten branches run side by side: work for a scheduler.
"""

from __future__ import annotations

from collections.abc import Callable

from dagexec.building.fillers import gaussian, he_normal, lecun_normal, uniform
from dagexec.building.model_builder import ModelBuilder
from dagexec.ops.base.layout import NCHW
from dagexec.platform.records import dataclass
from dagexec.zoo.architecture import Architecture, Images, stand_in

_FILTERS = 44
_REPEATS = 4  # normal cells between two reductions
_STEM = 32


@dataclass(frozen=True)
class _Feature:
    """A blob with what a cell must know of it: its channels and its height, which is its width."""

    blob: str
    channels: int
    size: int


def _layers(builder: ModelBuilder, x: str, images: Images) -> str:
    """A convolution, two reduction cells, three stages of cells, global pooling, dropout and a classifier."""
    cells = _Cells(builder, images)
    x = builder.conv(x, "conv0", images.channels, _STEM, kernel=3, stride=2, bias=False)
    stem = _Feature(builder.spatial_bn(x, "conv0_bn", _STEM, epsilon=1e-3), _STEM, (images.size - 3) // 2 + 1)
    previous, current = stem, cells.first_stem(stem, "stem0", _FILTERS // 4)
    previous, current = current, cells.reduction(previous, current, "stem1", _FILTERS // 2)
    number = 0
    for stage in range(3):
        filters = _FILTERS << stage
        if stage:
            # As released, the cell after a reduction looks back past it: `previous` stays the cell before.
            current, previous = cells.reduction(previous, current, f"reduction{stage}", filters), current
        for _ in range(_REPEATS):
            previous, current = current, cells.normal(previous, current, f"cell{number}", filters)
            number += 1
    x = builder.relu(current.blob, "relu")
    x = builder.global_average_pool(x, "pool")
    x = builder.dropout(x, "drop", ratio=0.5)
    return builder.fc(x, "pred", current.channels, images.classes, weight_init=gaussian(0.06))


class _Cells:
    """The cells and their operations, added to a model builder."""

    def __init__(self, builder: ModelBuilder, images: Images) -> None:
        self.builder = builder
        self._images = images

    def normal(self, previous: _Feature, current: _Feature, name: str, filters: int) -> _Feature:
        """Five blocks at one size, and what came from the cell before (figure 4, left)."""
        left = self._fit(previous, f"{name}/previous", filters, current.size)
        right = self._squeeze(current, f"{name}/current", filters)
        blocks = [
            self._sum(f"{name}/0", self._separable(right, f"{name}/0l", 5), self._separable(left, f"{name}/0r", 3)),
            self._sum(f"{name}/1", self._separable(left, f"{name}/1l", 5), self._separable(left, f"{name}/1r", 3)),
            self._sum(f"{name}/2", self._average(right, f"{name}/2l"), left),
            self._sum(f"{name}/3", self._average(left, f"{name}/3l"), self._average(left, f"{name}/3r")),
            self._sum(f"{name}/4", self._separable(right, f"{name}/4l", 3), right),
        ]
        return self._join(name, [left, *blocks])

    def reduction(self, previous: _Feature, current: _Feature, name: str, filters: int) -> _Feature:
        """Four blocks at half the size (figure 4, right)."""
        left = self._fit(previous, f"{name}/previous", filters, current.size)
        right = self._squeeze(current, f"{name}/current", filters)
        return self._reduce(name, right, lambda label, kernel: self._separable(left, label, kernel, stride=2))

    def first_stem(self, stem: _Feature, name: str, filters: int) -> _Feature:
        """A reduction cell whose two inputs are the one stem, with its own number of channels."""
        right = self._squeeze(stem, f"{name}/current", filters)
        return self._reduce(
            name, right, lambda label, kernel: self._separable(stem, label, kernel, stride=2, widen_first=filters)
        )

    def _reduce(self, name: str, right: _Feature, of_left: Callable[[str, int], _Feature]) -> _Feature:
        first = self._sum(f"{name}/0", self._separable(right, f"{name}/0l", 5, stride=2), of_left(f"{name}/0r", 7))
        blocks = [
            self._sum(f"{name}/1", self._maximum(right, f"{name}/1l"), of_left(f"{name}/1r", 7)),
            self._sum(f"{name}/2", self._average(right, f"{name}/2l", stride=2), of_left(f"{name}/2r", 5)),
        ]
        blocks.append(self._sum(f"{name}/3", self._average(first, f"{name}/3r"), blocks[0]))
        blocks.append(
            self._sum(f"{name}/4", self._separable(first, f"{name}/4l", 3), self._maximum(right, f"{name}/4r"))
        )
        return self._join(name, blocks)

    def _fit(self, x: _Feature, name: str, filters: int, size: int) -> _Feature:
        """The blob of two cells before, with the size and channels of this one."""
        return self._squeeze(x, name, filters) if x.size == size else self._halve(x, name, filters)

    def _squeeze(self, x: _Feature, name: str, filters: int) -> _Feature:
        blob = self.builder.relu(x.blob, f"{name}_relu")
        blob = self.builder.conv(blob, f"{name}_conv", x.channels, filters, kernel=1, bias=False)
        return _Feature(self._bn(blob, name, filters), filters, x.size)

    def _halve(self, x: _Feature, name: str, filters: int) -> _Feature:
        """Half the size without losing pixels: 1x1 at even places, and, shifted by one, at odd places, joined."""
        builder, blob = self.builder, self.builder.relu(x.blob, f"{name}_relu")
        half = filters // 2
        even = builder.conv(blob, f"{name}_even", x.channels, half, kernel=1, stride=2, bias=False)
        images = self._images
        first = list(images.axes(0, 0, 1, 1))
        shifted = builder.add_operator("Slice", [blob], [f"{name}_shifted"], starts=first, ends=[-1, -1, -1, -1])
        filters_shape = images.axes(half, x.channels, 1, 1)
        weight = builder.add_parameter(f"{name}_odd_w", filters_shape, he_normal(x.channels))
        arguments: dict[str, int | str] = {} if images.order == NCHW else {"order": images.order}
        odd = builder.add_operator(
            "Conv", [shifted, weight], [f"{name}_odd"],
            kernel=1, stride=2, pad_t=0, pad_l=0, pad_b=1, pad_r=1, **arguments,
        )  # fmt: skip
        joined = builder.concat([even, odd], f"{name}_joined")
        return _Feature(self._bn(joined, name, filters), filters, (x.size + 1) // 2)

    def _separable(
        self, x: _Feature, name: str, kernel: int, *, stride: int = 1, widen_first: int | None = None
    ) -> _Feature:
        """Twice: ReLU, depthwise kernel x kernel, 1x1, batch normalization (appendix A.4)."""
        filters = widen_first or x.channels
        size = (x.size - 1) // stride + 1
        blob = self._separable_once(x.blob, f"{name}_a", x.channels, filters, kernel, stride)
        return _Feature(self._separable_once(blob, f"{name}_b", filters, filters, kernel, 1), filters, size)

    def _separable_once(self, x: str, name: str, dim_in: int, dim_out: int, kernel: int, stride: int) -> str:
        x = self.builder.relu(x, f"{name}_relu")
        x = self.builder.conv(
            x, f"{name}_depthwise", dim_in, dim_in, kernel=kernel, stride=stride, pad=kernel // 2, group=dim_in,
            bias=False,
        )  # fmt: skip
        x = self.builder.conv(
            x, f"{name}_pointwise", dim_in, dim_out, kernel=1, bias=False, weight_init=lecun_normal(dim_in)
        )
        return self._bn(x, name, dim_out)

    def _average(self, x: _Feature, name: str, *, stride: int = 1) -> _Feature:
        blob = self.builder.average_pool(x.blob, name, kernel=3, stride=stride, pad=1)
        return _Feature(blob, x.channels, (x.size - 1) // stride + 1)

    def _maximum(self, x: _Feature, name: str) -> _Feature:
        return _Feature(
            self.builder.max_pool(x.blob, name, kernel=3, stride=2, pad=1), x.channels, (x.size - 1) // 2 + 1
        )

    def _bn(self, x: str, name: str, dim: int) -> str:
        """Batch normalization with small scales: every block is a sum of two, and their variances add."""
        scale_init = stand_in(self.builder, uniform(0.4, 1.0))
        return self.builder.spatial_bn(x, f"{name}_bn", dim, epsilon=1e-3, scale_init=scale_init)

    def _sum(self, name: str, a: _Feature, b: _Feature) -> _Feature:
        return _Feature(self.builder.sum([a.blob, b.blob], f"{name}_sum"), a.channels, a.size)

    def _join(self, name: str, parts: list[_Feature]) -> _Feature:
        blob = self.builder.concat([part.blob for part in parts], f"{name}/output")
        return _Feature(blob, sum(part.channels for part in parts), parts[0].size)


NASNET_A = Architecture("nasnet_a", Images(3, 224, 1000), _layers, least_size=32)
"""NASNet-A (4 @ 1056); 5,289,978 trained parameters."""
