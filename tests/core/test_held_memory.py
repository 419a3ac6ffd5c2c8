"""Which of many arrays another one meets: as a comparison with each of them says, whatever lies within what."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dagexec.core.feeds import HeldMemory

_BUFFER = np.zeros(64, np.uint8)

pieces = st.builds(
    lambda start, count, step: _BUFFER[start : start + count * step : step],
    st.integers(0, 60),
    st.integers(0, 20),
    st.integers(1, 3),
)


@given(st.lists(pieces, max_size=8), pieces)
def test_an_array_is_met_where_it_shares_memory(held: list[np.ndarray], asked: np.ndarray) -> None:
    arrays = {str(number): array for number, array in enumerate(held)}
    found = HeldMemory(arrays).met_by(asked)
    shared = {name for name, array in arrays.items() if np.shares_memory(array, asked)}
    assert found in shared if shared else found is None
