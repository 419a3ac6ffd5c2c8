"""Drain: the end of a run whose work continues on devices after the last worker has left it.

It waits for the net's streams without holding a thread, makes a failure there the run's error, and then tells the run's
owner. After a failure, library states may hold work that nothing waits for; they are abandoned. A run that was stopped
gives its devices a while, and then abandons what their streams still hold, so that a kernel that hangs does not block a
caller forever.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from dagexec.core.exclusive import LibraryState
from dagexec.core.operator import Operator
from dagexec.core.runtime import runtime_of
from dagexec.core.stream import Event, Stream, StreamFailure
from dagexec.errors import RunCancelledError
from dagexec.platform.threads import Timer, threads
from dagexec.scheduler.plan.culprit import operator_failure
from dagexec.scheduler.run.launching import NetStreams, device_failure
from dagexec.scheduler.run.run import Run

ABANDON_AFTER = 1.0
"""Seconds that a stopped run waits for its streams before it abandons their work."""


class Drain:
    """Takes the place of `run.finished`, which it calls when the streams are done too."""

    def __init__(
        self,
        run: Run,
        streams: NetStreams,
        operators: Sequence[Operator],
        call: Callable[[Callable[[], object]], object] = lambda finished: finished(),
        last: Stream | None = None,
        checked: Sequence[Operator] = (),
    ) -> None:
        """`operators` are the net's: its work may be on the streams of their library states too.

        `last` is a stream that has joined all others when it is done, so that waiting for it suffices while nothing
        fails.

        `checked` are the operators that have a `run_check`.

        `call` calls its argument, perhaps on another thread: `run.finished` may wait, which a device's thread must not.
        """
        self._run = run
        self._streams = streams
        self._operators = operators
        self._checked = checked
        self._finished = run.finished
        self._call = call
        self._last = last
        self._lock = threads().lock()
        self._left = 0
        self._attempt = 0
        self._timer: Timer | None = None
        self._done = False
        self._states_left = False
        self._others_left = False
        run.finished = self._start
        run.on_stop = self._stopped

    def _stopped(self) -> None:
        """The run was stopped: give the devices a while."""
        with self._lock:
            if self._done or self._timer is not None:
                return
            self._timer = threads().call_later(ABANDON_AFTER, self._abandon)

    def _start(self) -> None:
        """No worker is in the run any more: wait for the streams. Repeated if a worker died while it was about to."""
        last = self._last
        alone = last is not None and self._run.error is None
        streams = [last] if last is not None and alone else self._streams.all()
        with self._lock:
            done = self._done
            self._attempt += 1
            self._left = 1 + len(streams)
            self._others_left = alone
            self._states_left = False
            one_done = partial(self._one_done, self._attempt)
        if done:
            self._call(self._end)
            return
        self._wait_for(streams, one_done)

    def _wait_for(self, streams: Sequence[Stream], one_done: Callable[[], object]) -> None:
        """Have `one_done` called once for each stream that is done, and once more."""
        for stream in streams:
            event = runtime_of(stream.device).event(f"the end of a run of net {self._streams.net!r} on {stream.name}")
            try:
                event.record(stream)
            except Exception as error:
                self._wait_without_event(stream, event, error)
                one_done()
            else:
                event.when_done(one_done)
        one_done()

    def _wait_without_event(self, stream: Stream, event: Event, error: Exception) -> None:
        """Fail the run, and wait for `stream` on this thread, as it could not be asked to notify."""
        self._run.fail(operator_failure(self._streams.net, f"{event.owner}: recording its event", error))
        self._stopped()
        stream.synchronize()

    def _one_done(self, attempt: int) -> None:
        with self._lock:
            if attempt != self._attempt or self._done:
                return
            self._left -= 1
            if self._left:
                return
            others = self._others_to_wait_for()
            self._left = 1 + len(others) if others else 0
            states = [] if others else self._states_to_leave()
            self._left = self._left or len(states)
            timer = None
            if not states and not others:
                self._done = True
                timer, self._timer = self._timer, None
        if others:
            self._wait_for(others, partial(self._one_done, attempt))
            return
        if states:
            mine = self._streams.all()
            self._stopped()  # work that hangs there would hold up everybody who uses them
            for state in states:
                state.give_up(mine, partial(self._one_done, attempt))
            return
        if timer is not None:
            timer.cancel()
        self._collect()
        self._call(self._end)

    def _end(self) -> None:
        """Tell the run's owner, after the operators that can check their values only now.

        Of several errors the first in list order counts: the others may follow from it.
        """
        errors = [(operator, error) for operator in self._checked if (error := _check(operator)) is not None]
        if errors:
            operator, error = errors[0]
            self._run.fail(operator_failure(self._streams.net, operator.label, error))
        self._finished()

    def _others_to_wait_for(self) -> list[Stream]:
        """The streams that joined `last`, once it has failed and may have skipped its waits for them."""
        last, waiting, self._others_left = self._last, self._others_left, False
        if last is None or not waiting or (last.failure is None and self._run.error is None):
            return []
        return [stream for stream in self._streams.all() if stream is not last]

    def _states_to_leave(self) -> list[LibraryState]:
        """The library states that may still hold work of the run: none if all its streams are done without failure."""
        already, self._states_left = self._states_left, True
        if already:
            return []
        failed = self._run.error is not None or any(stream.failure is not None for stream in self._streams.all())
        return self._states() if failed else []

    def _states(self) -> list[LibraryState]:
        """The library states of the operators. Only for runs that fail, as going through all operators takes time."""
        states = (operator.library_state for operator in self._operators)
        return list({id(state): state for state in states if state is not None}.values())

    def _collect(self) -> None:
        """Make the first failure of the streams the run's error, and make the streams usable again."""
        run = self._run
        run.on_stop = None
        failed: dict[int, tuple[Stream, StreamFailure]] = {}
        for stream in self._streams.all():
            stream.observer = None
            if stream.failure is not None:
                failed.setdefault(stream.failure.number, (stream, stream.failure))
                stream.reset()
        for number in sorted(failed):
            stream, failure = failed[number]
            errors = [error for error in (run.error, *run.secondary) if error is not None]
            if all(error is not failure.error and error.__cause__ is not failure.error for error in errors):
                run.fail(device_failure(self._streams.net, stream, failure))

    def _abandon(self) -> None:
        error = self._run.error or RunCancelledError(f"net {self._streams.net!r}: the run was stopped")
        mine = self._streams.all()
        with self._lock:
            if self._done:  # the next run may be on the streams by now
                self._timer = None
                return
            for stream in mine:
                if not stream.is_idle:
                    stream.abandon(error)
        for state in self._states():
            state.abandon(mine)
        with self._lock:  # a worker that is still in its chain may launch more
            self._timer = None if self._done else threads().call_later(ABANDON_AFTER, self._abandon)


def _check(operator: Operator) -> Exception | None:
    assert operator.run_check is not None
    return operator.run_check()
