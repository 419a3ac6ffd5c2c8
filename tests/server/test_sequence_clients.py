"""Unmodified clients of Triton send sequences over both protocols: bytes are those of a session in this process."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as over_grpc
import tritonclient.http as over_http
from tritonclient.utils import InferenceServerException

import dagexec
from dagexec.options import CompileOptions
from dagexec.server.config import ModelConfig, SequenceConfig, ServerConfig
from dagexec.server.run import Server
from tests.executor.decoders import ELEMENTS, KEY_HEADS, WORDS, decoder
from tests.failures.acting import until
from tests.held import PATIENCE
from tests.server.raw import binary_request, connected
from tests.server.runners import AddingRunner, Loads, repository_of
from tests.server.serving import on_loop, serving
from tests.server.test_grpc import input_of
from tests.server.test_grpc import serving as serving_grpc
from tests.server.test_metrics import samples

OPTIONS = CompileOptions(num_workers=1)
X = np.ones((1, 3), np.float32)

Ask = Callable[[np.ndarray, int | str, bool, bool], bytes]
"""Sends a part of a sequence, and whether it is the first or the last one; gives the bytes of the scores."""


class Clock:
    """One that a test sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    model = ModelConfig(name="decoder", source=decoder(), options=OPTIONS)
    with serving(ServerConfig(models={"decoder": model}, grpc_port=0)) as server:
        yield server


@pytest.fixture(scope="module")
def lone() -> Iterator[dagexec.Executor]:
    with dagexec.compile(decoder(), OPTIONS) as executor:
        yield executor


def parts_of(number: int) -> list[np.ndarray]:
    """A prompt and tokens behind it, of another length for each sequence."""
    random = np.random.default_rng(number)
    return [random.integers(0, WORDS, (1, count)) for count in (3 + number, *[1] * (6 + number % 3), 2, 1)]


def alone(executor: dagexec.Executor, parts: Sequence[np.ndarray]) -> list[bytes]:
    with executor.session() as session:
        return [session.run({"ids": part})["scores"].tobytes() for part in parts]


def http_input(array: np.ndarray, *, binary: bool = True, name: str = "ids") -> over_http.InferInput:
    found = over_http.InferInput(name, list(array.shape), "INT64" if name == "ids" else "FP32")
    found.set_data_from_numpy(array, binary_data=binary)
    return found


def grpc_input(array: np.ndarray, name: str = "ids") -> over_grpc.InferInput:
    found = over_grpc.InferInput(name, list(array.shape), "INT64" if name == "ids" else "FP32")
    found.set_data_from_numpy(array)
    return found


def asking(server: Server, way: str, model: str = "decoder") -> tuple[Ask, Callable[[], object]]:
    """A client, and how it is closed."""
    if way == "grpc":
        client = over_grpc.InferenceServerClient(server.grpc_address)

        def ask(part: np.ndarray, identity: int | str, is_first: bool, is_last: bool) -> bytes:
            result = client.infer(
                model, [grpc_input(part)], sequence_id=identity, sequence_start=is_first, sequence_end=is_last
            )
            return result.as_numpy("scores").tobytes()

        return ask, client.close
    binary = way == "binary"
    other = over_http.InferenceServerClient(server.url.removeprefix("http://"))

    def ask_http(part: np.ndarray, identity: int | str, is_first: bool, is_last: bool) -> bytes:
        result = other.infer(
            model,
            [http_input(part, binary=binary)],
            outputs=[over_http.InferRequestedOutput("scores", binary_data=binary)],
            sequence_id=identity,
            sequence_start=is_first,
            sequence_end=is_last,
        )
        return result.as_numpy("scores").tobytes()

    return ask_http, other.close


def open_sequences(server: Server) -> int:
    return sum(version.sequences.open for version in server.repository.loaded())


@pytest.mark.parametrize("way", ["json", "binary", "grpc"])
def test_sequences_of_several_clients_have_the_bytes_of_lone_sessions(
    server: Server, lone: dagexec.Executor, way: str
) -> None:
    def whole(number: int) -> list[bytes]:
        """One client with two sequences in turn, which end in between."""
        ask, close = asking(server, way)
        identities: list[int | str] = [number + 1, f"sequence {number}"]
        found: list[bytes] = []
        parts = parts_of(number)
        for place, part in enumerate(parts):
            answers = [ask(part, identity, place == 0, place == len(parts) - 1) for identity in identities]
            assert answers[0] == answers[1]
            found.append(answers[0])
        close()
        return found

    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(whole, range(4)))
    assert found == [alone(lone, parts_of(number)) for number in range(4)]
    assert open_sequences(server) == 0


def test_sequences_on_one_stream_have_the_bytes_of_lone_sessions_in_the_order_of_requests(
    server: Server, lone: dagexec.Executor
) -> None:
    answers: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
    all_parts = [parts_of(number) for number in range(3)]
    sent: list[int] = []
    with over_grpc.InferenceServerClient(server.grpc_address) as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        for place in range(max(map(len, all_parts))):
            for number, parts in enumerate(all_parts):
                if place < len(parts):
                    client.async_stream_infer(
                        "decoder",
                        [grpc_input(parts[place])],
                        request_id=f"{number}",
                        sequence_id=f"{number}" if number else 99,
                        sequence_start=place == 0,
                        sequence_end=place == len(parts) - 1,
                        enable_empty_final_response=True,
                    )
                    sent.append(number)
        got = [answers.get(timeout=PATIENCE) for _ in sent]
        client.stop_stream()
    assert [error for _, error in got if error] == []
    assert [int(result.get_response().id) for result, _ in got] == sent
    assert all(result.get_response().parameters["triton_final_response"].bool_param for result, _ in got)
    for number, parts in enumerate(all_parts):
        own = [result.as_numpy("scores").tobytes() for (result, _), one in zip(got, sent, strict=True) if one == number]
        assert own == alone(lone, parts)
    assert open_sequences(server) == 0


def test_errors_are_messages_in_a_stream_which_goes_on(server: Server, lone: dagexec.Executor) -> None:
    answers: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
    parts = parts_of(0)[:2]
    with over_grpc.InferenceServerClient(server.grpc_address) as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        for part, settings in (
            (parts[0], {"sequence_id": 5}),
            (parts[0], {"sequence_id": 5, "sequence_start": True}),
            (np.zeros((1, 1, 1), np.int64), {"sequence_id": 5}),
            (parts[1], {"sequence_id": 5, "sequence_end": True}),
            (parts[1], {"sequence_id": 5}),
        ):
            client.async_stream_infer("decoder", [grpc_input(part)], **settings)
        got = [answers.get(timeout=PATIENCE) for _ in range(5)]
        client.stop_stream()
    errors = [str(error) for _, error in got]
    assert "sequence 5 is not open" in errors[0]
    assert "'ids'" in errors[2]
    assert "sequence 5 is not open" in errors[4]
    assert [got[place][0].as_numpy("scores").tobytes() for place in (1, 3)] == alone(lone, parts)


@pytest.mark.parametrize("way", ["json", "grpc"])
def test_a_sequence_that_is_not_open_is_the_client_s_mistake(server: Server, way: str) -> None:
    ask, close = asking(server, way)
    with pytest.raises(InferenceServerException, match="the first request of a sequence has sequence_start") as caught:
        ask(parts_of(0)[0], "unknown", False, False)
    assert str(caught.value.status()) in ("400", "StatusCode.INVALID_ARGUMENT")
    close()


@pytest.mark.parametrize("way", ["binary", "grpc"])
def test_an_idle_sequence_ends_and_is_counted(way: str, lone: dagexec.Executor) -> None:
    clock = Clock()
    model = ModelConfig(
        name="decoder", source=decoder(), options=OPTIONS, sequences=SequenceConfig(idle_seconds=30, max_open=2)
    )
    parts = parts_of(1)[:2]
    expected = alone(lone, parts)
    with serving(ServerConfig(models={"decoder": model}, grpc_port=0), clock=clock) as server:
        ask, close = asking(server, way)
        assert ask(parts[0], 1, True, False) == ask(parts[0], 2, True, False) == expected[0]
        with pytest.raises(InferenceServerException, match="2 sequences are open"):
            ask(parts[0], 3, True, False)
        clock.now += 29
        assert ask(parts[1], 2, False, False) == expected[1]
        found = samples(server)
        assert found["dagexec_sequences_open", "decoder", "1"] == 2
        assert found["dagexec_sequences_bytes", "decoder", "1"] >= 2 * 4 * parts[0].size * KEY_HEADS * ELEMENTS * 4
        assert found["dagexec_sequences_expired_total", "decoder", "1"] == 0
        clock.now += 2
        while samples(server)["dagexec_sequences_open", "decoder", "1"] == 2:  # until the server looks
            pass
        found = samples(server)
        assert found["dagexec_sequences_open", "decoder", "1"] == 1
        assert found["dagexec_sequences_expired_total", "decoder", "1"] == 1
        with pytest.raises(InferenceServerException, match="idle for 30 seconds"):
            ask(parts[1], 1, False, False)
        close()


@pytest.mark.parametrize("way", ["http", "grpc", "stream"])
def test_a_client_that_leaves_ends_its_sequence_and_no_other(way: str) -> None:
    runner = AddingRunner(held=True)
    with (
        serving(ServerConfig(grpc_port=0)) as server,
        over_grpc.InferenceServerClient(server.grpc_address) as client,
        over_grpc.InferenceServerClient(server.grpc_address) as other,
    ):
        server.repository.add("adding", runner)
        answers: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()

        def begin(client: Any, identity: str) -> Any:
            return client.async_infer(
                "adding",
                [grpc_input(X, "x")],
                lambda result, error: answers.put((result, error)),
                sequence_id=identity,
                sequence_start=True,
            )

        begin(other, "other")
        until(lambda: runner.inside == 1)
        if way == "grpc":
            call = begin(client, "leaving")
            until(lambda: runner.inside == 2)
            call.cancel()
        elif way == "stream":
            client.start_stream(lambda result, error: None)
            for is_first in (True, False):  # one runs, one waits
                client.async_stream_infer(
                    "adding", [grpc_input(X, "x")], sequence_id="leaving", sequence_start=is_first
                )
            until(lambda: runner.inside == 2)
            client.stop_stream(cancel_requests=True)
        else:
            with connected(server) as leaving:
                text = {"sequence_id": "leaving", "sequence_start": True}
                leaving.send(binary_request("adding", X, request_parameters=text))
                until(lambda: runner.inside == 2)
        until(lambda: (runner.cancelled, runner.open, open_sequences(server)) == (1, 1, 1))
        on_loop(server, runner.go_on.set)
        result, error = answers.get(timeout=PATIENCE) if way != "grpc" else next_result(answers)
        assert error is None
        assert result.as_numpy("y").tolist() == X.tolist()
        assert (
            other.infer("adding", [grpc_input(X, "x")], sequence_id="other", sequence_end=True).as_numpy("y").tolist()
            == (2 * X).tolist()
        )
        with pytest.raises(InferenceServerException, match="is not open"):
            other.infer("adding", [grpc_input(X, "x")], sequence_id="leaving")
        assert (runner.open, open_sequences(server)) == (0, 0)


def next_result(answers: queue.SimpleQueue[tuple[Any, Any]]) -> tuple[Any, Any]:
    """Behind the errors of those who have left."""
    while (answer := answers.get(timeout=PATIENCE))[1] is not None:
        pass
    return answer


def test_a_model_that_is_loaded_again_has_none_of_the_sequences_before(lone: dagexec.Executor) -> None:
    model = ModelConfig(name="decoder", source=decoder(), options=OPTIONS)
    parts = parts_of(1)[:2]
    with serving(ServerConfig(models={"decoder": model}, control=True)) as server:
        ask, close = asking(server, "binary")
        ask(parts[0], 1, True, False)
        with over_http.InferenceServerClient(server.url.removeprefix("http://")) as client:
            client.load_model("decoder")
        with pytest.raises(InferenceServerException, match="sequence 1 is not open"):
            ask(parts[1], 1, False, False)
        assert [ask(parts[0], 1, True, False), ask(parts[1], 1, False, False)] == alone(lone, parts)
        close()


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_stream_with_a_request_in_service_is_not_idle_and_one_without_is() -> None:
    runner = AddingRunner(held=True)
    ended = asyncio.Event()

    async def requests() -> AsyncIterator[dict[str, Any]]:
        yield {"model_name": "m", "inputs": [input_of(X)]}
        await ended.wait()

    async with (
        serving_grpc(repository_of(Loads(runner)), idle_seconds=0.05) as url,
        over_grpc.aio.InferenceServerClient(url) as client,
    ):
        stream = client.stream_infer(requests())
        answer = asyncio.ensure_future(anext(stream))
        await runner.entered.wait()
        await asyncio.sleep(0.2)  # four times as long as a stream may be idle
        runner.go_on.set()
        result, error = await answer
        assert error is None
        assert result.as_numpy("y").tolist() == X.tolist()
        with pytest.raises(Exception, match="did not come in time"):
            await anext(stream)
        ended.set()
