"""dagexec and its peers behind one face: what a contender process of `cnn.py` or `models.py` loads and runs.

A peer that is not installed raises ImportError when it is loaded. Every peer gets its fastest way to be called: arrays
for input and output that are bound once, where it has such a way. All know the sizes of the inputs before they load,
and compute in float32 unless their options say otherwise.
"""

from __future__ import annotations

import importlib
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Options = Mapping[str, Any]


@dataclass(frozen=True)
class Task:
    """What to load, and the process for it.

    Attributes:
        model: its file.
        feeds: the arrays of a run.
        threads: how many may compute.
        sizes: of the axes that the file only names, by their names.
        python: the interpreter of the process.
        environment: variables of the process beside those of this one.
    """

    model: Path
    feeds: dict[str, Array]
    threads: int
    sizes: Mapping[str, int] = field(default_factory=dict)
    python: str = sys.executable
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Loaded:
    """A model that is ready.

    Attributes:
        run: one inference, from the fed arrays to arrays of results.
        outputs: the results of the last run.
        serve: answers requests from a number of callers for so many seconds; returns inferences a second.
        request: one inference with results of its own, for any number of threads at once.
        chosen: what the contender chose itself, for the record.
    """

    run: Callable[[], object]
    outputs: Callable[[], list[Array]]
    serve: Callable[[int, float], float] | None = None
    request: Callable[[], object] | None = None
    chosen: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Turn:
    """One turn's runs: their median and least seconds, and how many there were."""

    median: float
    least: float
    runs: int


@dataclass(frozen=True)
class Memory:
    """What a process has in memory, in MiB: now, and at most since it started."""

    resident: float
    peak: float


Loader = Callable[[Task, Options], Loaded]


def load_dagexec(task: Task, options: Options) -> Loaded:
    """`dagexec.compile` as it is; options are its keyword arguments."""
    import dagexec

    shapes = {name: array.shape for name, array in task.feeds.items()}
    executor = dagexec.compile(task.model, **{"shapes": shapes, **options})
    out = {name: array.copy() for name, array in executor.run(task.feeds).items()}
    chosen = {
        name: getattr(executor, name)
        for name in ("net_type", "num_workers", "intra_op_threads")
        if hasattr(executor, name)
    }
    return Loaded(
        lambda: executor.run(task.feeds, out=out),
        lambda: list(out.values()),
        lambda callers, seconds: from_threads(lambda: executor.run(task.feeds), callers, seconds),
        lambda: executor.run(task.feeds),
        chosen,
    )


def load_onnxruntime(task: Task, options: Options) -> Loaded:
    """onnxruntime with every optimization. Options: `intra`, `inter` (threads), `parallel`, `spin`."""
    ort = importlib.import_module("onnxruntime")
    ort.set_default_logger_severity(3)
    settings = ort.SessionOptions()
    settings.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
    parallel = options.get("parallel", False)
    settings.execution_mode = ort.ExecutionMode.ORT_PARALLEL if parallel else ort.ExecutionMode.ORT_SEQUENTIAL
    settings.intra_op_num_threads = options.get("intra", task.threads)
    settings.inter_op_num_threads = options.get("inter", 1)
    for pool in ("intra_op", "inter_op"):
        settings.add_session_config_entry(f"session.{pool}.allow_spinning", str(int(options.get("spin", True))))
    for axis, size in task.sizes.items():
        settings.add_free_dimension_override_by_name(axis, size)
    session = ort.InferenceSession(str(task.model), settings, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    results = session.run(names, task.feeds)
    binding = session.io_binding()
    for name, array in task.feeds.items():
        binding.bind_cpu_input(name, array)
    for name, result in zip(names, results, strict=True):
        binding.bind_output(name, "cpu", 0, result.dtype, result.shape, result.ctypes.data)
    return Loaded(
        lambda: session.run_with_iobinding(binding),
        lambda: results,
        lambda callers, seconds: from_threads(lambda: session.run(names, task.feeds), callers, seconds),
        lambda: session.run(names, task.feeds),
    )


def load_openvino(task: Task, options: Options) -> Loaded:
    """OpenVINO on the processor, computing in float32 (its default may be bfloat16). Options are its properties."""
    openvino = importlib.import_module("openvino")
    properties = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": task.threads} | dict(options)
    core = openvino.Core()
    model = core.read_model(task.model)
    if model.is_dynamic():
        model.reshape({name: list(array.shape) for name, array in task.feeds.items()})
    compiled = core.compile_model(model, "CPU", properties)
    request = compiled.create_infer_request()
    for name, array in task.feeds.items():
        request.set_tensor(name, openvino.Tensor(array, shared_memory=True))
    results = [request.get_output_tensor(number).data for number in range(len(compiled.outputs))]

    def serve(callers: int, seconds: float) -> float:
        queue = openvino.AsyncInferQueue(compiled, callers)
        for number in range(callers):
            for name, array in task.feeds.items():
                queue[number].set_tensor(name, openvino.Tensor(array, shared_memory=True))
        for _ in range(2 * callers):
            queue.start_async()
        queue.wait_all()
        start, count = time.perf_counter(), 0
        while time.perf_counter() - start < seconds:
            queue.start_async()
            count += 1
        queue.wait_all()
        return count / (time.perf_counter() - start)

    own = threading.local()

    def ask() -> object:
        if not hasattr(own, "request"):  # one serves one caller at a time
            own.request = compiled.create_infer_request()
        return own.request.infer(task.feeds, share_inputs=True)

    chosen = {name: str(compiled.get_property(name)) for name in ("NUM_STREAMS", "INFERENCE_NUM_THREADS")}
    chosen["instructions"] = _openvino_instructions(compiled)
    return Loaded(request.infer, lambda: results, serve, ask, chosen)


def _openvino_instructions(compiled: Any) -> str:
    """The newest vector instructions that the kernels of a compiled model are named after."""
    kernels = " ".join(node.rt_info["primitiveType"].astype(str) for node in compiled.get_runtime_model().get_ops())
    return next((name for name in ("avx512", "avx2", "avx", "sse42") if name in kernels), "")


def load_torch(task: Task, options: Options) -> Loaded:
    """torch on the processor: eager; with `channels_last`; or with `inductor`, weights frozen into the code."""
    torch = importlib.import_module("torch")
    if options.get("inductor") and not any(map(shutil.which, (os.environ.get("CXX", "c++"), "g++", "clang++"))):
        raise ImportError("it needs a C++ compiler, and there is none")
    torch.set_num_threads(task.threads)
    if "net" in options:
        return _torch_net(torch, importlib.import_module("families").net_named(options["net"]), task, options)
    onnx = importlib.import_module("onnx")
    interpreter = importlib.import_module("onnx_in_torch")
    module = interpreter.OnnxModule(onnx.load(task.model)).eval()
    images = [torch.from_numpy(task.feeds[name]) for name in module.input_names]
    if options.get("channels_last"):
        for name, buffer in module.named_buffers():
            if buffer.dim() == 4:
                setattr(module, name, buffer.contiguous(memory_format=torch.channels_last))
        images = [
            image.contiguous(memory_format=torch.channels_last) if image.dim() == 4 else image for image in images
        ]
    return _torch_loaded(torch, module, images, options)


def _torch_net(torch: Any, net: Any, task: Task, options: Options) -> Loaded:
    """The module from which a model of `families` was exported. Raises ImportError for one that is no such module."""
    if not hasattr(net, "exported"):
        raise ImportError(f"{net.name} comes as a file, without a module of PyTorch")
    module, precision = net.exported().module(), getattr(torch, options.get("precision", "float32"))
    inputs = [torch.from_numpy(task.feeds[name]) for name in net.inputs(1)]
    if options.get("channels_last"):
        module = module.to(memory_format=torch.channels_last)
    inputs = [tensor.to(precision) if tensor.is_floating_point() else tensor for tensor in inputs]
    return _torch_loaded(torch, module.to(precision), inputs, options)


def _torch_loaded(torch: Any, module: Any, inputs: list[Any], options: Options) -> Loaded:
    """The module, run once; with `inductor`, compiled."""
    if options.get("inductor"):
        config: Any = importlib.import_module("torch._inductor.config")
        config.freezing = True
        module = torch.compile(module)
    last: list[Any] = []

    def run() -> None:
        with torch.inference_mode():
            found = module(*inputs)
            last[:] = [found] if torch.is_tensor(found) else list(found)

    run()
    return Loaded(run, lambda: [found.float().numpy() for found in last])


def load_matrix_product(task: Task, options: Options) -> Loaded:
    """No network: NumPy's product of two square matrices of `size`, for the processor's rate."""
    size = options["size"]
    random = np.random.default_rng(0)
    a, b = (random.standard_normal((size, size), np.float32) for _ in range(2))
    out = np.empty((size, size), np.float32)
    return Loaded(lambda: np.matmul(a, b, out=out), lambda: [out])


def from_threads(run: Callable[[], object], callers: int, seconds: float) -> float:
    """Runs a second when `callers` threads call `run`, each again as soon as it returned."""
    counts = [0] * callers
    start = threading.Barrier(callers + 1)
    stop = threading.Event()

    def caller(number: int) -> None:
        run()
        start.wait()
        while not stop.is_set():
            run()
            counts[number] += 1

    threads = [threading.Thread(target=caller, args=(number,)) for number in range(callers)]
    for thread in threads:
        thread.start()
    start.wait()
    begun = time.perf_counter()
    stop.wait(seconds)
    stop.set()
    for thread in threads:
        thread.join()
    return sum(counts) / (time.perf_counter() - begun)


LOADERS: dict[str, Loader] = {
    "dagexec": load_dagexec,
    "onnxruntime": load_onnxruntime,
    "openvino": load_openvino,
    "torch": load_torch,
    "matrix product": load_matrix_product,
}
