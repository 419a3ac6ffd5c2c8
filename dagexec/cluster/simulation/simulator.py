"""The simulation: requests go from clients through front ends to replicas and back, event by event.

Requests are numbers. Everything random is drawn before the first event, by the seed, but for what follows failures.
"""

from __future__ import annotations

from collections import deque
from heapq import heappop

import numpy as np

from dagexec.cluster.routing import ROUTERS, Router
from dagexec.cluster.simulation.cluster import Cluster
from dagexec.cluster.simulation.loads import ClosedLoop, Load
from dagexec.cluster.simulation.machine import Cores, Events, Handler, OwnCores, SharedCores
from dagexec.cluster.simulation.outcome import Outcome
from dagexec.errors import SettingError


def simulate(cluster: Cluster, load: Load, requests: int = 100_000, seed: int = 0) -> Outcome:
    """What so many requests of `load` find at `cluster`; the same for the same seed.

    Takes some 5 to 20 microseconds a request, whatever the number of replicas.
    """
    if requests < 2:
        raise SettingError(f"a simulation has at least 2 requests, found {requests!r}")
    return _Simulation(cluster, load, requests, seed).run()


class _Replica:
    """A life of a replica: another one in its place has another name."""

    def __init__(self, name: int, place: int, cores: Cores) -> None:
        self.name = name
        self.place = place
        self.cores = cores
        self.is_alive = True
        self.waiting: deque[int] = deque()
        self.running: list[int] = []
        self.since = 0.0  # when it began to run these, or to have nothing to do


class _FrontEnd:
    """One thread with a list of things to do, and the requests that no replica may take yet."""

    def __init__(self, events: Events, cores: Cores, router: Router[int]) -> None:
        self.router = router
        self.waiting: deque[int] = deque()
        self.busy_seconds = 0.0
        self._events = events
        self._cores = cores
        self._to_do: deque[tuple[float, Handler, int]] = deque()
        self._current: tuple[float, Handler, int] | None = None
        self._since = 0.0

    def do(self, now: float, seconds: float, handler: Handler, request: int) -> None:
        """Compute for so long, after what is there to do, then call `handler`."""
        if not seconds:
            handler(now, request)
        elif self._current is None:
            self._begin(now, (seconds, handler, request))
        else:
            self._to_do.append((seconds, handler, request))

    def _begin(self, now: float, job: tuple[float, Handler, int]) -> None:
        self._current = job
        self._since = now
        self._cores.start(now, job[0], 1, self._end, job)

    def _end(self, now: float, job: tuple[float, Handler, int]) -> None:
        self.busy_seconds += now - self._since
        self._current = None
        if self._to_do:
            self._begin(now, self._to_do.popleft())
        job[1](now, job[2])


class _Simulation:
    def __init__(self, cluster: Cluster, load: Load, requests: int, seed: int) -> None:
        self._cluster = cluster
        self._load = load
        self._events = Events()
        self._generator = generator = np.random.default_rng(seed)
        self._service: list[float] = cluster.service.draw(generator, requests).tolist()
        self._there: list[float] = cluster.network.draw(generator, requests).tolist()
        self._back: list[float] = cluster.network.draw(generator, requests).tolist()
        self._arrived = [float("nan")] * requests
        self._answered = [float("nan")] * requests
        self._sent_to: list[_Replica | None] = [None] * requests
        self._retried: set[int] = set()
        self._refused = self._failed = self._open = 0
        self._coming = 0  # the next request of a closed loop
        self._busy_seconds = 0.0
        self._idle = [seconds for seconds, _ in cluster.after_idle]
        self._extra = [extra for _, extra in cluster.after_idle]
        machines = self._machines()
        self._replicas = {
            place: _Replica(place, place, machines[cluster.machine_of(place)] if cluster.cores else machines[0])
            for place in range(cluster.replicas)
        }
        self._names = cluster.replicas  # how many were given
        front_cores = machines[0] if cluster.front_ends_share or not cluster.cores else OwnCores(self._events)
        route = ROUTERS[cluster.routing]
        self._front_ends = [
            _FrontEnd(
                self._events,
                front_cores,
                route(range(cluster.replicas), cluster.max_outstanding, int(generator.integers(1 << 31))),
            )
            for _ in range(cluster.front_ends)
        ]

    def _machines(self) -> list[Cores]:
        if self._cluster.cores is None:
            return [OwnCores(self._events)]
        machines = self._cluster.machine_of(self._cluster.replicas - 1) + 1
        return [SharedCores(self._events, self._cluster.cores, self._cluster.interference) for _ in range(machines)]

    def run(self) -> Outcome:
        requests = self._open = len(self._service)
        arrivals: list[float] = []
        if isinstance(self._load, ClosedLoop):
            self._think: list[float] = self._load.think.draw(self._generator, requests).tolist()
            for _ in range(min(self._load.clients, requests)):
                self._ask_next(0.0)
        else:
            arrivals = self._load.arrivals(self._generator, requests).tolist()
            self._arrived = arrivals
        if self._cluster.failures is not None:
            for replica in self._replicas.values():
                self._plan_death(0.0, replica)
        now, events = self._loop(arrivals)
        lives = self._cluster.replicas * now
        return Outcome(
            arrived=np.array(self._arrived),
            answered=np.array(self._answered),
            refused=self._refused,
            failed=self._failed,
            retried=len(self._retried),
            replica_utilization=self._busy_seconds / lives if lives else 0.0,
            front_end_utilization=sum(front_end.busy_seconds for front_end in self._front_ends)
            / (len(self._front_ends) * now if now else 1.0),
            events=events,
        )

    def _loop(self, arrivals: list[float]) -> tuple[float, int]:
        """Until no request is open: when that is, and after how many events."""
        heap = self._events.heap
        now, events, number = 0.0, 0, 0
        while self._open:
            events += 1
            if number < len(arrivals) and (not heap or arrivals[number] <= heap[0][0]):
                now = arrivals[number]
                self._offer(now, number)
                number += 1
            else:
                now, _, handler, argument = heappop(heap)
                handler(now, argument)
        return now, events

    # A client asks

    def _ask_next(self, now: float) -> None:
        if self._coming < len(self._service):
            request = self._coming
            self._coming += 1
            self._events.at(now + self._think[request], self._ask, request)

    def _ask(self, now: float, request: int) -> None:
        self._arrived[request] = now
        self._offer(now, request)

    def _close(self, now: float) -> None:
        self._open -= 1
        if isinstance(self._load, ClosedLoop):
            self._ask_next(now)

    # A front end sends

    def _front_end(self, request: int) -> _FrontEnd:
        return self._front_ends[request % len(self._front_ends)]

    def _offer(self, now: float, request: int) -> None:
        front_end = self._front_end(request)
        name = front_end.router.acquire()
        if name is not None:
            self._send(now, front_end, request, name)
        elif self._cluster.max_queued is None or len(front_end.waiting) < self._cluster.max_queued:
            front_end.waiting.append(request)
        else:
            self._refused += 1
            self._close(now)

    def _send(self, now: float, front_end: _FrontEnd, request: int, name: int) -> None:
        self._sent_to[request] = self._replicas[name]
        front_end.do(now, self._cluster.send_seconds, self._sent, request)

    def _sent(self, now: float, request: int) -> None:
        there = self._there[request]
        if there:
            self._events.at(now + there, self._reach, request)
        else:
            self._reach(now, request)

    # A replica computes

    def _reach(self, now: float, request: int) -> None:
        replica = self._sent_to[request]
        assert replica is not None
        if not replica.is_alive:
            self._lose(now, request)
            return
        replica.waiting.append(request)
        if not replica.running:
            self._compute(now, replica)

    def _compute(self, now: float, replica: _Replica) -> None:
        costs = self._cluster.batch_costs
        rows = min(len(replica.waiting), len(costs))
        replica.running = [replica.waiting.popleft() for _ in range(rows)]
        work = self._service[replica.running[0]] * costs[rows - 1]
        if self._idle and now > replica.since:
            work += float(np.interp(now - replica.since, self._idle, self._extra))
        replica.since = now
        replica.cores.start(now, work, self._cluster.threads, self._computed, replica)

    def _computed(self, now: float, replica: _Replica) -> None:
        if not replica.is_alive:
            return
        self._busy_seconds += now - replica.since
        replica.since = now
        done, replica.running = replica.running, []
        if replica.waiting:
            self._compute(now, replica)
        for request in done:
            back = self._back[request]
            if back:
                self._events.at(now + back, self._return, request)
            else:
                self._return(now, request)

    # A front end takes the answer

    def _return(self, now: float, request: int) -> None:
        self._front_end(request).do(now, self._cluster.receive_seconds, self._answer, request)

    def _answer(self, now: float, request: int) -> None:
        self._answered[request] = now
        replica = self._sent_to[request]
        assert replica is not None
        front_end = self._front_end(request)
        front_end.router.release(replica.name)
        self._send_waiting(now, front_end)
        self._close(now)

    def _send_waiting(self, now: float, front_end: _FrontEnd) -> None:
        while front_end.waiting:
            name = front_end.router.acquire()
            if name is None:
                return
            self._send(now, front_end, front_end.waiting.popleft(), name)

    # A replica dies

    def _plan_death(self, now: float, replica: _Replica) -> None:
        assert self._cluster.failures is not None
        life = self._generator.exponential(self._cluster.failures.seconds_between)
        self._events.at(now + life, self._die, replica)

    def _die(self, now: float, replica: _Replica) -> None:
        assert self._cluster.failures is not None
        replica.is_alive = False
        if replica.running:
            self._busy_seconds += now - replica.since
            if isinstance(replica.cores, SharedCores):
                replica.cores.stop(now, replica)
        del self._replicas[replica.name]
        for front_end in self._front_ends:
            front_end.router.remove(replica.name)
        self._events.at(now + self._cluster.failures.seconds_to_replace, self._replace, replica)
        for request in (*replica.running, *replica.waiting):
            self._lose(now, request)

    def _lose(self, now: float, request: int) -> None:
        if request in self._retried:
            self._failed += 1
            self._close(now)
        else:
            self._retried.add(request)
            self._offer(now, request)

    def _replace(self, now: float, dead: _Replica) -> None:
        replica = _Replica(self._names, dead.place, dead.cores)
        self._names += 1
        self._replicas[replica.name] = replica
        self._plan_death(now, replica)
        for front_end in self._front_ends:
            front_end.router.add(replica.name)
            self._send_waiting(now, front_end)
