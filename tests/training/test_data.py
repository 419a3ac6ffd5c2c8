from __future__ import annotations

import gc
import threading
import traceback
import weakref
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagexec.errors import ClosedError, DataError
from dagexec.platform.threads import new_gate
from dagexec.platform.threads import threads as thread_source
from dagexec.scheduler.exploration import explore, explore_seeds, systematic
from dagexec.scheduler.exploration.strategies import EarliestFirst
from dagexec.training.data import BatchLoader, epoch_order, sample_generator

Array = npt.NDArray[Any]
X = np.arange(23, dtype=np.float32)
ARRAYS = {"x": X[:, None] * np.ones(3, np.float32), "label": np.arange(23)}


def labels(loader: BatchLoader, count: int) -> list[list[int]]:
    return [loader.take()["label"].tolist() for _ in range(count)]


def test_an_epoch_has_every_sample_once_and_each_epoch_another_order() -> None:
    with BatchLoader(ARRAYS, 5, drop_last=False, seed=3, epochs=3) as loader:
        batches = list(loader)
    assert [len(batch["label"]) for batch in batches] == [5, 5, 5, 5, 3] * 3
    epochs = [np.concatenate([batch["label"] for batch in batches[5 * e : 5 * e + 5]]).tolist() for e in range(3)]
    assert all(sorted(epoch) == list(range(23)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    for batch in batches:
        assert (batch["x"] == batch["label"][:, None]).all()


@pytest.mark.filterwarnings("error")
def test_every_seed_of_64_bits_has_an_order_of_its_own() -> None:
    seeds = [0, 1, 2**63 - 1, 2**63, 2**63 + 1, 2**64 - 2, -1]
    assert len({epoch_order(50, seed, 3).tobytes() for seed in seeds}) == len(seeds)
    assert len({sample_generator(seed, 3, 7).random() for seed in seeds}) == len(seeds)


def test_the_order_of_an_epoch_is_the_same_on_every_machine_and_version() -> None:
    assert epoch_order(8, 0, 0).tolist() == [0, 2, 1, 5, 4, 3, 6, 7]
    words = [int(word) for word in np.random.Philox(key=[7, 2]).random_raw(50)]
    assert epoch_order(50, 7, 2).tolist() == sorted(range(50), key=lambda index: words[index])


@settings(max_examples=30, deadline=None)
@given(
    count=st.integers(1, 30), size=st.integers(1, 9), start=st.integers(0, 20), readers=st.integers(1, 4),
    prefetch=st.integers(1, 5), drop=st.booleans(), seed=st.integers(-5, 2**70),
)  # fmt: skip
def test_batches_are_the_same_from_any_start_with_any_number_of_threads(
    count: int, size: int, start: int, readers: int, prefetch: int, drop: bool, seed: int
) -> None:
    if drop and count < size:
        return
    arrays = {"label": np.arange(count)}
    options: dict[str, Any] = {"seed": seed, "drop_last": drop, "transform": add_noise}
    with BatchLoader(arrays, size, **options) as loader:
        whole = [loader.take()["label"].tobytes() for _ in range(start + 4)]
    with BatchLoader(arrays, size, start_step=start, threads=readers, prefetch=prefetch, **options) as loader:
        assert loader.step == start
        assert [loader.take()["label"].tobytes() for _ in range(4)] == whole[start:]
        assert loader.step == start + 4
        assert loader.epoch == (start + 4) // loader.steps_per_epoch


def add_noise(sample: dict[str, Array], random: np.random.Generator) -> Mapping[str, Array]:
    return {"label": sample["label"] + random.random()}


def test_what_a_transform_draws_depends_on_seed_epoch_and_sample_alone() -> None:
    def noise(seed: int, **options: Any) -> dict[tuple[int, int], float]:
        found = {}
        with BatchLoader({"label": np.arange(6)}, 2, seed=seed, epochs=2, transform=add_noise, **options) as loader:
            for step, batch in enumerate(loader):
                for value in batch["label"].tolist():
                    found[step // 3, int(value)] = value - int(value)
        return found

    first = noise(1)
    assert len(set(first.values())) == 12
    assert noise(1, shuffle=False, threads=3) == first
    assert not set(noise(2).values()) & set(first.values())


def test_without_shuffling_the_samples_come_as_they_are() -> None:
    with BatchLoader(ARRAYS, 10, shuffle=False) as loader:
        assert labels(loader, 3) == [list(range(10)), list(range(10, 20)), list(range(10))]


def test_the_error_of_a_reader_reaches_the_trainer_with_its_traceback_after_the_batches_before_it() -> None:
    def fail_at_11(sample: dict[str, Array], _random: np.random.Generator) -> Mapping[str, Array]:
        if sample["label"] == 11:
            raise OSError("the file is gone")
        return sample

    with BatchLoader(ARRAYS, 5, shuffle=False, threads=3, prefetch=4, transform=fail_at_11) as loader:
        assert labels(loader, 2) == [list(range(5)), list(range(5, 10))]
        for _ in range(2):
            with pytest.raises(
                DataError, match=r"batch 2 \(epoch 0, batch 2 of 4\).*OSError: the file is gone"
            ) as caught:
                loader.take()
            assert "fail_at_11" in "".join(traceback.format_exception(caught.value))
            assert isinstance(caught.value.__cause__, OSError)


def test_an_array_that_gives_other_than_it_was_asked_for_is_an_error() -> None:
    class Short:
        def __len__(self) -> int:
            return 10

        def __getitem__(self, indices: npt.NDArray[np.intp]) -> Array:
            return np.zeros(1)

    with BatchLoader({"x": Short()}, 4) as loader, pytest.raises(DataError, match=r"gave shape \(1,\) for 4 samples"):
        loader.take()


class Counted:
    """Samples that count how often they are read, and can be held back."""

    def __init__(self) -> None:
        self.reads: list[int] = []
        self.gate = threading.Semaphore(0)
        self.read = threading.Semaphore(0)

    def __len__(self) -> int:
        return 100

    def __getitem__(self, indices: npt.NDArray[np.intp]) -> Array:
        self.gate.acquire()
        self.reads.append(int(indices[0]))
        self.read.release()
        return indices


@pytest.mark.slow
def test_no_more_batches_are_read_ahead_than_asked_for() -> None:
    def scenario() -> tuple[int, ...]:
        reads: list[int] = []

        class Samples:
            def __len__(self) -> int:
                return 100

            def __getitem__(self, indices: npt.NDArray[np.intp]) -> Array:
                reads.append(int(indices[0]))
                return indices

        taken = 0
        with BatchLoader({"x": Samples()}, 1, shuffle=False, threads=2, prefetch=2) as loader:
            for _ in range(3):
                assert loader.take()["x"].tolist() == [taken]
                taken += 1
                assert len(reads) <= taken + 2, (reads, taken)
        assert max(Counter(reads).values()) == 1
        return tuple(reads)

    for found in (systematic(scenario, limit=400), explore_seeds(scenario, range(100))):
        assert found.failed is None, found.failed


def test_a_batch_is_read_while_the_trainer_is_busy_with_the_one_before() -> None:
    samples = Counted()
    with BatchLoader({"x": samples}, 1, shuffle=False, prefetch=2) as loader:
        samples.gate.release()
        assert loader.take()["x"].tolist() == [0]
        samples.gate.release(2)  # nobody asks for these
        for _ in range(3):
            samples.read.acquire()
        assert samples.reads == [0, 1, 2]
        statistics = loader.statistics()
        assert (statistics.step, statistics.samples) == (1, 1)
        samples.gate.release(10)


@pytest.mark.slow
def test_closing_ends_the_threads_and_whoever_waits_in_any_order() -> None:
    def scenario() -> None:
        ends: list[str] = []
        loader = BatchLoader({"x": np.arange(4)}, 1, threads=2, prefetch=1)

        def take() -> None:
            try:
                while True:
                    loader.take()
            except ClosedError:
                ends.append("closed")

        taker = thread_source().start(take, "taker")
        loader.close()
        taker.join()
        assert ends == ["closed"]
        assert not any(thread.is_alive() for thread in loader._threads)

    for found in (systematic(scenario, limit=400), explore_seeds(scenario, range(100))):
        assert found.failed is None, found.failed


def test_a_reader_that_hangs_does_not_hang_close() -> None:
    def scenario() -> None:
        gate = new_gate()

        def hang(sample: dict[str, Array], _random: np.random.Generator) -> Mapping[str, Array]:
            gate.acquire()
            return sample

        loader = BatchLoader({"x": np.arange(4)}, 1, transform=hang)
        with pytest.raises(DataError, match=r"batch 0 was not read within 1\.5 s"):
            loader.take(timeout=1.5)
        loader.close(timeout=2)
        gate.release()
        for thread in loader._threads:
            thread.join()

    schedule = explore(scenario, EarliestFirst())
    assert schedule.failure is None, schedule.failure


def test_a_loader_that_is_forgotten_ends_its_threads() -> None:
    loader = BatchLoader(ARRAYS, 5, threads=2)
    loader.take()
    running = loader._threads
    gone = weakref.ref(loader)
    del loader
    gc.collect()
    assert gone() is None
    for thread in running:
        thread.join(10)
        assert not thread.is_alive()


def test_the_last_epoch_is_the_end() -> None:
    with BatchLoader(ARRAYS, 10, epochs=2, start_step=3) as loader:
        assert len(list(loader)) == 1
        with pytest.raises(StopIteration):
            next(loader)
    with BatchLoader(ARRAYS, 10, epochs=0) as loader:
        assert list(loader) == []


@pytest.mark.parametrize(
    ("arrays", "options", "problem"),
    [
        ({}, {}, "same number of samples"),
        ({"x": np.zeros(3), "y": np.zeros(4)}, {}, "'y': 4"),
        ({"x": np.zeros(0)}, {}, "at least 1"),
        ({"x": np.zeros(3)}, {"batch_size": 4}, "3 samples do not fill a batch of 4: pass drop_last=False"),
        ({"x": np.zeros(3)}, {"batch_size": 0}, "at least 1"),
        ({"x": np.zeros(3)}, {"prefetch": 0}, "at least 1"),
        ({"x": np.zeros(3)}, {"threads": 0}, "at least 1"),
        ({"x": np.zeros(3)}, {"start_step": -1}, "at least 0"),
    ],
)
def test_arguments_that_make_no_batches_are_refused(
    arrays: dict[str, Array], options: dict[str, int], problem: str
) -> None:
    with pytest.raises(ValueError, match=problem):
        BatchLoader(arrays, **{"batch_size": 1, **options})
