"""Ranks that work together: point-to-point messages, the collectives written over them, and the operators.

| Module | What it has |
|---|---|
| `common_world` | `CommonWorld`: what a transport has to offer, and the table of transports |
| `collectives` | all-reduce as a tree and as a ring, reduce, broadcast, all-gather, barrier |
| `thread_group` | the transport between threads of one process |
| `mpi` | the transport between processes |
| `buckets` | PackBucket, UnpackBucket, BucketSum: several tensors as one flat array |
| `device_sum` | NCCLAllreduce, NCCLBroadcast: what one net has on several devices |
| `operators` | CreateCommonWorld, Allreduce, Broadcast, Allgather, Reduce, Barrier, DestroyCommonWorld |
| `messages` | CloneCommonWorld, ReduceScatter, SendTensor, ReceiveTensor |
| `store`, `store_operators` | values by key, in files or on a Redis server |
"""

from dagexec.ops.families.communication.collectives import (
    all_gather,
    all_reduce,
    all_reduce_ring,
    all_reduce_tree,
    barrier,
    broadcast,
    reduce,
)
from dagexec.ops.families.communication.common_world import (
    CommonWorld,
    CommunicationStatistics,
    connect,
    register_transport,
)
from dagexec.ops.families.communication.mpi import MPIWorld, join_mpi
from dagexec.ops.families.communication.thread_group import ThreadGroup, ThreadWorld

__all__ = [
    "CommonWorld",
    "CommunicationStatistics",
    "MPIWorld",
    "ThreadGroup",
    "ThreadWorld",
    "all_gather",
    "all_reduce",
    "all_reduce_ring",
    "all_reduce_tree",
    "barrier",
    "broadcast",
    "connect",
    "join_mpi",
    "reduce",
    "register_transport",
]
