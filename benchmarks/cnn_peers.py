"""dagexec and its peers behind one face: what a contender process of `cnn.py` loads and runs.

A peer that is not installed raises ImportError when it is loaded. Every peer gets its fastest way to be called: arrays
for input and output that are bound once, where it has such a way. All compute in float32.
"""

from __future__ import annotations

import importlib
import os
import shutil
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
    """What to load: the model's file, the arrays of a run, and how many threads may compute."""

    model: Path
    feeds: dict[str, Array]
    threads: int


@dataclass(frozen=True)
class Loaded:
    """A model that is ready.

    Attributes:
        run: one inference, from the fed arrays to arrays of results.
        output: the first result of the last run.
        serve: answers requests from a number of callers for so many seconds; returns inferences a second.
        request: one inference with results of its own, for any number of threads at once.
        chosen: what the contender chose itself, for the record.
    """

    run: Callable[[], object]
    output: Callable[[], Array]
    serve: Callable[[int, float], float] | None = None
    request: Callable[[], object] | None = None
    chosen: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Turn:
    """One turn's runs: their median and least seconds, and how many there were."""

    median: float
    least: float
    runs: int


Loader = Callable[[Task, Options], Loaded]


def load_dagexec(task: Task, options: Options) -> Loaded:
    """`dagexec.compile` as it is; options are its keyword arguments."""
    import dagexec

    executor = dagexec.compile(task.model, **options)
    [blob] = executor.outputs
    out = {blob: executor.run(task.feeds)[blob].copy()}
    chosen = {
        name: getattr(executor, name)
        for name in ("net_type", "num_workers", "intra_op_threads")
        if hasattr(executor, name)
    }
    return Loaded(
        lambda: executor.run(task.feeds, out=out),
        lambda: out[blob],
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
    session = ort.InferenceSession(str(task.model), settings, providers=["CPUExecutionProvider"])
    output = session.get_outputs()[0].name
    result = session.run([output], task.feeds)[0]
    binding = session.io_binding()
    for name, array in task.feeds.items():
        binding.bind_cpu_input(name, array)
    binding.bind_output(output, "cpu", 0, np.float32, result.shape, result.ctypes.data)
    return Loaded(
        lambda: session.run_with_iobinding(binding),
        lambda: result,
        lambda callers, seconds: from_threads(lambda: session.run([output], task.feeds), callers, seconds),
        lambda: session.run([output], task.feeds),
    )


def load_openvino(task: Task, options: Options) -> Loaded:
    """OpenVINO on the processor, computing in float32 (its default may be bfloat16). Options are its properties."""
    openvino = importlib.import_module("openvino")
    properties = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": task.threads} | dict(options)
    core = openvino.Core()
    compiled = core.compile_model(core.read_model(task.model), "CPU", properties)
    request = compiled.create_infer_request()
    for name, array in task.feeds.items():
        request.set_tensor(name, openvino.Tensor(array, shared_memory=True))
    result = request.get_output_tensor(0).data

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
    return Loaded(request.infer, lambda: result, serve, ask, chosen)


def _openvino_instructions(compiled: Any) -> str:
    """The newest vector instructions that the kernels of a compiled model are named after."""
    kernels = " ".join(node.rt_info["primitiveType"].astype(str) for node in compiled.get_runtime_model().get_ops())
    return next((name for name in ("avx512", "avx2", "avx", "sse42") if name in kernels), "")


def load_torch(task: Task, options: Options) -> Loaded:
    """torch on the processor: eager; with `channels_last`; or with `inductor`, weights frozen into the code."""
    torch = importlib.import_module("torch")
    if options.get("inductor") and not any(map(shutil.which, (os.environ.get("CXX", "c++"), "g++", "clang++"))):
        raise ImportError("it needs a C++ compiler, and there is none")
    onnx = importlib.import_module("onnx")
    interpreter = importlib.import_module("onnx_in_torch")
    torch.set_num_threads(task.threads)
    module = interpreter.OnnxModule(onnx.load(task.model)).eval()
    images = [torch.from_numpy(task.feeds[name]) for name in module.input_names]
    if options.get("channels_last"):
        for name, buffer in module.named_buffers():
            if buffer.dim() == 4:
                setattr(module, name, buffer.contiguous(memory_format=torch.channels_last))
        images = [
            image.contiguous(memory_format=torch.channels_last) if image.dim() == 4 else image for image in images
        ]
    if options.get("inductor"):
        config: Any = importlib.import_module("torch._inductor.config")
        config.freezing = True
        module = torch.compile(module)
    last: list[Any] = []

    def run() -> None:
        with torch.inference_mode():
            last[:] = [module(*images)]

    run()
    return Loaded(run, lambda: last[0].numpy())


def load_matrix_product(task: Task, options: Options) -> Loaded:
    """No network: NumPy's product of two square matrices of `size`, for the processor's rate."""
    size = options["size"]
    random = np.random.default_rng(0)
    a, b = (random.standard_normal((size, size), np.float32) for _ in range(2))
    out = np.empty((size, size), np.float32)
    return Loaded(lambda: np.matmul(a, b, out=out), lambda: out)


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
