"""A net of two branches whose operators act as a test says, and what must hold of its executor whatever went wrong."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

import dagexec
from dagexec import NetDef
from dagexec.core import dtypes
from dagexec.core.model import InputInfo, Model
from dagexec.devices.sim import SimRuntime
from dagexec.errors import DagexecError
from tests.ops.running import operator_def

Array = npt.NDArray[np.float32]

PATIENCE = 60
LEFT, RIGHT, BOTH, PLAIN = 1.0, 2.0, 3.0, 9.0
"""What x[0, 0] says: which of the two acting operators of the net act; with PLAIN, none does."""


@dataclass(frozen=True)
class Place:
    """Where a net runs."""

    device: str
    net_type: str

    @property
    def finishes_what_is_launched(self) -> bool:
        """Chains are launched before those they wait for are done, and a stopped run finishes what it has launched."""
        return self.device != "cpu" and self.net_type == "async_dag"

    def compile(self, **options: object) -> dagexec.Executor:
        """An executor of the two-branch net with 2 workers and 2 replicas."""
        chosen = {"num_workers": 2, "replicas": 2, **options}
        return dagexec.compile(two_branches(), optimize=False, device=self.device, net_type=self.net_type, **chosen)  # type: ignore[arg-type]


NET_TYPES = ("simple", "dag", "async_dag")
HOST = [Place("cpu", net_type) for net_type in NET_TYPES]
DEVICE = [Place("sim:0", net_type) for net_type in NET_TYPES]


def described(place: Place) -> str:
    return f"{place.net_type} on {place.device}"


Setting = Callable[..., SimRuntime]


def two_branches() -> Model:
    """y = (x + 1) + 2 x, in two branches that begin with an operator that acts, and a chain behind both that counts."""
    net = NetDef(
        name="branches",
        op=[
            operator_def("Acting", ["x"], ["left"], number=1),
            operator_def("Acting", ["x"], ["right"], number=2),
            operator_def("Add", ["left", "one"], ["left1"]),
            operator_def("Add", ["right", "right"], ["right2"]),
            operator_def("Add", ["left1", "right2"], ["sum"]),
            operator_def("Acting", ["sum"], ["y"], number=0),
        ],
        external_input=["x", "one"],
        external_output=["y"],
    )
    return Model(
        "branches",
        net,
        parameters={"one": np.ones(3, np.float32)},
        inputs={"x": InputInfo(dtypes.FLOAT32, (None, 3))},
        outputs=("y",),
    )


def feed(code: float = PLAIN, rows: int = 2) -> dict[str, Array]:
    return {"x": np.arange(rows * 3, dtype=np.float32).reshape(rows, 3) * 0.37 + code}


def right_bytes(code: float = PLAIN, rows: int = 2) -> bytes:
    x = feed(code, rows)["x"]
    return ((x + np.float32(1)) + (x + x)).tobytes()


class Acts:
    """What the operators of type Acting do besides copying: `does[n]` is called by operator number n when x says so.

    Attributes:
        behind: how often the chain behind both branches ran, by what x said.
        entered: how often each acting operator ran, by its number and what its input said.
    """

    def __init__(self) -> None:
        self.does: dict[int, Callable[[], object]] = {}
        self.behind: Counter[float] = Counter()
        self.entered: Counter[tuple[int, float]] = Counter()

    def __call__(self, number: int, code: float) -> None:
        """Called in every step, with element 0, 0 of its input."""
        self.entered[number, code] += 1
        if number == 0:
            self.behind[(code - 1) / 3] += 1
        elif code in (number, BOTH) and number in self.does:
            self.does[number]()


class Gate:
    """A place in an operator: who comes there says so and waits until it is opened."""

    def __init__(self) -> None:
        self.inside = threading.Semaphore(0)
        self.go_on = threading.Semaphore(0)

    def __call__(self) -> None:
        self.inside.release()
        assert self.go_on.acquire(timeout=PATIENCE)

    def wait_inside(self) -> None:
        assert self.inside.acquire(timeout=PATIENCE)

    def open(self) -> None:
        self.go_on.release()


@contextmanager
def beside(executor: dagexec.Executor, acts: Acts, code: float = RIGHT) -> Iterator[Gate]:
    """A run is held in its right operator on one replica while the block lasts; then it must end with right bytes.

    Its left operator has run, or is behind the other on a stream.
    """
    gate = Gate()
    acts.does[2] = gate
    with ThreadPoolExecutor(1) as threads:
        held = threads.submit(executor.run, feed(code))
        gate.wait_inside()
        until(lambda: acts.entered[1, code] > 0 or executor.statistics().busy_workers == 0)
        try:
            yield gate
        finally:
            gate.open()
        assert held.result(PATIENCE)["y"].tobytes() == right_bytes(code)


def serves(executor: dagexec.Executor, acts: Acts) -> None:
    """Every replica serves a run with the right bytes, all at the same time, and the executor is idle then."""
    replicas = executor.statistics().replicas
    if executor.num_workers >= replicas:
        meeting = threading.Barrier(replicas)
        acts.does[1] = lambda: meeting.wait(PATIENCE)
    with ThreadPoolExecutor(replicas) as threads:
        results = [threads.submit(executor.run, feed(LEFT)) for _ in range(replicas)]
        for result in results:
            assert result.result(PATIENCE)["y"].tobytes() == right_bytes(LEFT)
    moment = executor.statistics()
    assert (moment.running, moment.queued, moment.replicas) == (0, 0, replicas)
    del acts.does[1]


def raising(error: BaseException) -> Callable[[], object]:
    def act() -> None:
        raise error

    return act


def release_when_cancelled(executor: dagexec.Executor, gate: Gate) -> list[BaseException]:
    """Open `gate` each time a request has been told to end early, not before; the reasons so far."""
    reasons: list[BaseException] = []
    dispatcher = executor._dispatcher
    cancel, stop_running = dispatcher.cancel, dispatcher.stop_running

    def stop_and_open() -> None:
        stop_running()
        gate.open()

    def cancel_and_open(request: object, error: DagexecError) -> bool:
        waits = cancel(request, error)  # type: ignore[arg-type]
        reasons.append(error)
        gate.open()
        return waits

    dispatcher.cancel, dispatcher.stop_running = cancel_and_open, stop_and_open  # type: ignore[method-assign]
    return reasons


def until(condition: Callable[[], bool]) -> None:
    """Return when `condition` holds, which other threads bring about."""
    while not condition():
        os.sched_yield()
