"""What all tests of passes share."""

from __future__ import annotations

import zlib

import pytest

from tests.compiler.passes import models


@pytest.fixture(autouse=True)
def numbers_of_the_test(request: pytest.FixtureRequest) -> None:
    """Each test draws the same random numbers, whichever tests ran before it in this process."""
    models.reseed(zlib.crc32(request.node.name.encode()))
