"""A hundred sessions of a decoder, joined at each step, beside the same one after another.

    python benchmarks/joined_sessions.py [--json benchmarks/results/joined_sessions.json]

Their texts have several lengths; some are forked on the way, and some runs are cancelled. The bytes are the same.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import gc
import hashlib
import itertools
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
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


def decoder(layers: int, width: int, heads: int, batch: int | str = 1) -> onnx.ModelProto:
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
    sizes: list[str | int | None] = [batch, heads, "past", elements]
    inputs = [helper.make_tensor_value_info("ids", TensorProto.INT64, [batch, "new"])]
    outputs = [helper.make_tensor_value_info("scores", TensorProto.FLOAT, [batch, "new", WORDS])]
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


SESSIONS, MOST_JOINED = 100, 32


class _Plan:
    """What a session writes: a prompt, how many tokens, where it is forked, and which runs are cancelled first."""

    def __init__(self, number: int) -> None:
        random = Random(number)
        self.prompt = np.random.default_rng(number).integers(0, WORDS, (1, random.randint(4, 20)))
        self.count = random.randint(10, 40)
        self.forks = {self.count // 2} if random.random() < 0.1 else set[int]()
        self.cancels = {random.randrange(1, self.count)} if random.random() < 0.1 else set[int]()


class _Writers:
    """Sessions that write as planned.

    Attributes:
        tokens: how many they have written.
        digests: of the scores of each.
    """

    def __init__(self) -> None:
        self.tokens = 0
        self.digests: dict[str, str] = {}
        self.sessions: list[Session] = []

    def one_after_another(self, new: Callable[[], Session]) -> None:
        """All of them, each alone."""
        for number in range(SESSIONS):
            asyncio.run(self._write(str(number), new(), _Plan(number), 0, self._blocking))

    def together(self, new: Callable[[], Session]) -> None:
        """All of them at the same time."""

        async def all_of_them() -> None:
            await asyncio.gather(
                *(self._write(str(number), new(), _Plan(number), 0, self._joined) for number in range(SESSIONS))
            )

        asyncio.run(all_of_them())

    @staticmethod
    async def _blocking(session: Session, feeds: Mapping[str, Array], _is_cancelled: bool) -> Array:
        return session.run(feeds)["scores"]

    @staticmethod
    async def _joined(session: Session, feeds: Mapping[str, Array], is_cancelled: bool) -> Array:
        if is_cancelled:
            task = asyncio.create_task(session.run_async(feeds))
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
            if not task.cancelled():
                return task.result()["scores"]
        return (await session.run_async(feeds))["scores"]

    async def _write(self, name: str, session: Session, plan: _Plan, done: int, run: Any, token: int = 0) -> None:
        digest, forks = hashlib.sha256(), []
        self.sessions.append(session)
        for place in range(done, plan.count):
            ids = np.array([[token]]) if place else plan.prompt
            scores = await run(session, {"ids": ids}, place in plan.cancels)
            digest.update(scores.tobytes())
            self.tokens += 1
            token = int(scores[0, -1].argmax())
            if place in plan.forks and not name.endswith("fork"):
                forks.append(self._write(f"{name} fork", session.fork(), plan, place + 1, run, token // 2))
        self.digests[name] = digest.hexdigest()
        await asyncio.gather(*forks)


def _resident() -> int:
    """Bytes that the process has in memory, without those that are free."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def measure(size: str, threads: int, rounds: int) -> dict[str, Any]:
    """Tokens a second of 100 sessions, the best of so many rounds, and what they take in memory."""
    proto = decoder(*SIZES[size], batch="batch").SerializeToString()
    row: dict[str, Any] = {"decoder": size, "sessions": SESSIONS, "threads": threads, "max_batch": MOST_JOINED}
    best = {"joined": 0.0, "one after another": 0.0}
    with dagexec.compile(decoder(1, 64, 2, "batch"), num_workers=threads, max_batch=MOST_JOINED) as other:
        _Writers().together(other.session)  # so that modules are imported, and threads started
        before = _resident()
        joined = dagexec.compile(proto, num_workers=threads, max_batch=MOST_JOINED)
        first = joined.session()
        for count in (20, 1, 1):
            first.run({"ids": np.zeros((1, count), np.int64)})
        one = _resident() - before - first.nbytes
        writers = _Writers()
        writers.together(joined.session)
        held = _resident() - before
    caches = first.nbytes + sum(session.nbytes for session in writers.sessions)
    weights = sum(array.nbytes for array in joined.model.parameters.values())
    for name, nbytes in (("weights", weights), ("executor", one), ("caches", caches), ("all", held)):
        row[f"MB, {name}"] = round(nbytes / 1e6, 1)
    row["memory, of executor and caches"] = round(held / (one + caches), 3)
    with joined, dagexec.compile(proto, num_workers=threads) as alone:
        for _ in range(rounds):
            digests = []
            for name, write, executor in (
                ("joined", _Writers.together, joined),
                ("one after another", _Writers.one_after_another, alone),
            ):
                writers, began = _Writers(), time.perf_counter()
                write(writers, executor.session)
                best[name] = max(best[name], writers.tokens / (time.perf_counter() - began))
                digests.append(writers.digests)
            if digests[0] != digests[1]:
                raise SystemExit(f"{size}: joined sessions have other bytes")
    row |= {f"tokens/s, {name}": round(value, 1) for name, value in best.items()}
    return row | {"ratio": round(best["joined"] / best["one after another"], 2)}


def main() -> None:
    """Measure and print; with `--json` keep what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, nargs="+", default=[1])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    print(describe())
    rows = []
    for size, threads in itertools.product(SIZES, arguments.threads):
        rows.append(measure(size, threads, arguments.rounds))
        print(rows[-1], flush=True)
    if arguments.json:
        write_report(arguments.json, rows=rows)


if __name__ == "__main__":
    main()
