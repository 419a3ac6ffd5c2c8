"""From sums to what a model gives: base values, transforms of scores, and the class that they name.

Specification: https://github.com/onnx/onnx/blob/main/docs/Operators-ml.md. Where that is silent, for two classes of
which only one has weights, and for classes that no leaf of a row has a weight for, results are those of onnxruntime.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from dagexec.core.arguments import Arguments
from dagexec.errors import ModelFormatError
from dagexec.platform.records import dataclass

Array = npt.NDArray[Any]

NONE, LOGISTIC, SOFTMAX, SOFTMAX_ZERO, PROBIT = "NONE", "LOGISTIC", "SOFTMAX", "SOFTMAX_ZERO", "PROBIT"

HELP = "NONE (default), SOFTMAX, LOGISTIC, SOFTMAX_ZERO or PROBIT: what scores are transformed by"

_NEAR_ZERO = 1e-7
_PROBIT = 0.147


def _logistic(scores: Array) -> Array:
    half = 1 / (1 + np.exp(-np.abs(scores)))
    found: Array = np.where(scores < 0, 1 - half, half)
    return found


def _softmax(scores: Array) -> Array:
    powers = np.exp(scores - scores.max(axis=1, keepdims=True))
    found: Array = powers / powers.sum(axis=1, keepdims=True)
    return found


def _softmax_zero(scores: Array) -> Array:
    """Softmax in which what is zero has no part in the sum, and stays near zero."""
    most = scores.max(axis=1, keepdims=True)
    counts = np.abs(scores) > _NEAR_ZERO
    powers = np.where(counts, np.exp(scores - most), scores * np.exp(-most))
    total = np.where(counts, powers, 0).sum(axis=1, keepdims=True)
    found: Array = powers / np.where(total == 0, 1, total)
    return found


def _probit(scores: Array) -> Array:
    """The inverse of the normal distribution, by Winitzki's approximation of the inverse error function (2008)."""
    x = 2 * scores - 1
    logarithm = np.log((1 - x) * (1 + x))
    half = 2 / (np.pi * _PROBIT) + logarithm / 2
    found: Array = (
        np.sqrt(2.0, dtype=scores.dtype) * np.sign(x) * np.sqrt(np.sqrt(half**2 - logarithm / _PROBIT) - half)
    )
    return found


TRANSFORMS: Mapping[str, Callable[[Array], Array]] = {
    NONE: lambda scores: scores, LOGISTIC: _logistic, SOFTMAX: _softmax, SOFTMAX_ZERO: _softmax_zero, PROBIT: _probit,
}  # fmt: skip


def transform_of(arguments: Arguments, label: str) -> str:
    """Argument `post_transform`. Raises ModelFormatError."""
    name = arguments.string("post_transform", NONE) or NONE
    if name not in TRANSFORMS:
        raise ModelFormatError(f"{label}: attribute 'post_transform' is {name!r}; expected one of {list(TRANSFORMS)}")
    return name


@dataclass(frozen=True, eq=False)
class Finish:
    """What becomes of the sums of a row.

    Attributes:
        base: float32, added to each sum; one number for each, or none.
        count: what sums are divided by before, 1 or the number of trees.
        transform: one of TRANSFORMS.
    """

    base: Array
    count: int
    transform: str

    @property
    def is_nothing(self) -> bool:
        """Sums are the result."""
        return not self.base.any() and self.count == 1 and self.transform == NONE

    def added(self, sums: Array) -> Array:
        """Sums over `count`, with their base values."""
        scores = sums / sums.dtype.type(self.count) if self.count != 1 else sums
        return scores + self.base.astype(scores.dtype) if self.base.size else scores

    def scores(self, sums: Array) -> Array:
        """The results of rows of sums; one alone is transformed by nothing but PROBIT."""
        name = self.transform if sums.shape[1] > 1 or self.transform == PROBIT else NONE
        return TRANSFORMS[name](self.added(sums))


@dataclass(frozen=True, eq=False)
class OneScore:
    """Two classes, of which one has the weights.

    Attributes:
        finish: of its sum; base values and transform.
        threshold: the second class is that of scores above it.
        sums_to_one: the score of the first class is 1 less that of the second, else its negative.
        is_second: the second class has the weights: the score of the first is 0 then.
    """

    finish: Finish
    threshold: float
    sums_to_one: bool
    is_second: bool = False

    @property
    def coefficients(self) -> tuple[Array, Array]:
        """Factors and addends that make two scores of one, before a logistic transform or without any."""
        factors = np.array([0 if self.is_second else -1, 1], np.float32)
        probability = self.sums_to_one and not self.is_second and self.finish.transform != LOGISTIC
        return factors, np.array([1 if probability else 0, 0], np.float32)

    @property
    def transform(self) -> str:
        """What transforms the two: scores that exclude each other are transformed by LOGISTIC and PROBIT alone."""
        name = self.finish.transform
        return name if self.is_second or name in (LOGISTIC, PROBIT) else NONE

    def classes(self, sums: Array) -> tuple[Array, Array]:
        """For rows of one sum, the number of the class, and two scores."""
        score = self.finish.added(sums)
        factors, addends = self.coefficients
        both = score * factors.astype(score.dtype) + addends.astype(score.dtype)
        return (score[:, 0] > self.threshold).astype(np.intp), TRANSFORMS[self.transform](both)


@dataclass(frozen=True, eq=False)
class ManyScores:
    """A score for each class; the greatest of those that have any names the class, the first one of several."""

    finish: Finish

    def classes(self, sums: Array, given: Array | None) -> tuple[Array, Array]:
        """For rows of sums, the number of the class, and the scores. `given` tells which sums have a weight."""
        scores = self.finish.added(sums)
        chosen = _greatest(scores)
        if given is not None and not self.finish.base.size:
            chosen = np.argmax(np.where(given, scores, -np.inf), axis=1)
        return chosen, self.finish.scores(sums)


def _greatest(scores: Array) -> Array:
    """The place of the greatest score of each row; NaN is none, unless it comes first."""
    known = np.where(np.isnan(scores), -np.inf, scores)
    found: Array = np.where(np.isnan(scores[:, 0]), 0, np.argmax(known, axis=1))
    return found
