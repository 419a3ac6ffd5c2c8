"""Case: one seed, and everything that follows from it - the net, how it is run, by whom, and what is to go wrong.

The seed decides everything; an option of the command line (device, net type) replaces one decision without changing the
others, so the seed and these options replay a case.
"""

from __future__ import annotations

import random
import shlex
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, get_args

from dagexec.core.device import CPU, Device
from dagexec.errors import RowsError, SettingError
from dagexec.executor.batching.axes import BatchAxes
from dagexec.options import CompileOptions, WhenFull
from dagexec.platform.records import dataclass
from dagexec.scheduler.nets.options import NET_TYPES
from dagexec.scheduler.plan.bindings import MIN_BYTES_BOUND
from dagexec.stress.nets import RandomNet, RandomNetOptions, random_net
from dagexec.stress.operators import Failure

FEEDS = 4

Ending = Literal["wait", "timeout", "cancel"]
Mistake = Literal["missing input", "unknown input", "wrong type", "unknown output"]
Closing = Literal["close", "close and drain", "drain", "drain with a timeout"]
Backend = Literal["threads", "asyncio", "trio"]
Compiling = Literal["as given", "memory planned", "rewritten"]
DeviceFault = Literal["launch", "kernel", "copy", "event", "allocation", "hang"]

_COMPILINGS: tuple[Compiling, ...] = ("as given", "memory planned", "rewritten")
_CLOSINGS: tuple[Closing, ...] = ("close", "close and drain", "drain", "drain with a timeout")


@dataclass(frozen=True)
class CaseRequest:
    """One run that a caller asks for.

    Attributes:
        executor: which of the case's executors is asked.
        feed: the number of its feed.
        failures: (failing operator, how) pairs, for the operators that are to fail.
        ending: whether the caller waits, sets a timeout, or (a task) is cancelled.
        patience: seconds until then.
        priority: of the request.
        mistake: what is wrong with the feed or the outputs asked for, if anything.
    """

    executor: int
    feed: int
    failures: tuple[tuple[int, Failure], ...] = ()
    ending: Ending = "wait"
    patience: float = 0.0
    priority: int = 0
    mistake: Mistake | None = None


@dataclass(frozen=True)
class Caller:
    """A group of callers that start together: each row of requests is made by one thread, or one task, in order."""

    backend: Backend
    rows: tuple[tuple[CaseRequest, ...], ...]


@dataclass(frozen=True)
class CaseSimSettings:
    """How the simulated devices work during the case.

    Attributes:
        driver: real threads, or one thread in the order that `seed` decides.
        seed: for the seeded driver.
        launch_seconds: modeled time of a launch.
        faults: what is injected, each at the given (counted) occurrence.
        limit_bytes: memory of each device, None for as much as the machine has.
    """

    driver: Literal["threads", "seeded"]
    seed: int
    launch_seconds: float
    faults: tuple[tuple[DeviceFault, int], ...]
    limit_bytes: int | None


@dataclass(frozen=True)
class Case:
    """What one case does.

    Attributes:
        seed: decides everything but what the next two fix.
        fixed_device, fixed_net_type: what the caller of `make_case` asked for, None for what the seed says.
        device: where nets run whose operators name no device.
        devices: all devices in use.
        options: of each executor, but for how the net is compiled and warmed up.
        executors: how many serve the net at the same time.
        repeats: runs of a net that is driven alone, without an executor; 0 for none.
        warm: the executors are warmed up with zeros.
        closing: how the executors are closed while requests are under way; None: afterwards.
        callers: who asks for what.
        sim: settings of the simulated devices; None when there are none.
        compiling: the net runs as it is given; or its memory is planned, and all but the results may share it; or it is
            rewritten for speed as well, which changes the last bits of results.
        least_bytes_moved: inputs and results of so many bytes are not copied where operators can work on the caller's.
        stateful: the net that is driven alone writes its parameters too.
    """

    seed: int
    fixed_device: str | None
    fixed_net_type: str | None
    device: str
    devices: tuple[str, ...]
    options: CompileOptions
    executors: int
    repeats: int
    warm: bool
    closing: Closing | None
    callers: tuple[Caller, ...]
    sim: CaseSimSettings | None
    compiling: Compiling
    least_bytes_moved: int

    def net(self) -> RandomNet:
        """The net that the executors serve."""
        return _case_net(self.seed, self.devices)

    def stateful_net(self) -> RandomNet:
        """The net that is driven alone; it may write its parameters, so a run starts where the one before ended."""
        return random_net(random.Random(f"{self.seed} alone"), RandomNetOptions(self.devices, stateful=True))

    def replay(self) -> str:
        """The command that runs this case again."""
        words = ["dagexec", "stress", "--case", str(self.seed)]
        if self.fixed_device is not None:
            words += ["--device", self.fixed_device]
        if self.fixed_net_type is not None:
            words += ["--net-type", self.fixed_net_type]
        return shlex.join(words)

    def requests(self) -> list[CaseRequest]:
        """All requests, of all callers."""
        return [request for caller in self.callers for row in caller.rows for request in row]

    def describe(self) -> str:
        """One line on how the net is run."""
        options = self.options
        parts = [f"seed {self.seed}", str(options.net_type), f"on {', '.join(self.devices)}"]
        parts += [f"{options.num_workers} workers", f"{options.streams_per_worker} streams a worker"]
        parts += [f"{options.replicas} replicas", f"{self.executors} executors"]
        parts += [f"{len(caller.rows)} callers ({caller.backend})" for caller in self.callers]
        parts += [f"{self.repeats} runs alone"] * bool(self.repeats)
        parts += [f"{options.when_full} at {options.max_queued} queued"] * (options.max_queued is not None)
        parts += [f"up to {options.max_batch} rows joined"] * (options.max_batch > 1)
        parts += ["warmed up"] * self.warm
        parts += [self.compiling] * (self.compiling != "as given")
        parts += [f"{self.closing} under way"] * (self.closing is not None)
        if self.sim is not None:
            parts.append(f"driver {self.sim.driver}")
            parts += [f"{self.sim.limit_bytes} bytes of memory"] * (self.sim.limit_bytes is not None)
            parts += [f"{kind} fault at {at}" for kind, at in self.sim.faults]
        return ", ".join(parts)


def make_case(seed: int, device: str | None = None, net_type: str | None = None) -> Case:
    """The case of `seed`, on `device` (default: cpu) and with `net_type` (default: what the seed says).

    Raises DeviceError for an unknown device and SchemaError for an unknown net type.
    """
    place = Device.parse(device or "cpu")
    source, compiling = random.Random(f"{seed} case"), random.Random(f"{seed} compiling")
    drawn_type = source.choices(NET_TYPES, (1, 2, 4))[0]
    devices = _devices(random.Random(f"{seed} devices"), place)
    net = _case_net(seed, devices)
    executors = source.choices((1, 2), (4, 1))[0]
    options = CompileOptions(
        net_type=net_type or drawn_type,
        num_workers=source.choice((1, 1, 2, 2, 3, 4)),
        device=None if place == CPU else str(place),  # the net may name others
        streams_per_worker=source.choice((1, 1, 2, 4)),
        replicas=source.choice((1, 1, 2, 3)),
        stream_priority=source.choice(("normal", "normal", "high")),
        tuning_seconds=0,
    )
    repeats = source.choice((0, 0, 1, 3))
    max_queued, when_full = source.choice((None, None, 0, 1, 5)), source.choice(get_args(WhenFull))
    return Case(
        seed=seed,
        fixed_device=device,
        fixed_net_type=net_type,
        device=str(place),
        devices=devices,
        options=_joining(
            random.Random(f"{seed} joining"), net, replace(options, max_queued=max_queued, when_full=when_full)
        ),
        executors=executors,
        repeats=repeats,
        warm=source.random() < 0.3,
        closing=source.choice(_CLOSINGS) if source.random() < 0.15 else None,
        callers=_callers(random.Random(f"{seed} callers"), net.failing, executors),
        sim=_sim_settings(random.Random(f"{seed} sim")) if place.kind == "sim" else None,
        compiling=compiling.choices(_COMPILINGS, (3, 3, 2))[0],
        least_bytes_moved=compiling.choice((1, 100, MIN_BYTES_BOUND)),
    )


def _joining(source: random.Random, net: RandomNet, options: CompileOptions) -> CompileOptions:
    """`options`, with requests joined in half of the cases in which the rows of `net` are apart."""
    limit = max(net.batches) + source.randint(1, 4)
    joining = replace(options, max_batch=limit, max_wait=source.choice((0.0, 0.002)))
    if source.random() < 0.5:
        return options
    try:
        BatchAxes(net.model(), joining)
    except (RowsError, SettingError):
        return options
    return joining


def case_seeds(seed: int) -> random.Random:
    """The source of case seeds of a session: `getrandbits(32)` gives the next."""
    return random.Random(f"{seed} session")


def _case_net(seed: int, devices: tuple[str, ...]) -> RandomNet:
    return random_net(random.Random(f"{seed} net"), RandomNetOptions(devices))


def _devices(source: random.Random, place: Device) -> tuple[str, ...]:
    """Where operators may be: for a simulated device, also on a second one and on the host."""
    if place.kind != "sim":
        return (str(place),)
    other = Device("sim", place.index + 1 if place.index < 63 else 0)
    choices = [(place,), (place,), (place, Device()), (place, other), (place, other, Device())]
    return tuple(str(device) for device in source.choice(choices))


def _callers(source: random.Random, failing: int, executors: int) -> tuple[Caller, ...]:
    kinds: Sequence[tuple[Backend, ...]] = (
        ("threads",),
        ("asyncio",),
        ("trio",),
        ("threads", "asyncio"),
        ("threads", "trio"),
        ("threads", "asyncio", "trio"),
    )
    trouble = source.choice((0.0, 0.1, 0.4))
    groups = []
    for backend in source.choice(kinds):
        size = source.choice((1, 2, 3, 5) if backend == "threads" else (1, 4, 16))
        rows = tuple(
            tuple(_request(source, backend, failing, executors, trouble) for _ in range(source.choice((1, 2, 4))))
            for _ in range(size)
        )
        groups.append(Caller(backend, rows))
    return tuple(groups)


def _request(source: random.Random, backend: Backend, failing: int, executors: int, trouble: float) -> CaseRequest:
    failures: tuple[tuple[int, Failure], ...] = ()
    if failing and source.random() < trouble:
        chosen = source.sample(range(failing), min(failing, source.choice((1, 1, 2, 3))))
        failures = tuple((number, Failure(source.randint(1, 4))) for number in chosen)
    ending: Ending = "wait"
    if source.random() < trouble:
        ending = "timeout" if backend == "threads" else source.choice(("timeout", "cancel"))
    mistake: Mistake | None = None
    if source.random() < trouble / 4:
        mistake = source.choice(("missing input", "unknown input", "wrong type", "unknown output"))
    return CaseRequest(
        executor=source.randrange(executors),
        feed=source.randrange(FEEDS),
        failures=failures,
        ending=ending,
        patience=source.choice((0.0, 0.0002, source.uniform(0, 0.003), source.uniform(0, 0.02))),
        priority=source.choice((0, 0, 0, 1, -1)),
        mistake=mistake,
    )


def _sim_settings(source: random.Random) -> CaseSimSettings:
    kinds: Sequence[DeviceFault] = ("launch", "kernel", "copy", "event", "allocation", "hang")
    faults: list[tuple[DeviceFault, int]] = []
    if source.random() < 0.35:
        for _ in range(source.choice((1, 1, 2, 4))):
            faults.append((source.choice(kinds), source.randrange(source.choice((10, 100, 400)))))
    return CaseSimSettings(
        driver=source.choice(("threads", "seeded")),
        seed=source.randrange(1 << 30),
        launch_seconds=source.choice((0.0, 5e-6)),
        faults=tuple(faults),
        limit_bytes=source.choice((20_000, 50_000, 200_000)) if source.random() < 0.1 else None,
    )
