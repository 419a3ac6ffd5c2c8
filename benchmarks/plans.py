"""From a file to the first output, in new processes that have imported the runtime: compiled, or opened as a plan.

    python benchmarks/plans.py [--repeat 5] [--json benchmarks/results/plans.json] [MODEL...]

A ResNet-50 and a BERT-base of random weights, and LeNet, as ONNX files: compiled by dagexec, opened from a plan by
dagexec, loaded by onnxruntime, and loaded by onnxruntime from its own format (.ort) with what its optimizer made of the
model. Times are of the processor, all threads, and by the clock: least of some processes, less a later run. Results are
compared with onnxruntime's. Then `dagexec serve` with ten models of the zoo, from their names and from plans: seconds
from a process that has imported the server to all models ready, each having run once.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from environment import write_report
from onnx import TensorProto, helper, numpy_helper

Array = npt.NDArray[Any]

MODELS = ("resnet50", "bert_base", "lenet")
CONTENDERS = {"dagexec": ".onnx", "dagexec plan": ".dagexec", "onnxruntime": ".onnx", "onnxruntime .ort": ".ort"}
SERVED = (
    "lenet", "squeezenet", "googlenet", "mobilenet_v2", "resnet50", "densenet121", "inception_v3", "nasnet_a",
    "squeezenet_towers", "vgg19",
)  # fmt: skip
TOLERANCE = 1e-3  # of the largest value
LATER_RUNS = 5


# --- models


def bert_base(path: Path, *, width: int = 768, layers: int = 12, heads: int = 12, length: int = 128) -> None:
    """An encoder as BERT-base is exported: 110 million random weights, one sequence."""
    drawn = np.random.default_rng(0)
    nodes: list[onnx.NodeProto] = []
    constants: list[onnx.TensorProto] = []

    def constant(name: str, value: Any, dtype: Any = np.float32) -> str:
        constants.append(numpy_helper.from_array(np.asarray(value, dtype), name))
        return name

    def weights(name: str, *shape: int) -> str:
        return constant(name, drawn.standard_normal(shape, dtype=np.float32) * np.float32(0.02))

    def node(kind: str, inputs: list[str], output: str, **arguments: Any) -> str:
        nodes.append(helper.make_node(kind, inputs, [output], **arguments))
        return output

    def linear(x: str, name: str, inner: int, outer: int) -> str:
        product = node("MatMul", [x, weights(f"{name}.weight", inner, outer)], f"{name}.product")
        return node("Add", [product, weights(f"{name}.bias", outer)], name)

    def normalized(x: str, name: str) -> str:
        scale = constant(f"{name}.scale", np.ones(width))
        return node("LayerNormalization", [x, scale, weights(f"{name}.shift", width)], name, epsilon=1e-12)

    embedded = [
        node("Gather", [weights("words", 30522, width), "input_ids"], "word"),
        node("Gather", [weights("places", 512, width), constant("place", [range(length)], np.int64)], "at"),
        node("Gather", [weights("kinds", 2, width), "token_type_ids"], "kind"),
    ]
    x = normalized(node("Add", [node("Add", embedded[:2], "word.at"), embedded[2]], "embedded"), "embedding")
    one, split = constant("one", 1), constant("split", [0, 0, heads, width // heads], np.int64)
    merged, scale = constant("merged", [0, 0, width], np.int64), constant("scale", (width // heads) ** -0.5)
    seen = node("Unsqueeze", ["attention_mask", constant("axes", [1, 2], np.int64)], "seen")
    hidden = node("Sub", [one, node("Cast", [seen], "seen.float", to=TensorProto.FLOAT)], "hidden")
    mask = node("Mul", [hidden, constant("lowest", -1e4)], "mask")
    half, root = constant("half", 0.5), constant("root", 2**0.5)
    for layer in range(layers):
        at = f"layer{layer}."
        parts = {
            name: node("Reshape", [linear(x, at + name, width, width), split], f"{at}{name}.heads") for name in "qkv"
        }
        q, v = (node("Transpose", [parts[name]], f"{at}{name}.turned", perm=[0, 2, 1, 3]) for name in "qv")
        k = node("Transpose", [parts["k"]], f"{at}k.turned", perm=[0, 2, 3, 1])
        scores = node("Mul", [node("MatMul", [q, k], at + "qk"), scale], at + "scores")
        shares = node("Softmax", [node("Add", [scores, mask], at + "masked")], at + "shares", axis=-1)
        mixed = node("Transpose", [node("MatMul", [shares, v], at + "mixed")], at + "mixed.turned", perm=[0, 2, 1, 3])
        out = linear(node("Reshape", [mixed, merged], at + "joined"), at + "out", width, width)
        x = normalized(node("Add", [out, x], at + "residual"), at + "attended")
        wide = linear(x, at + "wide", width, 4 * width)
        erf = node("Erf", [node("Div", [wide, root], at + "scaled")], at + "erf")
        gelu = node("Mul", [node("Mul", [wide, node("Add", [erf, one], at + "more")], at + "twice"), half], at + "gelu")
        x = normalized(node("Add", [linear(gelu, at + "narrow", 4 * width, width), x], at + "sum"), at + "done")
    first = node("Gather", [x, constant("first", 0, np.int64)], "first.token", axis=1)
    node("Tanh", [linear(first, "pooler", width, width)], "pooled")
    inputs = [
        helper.make_tensor_value_info(name, TensorProto.INT64, [1, length])
        for name in ("input_ids", "attention_mask", "token_type_ids")
    ]
    outputs = [helper.make_tensor_value_info("pooled", TensorProto.FLOAT, [1, width])]
    graph = helper.make_graph(nodes, "bert_base", inputs, outputs, constants)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)


def make(name: str, folder: Path) -> None:
    """The files of a model: ONNX, a plan, and onnxruntime's own."""
    import dagexec
    from dagexec.export import save_onnx

    file = folder / f"{name}.onnx"
    if name == "bert_base":
        bert_base(file)
    else:
        model = dagexec.load_model(f"zoo:{name}")
        shapes = {key: [size or 1 for size in info.shape or ()] for key, info in model.inputs.items()}
        save_onnx(model, file, shapes=shapes)
    dagexec.build(file, folder / f"{name}.dagexec", dagexec.CompileOptions()).close()
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = os.fspath(folder / f"{name}.ort")
    options.add_session_config_entry("session.save_model_format", "ORT")
    onnxruntime.InferenceSession(os.fspath(file), options, providers=["CPUExecutionProvider"])


def feeds_of(shapes: dict[str, list[int]]) -> dict[str, Array]:
    """The same values in every process: images, or tokens that are all seen."""
    drawn = np.random.default_rng(0)
    tokens = len(shapes) > 1
    return {
        name: np.ones(shape, np.int64) if tokens else drawn.standard_normal(shape, np.float32)
        for name, shape in shapes.items()
    }


# --- in a process of its own


def child(contender: str, source: str, outputs: str) -> None:
    """Measure once: times as JSON on the standard output, and the results in the file `outputs`."""
    begin: Any
    if contender.startswith("dagexec"):
        import dagexec

        def begin() -> Any:
            executor = (dagexec.open if source.endswith(".dagexec") else dagexec.compile)(source)
            return executor.run, {name: list(info.shape or ()) for name, info in executor.inputs.items()}
    else:
        import onnxruntime

        def begin() -> Any:
            session = onnxruntime.InferenceSession(source, providers=["CPUExecutionProvider"])
            shapes = {value.name: list(value.shape) for value in session.get_inputs()}
            names = [value.name for value in session.get_outputs()]
            return lambda feeds: dict(zip(names, session.run(None, feeds), strict=True)), shapes

    start, computed = time.perf_counter(), time.process_time()
    run, shapes = begin()
    opened = time.process_time() - computed
    results = run(feeds_of(shapes))
    seconds, processor = time.perf_counter() - start, time.process_time() - computed
    later = [_timed(run, feeds_of(shapes)) for _ in range(LATER_RUNS)]
    np.savez(outputs, **results)
    run_seconds, run_processor = min(one[0] for one in later), min(one[1] for one in later)
    print(
        json.dumps(
            {
                "opened_ms": opened * 1e3,
                "run_ms": run_processor * 1e3,
                "beyond_a_run_ms": (processor - run_processor) * 1e3,
                "beyond_a_run_ms_by_the_clock": (seconds - run_seconds) * 1e3,
            }
        )
    )


def _timed(run: Any, feeds: dict[str, Array]) -> tuple[float, float]:
    start, computed = time.perf_counter(), time.process_time()
    run(feeds)
    return time.perf_counter() - start, time.process_time() - computed


def serve(sources: list[str]) -> None:
    """Load all models as `dagexec serve` does, and print the seconds until they are ready."""
    from dagexec.server.config import ServerConfig
    from dagexec.server.repository import Repository
    from dagexec.server.run import Server

    del Server  # imported, with all that it needs

    async def load() -> bool:
        repository = Repository(ServerConfig().with_models(sources))
        await repository.load_all()
        return repository.is_ready()

    start, computed = time.perf_counter(), time.process_time()
    ready = asyncio.run(load())
    print(json.dumps({"ready": ready, "s": time.perf_counter() - start, "processor_s": time.process_time() - computed}))


# --- in the process that asks


def in_process(*arguments: str) -> dict[str, float]:
    """What a new process measures, which finds no stored choices."""
    command = [sys.executable, __file__, *arguments]
    environment = os.environ | {"DAGEXEC_CHOICES": "off"}
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True, env=environment)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def measure(name: str, folder: Path, repeat: int) -> dict[str, Any]:
    """The row of one model. Raises ValueError when results differ."""
    files = {contender: folder / f"{name}{suffix}" for contender, suffix in CONTENDERS.items()}
    found: dict[str, list[dict[str, float]]] = {contender: [] for contender in CONTENDERS}
    results: dict[str, dict[str, Array]] = {}
    for _ in range(repeat):
        for contender, file in files.items():
            outputs = folder / "outputs.npz"
            found[contender].append(in_process("--child", contender, os.fspath(file), os.fspath(outputs)))
            with np.load(outputs) as arrays:
                results[contender] = {key: arrays[key] for key in arrays.files}
    for contender, arrays in results.items():
        for key, array in results["onnxruntime"].items():
            if np.abs(arrays[key] - array).max() > TOLERANCE * np.abs(array).max():
                raise ValueError(f"{name}: {key!r} of {contender} is not onnxruntime's")
    row: dict[str, Any] = {"file_mib": {file.suffix: round(file.stat().st_size / 2**20, 1) for file in files.values()}}
    for contender, runs in found.items():
        row[contender] = {key: round(min(run[key] for run in runs), 1) for key in runs[0]}
        print(f"{name:10} {contender:18}", row[contender], flush=True)
    return row


def measure_serving(folder: Path, repeat: int) -> dict[str, Any]:
    """Ten models, from names and from plans."""
    import dagexec

    plans = []
    for name in SERVED:
        path = folder / f"{name}.dagexec"
        if not path.exists():
            dagexec.build(f"zoo:{name}", path, dagexec.CompileOptions()).close()
        plans.append(f"{name}={path}")
    row = {}
    for what, sources in (("names", [f"{name}=zoo:{name}" for name in SERVED]), ("plans", plans)):
        runs = [in_process("--serve", *sources) for _ in range(repeat)]
        if not all(run["ready"] for run in runs):
            raise ValueError(f"not all models are ready: {what}")
        row[what] = {key: round(min(run[key] for run in runs), 2) for key in ("s", "processor_s")}
        print(f"ten models from {what}:", row[what], flush=True)
    return row


def main() -> None:
    """Measure, print, and write the JSON file."""
    if sys.argv[1:2] == ["--child"]:
        child(*sys.argv[2:])
        return
    if sys.argv[1:2] == ["--serve"]:
        serve(sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", default=list(MODELS), help=", ".join(MODELS))
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        report: dict[str, Any] = {"models": {}}
        for name in options.models:
            make(name, Path(folder))
            report["models"][name] = measure(name, Path(folder), options.repeat)
        report["ten_models"] = measure_serving(Path(folder), max(1, options.repeat // 2))
    if options.json is not None:
        write_report(options.json, **report)


if __name__ == "__main__":
    main()
