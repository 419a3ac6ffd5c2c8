"""BaseNet: a graph bound to a workspace. The three nets differ only in how they execute the prepared steps.

The operators hold their blobs; `prepared()` gives steps for the shapes the blobs have now, from a small cache or made
anew. One run of a net continues at a time; a second caller waits for the first.
"""

from __future__ import annotations

import sys
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Self
from weakref import WeakKeyDictionary

from dagexec.core.blob import Blob
from dagexec.core.constant import Constant
from dagexec.core.device import CPU, Device
from dagexec.core.graph import Graph, build_graph
from dagexec.core.operator import Operator
from dagexec.core.program import Program
from dagexec.core.proto import NetDef
from dagexec.core.registry import create_verified
from dagexec.core.stream import Kernel, Priority, at_work
from dagexec.core.tensor import Tensor
from dagexec.core.workspace import Workspace
from dagexec.errors import ClosedError, DagexecError, ResourceError, RunTimeoutError, SettingError
from dagexec.platform.closing import Closing
from dagexec.platform.deadline import Deadline
from dagexec.platform.forking import reset_after_fork
from dagexec.platform.garbage_collection import garbage_collection_paused
from dagexec.platform.host_memory import give_back_free_memory
from dagexec.platform.lazy import LazyModule
from dagexec.platform.shutdown import hold_daemon, stop_at_exit
from dagexec.platform.threads import acquire, threads
from dagexec.platform.weight_memory import weight_memory
from dagexec.scheduler.memory import ArenaMemory
from dagexec.scheduler.nets.options import DEFAULT_RUN_OPTIONS, RunOptions
from dagexec.scheduler.observe.installed import environment_observer
from dagexec.scheduler.observe.observers import Observer, together
from dagexec.scheduler.plan.copies import insert_copies
from dagexec.scheduler.plan.culprit import Failed, label_of
from dagexec.scheduler.plan.dynamic import dependence
from dagexec.scheduler.plan.plan import Plan
from dagexec.scheduler.plan.preparation import Preparation
from dagexec.scheduler.plan.preparation_cache import PreparationCache, PreparationStatistics
from dagexec.scheduler.run.blas_thread import OneBlasThread
from dagexec.scheduler.run.engine import NativeRun
from dagexec.scheduler.run.launching import LaunchedChains, NetStreams, guards_of, kernels_of
from dagexec.scheduler.run.run import Run, waiting_time
from dagexec.scheduler.run.work import (
    SHORT_PHASE_SECONDS,
    WIDE,
    Work,
    chain_work,
    observed_work,
    pieces_of_chains,
)
from dagexec.scheduling.policy import Policy

if not TYPE_CHECKING:
    drain = LazyModule("dagexec.scheduler.run.drain")
    observed_run = LazyModule("dagexec.scheduler.observe.observed_run")
    prediction = LazyModule("dagexec.scheduler.run.prediction")
    synchronizations = LazyModule("dagexec.scheduler.plan.synchronization")
else:
    from dagexec.scheduler.observe import observed_run
    from dagexec.scheduler.observe.observed_run import ObservedRun
    from dagexec.scheduler.plan import synchronization as synchronizations
    from dagexec.scheduler.plan.synchronization import Synchronization
    from dagexec.scheduler.run import drain, prediction
    from dagexec.scheduler.run.prediction import OperatorTasks, TimedTasks


class NetRun(NamedTuple):
    """A run was made: its owner and its plan."""

    net: BaseNet
    run: Run
    plan: Plan
    preparation: Preparation


class NetRunOver(NamedTuple):
    """The owner of a run is told that it is over."""

    run: Run


class BaseNet(ABC, Closing):
    """A net in a workspace: its operators, and prepared steps per shape signature.

    Attributes:
        name: the NetDef's name.
        graph: operators and their order.
        operators: the operator objects, in list order.
        workspace: where the blobs are.
        policy: decides which chain comes next; None for the plan.
        most_pieces: of an operator, that may be under way at the same time.
        has_bodies: some operator runs nets.
        arena_memory: the memory of its plans.
        streams: those it has leased, of the devices that its operators run on.
        keep: the blobs whose values survive a run; None for all.
        checked: operators that can tell only after a run whether it went well.
        in_list_order: operators follow one another as listed, whatever their dependencies.
        finishes_chains: a chain on a device is over only when its work there is done.
    """

    net_type: ClassVar[str]
    policy: Policy | None = None
    in_list_order: ClassVar[bool] = False
    finishes_chains: ClassVar[bool] = True

    def __init__(
        self,
        definition: NetDef | Program,
        workspace: Workspace,
        *,
        graph: Graph | None = None,
        constants: frozenset[str] = frozenset(),
        keep: frozenset[str] | None = None,
        options: RunOptions = DEFAULT_RUN_OPTIONS,
    ) -> None:
        """Build the operators; nothing runs. Pass the `graph` of the same definition to share it between replicas.

        Copies are inserted where blobs cross devices, except into a given `graph`. `constants` are blobs whose values
        never change while the net lives, so shapes may be taken from them.
        With `keep`, memory is planned: of the blobs that the net writes, those named in it have their values when a
        run is over, and others may share memory. None keeps them all.
        Raises what `build_graph` and `create_operator` raise.
        """
        self.name = definition.name
        self.workspace = workspace
        if graph is None:
            graph = build_graph(insert_copies(definition, partial(_home, workspace)).net, workspace.has_blob)
        self.graph = graph
        self.operators: tuple[Operator, ...] = tuple(
            create_verified(operator, workspace, index=index, net=definition.name)
            for index, operator in enumerate(self.graph.operators)
        )
        self._constants = constants
        self.has_bodies = any(operator.bodies for operator in self.operators)
        dependence(self.graph, constants)  # computed once here, not in the first run of each replica
        self.checked = tuple(operator for operator in self.operators if operator.run_check is not None)
        self.keep = None if keep is None else keep.union(*map(_names_checked, self.checked))
        self._inputs = _blobs_read_first(self.operators)
        local = {id(workspace.get_blob(name)) for name in workspace.local_blobs()}
        self._own_inputs = frozenset(id(blob) for blob in self._inputs if id(blob) in local)
        self.arena_memory = ArenaMemory()
        self._preparations = PreparationCache(options.preparation_bytes)
        self._prepared_with: list[weakref.ref[Constant] | None] = []
        self._current: Preparation | None = None
        self._launched: tuple[Preparation, LaunchedChains] | None = None
        self._run_lock = threads().owned_lock()
        self._closed = False
        self._runner: threading.Thread | None = None
        self.most_pieces = options.intra_op_threads or sys.maxsize
        self._work: WeakKeyDictionary[Preparation, Work] = WeakKeyDictionary()
        self._latest: tuple[Preparation, NativeRun] | None = None
        self.on_host = self.graph.devices <= {CPU}
        self.streams = NetStreams(
            definition.name, options.streams_per_worker, Priority[options.stream_priority.upper()]
        )
        self._environment = environment_observer()
        reset_after_fork(self, BaseNet._forked)
        self._finalizer = weakref.finalize(self, OneBlasThread().release)
        self._finalizer.atexit = False  # with more threads, a product under way would keep OpenBLAS from ending
        self._run: Run | None = None
        if threads().concurrent:
            stop_at_exit(self, BaseNet._stop_at_exit)

    def _forked(self) -> None:
        """In a child made by `os.fork`: the thread that was running the net is the parent's."""
        self._run_lock = threads().owned_lock()

    def _stop_at_exit(self) -> Callable[[Deadline], object]:
        run = self._run
        if run is not None:
            self._stop(run, ClosedError(f"net {self.name!r}: the process ends"))
        return self._wait_at_exit

    def _wait_at_exit(self, deadline: Deadline) -> None:
        if not self._in_run() and acquire(self._run_lock, max(0.0, deadline.left())):
            self._run_lock.release()

    def _stop(self, run: Run, error: BaseException) -> None:
        """Let `run` begin no further operator or piece. Launched work is finished, or abandoned."""
        run.stop(error)
        if run.on_stop is not None:
            run.on_stop()

    @classmethod
    def from_definition(
        cls, workspace: Workspace, definition: NetDef | Program, num_workers: int | None, policy: object = None
    ) -> Self:
        """What `Workspace.create_net` calls. `num_workers` matters only to nets with a pool.

        Raises SettingError for a `policy`, where there is nothing that it could decide.
        """
        if policy is not None:
            raise SettingError(f"net {definition.name!r}: a policy is for net types dag and async_dag")
        return cls(definition, workspace)

    def _ordered(self, plan: Plan) -> Plan:
        """The plan that runs follow."""
        return plan

    @property
    def is_watched(self) -> bool:
        """True if the environment asks that every run is told of."""
        return self._environment is not None

    def shares_work(self, preparation: Preparation) -> bool:
        """True when there may be work for several threads in a run of these steps."""
        return False

    def use_one_thread(self) -> None:
        """Nothing; until serving does without."""

    def close(self) -> None:
        """Release threads and streams; a closed net does not run again. Idempotent.

        Waits for a run under way on devices, unless it is called from inside that run. Raises DagexecError in a kernel.
        """
        self.check_kernel("close")
        self._closed = True
        self._wait_for_run()
        self._finalizer()
        self.streams.give_back()
        for operator in self.operators:
            for body in operator.bodies.values():
                body.close()

    def _wait_for_run(self) -> None:
        """Block until no thread is in `run` for work on devices, whose end needs the streams and the pool."""
        if not self.on_host and not self._in_run():
            with self._run_lock:
                pass

    def _in_run(self) -> bool:
        """True on a thread that works for a run, which would wait for itself."""
        return self._runner is threading.current_thread()

    def check_kernel(self, doing: str) -> None:
        """Raise DagexecError in a kernel that would wait for itself."""
        if self.would_wait_for_its_device():
            raise DagexecError(
                f"net {self.name!r}: a kernel cannot {doing} a net that needs its stream, or its device "
                "if the device does one thing at a time; it would wait for itself"
            )

    def would_wait_for_its_device(self) -> bool:
        """True in a kernel of this net, or of a device that it needs and that does one thing at a time."""
        stream = at_work.stream
        if stream is None:
            return False
        needed = stream.alone and stream.device in self.graph.devices
        return needed or any(mine is stream for mine in self.streams.all())

    @property
    def plan(self) -> Plan:
        """The plan for the shapes the blobs have now; prepares if need be."""
        return self.prepared().plan

    def run(self, *, timeout: float | None = None, trace: Observer | None = None) -> None:
        """Run every operator once, blocking. `trace` is told what runs when (see `scheduler.observe.observers`).

        Raises OperatorError when an operator fails (the net stays usable), RunTimeoutError after `timeout` seconds
        (operators under way finish first; none begins when they have passed before), ClosedError after `close`,
        ValueError for a negative `timeout`, DagexecError in an operator that the net is running in this thread.
        """
        hold_daemon()
        if self._runner is threading.current_thread():
            raise DagexecError(f"net {self.name!r}: an operator cannot run the net that runs it")
        self.check_kernel("run")
        began = threads().monotonic()
        try:
            if not acquire(self._run_lock, waiting_time(timeout)):
                raise RunTimeoutError(f"net {self.name!r}: still running for another caller after {timeout} s")
            if self._closed:
                raise ClosedError(f"net {self.name!r} is closed")
            self._runner = threading.current_thread()
            preparation = self.prepared()
            if timeout is not None and threads().monotonic() - began >= timeout:
                raise RunTimeoutError(f"net {self.name!r}: not begun within {timeout} seconds")
            self._execute(preparation, timeout, trace)
        finally:
            if self._runner is threading.current_thread():
                self._runner = None
            with suppress(RuntimeError):  # it is not ours: another's run took too long, or Ctrl-C ended the wait for it
                self._run_lock.release()
            hold_daemon()

    def _observed(self, observer: Observer | None, plan: Plan | None = None) -> ObservedRun | None:
        """A run that starts now, for `observer` and what the environment asks for; None without either."""
        if observer is None and self._environment is None:
            return None
        everybody = together(observer, self._environment)
        assert everybody is not None
        current = self._current
        return observed_run.ObservedRun(
            everybody, self.graph, self.operators, plan, () if current is None else current.prepared
        )

    def new_run(self, finished: Callable[[], object], trace: Observer | None = None) -> Run:
        """A run of the steps for the shapes the blobs have now, for a pool to execute; `finished` is called at its end.

        The caller makes sure that no other run of this net is under way.
        """
        preparation = self.prepared()
        plan = self._plan_of_run(preparation)
        observed = self._observed(trace, None if self.in_list_order and self.on_host else plan)
        if self.on_host:
            work = self._host_work(preparation, observed)
        else:
            work = chain_work(plan, self._launched_chains(preparation, plan, observed).steps)
        by_plan = preparation.name_step if plan is preparation.plan else partial(label_of, plan, preparation.steps)
        if self.in_list_order and self.on_host and observed is None:  # which is one chain
            by_plan = partial(_name_in_order, preparation)
        run = Run(self.name, work, by_plan, finished)
        if not threads().concurrent:
            threads().note(NetRun(self, run, plan, preparation))
            run.finished = partial(_noted_and_finished, run, finished)
        run.side_by_side = not self.in_list_order
        if isinstance(run.machine, NativeRun):
            self._latest = preparation, run.machine
        if observed is not None:
            observed.tasks = run.work.graph
            run.finished = partial(_told_and_finished, run, observed, run.finished)
        if not self.on_host:
            drain.Drain(run, self.streams, self.operators, partial(self._call_end, run), checked=self.checked)
        return run

    def _plan_of_run(self, preparation: Preparation) -> Plan:
        """The plan that a run of these steps follows."""
        return preparation.plan

    def _call_end(self, run: Run, end: Callable[[], object]) -> None:
        """Call `end`, which tells the owner of a run on devices that it is over, on this thread or another."""
        end()

    def _host_work(self, preparation: Preparation, observed: ObservedRun | None) -> Work:
        """The work of a run on the host; kept for the next run unless this one is observed."""
        if observed is not None:
            return observed_work(
                preparation.plan, observed.tasks_of_chains(preparation.steps, self._most_pieces(preparation.plan))
            )
        return self.work(preparation)

    def work(self, preparation: Preparation) -> Work:
        """The work of a run on the host that nobody observes."""
        work = self._work.get(preparation)
        if work is None:
            work = self._work[preparation] = self._pieces_of(preparation)
        return work

    def tasks(self) -> OperatorTasks:
        """The tasks that runs hand out, for the shapes the blobs have now."""
        preparation = self.prepared()
        if not self.on_host:
            return prediction.tasks_of_chains(preparation.plan)
        work = self._host_work(preparation, None)
        shares = [
            [(operator, part * whole) for step, part in row for operator, whole in [preparation.operator_of(step)]]
            for row in work.shares
        ]
        return prediction.OperatorTasks(preparation.plan, work, shares)

    def measured_tasks(self) -> TimedTasks | None:
        """Its tasks with the seconds of each in the latest run, estimates where Python calls the steps.

        None before a run in machine code has ended, and while one is under way.
        """
        latest = self._latest
        if latest is None or latest[1].remaining or latest[0] is not self.prepared():
            return None
        estimates = self.tasks().timed(latest[0].seconds).seconds
        seconds = [took or estimate for took, estimate in zip(latest[1].task_seconds(), estimates, strict=True)]
        return prediction.TimedTasks(latest[1].tasks.graph, seconds)

    def _pieces_of(self, preparation: Preparation) -> Work:
        """The work of a preparation, in machine code where that runs."""
        plan = preparation.plan
        timed = [preparation.timed(chain) for chain in plan.chains]
        return pieces_of_chains(
            plan,
            [tuple(step for step, _ in row) for row in timed],
            [[seconds for _, seconds in row] for row in timed],
            self._most_pieces(plan),
            in_machine_code=threads().concurrent,
            shortest=SHORT_PHASE_SECONDS if plan.work >= WIDE * plan.critical_path else 0.0,
        )

    def _most_pieces(self, plan: Plan) -> list[int]:
        """The most pieces that operators of each chain are shared in."""
        return [min(limit, self.most_pieces) for limit in plan.pieces or [self.most_pieces] * len(plan.chains)]

    def synchronization(self, plan: Plan) -> Synchronization:
        """Orders the chains of `plan` on their devices: nothing, where each is done when its call returns."""
        return synchronizations.finished_chains(plan, self.guards())

    def _launched_chains(self, preparation: Preparation, plan: Plan, observed: ObservedRun | None) -> LaunchedChains:
        """The chains as calls that launch them; kept for the next run unless this one is observed."""
        previous = self._launched
        if observed is None and previous is not None and previous[0] is preparation:
            previous[1].reset()
            return previous[1]
        launched = LaunchedChains(
            self.operators,
            preparation,
            plan.chains,
            self.synchronization(plan),
            self.streams,
            finish=self.finishes_chains,
            observed=observed,
        )
        if observed is None:
            self._launched = (preparation, launched)
        return launched

    @abstractmethod
    def _execute(self, preparation: Preparation, timeout: float | None, trace: Observer | None) -> None:
        """Run the steps once; called by one thread at a time."""

    def guards(self) -> list[tuple[str, ...]]:
        """The names of the mutexes that each operator holds while it runs or is launched."""
        current = self._current
        prepared = [None] * len(self.operators) if current is None else current.prepared
        return list(map(guards_of, self.operators, prepared))

    def kernels(self) -> list[Kernel]:
        """The prepared step of each operator as work for a stream, for the shapes the blobs have now."""
        return kernels_of(self.operators, self.prepared())

    @property
    def is_prepared(self) -> bool:
        """True once there are steps for some shapes."""
        return self._current is not None

    def prepared(self) -> Preparation:
        """Steps for the shapes the blobs have now. Costs one comparison while no tensor has been replaced."""
        current = self._current
        if current is not None and current.bindings.in_place():
            return current
        del current  # its memory may be needed
        return self._prepare()

    def _prepare(self) -> Preparation:
        values = [blob.value for blob in self._inputs]
        found = [getattr(value, "constant", None) for value in values]
        constants = [None if constant is None else weakref.ref(constant) for constant in found]
        if constants != self._prepared_with:  # what was prepared has read others
            self._forget_preparations()
            self._prepared_with = constants
        tensors = [value for value, constant in zip(values, constants, strict=True) if constant is None]
        signature = tuple(
            [
                (tensor.shape, tensor.meta.name, None if tensor.is_packed else tensor.array.strides)
                if isinstance(tensor, Tensor)
                else None
                for tensor in tensors
            ]
        )
        preparation = self._preparations.take(signature)
        if preparation is not None and preparation.bindings.restore(self._own_inputs):
            self._preparations.put_back(signature, preparation)
        else:
            del preparation  # its memory may be needed
            preparation = self._new_preparation()
            self._preparations.add(signature, preparation)
        self._current = preparation
        return preparation

    def preparation_statistics(self) -> PreparationStatistics:
        """Numbers about the net's preparations."""
        return self._preparations.statistics(self.arena_memory.nbytes)

    def _new_preparation(self) -> Preparation:
        """Prepare; where memory does not suffice, again without what is kept for other shapes.

        That is dropped also when a larger arena replaces the one it lies in. Memory that was free for a moment while
        weights were packed for the first shapes is given back.
        """
        replaced, is_first = self.arena_memory.replaced, self._current is None
        values = [blob.value for blob in self._inputs]
        constants = [value for value in values if isinstance(value, Tensor) and value.constant is not None]
        packed_now = (tensor.current_array() for tensor in constants if is_first and tensor.device == CPU)
        with weight_memory.recycling(array for array in packed_now if array is not None):
            preparation = self._attempted_preparation()
        for tensor in constants:
            tensor.let_go()
        if is_first:
            give_back_free_memory(sum(tensor.nbytes for tensor in constants))
        if self.arena_memory.replaced != replaced:
            self._forget_preparations()
        return preparation

    def _attempted_preparation(self, unsteady: frozenset[str] = frozenset()) -> Preparation:
        make = partial(
            Preparation, self.operators, self.graph, self._inputs, self._constants, keep=self.keep, unsteady=unsteady,
            in_list_order=self.in_list_order, arena_memory=self.arena_memory, ordered=self._ordered,
        )  # fmt: skip
        try:
            with garbage_collection_paused():
                return make(previous=self._current)
        except ResourceError:
            if not self._preparations:
                raise
        self._forget_preparations()
        self._let_go_of_arenas()
        return make()

    def _forget_preparations(self) -> None:
        """Drop all steps and their memory, and the calls that launch them."""
        self._preparations.clear()
        self._work.clear()
        self._current = self._launched = self._latest = None

    def _let_go_of_arenas(self) -> None:
        """Empty the outputs in memory of a plan, which is freed when no tensor is on it any more."""
        self.arena_memory.clear()
        for operator in self.operators:
            for blob in operator.output_blobs:
                storage = blob.value.storage() if isinstance(blob.value, Tensor) else None
                if self.keep is not None and storage is not None and not storage.writable:
                    blob.tensor().clear()


def _noted_and_finished(run: Run, finished: Callable[[], object]) -> None:
    threads().note(NetRunOver(run))
    finished()


def _told_and_finished(run: Run, observed: ObservedRun, finished: Callable[[], object]) -> None:
    """Tell the observer that `run` is over, then its owner."""
    try:
        observed.stopped(run.error)
    finally:
        finished()


def _home(workspace: Workspace, name: str) -> Device | None:
    """The device of the tensor that blob `name` holds, None when it holds nothing."""
    blob = workspace.get_blob_or_none(name)
    value = None if blob is None else blob.value
    return value.device if isinstance(value, Tensor) and not value.is_empty else None


def _name_in_order(preparation: Preparation, _chain: int | None, step: Failed) -> str:
    return preparation.name_step(None, step)


def _names_checked(operator: Operator) -> list[str]:
    """The blobs that `operator.run_check` reads."""
    return [operator.input_blobs[index].name for index in operator.inputs_checked]


def _blobs_read_first(operators: tuple[Operator, ...]) -> list[Blob]:
    """The blobs that are read before the net writes them: they carry a signature's shapes. Empty ones get a tensor."""
    blobs: dict[int, Blob | None] = {}  # None for those that are written first
    for operator in operators:
        for place, blob in enumerate(operator.input_blobs):
            key = id(blob)
            if key not in blobs:
                blobs[key] = blob
                if blob.value is None and place not in operator.schema.handles:  # a copy's is fed on the host
                    blob.tensor(CPU if operator.crosses_devices else operator.runtime.device)
        for blob in operator.output_blobs:
            blobs.setdefault(id(blob))
    return [blob for blob in blobs.values() if blob is not None]
