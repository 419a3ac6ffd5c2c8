"""Models that generate: tokens as events over HTTP, in one answer, and in a stream over gRPC; who leaves stops them."""

from __future__ import annotations

import json
import queue
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anyio
import httpx
import numpy as np
import onnx
import pytest
import tritonclient.grpc as triton
from onnx import TensorProto, helper

import dagexec
from dagexec.core import dtypes
from dagexec.core.feeds import Array
from dagexec.core.model import InputInfo
from dagexec.errors import OperatorError, SettingError
from dagexec.options import CompileOptions
from dagexec.server.config import GenerationConfig, ModelConfig, ServerConfig, read_config
from dagexec.server.generation import Generator
from dagexec.server.run import Server
from tests.executor.decoders import WORDS, Peer, decoder
from tests.failures.acting import until
from tests.held import PATIENCE
from tests.server.raw import Client, connected, post
from tests.server.runners import AddingRunner, AddingSession
from tests.server.serving import on_loop, serving
from tests.server.test_sequence_clients import grpc_input

pytest.importorskip("onnxruntime")

OPTIONS = CompileOptions(num_workers=1)
GREEDY = GenerationConfig(input="ids", output="scores", max_tokens=12)
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]


def settings(**changes: Any) -> ModelConfig:
    given: dict[str, Any] = {"name": "gpt", "source": decoder(), "options": OPTIONS, "generation": GREEDY, **changes}
    return ModelConfig(**given)


def masked() -> ModelConfig:
    generation = GenerationConfig(input="ids", output="scores", mask="attention_mask", max_tokens=12)
    return settings(name="masked", source=decoder(masked=True), generation=generation)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    models = {"gpt": settings(), "masked": masked(), "plain": settings(name="plain", generation=None)}
    with serving(ServerConfig(models=models, grpc_port=0)) as server:
        yield server


def greedy(prompt: list[int], count: int) -> list[int]:
    """What onnxruntime gives, its caches fed back."""
    peer, fresh, found = Peer(decoder()), np.array([prompt]), []
    for _ in range(count):
        found.append(int(peer.run({"ids": fresh})["scores"][0, -1].argmax()))
        fresh = np.array([found[-1:]])
    return found


def asked(server: Server, how: str, message: Mapping[str, Any], model: str = "gpt") -> httpx.Response:
    return httpx.post(f"{server.url}/v2/models/{model}/{how}", json=message, timeout=PATIENCE)


def events(answer: httpx.Response) -> list[dict[str, Any]]:
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    parts = answer.text.split("\n\n")
    assert parts.pop() == ""
    assert all(part.startswith("data: ") for part in parts)
    return [json.loads(part.removeprefix("data: ")) for part in parts]


@pytest.mark.parametrize("model", ["gpt", "masked"])
def test_tokens_are_those_of_onnxruntime_in_one_answer_and_as_events(server: Server, model: str) -> None:
    expected = greedy(PROMPT, 12)
    about = {"model_name": model, "model_version": "1", "id": "seven"}
    whole = asked(server, "generate", {"id": "seven", "ids": PROMPT}, model)
    assert whole.json() == {**about, "tokens": expected, "finish_reason": "length"}
    reasons = [""] * 11 + ["length"]
    found = events(asked(server, "generate_stream", {"id": "seven", "ids": [PROMPT]}, model))
    assert found == [
        {**about, "token": token, "finish_reason": reason} for token, reason in zip(expected, reasons, strict=True)
    ]
    fewer = {"ids": PROMPT, "parameters": {"max_tokens": 5}}
    assert asked(server, "generate", fewer, f"{model}/versions/1").json()["tokens"] == expected[:5]


def test_many_texts_at_one_time_have_the_tokens_of_each_alone(server: Server) -> None:
    prompts = [list(map(int, np.random.default_rng(seed).integers(0, WORDS, 2 + seed))) for seed in range(8)]
    with ThreadPoolExecutor(8) as threads:
        answers = threads.map(lambda prompt: asked(server, "generate_stream", {"ids": prompt}), prompts)
        found = [[event["token"] for event in events(answer)] for answer in answers]
    assert found == [greedy(prompt, 12) for prompt in prompts]


def test_a_stream_of_grpc_has_an_answer_for_each_token_and_says_which_is_the_last(server: Server) -> None:
    answers: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
    prompts = [PROMPT, [7, 7], PROMPT]
    with triton.InferenceServerClient(server.grpc_address) as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        for number, prompt in enumerate(prompts):
            client.async_stream_infer(
                "gpt",
                [grpc_input(np.array([prompt]))],
                request_id=f"{number}",
                parameters={"max_tokens": 4},
                enable_empty_final_response=True,
            )
        client.async_stream_infer("plain", [grpc_input(np.array([[1]]))], parameters={"max_tokens": 4})
        got = [answers.get(timeout=PATIENCE) for _ in range(4 * len(prompts) + 1)]
        client.stop_stream()
    *tokens, (_, error) = got
    assert "model 'plain' does not generate" in str(error)
    assert [error for _, error in tokens if error] == []
    results = [result for result, _ in tokens]
    assert [int(result.get_response().id) for result in results] == [number for number in range(3) for _ in range(4)]
    assert [int(result.as_numpy("token")[0]) for result in results] == [
        token for prompt in prompts for token in greedy(prompt, 4)
    ]
    last = [result.get_response().parameters["triton_final_response"].bool_param for result in results]
    assert last == [False, False, False, True] * 3
    assert results[3].get_response().parameters["finish_reason"].string_param == "length"


def test_a_token_that_ends_a_text_is_its_last() -> None:
    expected = greedy(PROMPT, 12)
    stop = expected[4]
    count = expected.index(stop) + 1
    generation = GenerationConfig(input="ids", output="scores", stop=[WORDS + 1, stop], max_tokens=12)
    with serving(ServerConfig(models={"gpt": settings(generation=generation)})) as server:
        answer = asked(server, "generate", {"ids": PROMPT}).json()
    assert (answer["tokens"], answer["finish_reason"]) == (expected[:count], "stop")


@pytest.mark.parametrize("how", ["generate", "generate_stream"])
@pytest.mark.parametrize(
    ("message", "model", "status", "words"),
    [
        ({}, "gpt", 400, "the tokens of one text in input 'ids', not nothing"),
        ({"ids": []}, "gpt", 400, "not shape [1, 0]"),
        ({"ids": [[1, 2], [3, 4]]}, "gpt", 400, "not shape [2, 2]"),
        ({"ids": [[1, 2], [3]]}, "gpt", 400, "lists of different lengths"),
        ({"ids": [1.5]}, "gpt", 400, "whole numbers only"),
        ({"idz": [1]}, "gpt", 400, "has no input 'idz'; did you mean 'ids'?"),
        ({"ids": [1], "id": 7}, "gpt", 400, "id must be a text"),
        ({"ids": [1], "max_tokens": 13}, "gpt", 400, "'max_tokens' must be a whole number from 0 to 12, not 13"),
        ({"ids": [1], "parameters": {"max_tokens": "x"}}, "gpt", 400, "'max_tokens' must be"),
        ({"ids": [1], "parameters": [1]}, "gpt", 400, "parameters must be a JSON object"),
        ({"ids": [1], "parameters": {"sequence_id": 5}}, "gpt", 400, "a sequence of its own"),
        ({"ids": [1], "timeout": 1}, "gpt", 504, ""),
        ({"ids": [1]}, "plain", 400, "model 'plain' does not generate"),
        ({"ids": [1]}, "none", 404, "unknown model 'none'"),
    ],
)
def test_what_is_wrong_is_an_error_and_no_event(
    server: Server, how: str, message: dict[str, Any], model: str, status: int, words: str
) -> None:
    answer = asked(server, how, message, model)
    assert answer.status_code == status
    assert answer.headers["content-type"] == "application/json"
    assert words in answer.json()["error"]


def test_an_answer_of_unknown_length_for_a_client_without_chunks(server: Server) -> None:
    body = json.dumps({"ids": PROMPT, "max_tokens": 2}).encode()
    request = post("/v2/models/gpt/generate_stream", body).replace(b"HTTP/1.1", b"HTTP/1.0")
    with connected(server) as client:
        client.send(request)
        head = client.headers()
        assert head.status == 200
        assert "transfer-encoding" not in head.headers
        assert client.rest().count(b"data: ") == 2


class CountingSession(AddingSession):
    """Scores of three tokens, of which the best is the number of runs so far, in turn."""

    async def run_async(self, feeds: Any, **arguments: Any) -> dict[str, Array]:
        await super().run_async({"x": np.full((1, 3), feeds["x"].flat[0], np.float32)})
        return {"y": np.eye(3, dtype=np.float32)[[len(self.seen) % 3]]}


class CountingRunner(AddingRunner):
    """Runs one step for each `let_go`, and fails where `error` is set."""

    @property
    def inputs(self) -> Mapping[str, InputInfo]:
        return {"x": InputInfo(dtypes.INT64, (None, None)), "total": InputInfo(dtypes.FLOAT32, (1, 3))}

    def session(self, states: Mapping[str, str] | None = None) -> AddingSession:
        self.sessions.append(CountingSession(self))
        return self.sessions[-1]

    def let_go(self) -> None:
        event, self.go_on = self.go_on, anyio.Event()
        event.set()


def counting(server: Server) -> CountingRunner:
    """A model that is served under that name."""
    runner = CountingRunner(held=True)
    server.repository.add("counting", runner, generation={"input": "x", "output": "y", "max_tokens": 1000})
    return runner


def begin(client: Client, server: Server, runner: CountingRunner, count: int) -> None:
    """Send a request, and read so many tokens of it."""
    client.send(post("/v2/models/counting/generate_stream", json.dumps({"x": [5]}).encode()))
    for number in range(count):
        until(lambda: runner.inside == 1)
        on_loop(server, runner.let_go)
        if not number:
            assert client.headers().headers["transfer-encoding"] == "chunked"
        assert json.loads(client.chunk().removeprefix(b"data: "))["token"] == (number + 1) % 3
    until(lambda: runner.inside == 1)


def test_a_client_that_leaves_stops_its_tokens_and_no_other_s() -> None:
    with serving(ServerConfig(models={"gpt": settings()})) as server:
        runner = counting(server)
        with connected(server) as client:
            begin(client, server, runner, 3)
        until(lambda: (runner.cancelled, runner.open) == (1, 0))
        assert runner.sessions[0].seen == [5, 1, 2]
        assert asked(server, "generate", {"ids": PROMPT}).json()["tokens"] == greedy(PROMPT, 12)
        assert [version.running for version in server.repository.loaded()] == [0, 0]


def test_a_cancelled_stream_of_grpc_stops_its_tokens() -> None:
    with serving(ServerConfig(grpc_port=0)) as server, triton.InferenceServerClient(server.grpc_address) as client:
        runner = counting(server)
        answers: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
        client.start_stream(lambda result, error: answers.put((result, error)))
        prompt = triton.InferInput("x", [1, 1], "INT64")
        prompt.set_data_from_numpy(np.array([[5]]))
        for _ in range(2):  # the second one generates no more than one token ahead
            client.async_stream_infer("counting", [prompt], parameters={"max_tokens": 9})
        until(lambda: runner.inside == 2)
        on_loop(server, runner.let_go)
        result, _ = answers.get(timeout=PATIENCE)
        assert result.as_numpy("token").tolist() == [1]
        until(lambda: runner.inside == 1)
        client.stop_stream(cancel_requests=True)
        until(lambda: (runner.inside, runner.cancelled, runner.open) == (0, 1, 0))
        assert [session.seen for session in runner.sessions] == [[5], [5]]


def test_an_error_behind_the_first_token_is_the_last_event() -> None:
    with serving(ServerConfig()) as server, connected(server) as client:
        runner = counting(server)
        begin(client, server, runner, 2)
        runner.error = OperatorError("an operator failed")
        on_loop(server, runner.let_go)
        assert client.chunk().startswith(b"data: ")
        assert json.loads(client.chunk().removeprefix(b"data: ")) == {"error": "an operator failed"}
        assert client.chunk() == b""
        assert runner.open == 0
        assert client.ask(b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n").status == 200
        metrics = httpx.get(f"{server.url}/metrics", timeout=PATIENCE).text
    assert 'dagexec_error_answers_total{status="500",transport="http"} 1.0' in metrics
    assert 'dagexec_requests_total{model="counting",outcome="failed",version="1"} 1.0' in metrics


@pytest.mark.parametrize("patient", [True, False])
def test_the_end_of_a_server_waits_for_tokens_as_for_other_requests(patient: bool) -> None:
    with serving(ServerConfig(drain_seconds=PATIENCE if patient else 0)) as server, connected(server) as client:
        runner = counting(server)
        begin(client, server, runner, 1)
        on_loop(server, server.stop)
        if patient:
            until(lambda: httpx.get(f"{server.url}/v2/health/ready", timeout=PATIENCE).status_code == 503)
            on_loop(server, runner.go_on.set)
            tokens = [client.chunk() for _ in range(999)]
            assert json.loads(tokens[-1].removeprefix(b"data: "))["finish_reason"] == "length"
        else:
            assert json.loads(client.chunk().removeprefix(b"data: ")) == {"error": "closed"}
        assert client.chunk() == b""
        assert client.is_at_end()
    assert runner.open == 0


def one_at_a_time() -> onnx.ModelProto:
    """The next token is the sum of all so far, modulo 10: an input of one token, an output of whole numbers."""
    nodes = [
        helper.make_node("ReduceSum", ["token"], ["new"], keepdims=0),
        helper.make_node("Add", ["new", "past_sum"], ["present_sum"]),
        helper.make_node("Add", ["present_sum", "place"], ["moved"]),
        helper.make_node("Mod", ["moved", "ten"], ["next"]),
    ]
    whole = TensorProto.INT64
    inputs = [
        helper.make_tensor_value_info(name, whole, shape)
        for name, shape in (("token", [1, 1]), ("past_sum", [1]), ("place", [1]))
    ]
    outputs = [helper.make_tensor_value_info(name, whole, [1]) for name in ("next", "present_sum")]
    ten = helper.make_tensor("ten", whole, [1], [10])
    graph = helper.make_graph(nodes, "sums", inputs, outputs, [ten])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def test_a_model_of_one_token_a_run_is_fed_the_prompt_token_by_token_and_told_their_places() -> None:
    generation = GenerationConfig(input="token", output="next", positions="place", max_tokens=6)
    model = settings(name="sums", source=one_at_a_time(), generation=generation)
    tokens, expected = [7, 8, 9], []
    for _ in range(6):
        expected.append((sum(tokens) + len(tokens) - 1) % 10)
        tokens.append(expected[-1])
    with serving(ServerConfig(models={"sums": model})) as server:
        assert asked(server, "generate", {"token": [7, 8, 9]}, "sums").json()["tokens"] == expected


def test_what_else_a_model_takes_is_fed_to_each_run() -> None:
    generation = GenerationConfig(input="token", output="next", max_tokens=4)
    model = settings(name="sums", source=one_at_a_time(), generation=generation)
    tokens, expected = [4], []
    for _ in range(4):
        expected.append((sum(tokens) + 3) % 10)
        tokens.append(expected[-1])
    with serving(ServerConfig(models={"sums": model})) as server:
        assert asked(server, "generate", {"token": 4, "place": 3}, "sums").json()["tokens"] == expected


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"input": "idz"}, "the model has no 'idz'; did you mean 'ids'?"),
        ({"output": "score"}, "the model has no 'score'; did you mean 'scores'?"),
        ({"mask": "mask"}, "the model has no 'mask'"),
        ({"positions": "scores"}, "the model has no 'scores'"),
    ],
)
def test_names_that_the_model_does_not_have_are_told_when_it_is_loaded(changes: dict[str, str], words: str) -> None:
    with dagexec.compile(decoder(), OPTIONS) as executor:
        generation = GenerationConfig(**{"input": "ids", "output": "scores", **changes})  # type: ignore[arg-type]
        with pytest.raises(SettingError) as caught:
            Generator(generation, executor.inputs, executor.session).check(executor.outputs)
    assert words in str(caught.value)


def test_a_file_says_how_a_model_generates(tmp_path: Any) -> None:
    path = tmp_path / "serve.toml"
    start = "[models.gpt]\nsource = 'gpt.onnx'\n[models.gpt.sequences]\nidle_seconds = 5\n[models.gpt.generation]\n"
    path.write_text(f"{start}input = 'ids'\noutput = 'scores'\nstop = [0]\n")
    model = read_config(path).models["gpt"]
    assert model.generation == GenerationConfig(input="ids", output="scores", stop=(0,))
    assert model.sequences.idle_seconds == 5
    for wrong, words in (
        ("input = 'ids'", "output"),
        ("input = 'ids'\noutput = 3", "output must be a valid string, not 3"),
        ("input = 'ids'\noutput = 's'\nmask = 1", "mask must be a valid string, not 1"),
        ("input = 'ids'\noutput = 's'\nstop = ['a']", "stop.0 must be a valid integer, not 'a'"),
        ("input = 'ids'\noutput = 's'\nmax_tokens = 0", "max_tokens must be greater than or equal to 1, not 0"),
        ("inptu = 'ids'\noutput = 's'", "unknown key 'inptu'; did you mean 'input'"),
    ):
        path.write_text(start + wrong)
        with pytest.raises(SettingError, match=words):
            read_config(path)


def test_clients_do_not_change_how_a_model_generates() -> None:
    with serving(ServerConfig(models={"gpt": settings()}, control=True, control_settings=True)) as server:
        for name in ("sequences", "generation", "session_bytes"):
            message = {"parameters": {"config": json.dumps({name: {}})}}
            answer = httpx.post(f"{server.url}/v2/repository/models/gpt/load", json=message, timeout=PATIENCE)
            assert answer.status_code == 400
            assert "are the server's to set" in answer.json()["error"]
