"""With `DAGEXEC_GUARDED=1`, as `make fuzz-operators` sets it, drawn operators work where nothing beside may be touched.

Who does so ends the process: pytest's workers are replaced, and name the test.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator

import pytest

from tests.guarded import Guards, guarded_memory

if os.environ.get("DAGEXEC_GUARDED"):

    @pytest.fixture(autouse=True)
    def _guarded(request: pytest.FixtureRequest) -> Iterator[None]:
        if not getattr(request.function, "is_hypothesis_test", False):
            yield
            return
        with guarded_memory(Guards.drawn(random.Random(request.node.nodeid))):
            yield
