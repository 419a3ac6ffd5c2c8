"""`cached_property` without a lock, whose value is one object for all threads.

That of Python 3.11 holds a lock, one for all objects of a class, while it computes: a child made by `os.fork` at that
moment waits for it for good, and threads wait for one another. That of later versions has none, and threads that ask
at the same time may each keep another object. Here they may all compute, and all are given what was there first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from functools import cached_property as cached_property
else:

    class cached_property:  # noqa: N801 - as it is called everywhere
        """Computed when it is first asked for, and an attribute from then on."""

        def __init__(self, compute):
            self._compute, self.__doc__ = compute, compute.__doc__

        def __set_name__(self, owner, name):
            self._name = name

        def __get__(self, instance, owner=None):
            return self if instance is None else instance.__dict__.setdefault(self._name, self._compute(instance))
