"""ThreadedModel: a thread, a workspace and nets of its own for each device; see `gradient_sync` for how they meet.

The first replica is the calling thread's, so Ctrl-C reaches it. When a replica fails, its rank ends the group, so all
others leave their waits; the caller gets the first error.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from dagexec.core.proto import NetDef, OperatorDef
from dagexec.core.tensor import Tensor
from dagexec.core.workspace import Net, Workspace
from dagexec.errors import ClosedError, CommunicationError, RunCancelledError
from dagexec.ops.families.communication import CommonWorld, ThreadGroup
from dagexec.ops.families.communication.collectives import divide
from dagexec.platform.blocking import working_for
from dagexec.platform.threads import ThreadWait, threads
from dagexec.scheduler.nets.net import BaseNet
from dagexec.scheduler.nets.options import RunOptions
from dagexec.training.data_parallel.batch_statistics import COMMON_WORLD, is_shared_sum
from dagexec.training.data_parallel.bucketing import gathered, reading_gathered, sparse_gradients
from dagexec.training.data_parallel.flat_buffer import FlatBuffer, MergedMicroBatches
from dagexec.training.data_parallel.gradient_sync import GradientSync, RingSync, TreeSync
from dagexec.training.data_parallel.pairing import DevicePair, device_pairs
from dagexec.training.data_parallel.parallel_model import Feeds, ParallelModel
from dagexec.training.data_parallel.replica import DRAW, Replica
from dagexec.training.data_parallel.replica_devices import ReplicaDevice
from dagexec.training.data_parallel.solver_thread import SolverThread

Array = npt.NDArray[Any]


class ThreadedModel(ParallelModel):
    """Replicas that each run in a thread, synchronized as a tree or around a ring.

    Attributes:
        pairs: the tree; in a ring, empty.
    """

    def __init__(
        self,
        replicas: Sequence[Replica],
        iter_size: int,
        common: Workspace | None,
        *,
        reduction: str,
        options: RunOptions,
        timeout: float,
    ) -> None:
        """`reduction` is tree or ring; nets are simple ones by default.

        `timeout` is for a wait for another replica. A net is stopped after twice that, when all others have given up.
        """
        super().__init__(replicas, iter_size, common)
        self._workspaces = {replica.place: Workspace(common) for replica in replicas}
        self._initialize()
        size = len(replicas)
        self.pairs: tuple[DevicePair, ...] = device_pairs(size) if reduction == "tree" else ()
        gradients, statistics = ThreadGroup(size), ThreadGroup(size)
        self._solvers = [
            _Solver(
                self,
                replica,
                _synchronization(gradients.join(rank, timeout), self.pairs),
                statistics.join(rank, timeout),
                options,
                2 * timeout,
            )
            for rank, replica in enumerate(replicas)
        ]
        name = replicas[0].helper.name
        self._threads = [SolverThread(f"dagexec-{name}-{replica.place}") for replica in replicas[1:]]

    def step(self, feeds: Feeds | None = None) -> dict[str, float]:
        """One step on all devices. See `ParallelModel.step`."""
        if self.closed:
            raise ClosedError(f"model {self.replicas[0].helper.name!r} is closed, or one of its steps has failed")
        shares = self._shares(feeds)
        outcome = _Outcome(len(self.replicas))
        jobs = [
            partial(outcome.run, rank, solver, share)
            for rank, (solver, share) in enumerate(zip(self._solvers, shares, strict=True))
        ]
        try:
            for thread, job in zip(self._threads, jobs[1:], strict=True):
                thread.begin(job)
            jobs[0]()
            for thread in self._threads:
                thread.wait()
        except BaseException as error:  # Ctrl-C
            self.closed = True
            self._solvers[0].abort(f"{type(error).__name__}: {error}")
            outcome.stop()
            for thread in self._threads:
                thread.wait()
            raise
        if outcome.errors:
            self.closed = True
            raise outcome.first_error()
        parts = len(self.places) * self.iter_size
        totals = dict.fromkeys(self.losses, 0.0)
        for sums in outcome.losses:
            for loss in totals:
                totals[loss] += sums[loss]  # one after the other, which `sum` does not do from Python 3.12 on
        return {loss: total / parts for loss, total in totals.items()}

    def workspace_of(self, place: ReplicaDevice) -> Workspace:
        return self._workspaces[place]

    def nets(self) -> tuple[Net, ...]:
        """The nets of gradients and of updates, device by device."""
        return tuple(net for solver in self._solvers for net in solver.nets)

    def close(self) -> None:
        """Join all threads and close the nets."""
        self.closed = True
        for thread in self._threads:
            thread.close()
        for solver in self._solvers:
            solver.close()


def _synchronization(world: CommonWorld, pairs: Sequence[DevicePair]) -> GradientSync:
    return TreeSync(world, pairs) if pairs else RingSync(world)


class _Outcome:
    """What the replicas return in one step. For operators that block, it is the run to be stopped when one fails."""

    def __init__(self, count: int) -> None:
        self._lock = threads().lock()
        self.stopped = False
        self.waits: list[ThreadWait] = []
        self.losses: list[dict[str, float]] = [{} for _ in range(count)]
        self.errors: list[BaseException] = []

    def run(self, rank: int, solver: _Solver, share: Sequence[dict[str, Array]]) -> None:
        """Do a replica's step. An error is kept, and ends the steps of the others."""
        try:
            with working_for(self):
                self.losses[rank] = solver.step(share)
        except BaseException as error:
            with self._lock:
                self.errors.append(error)
            solver.abort(f"{type(error).__name__}: {error}")
            self.stop()
            if not isinstance(error, Exception) and rank == 0:
                raise

    def stop(self) -> None:
        """End the waits of operators that block."""
        self.stopped = True
        for wait in tuple(self.waits):
            wait.notify()

    def first_error(self) -> BaseException:
        """The first error that is not a mere consequence of another replica's failure."""
        causes = (error for error in self.errors if not _is_echo(error))
        return next(causes, self.errors[0])


def _is_echo(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, CommunicationError | RunCancelledError):
            return True
        error = error.__cause__
    return False


class _Solver:
    """One replica: its nets, and its step."""

    def __init__(
        self,
        model: ThreadedModel,
        replica: Replica,
        synchronization: GradientSync,
        statistics: CommonWorld,
        options: RunOptions,
        timeout: float,
    ) -> None:
        place = replica.place
        workspace = model.workspace_of(place)
        for name in (*replica.inputs, DRAW):
            workspace.create_blob(place.blob(name))
        workspace.create_local_blob(COMMON_WORLD).value = statistics
        shared = model._shared | {COMMON_WORLD}
        sparse = sparse_gradients(replica.gradients)
        for gradient in sparse.values():
            for name in (gradient.indices, gradient.values):
                workspace.create_blob(place.blob(gathered(name)))
        self._model = model
        self._replica = replica
        self._workspace = workspace
        self._synchronization = synchronization
        self._statistics = statistics
        self._sparse = sparse
        name = replica.helper.name
        first = NetDef(
            name=f"{name}_{place}_gradients", op=[_on_host(place.put(op, shared)) for op in replica.forward_backward]
        )
        update = reading_gathered(replica.update, replica.gradients)
        second = NetDef(name=f"{name}_{place}_update", op=[place.put(op, shared) for op in update])
        self._gradient_net = workspace.build_net(first, options.net_type, options.num_workers)
        self._update_definition = second
        self._update_net: Net | None = None
        self._options = options
        self._timeout = timeout
        moved = [*replica.helper.parameters, *replica.helper.computed_parameters, *replica.helper.states]
        self._parameters = FlatBuffer([self._tensor(name) for name in moved])
        self._gradients: FlatBuffer | None = None
        self._merged: MergedMicroBatches | None = None

    @property
    def nets(self) -> tuple[Net, ...]:
        """Those there are: the net of updates is built in the first step."""
        return (self._gradient_net,) if self._update_net is None else (self._gradient_net, self._update_net)

    def step(self, share: Sequence[dict[str, Array]]) -> dict[str, float]:
        """The replica's step on its micro-batches: returns the sum of each loss over them."""
        model, replica = self._model, self._replica
        totals = dict.fromkeys(replica.losses, 0.0)
        slices: dict[str, list[Array]] = {}
        self._synchronization.on_start(self._parameters)
        for micro_batch, arrays in enumerate(share):
            model._feed(replica, arrays, micro_batch)
            self._run(self._gradient_net)
            for loss in replica.losses:
                totals[loss] += model._loss(replica, loss)
            gradients, merged = self._buffers()
            gradients.read()
            merged.add(micro_batch)
            for gradient in self._sparse.values():
                for name in (gradient.indices, gradient.values):
                    slices.setdefault(name, []).append(self._tensor(name).fetch())
        divisor = len(model.places) * model.iter_size
        update = self._synchronization.on_gradients_ready(gradients, divisor)
        self._take_slices(slices, divisor)
        if update:
            gradients.write()
            self._run(self._updates())
        return totals

    def abort(self, reason: str) -> None:
        """Tell the other replicas that this one has failed."""
        self._synchronization.world.abort(reason)
        self._statistics.abort(reason)

    def close(self) -> None:
        """Close the nets and leave the groups."""
        for net in self.nets:
            net.close()
        self._synchronization.world.close()
        self._statistics.close()

    def _take_slices(self, slices: dict[str, list[Array]], divisor: int) -> None:
        """The sparse gradients of all replicas, where the updates read them."""
        values = {gradient.values for gradient in self._sparse.values()}
        for name, pieces in slices.items():
            every = self._synchronization.on_slices_ready(np.concatenate(pieces))
            if name in values:
                divide(every, divisor)
            place = self._replica.place
            self._workspace.feed_blob(place.blob(gathered(name)), every, device=self._tensor(name).device)

    def _buffers(self) -> tuple[FlatBuffer, MergedMicroBatches]:
        """Memory for the dense gradients, whose sizes are known after the first run."""
        if self._gradients is None or self._merged is None:
            dense = [blob for blob in self._replica.gradients.values() if isinstance(blob, str)]
            self._gradients = FlatBuffer([self._tensor(name) for name in dense])
            self._merged = MergedMicroBatches(self._gradients, self._model.iter_size)
        return self._gradients, self._merged

    def _run(self, net: Net) -> None:
        """Run a net, no longer than the timeout: a device that hangs, or a queue that stays empty, ends the step."""
        if isinstance(net, BaseNet):
            net.run(timeout=self._timeout)
        else:
            net.run()

    def _updates(self) -> Net:
        """The net of updates, built when its inputs are there, so that it knows on which device they are."""
        if self._update_net is None:
            self._update_net = self._workspace.build_net(
                self._update_definition, self._options.net_type, self._options.num_workers
            )
        return self._update_net

    def _tensor(self, name: str) -> Tensor:
        return self._workspace.get_blob(self._replica.place.blob(name)).get(Tensor)


def _on_host(definition: OperatorDef) -> OperatorDef:
    """A sum over ranks continues on the host; `scheduler.copies` brings its tensors there and back."""
    if is_shared_sum(definition):
        definition.ClearField("device_option")
    return definition
