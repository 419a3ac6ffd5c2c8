"""A file that a Python package carries, and the arrays that it is run with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

import numpy as np

from model_files.recipe import Array, Feeds

Runs = Callable[[], Sequence[Feeds]]


@dataclass(frozen=True)
class Carried:
    """A file in a wheel.

    Attributes:
        path: in the wheel.
        runs: makes the inputs of each run.
        name: of the model, where the file's own is not enough.
        data: the paths of the files beside it that hold its tensors.
    """

    path: str
    runs: Runs
    name: str = ""
    data: Sequence[str] = ()

    @property
    def title(self) -> str:
        return self.name or PurePosixPath(self.path).stem


def normal(*shape: int, scale: float = 1.0) -> Array:
    """Normal random numbers that are the same in every process."""
    return (scale * np.random.default_rng(0).standard_normal(shape)).astype(np.float32)


def integers(limit: int, *shape: int, dtype: type = np.int64) -> Array:
    """Random numbers from 1 up to, and without, `limit`."""
    return np.random.default_rng(0).integers(1, limit, shape, dtype=dtype)


def mask(*shape: int) -> Array:
    """Which elements are there: all but the last two of the last row."""
    present = np.ones(shape, np.int64)
    present[-1, -2:] = 0
    return present


def each(name: str, *shapes: tuple[int, ...], scale: float = 1.0) -> Runs:
    """A run for each shape of the only input, which is of normal random numbers."""
    return lambda: [{name: normal(*shape, scale=scale)} for shape in shapes]


def letters(name: str, limit: int, *shapes: tuple[int, ...], dtype: type = np.int64) -> Runs:
    """A run for each shape of the only input, which holds numbers of letters or words, below `limit`."""
    return lambda: [{name: integers(limit, *shape, dtype=dtype)} for shape in shapes]
