"""BatchLoader: batches of a data set, read ahead on threads, in an order that a seed decides.

The order of epoch e is a pure function of (seed, e), and the random numbers of a transform are one of (seed, e, index
of the sample); neither depends on the number of threads. So a run that stopped after step n goes on with `start_step=n`
as if it had not stopped. Random numbers are raw Philox words, which no version of NumPy changes.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from dagexec.errors import ClosedError, DataError
from dagexec.platform.blocking import wait_until
from dagexec.platform.closing import Closing
from dagexec.platform.forking import LEFT_BEHIND, reset_after_fork
from dagexec.platform.records import dataclass
from dagexec.platform.threads import Thread, ThreadWait, acquire, threads

__all__ = ["BatchLoader", "LoaderStatistics", "Samples"]

logger = logging.getLogger("dagexec")

Array = npt.NDArray[Any]
Batch = dict[str, Array]
Transform = Callable[[Batch, np.random.Generator], Mapping[str, npt.ArrayLike]]

_WORD = (1 << 64) - 1


class Samples(Protocol):
    """An array of samples, or what reads like one: a memory map, a file."""

    def __len__(self) -> int:
        """How many there are."""

    def __getitem__(self, indices: npt.NDArray[np.intp], /) -> Any:
        """Those of an array of indices, stacked."""


@dataclass(frozen=True)
class LoaderStatistics:
    """A snapshot of a loader.

    Attributes:
        step: batches handed out, those before `start_step` counted.
        ready: batches that have been read and not been taken.
        reading: batches that threads are reading.
        waits: how often a batch was requested before it was there.
        wait_seconds: how long that took together.
        samples: samples handed out by this loader.
    """

    step: int
    ready: int
    reading: int
    waits: int
    wait_seconds: float
    samples: int


def _key(seed: int, epoch: int) -> npt.NDArray[np.uint64]:
    """The key of a generator; a list with a word of 2**63 or more would pass through floats."""
    return np.array([seed & _WORD, epoch], np.uint64)


def epoch_order(count: int, seed: int, epoch: int) -> npt.NDArray[np.intp]:
    """A permutation of `count` samples for an epoch: the order of so many random 64-bit words."""
    words = np.random.Philox(key=_key(seed, epoch)).random_raw(count)
    return np.argsort(words, kind="stable")


def sample_generator(seed: int, epoch: int, index: int) -> np.random.Generator:
    """The generator for a sample of an epoch; its stream is far from that of `epoch_order`."""
    return np.random.Generator(np.random.Philox(key=_key(seed, epoch), counter=[0, 0, index, 1]))


@dataclass(frozen=True)
class _BatchOrder:
    """Which samples each batch has.

    Attributes:
        steps: batches of an epoch.
    """

    arrays: Mapping[str, Samples]
    count: int
    batch_size: int
    seed: int
    shuffle: bool
    steps: int
    transform: Transform | None

    def read(self, step: int, order: npt.NDArray[np.intp]) -> Batch:
        """Batch `step`, of an epoch with this order."""
        epoch, place = divmod(step, self.steps)
        indices = order[place * self.batch_size : (place + 1) * self.batch_size]
        batch = {name: np.asarray(samples[indices]) for name, samples in self.arrays.items()}
        for name, array in batch.items():
            if array.ndim == 0 or len(array) != len(indices):
                raise ValueError(f"array {name!r} gave shape {array.shape} for {len(indices)} samples")
        return batch if self.transform is None else self._transformed(batch, indices, epoch)

    def order(self, epoch: int) -> npt.NDArray[np.intp]:
        """The order of an epoch."""
        return epoch_order(self.count, self.seed, epoch) if self.shuffle else np.arange(self.count)

    def _transformed(self, batch: Batch, indices: npt.NDArray[np.intp], epoch: int) -> Batch:
        assert self.transform is not None
        transformed = [
            self.transform(
                {name: array[place] for name, array in batch.items()}, sample_generator(self.seed, epoch, int(index))
            )
            for place, index in enumerate(indices)
        ]
        return {name: np.stack([np.asarray(sample[name]) for sample in transformed]) for name in transformed[0]}


class _Reading:
    """The state that threads and loader share; the loader itself may be garbage while they run."""

    def __init__(self, plan: _BatchOrder, step: int, last: int | None, prefetch: int) -> None:
        self.plan = plan
        self.prefetch = prefetch
        self.last = last
        self.lock = threads().owned_lock()
        self.readers: list[ThreadWait] = []
        self.takers: list[ThreadWait] = []
        self.batches: dict[int, Batch | BaseException] = {}
        self.taken = step
        self.begun = step
        self.closed = False
        self.waits = 0
        self.seconds = 0.0
        self.samples = 0
        self._orders: dict[int, npt.NDArray[np.intp]] = {}
        self._why = "the batch loader is closed"
        reset_after_fork(self, _Reading._forked)

    def _forked(self) -> None:
        """In a child made by `os.fork`: nothing reads."""
        self.lock = threads().owned_lock()
        self.readers, self.takers = [], []
        self.closed, self._why = True, f"the batch loader is closed: {LEFT_BEHIND}"

    def may_read(self) -> bool:
        """True when a thread has something to do: read a batch, or end."""
        return self.closed or self.begun == self.last or self.begun < self.taken + self.prefetch

    def serve(self) -> None:
        """Read batch after batch, until closed. What a thread does."""
        while True:
            acquire(self.lock)
            try:
                wait_until(self.lock, self.readers, self.may_read, "a reader of batches")
                if self.closed or self.begun == self.last:
                    return
                step = self.begun
                self.begun += 1
                order = self._order(step)
            finally:
                self.lock.release()
            batch: Batch | BaseException
            try:
                batch = self.plan.read(step, order)
            except BaseException as error:  # raised where this batch is taken
                batch = error
            acquire(self.lock)
            try:
                self.batches[step] = batch
                _notify_all(self.takers)
            finally:
                self.lock.release()

    def take(self, timeout: float | None) -> Batch:
        """The next batch, in order. Raises what the loader's `take` raises."""
        now = threads().monotonic
        acquire(self.lock)
        try:
            if self.taken == self.last:
                raise StopIteration
            if self.taken not in self.batches and not self.closed:
                self.waits += 1
                began = now()
                ready = wait_until(
                    self.lock, self.takers, lambda: self.closed or self.taken in self.batches, "a batch", timeout
                )
                self.seconds += now() - began
                if not ready:
                    raise DataError(f"batch {self.taken} was not read within {timeout} s")
            if self.closed:
                raise ClosedError(self._why)
            batch = self.batches[self.taken]
            if isinstance(batch, BaseException):
                epoch, place = divmod(self.taken, self.plan.steps)
                raise DataError(
                    f"batch {self.taken} (epoch {epoch}, batch {place} of {self.plan.steps}) could not be read: "
                    f"{type(batch).__name__}: {batch}"
                ) from batch
            del self.batches[self.taken]
            self.taken += 1
            self.samples += len(next(iter(batch.values()))) if batch else 0
            _notify_all(self.readers)
            return batch
        finally:
            self.lock.release()

    def close(self) -> None:
        """End the threads as soon as they have read what they are reading."""
        acquire(self.lock)
        try:
            self.closed = True
            self.batches.clear()
            _notify_all(self.readers)
            _notify_all(self.takers)
        finally:
            self.lock.release()

    def _order(self, step: int) -> npt.NDArray[np.intp]:
        """The order of the epoch of `step`; those of epochs that are over are forgotten. Call with the lock held."""
        epoch = step // self.plan.steps
        if epoch not in self._orders:
            self._orders = {past: order for past, order in self._orders.items() if past >= epoch - 1}
            self._orders[epoch] = self.plan.order(epoch)
        return self._orders[epoch]


def _notify_all(waits: list[ThreadWait]) -> None:
    for wait in waits:
        wait.notify()


class BatchLoader(Closing):
    """An iterator of batches, {name: array}, that are read while the trainer computes.

    Close it, or use it as a context manager; a loader that is forgotten ends its threads, too.
    """

    def __init__(
        self,
        arrays: Mapping[str, Samples],
        batch_size: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        prefetch: int = 2,
        threads: int = 1,
        start_step: int = 0,
        transform: Transform | None = None,
        drop_last: bool = True,
        epochs: int | None = None,
    ) -> None:
        """Batches of `batch_size` samples of `arrays`, which have as many samples each, epoch after epoch.

        Args:
            arrays: samples by name, along the first axis.
            batch_size: samples of a batch.
            seed, shuffle: the order of the samples; without `shuffle` they come as they are.
            prefetch: the most batches that are read or being read and have not been taken.
            threads: how many read, `prefetch` of them at a time. Batches and their order are the same for any number.
            start_step: batches to pass over, without reading them.
            transform: makes a sample of a sample, with a generator of its own: augmentation.
            drop_last: leave out the samples of an epoch that do not fill a batch; otherwise its last batch is smaller.
            epochs: how many; None for no end. Then `next` raises StopIteration.

        Raises ValueError for arrays without samples, of different lengths or smaller than a batch, and for counts out
        of range.
        """
        counts = {name: len(samples) for name, samples in arrays.items()}
        if len(set(counts.values())) != 1 or not min(counts.values()):
            raise ValueError(f"expected arrays with the same number of samples, at least 1; found {counts}")
        count = next(iter(counts.values()))
        if min(batch_size, prefetch, threads) < 1 or start_step < 0 or (epochs is not None and epochs < 0):
            raise ValueError(
                f"expected batch_size, prefetch and threads of at least 1, start_step and epochs of at least 0; "
                f"found {batch_size}, {prefetch}, {threads}, {start_step}, {epochs}"
            )
        steps = count // batch_size if drop_last else -(-count // batch_size)
        if not steps:
            raise ValueError(f"{count} samples do not fill a batch of {batch_size}: pass drop_last=False")
        plan = _BatchOrder(dict(arrays), count, batch_size, seed, shuffle, steps, transform)
        last = None if epochs is None else max(epochs * steps, start_step)
        self.steps_per_epoch = steps
        self._reading = reading = _Reading(plan, start_step, last, prefetch)
        self._finalizer = weakref.finalize(self, reading.close)
        self._threads = _started(reading, threads)

    @property
    def step(self) -> int:
        """The number of the next batch: what `start_step` has to be to go on from here."""
        return self._reading.taken

    @property
    def epoch(self) -> int:
        """The epoch of the next batch."""
        return self._reading.taken // self.steps_per_epoch

    def take(self, timeout: float | None = None) -> Batch:
        """The next batch; the arrays are the caller's.

        Raises DataError when reading it failed, with what was raised as the cause, each time it is requested; DataError
        after `timeout` seconds; ClosedError after `close`; StopIteration at the end.
        """
        return self._reading.take(timeout)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        return self._reading.take(None)

    def statistics(self) -> LoaderStatistics:
        """Counts at this moment."""
        reading = self._reading
        with reading.lock:
            return LoaderStatistics(
                reading.taken,
                len(reading.batches),
                reading.begun - reading.taken - len(reading.batches),
                reading.waits,
                reading.seconds,
                reading.samples,
            )

    def close(self, timeout: float = 5.0) -> None:
        """End the threads, which finish what they are reading. Idempotent; whoever waits for a batch gets ClosedError.

        A reader that does not come back within `timeout` seconds is left behind, and the log says so.
        """
        self._finalizer()
        deadline = threads().monotonic() + timeout
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - threads().monotonic()))
                if thread.is_alive():
                    logger.warning("%s is still reading a batch and will end after it", thread.name)


def _started(reading: _Reading, count: int) -> list[Thread]:
    source = threads()
    try:
        return [source.start(reading.serve, f"dagexec-batches-{number}") for number in range(count)]
    except RuntimeError:
        reading.close()
        raise
