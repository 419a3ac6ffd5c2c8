"""Operators cut into more pieces than their work is worth, so that small tests see what large operators do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from dagexec.ops.kernels import sharing


class _Count(float):
    """What any number of seconds are so many times."""

    def __rtruediv__(self, other: float) -> float:
        return float(self)


@contextmanager
def cut_into(pieces: int) -> Iterator[None]:
    """Within it operators are prepared in so many pieces if they can be cut so often, however little they do.

    With 0 they are in as many as their work is worth.
    """
    with pytest.MonkeyPatch.context() as patch:
        if pieces:
            patch.setattr(sharing, "PIECE_SECONDS", _Count(pieces))
        yield
