"""Decoders that write a text, a position a run: sessions beside onnxruntime, which is fed its caches; interleaved.

    python benchmarks/sessions.py [--tokens 64 1000] [--json benchmarks/results/sessions.json]

Each row writes so many tokens from an empty cache twice: the first time ever, in which every length is new, and again.
A token's time is that of its whole run, with what is chosen next. The texts are the same; the scores agree.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime
from environment import describe, write_report
from onnx import TensorProto, helper, numpy_helper

import dagexec
from dagexec.executor.sessions.session import Session

Array = npt.NDArray[Any]

SIZES = {"tiny": (4, 256, 8), "small": (6, 768, 12)}
"""Layers, width and heads."""

WORDS, POSITIONS = 1000, 2048


class _Writer:
    """Nodes and weights of a model in ONNX."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []
        self._random, self._numbers = np.random.default_rng(0), itertools.count()

    def node(self, kind: str, *inputs: str, to: str = "", **arguments: Any) -> str:
        output = to or f"v{next(self._numbers)}"
        self.nodes.append(helper.make_node(kind, list(inputs), [output], **arguments))
        return output

    def constant(self, value: Any, dtype: type = np.int64) -> str:
        name = f"c{next(self._numbers)}"
        self.weights.append(numpy_helper.from_array(np.array(value, dtype), name))
        return name

    def weight(self, *shape: int) -> str:
        return self.constant(self._random.standard_normal(shape) * shape[0] ** -0.5, np.float32)

    def layer(self, x: str, inner: int, units: int) -> str:
        return self.node("Add", self.node("MatMul", x, self.weight(inner, units)), self.weight(units))

    def normalized(self, x: str, width: int) -> str:
        ones, zeros = self.constant(np.ones(width), np.float32), self.constant(np.zeros(width), np.float32)
        return self.node("LayerNormalization", x, ones, zeros, axis=-1)


def decoder(layers: int, width: int, heads: int) -> onnx.ModelProto:
    """As GPT-2: `ids` [1, new], `past_k0` [1, heads, past, elements] and so on; `scores`, `present_k0` and so on."""
    w, elements = _Writer(), width // heads
    past = w.node("Gather", w.node("Shape", "past_k0"), w.constant(2))
    total = w.node("Add", past, w.node("Gather", w.node("Shape", "ids"), w.constant(1)))
    positions = w.node("Range", past, total, w.constant(1))
    columns = w.node("Unsqueeze", w.node("Range", w.constant(0), total, w.constant(1)), w.constant([0]))
    hidden = w.node("Greater", columns, w.node("Unsqueeze", positions, w.constant([1])))
    mask = w.node("Where", hidden, w.constant(-1e9, np.float32), w.constant(0, np.float32))
    words, places = w.weight(WORDS, width), w.weight(POSITIONS, width)
    x = w.node("Add", w.node("Gather", words, "ids"), w.node("Gather", places, positions))
    split, joined = w.constant([0, 0, heads, elements]), w.constant([0, 0, width])
    sizes: list[str | int | None] = [1, heads, "past", elements]
    inputs = [helper.make_tensor_value_info("ids", TensorProto.INT64, [1, "new"])]
    outputs = [helper.make_tensor_value_info("scores", TensorProto.FLOAT, [1, "new", WORDS])]
    for layer in range(layers):
        read = w.normalized(x, width)
        q, k, v = (
            w.node("Transpose", w.node("Reshape", w.layer(read, width, width), split), perm=[0, 2, 1, 3]) for _ in "qkv"
        )
        for kind, new in (("k", k), ("v", v)):
            w.node("Concat", f"past_{kind}{layer}", new, to=f"present_{kind}{layer}", axis=2)
            inputs.append(helper.make_tensor_value_info(f"past_{kind}{layer}", TensorProto.FLOAT, sizes))
            outputs.append(helper.make_tensor_value_info(f"present_{kind}{layer}", TensorProto.FLOAT, sizes))
        products = w.node("MatMul", q, w.node("Transpose", f"present_k{layer}", perm=[0, 1, 3, 2]))
        scaled = w.node("Add", w.node("Mul", products, w.constant(elements**-0.5, np.float32)), mask)
        mixed = w.node("MatMul", w.node("Softmax", scaled, axis=-1), f"present_v{layer}")
        line = w.node("Reshape", w.node("Transpose", mixed, perm=[0, 2, 1, 3]), joined)
        x = w.node("Add", x, w.layer(line, width, width))
        wide = w.layer(w.normalized(x, width), width, 4 * width)
        half = w.node("Mul", wide, w.constant(0.5, np.float32))
        bent = w.node("Erf", w.node("Div", wide, w.constant(2**0.5, np.float32)))
        bent = w.node("Mul", half, w.node("Add", bent, w.constant(1, np.float32)))
        x = w.node("Add", x, w.layer(bent, 4 * width, width))
    w.node("MatMul", w.normalized(x, width), w.weight(width, WORDS), to="scores")
    graph = helper.make_graph(w.nodes, "decoder", inputs, outputs, w.weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


class _Text:
    """A text in the making, by a function of the next token's feed."""

    def __init__(self, run: Callable[[Mapping[str, Array]], Array]) -> None:
        self._run = run
        self.tokens, self.seconds = [1], list[float]()
        self.scores = np.zeros(0)

    def go_on(self) -> None:
        began = time.perf_counter()
        self.scores = self._run({"ids": np.array([self.tokens[-1:]])})[0, -1]
        self.tokens.append(int(self.scores.argmax()))
        self.seconds.append(time.perf_counter() - began)


def peer_text(session: onnxruntime.InferenceSession, heads: int, elements: int) -> _Text:
    """onnxruntime's, its caches fed back."""
    outputs = [one.name for one in session.get_outputs()]
    empty = np.zeros((1, heads, 0, elements), np.float32)
    caches = {one.name: empty for one in session.get_inputs() if one.name != "ids"}

    def run(feeds: Mapping[str, Array]) -> Array:
        results = dict(zip(outputs, session.run(None, {**feeds, **caches}), strict=True))
        caches.update({name: results[f"present{name[4:]}"] for name in caches})
        scores: Array = results["scores"]
        return scores

    return _Text(run)


def _scores(session: Session, feeds: Mapping[str, Array]) -> Array:
    return session.run(feeds)["scores"]


def measure(size: str, tokens: int, threads: int) -> dict[str, Any]:
    """Milliseconds a token: the mean of a text, and the median of its last eighth."""
    layers, width, heads = SIZES[size]
    proto = decoder(layers, width, heads).SerializeToString()
    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads, settings.log_severity_level = threads, 3
    peer = onnxruntime.InferenceSession(proto, settings)
    row: dict[str, Any] = {"decoder": size, "tokens": tokens, "threads": threads}
    with dagexec.compile(proto, num_workers=threads) as executor:
        for when in ("first", "again"):
            texts = {
                "dagexec": _Text(partial(_scores, executor.session())),
                "onnxruntime": peer_text(peer, heads, width // heads),
            }
            for _ in range(tokens):
                for text in texts.values():
                    text.go_on()
            ours, theirs = texts.values()
            if ours.tokens != theirs.tokens or abs(ours.scores - theirs.scores).max() > 1e-3:
                raise SystemExit(f"{size}: the texts differ")
            for name, text in texts.items():
                last = text.seconds[-max(1, tokens // 8) :]
                row[f"{when} {name}"] = round(1e3 * float(np.mean(text.seconds)), 4)
                row[f"{when} {name}, last"] = round(1e3 * float(np.median(last)), 4)
    return row


def main() -> None:
    """Measure and print; with `--json` keep what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[64, 1000])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    print(describe())
    rows = []
    for size, tokens, threads in itertools.product(SIZES, arguments.tokens, (1, 2)):
        rows.append(measure(size, tokens, threads))
        print(rows[-1], flush=True)
    if arguments.json:
        write_report(arguments.json, rows=rows)


if __name__ == "__main__":
    main()
