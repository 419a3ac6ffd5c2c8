"""One simulation from one seed: clock, threads, disk and network of a server, its cluster and their clients.

Clients ask a server by HTTP. It serves a model of its own, read from the disk and loaded again while requests run, and
one that a cluster runs, whose nodes read the newest checkpoint of a trainer. Threads and time are a schedule's
(`scheduler.exploration`), connections and links those of a `Network`, files those of a `SimulatedDisk`; what goes wrong
follows from the seed, as does everything else, so that a seed repeats to the step. FoundationDB and TigerBeetle are
tested like this; see J. Zhou et al., "FoundationDB: A Distributed Unbundled Transactional Key Value Store" (SIGMOD
2021).

In the end each request had one answer, right or an error that says why; all is of use once nothing goes wrong any more,
no thread is left, and a loss of power leaves the checkpoint that was saved last, or a newer one.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import json
import logging
import random
import re
import tempfile
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import field
from pathlib import Path
from typing import Any

import numpy as np
import uvicorn
from uvicorn.server import ServerState

from dagexec.cluster.deployment import Deployment
from dagexec.cluster.dispatcher import Dispatcher
from dagexec.cluster.state import DeploymentState
from dagexec.core import dtypes
from dagexec.core.model import InputInfo, Model
from dagexec.core.operator_def import op
from dagexec.core.proto import NetDef
from dagexec.core.workspace import Workspace
from dagexec.errors import DagexecError, OutputError
from dagexec.executor.compile import compile
from dagexec.executor.executor import Executor
from dagexec.executor.source.types import GivenTypes
from dagexec.options import CompileOptions
from dagexec.platform.disk import installed
from dagexec.platform.records import dataclass
from dagexec.platform.threads import threads
from dagexec.scheduler.exploration import ExploredSchedule, RandomStrategy, explore
from dagexec.scheduler.exploration.functions import controlled
from dagexec.server.bodies import Bodies
from dagexec.server.config import ModelConfig, ServerConfig
from dagexec.server.connection import Connections, connections_with
from dagexec.server.http import Application
from dagexec.server.inference import RequestError
from dagexec.server.metrics import Metrics
from dagexec.server.repository import Repository
from dagexec.server.shared_memory import NO_REGIONS
from dagexec.storage.net_file import save_net
from dagexec.stress.simulated_cluster import Node
from dagexec.stress.simulated_disk import DiskCall, Failure, SimulatedDisk, Tree, system_error, write_tree
from dagexec.stress.simulated_network import Network, Stream, connect
from dagexec.training.checkpoint import latest_checkpoint, load_checkpoint, save_checkpoint

_NODES = 2
_CLIENTS = 3
_REQUESTS = 4  # of each client
_SAVES = 4
_ATTEMPTS = 20
_TIMEOUT_SECONDS = 60.0
_DISK_FAILS = 0.01
_STATUSES = {400, 404, 408, 500, 503, 504}

_WEIGHTS = np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3)
_X = np.linspace(0, 1, 6, dtype=np.float32).reshape(2, 3)


class SimulationError(AssertionError):
    """Something was lost, wrong, or of no use any more."""


@dataclass
class Simulated:
    """What happened in a simulation.

    Attributes:
        answers: how often clients got which status, or "connection reset".
        met: what went wrong, by its name.
        steps: of the schedule.
        seconds: of virtual time.
        trace: a checksum of the whole schedule and what clients saw.
    """

    answers: Counter[str] = field(default_factory=Counter)
    met: Counter[str] = field(default_factory=Counter)
    steps: int = 0
    seconds: float = 0.0
    trace: int = 0


def simulate(seed: int) -> Simulated:
    """Simulate once. Raises what went wrong, with a note that says how to repeat it."""
    _prepare()
    return _simulated(seed)


@functools.cache
def _prepare() -> None:
    """Have all imported and made that a process has once: it would be steps of the first simulation alone."""
    with suppress(Exception):
        _simulated(0)


def _simulated(seed: int) -> Simulated:
    found = Simulated()
    with tempfile.TemporaryDirectory(prefix="dagexec-simulated-") as folder:
        world = _World(seed, Path(folder), found)
        schedule: ExploredSchedule[None] = explore(controlled(world.main, seed=seed), RandomStrategy(seed))
        try:
            if schedule.failure is not None:
                raise schedule.failure
            if left := [name for name in schedule.left if not name.startswith("AnyIO")]:  # which keeps its threads
                raise SimulationError(f"threads are left: {left}")
        except BaseException as error:
            error.add_note(f"again: dagexec stress --simulate 1 --seed {seed}")
            raise
    found.steps, found.seconds = len(schedule.trace), schedule.seconds
    story = [(event.thread, str(event)) for event in schedule.trace], sorted(found.answers.items())
    found.trace = zlib.crc32(repr(story).encode())
    return found


class _World:
    """Everything of one simulation."""

    def __init__(self, seed: int, folder: Path, found: Simulated) -> None:
        self._chance = random.Random(seed)
        self._found = found
        self._network = Network(self._chance)
        self._folder = folder / "disk"
        self._after = folder / "after"
        self._folder.mkdir()
        self._healthy = False
        _save_model(self._folder / "model")
        self._save(0)
        self._disk = SimulatedDisk(self._folder, self._disk_fault)
        self._saved = 0
        self._nodes: list[Node] = []
        self._right = _right_bytes()

    async def main(self) -> None:
        """The scenario."""
        with ExitStack() as stack:
            for name in ("dagexec", "dagexec.server"):  # what is logged is what went wrong on purpose
                stack.enter_context(_silent(logging.getLogger(name)))
            stack.enter_context(installed(self._disk))
            repository, new_client = await self._server()
            clients = [asyncio.create_task(self._client(number, new_client)) for number in range(_CLIENTS)]
            trainer = threads().start(self._train, "trainer")
            loading = asyncio.create_task(self._reload(repository))
            await asyncio.gather(*clients, loading)
            await asyncio.get_running_loop().run_in_executor(None, trainer.join)
            self._healthy = True
            self._network.heal()
            await self._all_serve(repository, new_client)
            await repository.drain()
            await asyncio.get_running_loop().run_in_executor(None, self._join_nodes)
        self._lose_power()
        self._found.met.update(self._network.met)

    async def _server(self) -> tuple[Repository, Any]:
        """A server, and what connects to it."""
        loop = asyncio.get_running_loop()
        models = {"own": ModelConfig(name="own", source=self._folder / "model", options=_OPTIONS)}
        config = ServerConfig(models=models, control=True)
        metrics = Metrics(lambda: repository.loaded())
        repository = Repository(config, metrics)
        repository.add("cluster", self._deployment())
        application = Application(repository, Bodies(config.limits), metrics, NO_REGIONS)
        kind = connections_with(Connections(config.limits))
        settings = uvicorn.Config(application, http=kind, ws="none", lifespan="off", log_config=None, access_log=False)
        settings.load()
        state = ServerState()

        def new_client(reader: asyncio.StreamReader) -> Stream:
            def client() -> asyncio.StreamReaderProtocol:
                return asyncio.StreamReaderProtocol(reader, loop=loop)

            return connect(
                self._network, loop, client, lambda: kind(config=settings, server_state=state, app_state={}, _loop=loop)
            )

        await self._load(repository)
        return repository, new_client

    def _deployment(self) -> Deployment:
        model = _model()
        state = DeploymentState(model.name, max_outstanding=2, answer_seconds=10.0)
        self._dispatcher = Dispatcher(model.name, state, self._new_node)
        self._dispatcher.add_members(_NODES)
        return Deployment(model, GivenTypes.of(model), self._dispatcher, lambda: None)

    def _new_node(self, number: int) -> Node:
        self._nodes.append(Node(number, self._network, self._executor_of_a_node))
        return self._nodes[-1]

    def _executor_of_a_node(self) -> Executor:
        """As a process would: from the newest checkpoint, with more than one attempt."""
        for attempt in range(_ATTEMPTS):
            try:
                path = latest_checkpoint(self._folder / "checkpoints")
                workspace = Workspace()
                if path is not None:
                    load_checkpoint(workspace, path)
                    return compile(_model(workspace.fetch_blob("w")), _OPTIONS)
            except DagexecError:
                if attempt == _ATTEMPTS - 1:
                    raise
        raise SimulationError("there is no checkpoint")

    def _save(self, step: int) -> None:
        workspace = Workspace()
        workspace.feed_blob("w", _WEIGHTS)
        save_checkpoint(workspace, ["w"], self._folder / "checkpoints", step, keep=2)

    def _train(self) -> None:
        """Save a checkpoint now and then."""
        for step in range(1, _SAVES + 1):
            try:
                self._save(step)
                self._saved = step
            except OutputError:
                self._found.met["checkpoint not saved"] += 1

    def _disk_fault(self, call: DiskCall) -> Failure | None:
        if self._healthy or self._chance.random() >= _DISK_FAILS:
            return None
        what = self._chance.choice(["no room", "input or output failed", "short write"])
        if what == "short write" and call.kind != "write":
            return None
        self._found.met[f"{what}, {call.kind}"] += 1
        number = {"no room": errno.ENOSPC, "input or output failed": errno.EIO}.get(what)
        return Failure(None if number is None else system_error(number))

    async def _load(self, repository: Repository) -> None:
        for _ in range(_ATTEMPTS):
            try:
                await repository.load("own")
                return
            except RequestError:
                self._found.met["model not loaded"] += 1
        raise SimulationError("the model could not be loaded")

    async def _reload(self, repository: Repository) -> None:
        for _ in range(2):
            await asyncio.sleep(self._chance.uniform(0.0, 10.0))
            await self._load(repository)

    async def _client(self, number: int, new_client: Any) -> None:
        """Ask one thing after another, over one connection until it is no more."""
        connection: _Client | None = None
        for _ in range(_REQUESTS):
            if connection is None or connection.is_over():
                connection = _Client(new_client)
            model = self._chance.choice(["own", "cluster"])
            status, body = await connection.ask(model)
            self._found.answers[f"{status}" if status else "connection reset"] += 1
            self._check(model, status, body, connection)

    def _check(self, model: str, status: int, body: Mapping[str, Any], connection: _Client) -> None:
        """Raise SimulationError for an answer that is none."""
        if status == 200:
            values = np.array(body["outputs"][0]["data"], np.float32)
            if values.tobytes() != self._right:
                raise SimulationError(f"{model}: wrong bytes: {values}")
        elif status:
            if status not in _STATUSES or not body.get("error"):
                raise SimulationError(f"{model}: status {status}: {body}")
        elif not connection.stream.was_reset:
            raise SimulationError(f"{model}: the server closed the connection without an answer")

    async def _all_serve(self, repository: Repository, new_client: Any) -> None:
        """Once nothing goes wrong any more and what did is over, each model serves, and nothing is held."""
        await asyncio.sleep(2 * _TIMEOUT_SECONDS)
        for model in ("own", "cluster") * _CLIENTS:
            connection = _Client(new_client)
            status, body = await connection.ask(model)
            self._check(model, status, body, connection)
            connection.stream.close()
            if status != 200:
                raise SimulationError(f"{model} does not serve any more: {status} {body}")
        held = {version.config.name: version.running for version in repository.loaded()}
        held["outstanding"] = self._dispatcher.read(
            lambda state, _: state.unfinished + sum(len(member.outstanding) for member in state.members.values())
        )
        if any(held.values()) or not repository.is_ready():
            raise SimulationError(f"requests are held, or the server is not ready: {held}")

    def _join_nodes(self) -> None:
        for node in self._nodes:
            node.join()

    def _lose_power(self) -> None:
        """Of what may be left, one is looked at."""
        trees = sorted(self._disk.after_power_loss(), key=_order)
        self._after.mkdir()
        write_tree(self._chance.choice(trees), self._after)
        path = latest_checkpoint(self._after / "checkpoints")
        if path is None:
            raise SimulationError("after a loss of power there is no checkpoint")
        workspace = Workspace()
        step = load_checkpoint(workspace, path).step
        if step < self._saved or workspace.fetch_blob("w").tobytes() != _WEIGHTS.tobytes():
            raise SimulationError(f"after a loss of power there is step {step}, and {self._saved} had been saved")


def _order(tree: Tree) -> list[tuple[str, bytes]]:
    """What tells one from another, without the numbers in names of files that are being written."""
    return [(re.sub(r"unfinished-\w+", "", name), content or b"") for name, content in tree]


@contextmanager
def _silent(logger: logging.Logger) -> Iterator[None]:
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


class _Client:
    """One connection, and what comes by it."""

    def __init__(self, new_client: Any) -> None:
        self._reader = asyncio.StreamReader()
        self.stream: Stream = new_client(self._reader)

    def is_over(self) -> bool:
        return self.stream.is_closing() or self._reader.at_eof()

    async def ask(self, model: str) -> tuple[int, Mapping[str, Any]]:
        """Status and body of the answer; status 0 when the connection ended before it."""
        inputs = [{"name": "x", "datatype": "FP32", "shape": list(_X.shape), "data": _X.ravel().tolist()}]
        body = json.dumps({"inputs": inputs, "parameters": {"timeout": int(_TIMEOUT_SECONDS * 1e6)}}).encode()
        head = f"POST /v2/models/{model}/infer HTTP/1.1\r\nHost: simulated\r\nContent-Length: {len(body)}\r\n\r\n"
        self.stream.write(head.encode() + body)
        try:
            lines = (await self._reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            fields = dict(line.lower().split(": ", 1) for line in lines[1:] if line)
            content = await self._reader.readexactly(int(fields["content-length"]))
        except (asyncio.IncompleteReadError, ConnectionError):
            return 0, {}
        return int(lines[0].split()[1]), json.loads(content)


_OPTIONS = CompileOptions(optimize=False, net_type="dag", num_workers=2, replicas=1)


def _net() -> NetDef:
    """Two branches and what joins them."""
    return NetDef(
        name="simulated",
        op=[
            op("MatMul", ["x", "w"], ["h"], trans_b=1),
            op("Relu", ["h"], ["left"]),
            op("Sigmoid", ["h"], ["right"]),
            op("Add", ["left", "right"], ["y"]),
        ],
        external_input=["x", "w"],
        external_output=["y"],
    )


def _model(weights: Any = _WEIGHTS) -> Model:
    inputs = {"x": InputInfo(dtypes.FLOAT32, (None, 3))}
    return Model("simulated", _net(), parameters={"w": weights}, inputs=inputs, outputs=("y",))


def _save_model(folder: Path) -> None:
    folder.mkdir()
    fill = op("GivenTensorFill", [], ["w"], shape=list(_WEIGHTS.shape), values=_WEIGHTS.ravel().tolist())
    save_net(NetDef(name="init", op=[fill]), folder / "init_net.pb")
    save_net(_net(), folder / "predict_net.pb")


def _right_bytes() -> bytes:
    """The answer of SimpleNet, outside of the simulation."""
    with compile(_model(), optimize=False, net_type="simple") as executor:
        return executor.run({"x": _X})["y"].tobytes()
