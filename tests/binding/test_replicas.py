"""Replicas of one executor: weights are there once, and what is made of them is made once."""

from __future__ import annotations

import gc
import tracemalloc
from collections import Counter
from collections.abc import Callable, Hashable

import numpy as np
import pytest

import dagexec
from dagexec import NetDef
from dagexec.core import dtypes
from dagexec.core.constant import Array, Constant
from dagexec.core.model import InputInfo, Model
from tests.ops.running import operator_def

WIDTH = 1024


def heavy_model() -> Model:
    """Two fully connected layers and a convolution whose weights, 10 MiB, are most of what the net needs."""
    net = NetDef(
        name="heavy",
        op=[
            operator_def("FC", ["x", "w", "b"], ["h"]),
            operator_def("Relu", ["h"], ["h"]),
            operator_def("FC", ["h", "v", "b"], ["y"]),
            operator_def("Conv", ["image", "filter"], ["z"], kernel=3),
        ],
    )
    random = np.random.default_rng(0)
    parameters = {name: random.standard_normal((WIDTH, WIDTH), np.float32) for name in ("w", "v")}
    parameters["b"] = random.standard_normal(WIDTH, np.float32)
    parameters["filter"] = random.standard_normal((256, 256, 3, 3), np.float32)
    inputs = {"x": InputInfo(dtypes.FLOAT32, (1, WIDTH)), "image": InputInfo(dtypes.FLOAT32, (1, 256, 4, 4))}
    return Model("heavy", net, parameters=parameters, inputs=inputs, outputs=("y", "z"))


def memory_of(replicas: int, optimize: bool) -> int:
    """Bytes that an executor holds once each replica has run."""
    model = heavy_model()
    gc.collect()
    tracemalloc.start()
    try:
        with dagexec.compile(
            model, optimize=optimize, net_type="dag", num_workers=1, replicas=replicas, warm_start=True
        ):
            gc.collect()
            return tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()


@pytest.mark.slow
@pytest.mark.parametrize("optimize", [False, True])
def test_more_replicas_need_no_more_memory_for_weights(optimize: bool) -> None:
    weights = sum(array.nbytes for array in heavy_model().parameters.values())
    memory_of(1, optimize)
    one, four = memory_of(1, optimize), memory_of(4, optimize)
    assert four - one < weights / 2  # working memory; a copy of all weights for each would be thrice as much as they


@pytest.mark.parametrize("optimize", [False, True])
def test_what_is_made_of_weights_is_made_once_for_all_replicas(optimize: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    made: Counter[tuple[int, Hashable]] = Counter()
    constants: list[Constant] = []
    derived, packed = Constant.derived, Constant.packed

    def counting(constant: Constant, key: Hashable, compute: Callable[[], Array]) -> Callable[[], Array]:
        constants.append(constant)  # so that no other gets its id

        def count() -> Array:
            made[id(constant), key] += 1
            return compute()

        return count

    def count_derived(self: Constant, key: Hashable, compute: Callable[[], Array]) -> Array:
        return derived(self, key, counting(self, key, compute))

    def count_packed(self: Constant, form: Hashable, nbytes: int, compute: Callable[[], Array]) -> Array:
        return packed(self, form, nbytes, counting(self, form, compute))

    monkeypatch.setattr(Constant, "derived", count_derived)
    monkeypatch.setattr(Constant, "packed", count_packed)
    model = heavy_model()
    with dagexec.compile(model, optimize=optimize, replicas=4, num_workers=2, warm_start=True) as executor:
        feeds = {
            name: np.ones([size or 1 for size in info.shape or ()], np.float32)
            for name, info in executor.inputs.items()
        }
        results = [executor.run(feeds) for _ in range(8)]
        assert executor.statistics().runs_per_replica == (3, 3, 3, 3)
    assert made or not optimize
    assert set(made.values()) <= {1}
    for result in results[1:]:
        for name, array in result.items():
            assert array.tobytes() == results[0][name].tobytes()
