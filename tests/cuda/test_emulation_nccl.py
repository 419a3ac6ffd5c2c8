"""The emulated NCCL: every collective, groups, streams; ranks that ask for different things are an error."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from dagexec.devices.cuda.binding import cupy
from tests.cuda.emulated import emulated
from tests.cuda.emulated.errors import EmulationError
from tests.cuda.memory_copies import from_device, to_device

RANKS = 3


class Ranks:
    """A communicator, a stream, 12 numbers to send and room for 36 on each of three devices."""

    def __init__(self, dtype: Any = np.float32) -> None:
        cuda = cupy().cuda
        self.nccl = cuda.nccl
        self.members = self.nccl.NcclCommunicator.initAll(RANKS)
        self.sent = [np.arange(12).astype(dtype) + np.array(rank, dtype) for rank in range(RANKS)]
        self.streams, self.send, self.receive = [], [], []
        for device in range(RANKS):
            with cuda.Device(device):
                self.streams.append(cuda.Stream(non_blocking=True))
                self.send.append(to_device(self.sent[device]))
                self.receive.append(to_device(np.zeros(36, dtype)))

    def all(self, name: str, *arguments: int) -> list[np.ndarray[Any, Any]]:
        """What each rank has received."""
        self.nccl.groupStart()
        for rank, member in enumerate(self.members):
            pointers = self.send[rank].data.ptr, self.receive[rank].data.ptr
            getattr(member, name)(*pointers, *arguments, self.streams[rank].ptr)
        self.nccl.groupEnd()
        found = []
        for device in range(RANKS):
            with cupy().cuda.Device(device):
                self.streams[device].synchronize()
                found.append(from_device(self.receive[device]))
        return found


@pytest.mark.slow
@pytest.mark.parametrize("seed", [None, 0, 1])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16, np.int64])
def test_collectives_give_every_rank_its_part(dtype: Any, seed: int | None) -> None:
    kinds = {np.float32: 7, np.float16: 6, ml_dtypes.bfloat16: 9, np.int64: 4}
    with emulated(RANKS, asynchronous=seed is not None, seed=seed):
        ranks, kind = Ranks(dtype), kinds[dtype]
        total = sum(one.astype(np.float64) for one in ranks.sent)
        for found in ranks.all("allReduce", 12, kind, ranks.nccl.NCCL_SUM):
            assert (found[:12].astype(np.float64) == total).all()
        for rank, found in enumerate(ranks.all("reduce", 12, kind, ranks.nccl.NCCL_MAX, 1)):
            assert (found[:12] == (ranks.sent[2] if rank == 1 else total.astype(dtype))).all()
        for found in ranks.all("broadcast", 12, kind, 2):
            assert (found[:12] == ranks.sent[2]).all()
        for found in ranks.all("allGather", 12, kind):
            assert (found == np.concatenate(ranks.sent)).all()
        for rank, found in enumerate(ranks.all("reduceScatter", 4, kind, ranks.nccl.NCCL_SUM)):
            assert (found[:4].astype(np.float64) == total[4 * rank : 4 * rank + 4]).all()


def test_communicators_made_by_an_identity_know_their_rank_size_and_device() -> None:
    with emulated(2):
        nccl = cupy().cuda.nccl
        identity, made = nccl.get_unique_id(), []
        nccl.groupStart()
        for rank in range(2):
            with cupy().cuda.Device(1 - rank):
                made.append(nccl.NcclCommunicator(2, identity, rank))
        nccl.groupEnd()
        assert [(one.rank_id(), one.size(), one.device_id()) for one in made] == [(0, 2, 1), (1, 2, 0)]
        made[0].destroy()
        with pytest.raises(nccl.NcclError, match="INVALID_ARGUMENT"):
            made[0].size()


def test_ranks_that_ask_for_different_collectives_or_not_at_all_are_an_error() -> None:
    with emulated(RANKS):
        ranks = Ranks()
        ranks.nccl.groupStart()
        for rank, member in enumerate(ranks.members):
            pointers = ranks.send[rank].data.ptr, ranks.receive[rank].data.ptr
            member.allReduce(*pointers, 12 - (rank == 1), 7, 0, ranks.streams[rank].ptr)
        with pytest.raises(EmulationError, match="different collectives"):
            ranks.nccl.groupEnd()
    with pytest.raises(EmulationError, match=r"waits for ranks \[1, 2\]"), emulated(RANKS):  # noqa: PT012
        ranks = Ranks()
        pointers = ranks.send[0].data.ptr, ranks.receive[0].data.ptr
        ranks.members[0].allReduce(*pointers, 12, 7, 0, ranks.streams[0].ptr)


def test_a_collective_comes_after_what_is_on_every_stream_and_before_what_follows() -> None:
    with emulated(RANKS, asynchronous=True, seed=4) as gpu:
        ranks, runtime = Ranks(), cupy().cuda.runtime
        for rank in range(RANKS):
            with cupy().cuda.Device(rank):
                runtime.memsetAsync(ranks.send[rank].data.ptr, 0, 48, ranks.streams[rank].ptr)
        assert all((found[:12] == 0).all() for found in ranks.all("allReduce", 12, 7, 0))
        assert not gpu.races
