"""How much of the machine this process gets: on a busy one, times by the clock say little."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

_NUMBERS = 1 << 16


def free_share(cores: int, seconds: float = 0.03) -> float:
    """The part of `cores` cores that as many threads get for `seconds`: about 1 when nobody else computes."""
    end = time.perf_counter() + seconds

    def compute() -> float:
        numbers = np.ones(_NUMBERS, np.float32)
        start, begun = time.thread_time(), time.perf_counter()
        while time.perf_counter() < end:
            np.sqrt(numbers, out=numbers)
        return (time.thread_time() - start) / (time.perf_counter() - begun)

    with ThreadPoolExecutor(cores) as pool:
        shares = [one.result() for one in [pool.submit(compute) for _ in range(cores)]]
    return sum(shares) / cores
