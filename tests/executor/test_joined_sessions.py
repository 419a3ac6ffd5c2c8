"""Sessions whose steps are joined: each has the bytes of a session alone, whoever shares its batches."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import dagexec
from dagexec.compiler.stepping import CACHE, LENGTH
from dagexec.errors import OperatorError, RunTimeoutError
from dagexec.executor.executor import Executor
from dagexec.executor.sessions.session import Session
from tests.executor.decoders import WORDS, Peer, decoder

Array = npt.NDArray[Any]

pytest.importorskip("onnxruntime")

BATCH = {"max_batch": 8, "max_wait": 0.01}


@pytest.fixture
def joined() -> Iterator[Executor]:
    with dagexec.compile(decoder(), num_workers=1, **BATCH) as executor:
        yield executor


@pytest.fixture
def alone() -> Iterator[Executor]:
    with dagexec.compile(decoder(), num_workers=1) as executor:
        yield executor


def tokens(count: int, seed: int) -> dict[str, Array]:
    return {"ids": np.random.default_rng(seed).integers(0, WORDS, (1, count))}


def joined_rows(executor: Executor) -> int:
    """Rows that others were in the same run with."""
    return sum(rows * runs for rows, runs in executor.statistics().batch_sizes.items() if rows > 1)


class Twins:
    """A session that is joined with others, and one alone that is given the same."""

    def __init__(self, joined: Session, alone: Session) -> None:
        self.joined, self.alone = joined, alone

    async def run(self, random: Random) -> int:
        """A run as they come, some of them wrong, late or cancelled; how many rows it had."""
        feeds = tokens(random.choice([1] * 12 + [2, 3, 9]), random.randrange(1000))
        kind = random.choice(["plain"] * 8 + ["wrong", "late", "cancelled"])
        if kind == "wrong":
            with pytest.raises(OperatorError, match="index"):
                await self.joined.run_async({"ids": feeds["ids"] + WORDS})
        elif kind == "late":
            with pytest.raises(RunTimeoutError):
                await self.joined.run_async(feeds, timeout=0.0)
        elif kind == "cancelled":
            task = asyncio.create_task(self.joined.run_async(feeds, priority=random.randrange(3)))
            await asyncio.sleep(random.choice([0, 0, 0.0005, 0.002]))
            task.cancel()
            try:
                results = await task
            except asyncio.CancelledError:
                return 1
            self.compare(feeds, results)
        else:
            self.compare(feeds, await self.joined.run_async(feeds, priority=random.randrange(3)))
        return 1

    def compare(self, feeds: Mapping[str, Array], results: Mapping[str, Array]) -> None:
        assert results["scores"].tobytes() == self.alone.run(feeds)["scores"].tobytes()

    def fork(self) -> Twins:
        return Twins(self.joined.fork(), self.alone.fork())

    def compare_states(self) -> None:
        ours, theirs = self.joined.state, self.alone.state
        assert ours.keys() == theirs.keys()
        assert all(ours[name].tobytes() == theirs[name].tobytes() for name in ours)


def play(joined: Executor, alone: Executor, seed: int, rounds: int) -> int:
    """Rounds in which some of up to eight sessions run at once; they are forked, reset and left. How many rows ran."""
    random = Random(seed)

    def new() -> Twins:
        return Twins(joined.session(), alone.session())

    async def main() -> int:
        sessions, rows = [new() for _ in range(6)], 0
        for _ in range(rounds):
            chosen = random.sample(sessions, random.randint(1, len(sessions)))
            rows += sum(await asyncio.gather(*(one.run(random) for one in chosen)))
            place, event = random.randrange(len(sessions)), random.random()
            if event < 0.1:
                sessions[place] = random.choice(sessions).fork()
            elif event < 0.15:
                sessions[place].compare_states()
                sessions[place] = new()
            elif event < 0.2:
                sessions[place].joined.reset()
                sessions[place].alone.reset()
        for one in sessions:
            one.compare_states()
        return rows

    return asyncio.run(main())


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_rows_in_any_composition_have_the_bytes_of_a_session_alone(
    joined: Executor, alone: Executor, seed: int
) -> None:
    rows = play(joined, alone, seed, 30)
    assert rows > 60
    assert joined_rows(joined) > 0


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"replicas": 2, "num_workers": 2}, {"max_wait": 0.0}], ids=str)
def test_tasks_with_other_options(alone: Executor, options: dict[str, Any]) -> None:
    for seed in range(3):
        with dagexec.compile(decoder(), **{"num_workers": 1, **BATCH, **options}) as joined:
            assert play(joined, alone, 1000 + seed, 100) > 200


def compositions(count: int, most: int = 32) -> int:
    """Runs of the net for rows, each of sessions and tokens drawn anew, beside the same rows alone; how many rows."""
    random = np.random.default_rng(count)
    rows = 0
    with dagexec.compile(decoder(), num_workers=1, max_batch=most, max_wait=0.0) as executor:
        sessions = [executor.session() for _ in range(12)]
        lengths = [9, 10, 15, 16, 17, 31, 40, 62, 64, 65, 100, 130]
        for number, (session, length) in enumerate(zip(sessions, lengths, strict=True)):
            session.run(tokens(length, number))
            session.fork().run(tokens(1, 0))
            session.run(tokens(1, number))
        (step,) = executor._beside.members
        numbers = np.array([0, *(one.caches.number for one in sessions if one.caches is not None)])
        lengths_now = np.array([0, *(length + 1 for length in lengths)])
        alone: dict[tuple[int, int], bytes] = {}

        def run(places: Array, words: Array) -> list[bytes]:
            feeds = {"ids": words[:, None], CACHE: numbers[places], LENGTH: lengths_now[places]}
            return [scores.tobytes() for scores in step.run(feeds)["scores"]]

        for _ in range(count):
            places = random.choice(len(numbers), random.integers(1, len(numbers) + 1), replace=False)
            words = random.integers(0, WORDS, len(places))
            for place, word, found in zip(places, words, run(places, words), strict=True):
                if place:
                    key = int(place), int(word)
                    if key not in alone:
                        (alone[key],) = run(places[places == place], np.array([word]))
                    assert found == alone[key], key
                    rows += 1
    return rows


@pytest.mark.slow
def test_a_row_does_not_depend_on_its_company() -> None:
    assert compositions(60) > 300


@pytest.mark.slow
def test_a_row_does_not_depend_on_its_company_in_many_compositions() -> None:
    assert compositions(17_000) > 100_000


def written(session: Session, parts: Sequence[Mapping[str, Array]]) -> list[bytes]:
    return [session.run(part)["scores"].tobytes() for part in parts]


@pytest.mark.slow
def test_threads_join_as_tasks_do(joined: Executor, alone: Executor) -> None:
    parts = [[tokens(4 + n, n), *[tokens(1, 100 * n + step) for step in range(1, 40)]] for n in range(6)]
    with ThreadPoolExecutor(6) as pool:
        together = list(pool.map(lambda one: written(joined.session(), one), parts))
    assert together == [written(alone.session(), one) for one in parts]
    assert joined_rows(joined) > 0


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize("options", [{"placed": True}, pytest.param({}, marks=pytest.mark.slow)], ids=str)
async def test_values_are_the_peers(options: dict[str, Any]) -> None:
    model, random = decoder(**options), np.random.default_rng(0)
    lengths = [np.cumsum([5 + n, *[1] * 12]) for n in range(4)]
    texts = [random.integers(0, WORDS, (1, ends[-1])) for ends in lengths]

    def feeds(number: int, step: int) -> dict[str, Array]:
        end = lengths[number][step]
        start = lengths[number][step - 1] if step else 0
        own = {"ids": texts[number][:, start:end]}
        return own | ({"position_ids": np.arange(start, end)[None]} if options else {})

    with dagexec.compile(model, num_workers=1, **BATCH) as executor:
        sessions = [executor.session() for _ in texts]

        async def write(number: int) -> list[Array]:
            own = sessions[number]
            return [(await own.run_async(feeds(number, step)))["scores"] for step in range(13)]

        found = await asyncio.gather(*map(write, range(len(texts))))
        assert joined_rows(executor) > 0
    for number, scores in enumerate(found):
        peer = Peer(model)
        for step, own in enumerate(scores):
            np.testing.assert_allclose(own, peer.run(feeds(number, step))["scores"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_wrong_row_fails_by_itself(alone: Executor) -> None:
    joined = dagexec.compile(decoder(), num_workers=1, max_batch=4, max_wait=1.0)
    sessions = [joined.session() for _ in range(4)]
    steps = [tokens(5, 0), tokens(1, 1), tokens(1, 2)]

    async def run(session: Session, feeds: Mapping[str, Array], is_wrong: bool) -> bytes | None:
        if is_wrong:
            with pytest.raises(OperatorError, match="index"):
                await session.run_async({"ids": feeds["ids"] + WORDS})
            return None
        return (await session.run_async(feeds))["scores"].tobytes()

    async def together(feeds: Mapping[str, Array], wrong: int) -> list[bytes | None]:
        return await asyncio.gather(*(run(one, feeds, number == wrong) for number, one in enumerate(sessions)))

    expected = written(alone.session(), steps)
    await together(steps[0], -1)
    retried = joined.statistics().retried
    found = await together(steps[1], 2)
    assert found == [expected[1], expected[1], None, expected[1]]
    assert joined.statistics().retried == retried + 4
    assert sessions[2].run(steps[1])["scores"].tobytes() == expected[1]
    assert await together(steps[2], -1) == [expected[2]] * 4
    joined.close()


def test_a_model_of_fixed_batch_and_sessions_of_several_rows_run_alone(
    joined: Executor, caplog: pytest.LogCaptureFixture
) -> None:
    ids = np.random.default_rng(0).integers(0, WORDS, (2, 4))
    with caplog.at_level("INFO", logger="dagexec"):
        session, peer = joined.session(), Peer(decoder(), 2)
        for start, stop in [(0, 2), (2, 3), (3, 4)]:
            feeds = {"ids": ids[:, start:stop]}
            expected = peer.run(feeds)["scores"]
            np.testing.assert_allclose(session.run(feeds)["scores"], expected, rtol=1e-4, atol=1e-5)
    assert "steps of sessions are not joined: input 'ids' has no row for each session" in caplog.text
