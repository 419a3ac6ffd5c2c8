"""A decoder's first step is prepared when it is compiled: the first token finds it, and gives the same bytes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import dagexec
from dagexec.core.operator import Operator
from dagexec.executor.executor import Executor
from tests.executor.decoders import WIDTH, WORDS, Peer, decoder
from tests.executor.test_sessions import recurrent

Array = npt.NDArray[Any]


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The types of operators that were prepared."""
    found: list[str] = []
    bind = Operator.bind

    def noted(self: Operator, *given: Any, **named: Any) -> Any:
        found.append(self.definition.type)
        return bind(self, *given, **named)

    monkeypatch.setattr(Operator, "bind", noted)
    return found


@pytest.fixture
def unprepared(monkeypatch: pytest.MonkeyPatch) -> Iterator[Executor]:
    """An executor of a decoder that prepares nothing in advance."""
    with monkeypatch.context() as patch:
        patch.setattr(Executor, "prepare_first_step", lambda self: None)
        executor = dagexec.compile(decoder(), num_workers=1)
    with executor:
        yield executor


def text_of(executor: Executor, count: int) -> list[bytes]:
    """The scores of some tokens, from empty caches."""
    found = []
    with executor.session() as session:
        for number in range(count):
            feeds = {"ids": np.array([[number % WORDS]]), "attention_mask": np.ones((1, number + 1), np.int64)}
            asked = {name: array for name, array in feeds.items() if name in executor.inputs}
            found.append(session.run(asked)["scores"].tobytes())
    return found


def test_the_first_token_has_nothing_prepared(bound: list[str], unprepared: Executor) -> None:
    with dagexec.compile(decoder(), num_workers=1) as executor:
        assert "CachedAttention" in bound
        bound.clear()
        found = text_of(executor, 5)
        assert not bound
        assert executor.statistics().completed == 5
    assert found == text_of(unprepared, 5)


def test_so_it_is_where_a_mask_grows(bound: list[str]) -> None:
    with dagexec.compile(decoder(masked=True), num_workers=1) as executor:
        bound.clear()
        text_of(executor, 5)
        assert "CachedAttention" not in bound, "inference may compute some shapes"


def test_other_sizes_of_what_does_not_grow_share_its_net() -> None:
    model = decoder(context=True)
    with dagexec.compile(model, num_workers=1) as executor:
        for count in (3, 1, 5):
            context = np.random.default_rng(count).standard_normal((1, count, WIDTH)).astype(np.float32)
            peer = Peer(model, 1)
            with executor.session() as session:
                for number in range(4):
                    feeds = {"ids": np.array([[number]]), "context": context}
                    np.testing.assert_allclose(session.run(feeds)["scores"], peer.run(feeds)["scores"], rtol=1e-4)
        assert len(executor._beside.members) == 1
        assert executor.statistics().completed == 12


def test_other_models_and_those_that_are_not_rewritten_are_not_prepared(bound: list[str]) -> None:
    for model, options in ((recurrent(), {}), (decoder(), {"optimize": False})):
        with dagexec.compile(model, num_workers=1, **options) as executor:
            assert "CachedAttention" not in bound
            assert not executor.net().is_prepared


def test_what_does_not_fit_is_left_to_the_runs() -> None:
    with dagexec.compile(decoder(), num_workers=1, session_bytes=1) as executor:
        assert executor.run({"ids": np.array([[1]]), **no_caches(executor)})["scores"].shape[-1] == WORDS


def no_caches(executor: Executor) -> dict[str, Array]:
    """Empty caches, one row each."""
    infos = {name: info.shape for name, info in executor.inputs.items() if name != "ids"}
    return {
        name: np.zeros([1 if axis == 0 else size or 0 for axis, size in enumerate(shape or ())], np.float32)
        for name, shape in infos.items()
    }
