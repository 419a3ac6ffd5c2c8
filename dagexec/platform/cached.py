"""`cached_property` without a lock, in every version of Python.

That of Python 3.11 holds a lock, one for all objects of a class, while it computes: a child made by `os.fork` at that
moment waits for it for good, and threads wait for one another. From 3.12 on there is none. Two threads that ask at the
same time may both compute; what is cached has to be equal.
"""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING or sys.version_info >= (3, 12):
    from functools import cached_property as cached_property
else:
    from contextlib import nullcontext

    class cached_property(functools.cached_property):  # noqa: N801 - as it is called everywhere
        """Computed when it is first asked for, and an attribute from then on."""

        def __init__(self, compute):
            super().__init__(compute)
            self.lock = nullcontext()
