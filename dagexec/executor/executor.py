"""Executor: a compiled model to embed in a larger application. `dagexec.compile` makes one.

An executor has a worker pool, of its own or a shared one (`dagexec.scheduler.workers.pool`), and `replicas` nets over
shared parameters, so that many runs may be in flight. A request waits in a queue until a replica is free; `run` blocks
its thread meanwhile, `run_async` only its task.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from dagexec.binding.io_binding import Array, Outputs
from dagexec.binding.parameters import Parameters
from dagexec.binding.replicas import Replica, build_replicas
from dagexec.core.device import CPU
from dagexec.core.feeds import Feeds, check_feeds, named_feeds
from dagexec.core.model import InputInfo, Model
from dagexec.core.runtime import runtime_of
from dagexec.core.variant import Variant
from dagexec.core.workspace import Workspace
from dagexec.errors import DagexecError, PlanError, ShapeError
from dagexec.executor.batching.row_blocks import RowBlocks
from dagexec.executor.beside import Beside
from dagexec.executor.dispatch.dispatcher import Dispatcher
from dagexec.executor.dispatch.growth import Growth, may_grow
from dagexec.executor.dispatch.statistics import ExecutorStatistics
from dagexec.executor.interface import Interface
from dagexec.executor.model_runner import ModelRunner
from dagexec.executor.requests.call import Call
from dagexec.executor.requests.request import Request
from dagexec.executor.requests.waiting import TaskWait, event_loop
from dagexec.executor.runs.callers import Callers
from dagexec.executor.runs.inline import InlineRuns
from dagexec.executor.runs.pooled import PooledRuns
from dagexec.executor.runs.turns import Turns
from dagexec.executor.sessions.names import caches_by_name
from dagexec.executor.shutdown import Shutdown
from dagexec.executor.source.options import new_place
from dagexec.executor.source.origin import Origin
from dagexec.executor.source.types import GivenTypes
from dagexec.options import CompileOptions, Shapes
from dagexec.platform.cached import cached_property
from dagexec.platform.deadline import check_stop
from dagexec.platform.garbage_collection import garbage_collection_paused
from dagexec.platform.lazy import LazyModule
from dagexec.platform.threads import ThreadWait, threads
from dagexec.scheduler.nets.net import BaseNet
from dagexec.scheduler.observe.lanes import Lanes
from dagexec.scheduler.workers.place import Place, beside

if not TYPE_CHECKING:
    instead = LazyModule("dagexec.executor.instead")
    joining = LazyModule("dagexec.executor.batching.joining")
    lengths = LazyModule("dagexec.executor.lengths")
    metrics = LazyModule("dagexec.executor.telemetry.metrics")
    picture = LazyModule("dagexec.executor.picture")
    saving = LazyModule("dagexec.executor.saving")
    sessions = LazyModule("dagexec.executor.sessions.sessions")
    spans = LazyModule("dagexec.executor.telemetry.spans")
    warm_up = LazyModule("dagexec.executor.warm_up")
else:
    from dagexec.executor import instead, lengths, picture, saving, warm_up
    from dagexec.executor.batching import joining
    from dagexec.executor.batching.axes import BatchAxes
    from dagexec.executor.batching.joining import Batching
    from dagexec.executor.instead import Instead
    from dagexec.executor.sessions import sessions
    from dagexec.executor.sessions.session import Session
    from dagexec.executor.sessions.sessions import Sessions
    from dagexec.executor.telemetry import metrics, spans


class Executor(ModelRunner):
    """Runs a compiled model for many callers at once; `dagexec.compile` creates it.

        with dagexec.compile("model.onnx", replicas=4) as executor:
            outputs = executor.run({"data": array})  # blocks the thread
        async with dagexec.compile("model.onnx", replicas=4) as executor:
            outputs = await executor.run_async({"data": array}, timeout=0.5)  # blocks the task: asyncio or trio

    `run` may be called from many threads and `run_async` from many tasks at the same time. Use the executor as a
    context manager, or call `close`.
    """

    def __init__(
        self,
        model: Model,
        options: CompileOptions,
        given: Model | None = None,
        place: Place | None = None,
        given_types: Callable[[], GivenTypes] | None = None,
        batch_axes: BatchAxes | None = None,
        origin: Origin | None = None,
        parameters: Workspace | None = None,
    ) -> None:
        """Called by `compile`. `given` is the model before it was rewritten, or None if it was not.

        `given_types` gives those for errors in its words, `batch_axes` are those along which requests are joined.
        `origin` is what `save` needs. `options` determine the number of workers and the net type. `place` has the
        workers; with None the options decide.
        Raises what `warm_up` raises, if `options` request it, and ClosedError when their pool is closed.
        """
        assert options.net_type is not None
        self.model = model
        self.net_type = options.net_type
        self._options = options
        name, tracer, meter = model.name, options.telemetry, options.metrics
        self._telemetry = self._metrics = None
        if tracer is not False:
            self._telemetry = spans.Telemetry(name, options.net_type, None if tracer is True else tracer)
        if meter is not False:
            self._metrics = metrics.Metrics(name, options.net_type, None if meter is True else meter)
        self._source = given or model
        self._interface = Interface(model, self._source, options)
        self._given_types = given_types
        self._batch_axes = batch_axes
        self._origin = origin
        self._now = threads().monotonic
        self._is_beside = parameters is not None
        self._open(parameters, place or new_place(model, options))
        if options.warm_start is not False:
            try:
                self._warm_up_with_zeros(None if options.warm_start is True else options.warm_start)
            except BaseException:
                self.close()
                raise

    def _open(self, parameters: Workspace | None, place: Place) -> None:
        """Make the nets, for the workers of `place`; leave it when that fails."""
        model, options = self.model, self._options
        self._place = place
        self._pool = place.workers
        assert options.num_workers is not None
        self.num_workers = min(options.num_workers, self._pool.num_workers)
        try:
            with garbage_collection_paused():
                prepared = None if self._origin is None else self._origin.kept
                self._replicas = build_replicas(model, options, self._pool, self._interface.keep, parameters, prepared)
        except BaseException:
            place.leave()
            raise
        self._beside = Beside(self._replicas.parameters, options, partial(_built, place), Executor.statistics)
        self._parameters = Parameters(self._replicas.parameters, model.parameters)
        self.model = model.changed(parameters=self._parameters)
        self._batching: Batching | None = None
        if self._batch_axes is not None:
            self._batching = joining.Batching(model, self._batch_axes, options.max_batch, place.later)
        self._dispatcher = Dispatcher(
            model.name, self._replicas.members, self._pool, options, self._telemetry, self._metrics, place.share,
            options.run_times,
        )  # fmt: skip
        place.unfinished = self._dispatcher.unfinished
        self._dispatcher.charge_arenas_to(place.arenas)
        self._finalizer = weakref.finalize(self, place.abandon, self._replicas.close)
        self._finalizer.atexit = False
        self._pooled = PooledRuns(self._dispatcher, self._pool, self.num_workers, RowBlocks(self.model, options))
        may = may_grow(options, self._replicas)
        growth = Growth(self._dispatcher, self._replicas, place, self._pooled.serve) if may else None
        self._callers = Callers(
            self.model, self._interface, self._replicas, self._parameters, self._batching, self._dispatcher,
            self._pooled, growth,
        )  # fmt: skip
        self.graph = self._replicas.graph
        self._inline: InlineRuns | None = None
        few = options.first_replicas <= self.num_workers
        net = self.net()
        if self._telemetry is None and few and net.on_host and not net.is_watched:
            self._inline = InlineRuns(self._dispatcher, self._pooled, self._batching)
        self._turns: Turns | None = None
        if self._inline is not None and options.max_queued is None and options.max_batch == 1:
            self._turns = Turns(self._dispatcher, self._pooled, self._inline)
        self._shutdown = Shutdown(
            self._dispatcher, self._pooled, place, self._beside.close, self._replicas.close, self._finalizer,
            has_turns=self._turns is not None,
        )  # fmt: skip

    @property
    def overridable(self) -> Mapping[str, InputInfo]:
        """Parameters that a run may be fed others for: ONNX's initializers that are inputs too (docs/onnx.md)."""
        return {}

    def output_info(self) -> Mapping[str, InputInfo]:
        """Each result's type and the sizes that are the same in every run, by inference.

        Whether a result is a sequence or an optional is known after a run or a warm-up.
        """
        infos = self._types_as_given().output_info(self.inputs, self.outputs)
        blobs = self._replicas.members[0].workspace
        for name, info in infos.items():
            value = blobs.get_blob(name).value if blobs.has_blob(name) else None
            if isinstance(value, Variant) and not isinstance(value.content, np.ndarray):
                infos[name] = replace(info, is_sequence=value.content is not None, is_optional=value.content is None)
        return infos

    def _types_as_given(self) -> GivenTypes:
        if self._given_types is not None:
            return self._given_types()
        parameters = {**self._parameters.outlines(), **self._source.parameters}
        return GivenTypes.of(self._source.changed(parameters=parameters))

    def _run(self, feeds: Feeds | npt.ArrayLike, call: Call) -> Outputs:
        if self._instead is not None and (outputs := self._instead.run(feeds, call)) is not None:
            return outputs
        given = feeds
        names: Sequence[str] = self.model.outputs
        if given.__class__ is not dict or call.outputs is not None or call.out is not None:
            given, names = self._callers.asked(feeds, call)
        try:
            if self._inline is not None and call.timeout is None and call.trace is None:
                results = self._inline.run(given, names, call)
                if results is not None:
                    return results
            wait = self._new_wait()
            request = self._callers.request(given, names, call, wait)
            if self._inline is not None and self._inline.takes(request):
                return self._inline.run_when_free(request, wait, partial(self._callers.grow, of_thread=True))
            return self._callers.served(request, wait)
        except ShapeError as error:
            raise self._as_given(error, given) from None

    async def _run_async(self, feeds: Feeds | npt.ArrayLike, call: Call) -> Outputs:
        if self._instead is not None and (outputs := await self._instead.run_async(feeds, call)) is not None:
            return outputs
        given = feeds
        names: Sequence[str] = self.model.outputs
        if given.__class__ is not dict or call.outputs is not None or call.out is not None:
            given, names = self._callers.asked(feeds, call)
        try:
            if self._inline is not None and call.trace is None:
                loop = event_loop()
                results = self._inline.run_in_turn(loop, given, names, call)
                if results is not None:
                    await loop.checkpoint()
                    return results
            wait = TaskWait()
            request = self._callers.request(given, names, call, wait)
            if self._turns is not None:
                self._turns.offer(request)
            return await self._callers.served_async(request, wait)
        except ShapeError as error:
            raise self._as_given(error, given) from None

    def warm_up(self, feeds: Feeds | npt.ArrayLike | None = None) -> None:
        """Prepare every replica for the shapes of `feeds`, and run each once, by default with zeros.

        Later runs then find prepared steps, touched memory, and everything derived from parameters. Axes of unspecified
        size have size 1 in the zeros; give `feeds` for other sizes. A net that updates its own parameters is prepared
        but not run. Busy replicas are warmed up when they are free. Where such runs are on another net, for any
        length or a step of a decoder, which sessions have in common, so is that.

        Raises FeedError (also if the model does not specify the shape of an input), OperatorError, ClosedError.
        """
        if feeds is None:
            self._warm_up_with_zeros(None)
        else:
            self._warm_up(named_feeds(self.model.name, feeds, self._interface.needed))

    def prepare_first_step(self) -> None:
        """Make and prepare the net of a decoder's first step; `compile` does, as texts begin with one at some time.

        Whether the model is a decoder is told by the names of its caches. Sizes that it leaves free are taken to be 1;
        other sizes find the weights packed. Nothing is done where there is no such net.
        """
        caches = caches_by_name(self.inputs, self.outputs)
        if not caches or not self.net().on_host:
            return
        with suppress(DagexecError), self.session() as session:
            info = {name: one for name, one in self._source.inputs.items() if name not in session.states}
            first = session.step_for(warm_up.zero_feeds(self._source.changed(inputs=info)))
            if first is not None:
                member = self._beside.member(first.executor)
                member._warm(member._replicas.members[0], first.fed)
        check_stop()

    def session(self, states: Mapping[str, str] | None = None) -> Session:
        """Runs that follow one another, in which outputs are inputs of the next: caches and states stay in the session.

        `states` says which output each such input is fed, by default what their names tell (`states_by_name`).
        Raises FeedError for names that the model does not have.
        """
        return self._sessions.new(states)

    @contextmanager
    def net_instead(self, feeds: Mapping[str, Array]) -> Iterator[tuple[str, BaseNet] | None]:
        """The net, prepared for inspection, that a run with these feeds is on in place of `net()`, and what it is for.

        That is a step of a decoder, or any length of inputs. None where there is none.
        """
        found = None if self._instead is None else self._instead.find(feeds)
        if found is None:
            yield None
            return
        net = self._beside.member(found.executor).net()
        for name, array in found.run.fed.items():
            net.workspace.feed_blob(name, array)
        net.prepared()
        yield found.purpose, net

    @cached_property
    def _instead(self) -> Instead | None:
        """Runs on other nets; None for a model that has none, or whose requests are joined, and for such a net."""
        if self._batching is not None or self._is_beside:
            return None
        steps = self._sessions.fed if caches_by_name(self.inputs, self.outputs) else None
        of_lengths = None
        may_vary = any(None in (info.shape or ())[1:] for info in self.inputs.values())
        if may_vary and self._options.any_length and not self._options.keep:
            of_lengths = lengths.LengthRuns.of(self, self._outlined(), partial(self._beside.made, joins=False))
        return instead.Instead(steps, of_lengths, self._callers) if steps or of_lengths else None

    @cached_property
    def _sessions(self) -> Sessions:
        model, types = self._outlined(), self._types_as_given()
        return sessions.Sessions(self, model, types, self._options, self._beside.made, self._beside.retire)

    def _outlined(self) -> Model:
        """The model without weights in memory, for who makes other nets of it."""
        return self.model.changed(parameters=self._parameters.outlines())

    def save(self, path: str | os.PathLike[str]) -> None:
        """Save the decisions of the compiler as a plan, a file that `dagexec.open` opens at little cost
        (docs/plans.md).

        The plan has the source model too, which is loaded once more. An executor that has not run yet is warmed up with
        zeros, if the shapes of its inputs are known.

        Raises PlanError for what no file can keep (functions of the application, parts in other runtimes, models on
        devices) and for a model that cannot be loaded again; OutputError, and what `load_model` does.
        """
        if self._origin is None:
            raise PlanError(
                f"net {self.model.name!r}: a plan keeps no parameters that may be fed: compile "
                "dagexec.load_model(..., overridable=())"
            )
        given = self._origin.model(self._source)
        if self._replicas.members[0].io_binding is None:
            with suppress(DagexecError):  # not every net accepts zeros of arbitrary sizes
                self.warm_up()
        saving.save_plan(Path(path), self._origin, given, self.model, self.net(), self._replicas.parameters)

    def _repr_html_(self) -> str:
        """For notebooks."""
        return picture.executor_picture(self.model.name, self.num_workers, self.net(), self.statistics())

    def statistics(self) -> ExecutorStatistics:
        """Counts and times of requests, workers and replicas so far and at this moment.

        Steps of sessions are counted, and their times left out.
        """
        device = self._options.default_device
        total = self._dispatcher.statistics(None if device == CPU else runtime_of(device).statistics())
        return self._beside.with_counts(total)

    def watch(self, lanes: Lanes, label: str) -> None:
        """Tell `lanes` what threads do for this executor, as `label`, until nobody looks at them any more."""
        self._dispatcher.watch(lanes, label)
        for member in tuple(self._beside.members):
            member.watch(lanes, label)

    def drain(self, timeout: float | None = None) -> bool:
        """Admit no more requests, let queued and running ones finish, then close.

        New requests, and those that wait for admission, end with ClosedError. After `timeout` seconds the queue is
        abandoned as well and runs stop before their next operator or piece, both with ClosedError; the result is then
        False. Raises what `close` raises.
        """
        in_time = self._shutdown.drain(timeout)
        self.close()
        return in_time

    async def drain_async(self, timeout: float | None = None) -> bool:
        """Like `drain`, for a task. If it is cancelled, the executor admits no more requests but is not closed yet."""
        in_time = await self._shutdown.drain_async(timeout)
        await self.aclose()
        return in_time

    def close(self, *, drain: bool = False) -> None:
        """End queued requests with ClosedError, let running ones finish, and join the workers. Idempotent.

        With `drain` queued requests finish as well. Raises DagexecError when called by one of the executor's own
        workers, which would wait for itself. Does nothing in a forked child.
        """
        self._shutdown.close(drain)

    async def aclose(self, *, drain: bool = False) -> None:
        """Like `close`, for a task. It returns when the executor is closed, even if the task is cancelled."""
        await self._shutdown.close_async(drain)

    def reopen(self) -> None:
        """Make the parent's executor usable in a child created by `os.fork`, with new workers and nets.

        It then gives the same bytes as in the parent, where it may have been closed. Parameters, and what was derived
        from them, stay in memory shared with the parent, because nothing writes to them; activations are new. A net
        that updates its own parameters starts from their values before its first run.

        Raises DagexecError if the executor was not inherited from a parent or has already been reopened, DeviceError
        for CUDA, which does not work in forked children, ResourceError if the system has no threads or memory left.
        """
        if not self._dispatcher.forked:
            raise DagexecError(
                f"net {self.model.name!r}: reopen is for a parent's executor in a child created by os.fork; "
                "this executor was created in this process"
            )
        runtime_of(self._options.default_device)
        old, finalizer = self._replicas, self._finalizer
        self.__dict__.pop("_sessions", None)
        self.__dict__.pop("_instead", None)
        self._open(old.parameters, new_place(self.model, self._options))  # the threads that it had are the parent's
        finalizer.detach()
        old.close()

    def net(self) -> BaseNet:
        """The net of the first replica, for inspection of graph, plan and operators. Do not run it."""
        return self._replicas.members[0].net

    def _as_given(self, error: ShapeError, feeds: Feeds) -> ShapeError:
        """The error in terms of the source model, where inference finds one there for these feeds."""
        error_before = None if self._given_types is None else self._given_types().error_for(feeds)
        return error if error_before is None else error_before

    def _warm_up_with_zeros(self, shapes: Shapes | None) -> None:
        feeds = warm_up.zero_feeds(self._source, shapes)
        try:
            self._warm_up(feeds)
        except DagexecError as error:
            error.add_note("while the net was warmed up with zeros; warm_up(feeds) warms it up with inputs of its own")
            raise

    def _warm_up(self, feeds: Feeds) -> None:
        checked: Mapping[str, Array] = check_feeds(self.model, feeds, self._interface.needed)
        if self._batching is not None:
            checked = self._batching.padded(checked)
        found = None if self._instead is None else self._instead.find(feeds)
        for replica in () if found is not None and found.purpose == instead.ANY_LENGTH else self._replicas.members:
            check_stop()
            self._warm(replica, checked)
        if found is not None:
            self._beside.member(found.executor)._warm_up(found.run.fed)

    def _warm(self, replica: Replica, feeds: Mapping[str, Array]) -> None:
        wait = self._new_wait()
        run_net = not self._replicas.updates_parameters
        self._callers.served(Request(feeds, notify=wait.notify, pinned=replica, run_net=run_net), wait)

    def _new_wait(self) -> ThreadWait:
        """A wait for the workers."""
        return self._pool.new_wait(self._dispatcher.share)


def _built(
    place: Place, model: Model, options: CompileOptions, parameters: Workspace, axes: BatchAxes | None
) -> Executor:
    """An executor on the workers of `place`."""
    return Executor(model, options, place=beside(place), parameters=parameters, batch_axes=axes)
