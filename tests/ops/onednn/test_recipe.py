"""Operators that differ only in their tensors share what preparing the first of them found out."""

from __future__ import annotations

import gc
import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from onnx import parser as onnx_parser

import dagexec
from dagexec import NetDef
from dagexec.core.choices import choices
from dagexec.core.proto import OperatorDef
from dagexec.core.tensor import Tensor
from dagexec.ops.engines.onednn import recipe
from dagexec.ops.engines.onednn.binding import own_kernels
from dagexec.ops.engines.onednn.convolution_family import ConvolutionFamily
from dagexec.ops.engines.onednn.operator import OneDNNOperator
from dagexec.scheduler.nets.simple import SimpleNet
from tests.ops.onednn.engine import needs_onednn, normal
from tests.ops.pieces import cut_into
from tests.ops.running import Array, operator_def, workspace_of

pytestmark = needs_onednn

Form = tuple[str, int, Callable[..., Array]]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """How many operators of each type found out by themselves how the library computes them."""
    found: Counter[str] = Counter()
    read = recipe.read_recipe

    def counted(operator: OneDNNOperator, *given: object, **named: object) -> object:
        found[operator.definition.type] += 1
        return read(operator, *given, **named)  # type: ignore[arg-type]

    monkeypatch.setattr("dagexec.ops.engines.onednn.operator.read_recipe", counted)
    recipe._recipes.clear()
    recipe._latest.clear()
    yield found
    recipe._recipes.clear()
    recipe._latest.clear()


def onednn(definition: OperatorDef) -> OperatorDef:
    definition.engine = "ONEDNN"
    return definition


def net(operators: Sequence[OperatorDef], feeds: Mapping[str, Array], constants: Sequence[str] = ()) -> SimpleNet:
    workspace = workspace_of(feeds)
    for name in constants:
        workspace.get_blob(name).get(Tensor).freeze()
    return SimpleNet(NetDef(name="n", op=[onednn(one) for one in operators]), workspace)


def softmax(x: Array) -> Array:
    powers = np.exp(x.astype(np.float64) - x.max(-1, keepdims=True))
    return np.asarray(powers / powers.sum(-1, keepdims=True))


def layer_norm(x: Array, scale: Array, shift: Array) -> Array:
    wide = x.astype(np.float64)
    centered = wide - wide.mean(-1, keepdims=True)
    return np.asarray(centered / np.sqrt((centered**2).mean(-1, keepdims=True) + 1e-5) * scale + shift)


def gelu(x: Array) -> Array:
    return np.asarray([0.5 * value * (1 + math.erf(value * 0.5**0.5)) for value in x.flat]).reshape(x.shape)


FORMS: list[tuple[str, dict[str, object], list[tuple[int, ...]], Callable[..., Array]]] = [
    ("FC", {}, [(9, 32), (48, 32), (48,)], lambda x, w, b: x @ w.T + b),
    (
        "FusedFC",
        {"post_ops": ["gelu_erf"]},
        [(9, 32), (48, 32), (48,)],
        lambda x, w, b: gelu(x @ w.T + b),
    ),
    ("FC", {}, [(9, 128), (192, 128), (192,)], lambda x, w, b: x @ w.T + b),  # in panels
    ("FusedElementwise", {"post_ops": ["gelu_erf", "linear:2.0:0.5"]}, [(9, 32)], lambda x: 2 * gelu(x) + 0.5),
    ("MatMul", {}, [(9, 32), (32, 48)], lambda a, b: a @ b),
    ("BatchMatMul", {}, [(3, 9, 32), (3, 32, 7)], lambda a, b: a @ b),
    ("Gemm", {"alpha": 0.5}, [(9, 32), (32, 48), (48,)], lambda a, b, c: 0.5 * (a @ b) + c),
    ("Mul", {}, [(9, 32), (1, 32)], lambda a, b: a * b),
    ("Softmax", {"axis": -1}, [(9, 32)], softmax),
    ("LayerNorm", {"axis": -1, "elementwise_affine": 1}, [(9, 32), (32,), (32,)], layer_norm),
]


CUT = [(3, *form) for form in FORMS if form[0] in ("BatchMatMul", "Softmax", "LayerNorm")]


@pytest.mark.parametrize("is_constant", [False, True])
@pytest.mark.parametrize(
    ("pieces", "op_type", "arguments", "shapes", "formula"),
    [*((0, *form) for form in FORMS), *CUT],
    ids=[*(form[0] for form in FORMS), *(f"{form[1]} in pieces" for form in CUT)],
)
def test_the_second_and_third_of_a_form_follow_the_first_one(
    asked: Counter[str],
    pieces: int,
    op_type: str,
    arguments: dict[str, object],
    shapes: list[tuple[int, ...]],
    formula: Callable[..., Array],
    is_constant: bool,
) -> None:
    """Each on tensors of its own; constants are packed for each."""
    feeds = {f"{i}{n}": normal(10 * n + i, *shape) for n in range(3) for i, shape in enumerate(shapes)}
    operators = [
        operator_def(op_type, [f"{i}{n}" for i in range(len(shapes))], [f"y{n}"], **arguments)  # type: ignore[arg-type]
        for n in range(3)
    ]
    constants = [name for name in feeds if name[0] != "0"] if is_constant else []
    with cut_into(pieces), net(operators, feeds, constants) as layers:
        layers.run()
        for n in range(3):
            given = [feeds[f"{i}{n}"].astype(np.float64) for i in range(len(shapes))]
            np.testing.assert_allclose(layers.workspace.fetch_blob(f"y{n}"), formula(*given), rtol=1e-4, atol=1e-4)
        assert asked[op_type] == 1
        asked.clear()
        for n in range(3):
            layers.workspace.feed_blob(f"0{n}", np.concatenate([feeds[f"0{n}"]] * 2, axis=-2)[..., :17, :])
        layers.run()
        assert asked[op_type] == 1
        for n in range(3):
            given = [np.asarray(layers.workspace.fetch_blob(f"{i}{n}"), np.float64) for i in range(len(shapes))]
            np.testing.assert_allclose(layers.workspace.fetch_blob(f"y{n}"), formula(*given), rtol=1e-4, atol=1e-4)


def test_without_onednn_the_second_product_follows_the_first_one(
    asked: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dagexec.ops.engines.onednn.operator.known_library", own_kernels)
    feeds = {name: normal(number, 2, 9, 30) for number, name in enumerate("abcd")}
    products = [operator_def("BatchMatMul", [*names], [names], trans_b=1) for names in ("ab", "cd")]
    with net(products, feeds) as layers:
        layers.run()
        for a, b in ("ab", "cd"):
            expected = feeds[a].astype(np.float64) @ feeds[b].astype(np.float64).swapaxes(1, 2)
            np.testing.assert_allclose(layers.workspace.fetch_blob(a + b), expected, rtol=1e-4, atol=1e-4)
    assert asked["BatchMatMul"] == 1


def pairs(*operators: tuple[str, list[str], list[str], dict[str, object]]) -> list[OperatorDef]:
    return [operator_def(kind, inputs, outputs, **named) for kind, inputs, outputs, named in operators]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "operators",
    [
        pairs(("Softmax", ["x"], ["y"], {"axis": 1}), ("Softmax", ["x"], ["z"], {"axis": 0})),
        pairs(("Mul", ["x", "x"], ["y"], {}), ("Mul", ["x", "w"], ["z"], {})),
        pairs(("Mul", ["x", "w"], ["y"], {}), ("Mul", ["x", "v"], ["z"], {})),
        pairs(("BatchMatMul", ["s", "t"], ["y"], {}), ("BatchMatMul", ["s", "t"], ["z"], {"trans_a": 1})),
    ],
    ids=["arguments", "one blob twice", "shapes", "a flag"],
)
def test_operators_that_differ_in_more_do_not_share(asked: Counter[str], operators: list[OperatorDef]) -> None:
    feeds = {"x": normal(1, 16, 16), "w": normal(2, 16, 16), "v": normal(3, 1, 16)}
    feeds |= {"s": normal(4, 3, 16, 16), "t": normal(5, 3, 16, 16)}
    with net(operators, feeds) as both:
        both.run()
        assert asked.total() == 2


def test_tensors_that_overlap_have_no_recipe(asked: Counter[str]) -> None:
    """What is read as a view of the same memory is not told from another tensor by its address."""
    operators = pairs(("Mul", ["x", "v"], ["yv"], {}), ("Mul", ["x", "w"], ["yw"], {}))
    feeds = {name: normal(number, 8, 8) for number, name in enumerate("xvw")}
    with net(operators, feeds) as both:
        both.workspace.get_blob("v").tensor().share(both.workspace.get_blob("x").tensor(), (8, 8))
        both.run()
        np.testing.assert_array_equal(both.workspace.fetch_blob("yw"), feeds["x"] * feeds["w"])
        np.testing.assert_array_equal(both.workspace.fetch_blob("yv"), feeds["x"] ** 2)


def test_a_choice_that_may_be_another_ends_the_recipes_before_it(asked: Counter[str]) -> None:
    layers = pairs(("FC", ["x", "w", "b"], ["y"], {}))
    feeds = {"x": normal(1, 4, 16), "w": normal(2, 16, 16), "b": normal(3, 16)}
    with net(layers, feeds) as first, net(layers, feeds) as second, net(layers, feeds) as third:
        for one in (first, second):
            one.run()
        assert asked["FC"] == 1
        choices.keep("a test's key", "of no problem")
        third.run()
        assert asked["FC"] == 2


def test_who_follows_goes_on_with_the_implementation_for_all_batches(asked: Counter[str]) -> None:
    """And who has another one does not follow."""
    layers = pairs(("FC", ["x", "w", "b"], ["y"], {}), ("FC", ["x", "w", "b"], ["z"], {}))
    feeds = {"x": normal(1, 8, 16), "w": normal(2, 16, 16), "b": normal(3, 16)}
    with net(layers, feeds, ["w", "b"]) as first, net(layers[:1], feeds, ["w", "b"]) as second:
        first.run()
        names = [operator.names_for_all for operator in first.operators]  # type: ignore[attr-defined]
        assert asked["FC"] == 1
        assert names[0] == names[1] != {}
        (other,) = second.operators
        assert isinstance(other, OneDNNOperator)
        other.names_for_all["another geometry"] = "another implementation"
        second.run()
        assert asked["FC"] == 2


@pytest.mark.slow
def test_a_recipe_goes_with_the_last_preparation_that_follows_it_or_when_others_are_the_latest(
    asked: Counter[str],
) -> None:
    layers = pairs(("Softmax", ["x"], ["y"], {}))
    with net(layers, {"x": normal(1, 4, 16)}) as first:
        first.run()
        with net(layers, {"x": normal(1, 4, 16)}) as second:
            second.run()
        del second
        first._forget_preparations()
        gc.collect()
        assert len(recipe._recipes) == 1
        recipe._latest.clear()
        gc.collect()
        assert not recipe._recipes
    assert asked["Softmax"] == 1


def test_steps_that_are_more_than_primitives_have_no_recipe(
    asked: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recipe, "bound_primitive_of", lambda _step: None)
    operators = pairs(("Mul", ["x", "x"], ["y"], {}), ("Mul", ["y", "y"], ["z"], {}))
    with net(operators, {"x": normal(1, 8, 8)}) as both:
        both.run()
    assert asked["Mul"] == 2


SIZES = {"pieces": (56, 64, 1), "edges": (40, 16, 7), "rows": (40, 64, 5), "tiles": (20, 32, 3), "groups": (12, 32, 3)}
"""Pixels a side, channels, and taps a side of convolutions that are computed in different ways."""


def convolutions(size: int, channels: int, taps: int, group: int, batch: int) -> SimpleNet:
    """Three of a form, one after another."""
    given = {"x0": normal(9, batch, size, size, channels)}
    given |= {f"w{number}": 0.1 * normal(number, channels, taps, taps, channels // group) for number in range(3)}
    given |= {f"b{number}": normal(number, channels) for number in range(3)}
    arguments: dict[str, Any] = {"order": "NHWC", "kernel": taps, "pad": taps // 2, "group": group}
    layers = [
        operator_def("Conv", [f"x{number}", f"w{number}", f"b{number}"], [f"x{number + 1}"], **arguments)
        for number in range(3)
    ]
    return net(layers, given, [name for name in given if name != "x0"])


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("what", SIZES)
def test_what_is_found_out_for_a_convolution_is_so_for_all_of_its_form(
    what: str, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    way = ConvolutionFamily._way
    monkeypatch.setattr(ConvolutionFamily, "_way", lambda self, *given: asked.append(self.label) or way(self, *given))
    group = 2 if what == "groups" else 1

    def run() -> bytes:
        with convolutions(*SIZES[what], group, batch) as running:
            running.run()
            running.run()
            names = {frozenset(one.names_for_all.items()) for one in running.operators}
            assert len(names) == 1
            return running.workspace.fetch_blob("x3").tobytes()

    shared = run()
    assert len(asked) == 1
    with monkeypatch.context() as patch:
        patch.setattr("dagexec.ops.engines.onednn.convolution_family.recipe_key", lambda *_: None)
        assert run() == shared
    assert len(asked) == 4


def memory_of(array: Array) -> Array:
    """The array whose memory it is."""
    return memory_of(array.base) if isinstance(array.base, np.ndarray) else array


def test_what_was_found_out_for_a_convolution_keeps_no_tensor() -> None:
    with convolutions(*SIZES["edges"], 1, 1) as running:
        running.run()
        tensors = [running.workspace.get_blob(name).get(Tensor) for name in ("x0", "x1", "w0")]
        held = [weakref.ref(memory_of(tensor.array)) for tensor in tensors]
        way = running.operators[0]._followed_way
    assert way is not None
    del running, tensors
    gc.collect()
    assert all(one() is None for one in held)


def test_a_loop_whose_values_grow_asks_for_primitives_in_its_first_runs_alone(asked: Counter[str]) -> None:
    """Its body prepares operators one by one, as their shapes change, and then for ranges of rows."""
    model = onnx_parser.parse_model("""
        <ir_version: 8, opset_import: ["" : 17]>
        doubling (int64 n, float[k, 24] x) => (float[m, 24] z) {
            z = Loop (n, , x) <body = body (int64 i, bool c, float[k, 24] a) => (bool d, float[m, 24] joined) {
                d = Identity (c)
                b = Softmax <axis = -1> (a)
                joined = Concat <axis = 0> (a, b)
            }>
        }""")
    with dagexec.compile(model) as executor:
        feeds = {"n": np.array(9), "x": normal(1, 3, 24)}
        runs = [(executor.run(feeds)["z"].tobytes(), asked["Softmax"]) for _ in range(4)]
    first, second, *later = runs
    assert first[1] >= 9
    assert second[1] <= first[1] + 9
    assert later == [second] * 2
    assert second[0] == first[0]
