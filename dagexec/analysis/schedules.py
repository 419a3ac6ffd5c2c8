"""A model under controlled schedules: the scenario that `dagexec explore` runs, and a smaller net when it fails."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import numpy.typing as npt

from dagexec.core.model import Model
from dagexec.core.proto import NetDef
from dagexec.core.runtime import runtime_of
from dagexec.devices.sim import simulated
from dagexec.errors import DagexecError, DeviceError
from dagexec.executor.compile import compile
from dagexec.executor.executor import Executor
from dagexec.options import CompileOptions
from dagexec.platform.records import dataclass
from dagexec.platform.threads import threads
from dagexec.scheduler.conformance import conforming
from dagexec.scheduler.exploration import ExploredSchedule, explore
from dagexec.scheduler.exploration.deviations import ByName
from dagexec.scheduler.exploration.device import ControlledDriver
from dagexec.scheduler.exploration.fewest import noted
from dagexec.scheduler.exploration.shrink import shrink
from dagexec.scheduler.exploration.strategies import ReplayStrategy, Strategy

Array = npt.NDArray[Any]
Digest = dict[str, tuple[str, tuple[int, ...], bytes]]


class DifferentResultError(DagexecError):
    """Under some schedule, a run does not return what SimpleNet does."""


@dataclass(frozen=True)
class ModelScenario:
    """Makes an executor, has `callers` threads run it at the same time, and compares each result with SimpleNet's.

    Attributes:
        model: what is run; its parameters are arrays (`dagexec.binding.parameters.initialized`).
        feeds: an array for every input.
        options: how it is compiled.
        callers: threads that each run the model once.
    """

    model: Model
    feeds: Mapping[str, Array]
    options: CompileOptions
    callers: int = 1

    def __post_init__(self) -> None:
        device = self.options.default_device
        if device.kind not in ("cpu", "sim"):
            raise DeviceError(f"{device} cannot be explored: what it does is not under the schedule's control")
        runtime_of(device)  # raises DeviceError for one that does not exist: no schedule is to blame for that

    def reference(self) -> Digest:
        """What SimpleNet returns on the host, by output name. Not to be called in a schedule."""
        options = replace(self.options, net_type="simple", policy=None, num_workers=1, replicas=1, device="cpu")
        with compile(self.model, options) as executor:
            return _digest(executor.run(self.feeds))

    def run(self, expected: Digest) -> None:
        """The scenario. To be called in a controlled schedule.

        Raises DifferentResultError, ConformanceError where threads do what the machine of runs does not allow, or what
        a run raises.
        """
        device = self.options.default_device
        with ExitStack() as stack:
            if device.kind == "sim":
                stack.enter_context(simulated(device, driver=ControlledDriver()))
            stack.enter_context(conforming())
            executor = stack.enter_context(compile(self.model, self.options))
            results: dict[int, Digest | BaseException] = {}
            call = partial(_call, executor, self.feeds, results)
            callers = [threads().start(partial(call, number), f"caller {number}") for number in range(self.callers)]
            for caller in callers:
                caller.join()
        for number in range(self.callers):
            _compare(self.model.name, number, results[number], expected)


@dataclass(frozen=True)
class FailingModel:
    """A scenario, the results expected of its runs, and a schedule under which it fails."""

    scenario: ModelScenario
    expected: Digest
    schedule: ExploredSchedule[None]

    def run(self) -> None:
        """The scenario, to be called in a controlled schedule."""
        self.scenario.run(self.expected)


def shrink_model(failing: FailingModel, seeds: Iterable[int], limit: int = 200) -> FailingModel:
    """One with a smaller net that fails with the same error under some of `seeds`, or where the schedule deviates.

    At most `limit` nets are tried.
    """
    scenario, timeouts = failing.scenario, failing.schedule.timeouts
    kind = type(failing.schedule.failure)
    tried = tuple(seeds)
    _, points = noted(failing.run, ReplayStrategy(failing.schedule.decisions, timeouts=timeouts))
    deviations = [point.deviation for point in points if point.choice]
    smallest = failing

    def fails(net: NetDef) -> bool:
        nonlocal smallest
        written = {name for operator in net.op for name in operator.output}
        outputs = tuple(name for name in scenario.model.outputs if name in written)
        smaller = replace(scenario, model=replace(scenario.model, net=net, outputs=outputs or _ends(net)))
        try:
            expected = smaller.reference()
        except DagexecError:
            return False
        strategies: tuple[Strategy | int, ...] = (ByName(deviations, timeouts=timeouts), *tried)
        schedules = (explore(partial(smaller.run, expected), strategy) for strategy in strategies)
        failed = next((one for one in schedules if type(one.failure) is kind), None)
        if failed is not None:
            smallest = FailingModel(smaller, expected, failed)  # `shrink` goes on from every net that fails
        return failed is not None

    shrink(scenario.model.net, fails, limit)
    return smallest


def _call(executor: Executor, feeds: Mapping[str, Array], results: dict[int, Digest | BaseException], n: int) -> None:
    try:
        results[n] = _digest(executor.run(feeds))
    except DagexecError as error:
        results[n] = error


def _digest(outputs: Mapping[str, Array]) -> Digest:
    return {name: (str(array.dtype), array.shape, _bytes_of(array)) for name, array in outputs.items()}


def _bytes_of(array: Array) -> bytes:
    return repr(array.tolist()).encode() if array.dtype.hasobject else array.tobytes()


def _compare(model: str, caller: int, result: Digest | BaseException, expected: Digest) -> None:
    if isinstance(result, BaseException):
        raise result
    different = sorted(name for name in expected if result.get(name) != expected[name])
    if different:
        raise DifferentResultError(
            f"model {model!r}, caller {caller}: {', '.join(map(repr, different))} differ from what SimpleNet returns"
        )


def _ends(net: NetDef) -> tuple[str, ...]:
    """Blobs that are written and not read."""
    read = {name for operator in net.op for name in operator.input}
    return tuple(dict.fromkeys(name for operator in net.op for name in operator.output if name not in read))
