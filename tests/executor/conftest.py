"""What tests of serving share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.held import Held, held_operators


@pytest.fixture
def held() -> Iterator[Held]:
    """Operators of type Held, and control over them."""
    with held_operators() as control:
        yield control
