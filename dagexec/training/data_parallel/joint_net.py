"""One net for all devices: the replicas' operators side by side, and between them what is summed over devices.

A sum over devices goes up a binary tree of copies and BucketSum operators, is divided at the root, and goes down the
same tree by copies. All of these are operators like others, so the scheduler runs them beside the backward pass as soon
as their gradients are there; on devices they have streams of their own, as they wait for other devices most of the
time. On CUDA devices NCCL makes the sum instead, where it is installed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dagexec.core.arguments import make_argument
from dagexec.core.device import CPU, Device
from dagexec.core.proto import NetDef, OperatorDef
from dagexec.training.data_parallel.batch_statistics import is_shared_sum
from dagexec.training.data_parallel.bucketing import Bucket, gathered, reading_gathered, sparse_gradients
from dagexec.training.data_parallel.pairing import Merges
from dagexec.training.data_parallel.replica import Replica
from dagexec.training.data_parallel.replica_devices import ReplicaDevice


class JointNet:
    """Makes the nets of a data parallel training in one workspace."""

    def __init__(
        self,
        name: str,
        replicas: Sequence[Replica],
        buckets: Sequence[Bucket],
        iter_size: int,
        shared: frozenset[str],
        nccl: bool = False,
    ) -> None:
        """The replicas are the same but for their places; blobs in `shared` are in no scope.

        With `nccl` sums over places are made by NCCL, in place of copies and additions.
        """
        self._name = name
        self._replicas = replicas
        self._places = [replica.place for replica in replicas]
        self._buckets = buckets
        self._iter_size = iter_size
        self._shared = shared
        self._nccl = nccl
        self._sparse = sparse_gradients(replicas[0].gradients)
        self._kept_slices = sorted(
            {name for gradient in self._sparse.values() for name in (gradient.indices, gradient.values)}
        )

    def gradients(self) -> NetDef:
        """Forward and backward pass, and the gradients put into buckets: all micro-batches of a step but the last."""
        return self._net("gradients", self._side_by_side({bucket.name: [] for bucket in self._buckets}))

    def step(self, merges: Merges) -> NetDef:
        """The last micro-batch of a step: gradients are added to those kept, summed over devices, and applied."""
        behind = {
            bucket.name: [*self._merged(bucket, merges), *communicating(self._all_reduced(bucket), number)]
            for number, bucket in enumerate(self._buckets)
        }
        operators = self._side_by_side(behind)
        operators += self._gathered_slices()
        updates = [reading_gathered(replica.update, replica.gradients) for replica in self._replicas]
        operators += self._interleaved(updates)
        operators += self._computed_from_first()
        return self._net("step", operators)

    def keep(self, merges: Merges) -> NetDef:
        """Keep the gradients of a micro-batch, added to those kept before that they belong to."""
        operators: list[OperatorDef] = []
        for bucket in self._buckets:
            operators += self._merged(bucket, merges)
            operators += [
                self._on(place, "Copy", [bucket.name], [_kept(bucket.name, merges.keep)]) for place in self._places
            ]
        return self._net(f"keep_{merges.keep}", operators)

    @property
    def keeps_slices(self) -> bool:
        """True when there are sparse gradients."""
        return bool(self._kept_slices)

    def keep_slices(self, micro_batch: int) -> NetDef:
        """Keep the sparse gradients of a micro-batch."""
        operators = [
            self._on(place, "Copy", [blob], [_kept(blob, micro_batch)])
            for place in self._places
            for blob in self._kept_slices
        ]
        return self._net(f"keep_slices_{micro_batch}", operators)

    def _net(self, part: str, operators: Iterable[OperatorDef]) -> NetDef:
        return NetDef(name=f"{self._name}_{part}", op=operators)

    def _side_by_side(self, behind: dict[str, list[OperatorDef]]) -> list[OperatorDef]:
        """The forward and backward operators of all replicas, each bucket packed, with `behind` it."""
        operators: list[OperatorDef] = []
        lists = [replica.forward_backward for replica in self._replicas]
        for index, row in enumerate(zip(*lists, strict=True)):
            if is_shared_sum(row[0]):
                operators += self._summed_statistics(row[0])
            else:
                operators += [place.put(op, self._shared) for place, op in zip(self._places, row, strict=True)]
            for number, bucket in enumerate(self._buckets):
                if bucket.after == index:
                    packed = (self._on(place, "PackBucket", bucket.gradients, [bucket.name]) for place in self._places)
                    operators += communicating(packed, number)
                    operators += behind[bucket.name]
        return operators

    def _summed_statistics(self, definition: OperatorDef) -> list[OperatorDef]:
        """An Allreduce over ranks, as operators between the blobs of this net."""
        blobs = list(definition.output)
        packed = f"{blobs[0]}_packed"
        return [
            *(self._on(place, "PackBucket", blobs, [packed]) for place in self._places),
            *communicating(self._over_places(packed, 1)),
            *(self._on(place, "UnpackBucket", [packed, *blobs], blobs) for place in self._places),
        ]

    def _merged(self, bucket: Bucket, merges: Merges) -> list[OperatorDef]:
        return [
            self._on(place, "BucketSum", [_kept(bucket.name, level), bucket.name], [bucket.name])
            for level in merges.levels
            for place in self._places
        ]

    def _all_reduced(self, bucket: Bucket) -> list[OperatorDef]:
        """The mean of a bucket on all devices, and from there in the gradients."""
        summed = self._over_places(bucket.name, len(self._places) * self._iter_size)
        blobs = bucket.gradients
        return summed + [self._on(place, "UnpackBucket", [bucket.name, *blobs], blobs) for place in self._places]

    def _over_places(self, blob: str, divisor: int) -> list[OperatorDef]:
        """`blob` on every device becomes the sum over all devices, divided by `divisor`."""
        if self._nccl:
            return self._by_nccl(blob, divisor)
        count = len(self._places)
        levels = [1 << level for level in range((count - 1).bit_length())]
        pairs = [
            [
                (self._places[number], self._places[number + distance])
                for number in range(0, count - distance, 2 * distance)
            ]
            for distance in levels
        ]
        operators: list[OperatorDef] = []
        for row in pairs:
            for into, other in row:
                operators += self._added(into, other, blob)
        if divisor > 1 and operators:
            operators[-1].arg.append(make_argument("divisor", divisor))
        elif divisor > 1:
            operators.append(self._on(self._places[0], "BucketSum", [blob], [blob], divisor))
        for row in reversed(pairs):
            operators += [copy_between_places(into, other, blob, blob) for into, other in row]
        return operators

    def _by_nccl(self, blob: str, divisor: int) -> list[OperatorDef]:
        """As `_over_places`, by one operator for all places, and a division on each."""
        blobs = [place.blob(blob) for place in self._places]
        summed = OperatorDef(type="NCCLAllreduce", input=blobs, output=blobs)
        summed.device_option.CopyFrom(self._places[0].device.to_option())
        divided = [self._on(place, "BucketSum", [blob], [blob], divisor) for place in self._places if divisor > 1]
        return [summed, *divided]

    def _added(self, into: ReplicaDevice, other: ReplicaDevice, blob: str) -> list[OperatorDef]:
        """Add the blob of one place to that of another, by way of a copy when they are on different devices."""
        if into.device == other.device:
            here, copies = other.blob(blob), []
        else:
            received = f"{blob}_from_{other.number}"
            here, copies = into.blob(received), [copy_between_places(other, into, blob, received)]
        added = OperatorDef(type="BucketSum", input=[into.blob(blob), here], output=[into.blob(blob)])
        added.device_option.CopyFrom(into.device.to_option())
        return [*copies, added]

    def _gathered_slices(self) -> list[OperatorDef]:
        """The indices and values of all devices and micro-batches, concatenated, on every device."""
        operators: list[OperatorDef] = []
        divisor = len(self._places) * self._iter_size
        for blob in self._kept_slices:
            earlier = [_kept(blob, micro_batch) for micro_batch in range(self._iter_size - 1)]
            pieces = [place.blob(name) for place in self._places for name in (*earlier, blob)]
            for place in self._places:
                joined = OperatorDef(
                    type="Concat", input=pieces, output=[place.blob(gathered(blob)), place.blob(f"{blob}_lengths")]
                )
                joined.arg.append(make_argument("axis", 0))
                joined.device_option.CopyFrom(place.device.to_option())
                operators.append(joined)
        for gradient in self._sparse.values() if divisor > 1 else ():
            values = gathered(gradient.values)
            operators += [self._on(place, "BucketSum", [values], [values], divisor) for place in self._places]
        return operators

    def _computed_from_first(self) -> list[OperatorDef]:
        """The first device's computed parameters on all devices, unless they are the same there anyway."""
        first = self._replicas[0]
        if first.shares_statistics:
            return []
        return [
            copy_between_places(self._places[0], place, name, name)
            for name in first.computed
            for place in self._places[1:]
        ]

    def _interleaved(self, lists: Sequence[Sequence[OperatorDef]]) -> list[OperatorDef]:
        return [
            place.put(definition, self._shared)
            for row in zip(*lists, strict=True)
            for place, definition in zip(self._places, row, strict=True)
        ]

    def _on(
        self, place: ReplicaDevice, op_type: str, inputs: Sequence[str], outputs: Sequence[str], divisor: int = 1
    ) -> OperatorDef:
        definition = OperatorDef(type=op_type, input=inputs, output=outputs)
        if divisor > 1:
            definition.arg.append(make_argument("divisor", divisor))
        return place.put(definition)


def _kept(blob: str, number: int | None) -> str:
    return f"{blob}_kept_{number}"


_GROUPS = 4
"""Groups of streams that buckets use in turns, so that a waiting bucket rarely delays another."""


def communicating(operators: Iterable[OperatorDef], bucket: int = 0) -> list[OperatorDef]:
    """The operators, on streams of their own: those of bucket number `bucket`."""
    listed = list(operators)
    for definition in listed:
        definition.arg.append(make_argument("stream_group", f"communication_{bucket % _GROUPS}"))
    return listed


def copy_between_places(source: ReplicaDevice, target: ReplicaDevice, blob: str, copy: str) -> OperatorDef:
    """The operator that copies `blob` of one place to `copy` of another."""
    return copy_operator(source.device, source.blob(blob), target.device, target.blob(copy))


def copy_operator(source: Device, blob: str, target: Device, copy: str) -> OperatorDef:
    """The operator that copies `blob`, which is on `source`, to `copy` on `target`; the device that gets it runs it.

    A copy to the host is of the device that gives.
    """
    to_host = target == CPU and source != CPU
    definition = OperatorDef(type="EnsureCPUOutput" if to_host else "Copy", input=[blob], output=[copy])
    definition.device_option.CopyFrom((source if to_host else target).to_option())
    return definition
