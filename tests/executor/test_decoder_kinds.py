"""Decoders of several kinds: their steps are nets of their own, with onnxruntime's tokens and values."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import pytest

import dagexec
from dagexec.executor.model_runner import ModelRunner
from tests.executor.decoders import CACHES, ELEMENTS, KEY_HEADS, WORDS, Peer, decoder

Array = npt.NDArray[Any]

pytest.importorskip("onnxruntime")

KINDS: dict[str, dict[str, Any]] = {
    "operator with heads side by side": {"operator": "3"},
    "operator with heads apart": {"operator": "4"},
    "operator with a cap": {"operator": "3", "softcap": 2.0},
    "operator with a mask": {"operator": "3", "masked": True},
    "operator with a mask and a window": {"operator": "4", "masked": True, "window": 16},
    "a cap": {"softcap": 2.0},
    "a window": {"window": 16},
    "a cap, a window and a mask": {"softcap": 2.0, "window": 16, "masked": True},
}
COUNTS = [5, *[1] * 40, 3, 1, 2, 1]
"""New positions of runs, which go beyond the window."""


def feeds(kind: Mapping[str, Any], count: int, total: int, *, batch: int = 1) -> dict[str, Array]:
    found: dict[str, Array] = {"ids": np.random.default_rng(total).integers(0, WORDS, (batch, count))}
    if kind.get("masked"):
        found["attention_mask"] = np.ones((batch, total), np.int64)
        found["attention_mask"][-1, 1:3] = 0
    return found


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("name", KINDS)
def test_all_runs_of_a_session_are_steps_with_the_peers_values(
    name: str, batch: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "dagexec")
    kind, total = KINDS[name], 0
    model = decoder(**kind)
    peer = Peer(model, batch)
    with dagexec.compile(model, num_workers=1) as executor, executor.session() as session:
        for count in COUNTS:
            total += count
            fed = feeds(kind, count, total, batch=batch)
            expected = peer.run(fed)["scores"]
            np.testing.assert_allclose(session.run(fed)["scores"], expected, rtol=1e-4, atol=1e-5)
        assert executor.net().preparation_statistics().made == 0
        for state, array in session.state.items():
            np.testing.assert_allclose(array, peer.caches[state], rtol=1e-4, atol=1e-5)
    assert not [record for record in caplog.records if "caches are copied" in record.getMessage()]


@pytest.mark.parametrize("name", KINDS)
def test_fed_runs_are_steps_with_the_peers_values(name: str) -> None:
    kind = KINDS[name]
    model = decoder(**kind)
    peer = Peer(model)
    with dagexec.compile(model, num_workers=1) as executor:
        for length, count in ((8, 1), (30, 1), (31, 3), (100, 1), (12, 3)):
            random = np.random.default_rng(length)
            peer.caches = {
                name: random.standard_normal((1, KEY_HEADS, length, ELEMENTS), np.float32) for name in CACHES
            }
            fed = {**feeds(kind, count, length + count), **peer.caches}
            found = executor.run(fed)
            for output, expected in peer.run({name: fed[name] for name in fed.keys() - peer.caches.keys()}).items():
                np.testing.assert_allclose(found[output], expected, rtol=1e-4, atol=1e-5)
        assert executor.net().preparation_statistics().made == 0


@pytest.mark.parametrize("name", KINDS)
def test_joined_and_forked_sessions_have_the_bytes_of_a_session_alone(name: str) -> None:
    kind = KINDS[name]
    model = decoder(**kind)
    shapes = dict.fromkeys(CACHES, (1, KEY_HEADS, 23, ELEMENTS)) | {"ids": (1, 1)}
    if kind.get("masked"):
        shapes["attention_mask"] = 1, 24

    def text(session: ModelRunner, seed: int, begin: int, end: int) -> bytes:
        return b"".join(
            session.run({**feeds(kind, 1, total), "ids": np.array([[(seed + total * total) % WORDS]])})[
                "scores"
            ].tobytes()
            for total in range(begin + 1, end + 1)
        )

    with dagexec.compile(model, num_workers=1) as executor:
        alone = []
        for seed in range(4):
            session = executor.session()
            alone.append(text(session, seed, 0, 20 + seed))
            alone += [text(one, 9 - seed, 20 + seed, 27) for one in (session.fork(), session)]
    options: dict[str, Any] = {"max_batch": 4, "max_wait": 0.01, "shapes": shapes}
    with dagexec.compile(model, num_workers=1, **options) as executor, ThreadPoolExecutor(4) as pool:
        sessions = [executor.session() for _ in range(4)]
        first = list(pool.map(text, sessions, range(4), [0] * 4, range(20, 24)))
        forks = [one for session in sessions for one in (session.fork(), session)]
        seeds = [index // 2 for index in range(8)]
        then = list(pool.map(text, forks, [9 - seed for seed in seeds], [20 + seed for seed in seeds], [27] * 8))
        assert max(executor.statistics().batch_sizes) > 1
    assert [one for seed in range(4) for one in (first[seed], *then[2 * seed : 2 * seed + 2])] == alone


def test_an_operator_that_sees_a_window_alone_has_the_scores_of_the_whole_text() -> None:
    """onnxruntime does not know the windows of opset 25, so a text all at once is what its tokens are compared with."""
    model = decoder(operator="3")
    model.opset_import[0].version = 25
    for node in model.graph.node:
        if node.op_type == "Attention":
            node.attribute.append(onnx.helper.make_attribute("left_window_size", 6))
    text = np.random.default_rng(0).integers(0, WORDS, (1, 40))
    with dagexec.compile(model, num_workers=1) as executor:
        nothing = {name: np.zeros((1, KEY_HEADS, 0, ELEMENTS), np.float32) for name in CACHES}
        whole = executor.run({"ids": text, **nothing})["scores"]
        plain = dagexec.compile(decoder(operator="3"), num_workers=1)
        assert not np.allclose(whole[:, 8:], plain.run({"ids": text, **nothing})["scores"][:, 8:], rtol=1e-2)
        plain.close()
        session, place = executor.session(), 0
        for count in (3, 1, 1, 5, *[1] * 28, 2):
            scores = session.run({"ids": text[:, place : place + count]})["scores"]
            np.testing.assert_allclose(scores, whole[:, place : place + count], rtol=1e-4, atol=1e-5)
            place += count
        assert place == 40
        assert executor.net().preparation_statistics().made == 1, "the whole text"


@pytest.mark.parametrize("masked", [False, True])
def test_a_query_that_sees_no_key_gives_zero_in_a_step(masked: bool) -> None:
    """As ONNX's Attention does, which is computed as it is in a long prompt."""
    model = decoder(operator="3", masked=True)
    peer = Peer(model)
    with dagexec.compile(model, num_workers=1) as executor:
        fed: dict[str, Array] = {name: np.ones((1, KEY_HEADS, 20, ELEMENTS), np.float32) for name in CACHES}
        fed |= {"ids": np.array([[1]]), "attention_mask": np.zeros((1, 21), np.int64)}
        fed["attention_mask"][0, :] = not masked
        found = executor.run(fed)["scores"]
        assert executor.net().preparation_statistics().made == 0
    with dagexec.compile(model, num_workers=1, optimize=False) as executor:
        np.testing.assert_allclose(found, executor.run(fed)["scores"], rtol=1e-4, atol=1e-5)
    if not masked:
        peer.caches = {name: fed.pop(name) for name in CACHES}
        np.testing.assert_allclose(found, peer.run(fed)["scores"], rtol=1e-4, atol=1e-5)
