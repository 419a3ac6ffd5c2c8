"""What ranks of several processes do together around a training, on ranks that are threads."""

from __future__ import annotations

import threading
import time

import pytest

from dagexec.errors import CommunicationError, StorageError
from dagexec.ops.families.communication import CommonWorld, barrier
from dagexec.training.distributed import on_first_rank
from dagexec.training.steps import LocalSteps
from dagexec.training.trainer import Trainer
from tests.ops.communication.ranks import on_ranks, results_of
from tests.training.small_task import BATCH, make_task

TIMEOUT = 0.4


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_ranks_wait_for_the_first_one_longer_than_their_timeout(ranks: int) -> None:
    did: list[int] = []

    def work(world: CommonWorld) -> float:
        def save() -> None:
            threading.Event().wait(3 * TIMEOUT)
            did.append(world.rank)

        started = time.monotonic()
        on_first_rank(world, save)
        seconds = time.monotonic() - started
        barrier(world)
        return seconds

    assert min(results_of(on_ranks(ranks, work, timeout=TIMEOUT))) >= 2 * TIMEOUT
    assert did == [0]


def test_all_ranks_are_told_what_the_first_one_failed_with() -> None:
    def work(world: CommonWorld) -> None:
        def save() -> None:
            raise StorageError("no space left")

        on_first_rank(world, save)

    first, *others = on_ranks(3, work)
    assert isinstance(first, StorageError)
    for other in others:
        assert isinstance(other, CommunicationError)
        assert "rank 0 failed: StorageError: no space left" in str(other)


@pytest.mark.slow
def test_each_rank_drops_other_elements_and_the_same_ones_when_it_begins_anew() -> None:
    def work(world: CommonWorld) -> bytes:
        with Trainer(make_task(0), world=world, num_workers=1, net_type="simple") as trainer:
            assert isinstance(trainer.steps, LocalSteps)
            [mask] = [out for op in trainer.steps.helper.net.op if op.type == "Dropout" for out in op.output[1:]]
            trainer.steps.run({name: array[:BATCH] for name, array in trainer.task.train.items()})
            return trainer.steps.activations.fetch_blob(mask).tobytes()

    first, again = (results_of(on_ranks(3, work)) for _ in range(2))
    assert len(set(first)) == 3
    assert first == again


def test_without_other_ranks_the_action_is_called_on_this_thread() -> None:
    found: list[threading.Thread] = []
    on_first_rank(None, lambda: found.append(threading.current_thread()))
    assert found == [threading.current_thread()]
