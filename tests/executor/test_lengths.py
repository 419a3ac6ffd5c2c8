"""Texts of any length: the bytes of the net itself, whatever ran before, and errors in its own words."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper

import dagexec
from dagexec import Executor
from dagexec.errors import DagexecError, FeedError, OperatorError
from dagexec.executor.lengths import full_length
from tests.command_line import Cli
from tests.executor.decoders import CACHES, ELEMENTS, KEY_HEADS, decoder
from tests.ops.running import Array

WIDTH, HEADS, WORDS, PLACES = 32, 4, 50, 70


def encoder(*, masked: bool = True, pooled: bool = False) -> ModelProto:
    """Words and a mask (batch, length), which may be unread, to a vector for each word, by two layers of attention.

    Where it is `pooled` outputs are also the mean of the words that the mask shows, and the last word.
    """
    draw = np.random.default_rng(0)
    nodes: list[Any] = []
    weights = [
        numpy_helper.from_array(np.array(value, kind), name)
        for name, value, kind in [
            ("zero", 0, np.int64), ("one", 1, np.int64), ("scale", (WIDTH // HEADS) ** -0.5, np.float32),
            ("heads", [0, 0, HEADS, WIDTH // HEADS], np.int64), ("whole", [0, 0, WIDTH], np.int64),
            ("ones", 1.0, np.float32), ("least", -1e9, np.float32),
        ]
    ]  # fmt: skip

    def node(kind: str, *inputs: str, **attributes: Any) -> str:
        nodes.append(helper.make_node(kind, list(inputs), [f"v{len(nodes)}"], **attributes))
        return f"v{len(nodes) - 1}"

    def weight(*shape: int) -> str:
        weights.append(
            numpy_helper.from_array(draw.standard_normal(shape, np.float32) / shape[-1] ** 0.5, f"w{len(weights)}")
        )
        return weights[-1].name

    length = node("Gather", node("Shape", "words"), "one", axis=0)
    places = node("Range", "zero", length, "one")
    x = node("Add", node("Gather", weight(WORDS, WIDTH), "words"), node("Gather", weight(PLACES, WIDTH), places))
    seen = node("Unsqueeze", "mask", "axes")
    weights.append(numpy_helper.from_array(np.array([1, 2]), "axes"))
    bias = node("Mul", node("Sub", "ones", node("Cast", seen, to=TensorProto.FLOAT)), "least")
    for _ in range(2):
        query, key, value = (
            node("Transpose", node("Reshape", node("MatMul", x, weight(WIDTH, WIDTH)), "heads"), perm=perm)
            for perm in ((0, 2, 1, 3), (0, 2, 1, 3), (0, 2, 1, 3))
        )
        scores = node("Mul", node("MatMul", query, node("Transpose", key, perm=(0, 1, 3, 2))), "scale")
        mixed = node("MatMul", node("Softmax", node("Add", scores, bias) if masked else scores, axis=-1), value)
        joined = node("Reshape", node("Transpose", mixed, perm=(0, 2, 1, 3)), "whole")
        x = node("Add", x, node("MatMul", joined, weight(WIDTH, WIDTH)))
    texts = [helper.make_tensor_value_info(name, TensorProto.INT64, ["b", "n"]) for name in ("words", "mask")]
    ends = [x]
    if pooled:
        weights += [numpy_helper.from_array(np.array(value), name) for name, value in (("minus", -1), ("axis", [1]))]
        shown = node("Unsqueeze", node("Cast", "mask", to=TensorProto.FLOAT), "minus1")
        weights.append(numpy_helper.from_array(np.array([2]), "minus1"))
        total = node("ReduceSum", node("Mul", x, shown), "axis", keepdims=0)
        ends += [node("Div", total, node("ReduceSum", shown, "axis", keepdims=0)), node("Gather", x, "minus", axis=1)]
    results = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in ends]
    graph = helper.make_graph(nodes, "encoder", texts, results, weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def feeds(batch: int, length: int, seed: int = 0) -> dict[str, Array]:
    draw = np.random.default_rng((seed, batch, length))
    mask = np.ones((batch, length), np.int64)
    mask[-1, length - length // 3 :] = 0
    return {"words": draw.integers(0, WORDS, (batch, length)), "mask": mask}


def only(outputs: dict[str, Array]) -> Array:
    [array] = outputs.values()
    return array


SIZES = [(batch, length) for batch in (1, 3) for length in (5, 16, 17, 20, 21, 40, 41, 55, 64)]


@pytest.fixture
def executor() -> Iterator[Executor]:
    with dagexec.compile(encoder(), num_workers=1) as executor:
        yield executor


@pytest.mark.parametrize("seed", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_results_are_onnxruntimes_and_do_not_depend_on_what_ran_before(seed: int) -> None:
    masked = seed > 0  # otherwise nothing but the length hides what is behind a text
    session = onnxruntime.InferenceSession(encoder(masked=masked).SerializeToString())
    wanted = {size: session.run(None, feeds(*size))[0] for size in SIZES}
    executor = dagexec.compile(encoder(masked=masked), num_workers=1)
    found: dict[tuple[int, int], bytes] = {}
    order = random.Random(seed).choices(SIZES, k=60)
    for size in order:
        y = only(executor.run(feeds(*size)))
        np.testing.assert_allclose(y, wanted[size], atol=1e-5)
        assert found.setdefault(size, y.tobytes()) == y.tobytes()
    for size in SIZES:
        with dagexec.compile(encoder(masked=masked), num_workers=1) as fresh:
            assert only(fresh.run(feeds(*size))).tobytes() == found.get(
                size, only(executor.run(feeds(*size))).tobytes()
            )


def test_bytes_are_those_of_any_width() -> None:
    results = []
    for workers in (1, 2, 3):
        with dagexec.compile(encoder(), num_workers=workers) as executor:
            results.append([only(executor.run(feeds(*size))).tobytes() for size in SIZES])
    assert results[0] == results[1] == results[2]


def test_a_new_length_prepares_nothing(executor: Executor) -> None:
    executor.run(feeds(1, 64))
    [of_any_length] = executor._beside.members
    for length in (61, 62, 63, 64, 61):
        executor.run(feeds(1, length))
    assert of_any_length.net().preparation_statistics().made == 1
    assert executor.net().preparation_statistics().made == 0
    assert executor.statistics().completed == 6


def test_callers_at_once(executor: Executor) -> None:
    expected = {size: only(executor.run(feeds(*size))).tobytes() for size in SIZES}
    with ThreadPoolExecutor(4) as pool:
        order = random.Random(2).choices(SIZES, k=100)
        for size, outputs in zip(order, pool.map(lambda size: executor.run(feeds(*size)), order), strict=True):
            assert only(outputs).tobytes() == expected[size]


async def test_tasks_get_the_same(executor: Executor) -> None:
    for size in SIZES:
        found = only(await executor.run_async(feeds(*size))).tobytes()
        assert found == only(executor.run(feeds(*size))).tobytes()


def test_results_go_where_the_caller_says(executor: Executor) -> None:
    expected = only(executor.run(feeds(2, 33)))
    [name] = executor.outputs
    target = np.empty_like(expected)
    assert executor.run(feeds(2, 33), out={name: target})[name] is target
    assert target.tobytes() == expected.tobytes()
    with pytest.raises(FeedError, match="must be float32 of shape"):
        executor.run(feeds(2, 33), out={name: np.empty((2, 36, WIDTH), np.float32)})
    assert executor.run(feeds(2, 33), outputs=[]) == {}


def test_a_full_length_that_the_net_cannot_have_is_run_as_it_is(executor: Executor) -> None:
    """There are 70 positions, and tensors for 69 of them would have 72."""
    session = onnxruntime.InferenceSession(encoder().SerializeToString())
    for length in (69, 70, 69):
        assert full_length(length) > PLACES
        np.testing.assert_allclose(
            only(executor.run(feeds(1, length))), session.run(None, feeds(1, length))[0], atol=1e-5
        )
    with pytest.raises(OperatorError, match=r"Gather .* of net 'encoder'"):
        executor.run(feeds(1, 71))


def test_errors_are_those_of_the_net(executor: Executor) -> None:
    wrong = feeds(1, 30)
    wrong["words"][0, 7] = WORDS
    with pytest.raises(OperatorError, match=f"{WORDS}"):
        executor.run(wrong)
    with pytest.raises(DagexecError, match="do not broadcast"):
        executor.run({**feeds(1, 30), "mask": np.ones((1, 29), np.int64)})
    with pytest.raises(FeedError, match="words"):
        executor.run({"mask": wrong["mask"]})
    assert only(executor.run(feeds(1, 30))).shape == (1, 30, WIDTH)


def test_prompts_of_a_decoder_whose_caches_are_empty() -> None:
    model = decoder(masked=True)
    session = onnxruntime.InferenceSession(model.SerializeToString())
    with dagexec.compile(model, num_workers=1) as executor:
        for length in (33, 34, 35):
            fed = {name: np.zeros((1, KEY_HEADS, 0, ELEMENTS), np.float32) for name in CACHES}
            fed |= {"ids": np.arange(length)[None] % 7, "attention_mask": np.ones((1, length), np.int64)}
            for found, wanted in zip(executor.run(fed).values(), session.run(None, fed), strict=True):
                np.testing.assert_allclose(found, wanted, atol=1e-5)
        nets = [one.net() for one in executor._beside.members]
        of_texts = [net for net in nets if any(one.definition.type == "SizedAttention" for one in net.operators)]
        assert [net.preparation_statistics().made for net in of_texts] == [1]


def test_a_warm_up_is_of_the_net_for_its_length(executor: Executor) -> None:
    executor.warm_up(feeds(1, 50))
    [of_any_length] = executor._beside.members
    assert executor.net().preparation_statistics().made == 0
    executor.run(feeds(1, 51))
    assert of_any_length.net().preparation_statistics().made == 1
    with executor.net_instead(feeds(1, 50)) as instead:
        assert instead == ("any length", of_any_length.net())


def pooled_results(feeds: dict[str, Array], outputs: list[str] | None = None) -> dict[str, Array]:
    session = onnxruntime.InferenceSession(encoder(pooled=True).SerializeToString())
    names = [one.name for one in session.get_outputs()]
    wanted = dict(zip(names, session.run(None, feeds), strict=True))
    return wanted if outputs is None else {name: wanted[name] for name in outputs}


def test_what_pools_a_text_follows_at_its_length() -> None:
    with dagexec.compile(encoder(pooled=True), num_workers=1) as executor:
        for size in (*SIZES, *SIZES):
            found, wanted = executor.run(feeds(*size)), pooled_results(feeds(*size))
            assert list(found) == list(wanted)
            for name, array in found.items():
                np.testing.assert_allclose(array, wanted[name], atol=1e-5)
        tail, of_any_length = executor._beside.members
        assert [node.type for node in tail.model.program.op] == ["ReduceSum", "ReduceSum", "Div", "Gather"]
        assert of_any_length.net().preparation_statistics().made < tail.net().preparation_statistics().made


@pytest.mark.parametrize("places", [[0], [1], [2, 0], [2, 1]])
async def test_outputs_that_are_asked_for_of_a_net_and_its_tail(places: list[int]) -> None:
    with dagexec.compile(encoder(pooled=True), num_workers=1) as executor:
        names = [executor.outputs[place] for place in places]
        wanted = pooled_results(feeds(2, 33), names)
        out = {name: np.empty_like(array) for name, array in wanted.items()}
        for found in (
            executor.run(feeds(2, 33), outputs=names, out=out),
            executor.run(feeds(2, 33), outputs=names, timeout=60),
            await executor.run_async(feeds(2, 33), outputs=names),
        ):
            assert list(found) == names
            for name, array in found.items():
                np.testing.assert_allclose(array, wanted[name], atol=1e-5)
        for name, array in out.items():
            np.testing.assert_allclose(array, wanted[name], atol=1e-5)


@pytest.mark.parametrize("way", [(), ("--trace", "t.json"), ("--report", "r.html")], ids=" ".join)
def test_the_command_line_runs_a_text_and_shows_the_net_that_ran(
    cli: Cli, tmp_path: Path, way: tuple[str, ...]
) -> None:
    model, shapes = str(tmp_path / "m.onnx"), ("--shape", "words=1,37", "--shape", "mask=1,37")
    Path(model).write_bytes(encoder().SerializeToString())
    files = [str(tmp_path / one) if "." in one else one for one in way]
    status, out, _ = cli("run", model, *shapes, *files)
    assert (status, "[1, 37, 32]" in out) == (0, True)
    status, out, _ = cli("check", model, *shapes, "--optimize", "--json")
    instead = json.loads(out)["instead"]
    assert (status, instead["for"], instead["holds"]) == (0, "any length", True)


def test_each_length_may_be_prepared_as_it_is(executor: Executor) -> None:
    with dagexec.compile(encoder(), num_workers=1, any_length=False) as exact:
        for size in SIZES:
            assert only(exact.run(feeds(*size))).tobytes() == only(executor.run(feeds(*size))).tobytes()
        assert exact.net().preparation_statistics().made == len(SIZES)


@pytest.mark.parametrize("length", [*range(1, 40), 100, 129, 257, 1000, 4097])
def test_a_full_length_is_little_more(length: int) -> None:
    full = full_length(length)
    assert length <= full <= max(length + 3, length * 17 / 16)
    assert full_length(full) == full
