"""How many examples hypothesis draws: as many as CI has time for, or DAGEXEC_DRAWS times as many (`make fuzz`)."""

from __future__ import annotations

import os

from hypothesis import settings

_TIMES = int(os.environ.get("DAGEXEC_DRAWS", "1"))


def drawn(count: int) -> settings:
    """Settings for a test of `count` examples in CI."""
    return settings(max_examples=count * _TIMES, deadline=None)
