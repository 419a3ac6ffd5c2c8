"""How a net runs: on all cores where its work is worth sharing, in its caller's thread where that is over as soon.

Operators come in pieces, which workers share whoever else runs, so there is nothing to weigh: only what is too small to
be shared stays alone. The predictions are for reports.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import numpy.typing as npt

from dagexec.core.dtypes import from_numpy
from dagexec.core.graph import Graph, build_graph
from dagexec.core.inference import costs_of
from dagexec.core.model import Model
from dagexec.core.schema import Cost, TensorType
from dagexec.errors import DagexecError
from dagexec.ops.engines.onednn.binding import engine_library
from dagexec.ops.kernels.sharing import MOST_OF_ONE, pieces_of, work_seconds
from dagexec.platform import processor
from dagexec.platform.cached import cached_property
from dagexec.platform.records import dataclass
from dagexec.platform.speed import arithmetic_speed
from dagexec.scheduler.nets.options import RunOptions
from dagexec.scheduler.plan.chains import single_operator_chains
from dagexec.scheduler.plan.plan import build_plan
from dagexec.scheduler.plan.task_graph import TaskGraph
from dagexec.scheduler.run.overhead import WORTH_SHARING, SchedulingCosts, slowdown_up_to
from dagexec.scheduler.run.prediction import Hardware, TimedTasks, predict_host

Array = npt.NDArray[Any]

_HELD_SECONDS = 20e-6  # how long an operator of NumPy keeps the interpreter lock, at most
_NOMINAL = SchedulingCosts(wake_seconds=40e-6, piece_seconds=0.2e-6)
_NOMINAL_SLOWDOWN = 1.1
_NUMPY_LANES = 8


@dataclass(frozen=True)
class Choice:
    """How a net runs.

    Attributes:
        net_type, workers: of the net.
        estimate: what its runs are handed out as, and what that takes.
        origin: of these times: "measured", "known" from an earlier measurement, or "estimated".
    """

    net_type: str
    workers: int
    estimate: Estimate
    origin: str

    def predicted(self, cores: int) -> dict[int, float]:
        """Seconds of a run by 1, 2, 4, ... workers and by as many as there are cores; empty where nothing is known."""
        counts = sorted({cores, *(1 << power for power in range(cores.bit_length()))})
        tasks = self.estimate.tasks
        return {} if tasks is None else {count: _predicted(tasks, count) for count in counts}


class Estimate(Protocol):
    """What runs of a net are handed out as, and what that takes."""

    @property
    def tasks(self) -> TimedTasks | None:
        """The tasks; None where shapes are not known."""

    def is_below(self, seconds: float) -> bool:
        """True where all tasks together are known to take less."""


@dataclass(frozen=True)
class Known:
    """Tasks that were measured, or whose time was; or None."""

    tasks: TimedTasks | None

    def is_below(self, seconds: float) -> bool:
        """See Estimate."""
        return self.tasks is not None and self.tasks.work < seconds


def choose(model: Model, options: RunOptions, estimate: Estimate, origin: str = "estimated") -> Choice:
    """What `options` leave open, for a model whose runs take so long.

    Where runs may differ in shapes, they may be large; which of them are small is seen when they are known.
    """
    cores = processor.available_cores()
    if options.net_type is not None:
        net_type = options.net_type
    elif options.policy is not None:
        net_type = "dag"
    elif cores == 1 and options.num_workers is None:
        net_type = "simple"
    else:
        net_type = "simple" if not _has_open_shapes(model) and estimate.is_below(WORTH_SHARING) else "dag"
    return Choice(net_type, options.num_workers or options.most_workers(net_type), estimate, origin)


def _predicted(tasks: TimedTasks, workers: int) -> float:
    if workers == 1:
        return tasks.work
    slowdown = slowdown_up_to(workers, _NOMINAL_SLOWDOWN)
    costs = _NOMINAL
    return predict_host(tasks, Hardware(workers, 0, costs.piece_seconds, costs.wake_seconds, slowdown=slowdown))


class Estimated:
    """By the cost of the operators of a model on some inputs, found out as far as somebody asks."""

    def __init__(self, model: Model, inputs: Mapping[str, Array] | None) -> None:
        """Without `inputs` nothing is known."""
        self._model = model
        self._inputs = inputs

    @cached_property
    def tasks(self) -> TimedTasks | None:
        """The operators as tasks; None where the work of one is not known."""
        try:
            costs = [cost for cost in self._costs() if cost is not None]
        except DagexecError:
            return None
        graph, found = self._graph, engine_library()
        if len(costs) < len(graph) or self._inputs is None:
            return None
        lanes = _NUMPY_LANES if found is None else found.isa.lanes
        plan = build_plan(graph, list(map(self._seconds, range(len(graph)), costs)), single_operator_chains(graph))
        native = [all(graph.operators[index].engine == "ONEDNN" for index in chain) for chain in plan.chains]
        works = [sum(work_seconds(costs[index], lanes) for index in chain) for chain in plan.chains]
        pieces = [pieces_of(work, MOST_OF_ONE) if one else 1 for work, one in zip(works, native, strict=True)]
        held = [0.0 if one else min(took, _HELD_SECONDS) for took, one in zip(plan.seconds, native, strict=True)]
        tasks = TaskGraph(pieces, plan.children, plan.parent_counts, range(len(pieces)))
        return TimedTasks(tasks, plan.seconds, held)

    def is_below(self, seconds: float) -> bool:
        """See Estimate. Of a large net the first operators tell."""
        work = 0.0
        try:
            for index, cost in enumerate(self._costs()):
                if cost is None:
                    return False
                work += self._seconds(index, cost)
                if work >= seconds:
                    return False
        except DagexecError:
            return False
        return self._inputs is not None and work < seconds

    def _seconds(self, index: int, cost: Cost) -> float:
        return 0.0 if index in self._graph.views else cost.seconds_at(arithmetic_speed())

    @property
    def _graph(self) -> Graph:
        model = self._model
        return build_graph(model.program, (model.parameters.keys() | model.inputs.keys()).__contains__)

    def _costs(self) -> Iterator[Cost | None]:
        """The work of each operator."""
        parameters, inputs = self._model.parameters, self._inputs or {}

        def given(name: str) -> TensorType | None:
            array = inputs.get(name, parameters.get(name))
            return None if array is None else TensorType(tuple(array.shape), from_numpy(array.dtype))

        return costs_of(self._graph, given, parameters)


def _has_open_shapes(model: Model) -> bool:
    """True where runs may differ in the shapes of inputs."""
    shapes = (model.inputs[name].shape for name in model.needed_inputs())
    return any(shape is None or None in shape for shape in shapes)
