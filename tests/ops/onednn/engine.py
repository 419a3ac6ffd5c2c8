"""Running operators with engine ONEDNN, for the tests of what its primitives compute and when NumPy serves instead."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
import pytest

from dagexec.core.arguments import ArgumentValue
from dagexec.ops.engines.onednn.binding import library
from tests.ops.running import Array, run_operator

AVX512 = 16
"""float32 numbers in a vector of AVX-512, which some primitives, and all of bfloat16, need in the library."""

AVX2 = 8
"""float32 numbers in a vector of AVX2, which kernels of our own need."""

needs_onednn = pytest.mark.skipif(library() is None, reason="oneDNN is not installed")
ENGINES = ["DEFAULT", pytest.param("ONEDNN", marks=needs_onednn)]


@contextmanager
def fallbacks() -> Iterator[list[str]]:
    """The messages about operators that the default engine computes although oneDNN was asked for."""
    found: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            message = record.getMessage()
            if "the default engine computes it" in message or " skipped: " in message:
                found.append(message)

    logger, listener = logging.getLogger("dagexec"), Listener(logging.INFO)
    before = logger.level
    logger.addHandler(listener)
    logger.setLevel(logging.INFO)
    try:
        yield found
    finally:
        logger.setLevel(before)
        logger.removeHandler(listener)


def has_vectors_of(lanes: int) -> bool:
    """True when kernels have vectors of so many float32 numbers here; AVX without AVX2 counts as one number."""
    found = library()
    return found is not None and found.machine.lanes >= lanes


def run_onednn(
    op_type: str,
    inputs: list[npt.ArrayLike],
    outputs: int = 1,
    *,
    lanes: int = 1,
    pieces: int = 0,
    **arguments: ArgumentValue,
) -> list[Array]:
    """The outputs of one operator computed by oneDNN; an AssertionError when the default engine served.

    The default engine may serve where kernels have vectors of less than `lanes` numbers.
    """
    with fallbacks() as found:
        results = run_operator(op_type, inputs, outputs, engine="ONEDNN", pieces=pieces, **arguments)
    assert not found or not has_vectors_of(lanes), found
    return results


def run_fallback(
    op_type: str, inputs: list[npt.ArrayLike], outputs: int = 1, **arguments: ArgumentValue
) -> tuple[list[Array], str]:
    """The outputs of one operator asked of oneDNN that the default engine computes, and the reason given."""
    with fallbacks() as found:
        results = run_operator(op_type, inputs, outputs, engine="ONEDNN", **arguments)
    assert found, "oneDNN served"
    return results, found[0]


def in_order(image: Array, order: str) -> Array:
    """An N, C, spatial image as an array in `order`, by NumPy's Reorder."""
    return run_operator("Reorder", [image], to_order=order)[0]


def from_order(array: Array, order: str) -> Array:
    """The N, C, spatial image of an array in `order`."""
    return run_operator("Reorder", [array], from_order=order)[0]


def normal(seed: int, *shape: int) -> Array:
    """float32 numbers of a normal distribution."""
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
