"""How do clients get tokens of a model with states: one by one in a sequence of requests, or as a stream of events?

serve.toml -> Server (a thread with an event loop) <- requests with sequence_id, each with a token, answered with scores
                                                   <- one request to generate_stream: an event for each token

The model is a small recurrent net with random weights; a transformer's decoder with caches is served likewise.
"""

import asyncio
import json
import tempfile
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

import dagexec
from dagexec.server.config import read_config
from dagexec.server.run import Server

WORDS, WIDTH = 50, 16
PROMPT, COUNT = [7, 3, 11], 8
CONFIG = f"""
[server]
port = 0                            # any that is free

[models.writer]
source = "writer.onnx"
[models.writer.sequences]
idle_seconds = 5.0                  # then nobody goes on with it
max_open = 100
[models.writer.generation]
input = "token"                     # is fed the prompt, then each token
output = "scores"                   # of the next one
max_tokens = {COUNT}
"""


def writer() -> onnx.ModelProto:
    """Scores of the token behind `token` [1, 1]; the state `h` is in the next run what `h_n` was in this one."""
    random = np.random.default_rng(0)
    sizes = {"words": (WORDS, WIDTH), "w": (1, 3 * WIDTH, WIDTH), "r": (1, 3 * WIDTH, WIDTH), "last": (WIDTH, WORDS)}
    weights = [numpy_helper.from_array(random.standard_normal(s).astype(np.float32), n) for n, s in sizes.items()]
    nodes = [
        helper.make_node("Gather", ["words", "token"], ["x"]),
        helper.make_node("GRU", ["x", "w", "r", "", "", "h"], ["", "h_n"], hidden_size=WIDTH),
        helper.make_node("MatMul", ["h_n", "last"], ["scores"]),
    ]
    inputs = [
        helper.make_tensor_value_info("token", TensorProto.INT64, [1, 1]),
        helper.make_tensor_value_info("h", TensorProto.FLOAT, [1, 1, WIDTH]),
    ]
    outputs = [
        helper.make_tensor_value_info("scores", TensorProto.FLOAT, [1, 1, WORDS]),
        helper.make_tensor_value_info("h_n", TensorProto.FLOAT, [1, 1, WIDTH]),
    ]
    graph = helper.make_graph(nodes, "writer", inputs, outputs, weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def answer(url: str, body: dict[str, Any]) -> Iterator[bytes]:
    """The lines of an answer, as they come."""
    request = urllib.request.Request(url, json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=60) as lines:
        yield from lines


def next_token(url: str, token: int, **parameters: object) -> int:
    """What a sequence gives for its next token."""
    given = {"name": "token", "datatype": "INT64", "shape": [1, 1], "data": [token]}
    body = {"inputs": [given], "outputs": [{"name": "scores"}], "parameters": {"sequence_id": "mine", **parameters}}
    [output] = json.loads(b"".join(answer(f"{url}/v2/models/writer/infer", body)))["outputs"]
    return int(np.argmax(output["data"]))


def use(url: str) -> None:
    """What clients do."""
    with dagexec.compile(writer()) as executor, executor.session() as session:
        for token in PROMPT[:-1]:
            session.run({"token": [[token]]})
        expected = PROMPT[-1:]
        while len(expected) <= COUNT:
            expected.append(int(session.run({"token": [[expected[-1]]]})["scores"].argmax()))
    for place, token in enumerate(PROMPT[:-1]):
        next_token(url, token, sequence_start=place == 0)
    tokens = PROMPT[-1:]
    while len(tokens) <= COUNT:
        tokens.append(next_token(url, tokens[-1], sequence_end=len(tokens) == COUNT))
    print("a sequence of requests:", tokens[1:], tokens == expected)
    stream = answer(f"{url}/v2/models/writer/generate_stream", {"token": PROMPT})
    events = [json.loads(line.removeprefix(b"data: ")) for line in stream if line.startswith(b"data: ")]
    print("a stream of events:", [event["token"] for event in events], events[-1]["finish_reason"])
    print("the same tokens:", [event["token"] for event in events] == expected[1:])


async def serve(folder: Path) -> None:
    """A server, and a client on a thread."""
    (folder / "serve.toml").write_text(CONFIG)
    onnx.save(writer(), folder / "writer.onnx")
    server = Server(read_config(folder / "serve.toml"))
    loop, listening = asyncio.get_running_loop(), threading.Event()

    def client() -> None:
        try:
            listening.wait(60)
            while json.loads(b"".join(answer(f"{server.url}/v2/repository/index", {})))[0]["state"] != "READY":
                pass  # models are loaded while the server listens
            use(server.url)
        finally:
            loop.call_soon_threadsafe(server.stop)

    thread = threading.Thread(target=client)
    thread.start()
    status = await server.run(listening.set)
    thread.join()
    print("drained, status", status)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(serve(Path(folder)))
