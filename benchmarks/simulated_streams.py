"""Makespan on a simulated device against list scheduling: 1 to 8 streams, launches of 5 us; kernels of 50 us each, or
each of the time that its operator is estimated to take.

    python benchmarks/simulated_streams.py [--json benchmarks/results/simulated_streams.json]

Times are virtual. Workers and streams run as a discrete-event simulation (`EarliestFirst`), so the figures are the same
on every machine. The results of the runs are compared with SimpleNet's.
"""

from __future__ import annotations

import argparse
import itertools
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from environment import write_report

import dagexec
from dagexec.analysis.comparison import random_feeds
from dagexec.binding.parameters import initialized
from dagexec.core.model import Model
from dagexec.core.stream import Kernel, Stream
from dagexec.devices.sim import host_time, simulated
from dagexec.executor.source.loading import load_model
from dagexec.scheduler.exploration import EarliestFirst, explore
from dagexec.scheduler.exploration.device import ControlledDriver
from dagexec.scheduler.observe.observers import Observer
from dagexec.scheduler.plan.plan import retimed
from dagexec.scheduler.run.prediction import lower_bound, predict_makespan, timed_chains

LAUNCH, KERNEL = 5e-6, 50e-6
SETTINGS = ((1, 1), (2, 2), (4, 4), (8, 8), (1, 2), (1, 4), (1, 8))  # workers, streams
MODELS = ("googlenet", "squeezenet", "densenet121")


@dataclass(frozen=True)
class Row:
    """One model on so many streams. Times in microseconds; `launched` is when the last launch was made."""

    model: str
    kernels: str
    workers: int
    streams: int
    operators: int
    makespan: float
    launched: float
    predicted: float
    bound: float

    @property
    def ratio(self) -> float:
        """Makespan over prediction."""
        return self.makespan / self.predicted


class Times(Observer):
    """When launches were made on the host, and kernels ran on the device."""

    def __init__(self) -> None:
        self.launches: list[float] = []
        self.kernels: list[tuple[float, float]] = []

    def launched(self, stream: Stream, kernel: Kernel) -> None:
        self.launches.append(host_time())

    def executed(self, stream: Stream, kernel: Kernel, start: float, end: float) -> None:
        self.kernels.append((start, end))


def measure(model: Model, name: str, workers: int, streams: int, *, alike: bool) -> Row:
    """One model, with kernels that take all the same time or what is estimated."""
    feeds = random_feeds(model)
    with dagexec.compile(model, net_type="simple", optimize=False) as host:
        expected = host.run(feeds)

    def scenario() -> Row:
        times = Times()
        with (
            simulated(
                "sim:0",
                driver=ControlledDriver(),
                launch_seconds=LAUNCH,
                kernel_seconds=KERNEL if alike else None,
                copy_seconds=KERNEL,
            ),
            dagexec.compile(
                model,
                net_type="async_dag",
                num_workers=workers,
                streams_per_worker=streams // workers,
                device="sim:0",
                optimize=False,
            ) as executor,
        ):
            executor.run(feeds)
            found = executor.run(feeds, trace=times)
            net = executor.net()
            seconds = [KERNEL if alike or kernel.copied_bytes else kernel.seconds or 0.0 for kernel in net.kernels()]
            plan = retimed(net.plan, seconds)
        for output, array in expected.items():
            np.testing.assert_array_equal(found[output], array)
        start = min(begin for begin, _ in times.kernels)
        return Row(
            name,
            "50 us" if alike else "estimated",
            workers,
            streams,
            len(plan.graph),
            (max(end for _, end in times.kernels) - start) * 1e6,
            (max(times.launches) - start) * 1e6,
            predict_makespan(plan, streams) * 1e6,
            lower_bound(timed_chains(plan), streams) * 1e6,
        )

    schedule = explore(scenario, EarliestFirst())
    schedule.raise_failure()
    assert schedule.result is not None
    return schedule.result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = []
    for name in MODELS:
        model = initialized(load_model(f"zoo:{name}"))
        for alike, (workers, streams) in itertools.product((True, False), SETTINGS):
            row = measure(model, name, workers, streams, alike=alike)
            rows.append(row)
            print(
                f"{name:12} {row.kernels:9} {workers} workers, {streams} streams: {row.makespan:7.0f} us, "
                f"predicted {row.predicted:7.0f}, ratio {row.ratio:.3f}, bound {row.bound:7.0f}, "
                f"all launched after {row.launched:6.0f} us"
            )
    if arguments.json:
        found = [asdict(row) | {"ratio": row.ratio} for row in rows]
        settings = {"launch_us": LAUNCH * 1e6, "kernel_us": KERNEL * 1e6}
        write_report(arguments.json, settings=settings, rows=found)


if __name__ == "__main__":
    main()
