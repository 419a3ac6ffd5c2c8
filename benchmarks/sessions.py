"""Runs that keep state: sessions beside onnxruntime, which is fed what it gave back, and OpenVINO's stateful models.

    python benchmarks/sessions.py [--tokens 64 1000] [--threads 1] [--json benchmarks/results/sessions.json]

Decoders write texts from an empty cache twice: the first time ever, in which every length is new, and again; *warmed*
is an executor that was compiled with `warm_start`, as a peer does its work when a model is loaded. A token's time is
that of its whole run, with the choice of the next. A detector hears frames of one stream, and of a thousand. All take
turns. What they give is the same but for rounding.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime
import openvino
from environment import describe, write_report
from openvino._offline_transformations import apply_make_stateful_transformation

import dagexec

sys.path.append(str(Path(__file__).parents[1] / "examples"))

from random_models.decoders import gpt, llama, t5_decoder, whisper_decoder
from random_models.detector import CONTEXT, HOP, detector

Array = npt.NDArray[Any]
Run = Callable[[Mapping[str, Array]], Array]

DECODERS: dict[str, tuple[Callable[..., onnx.ModelProto], dict[str, int], int]] = {
    "gpt tiny": (gpt, {"layers": 4, "width": 256, "heads": 8}, 0),
    "gpt2": (gpt, {"layers": 6, "width": 768, "heads": 12}, 0),
    "llama": (llama, {"layers": 4, "width": 512, "heads": 8, "key_heads": 4}, 0),
    "whisper": (whisper_decoder, {"layers": 4, "width": 384, "heads": 6}, 1500),
    "t5": (t5_decoder, {"layers": 6, "width": 512, "heads": 8}, 64),
}
"""How each is made, its sizes, and how many frames of an encoder it reads."""

STREAMS = (1, 1000)

STRETCH, PAUSE = 16, 0.01
"""Tokens of one runtime at a time, and seconds before them: idle threads of the other look for work for a while, on the
core that one needs."""


def _state_pairs(model: onnx.ModelProto) -> dict[str, str]:
    """The output that each input is fed next."""
    outputs = [one.name for one in model.graph.output]
    names = [(one.name, (one.name.replace("past", "present"), f"new_{one.name}")) for one in model.graph.input]
    return {name: output for name, others in names for output in others if output in outputs and output != name}


def _empty(model: onnx.ModelProto, states: Mapping[str, str]) -> dict[str, Array]:
    """States before a first run: axes of a cache that grow have no length, and others one row."""
    sizes = {
        one.name: [axis.dim_value or int(axis.dim_param == "streams") for axis in one.type.tensor_type.shape.dim]
        for one in model.graph.input
    }
    return {name: np.zeros(sizes[name], np.float32) for name in states}


class Contenders:
    """Of one model: what runs it, and begins anew when asked for another sequence."""

    def __init__(self, model: onnx.ModelProto, result: str, threads: int, constants: Mapping[str, Array]) -> None:
        proto, self.states, self._result = model.SerializeToString(), _state_pairs(model), result
        self._empty, self._constants = _empty(model, self.states), constants
        settings = onnxruntime.SessionOptions()
        settings.intra_op_num_threads, settings.log_severity_level = threads, 3
        began = [time.perf_counter()]
        self.executor = dagexec.compile(proto, num_workers=threads)
        began.append(time.perf_counter())
        self.warmed = dagexec.compile(proto, num_workers=threads, warm_start=self._shapes(model))
        began.append(time.perf_counter())
        self._peer = onnxruntime.InferenceSession(proto, settings)
        began.append(time.perf_counter())
        stateful = openvino.Core().read_model(proto)
        apply_make_stateful_transformation(stateful, self.states)
        options = {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": "f32", "PERFORMANCE_HINT": "LATENCY"}
        self._stateful = openvino.compile_model(stateful, "CPU", options)
        began.append(time.perf_counter())
        names = ("dagexec", "dagexec, warmed", "onnxruntime", "openvino")
        self.made = dict(zip(names, (round(1e3 * float(one), 1) for one in np.diff(began)), strict=True))
        self._outputs = [one.name for one in self._peer.get_outputs()]

    def _shapes(self, model: onnx.ModelProto) -> dict[str, tuple[int, ...]]:
        """Of a step: one row and one position, and some positions in caches."""
        sizes = {name: tuple(size or 15 for size in array.shape) for name, array in self._empty.items()}
        fed = {one.name: one.type.tensor_type.shape.dim for one in model.graph.input if one.name not in sizes}
        shapes = {name: tuple(axis.dim_value or 1 for axis in axes) for name, axes in fed.items()}
        return {**sizes, **shapes, **{name: array.shape for name, array in self._constants.items()}}

    def close(self) -> None:
        """Close the executors."""
        self.executor.close()
        self.warmed.close()

    def sequences(self, *, openvino: bool = True) -> dict[str, Run]:
        """A new sequence of each; without OpenVINO where states do not begin empty, as its own do."""
        session, warmed = self.executor.session(), self.warmed.session()
        session.reset(self._constants)
        warmed.reset(self._constants)
        runs: dict[str, Run] = {
            "dagexec": lambda feeds: session.run(feeds)[self._result],
            "dagexec, warmed": lambda feeds: warmed.run(feeds)[self._result],
            "onnxruntime": self._fed(),
            "onnxruntime, bound": self._bound(),
        }
        if openvino:
            request = self._stateful.create_infer_request()
            index = [one.any_name for one in self._stateful.outputs].index(self._result)
            runs["openvino"] = lambda feeds: request.infer({**feeds, **self._constants}, share_inputs=True)[
                index
            ].copy()
        return runs

    def _fed(self) -> Run:
        """onnxruntime's results, fed back as arrays."""
        states = dict(self._empty)

        def run(feeds: Mapping[str, Array]) -> Array:
            fed = {**feeds, **states, **self._constants}
            results = dict(zip(self._outputs, self._peer.run(None, fed), strict=True))
            states.update({name: results[output] for name, output in self.states.items()})
            scores: Array = results[self._result]
            return scores

        return run

    def _bound(self) -> Run:
        """The same by I/O binding: what is fed back stays where it is."""
        make = onnxruntime.OrtValue.ortvalue_from_numpy
        states = {name: make(array) for name, array in self._empty.items()}
        constants = {name: make(array) for name, array in self._constants.items()}

        def run(feeds: Mapping[str, Array]) -> Array:
            binding = self._peer.io_binding()
            for name, array in feeds.items():
                binding.bind_cpu_input(name, array)
            for name, value in (*states.items(), *constants.items()):
                binding.bind_ortvalue_input(name, value)
            for name in self._outputs:
                binding.bind_output(name, "cpu")
            self._peer.run_with_iobinding(binding)
            results = dict(zip(self._outputs, binding.get_outputs(), strict=True))
            states.update({name: results[output] for name, output in self.states.items()})
            scores: Array = results[self._result].numpy()
            return scores

        return run


class _Text:
    """A text in the making."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self.tokens, self.seconds = [1], list[float]()
        self.scores = np.zeros(0)

    def go_on(self) -> None:
        began = time.perf_counter()
        self.scores = self._run({"ids": np.array([self.tokens[-1:]])})[0, -1]
        self.tokens.append(int(self.scores.argmax()))
        self.seconds.append(time.perf_counter() - began)


def decode(name: str, tokens: int, threads: int) -> dict[str, Any]:
    """Milliseconds a token: the mean of a text, and the median of its last eighth."""
    make, sizes, frames = DECODERS[name]
    model, random = make(**sizes), np.random.default_rng(1)
    elements = sizes["width"] // sizes["heads"]
    crosses = [one.name for one in model.graph.input if one.name.startswith("cross")]
    constants = {one: random.standard_normal((1, sizes["heads"], frames, elements), np.float32) for one in crosses}
    contenders = Contenders(model, "scores", threads, constants)
    row: dict[str, Any] = {"decoder": name, "tokens": tokens, "threads": threads, "made": contenders.made}
    with closing(contenders):
        for when in ("first", "again"):
            texts = {kind: _Text(run) for kind, run in contenders.sequences().items()}
            for start, text in itertools.product(range(0, tokens, STRETCH), texts.values()):
                time.sleep(PAUSE)
                for _ in range(min(STRETCH, tokens - start)):
                    text.go_on()
            first, *others = texts.values()
            if any(first.tokens != one.tokens or abs(first.scores - one.scores).max() > 1e-2 for one in others):
                raise SystemExit(f"{name}: the texts differ")
            for kind, text in texts.items():
                last = text.seconds[-max(1, tokens // 8) :]
                row[f"{when} {kind}"] = round(1e3 * float(np.mean(text.seconds)), 4)
                row[f"{when} {kind}, last"] = round(1e3 * float(np.median(last)), 4)
    return row


def detect(streams: int, threads: int, frames: int = 2000) -> dict[str, Any]:
    """Milliseconds a frame, the median of all frames of all streams but for each stream's first two."""
    contenders = Contenders(detector(), "probability", threads, {})
    row: dict[str, Any] = {"detector": streams, "threads": threads, "context": CONTEXT, "made": contenders.made}
    with closing(contenders):
        runs = [contenders.sequences(openvino=False) for _ in range(streams)]
        samples = np.random.default_rng(2).standard_normal((max(4, frames // streams), 1, HOP), np.float32)
        seconds: dict[str, list[float]] = {kind: [] for kind in runs[0]}
        for number, frame in enumerate(samples):
            results: dict[str, Array] = {}
            for kind, run in ((kind, each[kind]) for kind in seconds for each in runs):
                began = time.perf_counter()
                results[kind] = run({"samples": frame})
                if number > 1:
                    seconds[kind].append(time.perf_counter() - began)
            if max(abs(one - results["dagexec"]).max() for one in results.values()) > 1e-4:
                raise SystemExit("the detectors differ")
    return row | {kind: round(1e3 * float(np.median(taken)), 4) for kind, taken in seconds.items()}


def main() -> None:
    """Measure and print; with `--json` keep what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[64, 1000])
    parser.add_argument("--threads", type=int, nargs="+", default=[1])
    parser.add_argument("--decoders", nargs="+", default=list(DECODERS), choices=list(DECODERS))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    print(describe())
    rows = []
    measures = [
        partial(decode, *case) for case in itertools.product(arguments.decoders, arguments.tokens, arguments.threads)
    ]
    measures += [partial(detect, *case) for case in itertools.product(STREAMS, arguments.threads)]
    for measure in measures:
        rows.append(measure())
        print(rows[-1], flush=True)
    if arguments.json:
        write_report(arguments.json, rows=rows)


if __name__ == "__main__":
    main()
