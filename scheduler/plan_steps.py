"""Runs plans: their nets in one workspace, step by step, and steps that run at once on a thread each.

The first failure stops the plan: steps under way begin no other net, what an operator waits for it gets an error, and
the threads are joined before the failure is raised.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from dagexec.core.proto import ExecutionStep, NetDef, PlanDef
from dagexec.core.workspace import Net, Workspace
from dagexec.errors import DagexecError, RunCancelledError, SchemaError, ShapeError
from dagexec.platform.blocking import working_for
from dagexec.platform.threads import ThreadWait, threads
from dagexec.scheduler.caffe2_net_types import net_type

logger = logging.getLogger("dagexec")


def run_plan(workspace: Workspace, plan: PlanDef) -> None:
    """Make the nets of a plan in the workspace, and run its steps one after another.

    Raises SchemaError for a plan whose settings exclude one another or that names a net which is nowhere, before it
    makes any, and what a net of the plan raises.
    """
    definitions = {net.name: net for net in plan.network}
    for step in plan.execution_step:
        _check(step, definitions.keys() | workspace.nets.keys(), plan.name)
    used = _used(plan.execution_step)
    for definition in (one for one in definitions.values() if used.get(one.name, True)):
        workspace.create_net(
            definition, net_type(definition.type, definition.name), definition.num_workers or None, overwrite=True
        )
    run = _PlanRun(plan.name, definitions)
    for step in plan.execution_step:
        run.step(step, _Around(workspace, {}))


def _check(step: ExecutionStep, nets: set[str], plan: str) -> None:
    label = f"plan {plan!r}, step {step.name!r}"
    if step.substep and step.network:
        raise SchemaError(f"{label}: it has both steps and nets")
    if step.criteria_network:
        raise SchemaError(f"{label}: criteria_network is not supported; use should_stop_blob")
    if step.should_stop_blob and step.HasField("num_iter"):
        raise SchemaError(f"{label}: num_iter and should_stop_blob exclude one another")
    if step.only_once and not step.should_stop_blob:
        raise SchemaError(f"{label}: only_once needs a should_stop_blob")
    if step.report_net and step.report_interval <= 0:
        raise SchemaError(f"{label}: report_net needs a report_interval of at least a second")
    missing = sorted({*step.network, *filter(None, [step.report_net])} - nets)
    if missing:
        raise SchemaError(f"{label}: nets {missing} are neither in the plan nor in the workspace")
    for substep in step.substep:
        _check(substep, nets, plan)


class _Around:
    """A workspace, and nets that were made in it for a step."""

    def __init__(self, workspace: Workspace, own: dict[str, Net]) -> None:
        self.workspace = workspace
        self.own = own

    def net(self, name: str) -> Net:
        """The net of that name."""
        return self.own.get(name) or self.workspace.nets[name]


class _PlanRun:
    """One run of a plan.

    Attributes:
        stopped, waits: as of a run, for operators that wait (see `dagexec.platform.blocking`).
    """

    def __init__(self, name: str, definitions: dict[str, NetDef]) -> None:
        self._name = name
        self._definitions = definitions
        self.stopped = False
        self.waits: list[ThreadWait] = []
        self._failure: BaseException | None = None

    def _fail(self, error: BaseException) -> None:
        """Stop because of what failed first; what fails behind that may do so for being stopped."""
        self._failure = self._failure or error
        self.stop()

    def stop(self) -> None:
        """Let nothing of the plan begin any more, and end its waits."""
        self.stopped = True
        for wait in list(self.waits):
            wait.notify()

    def step(self, step: ExecutionStep, around: _Around) -> None:
        """Run a step as often as it says."""
        with self._inside(step, around) as inside, self._beside(step, inside):
            turn = 0
            while self._continues(step, turn) and not self._pass(step, inside):
                turn += 1

    def _continues(self, step: ExecutionStep, turn: int) -> bool:
        if step.should_stop_blob:
            return turn == 0 or not step.only_once
        return turn < (step.num_iter if step.HasField("num_iter") else 1)

    def _pass(self, step: ExecutionStep, around: _Around) -> bool:
        """Run its nets or its steps once; true when it is to stop."""
        once = [substep for substep in step.substep if not substep.run_every_ms]
        if step.concurrent_substeps and (len(once) > 1 or any(one.num_concurrent_instances > 1 for one in once)):
            self._at_once([one for one in once for _ in range(max(1, one.num_concurrent_instances))], around)
            return self._is_over(step, around)
        for substep in once:
            self._check_stopped(step)
            self.step(substep, around)
            if self._is_over(step, around):
                return True
        for name in step.network:
            self._check_stopped(step)
            with working_for(self):
                around.net(name).run()
            if self._is_over(step, around):
                return True
        return False

    def _check_stopped(self, step: ExecutionStep) -> None:
        if self.stopped:
            raise RunCancelledError(f"plan {self._name!r}, step {step.name!r}: the plan was stopped")

    def _is_over(self, step: ExecutionStep, around: _Around) -> bool:
        blob = around.workspace.get_blob_or_none(step.should_stop_blob) if step.should_stop_blob else None
        if blob is None or blob.value is None or blob.tensor().is_empty:
            return False  # as in Caffe2, nothing has been said
        array = blob.tensor().array
        if array.size != 1 or array.dtype.kind != "b":
            raise ShapeError(
                f"plan {self._name!r}, step {step.name!r}: {step.should_stop_blob!r} must be one bool, found "
                f"{array.dtype}{list(array.shape)}"
            )
        return bool(array.item())

    def _at_once(self, steps: Sequence[ExecutionStep], around: _Around) -> None:
        """Run steps on a thread each. Raises what failed first, when all are over."""
        failures: list[BaseException] = []

        def run(step: ExecutionStep) -> None:
            try:
                self._check_stopped(step)
                self.step(step, around)
            except BaseException as error:
                failures.append(error)
                self._fail(error)

        started = [threads().start(lambda step=step: run(step), f"dagexec-plan-{step.name}") for step in steps]  # type: ignore[misc]
        try:
            for thread in started:
                thread.join()
        except BaseException:  # KeyboardInterrupt: leave no thread behind in our blobs
            self.stop()
            for thread in started:
                thread.join()
            raise
        if failures:
            raise self._failure or failures[0]

    @contextmanager
    def _inside(self, step: ExecutionStep, around: _Around) -> Iterator[_Around]:
        """Where a step runs: with `create_workspace` a child workspace, with nets of its own."""
        if not step.create_workspace:
            yield around
            return
        child = Workspace(around.workspace)
        made = _Around(child, {})
        try:
            for name in _nets_of(step):
                if name in self._definitions:
                    definition = self._definitions[name]
                    kind = net_type(definition.type, name)
                    made.own[name] = child.build_net(definition, kind, definition.num_workers or None)
                else:
                    made.own[name] = around.net(name)
            yield made
        finally:
            for name, net in made.own.items():
                if name in self._definitions:
                    net.close()

    @contextmanager
    def _beside(self, step: ExecutionStep, around: _Around) -> Iterator[None]:
        """Within it, what a step repeats at intervals runs on threads, and once at the end."""
        repeated: list[tuple[float, Callable[[], object]]] = [
            (one.run_every_ms / 1000, lambda one=one: self.step(one, around))  # type: ignore[misc]
            for one in step.substep
            if one.run_every_ms
        ]
        if step.report_net:
            repeated.append((step.report_interval, around.net(step.report_net).run))
        ends = [ThreadWait() for _ in repeated]
        started = [
            threads().start(
                lambda end=end, seconds=seconds, call=call: self._repeat(end, seconds, call),  # type: ignore[misc]
                f"dagexec-plan-{step.name}-beside",
            )
            for end, (seconds, call) in zip(ends, repeated, strict=True)
        ]
        try:
            yield
        except BaseException as error:
            self._fail(error)
            raise
        finally:
            for end in ends:
                end.notify()
            for thread in started:
                thread.join()

    def _repeat(self, end: ThreadWait, seconds: float, call: Callable[[], object]) -> None:
        is_over = False
        while not is_over:
            is_over = end.wait(seconds)
            if self.stopped:
                return
            try:
                with working_for(self):
                    call()
            except DagexecError as error:
                if not self.stopped:
                    logger.warning("plan %r: what is repeated beside its steps failed: %s", self._name, error)


def _used(steps: Iterable[ExecutionStep]) -> dict[str, bool]:
    """The nets that steps name; those that run in workspaces of steps alone are false."""
    used: dict[str, bool] = {}
    for step in steps:
        inner = _used(step.substep) | dict.fromkeys([*step.network, step.report_net], True)
        for name, shared in inner.items():
            used[name] = used.get(name, False) or (shared and not step.create_workspace)
    return used


def _nets_of(step: ExecutionStep) -> list[str]:
    """The nets that a step and its steps name."""
    inner = [name for substep in step.substep for name in _nets_of(substep)]
    return list(dict.fromkeys([*step.network, *filter(None, [step.report_net]), *inner]))
