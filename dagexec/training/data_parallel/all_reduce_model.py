"""AllReduceModel: all devices in one net, with an all-reduce of each bucket of gradients among its operators."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dagexec.core.device import CPU
from dagexec.core.proto import NetDef
from dagexec.core.workspace import Workspace
from dagexec.errors import ClosedError
from dagexec.scheduler.nets.async_dag import AsyncDAGNet
from dagexec.scheduler.nets.dag import DAGNet
from dagexec.scheduler.nets.net import BaseNet
from dagexec.scheduler.nets.options import RunOptions
from dagexec.scheduler.nets.simple import SimpleNet
from dagexec.scheduler.observe.observers import Observer
from dagexec.training.data_parallel.bucketing import fill_buckets
from dagexec.training.data_parallel.joint_net import JointNet
from dagexec.training.data_parallel.pairing import merges_of
from dagexec.training.data_parallel.parallel_model import Feeds, ParallelModel
from dagexec.training.data_parallel.replica import DRAW, Replica
from dagexec.training.data_parallel.replica_devices import ReplicaDevice, sums_by_nccl

_POOLED: dict[str, type[DAGNet]] = {net.net_type: net for net in (DAGNet, AsyncDAGNet)}


class AllReduceModel(ParallelModel):
    """Replicas as parts of one net, in one workspace.

    Attributes:
        workspace: with the blobs of all replicas.
        buckets: the gradients that are summed together.
    """

    def __init__(
        self,
        replicas: Sequence[Replica],
        iter_size: int,
        common: Workspace | None,
        *,
        bucket_bytes: int,
        options: RunOptions,
        timeout: float | None = None,
    ) -> None:
        """By default the net is an async_dag one when there is a device other than the host, else a dag one.

        The run of a net is stopped after `timeout` seconds.
        """
        super().__init__(replicas, iter_size, common)
        self.workspace = Workspace(common)
        self._initialize()
        first = replicas[0]
        buckets = fill_buckets(first.forward_backward, first.gradients, self._parameter_types(), bucket_bytes)
        joint = JointNet(first.helper.name, replicas, buckets, iter_size, self._shared, sums_by_nccl(self.places))
        for replica in replicas:
            for name in (*replica.inputs, DRAW):
                self.workspace.create_blob(replica.place.blob(name))
        self.buckets = buckets
        self._joint = joint
        self._kind = options.net_type or ("dag" if all(place.device == CPU for place in self.places) else "async_dag")
        self._options = options
        self._timeout = timeout
        self._nets: dict[str, BaseNet] = {}
        if iter_size == 1:
            self._net("step", lambda: joint.step(merges_of(0, 1)))

    @property
    def step_net(self) -> BaseNet:
        """The net of a step; with micro-batches, of the last one, which the first step builds."""
        return self._nets["step"]

    def _net(self, name: str, make: Callable[[], NetDef], kind: str | None = None) -> BaseNet:
        """The net of that name, built when the blobs that it reads are on their devices."""
        if name not in self._nets:
            definition, pooled = make(), _POOLED.get(kind or self._kind)
            self._nets[name] = (
                SimpleNet(definition, self.workspace)
                if pooled is None
                else pooled(definition, self.workspace, num_workers=self._options.num_workers, options=self._options)
            )
        return self._nets[name]

    def _run(self, micro_batch: int, trace: Observer | None) -> None:
        """Run the nets of a micro-batch."""
        merges, joint = merges_of(micro_batch, self.iter_size), self._joint
        if merges.keep is None:
            self._net("step", lambda: joint.step(merges)).run(timeout=self._timeout, trace=trace)
        else:
            self._net("gradients", joint.gradients).run(timeout=self._timeout)
            self._net(f"keep {merges.keep}", lambda: joint.keep(merges)).run(timeout=self._timeout)
            if joint.keeps_slices:
                self._net(f"slices {micro_batch}", lambda: joint.keep_slices(micro_batch), "simple").run(
                    timeout=self._timeout
                )

    def step(self, feeds: Feeds | None = None, *, trace: Observer | None = None) -> dict[str, float]:
        """One step; `trace` is told of the run of the step's net. See `ParallelModel.step`."""
        if self.closed:
            raise ClosedError(f"model {self.replicas[0].helper.name!r} is closed, or one of its steps has failed")
        shares = self._shares(feeds)
        totals = dict.fromkeys(self.losses, 0.0)
        try:
            for micro in range(self.iter_size):
                for replica, share in zip(self.replicas, shares, strict=True):
                    self._feed(replica, share[micro], micro)
                self._run(micro, trace)
                for replica in self.replicas:
                    for loss in self.losses:
                        totals[loss] += self._loss(replica, loss)
        except BaseException:
            self.closed = True
            raise
        return {loss: total / (len(self.places) * self.iter_size) for loss, total in totals.items()}

    def workspace_of(self, place: ReplicaDevice) -> Workspace:
        return self.workspace

    def nets(self) -> tuple[BaseNet, ...]:
        """Those there are: with micro-batches they are built by the first step."""
        return tuple(self._nets.values())

    def close(self) -> None:
        self.closed = True
        for net in self._nets.values():
            net.close()
