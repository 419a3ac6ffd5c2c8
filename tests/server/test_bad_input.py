"""What a server answers to bytes that no client should send: the protocol's error, and others go on being served."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest

from dagexec.server.config import ModelConfig, ServerConfig
from dagexec.server.limits import Limits
from dagexec.server.run import Server
from tests.held import doubled_model
from tests.server.raw import Answer, binary_request, binary_result, connected, infer_path, post
from tests.server.serving import serving

X = np.float32([[1, -2, 3]])
BODY_BYTES = 100_000
TOTAL_BYTES = 150_000
HEADER_BYTES = 4000


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    limits = Limits(body_bytes=BODY_BYTES, total_body_bytes=TOTAL_BYTES, header_bytes=HEADER_BYTES, tensors=4)
    models = {
        "m": ModelConfig(name="m", source=doubled_model()),
        "broken": ModelConfig(name="broken", source="/nowhere/broken.onnx"),
    }
    with serving(ServerConfig(models=models, limits=limits)) as server:
        yield server


@pytest.fixture(autouse=True)
def others_are_served(server: Server) -> Iterator[None]:
    """Before and after, over a connection that was open meanwhile, and over a new one."""
    with connected(server) as before:
        assert_serves(before.ask(binary_request("m", X)))
        yield
        while server.bodies.held_bytes:
            pass
        assert_serves(before.ask(binary_request("m", X)))
        with connected(server) as after:
            assert_serves(after.ask(binary_request("m", X)))


def assert_serves(answer: Answer) -> None:
    np.testing.assert_array_equal(binary_result(answer), np.maximum(X, 0) * 2)


def asked(server: Server, *parts: bytes) -> Answer:
    """The answer over a new connection."""
    with connected(server) as client:
        return client.ask(*parts)


def asked_json(server: Server, message: object, headers: Mapping[str, object] | None = None) -> Answer:
    body = message if isinstance(message, bytes) else json.dumps(message).encode()
    return asked(server, post(infer_path("m"), body, headers))


def one(**changes: Any) -> dict[str, Any]:
    """A request in JSON with one input; a change to None takes a key away."""
    given = {"name": "x", "shape": [1, 3], "datatype": "FP32", "data": [1, 2, 3], **changes}
    return {"inputs": [{key: value for key, value in given.items() if value is not None}]}


@pytest.mark.parametrize(
    ("path", "status", "message"),
    [
        ("/v2/models/unknown/infer", 404, "unknown model 'unknown'"),
        ("/v2/models/m/versions/7/infer", 404, "no version '7'"),
        ("/v2/models/broken/infer", 503, "'broken' is not ready"),
        ("/v2/models//infer", 404, "Not Found"),
        ("/v2/models/m/infer/more", 404, "Not Found"),
        ("/v2/models/%00%ff/infer", 404, "unknown model"),
        ("/v2/models/" + "m" * 3000 + "/infer", 404, "unknown model 'mmm"),
        ("/" + "x" * 3000, 404, "Not Found"),
    ],
)
def test_wrong_paths(server: Server, path: str, status: int, message: str) -> None:
    answer = asked(server, post(path, json.dumps(one()).encode()))
    assert answer.status == status
    assert message in answer.error
    assert len(answer.error) < 500


def test_wrong_method(server: Server) -> None:
    answer = asked(server, b"DELETE /v2/models/m HTTP/1.1\r\nHost: x\r\n\r\n")
    assert (answer.status, "Not Allowed" in answer.error) == (405, True)


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (one(name="z"), "'z'"),
        (one(name="xs", data=[1]), "unknown input 'xs'; it has ['x']; did you mean 'x'?"),
        (one(name="xs", shape=[7, 7]), "did you mean 'x'?"),
        ({**one(), "outputs": [{"name": "yy"}]}, "did you mean 'y'?"),
        (one(name=7), "name must be a text"),
        (one(name=None), "name must be a text"),
        ({"inputs": one()["inputs"] * 2}, "twice"),
        ({"inputs": one()["inputs"] * 5}, "at most 4"),
        ({"inputs": []}, "'x'"),
        ({"inputs": {}}, "must be a list"),
        ({"inputs": [[]]}, "JSON object"),
        ({}, "must be a list"),
        ([], "JSON object"),
        ("text", "JSON object"),
        (one(datatype="FP31"), "FP31"),
        (one(datatype=None), "datatype"),
        (one(datatype="INT64"), "x"),
        (one(datatype="BYTES"), "x"),
        (one(datatype=["FP32"]), "datatype"),
        (one(shape=[3, 1]), "shape"),
        (one(shape=[1, 4]), "shape"),
        (one(shape=[1, -3]), "sizes"),
        (one(shape=[1, 3.0]), "sizes"),
        (one(shape="13"), "shape"),
        (one(shape=None), "shape"),
        (one(shape=[1] * 100 + [3]), "axes"),
        (one(shape=[1 << 62, 1 << 62]), "sizes"),
        (one(shape=[1 << 20, 1 << 20]), "elements"),
        (one(shape=[0, 1 << 62]), "sizes"),
        (one(data=None), "data"),
        (one(data=[1, 2]), "2"),
        (one(data=[1, 2, 3, 4]), "4"),
        (one(data=[1, 2, "3"]), "x"),
        (one(data=[1, 2, None]), "x"),
        (one(data=[1, 2, True]), "x"),
        (one(data=[1, 2, {}]), "x"),
        (one(data={}), "x"),
        (one(data="123"), "x"),
        (one(more=1), "unknown keys"),
        (one(parameters=[]), "parameters"),
        (one(parameters={"binary_data_size": 12}), "data and binary_data_size"),
        (one(parameters={"binary_data_size": -1}), "binary_data_size"),
        (one(parameters={"binary_data_size": True}), "binary_data_size"),
        (one(parameters={"shared_memory_region": "r"}), "shared memory"),
        ({**one(), "outputs": [{"name": "z"}]}, "unknown outputs"),
        ({**one(), "outputs": [{}]}, "name"),
        ({**one(), "outputs": 3}, "must be a list"),
        ({**one(), "id": 3}, "id must be a text"),
        ({**one(), "parameters": {"timeout": -1}}, "timeout"),
        ({**one(), "parameters": {"timeout": "soon"}}, "timeout"),
        ({**one(), "parameters": {"priority": "first"}}, "priority"),
        ({**one(), "parameters": {"binary_data_output": 1}}, "binary_data_output"),
        ({**one(), "parameters": {"sequence_id": 1}}, "sequences"),
    ],
    ids=lambda value: str(value)[:60] if isinstance(value, str) else "",
)
def test_wrong_messages(server: Server, message: object, words: str) -> None:
    answer = asked_json(server, message)
    assert answer.status == 400
    assert words in answer.error
    assert len(answer.error) < 1000


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"\x00" * 100,
        b"[" * 50_000,
        b'{"inputs":' * 9000,
        b'{"inputs": [{"name": "x", "shape": [' + b"9" * 50_000 + b', 3], "datatype": "FP32", "data": []}]}',
        b'{"inputs": [{"name": "x", "shape": [1, 3], "datatype": "FP32", "data": [1, 2, ' + b"9" * 5000 + b"]}]}",
        b'{"inputs": [{"name": "x", "shape": [1, 1e999], "datatype": "FP32", "data": []}]}',
        b'{"inputs": [{"name": "x", "shape": [1, NaN], "datatype": "FP32", "data": []}]}',
        b'{"inputs": [{"name": "x", "shape": [1, Infinity], "datatype": "FP32", "data": []}]}',
        b'{"inputs": [{"name": "x", "shape": [1, 3], "datatype": "INT32", "data": [NaN, 1, 2]}]}',
        b'{"inputs": [{"name": "\\ud800", "shape": [1, 3], "datatype": "FP32", "data": [1, 2, 3]}]}',
        b'{"inputs": [{"name": "x", "shape": [1, 3], "datatype": "\\ud800", "data": [1, 2, 3]}]}',
    ],
    ids=lambda text: str(text[:24]),
)
def test_json_bombs(server: Server, text: bytes) -> None:
    answer = asked_json(server, text)
    assert answer.status == 400
    assert len(answer.error) < 1000


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "-1e39"])
def test_numbers_that_json_has_no_words_for(server: Server, number: str) -> None:
    """JSON's numbers, in which the protocol has its tensors, are finite (RFC 8259, section 6); Python's json is not."""
    text = f'{{"inputs": [{{"name": "x", "shape": [1, 3], "datatype": "FP32", "data": [0, {number}, 2]}}]}}'
    answer = asked_json(server, text.encode())
    assert answer.status == 400
    assert "as binary data" in answer.error
    assert ("no JSON: it has no " in answer.error) == (number.strip("-") in ("NaN", "Infinity"))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_results_that_json_has_no_words_for(server: Server, value: float) -> None:
    """The client is told to ask for bytes, and gets them then."""
    x = np.float32([[1, value, 2]])
    request = binary_request("m", x)
    with connected(server) as client:
        answer = client.ask(request.replace(b'"binary_data_output": true', b'"binary_data_output":false'))
        assert answer.status == 400
        assert answer.error == "output 'y' has NaN or infinity, which JSON has no numbers for; ask for binary data"
        np.testing.assert_array_equal(binary_result(client.ask(request)), np.maximum(x, 0) * 2)


@pytest.mark.parametrize("action", ["load", "unload"])
def test_models_are_not_the_clients_to_load(server: Server, action: str) -> None:
    """Unless the configuration says so."""
    answer = asked(server, post(f"/v2/repository/models/m/{action}", b"{}"))
    assert answer.status == 403
    assert "`control`" in answer.error


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"parameters": {"binary_data_size": 11}}, "12"),
        ({"parameters": {"binary_data_size": 13}}, "13 bytes are announced, 12 are left"),
        ({"parameters": {"binary_data_size": 1 << 70}}, "are announced, 12 are left"),
        ({"shape": [2, 3]}, "24"),
        ({"datatype": "INT8"}, "12"),
        ({"datatype": "BYTES"}, "x"),
        ({"datatype": "BOOL", "shape": [12]}, "x"),
    ],
)
def test_bytes_that_do_not_fit(server: Server, changes: dict[str, Any], words: str) -> None:
    answer = asked(server, binary_request("m", X, **changes))
    assert answer.status == 400
    assert words in answer.error


@pytest.mark.parametrize(
    ("length", "words"),
    [
        ("5", "no JSON"),
        ("0", "no JSON"),
        ("100000", "the body has"),
        ("9" * 18, "the body has"),
        ("9" * 19, "whole number"),
        ("-1", "whole number"),
        ("1.5", "whole number"),
        ("0x10", "whole number"),
        ("", "whole number"),
        ("\u00b2", "whole number"),
    ],
)
def test_lengths_of_the_json_that_are_wrong(server: Server, length: str, words: str) -> None:
    answer = asked(server, binary_request("m", X, {"Inference-Header-Content-Length": length}))
    assert answer.status == 400
    assert words in answer.error


def test_a_body_that_ends_early(server: Server) -> None:
    """The client closes its side after a part of what it announced: there is nobody to answer, or it is told."""
    with connected(server) as client:
        client.send(binary_request("m", X)[:-1])
        client.socket.shutdown(1)
        assert client.is_at_end()


@pytest.mark.parametrize(
    "length", [b"12, 13", b"-1", b"abc", b"1e3", b"99999999999999999999999999", b"12\r\nContent-Length: 13"]
)
def test_lengths_of_the_body_that_are_wrong(server: Server, length: bytes) -> None:
    answer = asked(server, b"POST /v2/models/m/infer HTTP/1.1\r\nHost: x\r\nContent-Length: " + length + b"\r\n\r\n{}")
    assert answer.status in (400, 413)
    assert answer.error


@pytest.mark.parametrize("path", ["/v2/models/m/infer", "/v2/repository/index"])
def test_bodies_that_are_too_large(server: Server, path: str) -> None:
    answer = asked(server, post(path, b"", {"Content-Length": BODY_BYTES + 1}))
    assert answer.status == 413
    assert str(BODY_BYTES) in answer.error


def test_a_chunked_body(server: Server) -> None:
    request = binary_request("m", X, {"Content-Length": None, "Transfer-Encoding": "chunked"})
    head, _, body = request.partition(b"\r\n\r\n")
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body)
    assert_serves(asked(server, head, b"\r\n\r\n", chunks, b"0\r\n\r\n"))


def test_a_chunked_body_that_is_too_large(server: Server) -> None:
    head = post(infer_path("m"), b"", {"Content-Length": None, "Transfer-Encoding": "chunked"})
    chunk = b"%x\r\n%s\r\n" % (10_000, b" " * 10_000)
    with connected(server) as client:
        client.send(head, *[chunk] * (BODY_BYTES // 10_000 + 1))
        answer = client.answer()
    assert answer.status == 413
    assert str(BODY_BYTES) in answer.error


@pytest.mark.parametrize("chunk", [b"x\r\n", b"-1\r\n", b"ffffffffffffffffffff\r\n", b"5\r\nabcdefghi"])
def test_chunks_that_are_wrong(server: Server, chunk: bytes) -> None:
    head = post(infer_path("m"), b"", {"Content-Length": None, "Transfer-Encoding": "chunked"})
    answer = asked(server, head, chunk)
    assert answer.status == 400
    assert answer.error


def test_a_length_and_chunks_at_once(server: Server) -> None:
    """Proxies and servers that take different ones could be made to disagree where a request ends."""
    answer = asked(server, post(infer_path("m"), b"0\r\n\r\n", {"Transfer-Encoding": "chunked"}))
    assert answer.status == 400
    assert answer.error


def compressed_request(body: bytes, encoding: str) -> bytes:
    return post(infer_path("m"), body, {"Content-Encoding": encoding})


@pytest.mark.parametrize(
    ("request_bytes", "status", "words"),
    [
        (compressed_request(b"{}", "br"), 415, "'br'"),
        (compressed_request(b"{}", "gzip, gzip"), 415, "gzip"),
        (compressed_request(b"{}", "gzip"), 400, "not compressed as"),
        (compressed_request(b"{}", "deflate"), 400, "not compressed as"),
        (compressed_request(gzip.compress(b"{}")[:-1], "gzip"), 400, "does not end"),
        (compressed_request(gzip.compress(b"{}") + b"x", "gzip"), 400, "does not end"),
        (compressed_request(zlib.compress(b"{}"), "gzip"), 400, "not compressed as"),
        (compressed_request(gzip.compress(b" " * (BODY_BYTES + 1)), "gzip"), 413, str(BODY_BYTES)),
        (compressed_request(gzip.compress(b" " * (1 << 25)), "gzip"), 413, str(BODY_BYTES)),
        (compressed_request(gzip.compress(b" " * BODY_BYTES) + gzip.compress(b" "), "gzip"), 400, "does not end"),
        (compressed_request(zlib.compress(np.random.default_rng(0).bytes(90_000)), "deflate"), 503, "other requests"),
    ],
    ids=lambda value: "" if isinstance(value, bytes) else str(value),
)
def test_wrong_encodings(server: Server, request_bytes: bytes, status: int, words: str) -> None:
    answer = asked(server, request_bytes)
    assert answer.status == status
    assert words in answer.error


@pytest.mark.parametrize(
    "lines",
    [
        b"X-Long: " + b"x" * HEADER_BYTES,
        b"\r\n".join(b"X-%d: y" % number for number in range(HEADER_BYTES // 4)),
        b"X" * HEADER_BYTES + b": y",
    ],
)
@pytest.mark.parametrize("ended", [True, False])
def test_gigantic_headers(server: Server, lines: bytes, ended: bool) -> None:
    start = b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n" + lines
    with connected(server) as client:
        answer = client.ask(start + (b"\r\n\r\n" if ended else b""))
        assert answer.status == 431
        assert str(HEADER_BYTES) in answer.error
        assert client.is_at_end()


def test_a_gigantic_path(server: Server) -> None:
    answer = asked(server, b"GET /" + b"x" * HEADER_BYTES + b" HTTP/1.1\r\nHost: x\r\n\r\n")
    assert answer.status == 431
    assert answer.error


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # the beginning of TLS
        b"GET\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET / HTTP/1.1\r\nno colon\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nA\x00B: c\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\r\n\r\n\x00\x00\x00",
        b"\xff" * 1000,
    ],
)
def test_what_is_no_http(server: Server, garbage: bytes) -> None:
    with connected(server) as client:
        answer = client.ask(garbage)
        assert answer.status == 400
        assert answer.error
        assert client.is_at_end()


def test_an_upgrade_that_there_is_not(server: Server) -> None:
    upgrade = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Key": "dGVzdA=="}
    assert asked_json(server, one(), upgrade).status in (200, 400)


def test_errors_one_behind_another(server: Server) -> None:
    """An error in one of the requests on a connection does not touch those before and after."""
    requests = [binary_request("m", X), post(infer_path("unknown"), json.dumps(one()).encode()), binary_request("m", X)]
    with connected(server) as client:
        client.send(b"".join(requests))
        assert_serves(client.answer())
        assert client.answer().status == 404
        assert_serves(client.answer())


def test_a_refused_body_is_passed_over(server: Server) -> None:
    with connected(server) as client:
        assert client.ask(post(infer_path("m"), b"x" * (BODY_BYTES + 50_000))).status == 413
        assert_serves(client.ask(binary_request("m", X)))


@pytest.mark.parametrize("body", [b"{", b"[]", b'{"ready": 1', b"[" * 50_000, b"\xff"])
def test_wrong_messages_to_the_repository(server: Server, body: bytes) -> None:
    for path in ("index", "models/m/load", "models/m/unload"):
        answer = asked(server, post(f"/v2/repository/{path}", body))
        assert answer.status == 400
        assert answer.error
