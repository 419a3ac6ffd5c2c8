"""What is otherwise in Python built without the interpreter lock; docs/free-threading.md says all of it."""

from __future__ import annotations

import sys

import pytest


def not_free_threaded(reason: str) -> pytest.MarkDecorator:
    """Leaves a test out under such a Python, as `reason` says."""
    return pytest.mark.skipif("t" in getattr(sys, "abiflags", ""), reason=reason)
