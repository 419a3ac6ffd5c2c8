"""How many replicas there should be, from the requests that are outstanding: a machine without clock and transport.

More are wanted at once, fewer only after as many have sufficed for a while, so that a short lull ends none of them:
each takes seconds to start.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable
from numbers import Integral, Real

from dagexec.errors import SettingError
from dagexec.platform.records import dataclass


@dataclass(frozen=True, kw_only=True)
class Autoscaling:
    """Bounds of a deployment that grows and shrinks.

    Attributes:
        min_replicas: there are never fewer; at least 1.
        max_replicas: there are never more.
        target_outstanding: requests, waiting ones included, that there are to be for each replica.
        downscale_seconds: for so long fewer replicas have to suffice before there are fewer.
    """

    min_replicas: int
    max_replicas: int
    target_outstanding: float = 2.0
    downscale_seconds: float = 60.0

    def __post_init__(self) -> None:
        counts = (self.min_replicas, self.max_replicas)
        whole = all(isinstance(count, Integral) and not isinstance(count, bool) for count in counts)
        if not whole or not 1 <= self.min_replicas <= self.max_replicas:
            raise SettingError(f"autoscaling: 1 <= min_replicas <= max_replicas, not {counts!r:.80}")
        if not isinstance(self.target_outstanding, Real) or not 0 < self.target_outstanding < math.inf:
            raise SettingError(f"autoscaling: target_outstanding must be above 0, not {self.target_outstanding!r:.80}")
        if not isinstance(self.downscale_seconds, Real) or not 0 <= self.downscale_seconds < math.inf:
            raise SettingError(f"autoscaling: downscale_seconds must be 0 or more, not {self.downscale_seconds!r:.80}")

    def wanted(self, outstanding: int) -> int:
        """Replicas for so many outstanding requests."""
        return min(self.max_replicas, max(self.min_replicas, math.ceil(outstanding / self.target_outstanding)))


class Autoscaler:
    """What `Autoscaling` asks for over time: the most that was wanted within `downscale_seconds`."""

    def __init__(self, bounds: Autoscaling) -> None:
        self.bounds = bounds
        self._wanted: deque[tuple[float, int]] = deque()  # until when how many, the most first

    def replicas(self, outstanding: int, now: float) -> int:
        """How many there are to be now that so many requests are outstanding, queued ones included."""
        wanted = self.bounds.wanted(outstanding)
        while self._wanted and self._wanted[0][0] <= now:
            self._wanted.popleft()
        while self._wanted and self._wanted[-1][1] <= wanted:
            self._wanted.pop()
        self._wanted.append((now + self.bounds.downscale_seconds, wanted))
        return self._wanted[0][1]

    def state(self, now: float) -> Hashable:
        """All that what comes next depends on; times are from `now` on."""
        return tuple((until - now, wanted) for until, wanted in self._wanted if until > now)

    def next_change(self) -> float | None:
        """When there may be fewer, if nothing is outstanding by then; None when there are as few as there may be."""
        until, wanted = self._wanted[0] if self._wanted else (0.0, self.bounds.min_replicas)
        return None if wanted <= self.bounds.min_replicas else until
