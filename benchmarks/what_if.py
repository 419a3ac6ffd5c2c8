"""How good predictions from SimpleNet's times are: pieces handed out on a virtual clock, and what the runtimes take.

    python benchmarks/what_if.py [--repeat 25] [--json benchmarks/results/what_if.json]

On the host: dag and async_dag with 1 and 2 workers; target on googlenet: within 15%. On the simulated device, whose
clock is exact, with launches of 5 us and kernels of 50 us: googlenet's makespan on streams of one worker; target with 4
streams: within 10%. Then predictions for up to 64 workers.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from environment import describe

from dagexec import NetDef, Workspace
from dagexec.analysis.comparison import compare, random_feeds
from dagexec.binding.parameters import initialized
from dagexec.core.device import Device
from dagexec.devices.sim import simulated
from dagexec.executor.source.loading import load_model
from dagexec.options import CompileOptions
from dagexec.scheduler.nets.async_dag import AsyncDAGNet
from dagexec.scheduler.nets.options import RunOptions
from dagexec.scheduler.observe.trace import Trace
from dagexec.scheduler.plan.plan import retimed
from dagexec.scheduler.run.prediction import Hardware, device_bound, predict_device

MODELS = ("zoo:googlenet", "zoo:squeezenet_towers")
WORKERS = (1, 2, 4, 8, 16, 64)
STREAMS = (1, 2, 4, 8, 16)
LAUNCH_SECONDS, KERNEL_SECONDS = 5e-6, 50e-6


def on_streams(source: str, streams: int) -> dict[str, float]:
    """The makespan of one run on `streams` simulated streams of one worker, and its prediction; milliseconds."""
    model = initialized(load_model(source))
    device = Device.parse("sim:0")
    definition = NetDef()
    definition.CopyFrom(model.net)
    definition.device_option.CopyFrom(device.to_option())
    trace = Trace()
    settings = {"launch_seconds": LAUNCH_SECONDS, "kernel_seconds": KERNEL_SECONDS, "copy_seconds": KERNEL_SECONDS}
    with simulated(device, **settings):
        workspace = Workspace()
        for name, array in {**model.parameters, **random_feeds(model)}.items():
            workspace.feed_blob(name, array, device=device)
        with AsyncDAGNet(definition, workspace, num_workers=1, options=RunOptions(streams_per_worker=streams)) as net:
            net.run(trace=trace)
            plan = net.plan
    kernels = [kernel for track in trace.tracks for kernel in track.kernels]
    makespan = max(kernel.end for kernel in kernels) - min(kernel.start for kernel in kernels) + LAUNCH_SECONDS
    seconds = [KERNEL_SECONDS] * len(plan.graph)
    timed, hardware = retimed(plan, seconds), Hardware(1, streams, launch_seconds=LAUNCH_SECONDS)
    predicted = predict_device(timed, hardware, seconds)
    return {
        "streams": streams,
        "makespan_ms": makespan * 1e3,
        "predicted_ms": predicted * 1e3,
        "ratio": predicted / makespan,
        "bound_ms": device_bound(timed, hardware) * 1e3,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=25)
    parser.add_argument("--models", nargs="*", default=MODELS)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    report: dict[str, object] = {"environment": describe(), "repeat": options.repeat}
    for model in options.models:
        comparison = compare(model, CompileOptions(optimize=False), repeat=options.repeat, what_if_workers=WORKERS)
        if not comparison.agrees:
            raise SystemExit(f"{model}: results differ from SimpleNet's; nothing is reported")
        print(model)
        for row in comparison.rows:
            print(
                f"  {row.net_type:9} {row.workers}  measured {row.median_ms:8.2f} ms"
                f"  predicted {row.predicted_ms:8.2f} ms  ratio {row.predicted_ratio:.3f}"
            )
        for guess in comparison.what_if:
            print(f"  {guess.workers:3} workers  {guess.predicted_ms:8.2f} ms  speed-up {guess.speed_up:.2f}")
        calibration = asdict(comparison.cost_model)
        calibration.pop("operator_seconds")
        streams = [on_streams(model, count) for count in STREAMS]
        for found in streams:
            print(
                f"  sim, {found['streams']:2} streams  makespan {found['makespan_ms']:7.3f} ms"
                f"  predicted {found['predicted_ms']:7.3f} ms  ratio {found['ratio']:.3f}"
            )
        report[model] = {
            "rows": [asdict(row) for row in comparison.rows],
            "calibration": calibration,
            "what_if": [asdict(guess) for guess in comparison.what_if],
            "sim": streams,
        }
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
