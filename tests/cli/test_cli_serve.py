"""`dagexec serve` in a process of its own, asked by unmodified clients."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np
import onnx
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from onnx import TensorProto, helper

import dagexec
from dagexec.export.onnx_model import save_onnx
from tests.command_line import Cli
from tests.held import PATIENCE, doubled_model
from tests.server.raw import asked_until_the_end, binary_request, binary_result

SERVE = [sys.executable, "-c", "from dagexec.cli import main; main()", "serve"]
LENET = "lenet=zoo:lenet"
ROOT = Path(__file__).parents[2]


class Serving:
    """A server in another process, whose log is read line by line."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.log: list[str] = []

    def wait_for(self, pattern: str) -> re.Match[str]:
        """The next line of the log that has the pattern; the process may end before."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line)
            if found := re.search(pattern, line):
                return found
        raise AssertionError("".join(self.log))

    def end(self) -> int:
        """The exit status, and the rest of the log."""
        _, rest = self.process.communicate(timeout=PATIENCE)
        self.log += rest.splitlines(keepends=True)
        return self.process.returncode


@contextmanager
def served(*arguments: str | Path, folder: Path | None = None) -> Iterator[Serving]:
    command = [*SERVE, *map(str, arguments), "--port", "0"]
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, cwd=folder or ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}
    ) as process:
        try:
            yield Serving(process)
        finally:
            process.kill()


def images() -> np.ndarray:
    return np.random.default_rng(3).standard_normal((2, 1, 28, 28), np.float32)


def expected() -> np.ndarray:
    with dagexec.compile("zoo:lenet") as executor:
        result: np.ndarray = executor.run({"data": images()})["softmax"]
    return result


@pytest.mark.parametrize("stop", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_http_and_grpc_answer_alike_until_a_signal(stop: signal.Signals) -> None:
    with served(LENET, "--grpc-port", "0") as server:
        http, grpc = server.wait_for(r"listening at http://(\S+), gRPC at (\S+)").groups()
        server.wait_for(r"serving lenet \(1\)")
        found = []
        for module, address in ((triton_http, http), (triton_grpc, grpc)):
            with module.InferenceServerClient(address) as client:
                x = module.InferInput("data", [2, 1, 28, 28], "FP32")
                x.set_data_from_numpy(images())
                found.append(client.infer("lenet", [x]).as_numpy("softmax"))
        server.process.send_signal(stop)
        assert server.end() == 0
    assert found[0].tobytes() == found[1].tobytes() == expected().tobytes()
    assert server.log[-1].endswith("INFO ended\n")


@pytest.mark.slow
def test_no_client_sees_a_reset_when_a_signal_comes(tmp_path: Path) -> None:
    """32 clients, each with a connection that it keeps, ask one request after another until they are told the end."""
    save_onnx(doubled_model(), tmp_path / "doubled.onnx")
    x = np.float32([[1, -2, 3]])
    went_on = threading.Semaphore(0)
    with served("m=doubled.onnx", folder=tmp_path) as server, ThreadPoolExecutor(32) as threads:
        url = server.wait_for(r"serving m \(1\) at (\S+)")[1]
        asking = [threads.submit(asked_until_the_end, url, binary_request("m", x), went_on) for _ in range(32)]
        for _ in range(10 * 32):
            assert went_on.acquire(timeout=PATIENCE)
        server.process.terminate()
        answers = [answer for one in asking for answer in one.result(PATIENCE)]
        assert server.end() == 0
    for answer in answers:
        if answer.status == 200:
            np.testing.assert_array_equal(binary_result(answer), np.maximum(x, 0) * 2)
        else:
            assert (answer.status, answer.headers["connection"]) == (503, "close")


@pytest.mark.slow
def test_a_file_configures_what_the_command_line_does_not(tmp_path: Path) -> None:
    (tmp_path / "serve.toml").write_text(
        '[server]\nname = "mine"\ncontrol = false\nport = 1\n[models.digits]\nsource = "zoo:lenet"\nversion = "12"\n'
    )
    (tmp_path / "secret").write_text("of-mine\n")
    with served(LENET, "--config", "serve.toml", "--token-file", "secret", folder=tmp_path) as server:
        url = server.wait_for(r"listening at (http://[\w.:]+)$")[1]
        server.wait_for(r"serving digits \(12\), lenet \(1\)")
        assert httpx.get(f"{url}/v2", timeout=PATIENCE).status_code == 401
        headers = {"Authorization": "Bearer of-mine"}
        with httpx.Client(base_url=url, headers=headers, timeout=PATIENCE) as client:
            assert client.get("/v2").json()["name"] == "mine"
            assert client.post("/v2/repository/models/lenet/unload").status_code == 403
        server.process.terminate()
        assert server.end() == 0


@pytest.mark.slow
def test_a_model_that_cannot_be_loaded_leaves_the_others_serving(tmp_path: Path) -> None:
    (tmp_path / "torn.onnx").write_bytes(b"\xff" * 100)
    with served("torn=torn.onnx", LENET, folder=tmp_path) as server:
        url = server.wait_for(r"listening at (http://[\w.:]+)$")[1]
        server.wait_for(r"ERROR model 'torn' could not be loaded")
        server.wait_for(r"serving lenet \(1\)")
        with httpx.Client(base_url=url, timeout=PATIENCE) as client:
            assert client.get("/v2/health/ready").status_code == 503
            assert client.get("/v2/models/lenet/ready").status_code == 200
            states = {row["name"]: row["state"] for row in client.post("/v2/repository/index").json()}
        assert states == {"torn": "UNAVAILABLE", "lenet": "READY"}
        assert not any("Traceback" in line for line in server.log)


HELD_PIPELINE = """
[server]
python_steps = true
[[pipelines]]
name = "held"
inputs = { x = "float32[1]" }
outputs = { y = "wait" }
stages.wait = { python = "steps.py:wait", inputs = ["x"], outputs = "float32[1]" }
"""
HELD_STEP = """
def wait(x):
    if x[0] > 0:
        with open("entered", "wb", 0) as entered, open("go_on", "rb", 0) as go_on:
            entered.write(b"1")
            go_on.read(1)
    return x + 1
"""


MESSAGE = {"inputs": [{"name": "x", "shape": [1], "datatype": "FP32", "data": [5]}]}
INFER = "/v2/models/held/infer"


@dataclass
class HeldRequest:
    """A request to a server in another process that is inside its step until `go_on` is called."""

    server: Serving
    url: str
    go_on: Callable[[], object]
    answer: Future[httpx.Response]


@contextmanager
def request_in_flight(folder: Path) -> Iterator[HeldRequest]:
    (folder / "serve.toml").write_text(HELD_PIPELINE)
    (folder / "steps.py").write_text(HELD_STEP)
    with ExitStack() as ending:
        pipes = []
        for name in ("entered", "go_on"):
            os.mkfifo(folder / name)
            pipes.append(os.open(folder / name, os.O_RDWR))  # which does not wait for the other side
            ending.callback(os.close, pipes[-1])
        entered, go_on = pipes
        threads = ending.enter_context(ThreadPoolExecutor(1))
        server = ending.enter_context(served("--config", "serve.toml", folder=folder))
        url = server.wait_for(r"listening at (http://[\w.:]+)$")[1]
        server.wait_for(r"serving held \(1\)")
        client = ending.enter_context(httpx.Client(base_url=url, timeout=PATIENCE))
        answer = threads.submit(client.post, INFER, json=MESSAGE)
        assert select.select([entered], [], [], PATIENCE)[0]
        yield HeldRequest(server, url, lambda: os.write(go_on, b"1"), answer)


needs_named_pipes = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="the test and the model meet at named pipes")


@pytest.mark.slow
@needs_named_pipes
def test_a_signal_lets_a_request_in_flight_finish_and_refuses_the_next(tmp_path: Path) -> None:
    with request_in_flight(tmp_path) as held, httpx.Client(base_url=held.url, timeout=PATIENCE) as late:
        assert late.get("/v2/health/ready").status_code == 200
        held.server.process.terminate()
        held.server.wait_for("draining")
        assert late.get("/v2/health/ready").status_code == 503
        assert late.post(INFER, json=MESSAGE).status_code == 503
        held.go_on()
        answer = held.answer.result(PATIENCE)
        assert (answer.status_code, answer.json()["outputs"][0]["data"]) == (200, [6])
        late.close()
        assert held.server.end() == 0


def endless_model(*, also_with_zeros: bool) -> onnx.ModelProto:
    """y: x and one more, for ever; without `also_with_zeros` only for x > 0, and x itself otherwise."""
    one = helper.make_tensor("one", TensorProto.FLOAT, [1], [1.0])
    kinds = {"i": (TensorProto.INT64, []), "go_on": (TensorProto.BOOL, []), "z": (TensorProto.FLOAT, [1])}
    values = {name: helper.make_tensor_value_info(name, *kind) for name, kind in kinds.items()}
    body = helper.make_graph(
        [helper.make_node("Add", ["z", "one"], ["more"]), helper.make_node("Identity", ["go_on"], ["still"])],
        "body",
        list(values.values()),
        [
            helper.make_tensor_value_info("still", TensorProto.BOOL, []),
            helper.make_tensor_value_info("more", TensorProto.FLOAT, [1]),
        ],
        [one],
    )
    graph = helper.make_graph(
        [
            helper.make_node("ReduceMax", ["x"], ["largest"], keepdims=0),
            helper.make_node("Greater", ["largest", "bound"], ["endless"]),
            helper.make_node("Loop", ["", "endless", "x"], ["y"], body=body),
        ],
        "endless",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1])],
        [helper.make_tensor("bound", TensorProto.FLOAT, [], [-1.0 if also_with_zeros else 0.0])],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.mark.slow
def test_a_second_signal_ends_what_still_runs(tmp_path: Path) -> None:
    onnx.save(endless_model(also_with_zeros=False), tmp_path / "endless.onnx")
    with served("endless=endless.onnx", "--drain-seconds", "1e6", folder=tmp_path) as server:
        url = server.wait_for(r"listening at (http://[\w.:]+)$")[1]
        server.wait_for(r"serving endless \(1\)")
        with httpx.Client(base_url=url, timeout=PATIENCE) as client, ThreadPoolExecutor(1) as threads:
            asked = threads.submit(httpx.post, f"{url}/v2/models/endless/infer", json=MESSAGE, timeout=PATIENCE)
            while 'dagexec_requests_running{model="endless",version="1"} 1.0' not in client.get("/metrics").text:
                assert not asked.done()
            server.process.terminate()
            server.wait_for("draining")
            server.process.terminate()
            assert asked.result(PATIENCE).status_code == 503
        assert server.end() == 0


@pytest.mark.slow
def test_a_signal_ends_a_model_that_is_warmed_up_for_ever(tmp_path: Path) -> None:
    onnx.save(endless_model(also_with_zeros=True), tmp_path / "endless.onnx")
    with served("endless=endless.onnx", "--drain-seconds", "1e6", folder=tmp_path) as server:
        server.wait_for("warming up endless")
        server.process.terminate()
        assert server.end() == 0


@pytest.mark.slow
def test_strict_ends_with_a_model_that_cannot_be_loaded(tmp_path: Path) -> None:
    with served("torn=torn.onnx", "--strict", folder=tmp_path) as server:
        server.wait_for("strict: ending")
        assert server.end() == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "there is nothing to serve"),
        (["resnet"], "expected NAME=SOURCE"),
        ([LENET, "--port", "70000"], "port must be less than or equal to 65535, not 70000"),
        ([LENET, "--grpc-port", "-1"], "grpc_port must be greater than or equal to 0, not -1"),
        ([LENET, "--host", "256.0.0.1"], "cannot listen at 256.0.0.1:8000"),
        ([LENET, "--config", "no.toml"], "no.toml"),
        ([LENET, "--log-level", "loud"], "--log-level must be one of debug, info, warning, error"),
    ],
)
@pytest.mark.usefixtures("loggers_as_before")
def test_wrong_usage_is_one_message(cli: Cli, arguments: list[str], message: str) -> None:
    status, _, error = cli("serve", *arguments)
    assert status == 2
    assert message in error
    assert "Traceback" not in error
