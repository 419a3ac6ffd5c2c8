"""What a deployment is doing and has done, in numbers."""

from __future__ import annotations

from collections.abc import Mapping

from dagexec.cluster.link import ReplicaLink
from dagexec.cluster.state import DeploymentState, Member, Phase
from dagexec.executor.dispatch.statistics import Latencies
from dagexec.platform.records import dataclass


@dataclass(frozen=True)
class ReplicaStatistics:
    """A moment of one replica.

    Attributes:
        number: its name in messages.
        place: where it runs or ran last: "process 4711 on host".
        phase: "starting", "up" or "leaving".
        outstanding: requests that it was sent and has not answered.
        begun: requests that it was sent in all.
        restarts: how often its process was lost.
    """

    number: int
    place: str
    phase: str
    outstanding: int
    begun: int
    restarts: int


@dataclass(frozen=True)
class DeploymentStatistics:
    """A moment of a deployment.

    Attributes:
        replicas: those that there are.
        running: requests that a replica was sent, and whose callers wait.
        queued: requests that wait for a replica.
        completed, failed, cancelled, timed_out, rejected, invalid: requests by outcome, as of an executor.
        median_latency, p99_latency: seconds from request to answer, over the last 1,000 completed runs.
        queue_wait: of that, until it was sent to a replica.
        run_time: of that, from then on: there, in the replica, and back.
        retried: requests that were sent a second time, as their replica was lost.
        lost: how often a replica was lost.
    """

    replicas: tuple[ReplicaStatistics, ...]
    running: int
    queued: int
    completed: int
    failed: int
    cancelled: int
    timed_out: int
    rejected: int
    invalid: int
    median_latency: float | None
    p99_latency: float | None
    queue_wait: Latencies
    run_time: Latencies
    retried: int
    lost: int

    @property
    def up(self) -> int:
        """Replicas that serve."""
        return sum(one.phase == Phase.UP.value for one in self.replicas)


def statistics_of(state: DeploymentState, links: Mapping[Member, ReplicaLink]) -> DeploymentStatistics:
    """Those of this moment; the state has to stand still."""
    whole = Latencies.of(waited + ran for waited, ran in state.times)
    return DeploymentStatistics(
        replicas=tuple(
            ReplicaStatistics(
                one.number,
                links[one].place if one in links else "not started",
                one.phase.value,
                len(one.outstanding),
                one.begun,
                one.life,
            )
            for one in state.members.values()
        ),
        running=len(state.attempts),
        queued=len(state.queue) + len(state.again),
        **state.outcomes,
        median_latency=whole.median,
        p99_latency=whole.p99,
        queue_wait=Latencies.of(waited for waited, _ in state.times),
        run_time=Latencies.of(ran for _, ran in state.times),
        retried=state.retried,
        lost=state.lost_replicas,
    )
