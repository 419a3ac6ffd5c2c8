"""Running a case: all callers call at once, and every result and every error is judged.

A result must have SimpleNet's bytes on the host, or, when the net is rewritten for speed, those values and the same
bytes each time; on a CUDA device, whose arithmetic differs, SimpleNet's bytes there. An error must be one that the
caller asked for: the failure of an operator that was told to fail, a timeout that was set, a feed that was wrong, an
executor that was closed, a device that was made to fail. Afterwards the executor must serve clean runs on all its
replicas, and no resource may be lost.
"""

from __future__ import annotations

import importlib.util
import logging
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial

import anyio
import numpy as np

import dagexec
from dagexec.binding.io_binding import Outputs
from dagexec.compiler.compilation import PASSES
from dagexec.core.device import CPU, Device
from dagexec.core.shared_buffer import create_shared_buffer
from dagexec.core.workspace import Workspace
from dagexec.errors import (
    ClosedError,
    ConformanceError,
    DagexecError,
    DeviceError,
    FeedError,
    OperatorError,
    QueueFullError,
    ResourceError,
    RunTimeoutError,
)
from dagexec.executor.executor import Executor
from dagexec.platform.threads import threads
from dagexec.scheduler.conformance import Conformance, conforming
from dagexec.scheduler.hazards.detector import Detector
from dagexec.scheduler.nets.async_dag import AsyncDAGNet
from dagexec.scheduler.nets.dag import DAGNet
from dagexec.scheduler.nets.net import BaseNet
from dagexec.scheduler.nets.simple import SimpleNet
from dagexec.scheduler.plan import bindings
from dagexec.stress.case import FEEDS, Backend, Caller, Case, CaseRequest, Closing
from dagexec.stress.devices import HeldResources, PreparedDevices, leaked, prepared_devices
from dagexec.stress.nets import Array, RandomNet, without_devices
from dagexec.stress.operators import FAILING_OPERATOR

_DEVICE_ERRORS = (OperatorError, DeviceError, ResourceError)

_ALL_PASSES = frozenset(one.name for one in PASSES) - {"zero-copy", "in-place"}
"""Passes that change what operators compute; the others decide where."""

_TOLERANCE = 1e-3

_WATCH_EVERY = 3
"""Seeds that this divides have all their runs watched by a detector of unordered accesses; in those with a remainder of
1, what threads do in runs is compared with the machine, in machine code, too."""

PATIENCE_WITH_HANGS = 0.1
"""Seconds that callers wait where a kernel may hang forever."""


_held: list[Conformance] = []  # of the current case, if its threads are compared with the machine


def deviations_where_nothing_happens() -> str:
    """Deviations of the current case's threads from the machine, once no thread goes on; may be empty."""
    try:
        for conformance in _held:
            conformance.raise_found(at_rest=True)
    except ConformanceError as error:
        return f"{error}\n"
    return ""


class CaseFailedError(Exception):
    """A case has shown a defect; the message has everything that was found."""


def run_case(case: Case) -> Counter[str]:
    """Run `case` and count what was tried and how it ended. Raises CaseFailedError."""
    with (
        _expected_errors_unlogged(),
        _moved_from(case.least_bytes_moved),
        prepared_devices(case.devices, case.sim) as devices,
    ):
        before = HeldResources.now(case.devices)
        run = _CaseRun(case, devices)
        with run.conforming():
            run.serve()
            run.drive_alone()
        devices.wait_idle()
        run.problems.extend(leaked(case.devices, before))
        run.tally.update({f"faults met: {kind}": count for kind, count in devices.faults_met().items()})
    if run.problems:
        raise CaseFailedError("\n".join(run.problems))
    return run.tally


class Reference:
    """SimpleNet's results on the host, by feed."""

    def __init__(self, net: RandomNet) -> None:
        self._net = net
        self._lock = threads().lock()
        self._known: dict[int, Outputs] = {}

    def __getitem__(self, feed: int) -> Outputs:
        with self._lock:
            if feed not in self._known:
                with HostNet(self._net) as host:
                    self._known[feed] = host.run(feed)
            return self._known[feed]


class HostNet:
    """A net under SimpleNet on the host, or on CUDA devices where they are, which keeps what it writes."""

    def __init__(self, net: RandomNet) -> None:
        self._net = net
        self.workspace = Workspace()
        options = [net.net.device_option, *(operator.device_option for operator in net.net.op)]
        places = set(map(Device.from_option, options))
        there = any(place.kind == "cuda" for place in places)
        for place in places if there else {CPU}:
            create_shared_buffer(self.workspace, place)
        feed_all(self.workspace, net.parameters)
        feed_all(self.workspace, net.feeds(0))
        self._simple = SimpleNet(net.net if there else without_devices(net.net), self.workspace)

    def __enter__(self) -> HostNet:
        return self

    def __exit__(self, *_exc: object) -> None:
        self._simple.close()

    def run(self, feed: int) -> Outputs:
        """The outputs for that feed."""
        feed_all(self.workspace, self._net.feeds(feed))
        self._simple.run()
        return {name: self.workspace.fetch_blob(name) for name in self._net.outputs}


def feed_all(workspace: Workspace, arrays: Mapping[str, Array]) -> None:
    """Feed every array under its name."""
    for name, array in arrays.items():
        workspace.feed_blob(name, array)


def differences(found: Outputs, expected: Outputs, tolerance: float | None = None) -> list[str]:
    """Names and numbers of outputs that differ in a byte; empty if none do.

    With a `tolerance`, floats may differ by that part of the largest.
    """
    problems = [f"outputs {sorted(found)}, expected {sorted(expected)}"] if found.keys() != expected.keys() else []
    for name in found.keys() & expected.keys():
        mine, other = found[name], expected[name]
        if (mine.shape, mine.dtype) != (other.shape, other.dtype):
            problems.append(f"{name!r} is {mine.dtype}{mine.shape}, expected {other.dtype}{other.shape}")
        elif tolerance is not None and mine.dtype.kind == "f":
            far = ~(np.abs(mine - other) <= tolerance * (1 + np.abs(other).max(initial=0)))
            problems += [f"{name!r} is far off in {int(far.sum())} of {mine.size} elements"] * bool(far.any())
        elif mine.tobytes() != other.tobytes():
            problems.append(f"{name!r} differs in {int((mine != other).sum())} of {mine.size} elements")
    return problems


class _CaseRun:
    """A case under way. `problems` collects what is wrong, `tally` what was tried and how it ended."""

    def __init__(self, case: Case, devices: PreparedDevices) -> None:
        self._case = case
        self._devices = devices
        self._net = case.net()
        self._model = self._net.model()
        self._keep: frozenset[str] = frozenset()
        if case.compiling != "as given":
            self._keep = frozenset(self._net.outputs[1::2])
            self._model = replace(self._model, outputs=self._net.outputs[::2])
        self._seen: dict[tuple[int, str], bytes] = {}
        self._reference = Reference(self._net)
        self._limited = case.sim is not None and case.sim.limit_bytes is not None
        self._troubled = case.sim is not None and bool(case.sim.faults or case.sim.limit_bytes is not None)
        self._detector = Detector() if case.seed % _WATCH_EVERY == 0 else None
        self.problems: list[str] = []
        self._outcomes: list[str] = []
        self._secondary = 0
        self.tally: Counter[str] = Counter(self._net.features)
        self.tally["cases"] = 1
        options = case.options
        self.tally[f"net type {options.net_type}"] = 1
        self.tally[f"nets {case.compiling}"] = 1
        self.tally[f"workers: {options.num_workers}"] = 1
        self.tally[f"streams: {options.streams_per_worker}"] = 1
        self.tally[f"replicas: {options.first_replicas}"] = 1
        self.tally[f"executors: {case.executors}"] = 1
        self.tally["cases whose requests are joined"] = int(options.max_batch > 1)
        if case.sim is not None:
            self.tally[f"driver: {case.sim.driver}"] = 1
            self.tally["cases with a memory limit"] = int(self._limited)

    def serve(self) -> None:
        """Executors, and callers of all kinds at once; then clean runs; then the end of the executors."""
        case = self._case
        self._devices.failing = True
        with ExitStack() as opened:
            try:
                executors = [opened.enter_context(self._compile()) for _ in range(case.executors)]
            except DagexecError as error:
                expected = self._troubled and isinstance(error, _DEVICE_ERRORS)
                self._expect(expected, f"the net does not compile: {''.join(_lines(error))}")
                self.tally["executors not compiled"] += 1
                return
            self._devices.hanging = True  # from here on, all who wait have a timeout
            self._call_all(executors)
            self._devices.failing = self._devices.hanging = False
            if case.closing is not None:
                self._check_closed(executors)
            else:
                self._check_alive(executors)
        self._check_races()
        self.tally["runs"] += len(self._outcomes)
        self.tally.update(f"run ended: {outcome}" for outcome in self._outcomes)
        self.tally["errors with secondary errors attached"] += self._secondary

    def _compile(self) -> Executor:
        case = self._case
        return dagexec.compile(
            self._model,
            case.options,
            optimize=case.compiling != "as given",
            without_passes=_ALL_PASSES if case.compiling == "memory planned" else (),
            keep=self._keep,
            shapes={"switches": (max(1, self._net.failing),)},
            warm_start={"switches": (max(1, self._net.failing),)} if case.warm else False,
        )

    def _call_all(self, executors: list[Executor]) -> None:
        callers: list[tuple[str, Callable[[], object]]] = []
        for group in self._case.callers:
            backend = _available(group.backend)
            self.tally[f"callers in {backend}"] += len(group.rows)
            if backend == "threads":
                callers += [("stress thread", partial(self._call_in_order, row, executors)) for row in group.rows]
            else:
                callers.append((f"stress {backend}", partial(self._call_in_tasks, group, backend, executors)))
        close = _CLOSINGS.get(self._case.closing)
        if close is not None:
            self.tally[f"executors under way: {self._case.closing}"] += len(executors)
            callers += [("stress closing", partial(close, executor)) for executor in executors]
        started = [
            threads().start(partial(self._watched, name, call), f"{name} {number}")
            for number, (name, call) in enumerate(callers)
        ]
        for thread in started:
            thread.join()

    def _watched(self, name: str, call: Callable[[], object]) -> None:
        try:
            call()
        except BaseException:
            self.problems.append(f"{name} ended with an exception:\n{traceback.format_exc()}")

    def _call_in_order(self, row: tuple[CaseRequest, ...], executors: list[Executor]) -> None:
        for request in row:
            try:
                result = executors[request.executor].run(**self._arguments(request))  # type: ignore[arg-type]
            except BaseException as error:
                self._judge_error(request, error)
            else:
                self._judge(request, result)

    def _call_in_tasks(self, group: Caller, backend: Backend, executors: list[Executor]) -> None:
        async def call_in_order(row: tuple[CaseRequest, ...]) -> None:
            for request in row:
                with anyio.move_on_after(request.patience if request.ending == "cancel" else None):
                    try:
                        result = await executors[request.executor].run_async(**self._arguments(request))  # type: ignore[arg-type]
                    except anyio.get_cancelled_exc_class():
                        self._expect(request.ending == "cancel", "a run was cancelled that nobody cancelled")
                        self._outcomes.append("cancelled")
                        raise
                    except Exception as error:
                        self._judge_error(request, error)
                    else:
                        self._judge(request, result)

        async def main() -> None:
            async with anyio.create_task_group() as tasks:
                for row in group.rows:
                    tasks.start_soon(call_in_order, row)

        anyio.run(main, backend=backend)

    def _arguments(self, request: CaseRequest) -> dict[str, object]:
        feeds: dict[str, Array] = self._net.feeds(request.feed, dict(request.failures))
        outputs = list(self._asked(request)) if self._keep else None
        needed = sorted(self._model.needed_inputs())
        if request.mistake == "missing input" and needed:
            del feeds[needed[0]]
        elif request.mistake == "wrong type":
            feeds["x0"] = feeds["x0"].astype("complex64")
        elif request.mistake == "unknown output":
            outputs = ["no such blob"]
        elif request.mistake is not None:
            feeds["no such input"] = feeds["x0"]
        timeout = request.patience if request.ending == "timeout" else None
        if timeout is None and self._may_hang():
            timeout = PATIENCE_WITH_HANGS
        out: Outputs | None = None
        if request.mistake is None and request.feed % 2:  # every second result goes to an array of the caller's
            expected = {name: self._reference[request.feed][name] for name in self._asked(request)}
            out = {name: np.full_like(expected[name], 77) for name in sorted(expected)[::2]}
            self.tally["requests with arrays for results"] += 1
        return {
            "feeds": feeds,
            "outputs": outputs,
            "out": out,
            "timeout": timeout,
            "priority": request.priority,
            "trace": self._detector,
        }

    def _may_hang(self) -> bool:
        sim = self._case.sim
        return sim is not None and any(kind == "hang" for kind, _ in sim.faults)

    def _judge(self, request: CaseRequest, result: Outputs) -> None:
        self._outcomes.append("right")
        self._expect(request.mistake is None, f"accepted: {request}")
        rewritten = self._case.compiling == "rewritten"  # then operators whose results nothing reads do not run
        self._expect(not request.failures or rewritten, f"operators that were told to fail did not: {request}")
        expected = {name: self._reference[request.feed][name] for name in self._asked(request)}
        problems = differences(result, expected, _TOLERANCE if rewritten else None)
        for name, array in result.items():
            if self._seen.setdefault((request.feed, name), array.tobytes()) != array.tobytes():
                problems.append(f"{name!r} is not what it was in another run")
        for problem in problems:
            self._outcomes[-1] = "wrong"
            self.problems.append(f"wrong result, {problem}: {request}")

    def _asked(self, request: CaseRequest) -> tuple[str, ...]:
        """The results that a request asks for."""
        return self._model.outputs if request.feed == 0 else self._net.outputs

    def _judge_error(self, request: CaseRequest, error: BaseException) -> None:
        self._outcomes.append(type(error).__name__)
        self._secondary += bool(getattr(error, "__notes__", ()))
        text = f"{request}\n{''.join(_lines(error))}"
        if isinstance(error, FeedError):
            self._expect(request.mistake is not None, f"a right feed was refused: {text}")
        elif isinstance(error, RunTimeoutError):
            self._expect(request.ending == "timeout" or self._may_hang(), f"timed out without a timeout: {text}")
        elif isinstance(error, QueueFullError):
            options = self._case.options
            rejecting = options.max_queued is not None and options.when_full == "reject"
            self._expect(rejecting, f"rejected by an executor that waits: {text}")
        elif isinstance(error, ClosedError):
            self._expect(self._case.closing is not None, f"the executor was closed by nobody: {text}")
        elif isinstance(error, OperatorError) and not self._troubled:
            named = error.operator.startswith(FAILING_OPERATOR)
            self._expect(named and bool(request.failures), f"an operator failed that was not told to: {text}")
            self._expect(error.__cause__ is not None, f"an OperatorError without a cause: {text}")
        else:
            self._expect(self._troubled and isinstance(error, _DEVICE_ERRORS), f"an error of the wrong kind: {text}")

    def _check_alive(self, executors: list[Executor]) -> None:
        """All replicas serve clean runs, at the same time, and no request is left in an executor."""
        for number, executor in enumerate(executors):
            clean = [CaseRequest(number, feed) for feed in range(FEEDS)]
            for request in clean:
                self._serve_clean(executor, request)
            replicas = self._case.options.first_replicas
            group = Caller("asyncio", (tuple(clean),) * replicas)  # no more at once than are served
            self._call_in_tasks(group, "asyncio", executors)
            moment = executor.statistics()
            found = (moment.replicas, moment.running, moment.queued)
            expected = (self._case.options.first_replicas, 0, 0)
            self._expect(found == expected, f"replicas, running, queued: {found}, expected {expected}")

    def _serve_clean(self, executor: Executor, request: CaseRequest) -> None:
        try:
            outputs = self._asked(request)
            self._judge(request, executor.run(self._net.feeds(request.feed), outputs=outputs, trace=self._detector))
        except Exception as error:
            if not (self._limited and isinstance(error, _DEVICE_ERRORS)):
                self.problems.append(f"a clean run afterwards fails:\n{traceback.format_exc()}")

    def _check_closed(self, executors: list[Executor]) -> None:
        for executor in executors:
            try:
                executor.run(self._net.feeds(0))
            except ClosedError:
                continue
            self.problems.append("a closed executor serves runs")

    def drive_alone(self) -> None:
        """A net without an executor, several runs one after another, beside SimpleNet on the host."""
        case = self._case
        if not case.repeats or self._troubled:
            return
        net = case.stateful_net()
        self.tally.update({"nets driven alone": 1, "runs": case.repeats})
        workspace = Workspace()
        for device in case.devices:
            create_shared_buffer(workspace, device)
        feed_all(workspace, net.parameters)
        feed_all(workspace, net.feeds(0))
        if case.compiling == "as given":
            driven = workspace.create_net(net.net, case.options.net_type, case.options.num_workers)
            assert isinstance(driven, BaseNet)
        else:
            driven = _planned_net(net, workspace, case)
        with HostNet(net) as host:
            try:
                for number in range(case.repeats):
                    expected = host.run(number)
                    feed_all(workspace, net.feeds(number))
                    driven.run(trace=self._detector)
                    found = {name: workspace.fetch_blob(name) for name in net.outputs}
                    for problem in differences(found, expected):
                        self.problems.append(f"run {number} of the net alone: {problem}")
            except DagexecError:
                self.problems.append(f"the net alone fails:\n{traceback.format_exc()}")
            finally:
                if case.compiling == "as given":
                    workspace.delete_net(driven.name)
                driven.close()
        self._check_races()

    def _check_races(self) -> None:
        """What the detector has found in the runs so far, if the case has one."""
        if self._detector is not None:
            self.tally["accesses looked at for races"] += self._detector.accesses
            self.problems += [f"unordered accesses: {race}" for race in self._detector.races]
            self._detector = Detector()

    @contextmanager
    def conforming(self) -> Iterator[None]:
        """Compare what threads do within it with the machine, if this case does that."""
        if self._limited or self._case.seed % _WATCH_EVERY != 1:  # records take memory
            yield
            return
        try:
            with conforming() as conformance:
                _held.append(conformance)
                yield
        except ConformanceError as error:
            self.problems += error.deviations
        finally:
            _held.clear()
        self.tally["runs held against the machine"] += conformance.runs
        self.tally["runs held against the machine: in machine code"] += conformance.native

    def _expect(self, condition: bool, problem: str) -> None:
        if not condition:
            self.problems.append(problem)


_CLOSINGS: Mapping[Closing | None, Callable[[Executor], object]] = {
    "close": lambda executor: executor.close(),
    "close and drain": lambda executor: executor.close(drain=True),
    "drain": lambda executor: executor.drain(),
    "drain with a timeout": lambda executor: executor.drain(0.0),
}


def _planned_net(net: RandomNet, workspace: Workspace, case: Case) -> BaseNet:
    """A net that keeps its outputs alone."""
    keep = frozenset(net.outputs)
    if case.options.net_type == "simple":
        return SimpleNet(net.net, workspace, keep=keep)
    kind = DAGNet if case.options.net_type == "dag" else AsyncDAGNet
    return kind(net.net, workspace, keep=keep, num_workers=case.options.num_workers)


@contextmanager
def _moved_from(nbytes: int) -> Iterator[None]:
    """Within it, arrays of so many bytes are bound instead of copied where operators allow it."""
    before, bindings.MIN_BYTES_BOUND = bindings.MIN_BYTES_BOUND, nbytes
    try:
        yield
    finally:
        bindings.MIN_BYTES_BOUND = before


def _available(backend: Backend) -> Backend:
    """`backend`, or asyncio where trio is not installed."""
    return "asyncio" if backend == "trio" and importlib.util.find_spec("trio") is None else backend


def _lines(error: BaseException) -> list[str]:
    try:
        return traceback.format_exception(error)
    except Exception:  # an exception of a stress case that cannot be printed
        return traceback.format_tb(error.__traceback__)


@contextmanager
def _expected_errors_unlogged() -> Iterator[None]:
    """Within it, dagexec does not log.

    The secondary errors of runs that were made to fail would drown the rest, and handlers that keep records keep the
    errors, with all that their tracebacks refer to.
    """
    logger = logging.getLogger("dagexec")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before
