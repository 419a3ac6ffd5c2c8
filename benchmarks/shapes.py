"""Shapes that change: batches, text lengths and image sizes in turn, known and new, beside onnxruntime and OpenVINO.

    python benchmarks/shapes.py [--shapes 1000] [--rounds 1] [--threads 1] [--nets cnn text texts lengths images]
        [--peers dagexec onnxruntime openvino] [--json benchmarks/results/shapes.json]

A small CNN with a free batch (`cnn`) or free heights and widths (`images`, a fifth as many, of 64 to 255 pixels), and
an encoder of the size of MiniLM (6 layers of width 384) with a free length of text (`text`: each length once;
`lengths`: drawn from 1 to 512, so that they come back) or a free batch and length (`texts`: of a thousand, 25 batches
and 40 lengths). Each contender has a process of its own: it runs its largest shape, then all shapes in turn, and then
once or more again. Reported are

- the median time of a run of a known shape, over and over, for 40 of the shapes;
- the median of the runs in turn, of those whose shape was new, and of all in later rounds; and each in proportion to
  runs of that shape when it is known;
- the resident memory that all shapes add to that of the largest.
"""

from __future__ import annotations

import argparse
import importlib
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from environment import write_report
from onnx import TensorProto, helper, numpy_helper

Array = npt.NDArray[Any]
Feeds = Mapping[str, Array]
Run = Callable[[Feeds], object]

_OPSET = 17
_KNOWN_RUNS = 5  # of a shape, to know its time
_MOST_KNOWN = 40  # shapes of which that is asked
LAYERS, WIDTH, HEADS, WORDS, LENGTHS = 6, 384, 12, 1000, 512


class _Builder:
    """Nodes and weights of a net."""

    def __init__(self) -> None:
        self._random = np.random.default_rng(0)
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []

    def weight(self, *shape: int, scale: float = 1.0) -> str:
        name = f"w{len(self.weights)}"
        values = self._random.standard_normal(shape, np.float32) * np.float32(scale)
        self.weights.append(numpy_helper.from_array(values, name))
        return name

    def constant(self, values: object, dtype: npt.DTypeLike = np.int64) -> str:
        name = f"w{len(self.weights)}"
        self.weights.append(numpy_helper.from_array(np.array(values, dtype), name))
        return name

    def node(self, kind: str, *inputs: str, **attributes: Any) -> str:
        name = f"{kind}{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, list(inputs), [name], name, **attributes))
        return name

    def model(self, name: str, given: onnx.ValueInfoProto, result: str, shape: Sequence[str | int]) -> onnx.ModelProto:
        """The net from `given` to `result`."""
        end = helper.make_tensor_value_info(result, TensorProto.FLOAT, shape)
        graph = helper.make_graph(self.nodes, name, [given], [end], self.weights)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", _OPSET)], ir_version=8)
        onnx.checker.check_model(model)
        return model


def cnn(*size: int | str) -> onnx.ModelProto:
    """Images (batch, 3, *size) to ten classes: five convolutions, one of them beside a residual connection."""
    net = _Builder()

    def convolution(x: str, inputs: int, outputs: int, size: int, stride: int = 1) -> str:
        filters = net.weight(outputs, inputs, size, size, scale=(2 / (inputs * size * size)) ** 0.5)
        bias = net.weight(outputs, scale=0.1)
        return net.node("Relu", net.node("Conv", x, filters, bias, strides=[stride] * 2, pads=[size // 2] * 4))

    x = convolution("x", 3, 16, 3)
    x = convolution(convolution(x, 16, 32, 3, stride=2), 32, 32, 3)
    x = net.node("Add", x, convolution(x, 32, 32, 1))
    x = net.node("Flatten", net.node("GlobalAveragePool", convolution(x, 32, 64, 3, stride=2)))
    y = net.node("Softmax", net.node("Gemm", x, net.weight(64, 10), net.weight(10)), axis=1)
    given = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 3, *size])
    return net.model("cnn", given, y, ["batch", 10])


def text() -> onnx.ModelProto:
    """Words (batch, length) to a vector for each: an encoder as BERT has it."""
    net = _Builder()
    head = WIDTH // HEADS

    def linear(x: str, inputs: int, outputs: int) -> str:
        product = net.node("MatMul", x, net.weight(inputs, outputs, scale=inputs**-0.5))
        return net.node("Add", product, net.weight(outputs, scale=0.1))

    def normalized(x: str) -> str:
        return net.node("LayerNormalization", x, net.weight(WIDTH), net.weight(WIDTH), axis=-1)

    def heads(x: str, order: Sequence[int]) -> str:
        split = net.node("Reshape", linear(x, WIDTH, WIDTH), net.constant([0, 0, HEADS, head]))
        return net.node("Transpose", split, perm=order)

    def attention(x: str) -> str:
        query, key, value = heads(x, (0, 2, 1, 3)), heads(x, (0, 2, 3, 1)), heads(x, (0, 2, 1, 3))
        scores = net.node("Mul", net.node("MatMul", query, key), net.constant(head**-0.5, np.float32))
        mixed = net.node("MatMul", net.node("Softmax", scores, axis=-1), value)
        joined = net.node("Reshape", net.node("Transpose", mixed, perm=(0, 2, 1, 3)), net.constant([0, 0, WIDTH]))
        return linear(joined, WIDTH, WIDTH)

    def gelu(x: str) -> str:
        erf = net.node("Erf", net.node("Div", x, net.constant(2**0.5, np.float32)))
        return net.node("Mul", net.node("Mul", x, net.node("Add", erf, net.constant(1, np.float32))),
                        net.constant(0.5, np.float32))  # fmt: skip

    length = net.node("Gather", net.node("Shape", "words"), net.constant(1), axis=0)
    places = net.node("Range", net.constant(0), length, net.constant(1))
    x = net.node("Add", net.node("Gather", net.weight(WORDS, WIDTH), "words"),
                 net.node("Gather", net.weight(LENGTHS, WIDTH), places))  # fmt: skip
    x = normalized(x)
    for _ in range(LAYERS):
        x = normalized(net.node("Add", x, attention(x)))
        x = normalized(net.node("Add", x, linear(gelu(linear(x, WIDTH, 4 * WIDTH)), 4 * WIDTH, WIDTH)))
    given = helper.make_tensor_value_info("words", TensorProto.INT64, ["batch", "length"])
    return net.model("text", given, x, ["batch", "length", WIDTH])


Shape = tuple[int, ...]


@cache
def _noise(count: int) -> Array:
    return np.random.default_rng(0).standard_normal((count, 3, 32, 32), np.float32)


def _images(shape: Shape) -> Feeds:
    """The first of 1,000 images, as making new ones takes longer than the net."""
    return {"x": _noise(max(1000, shape[0]))[: shape[0]]}


def _pictures(shape: Shape) -> Feeds:
    """A part of the noise, of this height and width."""
    return {"x": np.resize(_noise(1000), (1, 3, *shape))}


def _words(shape: Shape) -> Feeds:
    return {"words": np.random.default_rng(shape).integers(0, WORDS, shape)}


def _grid(count: int) -> list[Shape]:
    """Batches and lengths; of a thousand, 25 batches and 40 lengths."""
    batches = next(size for size in range(int(count**0.5), 0, -1) if count % size == 0)
    return [(1 + index % batches, 1 + index // batches) for index in range(count)]


def _drawn_lengths(count: int) -> list[Shape]:
    """Drawn by chance, some of them more than once; the largest last."""
    drawn = random.Random(1).choices(range(1, LENGTHS + 1), k=count - 1)
    return [(1, size) for size in (*drawn, LENGTHS)]


def _sizes(count: int) -> list[Shape]:
    """A fifth as many heights and widths, all of them different; the largest last."""
    every = [(height, width) for height in range(64, 256) for width in range(64, 256)]
    return [*random.Random(2).sample(every[:-1], count // 5 - 1), every[-1]]


NETS: Mapping[str, tuple[Callable[[], onnx.ModelProto], Callable[[Shape], Feeds], Callable[[int], list[Shape]]]] = {
    "cnn": (lambda: cnn(32, 32), _images, lambda count: [(size,) for size in range(1, count + 1)]),
    "text": (text, _words, lambda count: [(1, size) for size in range(1, count + 1)]),
    "texts": (text, _words, _grid),
    "lengths": (text, _words, _drawn_lengths),
    "images": (lambda: cnn("height", "width"), _pictures, _sizes),
}
"""By name, the model, its inputs for a batch or a batch and a length, and so many of these, the largest last."""


def resident() -> int:
    """Bytes of this process that are in memory."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * 4096


def _by_dagexec(path: str, threads: int) -> tuple[Run, Callable[[], object]]:
    from dataclasses import asdict

    import dagexec

    executor = dagexec.compile(path, num_workers=threads)
    return executor.run, lambda: asdict(executor.statistics().preparations[0])


def _by_onnxruntime(path: str, threads: int) -> tuple[Run, Callable[[], object]]:
    import onnxruntime

    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(path, settings, providers=["CPUExecutionProvider"])
    return lambda feeds: session.run(None, dict(feeds)), lambda: None


def _by_openvino(path: str, threads: int) -> tuple[Run, Callable[[], object]]:
    openvino = importlib.import_module("openvino")

    request = openvino.compile_model(path, "CPU", {"INFERENCE_NUM_THREADS": threads}).create_infer_request()
    return lambda feeds: request.infer(dict(feeds)), lambda: None


PEERS = {"dagexec": _by_dagexec, "onnxruntime": _by_onnxruntime, "openvino": _by_openvino}


def _seconds(run: Run, feeds: Feeds) -> float:
    begin = time.perf_counter()
    run(feeds)
    return time.perf_counter() - begin


def measure(peer: str, path: str, net: str, count: int, rounds: int, threads: int) -> dict[str, object]:
    """What one contender takes, in this process."""
    run, told = PEERS[peer](path, threads)
    _, feeds_of, shapes_of = NETS[net]
    shapes = shapes_of(count)
    largest = feeds_of(shapes[-1])
    for _ in range(3):
        run(largest)
    random.Random(0).shuffle(shapes)
    before = resident()
    turn = [_seconds(run, feeds_of(shape)) for shape in shapes]
    later = [_seconds(run, feeds_of(shape)) for _ in range(rounds) for shape in shapes]
    after = resident()
    sample = range(0, len(shapes), -(-len(shapes) // _MOST_KNOWN))
    known = {index: _known_seconds(run, feeds_of(shapes[index])) for index in sample}
    new = [index for index, shape in enumerate(shapes) if shapes.index(shape) == index]
    in_turn = {index: statistics.median(later[index :: len(shapes)]) for index in sample}
    return {
        "known_ms": 1e3 * statistics.median(known.values()),
        "turn_ms": 1e3 * statistics.median(turn),
        "first_ms": 1e3 * statistics.median(turn[index] for index in new),
        "later_ms": 1e3 * statistics.median(later),
        "turn_by_known": statistics.median(turn[index] / known[index] for index in sample),
        "first_by_known": statistics.median(turn[index] / known[index] for index in sample if index in set(new)),
        "later_by_known": statistics.median(in_turn[index] / known[index] for index in sample),
        "largest_mb": before / 1e6,
        "growth_mb": (after - before) / 1e6,
        "preparations": told(),
    }


def _known_seconds(run: Run, feeds: Feeds) -> float:
    run(feeds)
    return statistics.median(_seconds(run, feeds) for _ in range(_KNOWN_RUNS))


def _in_a_process(arguments: Sequence[str]) -> dict[str, object]:
    found = subprocess.run([sys.executable, __file__, *arguments], check=True, capture_output=True, text=True)
    result: dict[str, object] = json.loads(found.stdout.splitlines()[-1])
    return result


def compare(
    nets: Sequence[str], peers: Sequence[str], shapes: int, rounds: int, threads: int
) -> list[dict[str, object]]:
    """A row for each net and contender, each in a process of its own."""
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as folder:
        for net in nets:
            path = str(Path(folder) / f"{net}.onnx")
            onnx.save(NETS[net][0](), path)
            for peer in peers:
                arguments = ["--child", peer, path, "--nets", net, "--shapes", str(shapes)]
                arguments += ["--rounds", str(rounds), "--threads", str(threads)]
                rows.append(
                    {"net": net, "shapes": shapes, "threads": threads, "peer": peer, **_in_a_process(arguments)}
                )
                shown = (f"{name} {value:.3g}" for name, value in rows[-1].items() if isinstance(value, float))
                print(net, peer, *shown, flush=True)
    return rows


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nets", nargs="+", choices=list(NETS), default=list(NETS))
    parser.add_argument("--peers", nargs="+", choices=list(PEERS), default=list(PEERS))
    parser.add_argument("--shapes", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", nargs=2, metavar=("PEER", "MODEL"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child is not None:
        peer, path = arguments.child
        print(json.dumps(measure(peer, path, arguments.nets[0], arguments.shapes, arguments.rounds, arguments.threads)))
        return
    rows = compare(arguments.nets, arguments.peers, arguments.shapes, arguments.rounds, arguments.threads)
    if arguments.json is not None:
        write_report(arguments.json, rows=rows)


if __name__ == "__main__":
    main()
