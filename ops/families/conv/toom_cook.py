"""Minimal filtering F(m, r): m outputs of a filter of r taps with m + r - 1 multiplications, derived exactly.

Winograd, "Arithmetic complexity of computations", 1980, by the construction of Toom and Cook. Two polynomials with r
and m coefficients have a product with t = m + r - 1 coefficients, which its values at t points determine: t - 1 finite
points, and infinity, where the value is the leading coefficient. With the matrices E_n of values (row p is 1, p, p^2,
... for n coefficients) the product is u -> E_t^-1 diag(E_r g) E_m u. That linear map takes m numbers to t; its
transpose takes t numbers d to m, and is the filter y[i] = sum over j of g[j] d[i + j]:

    y = A^T ((G g) * (B^T d)),    A^T = E_m^T,    G = E_r scaled,    B^T = E_t^-T scaled.

Row p of E_t^-T has the coefficients of the polynomial N(x) / N(p), where N(x) is the product of (x - q) over the other
finite points q; the row of infinity has those of the product over all of them. The divisors N(p) are moved from B^T to
G.

All numbers here are fractions; `kronecker` turns them into arrays, for any number of axes. The points are 0, 1 and -1
for up to three, and 0, +-3/4 and +-3/2 for more: of simple ones these magnify rounding errors least, half as much as
the usual 0, +-1, +-2 (measured in docs/convolution.md), and B^T and A^T still have exact entries in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from functools import cache, reduce

import numpy as np
import numpy.typing as npt

from dagexec.platform.records import dataclass

Matrix = tuple[tuple[Fraction, ...], ...]

_POINTS = (
    (Fraction(0), Fraction(1), Fraction(-1)),
    (Fraction(0), Fraction(3, 4), Fraction(-3, 4), Fraction(3, 2), Fraction(-3, 2)),
)


@dataclass(frozen=True)
class MinimalFilter:
    """The three matrices of F(m, r), with t = m + r - 1.

    Attributes:
        outputs: m.
        taps: r.
        data: B^T, t x t: from the t numbers of a tile to its values at the points.
        filter: G, t x r: from the taps to theirs.
        output: A^T, m x t: from the products to the m outputs.
    """

    outputs: int
    taps: int
    data: Matrix
    filter: Matrix
    output: Matrix

    @property
    def tile(self) -> int:
        """t: numbers in a tile, values at points, and multiplications."""
        return self.outputs + self.taps - 1


@cache
def minimal_filter(outputs: int, taps: int) -> MinimalFilter:
    """F(outputs, taps). Raises ValueError when it needs more points than there are."""
    needed = outputs + taps - 2
    points = next((points[:needed] for points in _POINTS if len(points) >= needed), None)
    if points is None:
        raise ValueError(f"F({outputs}, {taps}) needs {needed} finite points, but there are {len(_POINTS[-1])}")
    data: list[tuple[Fraction, ...]] = []
    scales: list[Fraction] = []
    for point in points:
        row = _product_of_roots([other for other in points if other != point])
        value = sum((coefficient * point**power for power, coefficient in enumerate(row)), Fraction(0))
        sign = 1 if value > 0 else -1
        data.append((*(sign * coefficient for coefficient in row), Fraction(0)))
        scales.append(sign * value)
    data.append(_product_of_roots(points))
    filter_rows = [
        tuple(value / scale for value in row)
        for row, scale in zip(_values(points, taps), [*scales, Fraction(1)], strict=True)
    ]
    output = tuple(zip(*_values(points, outputs), strict=True))
    return MinimalFilter(outputs, taps, tuple(data), tuple(filter_rows), output)


def kronecker(matrices: Sequence[Matrix], dtype: npt.DTypeLike) -> npt.NDArray[np.floating]:
    """The Kronecker product of one matrix an axis, each entry computed exactly and rounded once.

    It transforms all axes of a tile at once, with the tile's elements in row-major order.
    """
    product = reduce(_kronecker, matrices)
    return np.array([[float(entry) for entry in row] for row in product], dtype)


def _kronecker(left: Matrix, right: Matrix) -> Matrix:
    return tuple(tuple(a * b for a in row for b in other) for row in left for other in right)


def _values(points: Sequence[Fraction], terms: int) -> Matrix:
    """E: the value at each point, and at infinity, of each power of x."""
    finite = tuple(tuple(point**power for power in range(terms)) for point in points)
    return (*finite, tuple(Fraction(power == terms - 1) for power in range(terms)))


def _product_of_roots(roots: Sequence[Fraction]) -> tuple[Fraction, ...]:
    """The coefficients of the product of (x - root), the constant first."""
    found = [Fraction(1)]
    for root in roots:
        shifted = [Fraction(0), *found]
        found = [high - root * low for high, low in zip(shifted, [*found, Fraction(0)], strict=True)]
    return tuple(found)
