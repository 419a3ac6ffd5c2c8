"""The machines of a simulation: how many there are, how fast, and what lies between them."""

from __future__ import annotations

from dagexec.cluster.routing import ROUTERS
from dagexec.cluster.simulation.times import AT_ONCE, Times
from dagexec.errors import SettingError
from dagexec.platform.records import dataclass


@dataclass(frozen=True)
class Failures:
    """Replicas that die, at independent exponential intervals, and are replaced.

    The requests that a dead replica had are sent to another one, and fail if that one dies, too.

    Attributes:
        seconds_between: mean life of a replica.
        seconds_to_replace: until another one is in its place.
    """

    seconds_between: float
    seconds_to_replace: float


@dataclass(frozen=True)
class Cluster:
    """Front ends that take requests from clients and pass them on to replicas.

    A front end does one thing at a time: it sends a request, or takes an answer. Each knows only of the requests that
    it sent itself. Requests that no replica may take wait in the front end, first come first served.

    Attributes:
        service: seconds that a replica computes a request while nothing else runs on its machine.
        replicas: how many there are.
        threads: cores that a replica keeps busy while it computes.
        batch_costs: the time of a run of 1, 2, ... requests, relative to a run of one; as many as there are may be
            joined, of those that wait in a replica at the end of its last run.
        after_idle: pairs of seconds that a replica had nothing to do, ascending, and of those that its next run takes
            longer, as its weights have left the caches; linear in between, and constant after the last.
        network: seconds from a front end to a replica, and from there back.
        send_seconds: that a front end computes to send a request.
        receive_seconds: that a front end computes to take an answer.
        front_ends: how many there are; requests come to one after the other.
        routing: "least" outstanding requests, "round_robin" or "random".
        max_outstanding: requests that a front end sends to a replica before it has an answer; None: all.
        max_queued: requests that wait in a front end; more are refused. None: no limit.
        cores: of a machine; None: each replica and front end has cores of its own.
        replicas_per_machine: None: all are on one machine. Only with `cores`.
        front_ends_share: the front ends are on the first machine. Otherwise they have cores of their own.
        interference: the speed of each core with 1, 2, ... of a machine's cores busy; the last holds for more. Cores
            share a bus and a cache, so it falls. Threads beyond the cores share these evenly.
        failures: None: no replica dies.
    """

    service: Times
    replicas: int = 1
    threads: int = 1
    batch_costs: tuple[float, ...] = (1.0,)
    after_idle: tuple[tuple[float, float], ...] = ()
    network: Times = AT_ONCE
    send_seconds: float = 0.0
    receive_seconds: float = 0.0
    front_ends: int = 1
    routing: str = "least"
    max_outstanding: int | None = None
    max_queued: int | None = None
    cores: int | None = None
    replicas_per_machine: int | None = None
    front_ends_share: bool = False
    interference: tuple[float, ...] = (1.0,)
    failures: Failures | None = None

    def __post_init__(self) -> None:
        for name in ("replicas", "threads", "front_ends"):
            _require(getattr(self, name) >= 1, name, "at least 1", getattr(self, name))
        for name, least in (("max_outstanding", 1), ("max_queued", 0), ("cores", 1), ("replicas_per_machine", 1)):
            value = getattr(self, name)
            _require(value is None or value >= least, name, f"None or at least {least}", value)
        for name in ("send_seconds", "receive_seconds"):
            _require(getattr(self, name) >= 0, name, "at least 0", getattr(self, name))
        for name in ("batch_costs", "interference"):
            value = getattr(self, name)
            _require(len(value) > 0 and min(value) > 0 and value[0] == 1, name, "1.0 and further numbers", value)
        idle = [seconds for seconds, _ in self.after_idle]
        is_right = idle == sorted(idle) and all(extra >= 0 for _, extra in self.after_idle)
        _require(is_right, "after_idle", "pairs in ascending order, none negative", self.after_idle)
        _require(self.routing in ROUTERS, "routing", f"one of {', '.join(ROUTERS)}", self.routing)

    def machine_of(self, replica: int) -> int:
        """The number of the machine of replica 0, 1, ..., if machines are shared."""
        return replica // (self.replicas_per_machine or self.replicas)


def _require(is_right: bool, name: str, expected: str, found: object) -> None:
    if not is_right:
        raise SettingError(f"{name} is {expected}, found {found!r}")
