"""Whatever the tests have pools do is checked against the machine of runs, too."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dagexec.testing import conforming


@pytest.fixture(autouse=True)
def conformance(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.node.get_closest_marker("unrecorded") is not None:
        yield
        return
    with conforming():
        yield
