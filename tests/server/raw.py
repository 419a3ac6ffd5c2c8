"""Requests of HTTP as bytes, over sockets of this machine, so that a test may send what no client would."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dagexec.server.run import Server
from tests.held import PATIENCE


@dataclass(frozen=True)
class Answer:
    """What a server answered."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        """The JSON of the body, or of its first part where bytes are behind it."""
        length = self.headers.get("inference-header-content-length")
        return json.loads(self.body if length is None else self.body[: int(length)])

    @property
    def error(self) -> str:
        """The message of the protocol's error body, which has nothing else."""
        [(key, message)] = self.json.items()
        assert (key, self.headers["content-type"]) == ("error", "application/json")
        assert "Traceback" not in message
        assert isinstance(message, str)
        return message


class Client:
    """One connection; `send` and `answer` as they come."""

    def __init__(self, server: Server | str) -> None:
        url = server if isinstance(server, str) else server.url
        host, port = url.removeprefix("http://").rsplit(":", 1)
        self.socket = socket.create_connection((host, int(port)), timeout=PATIENCE)
        self._file = self.socket.makefile("rb")

    def send(self, *parts: bytes) -> None:
        """Send all of it."""
        for part in parts:
            self.socket.sendall(part)

    def answer(self) -> Answer:
        """The next answer, which has a Content-Length."""
        head = self.headers()
        return replace(head, body=self._file.read(int(head.headers["content-length"])))

    def headers(self) -> Answer:
        """The next answer without its body."""
        line = self._file.readline()
        assert line.startswith(b"HTTP/1.1 "), line
        headers = {}
        while (field := self._file.readline().strip()) != b"":
            name, _, value = field.decode("latin-1").partition(": ")
            headers[name.lower()] = value
        return Answer(int(line.split()[1]), headers, b"")

    def chunk(self) -> bytes:
        """The next part of a body in chunks; empty at its end."""
        size = int(self._file.readline(), 16)
        data = self._file.read(size)
        assert self._file.read(2) == b"\r\n"
        return data

    def rest(self) -> bytes:
        """All that comes until the server closes the connection."""
        return self._file.read()

    def peek(self) -> bytes:
        """Wait for the first bytes of the next answer, which stay; none if the server closed the connection."""
        return self._file.peek(1)

    def is_at_end(self) -> bool:
        """Wait for what comes next; True if the server closed the connection."""
        try:
            return self._file.read(1) == b""
        except ConnectionResetError:
            return True

    def ask(self, *parts: bytes) -> Answer:
        """Send, and read the answer."""
        self.send(*parts)
        return self.answer()

    def close(self) -> None:
        """Close the connection."""
        self._file.close()
        self.socket.close()


@contextmanager
def connected(server: Server | str) -> Iterator[Client]:
    """One connection to a server, or to its URL, closed at the end."""
    client = Client(server)
    try:
        yield client
    finally:
        client.close()


def asked_until_the_end(url: str, request: bytes, went_on: threading.Semaphore) -> list[Answer]:
    """All answers to one request after another on one connection, until the server has said its last or closed it."""
    found: list[Answer] = []
    with connected(url) as client:
        while not found or "connection" not in found[-1].headers:
            client.send(request)
            if client.peek() == b"":  # closed before the first byte of an answer
                return found
            found.append(client.answer())
            went_on.release()
        assert client.is_at_end()
    return found


def post(path: str, body: bytes, headers: Mapping[str, object] | None = None) -> bytes:
    """A request with a body. `headers` may replace Content-Length; None takes one away."""
    fields: dict[str, object] = {"Host": "test", "Content-Length": len(body), **(headers or {})}
    lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items() if value is not None)
    return f"POST {path} HTTP/1.1\r\n{lines}\r\n".encode("latin-1") + body


def infer_path(model: str) -> str:
    """Where inference of a model is asked for."""
    return f"/v2/models/{model}/infer"


def binary_request(
    model: str,
    x: np.ndarray,
    headers: Mapping[str, object] | None = None,
    request_parameters: Mapping[str, object] | None = None,
    **changes: object,
) -> bytes:
    """A request with one input `x` of float32 as bytes, answered with bytes; `changes` are to the input's JSON."""
    parameters = {"binary_data_size": x.nbytes}
    one = {"name": "x", "shape": list(x.shape), "datatype": "FP32", "parameters": parameters, **changes}
    asked = {"binary_data_output": True, **(request_parameters or {})}
    text = json.dumps({"inputs": [one], "parameters": asked}).encode()
    length = {"Inference-Header-Content-Length": len(text)}
    return post(infer_path(model), text + x.tobytes(), {**length, **(headers or {})})


def binary_result(answer: Answer) -> np.ndarray:
    """The one result, of float32, of an answer with bytes."""
    assert answer.status == 200, answer.body[:500]
    [output] = answer.json["outputs"]
    data = answer.body[int(answer.headers["inference-header-content-length"]) :]
    assert len(data) == output["parameters"]["binary_data_size"]
    return np.frombuffer(data, np.float32).reshape(output["shape"])
