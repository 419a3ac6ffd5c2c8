"""SinusoidPositionEncoding, against its formula element by element."""

from __future__ import annotations

import math

import numpy as np
import pytest

from dagexec.errors import ArgumentError
from tests.ops.running import run_operator


@pytest.mark.parametrize("size", [1, 4, 5])
def test_positions_are_sines_and_cosines(size: int) -> None:
    positions = np.array([[0, 1, 7], [300, 2, 5]], np.int32)
    [found] = run_operator("SinusoidPositionEncoding", [positions], embedding_size=size, alpha=500.0, amplitude=0.5)
    for place, position in np.ndenumerate(positions):
        for i in range(size):
            angle = position / 500.0 ** ((i - i % 2) / size)
            expected = 0.5 * (math.cos(angle) if i % 2 else math.sin(angle))
            np.testing.assert_allclose(found[(*place, i)], expected, rtol=1e-5, atol=1e-6)
    with pytest.raises(ArgumentError, match="'embedding_size'"):
        run_operator("SinusoidPositionEncoding", [positions], embedding_size=0)
