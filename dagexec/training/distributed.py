"""One model on several processes: the operators that sum its gradients over all ranks, and the checks around them.

Each rank trains on its part of every batch. The gradient of its loss is weighted with its share of the samples, so the
sum over the ranks is the gradient of the whole batch, and every rank makes the same update.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Sequence

import numpy as np

from dagexec.core.proto import NetDef
from dagexec.core.workspace import Workspace
from dagexec.errors import CommunicationError, GradientError
from dagexec.ops.families.communication import CommonWorld, all_gather, broadcast
from dagexec.platform.threads import ThreadWait, threads
from dagexec.training.model_helper import ModelHelper

WORLD = "comm_world"
"""The blob that holds a rank's CommonWorld."""

BUCKET_BYTES = 1 << 20
"""Gradients are summed in pieces of about so many bytes: long enough to pay for a message, short enough to overlap."""


def share_of(rank: int, size: int, samples: int) -> slice:
    """The samples of a batch that rank `rank` of `size` works on; they differ by one sample at most."""
    return slice(samples * rank // size, samples * (rank + 1) // size)


def draw_for_rank(net: NetDef, rank: int) -> None:
    """Have operators that draw random numbers, such as Dropout, draw others on every rank than on rank 0."""
    if rank == 0:
        return
    for definition in net.op:
        if definition.device_option.HasField("random_seed"):
            seed = f"{definition.device_option.random_seed}/rank {rank}"
            definition.device_option.random_seed = zlib.crc32(seed.encode())


def add_all_reduce(helper: ModelHelper, *, bucket_bytes: int = BUCKET_BYTES, algorithm: str = "ring") -> int:
    """Append to the net operators that sum the gradients over the ranks of blob WORLD; returns the number of buckets.

    Gradients of the last layers go first, since they are there first. The statistics of batch normalization become the
    means over the ranks. Raises GradientError for a sparse gradient, which is named.
    """
    pending: list[tuple[str, int]] = []
    for name in reversed(helper.params):
        grad = helper.params_to_grad.get(name)
        if grad is None:
            continue
        if not isinstance(grad, str):
            raise GradientError(
                f"model {helper.name!r}: the gradient of {name!r} is sparse ({grad}); only dense gradients can be "
                f"summed over processes: use Gather with dense_gradient=1"
            )
        pending.append((grad, 4 * int(np.prod(helper.parameters[name]))))
    buckets = _buckets(pending, bucket_bytes)
    for number, bucket in enumerate(buckets):
        flat = f"bucket_{number}"
        helper.add_operator("PackBucket", bucket, [flat])
        helper.add_operator("Allreduce", [WORLD, flat], [flat], algorithm=algorithm)
        helper.add_operator("UnpackBucket", [flat, *bucket], bucket)
    for name in helper.computed_parameters:
        helper.add_operator("Allreduce", [WORLD, name], [name], average=1)
    return len(buckets)


def _buckets(gradients: Sequence[tuple[str, int]], bucket_bytes: int) -> list[list[str]]:
    """The gradients in order, cut where a bucket is full."""
    buckets: list[list[str]] = []
    filled = bucket_bytes
    for name, nbytes in gradients:
        if filled >= bucket_bytes:
            buckets.append([])
            filled = 0
        buckets[-1].append(name)
        filled += nbytes
    return buckets


def on_first_rank(world: CommonWorld | None, action: Callable[[], object]) -> None:
    """Have rank 0 call `action`, on a thread of its own, while the others wait as long as that takes.

    Rank 0 tells them several times within the timeout that it is at work, so a slow disk is not taken for a rank that
    hangs. Without a world `action` is just called. Raises what `action` raises, on rank 0; CommunicationError that
    names it on the others.
    """
    if world is None or world.size == 1:
        action()
        return
    done = np.zeros(1, np.uint8)
    if world.rank != 0:
        while not done[0]:
            broadcast(world, done)
        return
    work = _Work(action)
    while not done[0]:
        done[0] = work.wait(world.timeout / 4)
        if work.error is not None:
            world.abort(f"{type(work.error).__name__}: {work.error}")
            raise work.error
        broadcast(world, done)


class _Work:
    """A call on a thread of its own.

    Attributes:
        error: what it raised.
    """

    def __init__(self, action: Callable[[], object]) -> None:
        self.error: BaseException | None = None
        self._action = action
        self._over = ThreadWait()
        self._thread = threads().start(self._run, "dagexec-first-rank")

    def wait(self, seconds: float) -> bool:
        """True when it is over within so many seconds."""
        if not self._over.wait(seconds):
            return False
        self._thread.join()
        return True

    def _run(self) -> None:
        try:
            self._action()
        except BaseException as error:
            self.error = error
        finally:
            self._over.notify()


def check_equal(world: CommonWorld, workspace: Workspace, blobs: Sequence[str]) -> None:
    """Raise CommunicationError, on every rank, unless all ranks hold the same bytes in `blobs`.

    The message names the blob and the ranks that differ from rank 0.
    """
    if world.size == 1:
        return
    digests = np.zeros((len(blobs), 16), np.uint8)
    for row, name in zip(digests, blobs, strict=True):
        array = workspace.fetch_blob(name)
        digest = hashlib.blake2b(f"{array.dtype} {array.shape}".encode() + array.tobytes(), digest_size=16)
        row[:] = np.frombuffer(digest.digest(), np.uint8)
    everybody = np.empty((world.size, *digests.shape), np.uint8)
    all_gather(world, digests, everybody)
    for number, name in enumerate(blobs):
        others = [rank for rank in range(world.size) if (everybody[rank, number] != everybody[0, number]).any()]
        if others:
            raise CommunicationError(
                f"rank {world.rank}: parameters differ between ranks: {name!r} of ranks {others} is not that of rank 0",
                rank=others[0],
            )
