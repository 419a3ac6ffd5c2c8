"""Real data without a download: the handwritten digits that scikit-learn bundles (extra `examples`)."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from dagexec.errors import DataError
from dagexec.platform.extras import install_command
from dagexec.platform.records import dataclass
from dagexec.training.data import epoch_order

__all__ = ["Split", "digits"]

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Split:
    """Samples to train with and others to test with.

    Attributes:
        train, test: `data` (N, 1, size, size) float32 and `label` (N,) int32.
    """

    train: dict[str, Array]
    test: dict[str, Array]


def digits(size: int = 8, *, test_share: float = 0.2, seed: int = 0) -> Split:
    """The 1,797 images of handwritten digits (8x8, UCI's optical recognition set), values in [0, 1].

    `size` larger than 8 scales them up bilinearly. Which are for the test is a function of `seed` alone; each digit
    has the same share in it, up to rounding. Raises DataError without scikit-learn, ValueError for a size below 8 or
    a share outside (0, 1).
    """
    if size < 8 or not 0 < test_share < 1:
        raise ValueError(f"expected a size of at least 8 and a share between 0 and 1, found {size} and {test_share}")
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise DataError(
            f"the digits are part of scikit-learn; install it with: {install_command('examples')}"
        ) from None
    bunch = load_digits()
    images = (bunch.images / 16.0).astype(np.float32)[:, None]
    labels = bunch.target.astype(np.int32)
    for_test = _share_of_each(labels, test_share, seed)
    data = scaled_up(images, size)
    return Split(
        {"data": data[~for_test], "label": labels[~for_test]}, {"data": data[for_test], "label": labels[for_test]}
    )


def scaled_up(images: npt.NDArray[np.float32], size: int) -> npt.NDArray[np.float32]:
    """Images (N, C, H, W) as (N, C, size, size) by linear interpolation along each axis, pixel centers aligned."""
    height, width = images.shape[2:]
    if (height, width) == (size, size):
        return images
    rows, columns = _interpolation(height, size), _interpolation(width, size)
    return np.ascontiguousarray(rows @ images @ columns.T)


def _interpolation(source: int, target: int) -> npt.NDArray[np.float32]:
    """The matrix (target, source) whose rows weigh the two nearest pixels by distance; edges repeat."""
    places = np.clip((np.arange(target) + 0.5) * source / target - 0.5, 0, source - 1)
    weights = 1 - np.abs(places[:, None] - np.arange(source))
    matrix: npt.NDArray[np.float32] = np.maximum(weights, 0).astype(np.float32)
    return matrix


def _share_of_each(labels: npt.NDArray[np.int32], share: float, seed: int) -> npt.NDArray[np.bool_]:
    """True for the first `share` of each label's samples, in an order that the seed decides."""
    order = epoch_order(len(labels), seed, 0)
    chosen = np.zeros(len(labels), np.bool_)
    for label in np.unique(labels):
        members = order[labels[order] == label]
        chosen[members[: round(share * len(members))]] = True
    return chosen
