"""What a process on an odd machine does, for test_odd_machines.py: a net run in every way, and what was chosen for it.

`python -m tests.odd_machine [WAY ...]` prints one line of JSON. The net has branches, convolutions, pooling and a
layer, in sizes that take a run a fraction of a millisecond.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt

import dagexec
from dagexec.compiler.compilation import compile_model
from dagexec.core.model import InputInfo, Model
from dagexec.core.operator_def import op
from dagexec.core.proto import NetDef
from dagexec.executor.executor import Executor
from dagexec.executor.source.loading import load_model
from dagexec.ops.engines.onednn.binding import library
from dagexec.options import CompileOptions
from dagexec.platform.processor import available_cores

Array = npt.NDArray[Any]

CALLERS = 64

WAYS: dict[str, dict[str, Any]] = {
    "chosen": {},
    "simple": {"net_type": "simple"},
    "dag, 2 workers": {"net_type": "dag", "num_workers": 2},
    "dag, 64 workers": {"net_type": "dag", "num_workers": 64},
    "async_dag, 64 workers": {"net_type": "async_dag", "num_workers": 64},
    "dag, 2 pieces": {"net_type": "dag", "num_workers": 2, "intra_op_threads": 2},
    "64 replicas": {"replicas": 64},
    "64 replicas, 64 workers": {"replicas": 64, "net_type": "dag", "num_workers": 64},
    "64 replicas, 64 workers, 2 pieces": {
        "replicas": 64,
        "net_type": "dag",
        "num_workers": 64,
        "intra_op_threads": 2,
    },
}
"""Options of `dagexec.compile`, by name."""


def branching_model() -> Model:
    """Three branches of convolutions on an image of 8 channels, joined, and a layer."""
    generator = np.random.default_rng(0)
    parameters = {
        "stem_w": generator.standard_normal((32, 8, 3, 3), np.float32) / 8,
        "a_w": generator.standard_normal((32, 32, 3, 3), np.float32) / 16,
        "b_w": generator.standard_normal((32, 32, 1, 1), np.float32) / 6,
        "c_w": generator.standard_normal((32, 32, 5, 5), np.float32) / 28,
        "fc_w": generator.standard_normal((16, 96), np.float32) / 10,
        "fc_b": generator.standard_normal(16, np.float32),
    }
    steps = [
        op("Conv", ["x", "stem_w"], ["stem"], kernel=3, pad=1),
        op("Relu", ["stem"], ["stem_r"]),
    ]
    for branch, kernel in (("a", 3), ("b", 1), ("c", 5)):
        steps.append(op("Conv", ["stem_r", f"{branch}_w"], [branch], kernel=kernel, pad=kernel // 2))
        steps.append(op("Relu", [branch], [f"{branch}_r"]))
    steps += [
        op("Concat", ["a_r", "b_r", "c_r"], ["joined", "joined_axes"], axis=1),
        op("AveragePool", ["joined"], ["pooled"], global_pooling=1),
        op("FC", ["pooled", "fc_w", "fc_b"], ["scores"]),
        op("Softmax", ["scores"], ["y"]),
    ]
    inputs = {"x": InputInfo(None, (1, 8, 28, 28))}
    return Model("odd", NetDef(name="odd", op=steps), None, parameters, inputs, ("y",))


def image() -> Array:
    """The input of every run."""
    return np.random.default_rng(1).standard_normal((1, 8, 28, 28), np.float32)


def outputs_of(executor: Executor) -> list[Array]:
    """Results of one thread after the other, of 64 threads at once and of 64 tasks at once."""
    feeds = {"x": image()}

    async def tasks() -> list[Array]:
        return [found["y"] for found in await asyncio.gather(*(executor.run_async(feeds) for _ in range(CALLERS)))]

    found = [executor.run(feeds)["y"] for _ in range(5)]
    with ThreadPoolExecutor(CALLERS) as threads:
        found += threads.map(lambda _: executor.run(feeds)["y"], range(CALLERS))
    return found + asyncio.run(tasks())


def digest(array: Array) -> str:
    return hashlib.sha256(array.tobytes()).hexdigest()[:16]


def chosen_for(source: str) -> int:
    """The workers that `compile` chooses for a model by rules."""
    compiled = compile_model(load_model(source), CompileOptions(tuning_seconds=0.0))
    assert compiled.options.num_workers is not None
    return compiled.options.num_workers


def report(ways: list[str], then: Callable[[], object] = lambda: None) -> None:
    """Print what happened: digests of all results of each way, the values, and what was chosen.

    `then` is called when the first executor has run.
    """
    model, digests, values = branching_model(), {}, None
    for way in ways:
        with dagexec.compile(model, **WAYS[way]) as executor:
            results = outputs_of(executor)
            then()
            results += outputs_of(executor)
        then = lambda: None  # noqa: E731
        digests[way] = sorted({digest(array) for array in results})
        values = results[0]
    print(
        json.dumps(
            {
                "digests": digests,
                "values": None if values is None else values.ravel().tolist(),
                "cores": available_cores(),
                "chosen": chosen_for("zoo:squeezenet"),
                "onednn": library() is not None,
            }
        )
    )


if __name__ == "__main__":
    report(sys.argv[1:] or list(WAYS))
