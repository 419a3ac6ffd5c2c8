"""Sessions: states and caches stay between runs; values are onnxruntime's, and a run that fails changes nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anyio
import numpy as np
import numpy.typing as npt
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import dagexec
from dagexec.errors import FeedError, ResourceError, RunTimeoutError, SessionBusyError
from dagexec.executor.executor import Executor
from dagexec.executor.sessions.names import states_by_name
from dagexec.executor.sessions.session import Session
from tests.executor.decoders import CACHES, ELEMENTS, KEY_HEADS, WORDS, Peer, decoder

Array = npt.NDArray[Any]

pytest.importorskip("onnxruntime")

PROMPT_AND_STEPS = [5, *[1] * 70, 3, 1, 1, 12, 1]
"""New positions of runs: caches outgrow their first room, and sizes change on the way."""


def ids(count: int, batch: int = 1, seed: int = 0) -> Array:
    return np.random.default_rng(seed).integers(0, WORDS, (batch, count))


@pytest.fixture
def executor() -> Iterator[Executor]:
    with dagexec.compile(decoder(), num_workers=1) as executor:
        yield executor


def scores(session: Session, parts: Sequence[Array]) -> list[bytes]:
    return [session.run({"ids": part})["scores"].tobytes() for part in parts]


@pytest.mark.parametrize(
    ("inputs", "outputs", "expected"),
    [
        (["x", "state", "sr"], ["output", "stateN"], {"state": "stateN"}),
        (["input", "h", "c"], ["output", "hn", "cn"], {"h": "hn", "c": "cn"}),
        (["a", "h_0", "c_0"], ["y", "h_n", "c_n"], {"h_0": "h_n", "c_0": "c_n"}),
        (["past_key_values.1.key"], ["logits", "present.1.key"], {"past_key_values.1.key": "present.1.key"}),
        (["cached_key_0", "cached_key_1"], ["new_cached_key_0"], {"cached_key_0": "new_cached_key_0"}),
        (["conv_cache_in", "x"], ["conv_cache_out", "y"], {"conv_cache_in": "conv_cache_out"}),
        (["past_k", "prev_k"], ["new_k"], {}),
        (["input"], ["output"], {}),
    ],
)
def test_names_tell_which_output_becomes_which_input(
    inputs: list[str], outputs: list[str], expected: dict[str, str]
) -> None:
    assert states_by_name(inputs, outputs) == expected


def recurrent() -> onnx.ModelProto:
    """An LSTM over chunks of any length: `x` [time, batch, 3], states `h` and `c` [1, batch, 4]."""
    random = np.random.default_rng(1)
    weights = {"w": (1, 16, 3), "r": (1, 16, 4), "b": (1, 32)}
    arrays = [numpy_helper.from_array(random.standard_normal(s).astype(np.float32), n) for n, s in weights.items()]
    nodes = [
        helper.make_node("LSTM", ["x", "w", "r", "b", "", "h", "c"], ["steps", "hn", "cn"], hidden_size=4),
        helper.make_node("Squeeze", ["steps", "axis"], ["y"]),
    ]
    arrays.append(numpy_helper.from_array(np.array([1]), "axis"))
    sizes = {"x": ["time", "batch", 3], "h": [1, "batch", 4], "c": [1, "batch", 4]}
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in sizes.items()]
    sizes = {"y": ["time", "batch", 4], "hn": [1, "batch", 4], "cn": [1, "batch", 4]}
    outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in sizes.items()]
    graph = helper.make_graph(nodes, "detector", inputs, outputs, arrays)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def test_a_recurrent_net_goes_on_where_the_run_before_ended() -> None:
    import onnxruntime

    model, chunks = recurrent(), np.random.default_rng(2).standard_normal((6, 5, 1, 3), np.float32)
    peer = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    state = {name: np.zeros((1, 1, 4), np.float32) for name in ("h", "c")}
    with dagexec.compile(model, num_workers=1) as executor, executor.session() as session:
        for chunk in chunks:
            results = session.run({"x": chunk})
            expected, state["h"], state["c"] = peer.run(None, {"x": chunk, **state})
            assert list(results) == ["y"]
            np.testing.assert_allclose(results["y"], expected, rtol=1e-5, atol=1e-6)
        for name, array in session.state.items():
            np.testing.assert_allclose(array, state[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("batch", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_decoder_gives_the_peers_values_at_every_length(executor: Executor, batch: int) -> None:
    peer, session = Peer(decoder(), batch), executor.session()
    for number, count in enumerate(PROMPT_AND_STEPS):
        feeds = {"ids": ids(count, batch, number)}
        results = session.run(feeds)
        np.testing.assert_allclose(results["scores"], peer.run(feeds)["scores"], rtol=1e-4, atol=1e-5)
        assert list(results) == ["scores"]
    assert executor.statistics().completed == len(PROMPT_AND_STEPS)
    assert executor.net().preparation_statistics().made == 1, "for 12 positions: other runs were steps"
    for name, array in session.state.items():
        np.testing.assert_allclose(array, peer.caches[name], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_what_the_caller_feeds_may_grow_with_the_caches() -> None:
    model = decoder(2, masked=True)
    peer, total = Peer(model, 2), 0
    with dagexec.compile(model, num_workers=1) as executor:
        session = executor.session()
        for number, count in enumerate(PROMPT_AND_STEPS):
            total += count
            mask = np.ones((2, total), np.int64)
            mask[1, :2] = 0
            feeds = {"ids": ids(count, 2, number), "attention_mask": mask}
            results = session.run(feeds)["scores"]
            np.testing.assert_allclose(results, peer.run(feeds)["scores"], rtol=1e-4, atol=1e-5)
        assert executor.net().preparation_statistics().made == 1, "for 12 positions: other runs were steps"


def test_a_net_that_does_more_with_its_caches_is_run_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    model = decoder(mixed=True)
    peer = Peer(model)
    with dagexec.compile(model, num_workers=1) as executor, caplog.at_level("INFO", logger="dagexec"):
        session = executor.session()
        for number, count in enumerate([5, 1, 1, 1]):
            feeds = {"ids": ids(count, seed=number)}
            results, expected = session.run(feeds), peer.run(feeds)
            for name in ("scores", "mean"):
                np.testing.assert_allclose(results[name], expected[name], rtol=1e-4, atol=1e-5)
        assert executor.net().preparation_statistics().made == 4
    assert "ReduceMean reads a cache" in caplog.text


@pytest.mark.parametrize(
    "options",
    [{"net_type": "simple"}, {"net_type": "async_dag", "num_workers": 2, "replicas": 2}, {"max_batch": 4}],
    ids=str,
)
def test_every_runtime_gives_the_same_bytes(executor: Executor, options: dict[str, Any]) -> None:
    parts = [ids(5), *[ids(1, seed=number) for number in range(8)]]
    with dagexec.compile(decoder(), **options) as other:
        assert scores(other.session(), parts) == scores(executor.session(), parts)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"optimize": False}, {"device": "sim:0"}], ids=str)
def test_nets_as_they_are_and_devices_keep_states(options: dict[str, Any]) -> None:
    peer = Peer(decoder())
    with dagexec.compile(decoder(), **options) as executor:
        session = executor.session()
        for number, count in enumerate([5, 1, 1, 2, 1]):
            feeds = {"ids": ids(count, seed=number)}
            expected = peer.run(feeds)["scores"]
            np.testing.assert_allclose(session.run(feeds)["scores"], expected, rtol=1e-4, atol=1e-5)


def test_a_fork_goes_on_by_itself(executor: Executor) -> None:
    session = executor.session()
    scores(session, [ids(5), *[ids(1, seed=number) for number in range(4)]])
    fork, before = session.fork(), session.state
    ours, theirs = ([ids(1, seed=number) for number in numbers] for numbers in (range(10, 16), range(20, 26)))
    mixed = [(scores(session, [one])[0], scores(fork, [other])[0]) for one, other in zip(ours, theirs, strict=True)]
    for tokens, found in zip((ours, theirs), zip(*mixed, strict=True), strict=True):
        again = executor.session()
        again.reset(before)
        assert scores(again, tokens) == list(found)


def test_a_run_of_other_sizes_that_fails_leaves_the_net_of_steps(executor: Executor) -> None:
    tokens = [ids(1, seed=number) for number in range(4)]
    expected = scores(executor.session(), [ids(5), *tokens])
    session = executor.session()
    results = scores(session, [ids(5)])
    for token in tokens:
        with pytest.raises(RunTimeoutError):
            session.run({"ids": ids(3)}, timeout=0.0)
        results += scores(session, [token])
    assert results == expected


def test_a_step_like_the_last_one_is_checked_as_any_other(executor: Executor) -> None:
    session, other = executor.session(), executor.session()
    parts = [ids(5), *[ids(1, seed=number) for number in range(3)]]
    assert scores(session, parts) == scores(other, parts)
    for wrong in ({"ids": np.zeros((1, 1))}, {"ids": np.zeros((1, 1, 1), np.int64)}, {"idz": ids(1)}, {}):
        with pytest.raises(FeedError):
            session.run(wrong)
    token = ids(1, seed=9)
    assert session.run({"ids": token.tolist()})["scores"].tobytes() == other.run({"ids": token})["scores"].tobytes()
    state = session.state[CACHES[0]]
    assert session.run({"ids": token, CACHES[0]: state})["scores"].shape == (1, 1, WORDS), "a state is replaced"


def test_sessions_at_the_same_time_give_the_bytes_of_one_alone(executor: Executor) -> None:
    parts = [[ids(4, seed=number), *[ids(1, seed=10 * number + step) for step in range(30)]] for number in range(4)]
    alone = [scores(executor.session(), one) for one in parts]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda one: scores(executor.session(), one), parts))
    assert together == alone


def test_a_run_that_fails_leaves_the_state(executor: Executor) -> None:
    session, other = executor.session(), executor.session()
    parts = [ids(5), ids(1, seed=1), ids(1, seed=2), ids(1, seed=3)]
    expected = scores(other, parts)
    found = []
    with pytest.raises(dagexec.errors.OperatorError, match="index"):
        session.run({"ids": ids(5, batch=3) + WORDS})
    for part in parts:
        with pytest.raises(FeedError):
            session.run({"ids": part.astype(np.float32)})
        with pytest.raises(dagexec.errors.OperatorError, match="index"):
            session.run({"ids": part + WORDS})
        with pytest.raises(RunTimeoutError):
            session.run({"ids": part}, timeout=0.0)
        found += scores(session, [part])
    assert found == expected


def test_a_run_that_fails_does_not_decide_how_the_next_is_run(executor: Executor) -> None:
    session, other = executor.session(), executor.session()
    expected = scores(other, [ids(9), ids(1), ids(1)])
    assert scores(session, [ids(9), ids(1)]) == expected[:2]
    with pytest.raises(dagexec.errors.OperatorError, match="index"):
        session.run({"ids": ids(3) + WORDS})
    assert scores(session, [ids(1)]) == expected[2:]


async def test_a_session_has_one_run_at_a_time(executor: Executor) -> None:
    session = executor.session()
    errors: list[BaseException] = []

    async def run() -> None:
        try:
            await session.run_async({"ids": ids(5)})
        except SessionBusyError as error:
            errors.append(error)

    async with anyio.create_task_group() as group:
        group.start_soon(run)
        group.start_soon(run)
    (error,) = errors
    assert "net 'decoder': session: a run of it is under way" in str(error)
    assert session.state[CACHES[0]].shape == (1, KEY_HEADS, 5, ELEMENTS)


async def test_tasks_get_the_bytes_of_threads(executor: Executor) -> None:
    parts = [ids(5), *[ids(1, seed=number) for number in range(6)]]
    session = executor.session()
    found = [(await session.run_async({"ids": part}))["scores"].tobytes() for part in parts]
    assert found == scores(executor.session(), parts)


def test_a_state_can_be_seen_and_replaced(executor: Executor) -> None:
    session = executor.session()
    whole = session.run({"ids": ids(6)}, outputs=["scores", "present_key.0"])
    state = session.state
    np.testing.assert_array_equal(whole["present_key.0"], state["past_key.0"])
    whole["present_key.0"][...] = 0
    with pytest.raises(ValueError, match="read-only"):
        state["past_key.0"][...] = 0
    first = scores(session, [ids(1)])
    session.reset(state)
    assert scores(session, [ids(1)]) == first
    session.reset()
    assert session.state == {}
    feeds = {"ids": ids(1), **{name: np.array(array) for name, array in state.items()}}
    np.testing.assert_array_equal(
        session.run(feeds, outputs=["scores"])["scores"], executor.run(feeds, outputs=["scores"])["scores"]
    )


@pytest.mark.slow
def test_sessions_that_have_not_run_for_long_give_up_room_for_others() -> None:
    prompt, steps = ids(40), [ids(1, seed=number) for number in range(40)]
    with dagexec.compile(decoder(), num_workers=1) as executor:
        session = executor.session()
        expected = scores(session, [prompt, *steps])
        assert session.nbytes == sum(array.nbytes for array in session.state.values()) * 128 // 80
        limit = session.nbytes * 11 // 5
    with dagexec.compile(decoder(), num_workers=1, session_bytes=limit) as executor:
        sessions = [executor.session() for _ in range(3)]
        for session in sessions:
            assert scores(session, [prompt, *steps[:20]]) == expected[:21]
        assert scores(sessions[2], steps[20:]) == expected[21:]
        assert scores(sessions[0], steps[20:]) == expected[21:]
        assert sum(session.nbytes for session in sessions) <= limit
        before = sessions[1].state
        with pytest.raises(ResourceError, match=rf"net 'decoder': .* session_bytes allows {limit:,}: close sessions"):
            scores(sessions[1], steps[20:])
        assert sessions[1].state.keys() == before.keys()
        sessions[0].close()
        assert scores(sessions[1], steps[20 + sessions[1].state[CACHES[0]].shape[2] - 60 :])[-1] == expected[-1]


def test_what_no_output_belongs_to_is_said_once(executor: Executor) -> None:
    session, other = executor.session(), executor.session()
    session.reset({"ids": ids(1)})
    fork = session.fork()
    expected = scores(other, [ids(1), ids(1), ids(1, seed=1)])
    assert [one["scores"].tobytes() for one in (session.run({}), session.run({}))] == expected[:2]
    assert scores(session, [ids(1, seed=1)]) == expected[2:]
    assert fork.run({})["scores"].tobytes() == expected[0]
    np.testing.assert_array_equal(fork.state["ids"], ids(1))
    fork.reset()
    with pytest.raises(FeedError, match="ids"):
        fork.run({})


def test_mistakes_are_named(executor: Executor) -> None:
    with pytest.raises(FeedError, match=r"session: states: 'past_key\.9' is no input; did you mean"):
        executor.session({"past_key.9": "present_key.0"})
    with pytest.raises(FeedError, match="states: 'present' is no output"):
        executor.session({"past_key.0": "present"})
    session = executor.session({"past_key.0": "present_key.0"})
    with pytest.raises(FeedError, match=r"input 'past_key\.1' is neither fed nor known as a state"):
        session.run({"ids": ids(1)})
    with pytest.raises(FeedError, match="session: 'id' is no input; did you mean 'ids'"):
        session.reset({"id": ids(1)})
    with pytest.raises(FeedError, match=r"input 'past_key\.0' must be float32, found int64"):
        session.reset({"past_key.0": np.zeros((1, KEY_HEADS, 0, ELEMENTS), np.int64)})


def test_a_closed_executor_closes_the_nets_of_its_sessions() -> None:
    with dagexec.compile(decoder(), num_workers=1) as executor:
        session = executor.session()
        scores(session, [ids(1), ids(1)])
    with pytest.raises(dagexec.errors.ClosedError):
        session.run({"ids": ids(1)})
