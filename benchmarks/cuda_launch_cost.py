"""The host's cost of launching operators on a CUDA device, without the driver: what Python does around its calls.

    chrt -f 1 python benchmarks/cuda_launch_cost.py --json benchmarks/results/cuda_launch_cost.json

No GPU is needed and none is measured. Functions of CUDA that a run calls are replaced by ones that return at once: so
this is the Python part alone, and what the driver takes comes on top. `benchmarks/cuda_networks.py` measures both on a
GPU.

    call          a call of such a function from a loop, taken off nowhere: what a plain Python loop would pay
    step          a prepared kernel launch (`Launch`), called in a loop
    launch        the same through `CudaStream.launch`, as runs do it
    chain         a run of an AsyncDAGNet of one chain, an operator
    branches      of chains of 4, each on a stream that it waits for another with: events are recorded and waited for
    replay        a run of the same net captured, an operator; and as a whole
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from environment import write_report

sys.path.insert(0, str(Path(__file__).parent.parent))

from dagexec import NetDef, OperatorDef, Workspace
from dagexec.core.device import Device
from dagexec.core.runtime import runtime_of
from dagexec.devices.cuda.binding import cupy
from dagexec.devices.cuda.kernels import Launch
from dagexec.scheduler.nets.async_dag import AsyncDAGNet
from dagexec.scheduler.nets.captured import CapturedNet
from dagexec.scheduler.nets.options import RunOptions
from tests.cuda.emulated import emulated

CUDA = Device("cuda", 0)
LENGTH = 4
RUNTIME_CALLS = ("eventRecord", "streamWaitEvent", "eventSynchronize", "streamSynchronize", "setDevice", "graphLaunch",
                 "memcpyAsync")  # fmt: skip
QUERIES = ("eventQuery", "streamQuery", "getDevice")


def nothing(*_arguments: Any) -> None:
    """A call of the driver that costs nothing."""


def zero(*_arguments: Any) -> int:
    """Done; device 0."""
    return 0


@contextmanager
def without_driver() -> Iterator[None]:
    """Within it, there is a device that takes whatever is asked of it and does nothing."""
    with emulated(devices=1, record=False):
        module = cupy()
        module.cuda.driver.launchKernel = nothing
        for name in RUNTIME_CALLS:
            setattr(module.cuda.runtime, name, nothing)
        for name in QUERIES:
            setattr(module.cuda.runtime, name, zero)
        yield


def chain(count: int) -> NetDef:
    """`count` small operators, one after the other."""
    operators = [OperatorDef(type="Relu", input=[f"b{number}"], output=[f"b{number + 1}"]) for number in range(count)]
    return NetDef(name="chain", op=operators, external_input=["b0"], device_option=CUDA.to_option())


def branches(count: int) -> NetDef:
    """Blocks of four chains of `LENGTH` that begin at one operator and end in one: an event for each chain."""
    operators: list[OperatorDef] = []
    blob = "b0"
    while len(operators) + 4 * LENGTH + 1 <= count:
        ends = []
        for branch in range(4):
            source = blob
            for place in range(LENGTH):
                target = f"{blob}_{branch}_{place}"
                operators.append(OperatorDef(type="Relu", input=[source], output=[target]))
                source = target
            ends.append(source)
        blob = f"b{len(operators)}"
        operators.append(OperatorDef(type="Sum", input=ends, output=[blob]))
    return NetDef(name="branches", op=operators, external_input=["b0"], device_option=CUDA.to_option())


def net_of(net_class: type[AsyncDAGNet], definition: NetDef, streams: int) -> AsyncDAGNet:
    """A net that has run: all is prepared, and captured where it is to be."""
    workspace = Workspace()
    workspace.feed_blob("b0", np.zeros(64, np.float32))
    net = net_class(definition, workspace, num_workers=1, options=RunOptions(streams_per_worker=streams))
    for _ in range(5):
        net.run()
    return net


def measure(operators: int, repeat: int) -> dict[str, dict[str, float]]:
    """Microseconds, for each of the module's list."""
    with without_driver():
        nets = {
            "chain": net_of(AsyncDAGNet, chain(operators), 1),
            "branches": net_of(AsyncDAGNet, branches(operators), 4),
            "replay": net_of(CapturedNet, branches(operators), 4),
        }
        kernels = [kernel for kernel in nets["chain"].kernels() if isinstance(kernel.step, Launch)]
        steps, stream = [kernel.step for kernel in kernels], runtime_of(CUDA).lease()

        def calls() -> None:
            call = cupy().cuda.driver.launchKernel
            for _ in range(operators):
                call(1, 1, 1, 1, 256, 1, 1, 0, 2, 3, 0)

        def loop() -> None:
            for step in steps:
                step()

        def launches() -> None:
            for kernel in kernels:
                stream.launch(kernel)

        rows: dict[str, tuple[int, Callable[[], object]]] = {
            "call": (operators, calls),
            "step": (len(steps), loop),
            "launch": (len(kernels), launches),
            **{name: (len(net.graph), net.run) for name, net in nets.items()},
        }
        seconds: dict[str, list[float]] = {name: [] for name in rows}
        gc.disable()
        for _ in range(repeat):
            for name, (_, run) in rows.items():
                start = time.perf_counter()
                run()
                seconds[name].append(time.perf_counter() - start)
        gc.enable()
        for net in nets.values():
            net.close()
    return {
        name: {
            "operators": rows[name][0],
            "median_us": statistics.median(row) * 1e6 / rows[name][0],
            "least_us": min(row) * 1e6 / rows[name][0],
            "run_us": statistics.median(row) * 1e6,
        }
        for name, row in seconds.items()
    }


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--operators", type=int, default=1000)
    parser.add_argument("--repeat", type=int, default=301)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results = measure(options.operators, options.repeat)
    print("microseconds of Python an operator, without the driver")
    for name, row in results.items():
        print(f"  {name:10} median {row['median_us']:.3f}   least {row['least_us']:.3f}   of {row['operators']}")
    if options.json is not None:
        note = "the Python part alone: calls of the CUDA driver are replaced by functions that do nothing; no GPU"
        write_report(options.json, note=note, repeat=options.repeat, results=results)


if __name__ == "__main__":
    main()
