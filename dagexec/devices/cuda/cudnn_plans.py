"""Plans of cuDNN: for a graph, on a device, with options, the engine that computes it. Built once, used by everybody.

cuDNN's heuristics rank the engines that take a graph; the first that may be used serves. With `exhaustive` each is
measured and the fastest serves; what was measured is kept in `dagexec.core.choices`. What may be used is said by
`PlanOptions`, in the notes that cuDNN has on what its engines do to numbers.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from dagexec.core.choices import choices, choose, measuring
from dagexec.devices.cuda.arrays import address
from dagexec.devices.cuda.binding import cudnn, cupy
from dagexec.devices.cuda.cudnn_graph import ConvGraph
from dagexec.devices.cuda.cudnn_handle import CudnnHandle, require_library
from dagexec.errors import UnsupportedFeatureError
from dagexec.platform.locks import new_lock
from dagexec.platform.records import dataclass

if TYPE_CHECKING:
    from dagexec.devices.cuda.runtime import CudaRuntime
    from dagexec.devices.cuda.stream import CudaStream

logger = logging.getLogger("dagexec")

MAX_PLANS = 1024
"""Plans that a device keeps; those not asked for the longest give way. Operators keep theirs."""

_MEASURED_AT_MOST = 48
_ROUNDS, _CALLS = 5, 3
_SECONDS = 60.0  # what a search may take


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """What an engine may do.

    Attributes:
        limit: bytes of workspace at most.
        deterministic: only engines whose results are the same in every run, and nothing is measured.
        allow_tf32: float32 data may be rounded to 11 bits for the matrix units.
        reduced_sums: sums of 16-bit floats may be kept in 16 bits.
        exhaustive: measure all engines.
    """

    limit: int
    deterministic: bool = False
    allow_tf32: bool = False
    reduced_sums: bool = False
    exhaustive: bool = False

    def refused_notes(self, dtype: str) -> list[Any]:
        """The numerical notes of engines that may not be used for data of that type."""
        notes = cudnn().numerical_note
        refused = []
        if dtype == "float32":
            # An engine that uses matrix units for float32 rounds what it multiplies to tf32, or to less and says so.
            refused.append(notes.DOWN_CONVERT_INPUTS)
            if not self.allow_tf32:
                refused.append(notes.TENSOR_CORE)
        if not self.reduced_sums:
            refused.append(notes.REDUCED_PRECISION_REDUCTION)
        if self.deterministic:
            refused.append(notes.NONDETERMINISTIC)
        return refused

    @property
    def key(self) -> str:
        """All of them, as text."""
        names = ("deterministic", "allow_tf32", "reduced_sums")
        return " ".join([f"limit {self.limit}", *(name for name in names if getattr(self, name))])


class CudnnPlan:
    """A graph with the engine that computes it. Threads may execute it, each with a handle of its own.

    Attributes:
        engine: cuDNN's name of the engine and its settings.
        workspace_nbytes: the workspace it needs.
        direct: executions go around the front end's own reading of tensors, which takes many times what a launch may.
    """

    __slots__ = ("_execute", "_graph", "_lock", "_place", "direct", "engine", "workspace_nbytes")

    def __init__(self, graph: Any, index: int, workspace_nbytes: int) -> None:
        """The plan that was built as number `index` of the graph."""
        self._graph = graph
        self._lock = new_lock()  # a graph's own tables are not for two threads
        self.engine = str(graph.get_plan_name_at_index(index))
        self.workspace_nbytes = workspace_nbytes
        found = _binding(graph, index)
        self.direct = found is not None
        self._execute: Callable[..., object]
        self._execute, self._place = found or (graph.execute_plan_at_index, index)

    def execute(self, addresses: Mapping[int, int], workspace: int, handle: CudnnHandle) -> None:
        """Launch it on the handle's stream; `addresses` are those of the tensors, by number."""
        with self._lock:
            if self.direct:
                self._execute(addresses, workspace, self._place, handle.native.backend_handle)
            else:
                self._execute(addresses, workspace, self._place, handle=handle.native)


def _binding(graph: Any, index: int) -> tuple[Callable[..., object], int] | None:
    """The binding that a front end executes graphs with, and the plan's number there; None where it is another one.

    `execute` of front end 1.32 describes every tensor in Python, as engines written in Python want it: some 40 us of
    the host for one convolution. Addresses are all that the binding needs.
    """
    native = getattr(graph, "_lowered_graph", None)
    execute = getattr(native, "_execute_plan_at_index", None)
    place = getattr(graph.plans[index], "cpp_index", None) if execute is not None else None
    return None if execute is None or place is None else (execute, place)


class PlanCache:
    """The plans of one device. One thread builds at a time, and others wait: what they ask for may be what it builds.

    Attributes:
        built: how many plans were built or refused so far.
        stream: which it leases to build plans on, once it builds any.
    """

    def __init__(self, runtime: CudaRuntime) -> None:
        self._runtime = runtime
        self._lock = new_lock()
        self._build = new_lock()
        self._plans: OrderedDict[tuple[ConvGraph, PlanOptions], CudnnPlan | str] = OrderedDict()
        self._handle: CudnnHandle | None = None
        self.stream: CudaStream | None = None
        self.built = 0

    def get(self, graph: ConvGraph, options: PlanOptions) -> CudnnPlan:
        """The plan of `graph`. Raises UnsupportedFeatureError when no engine takes it; the log says so once."""
        key = (graph, options)
        found = self._find(key)
        if found is None:
            with self._build:
                found = self._find(key)
                if found is None:
                    found = self._built(graph, options)
                    self._keep(key, found)
        if isinstance(found, str):
            raise UnsupportedFeatureError(found)
        return found

    def __len__(self) -> int:
        """How many are kept."""
        with self._lock:
            return len(self._plans)

    def _find(self, key: tuple[ConvGraph, PlanOptions]) -> CudnnPlan | str | None:
        with self._lock:
            found = self._plans.get(key)
            if found is not None:
                self._plans.move_to_end(key)
            return found

    def _keep(self, key: tuple[ConvGraph, PlanOptions], plan: CudnnPlan | str) -> None:
        with self._lock:
            self._plans[key] = plan
            while len(self._plans) > MAX_PLANS:
                self._plans.popitem(last=False)
            self.built += 1

    def _built(self, graph: ConvGraph, options: PlanOptions) -> CudnnPlan | str:
        """The plan, or why there is none."""
        if self._handle is None or self._handle.native is None:
            self._handle = CudnnHandle(self._runtime, f"builder of plans of {self._runtime.device}")
        if self.stream is None:
            self.stream = self._runtime.lease()
        unsupported = cudnn().cudnnGraphNotSupportedError
        with self._runtime.guard(), self._handle as handle:
            handle.work_on(self.stream.pointer)
            try:
                return self._plan(graph, options, handle)
            except unsupported as error:
                reason = f"cuDNN has no engine for the {graph.name} ({options.key}): {_first_line(error)}"
                logger.warning("%s: %s", self._runtime.device, reason)
                return reason
            except (RuntimeError, ValueError) as error:
                reason = f"cuDNN fails at the {graph.name} ({options.key}): {_first_line(error)}"
                logger.warning("%s: %s", self._runtime.device, reason)
                raise UnsupportedFeatureError(reason) from error

    def _plan(self, graph: ConvGraph, options: PlanOptions, handle: CudnnHandle) -> CudnnPlan:
        native = planned(graph, options, handle=handle.native)
        chosen = self._chosen(native, graph, options, handle)
        return built(native, options.limit, chosen)

    def _chosen(self, native: Any, graph: ConvGraph, options: PlanOptions, handle: CudnnHandle) -> int | None:
        """The plan that was chosen by measurement; None to take the first that can be built."""
        if not options.exhaustive:
            return None
        key = self._key(graph, options)
        if options.deterministic:
            name = choices.find(key, given_only=True)
        else:
            with measuring(_SECONDS):
                name = choose(key, lambda seconds: self._fastest(native, graph, options, handle, seconds))
        if name is None:
            return None
        names = [native.get_plan_name_at_index(index) for index in range(native.get_execution_plan_count())]
        return names.index(name) if name in names else None

    def _fastest(
        self, native: Any, graph: ConvGraph, options: PlanOptions, handle: CudnnHandle, seconds: float
    ) -> str | None:
        """The name of the plan that takes the least time, on zeros; None when none can be measured."""
        memory = {number: self._runtime.allocate(graph.nbytes(number)) for number in graph.layouts}
        addresses = {number: address(array) for number, array in memory.items()}
        assert self.stream is not None
        for array in memory.values():
            cupy().cuda.runtime.memsetAsync(address(array), 0, array.nbytes, self.stream.pointer)
        workspace = self._runtime.allocate(0)
        times: dict[str, float] = {}
        end = time.monotonic() + seconds
        for index in range(min(native.get_execution_plan_count(), _MEASURED_AT_MOST)):
            if times and time.monotonic() > end:
                break
            nbytes = _buildable(native, index)
            if nbytes is None or nbytes > options.limit:
                continue
            if nbytes > workspace.nbytes:
                self.stream.synchronize()
                workspace = self._runtime.allocate(0)
                workspace = self._runtime.allocate(nbytes)
            name = native.get_plan_name_at_index(index)
            times.setdefault(name, self._measured(native, index, addresses, address(workspace), handle))
        self.stream.synchronize()
        if not times:
            return None
        fastest = min(times, key=times.__getitem__)
        shown = {name: f"{milliseconds:.3f} ms" for name, milliseconds in times.items()}
        logger.info("%s: %s: measured %s; chosen: %s", self._runtime.device, graph.name, shown, fastest)
        return fastest

    def _measured(
        self, native: Any, index: int, addresses: Mapping[int, int], workspace: int, handle: CudnnHandle
    ) -> float:
        """Milliseconds of one execution, the median of some rounds, behind one that warms up."""
        assert self.stream is not None
        cuda = cupy().cuda

        def run() -> None:
            native.execute_plan_at_index(addresses, workspace, index, handle=handle.native)

        run()
        found = []
        for _ in range(_ROUNDS):
            start, stop = cuda.Event(), cuda.Event()
            start.record(self.stream.native)
            for _ in range(_CALLS):
                run()
            stop.record(self.stream.native)
            stop.synchronize()
            found.append(cuda.get_elapsed_time(start, stop) / _CALLS)
        return float(statistics.median(found))

    def _key(self, graph: ConvGraph, options: PlanOptions) -> str:
        """What a measured choice depends on, as text."""
        index = self._runtime.device.index
        properties = cupy().cuda.runtime.getDeviceProperties(index)
        name = properties["name"]
        shown = name.decode() if isinstance(name, bytes) else str(name)
        processor = f"{shown} {properties['multiProcessorCount']} sm {properties['major']}.{properties['minor']}"
        return " | ".join([f"cuDNN {require_library()}", processor, options.key, graph.key])


def planned(graph: ConvGraph, options: PlanOptions, **native_options: Any) -> Any:
    """The `cudnn.pygraph` with its plans ranked, and those that may not be used taken out.

    Raises `cudnn.cudnnGraphNotSupportedError` when none is left.
    """
    library = cudnn()
    native = graph.build(**native_options)
    native.validate()
    native.build_operation_graph()
    native.create_execution_plans([library.heur_mode.A, library.heur_mode.FALLBACK])
    native.deselect_numeric_notes(options.refused_notes(graph.dtype))
    native.deselect_workspace_greater_than(options.limit)
    native.check_support()
    return native


def built(native: Any, limit: int, chosen: int | None = None) -> CudnnPlan:
    """The plan number `chosen`, or the first that can be built, of a graph that `planned` gave.

    Raises `cudnn.cudnnGraphNotSupportedError` when none can be built.
    """
    refusal: Exception | None = None
    for index in range(native.get_execution_plan_count()) if chosen is None else (chosen,):
        try:
            nbytes = _build(native, index)
        except _refusals() as error:
            refusal = error
            continue
        if nbytes <= limit:
            return CudnnPlan(native, index, nbytes)
    raise cudnn().cudnnGraphNotSupportedError(f"none of its plans can be built: {refusal}")


def _refusals() -> tuple[type[Exception], ...]:
    """What is raised for a plan that cannot be built, or may not be used."""
    return (cudnn().cudnnGraphNotSupportedError, RuntimeError, ValueError)


def _build(native: Any, index: int) -> int:
    """Build plan `index`. Returns the bytes of its workspace."""
    native.build_plan_at_index(index)
    return int(native.get_workspace_size_plan_at_index(index))


def _buildable(native: Any, index: int) -> int | None:
    """Bytes of workspace of plan `index`, built now; None when it cannot be built or may not be used."""
    try:
        return _build(native, index)
    except _refusals():
        return None


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def plan_cache(runtime: CudaRuntime) -> PlanCache:
    """The plans of a device, made at its first use."""
    return runtime.once("cuDNN plans", lambda: PlanCache(runtime))
