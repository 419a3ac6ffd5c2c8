"""Merged decoders: an input says which of two branches is run, and each run is one of that branch alone."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import dagexec
from dagexec.errors import ClosedError, DagexecError, FeedError, OperatorError, SessionBusyError
from dagexec.executor.branches import branch_of, condition_of
from dagexec.executor.executor import Executor
from tests.executor.decoders import CACHES, ELEMENTS, KEY_HEADS, WORDS, Peer, decoder, merged

Array = npt.NDArray[Any]

pytest.importorskip("onnxruntime")

COUNTS = [12, 1, 1, 3, *[1] * 20]
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "mask": {"masked": True},
    "operator": {"operator": "3"},
    "cap and window": {"softcap": 2.0, "window": 16},
}
FIRST, FOLLOWING = ({"use_cache_branch": np.array([value])} for value in (False, True))


@pytest.fixture
def executor() -> Iterator[Executor]:
    with dagexec.compile(merged(decoder(1)), num_workers=1) as executor:
        yield executor


def ids(count: int, seed: int = 0) -> dict[str, Array]:
    return {"ids": np.random.default_rng(seed).integers(0, WORDS, (1, count))}


def caches(length: int) -> dict[str, Array]:
    random = np.random.default_rng(length)
    return {name: random.standard_normal((1, KEY_HEADS, length, ELEMENTS), np.float32) for name in CACHES}


def plain_bytes(array: Array) -> bytes:
    """Without what tests know of engines: these are of the net with both branches, which runs nothing."""
    return array.view(np.ndarray).tobytes()


def preparations(executor: Executor) -> list[int]:
    """Of the branch that is first, of that which follows, and of the model with both."""
    branches = executor._alternatives  # type: ignore[attr-defined]
    made = [branches[taken].net().preparation_statistics().made if taken in branches else 0 for taken in (False, True)]
    return [*made, executor.net().preparation_statistics().made]


@pytest.mark.parametrize("is_fed", [False, True])
@pytest.mark.parametrize("name", KINDS)
def test_a_session_takes_the_first_branch_once_and_then_steps_of_the_other(name: str, is_fed: bool) -> None:
    model, total = merged(decoder(1, **KINDS[name])), 0
    peer = Peer(model)
    with dagexec.compile(model, num_workers=1) as executor, executor.session() as session:
        for number, count in enumerate(COUNTS):
            total += count
            condition, feeds = FOLLOWING if number else FIRST, ids(count, number)
            if name == "mask":
                feeds["attention_mask"] = np.ones((1, total), np.int64)
                feeds["attention_mask"][0, 1:3] = 0
            results = session.run({**feeds, **condition} if is_fed else feeds)
            assert list(results) == ["scores"]
            expected = peer.run({**feeds, **condition})["scores"]
            np.testing.assert_allclose(results["scores"], expected, rtol=1e-4, atol=1e-5)
        assert preparations(executor) == [1, 0, 0], "the prompt"
        assert executor.statistics().completed == len(COUNTS)
        for state, array in session.state.items():
            np.testing.assert_allclose(array, peer.caches[state], rtol=1e-4, atol=1e-5)


def test_fed_runs_are_those_of_the_branch_that_they_take(executor: Executor) -> None:
    peer = Peer(merged(decoder(1)))
    with dagexec.compile(decoder(1), num_workers=1) as plain:
        for length in (20, 21, 40):
            peer.caches = caches(length)
            found = executor.run({**ids(1), **caches(length), **FOLLOWING})
            expected = peer.run({**ids(1), **FOLLOWING})
            alone = plain.run({**ids(1), **caches(length)})
            assert list(found) == list(executor.outputs)
            for name, array in found.items():
                np.testing.assert_allclose(array, expected[name], rtol=1e-4, atol=1e-5)
                assert plain_bytes(array) == plain_bytes(alone[name])
    assert preparations(executor) == [0, 0, 0]
    prompt = executor.run({**ids(9), **caches(1), **FIRST}, outputs=["scores"])
    assert list(prompt) == ["scores"]
    assert prompt["scores"].tobytes() == executor.run({**ids(9), **caches(5), **FIRST})["scores"].tobytes()
    assert preparations(executor) == [1, 0, 0], "what it is fed for caches is not read"


async def test_tasks_and_forks_have_the_bytes_of_threads(executor: Executor) -> None:
    def text(session: dagexec.Session, seeds: range) -> list[bytes]:
        return [session.run(ids(1, seed))["scores"].tobytes() for seed in seeds]

    session, other = executor.session(), executor.session()
    for one in (session, other):
        one.run(ids(12))
    fork = session.fork()
    expected = text(other, range(8))
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(text, (session, fork), (range(8),) * 2)) == [expected] * 2
    again = executor.session()
    await again.run_async({**ids(12), **FIRST})
    assert [(await again.run_async(ids(1, seed)))["scores"].tobytes() for seed in range(8)] == expected
    session.run({**ids(12), **FIRST})
    assert text(session, range(8)) == expected, "a first run begins anew"
    session.reset()
    session.run(ids(12))
    assert text(session, range(8)) == expected


def test_a_first_run_that_fails_or_overlaps_leaves_the_state(executor: Executor) -> None:
    session = executor.session()
    session.run(ids(12))
    before = {name: array.tobytes() for name, array in session.state.items()}
    with pytest.raises(OperatorError, match="index"):
        session.run({"ids": np.full((1, 9), WORDS), **FIRST})
    with session._alone(), pytest.raises(SessionBusyError):
        session.run({**ids(9), **FIRST})
    with pytest.raises(FeedError, match="nothing"):
        session.run({**ids(9), **FIRST, "nothing": np.zeros(1)})
    assert {name: array.tobytes() for name, array in session.state.items()} == before
    results = session.run({**ids(9), **FIRST}, outputs=["scores", "present_key.0"])
    results["present_key.0"][:] = 7
    assert not (session.state["past_key.0"] == 7).any(), "results are the caller's"


def test_what_is_fed_for_the_condition_has_to_be_one_truth_value(executor: Executor) -> None:
    with pytest.raises(FeedError, match="use_cache_branch"):
        executor.run({**ids(1), **caches(20)})
    with pytest.raises(FeedError, match="use_cache_branch"):
        executor.run({**ids(1), **caches(20), "use_cache_branch": np.array([1])})
    assert preparations(executor) == [0, 0, 0]


@pytest.mark.parametrize("optimize", [False, True])
def test_branches_are_warmed_up_and_closed(optimize: bool) -> None:
    shapes = {"ids": (1, 1), "use_cache_branch": (1,), **{name: array.shape for name, array in caches(15).items()}}
    options: dict[str, Any] = {"warm_start": shapes, "optimize": optimize, "shapes": shapes, "keep": ["past_key.0"]}
    with dagexec.compile(merged(decoder(1)), num_workers=1, **options) as executor:
        made = preparations(executor)
        assert made[:2] == [1, 1]
        with executor.session() as session:
            session.run(ids(1))
        assert preparations(executor) == made
    with pytest.raises(ClosedError):
        executor.run({**ids(1), **caches(20), **FOLLOWING})
    with pytest.raises(ClosedError):
        session.run(ids(1))


def encoded() -> onnx.ModelProto:
    """What is computed of `sound` in a first run, and read in others, where the output for it means nothing."""
    floats = {"sound": [1, "n"], "past_memory": [1, "m"], "x": [1], "past_sum": [1]}
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in floats.items()]
    inputs.append(helper.make_tensor_value_info("use_cache_branch", TensorProto.BOOL, [1]))
    names = {"y": [1], "present_memory": [1, "m"], "present_sum": [1]}
    outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in names.items()]
    first = [
        helper.make_node("Mul", ["sound", "two"], ["present_memory"]),
        helper.make_node("Identity", ["x"], ["present_sum"]),
        helper.make_node("Add", ["x", "two"], ["y"]),
    ]
    following = [
        helper.make_node("Identity", ["nothing"], ["present_memory"]),
        helper.make_node("Add", ["x", "past_sum"], ["present_sum"]),
        helper.make_node("ReduceSum", ["past_memory"], ["total"], keepdims=0),
        helper.make_node("Mul", ["present_sum", "total"], ["y"]),
    ]
    branches = {
        "then_branch": helper.make_graph(following, "following", [], outputs),
        "else_branch": helper.make_graph(first, "first", [], outputs),
    }
    values = {"two": np.array([2], np.float32), "nothing": np.zeros((1, 0), np.float32)}
    weights = [numpy_helper.from_array(array, name) for name, array in values.items()]
    graph = helper.make_graph(
        [helper.make_node("If", ["use_cache_branch"], list(names), **branches)], "encoded", inputs, outputs, weights
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def test_a_state_that_is_put_out_in_the_first_run_alone_stays_as_it_is() -> None:
    sound, numbers = np.array([[1, 2, 3]], np.float32), [np.array([number], np.float32) for number in (5, 1, 2, 4)]
    with dagexec.compile(encoded(), num_workers=1) as executor, executor.session() as session:
        for _ in range(2):
            results = [session.run({"x": x, "sound": sound} if not n else {"x": x})["y"] for n, x in enumerate(numbers)]
            assert [float(y[0]) for y in results] == [7, 6 * 12, 8 * 12, 12 * 12]
            fork = session.fork()
            assert float(fork.run({"x": numbers[0]})["y"][0]) == 17 * 12
            session.reset({"sound": sound})
            assert float(session.run({"x": numbers[0]})["y"][0]) == 7
            assert float(session.run({"x": numbers[1]})["y"][0]) == 6 * 12
            session.reset()


def test_a_condition_is_what_conditions_alone_read() -> None:
    model = merged(decoder(1))
    loaded = dagexec.load_model(model)
    assert condition_of(loaded) == "use_cache_branch"
    first, following = (branch_of(loaded, "use_cache_branch", taken) for taken in (False, True))
    assert set(first.inputs) == {"ids"}
    assert set(following.inputs) == {"ids", *CACHES}
    model.graph.node.append(helper.make_node("Not", ["use_cache_branch"], ["other"]))
    model.graph.output.append(helper.make_tensor_value_info("other", TensorProto.BOOL, [1]))
    loaded = dagexec.load_model(model)
    assert condition_of(loaded) is None
    assert condition_of(dagexec.load_model(decoder(1))) is None
    with dagexec.compile(model, num_workers=1) as executor:
        assert executor.run({**ids(9), **caches(1), **FIRST})["other"].all()


def test_a_branch_that_cannot_be_compiled_says_so(executor: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise DagexecError("no memory")

    monkeypatch.setattr(executor, "_build", refuse)
    with pytest.raises(DagexecError, match="no memory"):
        executor.session()
    monkeypatch.undo()
    executor.session().run(ids(9))


def test_a_plan_has_both_branches(executor: Executor, tmp_path: Path) -> None:
    onnx.save(merged(decoder(1)), tmp_path / "merged.onnx")
    with dagexec.compile(tmp_path / "merged.onnx", num_workers=1) as whole:
        whole.save(tmp_path / "merged.dagexec")
    with dagexec.open(tmp_path / "merged.dagexec", num_workers=1) as opened:
        for condition in (FIRST, FOLLOWING):
            found = opened.run({**ids(1), **caches(3), **condition})
            for name, array in executor.run({**ids(1), **caches(3), **condition}).items():
                np.testing.assert_allclose(found[name], array, rtol=1e-5, atol=1e-6)


def test_the_net_of_a_step_may_be_inspected(executor: Executor) -> None:
    with executor.net_instead({**ids(1), **caches(20), **FOLLOWING}) as found:
        assert found is not None
        purpose, net = found
        assert purpose == "a step"
        assert "CachedAttention" in {operator.definition.type for operator in net.operators}
