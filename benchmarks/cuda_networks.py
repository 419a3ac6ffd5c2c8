"""Nets on a CUDA device: simple, dag, async_dag and captured, beside PyTorch, in one interleaved run.

    python benchmarks/cuda_networks.py --json benchmarks/results/cuda.json  # needs a GPU, CuPy and torch: an hour or so
    python benchmarks/cuda_networks.py --quick --networks squeezenet        # a first look
    python benchmarks/cuda_networks.py --devices emulated --quick           # the logic alone, on the host

PyTorch runs the same ONNX graph: eager, as a CUDA graph, and compiled with mode="max-autotune". A run is from an array
of the host to an array of the host, for everyone. Results are compared before anything is timed, with those of the
host's SimpleNet: a contender that differs is reported as such and not timed.

The floor of a net is the sum over its operators of the larger of two times: arithmetic at the rate of a large matrix
product, and bytes at the rate of a large copy, both measured here, by operators of our own.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from environment import describe
from onnx_export import to_onnx

import dagexec
from dagexec import NetDef, OperatorDef, Workspace, zoo
from dagexec.core.device import Device
from dagexec.core.runtime import runtime_of
from dagexec.errors import DagexecError, DeviceError
from dagexec.options import Precision
from dagexec.scheduler.nets.async_dag import AsyncDAGNet

Array = npt.NDArray[Any]
Call = Callable[[], Array]

NETWORKS = ("squeezenet", "googlenet", "inception_v3", "resnet50", "densenet121", "nasnet_a")
BATCHES = (1, 8, 64)
DTYPES = ("float32", "float16")
OURS: Mapping[str, Mapping[str, Any]] = {
    "simple": {"net_type": "simple"},
    "dag": {"net_type": "dag"},
    "async_dag": {"net_type": "async_dag", "streams_per_worker": 4, "num_workers": 1},
    "async_dag captured": {"capture": True},
}
PEERS = ("torch eager", "torch CUDA graph", "torch max-autotune")
TOLERANCES = {"float32": 1e-3, "float16": 3e-2}
"""Of the largest output."""

_QUICK_NETWORKS = ("lenet",)


def feeds_of(network: str, batch: int) -> dict[str, Array]:
    """A normal random image for the one input."""
    [(name, info)] = zoo.build(network, batch).inputs.items()
    shape = [size or batch for size in info.shape or ()]
    return {name: np.random.default_rng(0).standard_normal(shape, np.float32)}


def reference(network: str, batch: int, feeds: dict[str, Array]) -> Array:
    """The output of the host's SimpleNet, unoptimized."""
    with dagexec.compile(zoo.build(network, batch), optimize=False, net_type="simple") as executor:
        return executor.run(feeds)[executor.outputs[0]]


@contextmanager
def ours(network: str, batch: int, dtype: Precision, device: str, options: Mapping[str, Any]) -> Iterator[Call]:
    """A run of dagexec."""
    layout = "NHWC" if dtype == "float16" else "NCHW"
    with dagexec.compile(zoo.build(network, batch), device=device, dtype=dtype, layout=layout, **options) as executor:
        feeds, [output] = feeds_of(network, batch), executor.outputs
        out = {output: executor.run(feeds)[output].copy()}

        def run() -> Array:
            executor.run(feeds, out=out)
            return out[output]

        run()  # the one that captures
        yield run


@contextmanager
def torch_on_cuda(kind: str, network: str, batch: int, dtype: str, device: str) -> Iterator[Call]:
    """A run of PyTorch. Raises ImportError where it is missing, or has no device."""
    import torch
    from onnx_in_torch import OnnxModule

    if not torch.cuda.is_available():
        raise ImportError("torch has no CUDA device")
    torch.backends.cudnn.benchmark = True
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    [feed] = feeds_of(network, batch).values()
    host = torch.from_numpy(feed).pin_memory()
    kept = torch.float16 if dtype == "float16" else torch.float32
    memory = torch.channels_last if dtype == "float16" else torch.contiguous_format
    module = OnnxModule(to_onnx(zoo.build(network, batch))).eval().to(device, kept)
    image = torch.empty(host.shape, device=device, dtype=kept).contiguous(memory_format=memory)
    called = torch.compile(module, mode="max-autotune") if kind == "torch max-autotune" else module

    def eager() -> Any:
        return called(image)

    with torch.inference_mode():
        replay, result = eager, None
        for _ in range(3):
            image.copy_(host)
            result = eager()
        if kind == "torch CUDA graph":
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                eager()
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                result = eager()

            def replay() -> Any:
                graph.replay()
                return result

        def run() -> Array:
            with torch.inference_mode():
                image.copy_(host, non_blocking=True)
                found: Array = replay().float().cpu().numpy()
                return found

        yield run


def measure(
    contenders: Mapping[str, Call], wanted: Array, tolerance: float, rounds: int, seconds: float
) -> dict[str, dict[str, Any]]:
    """Interleaved rounds of all whose result is right: for each the median of the rounds' medians, in milliseconds."""
    found: dict[str, dict[str, Any]] = {}
    for name, call in contenders.items():
        difference = float(np.abs(call().astype(np.float64) - wanted).max() / np.abs(wanted).max())
        found[name] = {"difference": difference}
        if not difference <= tolerance:
            found[name]["refused"] = f"differs by {difference:.2e} of the largest output, more than {tolerance:.0e}"
    right = {name: call for name, call in contenders.items() if "refused" not in found[name]}
    rows: dict[str, list[float]] = {name: [] for name in right}
    for _ in range(rounds):
        for name, call in right.items():
            times: list[float] = []
            end = time.perf_counter() + seconds
            while not times or time.perf_counter() < end:
                start = time.perf_counter()
                call()
                times.append(time.perf_counter() - start)
            rows[name].append(statistics.median(times))
    for name, row in rows.items():
        found[name] |= {"milliseconds": statistics.median(row) * 1e3, "rounds": [value * 1e3 for value in row]}
    for name, row in rows.items():
        found[name]["ratio"] = {
            peer: statistics.median(mine / theirs for mine, theirs in zip(row, rows[peer], strict=True))
            for peer in PEERS
            if peer in rows and name in OURS
        }
    return found


def chain(kind: str, count: int, shapes: Mapping[str, tuple[int, ...]], device: Device) -> NetDef:
    """`count` operators of a kind, each on the result of the one before."""
    inputs, operators = list(shapes), list[OperatorDef]()
    blob = inputs[0]
    for number in range(count):
        operators.append(OperatorDef(type=kind, input=[blob, *inputs[1:]], output=[f"y{number}"]))
        blob = f"y{number}"
    return NetDef(name=kind, op=operators, external_input=inputs, device_option=device.to_option())


def seconds_of_chain(kind: str, count: int, shapes: Mapping[str, tuple[int, ...]], dtype: str, device: Device) -> float:
    """The least seconds of one operator of a chain of `count`, a chain's start and its input's copy taken off."""
    least = {}
    for length in (1, count + 1):
        workspace = Workspace()
        for name, shape in shapes.items():
            blob = workspace.create_blob(name)
            blob.tensor(device).feed(np.full(shape, 1e-3, dtype))
        with AsyncDAGNet(chain(kind, length, shapes, device), workspace, num_workers=1) as net:
            times = []
            for _ in range(5):
                start = time.perf_counter()
                net.run()
                times.append(time.perf_counter() - start)
            least[length] = min(times)
    return max(1e-9, (least[count + 1] - least[1]) / count)


def rates(dtype: str, device: Device, quick: bool) -> dict[str, float]:
    """What the device can do: operations a second in products, bytes a second in copies."""
    size, count = (64, 4) if quick else (8192, 20)
    product = seconds_of_chain("MatMul", count, {"a": (size, size), "b": (size, size)}, dtype, device)
    elements = (1 << 12) if quick else (1 << 28)
    copy = seconds_of_chain("Copy", count, {"a": (elements,)}, dtype, device)
    nbytes = elements * np.dtype(dtype).itemsize
    return {"operations_a_second": 2 * size**3 / product, "bytes_a_second": 2 * nbytes / copy}


def floor_of(network: str, batch: int, dtype: Precision, device: str, rate: Mapping[str, float]) -> float:
    """Milliseconds that the operators take at least, one after the other."""
    seconds = 0.0
    with dagexec.compile(zoo.build(network, batch), device=device, dtype=dtype, net_type="simple") as executor:
        executor.run(feeds_of(network, batch))
        for operator in executor.net().operators:
            call = operator.call()
            if operator.crosses_devices or operator.schema.infer is None:
                continue
            cost = operator.schema.cost(call, tuple(operator.schema.infer(call)))
            moved = cost.bytes_read + cost.bytes_written
            seconds += max(cost.flops / rate["operations_a_second"], moved / rate["bytes_a_second"])
    return seconds * 1e3


def launch_microseconds(device: Device, count: int = 1000) -> float:
    """What launching one small operator costs the host: the least mean over a chain of `count`, nothing waited for."""
    workspace = Workspace()
    workspace.feed_blob("a", np.zeros(64, np.float32))
    runtime, means = runtime_of(device), []
    with AsyncDAGNet(chain("Relu", count, {"a": (64,)}, device), workspace, num_workers=1) as net:
        net.run()
        kernels, stream = net.kernels(), runtime.lease()
        for _ in range(5):
            start = time.perf_counter()
            for kernel in kernels:
                stream.launch(kernel)
            means.append((time.perf_counter() - start) / len(kernels))
            stream.synchronize()
        runtime.give_back(stream)
    return min(means) * 1e6


def versions(device: Device) -> dict[str, str]:
    """The device, the driver, and the libraries."""
    from dagexec.devices.cuda.binding import cupy

    module = cupy()
    found = {"cupy": module.__version__}
    properties = module.cuda.runtime.getDeviceProperties(device.index)
    found["device"] = properties["name"].decode()
    found["cuda runtime"] = str(module.cuda.runtime.runtimeGetVersion())
    found["cuda driver"] = str(module.cuda.runtime.driverGetVersion())
    for name in ("cudnn", "torch"):
        try:
            found[name] = __import__(name).__version__
        except ImportError:
            found[name] = "missing"
    return found


def case(network: str, batch: int, dtype: Precision, options: argparse.Namespace) -> dict[str, Any]:
    """One network, batch size and type: all contenders."""
    feeds = feeds_of(network, batch)
    wanted = reference(network, batch, feeds)
    contenders: dict[str, Call] = {}
    absent: dict[str, str] = {}
    with ExitStack() as held:
        for name, settings in OURS.items():
            try:
                contenders[name] = held.enter_context(ours(network, batch, dtype, options.device, settings))
            except DagexecError as error:
                absent[name] = str(error)
        for name in () if options.emulated else options.peers:
            try:
                contenders[name] = held.enter_context(torch_on_cuda(name, network, batch, dtype, options.device))
            except Exception as error:  # whatever torch raises: the others are measured all the same
                absent[name] = f"{type(error).__name__}: {error}"
        found = measure(contenders, wanted, TOLERANCES[dtype], options.rounds, options.seconds)
    return {"network": network, "batch": batch, "dtype": dtype, "contenders": found, "absent": absent}


def run(options: argparse.Namespace) -> dict[str, Any]:
    """The whole benchmark."""
    device = Device.parse(options.device)
    result: dict[str, Any] = {"environment": describe(), "versions": versions(device), "rates": {}, "cases": []}
    if options.emulated:
        result["note"] = "an emulated device on the host: no time here says anything about a GPU"
    result["launch_microseconds"] = launch_microseconds(device, 20 if options.quick else 1000)
    for dtype in options.dtypes:
        rate = result["rates"][dtype] = rates(dtype, device, options.quick)
        for network in options.networks:
            for batch in options.batches:
                row = case(network, batch, dtype, options)
                row["floor_milliseconds"] = floor_of(network, batch, dtype, options.device, rate)
                for found in row["contenders"].values():
                    if "milliseconds" in found:
                        found["over_floor"] = found["milliseconds"] / row["floor_milliseconds"]
                result["cases"].append(row)
                print_row(row)
                if options.json is not None:  # ended early, what was measured is kept
                    options.json.write_text(json.dumps(result, indent=1) + "\n")
    return result


def print_row(row: Mapping[str, Any]) -> None:
    """One line a contender."""
    print(f"{row['network']}, batch {row['batch']}, {row['dtype']}: floor {row['floor_milliseconds']:.3f} ms")
    for name, found in row["contenders"].items():
        ratios = ", ".join(f"{value:.2f} of {peer}" for peer, value in found.get("ratio", {}).items())
        time_text = f"{found['milliseconds']:.3f} ms" if "milliseconds" in found else found["refused"]
        print(f"  {name:20} {time_text}{'; ' + ratios if ratios else ''}")
    for name, reason in row["absent"].items():
        print(f"  {name:20} absent: {reason}")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", default="cuda:0", help="cuda:N, or emulated: the logic alone, on the host")
    parser.add_argument("--networks", nargs="+")
    parser.add_argument("--batches", nargs="+", type=int)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES)
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=PEERS, help="max-autotune compiles for minutes")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--seconds", type=float, help="of one contender in one round")
    parser.add_argument("--quick", action="store_true", help="one small network, batch 1, float32, three rounds")
    parser.add_argument("--json", type=Path, help="where the result goes")
    options = parser.parse_args(arguments)
    quick = options.quick
    options.emulated = options.devices == "emulated"
    options.device = "cuda:0" if options.emulated else options.devices
    options.networks = options.networks or (_QUICK_NETWORKS if quick else NETWORKS)
    options.batches = options.batches or ((1,) if quick else BATCHES)
    options.dtypes = options.dtypes or (("float32",) if quick else DTYPES)
    options.rounds = options.rounds or (3 if quick else 11)
    options.seconds = options.seconds or (0.02 if quick else 0.3)
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0, or 1 without a device."""
    options = parse(arguments)
    if options.emulated:
        sys.path.insert(0, str(Path(__file__).parent.parent))
        from tests.cuda.emulated import emulated

        scope: Any = emulated(record=False)
    else:
        scope = nullcontext()
    with scope:
        try:
            runtime_of(Device.parse(options.device))
        except DeviceError as error:
            print(f"nothing is measured: {error}", file=sys.stderr)
            return 1
        result = run(options)
    print(f"launching an operator: {result['launch_microseconds']:.1f} us")
    return 0


if __name__ == "__main__":
    sys.exit(main())
