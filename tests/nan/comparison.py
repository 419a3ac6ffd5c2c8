"""A net run as it was given, and optimized, and where the one has NaN or an infinity and the other has not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

import dagexec
from dagexec import Model
from tests.nan.nets import Builder

Array = npt.NDArray[Any]

_NEAR_LARGEST = 1e37
"""Numbers from here on may be infinite where they are computed in another order."""


@dataclass(frozen=True)
class Difference:
    """An output that is not of the same kind everywhere.

    Attributes:
        output: the blob.
        missing: places where the net as given has NaN and the optimized one has not.
        extra: places where the optimized one alone has.
        infinities: where one is infinite and the other small, or they have other signs.
        example: what the net as given has at the first of these, and the optimized one.
    """

    output: str
    missing: int
    extra: int
    infinities: int
    example: tuple[float, float]


def run(model: Model, feeds: Mapping[str, Array], **options: Any) -> dict[str, Array]:
    """Copies of the outputs of the last of two runs."""
    with np.errstate(all="ignore"), dagexec.compile(model, **options) as executor:
        executor.run(dict(feeds))
        return {name: np.array(array) for name, array in executor.run(dict(feeds)).items()}


def spreads(model: Model) -> bool:
    """True where a NaN or an infinity may reach more results than by sums over windows (docs/precision.md).

    By Winograd's algorithm those of its tile, and where groups are computed as one, with zeros, other groups.
    """
    for definition in model.net.op:
        arguments = {argument.name: argument.i for argument in definition.arg}
        if definition.type != "Conv":
            continue
        window = [arguments.get(name, 1) for name in ("kernel", "stride", "dilation")]
        if window == [3, 1, 1] or arguments.get("group", 1) > 1:
            return True
    return False


def cancels(model: Model) -> bool:
    """True where an image's convolutions, or one and the image, are added, so that infinities of both signs may meet.

    The one filter that they become gives them one sign (docs/precision.md).
    """
    images = {one.output[0]: one.input[0] for one in model.net.op if one.type == "Conv"}
    for definition in model.net.op:
        convolved = [images[name] for name in definition.input if name in images]
        others = [name for name in definition.input if name not in images]
        if definition.type in ("Add", "Sub", "Sum") and (
            set(convolved) & set(others) or len(convolved) > len(set(convolved))
        ):
            return True
    return False


def differences(
    wanted: Mapping[str, Array], found: Mapping[str, Array], *, spreads: bool = False, cancels: bool = False
) -> list[Difference]:
    """Where `found` is of another kind than `wanted`; more NaN are none if they spread, nor fewer if they cancel."""
    results = []
    for name, one in wanted.items():
        other = found[name]
        missing, extra = np.isnan(one) & ~np.isnan(other), np.isnan(other) & ~np.isnan(one)
        numbers = ~(np.isnan(one) | np.isnan(other))
        apart = numbers & (np.isinf(one) != np.isinf(other)) & (np.minimum(np.abs(one), np.abs(other)) < _NEAR_LARGEST)
        apart |= np.isinf(one) & np.isinf(other) & (one != other)
        if spreads:
            extra[...] = False
        if cancels:
            missing[...] = apart[...] = False
        if (missing | extra | apart).any():
            first = tuple(np.argwhere(missing | extra | apart)[0])
            example = (float(one[first]), float(other[first]))
            results.append(Difference(name, int(missing.sum()), int(extra.sum()), int(apart.sum()), example))
    return results


def compared(seed: int, layers: int | None = None) -> list[Difference]:
    """What differs in the net of a seed; it decides threads, layout and the type of the net, too."""
    builder = Builder(seed, layers)
    model = builder.build()
    if not model.outputs:
        return []
    feeds = builder.feeds()
    options: dict[str, Any] = {
        "intra_op_threads": 1 + seed % 2,
        "net_type": ("simple", "dag", "async_dag")[seed % 3],
        "layout": (None, None, None, "NCHW", "NHWC")[seed % 5],
    }
    wanted = run(model, feeds, optimize=False, net_type="simple")
    return differences(wanted, run(model, feeds, **options), spreads=spreads(model), cancels=cancels(model))
