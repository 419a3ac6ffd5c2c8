"""What the live page is told: models, threads and slow requests; and that there is nothing of it without the page."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from dagexec.executor.requests.timeline import MOST_RUNS, Timeline
from dagexec.options import CompileOptions
from dagexec.server.config import ModelConfig, ServerConfig, read_config
from dagexec.server.live import SLOW_SECONDS, SLOWEST, SlowRequests
from dagexec.server.openapi import description
from dagexec.server.run import Server
from tests.held import PATIENCE, Held, doubled_model, held_operators
from tests.server.runners import HeldRunner
from tests.server.serving import serving

ROW = [1.0, -2.0, 3.0]


class Client:
    """Of one server: asks for runs, and for what is new in its state."""

    def __init__(self, server: Server) -> None:
        self.http = httpx.Client(base_url=server.url, timeout=PATIENCE)
        self._numbers = {"stretch": 0, "request": 0}

    def infer(self, rows: int = 1, model: str = "doubled", id: str = "", **parameters: object) -> httpx.Response:
        inputs = [{"name": "x", "datatype": "FP32", "shape": [rows, 3], "data": ROW * rows}]
        body = {"id": id, "inputs": inputs, "parameters": parameters}
        return self.http.post(f"/v2/models/{model}/infer", json=body)

    def state(self) -> dict[str, Any]:
        found: dict[str, Any] = self.http.get("/live.json", params=self._numbers).raise_for_status().json()
        self._numbers = {name: found[name] for name in self._numbers}
        return found

    def model(self, name: str = "doubled") -> dict[str, Any]:
        [found] = [one for one in self.state()["models"] if one["name"] == name]
        return dict(found)


@contextmanager
def client_of(options: CompileOptions, held: Held | None = None, **settings: Any) -> Iterator[Client]:
    if held is not None:
        held.go_on.release()  # the model is warmed up
    source = doubled_model() if held is None else doubled_model("Held")
    model = ModelConfig(name="doubled", source=source, version="7", options=options)
    with serving(ServerConfig(models={"doubled": model}, control=True, **settings), loaded=False) as server:
        while not server.repository.is_ready():  # asked over HTTP, it may want a token
            time.sleep(0.001)
        server.repository.add("elsewhere", HeldRunner(1.0))
        client = Client(server)
        with client.http:
            yield client


def test_requests_are_seen_while_they_run_and_their_times_afterwards() -> None:
    """Two for one replica: the first is held in its run; meanwhile the second waits."""
    with (
        held_operators() as control,
        client_of(CompileOptions(replicas=1, num_workers=1), control) as client,
        ThreadPoolExecutor(2) as threads,
    ):
        client.state()  # from here on somebody looks
        control.wait_inside(1)
        first = threads.submit(client.infer, id="first")
        control.wait_inside(1)
        second = threads.submit(client.infer, id="second")
        while client.model()["queued"] == 0:
            pass
        held = client.state()
        control.go_on.release(2)
        for one in (first, second):
            assert one.result(PATIENCE).status_code == 200
        after = client.state()
        nothing = client.state()
    [row, _] = held["models"]
    assert (row["version"], row["state"], row["running"], row["queued"], row["replicas"]) == ("7", "READY", 1, 1, 1)
    open_ones = [one for lane in held["lanes"].values() for one in lane if one[1] is None]
    assert [held["doing"][one[4]] for one in open_ones] == [["doubled", "doubled"]]
    closed = [one for lane in after["lanes"].values() for one in lane if one[1] is not None]
    assert open_ones[0][0] in [one[0] for one in closed]  # it has an end now
    assert held["slow"] == nothing["slow"] == []
    assert sorted(nothing["kept"]) == sorted(after["kept"]) == [1, 2]
    slow = {one["id"]: one for one in after["slow"]}
    assert {name: (one["outcome"], one["error"], len(one["runs"])) for name, one in slow.items()} == dict.fromkeys(
        ("first", "second"), ("completed", "", 1)
    )
    for one in slow.values():
        created, begun, fed_at, ran_at, ended, rows, thread = one["runs"][0]
        assert one["began"] <= created <= begun <= fed_at <= ran_at <= ended <= one["began"] + one["seconds"]
        assert (rows, thread in held["lanes"]) == (1, True)
    of_first, of_second = slow["first"]["runs"][0], slow["second"]["runs"][0]
    assert of_second[0] < of_first[3] < of_second[1]  # it waited for the replica
    assert of_first[3] - of_first[2] >= open_ones[0][2]


def test_joined_and_failed_requests_and_those_that_run_elsewhere() -> None:
    with client_of(CompileOptions(max_batch=4, max_wait=PATIENCE)) as client, ThreadPoolExecutor(3) as threads:
        for one in [threads.submit(client.infer, rows) for rows in (1, 1, 2)]:
            assert one.result(PATIENCE).status_code == 200
        client.infer(model="elsewhere")
        assert client.infer(id="x" * 5000, timeout=20_000).status_code == 504
        found = client.state()
    [row, elsewhere] = found["models"]
    assert (row["batches"], row["most_rows"], row["success"][0], row["fail"][0]) == ({"4": 1}, 4, 3, 1)
    assert (elsewhere["success"][0], "queued" in elsewhere) == (1, False)
    joined = [one for one in found["slow"] if one["outcome"] == "completed" and one["model"] == "doubled"]
    assert [one["runs"][0][5] for one in joined] == [4, 4, 4]
    [late] = [one for one in found["slow"] if one["outcome"] == "timed_out"]
    assert "not done within" in late["error"]
    assert (len(late["id"]), late["runs"][0][2:4]) == (300, [None, None])  # it was not even fed
    assert [one["runs"] for one in found["slow"] if one["model"] == "elsewhere"] == [[]]


def test_models_that_are_unloaded_and_loaded_again() -> None:
    with client_of(CompileOptions()) as client:
        client.infer()
        client.http.post("/v2/repository/models/doubled/unload")
        unloaded = client.model()
        client.http.post("/v2/repository/models/doubled/load")
        loaded = client.model()
        far = client.http.get("/live.json?stretch=99999999&request=99999999").json()
        odd = client.http.get("/live.json?stretch=-1&request=x").json()
    assert unloaded == {"name": "doubled", "version": "", "state": "UNAVAILABLE", "reason": "unloaded"}
    assert (loaded["version"], loaded["state"], loaded["success"][0]) == ("7", "READY", 0)
    assert [one["model"] for one in far["slow"]] == [one["model"] for one in odd["slow"]] == ["doubled"]


def test_the_page_is_open_and_its_state_is_not(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("secret")
    with client_of(CompileOptions(), token_file=file) as client:
        for path, kind in (("/", "text/html"), ("/live.css", "text/css"), ("/live.js", "text/javascript")):
            answer = client.http.get(path)
            assert (answer.status_code, answer.headers["content-type"]) == (200, f"{kind}; charset=utf-8")
            policy = answer.headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "unsafe" not in policy
            assert "doubled" not in answer.text
        assert client.http.get("/live.json").status_code == 401
        state = client.http.get("/live.json", headers={"Authorization": "Bearer secret"})
        assert [one["name"] for one in state.json()["models"]] == ["doubled", "elsewhere"]
        assert state.headers["cache-control"] == "no-store"


def test_without_the_page_there_is_nothing_of_it(tmp_path: Path) -> None:
    file = tmp_path / "serve.toml"
    file.write_text("[server]\npage = false\n")
    assert not read_config(file).page
    with client_of(CompileOptions(), page=False) as client:
        assert client.infer().status_code == 200
        assert [client.http.get(path).status_code for path in ("/", "/live.js", "/live.json")] == [404] * 3
        assert "/live.json" not in client.http.get("/v2/openapi.json").json()["paths"]
    assert {"/", "/live.json"} <= set(description(has_token=False, has_page=True)["paths"])


def test_the_slowest_of_each_model_are_kept_for_some_time() -> None:
    slow, now = SlowRequests(), 1000.0
    for number in range(500):
        name = "ab"[number % 2]
        slow.add(name, "1", "", now, (number * 37 % 500) / 1000, "completed", "", Timeline())
    _, kept, found = slow.since(0, now)
    assert sorted(kept) == sorted(one.number for one in found)
    times = {name: sorted((n * 37 % 500) / 1000 for n in range(500) if "ab"[n % 2] == name) for name in "ab"}
    expected = {name: row[-SLOWEST:] for name, row in times.items()}
    assert {name: [one.seconds for one in found if one.model == name] for name in "ab"} == expected
    later = now + SLOW_SECONDS + 1
    slow.add("a", "1", "", later, 0.001, "completed", "", Timeline())  # those before have had their time
    assert [one.seconds for one in slow.since(0, later)[2]] == [0.001]


def test_a_timeline_keeps_the_first_runs() -> None:
    timeline = Timeline()
    for number in range(MOST_RUNS + 5):
        timeline.add((number, number, None, None, number, 1, ""))
    assert (len(timeline.runs), timeline.runs[-1][0], timeline.more) == (MOST_RUNS, MOST_RUNS - 1, 5)
