"""SimpleNet: operators one after another, in list order. The reference that the other nets must agree with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, ClassVar

from dagexec.core.operator import Step
from dagexec.errors import RunCancelledError, RunTimeoutError
from dagexec.platform.arithmetic import operator_arithmetic
from dagexec.platform.blocking import calling_when_stopped, working_for
from dagexec.platform.threads import ThreadWait, threads
from dagexec.scheduler.nets.net import BaseNet
from dagexec.scheduler.observe.observers import Observer
from dagexec.scheduler.plan.plan import Plan, build_sequence
from dagexec.scheduler.plan.preparation import Preparation
from dagexec.scheduler.run.inline import run_inline
from dagexec.scheduler.run.run import Run
from dagexec.scheduler.run.work import SingleChain, Work, chain_work, pieces_of_chains

if TYPE_CHECKING:
    from dagexec.scheduler.observe.observed_run import ObservedRun


class SimpleNet(BaseNet):
    """Runs in the calling thread; on a pool, one worker runs all of it. On a device, it waits for each operator."""

    net_type: ClassVar[str] = "simple"
    in_list_order: ClassVar[bool] = True

    def _plan_of_run(self, preparation: Preparation) -> Plan:
        """Every operator is a chain that waits for the one before."""
        settled = preparation.settled
        return self.graph.derived(("sequence", settled), lambda: build_sequence(self.graph, settled))

    def _host_work(self, preparation: Preparation, observed: ObservedRun | None) -> Work:
        """A chain for each step that tells the observer, where there is one."""
        if observed is None:
            return super()._host_work(preparation, None)
        steps: list[tuple[Step, ...]] = [(step,) for step in _steps(preparation, observed)]
        return chain_work(self._plan_of_run(preparation), steps or [()])

    def _pieces_of(self, preparation: Preparation) -> Work:
        """All steps in list order, as one chain."""
        timed = preparation.timed(range(len(self.graph)))
        steps, seconds = tuple(step for step, _ in timed), [seconds for _, seconds in timed]
        return pieces_of_chains(SingleChain(), [steps], [seconds], [1], in_machine_code=threads().concurrent)

    def _execute(self, preparation: Preparation, timeout: float | None, trace: Observer | None) -> None:
        with operator_arithmetic():  # as on a worker of a pool
            if not self.on_host:
                self._execute_on_devices(timeout, trace)
                return
            observed = self._observed(trace)
            steps = preparation.in_order if observed is None and timeout is None else _steps(preparation, observed)
            error: BaseException | None = None
            try:
                if timeout is None:
                    run_inline(self.name, steps, preparation.name_step)
                else:
                    self._execute_until(threads().monotonic() + timeout, timeout, steps, preparation)
            except BaseException as caught:
                error = caught
                raise
            finally:
                if observed is not None:
                    observed.stopped(error)
                del error  # its traceback has this frame

    def _execute_until(self, deadline: float, timeout: float, steps: Sequence[Step], preparation: Preparation) -> None:
        """Call `steps`, those of all operators that are not settled."""
        late: list[int] = []
        running = [index for index in range(len(self.graph)) if index not in preparation.settled]
        now = threads().monotonic

        def in_time() -> Iterator[Step]:
            for index, step in zip(running, steps, strict=True):
                if now() >= deadline:
                    late.append(index)
                    return
                yield step

        with working_for(deadline=deadline):
            try:
                run_inline(self.name, in_time(), preparation.name_step)
            except RunTimeoutError as error:
                raise RunTimeoutError(f"net {self.name!r}: stopped after {timeout} seconds: {error}") from None
        if late:
            raise RunTimeoutError(
                f"net {self.name!r}: stopped before {self.graph.label(late[0])}, after {timeout} seconds"
            )

    def _execute_on_devices(self, timeout: float | None, trace: Observer | None) -> None:
        """Launch in this thread, waiting for each operator; a timer stops the run, as a pool's `stop` does.

        The end of the run that this thread works for, if there is one, stops it too.
        """
        end = ThreadWait()
        run = self._run = self.new_run(end.notify, trace)

        def stop(error: BaseException) -> None:
            self._stop(run, error)

        late = RunTimeoutError(f"net {self.name!r}: stopped after {timeout} seconds")
        timer = threads().call_later(timeout, lambda: stop(late)) if timeout is not None else None
        interruption: BaseException | None = None
        cancelled = RunCancelledError(f"net {self.name!r}: the run that it is part of was stopped")
        with calling_when_stopped(lambda: stop(cancelled)):
            try:
                with working_for(run):
                    run_inline(self.name, _until_stopped(run), run.name_step)
            except Exception as error:
                run.stop(error)
            except BaseException as caught:  # KeyboardInterrupt: leave nothing behind on the streams
                interruption = caught
                stop(caught)
            run.finished()
            try:
                end.wait()
            except BaseException as caught:
                interruption = caught
                stop(caught)
                end.wait()
        self._run = None
        if timer is not None:
            timer.cancel()
        if interruption is not None:
            try:
                raise interruption
            finally:
                del interruption
        if run.error is cancelled and late in run.secondary:  # it went on all the same, until it was late
            raise late
        run.raise_error()


def _steps(preparation: Preparation, observed: ObservedRun | None = None) -> Sequence[Step]:
    """The steps of all operators but the settled ones, which tell the observer where there is one."""
    if observed is not None:
        [chain] = observed.all_chains(preparation.steps)
        return chain
    return [step for index, step in enumerate(preparation.steps) if index not in preparation.settled]


def _until_stopped(run: Run) -> Iterator[Step]:
    """The steps of all chains, up to the chain after which the run was stopped."""
    for (steps,) in run.work.steps:
        if run.stopped:
            return
        yield from steps
