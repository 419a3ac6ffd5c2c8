"""CachedAttention: softmax(scale Q K^T + bias) V over a cache that it adds to, beside the formula in float64."""

from __future__ import annotations

import math
import re
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from dagexec.core.caches import Caches
from dagexec.core.operator import parts_of
from dagexec.core.proto import NetDef
from dagexec.core.registry import has_engine
from dagexec.core.workspace import Workspace
from dagexec.errors import OperatorError, ShapeError
from dagexec.scheduler.nets.simple import SimpleNet
from tests.ops.pieces import cut_into, native_phases, run_rows, shuffled
from tests.ops.running import operator_def

Array = npt.NDArray[Any]

AXES = [0, 2, 1, 3]
ENGINES = [engine for engine in ("", "ONEDNN") if not engine or has_engine("CachedAttention", engine)]


class Case:
    """A cache with so many positions, and a net that adds to them."""

    def __init__(
        self,
        batch: int,
        heads: int,
        key_heads: int,
        queries: int,
        width: int,
        length: int,
        capacity: int,
        **options: Any,
    ) -> None:
        random = np.random.default_rng(length + width)
        self.past = [random.standard_normal((batch, key_heads, length, width), np.float32) for _ in range(2)]
        self.new = [
            random.standard_normal((batch, queries, count, width), np.float32)
            for count in (heads, key_heads, key_heads)
        ]
        self.length, self.options = length, options
        self.caches = Caches()
        self.caches.take({"k": self.past[0]}, {"v": self.past[1]}, length, capacity)
        self.mask = random.random((1, 1, queries, capacity)) < 0.7
        self.mask[..., 0] = True
        self.bias = random.standard_normal((queries, capacity), np.float32)
        feeds = dict(zip("qkv", self.new, strict=True))
        feeds |= {"cache": np.array([self.caches.number]), "length": np.array([length])}
        feeds |= {name: getattr(self, name) for name in ("mask", "bias") if options.get(name)}
        self.workspace, self.feeds = Workspace(), feeds

    def held(self) -> list[Array]:
        """Keys and values, with what a run adds."""
        keys, values = self.caches.held(self.length + self.new[0].shape[1])
        return [keys["k"].copy(), values["v"].copy()]

    def net(self, engine: str, workspace: Workspace | None = None, *, opens: bool = False) -> SimpleNet:
        """Attention alone, or between OpenCaches and CloseCaches."""
        if workspace is None:
            workspace = self.workspace
            for name, array in self.feeds.items():
                workspace.feed_blob(name, array)
        axes = {f"{name}_axes": AXES for name in "qkvy"}
        arguments = {"scale": 0.25, "keys": "k", "values": "v", **axes, **self.options}
        inputs = ["opened" if opens and name == "length" else name for name in self.feeds]
        operators = [operator_def("CachedAttention", inputs, ["y"], engine=engine, **arguments)]
        if opens:
            operators.insert(0, operator_def("OpenCaches", ["cache", "length"], ["opened"]))
            operators.append(operator_def("CloseCaches", ["opened", "y"], []))
        return SimpleNet(NetDef(name="step", op=operators), workspace)

    def expected(self) -> Array:
        q, *new = (array.transpose(AXES).astype(float) for array in self.new)
        group = q.shape[1] // new[0].shape[1]
        pairs = zip(self.past, new, strict=True)
        keys, values = (np.concatenate(pair, 2).repeat(group, 1) for pair in pairs)
        end = keys.shape[2]
        scores = q @ keys.swapaxes(2, 3) * 0.25
        softcap = self.options.get("softcap", math.inf)
        scores = softcap * np.tanh(scores / softcap) if softcap < math.inf else scores
        if self.options.get("mask"):
            scores = np.where(self.mask[..., :end] == self.options.get("shown", 1), scores, -np.inf)
        if self.options.get("bias"):
            scores += self.bias[:, :end]
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        return (weights / weights.sum(-1, keepdims=True) @ values).transpose(AXES)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("options", [{}, {"mask": 1}, {"bias": 1}, {"mask": 1, "bias": 1, "softcap": 0.7}], ids=str)
@pytest.mark.parametrize(
    "sizes",
    [
        (1, 2, 2, 1, 8, 0, 16), (1, 8, 8, 1, 32, 63, 128), (2, 4, 2, 3, 16, 5, 64), (1, 4, 4, 9, 24, 37, 100),
        (1, 4, 1, 1, 64, 200, 256), (1, 2, 2, 2, 12, 15, 40), (1, 1, 1, 1, 20, 7, 8),
    ],
    ids=str,
)  # fmt: skip
def test_values_are_those_of_the_formula(engine: str, options: dict[str, int], sizes: tuple[int, ...]) -> None:
    case = Case(*sizes, **options)
    case.net(engine).run()
    np.testing.assert_allclose(case.workspace.fetch_blob("y"), case.expected(), rtol=2e-5, atol=2e-6)
    keys, values = case.caches.held(case.length + sizes[3])
    for held, past, new in ((keys["k"], case.past[0], case.new[1]), (values["v"], case.past[1], case.new[2])):
        np.testing.assert_array_equal(held, np.concatenate([past, new.transpose(AXES)], 2))


@pytest.mark.parametrize("engine", ENGINES)
def test_a_prepared_step_serves_every_length_and_capacity(engine: str) -> None:
    case = Case(1, 4, 2, 1, 16, 40, 64, bias=1)
    whole, net = case.past, case.net(engine)
    for capacity, length in [(64, 3), (64, 4), (64, 12), (128, 40), (128, 3), (64, 3)]:
        case.past, case.length = [array[:, :, :length] for array in whole], length
        case.feeds["length"] = np.array([length])
        case.workspace.feed_blob("length", case.feeds["length"])
        results = []
        for own in (net, case.net(engine)):
            case.caches.take({"k": case.past[0]}, {"v": case.past[1]}, length, capacity)
            own.run()
            results.append(case.workspace.fetch_blob("y"))
        np.testing.assert_array_equal(*results)
        np.testing.assert_allclose(results[0], case.expected(), rtol=2e-5, atol=2e-6)


@pytest.mark.skipif("ONEDNN" not in ENGINES, reason="no oneDNN")
@pytest.mark.parametrize("is_fed", [False, True])
@pytest.mark.parametrize(
    "sizes", [(1, 8, 8, 1, 32, 63, 128), (2, 4, 2, 9, 16, 5, 64), (1, 3, 1, 2, 12, 30, 40)], ids=str
)
def test_pieces_change_no_bytes_whoever_computes_them(sizes: tuple[int, ...], is_fed: bool) -> None:
    results = []
    for count in (1, 2, 3, 16):
        case = Case(*sizes, bias=1)
        if is_fed:
            case.caches.fed = dict(zip("kv", case.past, strict=True))
        with cut_into(count):
            net = case.net("ONEDNN")
            net.run()
        results.append(case.workspace.fetch_blob("y").tobytes())
        (step,) = net.prepared().steps
        open_caches, computing, _ = parts_of(step)
        added, pieces = native_phases(computing)
        assert len(pieces) == min(count - (count > 1) * count % 2, sizes[0] * sizes[1])
        y = case.workspace.get_blob("y").tensor().array
        y[:] = 0
        open_caches()
        run_rows(shuffled(added, Random(count)))
        run_rows(shuffled(pieces, Random(count)))
        assert y.tobytes() == results[-1]
    assert len(set(results)) == 1


@pytest.mark.parametrize("engine", ENGINES)
def test_what_does_not_fit_is_refused(engine: str) -> None:
    case = Case(1, 2, 2, 4, 8, 13, 16)
    with pytest.raises(OperatorError, match="4 positions behind 13 do not fit into the cache"):
        case.net(engine).run()
    case.feeds["cache"] = np.array([case.caches.number + 1])
    with pytest.raises(OperatorError, match="there are no caches with this number"):
        case.net(engine).run()
    case = Case(1, 2, 2, 1, 8, 3, 16, bias=1)
    case.feeds["bias"] = np.zeros((2, 16), np.float32)
    with pytest.raises(ShapeError, match=re.escape("input 'bias' must broadcast to (1, 2, 1) x capacity")):
        case.net(engine).run()
    case = Case(1, 3, 2, 1, 8, 3, 16)
    with pytest.raises(ShapeError, match="3 heads of queries cannot share 2 of keys"):
        case.net(engine).run()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("options", [{}, {"mask": 1, "bias": 1, "nan_to_zero": 1}], ids=str)
def test_rows_of_several_sessions_have_the_bytes_that_they_have_alone(engine: str, options: dict[str, int]) -> None:
    sizes = [(5, 64), (0, 64), (63, 64), (37, 100), (12, 128)]
    cases = [Case(1, 4, 2, 1, 16, length, capacity, **options) for length, capacity in sizes]
    alone = []
    for case in cases:
        case.net(engine).run()
        alone.append([case.workspace.fetch_blob("y")[0], *case.held()])
        case.caches.take({"k": case.past[0]}, {"v": case.past[1]}, case.length, case.caches.capacity)
    given_up = 3
    cases[given_up].caches.renew()
    together = Workspace()
    for name in cases[0].feeds:
        rows = [case.feeds[name][None, None] if name == "bias" else case.feeds[name] for case in cases]
        whole = np.zeros((len(cases) + 1, *map(max, *(row.shape[1:] for row in rows))), rows[0].dtype)
        for place, row in enumerate(rows):
            whole[(place, *map(slice, row.shape[1:]))] = row[0]
        together.feed_blob(name, whole)
    cases[0].net(engine, together).run()
    y = together.fetch_blob("y")
    for place, (case, expected) in enumerate(zip(cases, alone, strict=True)):
        if place != given_up:
            for array, other in zip((y[place], *case.held()), expected, strict=True):
                np.testing.assert_array_equal(array, other)
    assert not y[[given_up, -1]].any(), "a run that was given up, and a row of no session"
    with pytest.raises(AssertionError):
        np.testing.assert_array_equal(cases[given_up].held()[0], alone[given_up][1])


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("is_fed", [False, True])
def test_what_was_opened_before_gives_the_same_bytes(engine: str, is_fed: bool) -> None:
    case = Case(2, 4, 2, 1, 16, 40, 64, bias=1)

    def begin() -> None:
        if is_fed:
            case.caches = Caches(dict(zip("kv", case.past, strict=True)))
            case.workspace.feed_blob("cache", np.array([case.caches.number]))
        else:
            case.caches.take({"k": case.past[0]}, {"v": case.past[1]}, case.length, 64)

    net, results = case.net(engine), []
    for own in (net, case.net(engine, opens=True)):
        begin()
        own.run()
        held = (case.caches.keys["k"], case.caches.values["v"]) if is_fed else case.held()
        results.append((case.workspace.fetch_blob("y").tobytes(), *(array.tobytes() for array in held)))
    assert results[0] == results[1]


@pytest.mark.skipif("ONEDNN" not in ENGINES, reason="no oneDNN")
def test_between_opening_and_closing_there_are_native_calls_alone() -> None:
    case = Case(1, 4, 2, 1, 16, 40, 64)
    net = case.net("ONEDNN", opens=True)
    net.run()
    _, attention, closing = net.prepared().steps
    assert len(native_phases(attention)) == 2
    closing()
    before = case.workspace.fetch_blob("y"), *case.held()
    case.workspace.get_blob("q").tensor().array[:] = 1
    attention()
    for array, other in zip((case.workspace.fetch_blob("y"), *case.held()), before, strict=True):
        np.testing.assert_array_equal(array, other, "what is closed is neither read nor written")


@pytest.mark.parametrize("engine", ENGINES)
def test_a_run_that_is_given_up_while_it_is_computed_writes_nothing_to_the_session(engine: str) -> None:
    case = Case(1, 4, 2, 1, 16, 40, 64)
    net = case.net(engine, opens=True)
    net.run()
    case.caches.take({"k": case.past[0]}, {"v": case.past[1]}, case.length, 64)
    opening, attention, closing = net.prepared().steps
    opening()
    before = case.held()
    case.caches.renew()
    for step in (attention, closing):
        step()
    for array, other in zip(case.held(), before, strict=True):
        np.testing.assert_array_equal(array[:, :, : case.length], other[:, :, : case.length])
        np.testing.assert_array_equal(array[:, :, case.length :], other[:, :, case.length :])
