"""The rounding error of each convolution algorithm in float32, against sums over taps in float64.

    python benchmarks/conv_error.py [--images 2] [--json benchmarks/results/conv_error.json]

Image and filter are normal numbers; the errors are divided by the root mean square of the exact outputs. `ALGORITHMS`
has an entry for each algorithm: any `Algorithm` can be measured.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from environment import write_report

from dagexec.ops.base.geometry import Axis
from dagexec.ops.families.conv.direct import DIRECT
from dagexec.ops.families.conv.fft import FFT
from dagexec.ops.families.conv.im2col import IM2COL
from dagexec.ops.families.conv.problem import Algorithm, ConvProblem
from dagexec.ops.families.conv.winograd import winograd

Array = npt.NDArray[Any]

ALGORITHMS = {
    "im2col": IM2COL,
    "DIRECT": DIRECT,
    "FFT": FFT,
    "WINOGRAD, m = 2": winograd((2,)),
    "WINOGRAD, m = 4": winograd((4,)),
}
SIZES = ((784,), (28, 28))
CHANNELS = (64, 512)
FILTERS = 32


@dataclass(frozen=True)
class Errors:
    """Of one algorithm on one problem, relative to the root mean square of the exact outputs."""

    root_mean_square: float
    largest: float


def make_problem(images: int, channels: int, sizes: Sequence[int], seed: int = 0) -> ConvProblem:
    """3 taps along each axis, a pixel of padding around the image, NCHW, float32, without bias."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((images, channels, *sizes)).astype(np.float32)
    weights = rng.standard_normal((FILTERS, channels, *(3,) * len(sizes))).astype(np.float32)
    axes = tuple(Axis(size, kernel=3, stride=1, dilation=1, head=1, tail=1, out=size) for size in sizes)
    y = np.empty((images, FILTERS, *sizes), np.float32)
    return ConvProblem(x, weights, None, y, axes, group=1, channels_last=False, work=np.dtype(np.float32))


def exact(problem: ConvProblem) -> Array:
    """The outputs as sums over taps in float64."""
    sizes = problem.x.shape[2:]
    padded = np.pad(problem.x.astype(np.float64), [(0, 0), (0, 0), *[(1, 1)] * len(sizes)])
    y = np.zeros(problem.y.shape)
    for tap in product(range(3), repeat=len(sizes)):
        pixels = [slice(first, first + size) for first, size in zip(tap, sizes, strict=True)]
        taps: list[slice | int] = [slice(None), slice(None), *tap]
        shifted: Array = padded[(slice(None), slice(None), *pixels)]
        y += np.einsum("mc,nc...->nm...", problem.weights[tuple(taps)].astype(np.float64), shifted, optimize=True)
    return y


def measure(algorithm: Algorithm, problem: ConvProblem, expected: Array) -> Errors:
    """Run `algorithm` and compare. Raises ValueError when it refuses the problem."""
    refusal = algorithm.refusal(problem)
    if refusal:
        raise ValueError(f"{algorithm.name}: {refusal}")
    for step in algorithm.steps(problem, np.empty):
        step()
    scale = np.sqrt(np.mean(expected**2))
    difference = (problem.y - expected) / scale
    return Errors(float(np.sqrt(np.mean(difference**2))), float(np.abs(difference).max()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=2)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results: dict[str, dict[str, dict[str, float]]] = {}
    for sizes, channels in product(SIZES, CHANNELS):
        problem = make_problem(options.images, channels, sizes)
        expected = exact(problem)
        where = f"{channels} channels, {' x '.join(map(str, sizes))}"
        print(where)
        results[where] = {}
        for name, algorithm in ALGORITHMS.items():
            found = measure(algorithm, problem, expected)
            results[where][name] = asdict(found)
            print(f"  {name:16} root mean square {found.root_mean_square:.1e}  largest {found.largest:.1e}")
    if options.json:
        write_report(options.json, images=options.images, results=results)


if __name__ == "__main__":
    main()
