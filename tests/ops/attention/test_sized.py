"""Attention among the first positions: the bytes of FusedAttention at that length, from memory that holds anything."""

from __future__ import annotations

import random

import numpy as np
import pytest

import dagexec
from dagexec import NetDef
from dagexec.core import dtypes
from dagexec.core.model import InputInfo, Model
from dagexec.errors import OperatorError
from dagexec.testing import run_operator
from tests.ops.onednn.engine import ENGINES, normal
from tests.ops.running import Array, operator_def

IN_ORDER = [0, 2, 1, 3]
LYING = dict.fromkeys(("q_axes", "k_axes", "v_axes", "y_axes"), IN_ORDER)
SIZES = [(2, 4, 2, 33, 16, 16), (1, 2, 2, 300, 24, 40), (1, 12, 12, 128, 64, 64), (3, 1, 1, 70, 13, 11)]
"""Batch, heads, heads of keys, positions, elements of a key, of a value."""


def model(engine: str, masks: int, **more: float) -> Model:
    names = ["q", "k", "v", *("mask", "bias")[2 - masks :]]
    arguments = {**LYING, **more, **dict.fromkeys(names[3:], 1)}
    net = NetDef(
        name="sized",
        op=[
            operator_def("OpenLength", ["length"], ["opened"]),
            operator_def("SizedAttention", [*names, "opened"], ["y"], engine=engine, **arguments),
        ],
    )
    types = {"mask": dtypes.BOOL, "length": dtypes.INT64}
    inputs = {name: InputInfo(types.get(name, dtypes.FLOAT32)) for name in (*names, "length")}
    return Model("sized", net, inputs=inputs, outputs=("y",))


def first(array: Array, length: int, axes: tuple[int, ...] = (1,)) -> Array:
    return np.ascontiguousarray(array[tuple(slice(length if axis in axes else None) for axis in range(array.ndim))])


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("masks", [0, 1, 2])
@pytest.mark.parametrize("sizes", SIZES)
def test_lengths_in_turn_have_the_bytes_of_attention_at_each(engine: str, masks: int, sizes: tuple[int, ...]) -> None:
    batch, heads, key_heads, most, width, values = sizes
    whole = [normal(1, batch, most, heads, width), normal(2, batch, most, key_heads, width),
             normal(3, batch, most, key_heads, values)]  # fmt: skip
    more = [normal(5, batch, 1, most, most) > -1, normal(4, most, most)][2 - masks :]
    lengths = [most, 8, most - 1, *random.Random(0).choices(range(8, most), k=4), most]
    arguments = {"scale": 0.3, "nan_to_zero": 1, **dict.fromkeys(("mask", "bias")[2 - masks :], 1)}
    with dagexec.compile(model(engine, masks, scale=0.3, nan_to_zero=1), num_workers=1) as executor:
        for length in lengths:
            arrays = [first(array, length) for array in whole]
            own = [first(array, length, (array.ndim - 2, array.ndim - 1)) for array in more]
            [expected] = run_operator("FusedAttention", [*arrays, *own], engine=engine, **LYING, **arguments)
            fed = [np.where(np.arange(most)[:, None, None] < length, array, np.nan) for array in whole]
            feeds = dict(zip("qkv", fed, strict=True)) | dict(zip(("mask", "bias")[2 - masks :], more, strict=True))
            y = executor.run({**feeds, "length": np.array([length])})["y"]
            assert first(y, length).tobytes() == expected.tobytes(), length
        assert executor.net().preparation_statistics().made == 1


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("length", [-1, 0, 34])
def test_lengths_that_there_cannot_be(engine: str, length: int) -> None:
    feeds = dict.fromkeys("qkv", normal(1, 1, 33, 2, 16))
    with dagexec.compile(model(engine, 0), num_workers=1) as executor:
        good = executor.run({**feeds, "length": np.array([20])})["y"]
        with pytest.raises(OperatorError, match=f"to 33 positions, found {length}"):
            executor.run({**feeds, "length": np.array([length])})
        again = executor.run({**feeds, "length": np.array([20])})["y"]
        assert first(again, 20).tobytes() == first(good, 20).tobytes()
