"""Which buffers may not share bytes, of all pairs at once."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dagexec.scheduler.memory.lifetime import Lifetimes


def conflicts_of(lifetimes: Lifetimes) -> npt.NDArray[np.bool_]:
    """[a, b] is true when the two buffers must not share bytes."""
    return ~(lifetimes.precedes | lifetimes.precedes.T)
