"""The collectives between processes, over MPI. This file is also the program that the ranks run."""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path

import numpy as np
import pytest

from dagexec.errors import CommunicationError, ShapeError
from dagexec.ops.families.communication.collectives import all_gather, all_reduce, broadcast
from dagexec.ops.families.communication.common_world import CommonWorld, Tag, connect
from tests.mpi import run

SIZES = (0, 1, 7, 1000, 300_001)


def expected_sum(size: int, ranks: int) -> np.ndarray:
    parts = [values(size, rank) for rank in range(ranks)]
    return np.sum(parts, axis=0, dtype=np.float64)


def values(size: int, rank: int) -> np.ndarray:
    return np.random.default_rng(rank).standard_normal(size).astype(np.float32)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_rank_gets_the_sum_and_the_bytes_of_a_group_of_threads(ranks: int) -> None:
    status, out, err = run(ranks, __file__, "sums")
    assert status == 0, err
    assert sorted(out.split()) == sorted(f"right-{rank}" for rank in range(ranks))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("killed", "rank 1 .*signal 9|rank 1 failed"),
        ("raises", "rank 1 failed: .*the disk is full"),
        ("leaves", "rank 1 has left the group"),
        ("silent", "rank 1 does not answer; waited 1 s in all-reduce"),
        ("other order", "rank 0 is in all-reduce .*rank 1 in broadcast .*all ranks must call the same collectives"),
        ("other shape", "rank 1 sends <f4 \\(3,\\), and rank 0 expects <f4 \\(4,\\)"),
    ],
)
def test_the_rank_that_ends_the_others_is_named(what: str, message: str) -> None:
    status, out, err = run(3, __file__, what, timeout=30)
    assert status != 0
    assert re.search(message, " ".join((out + err).split())), out + err


def _sums(world: CommonWorld) -> None:
    for size in SIZES:
        for algorithm in ("tree", "ring"):
            array = values(size, world.rank)
            all_reduce(world, array, algorithm=algorithm)
            np.testing.assert_allclose(array, expected_sum(size, world.size), 1e-5, 1e-5)
            gathered = np.empty((world.size, size), np.float32)
            all_gather(world, array, gathered)
            assert all(row.tobytes() == array.tobytes() for row in gathered)  # the same bytes on all ranks
            if algorithm == "tree" and world.size == 4:
                parts = [values(size, rank) for rank in range(4)]
                assert array.tobytes() == ((parts[0] + parts[1]) + (parts[2] + parts[3])).tobytes()
    array = np.full(5, world.rank)
    broadcast(world, array, root=1)
    assert (array == 1).all()


def _fail(world: CommonWorld, what: str) -> None:
    if world.rank == 1:
        if what == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "raises":
            with world.collective("all-reduce by tree"):
                raise OSError("the disk is full")
        if what == "leaves":
            world.close()
            return
        if what == "silent":
            os.kill(os.getpid(), signal.SIGSTOP)
        if what == "other order":
            broadcast(world, np.ones(4, np.float32), root=1)
            return
        if what == "other shape":
            world.send(np.ones(3, np.float32), 0, Tag(0, "all-reduce by tree"))
            return
    all_reduce(world, np.ones(4, np.float32))


def main() -> None:
    what = sys.argv[1]
    world = connect("mpi", "test", -1, -1, timeout=1.0 if what == "silent" else 20.0)
    if what == "sums":
        _sums(world)
        print(f"right-{world.rank}", flush=True)
        world.close()
        return
    try:
        _fail(world, what)
    except (CommunicationError, ShapeError, OSError) as error:
        print(error, file=sys.stderr, flush=True)
        from mpi4py import MPI

        if world.rank == 0:
            MPI.COMM_WORLD.Abort(1)
        raise


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[3]))
    main()
