"""How do I serve a model over HTTP?

client -+               +- /predict --- run_async ---> replicas      queue full: 503; client gone: the run is cancelled
client -+--- uvicorn ---+
client -+               +- /statistics                               start: warm; shutdown: drained

The service is `make_app`; the rest drives it with a real client over a real socket, and ends.
"""

from __future__ import annotations

import asyncio
import io
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict

import anyio
import httpx
import numpy as np
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

import dagexec
from dagexec.errors import ClosedError, DagexecError, FeedError, QueueFullError, RunTimeoutError

NPY = "application/x-npy"


def make_app(model: str, replicas: int, max_queued: int, timeout: float) -> Starlette:
    """A service of one model: POST an array to /predict, as JSON or as the bytes of an .npy file."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        app.state.executor = executor = dagexec.compile(
            model, net_type="async_dag", replicas=replicas, max_queued=max_queued, when_full="reject", warm_start=True
        )
        try:
            yield
        finally:
            await executor.drain_async(timeout=10)

    async def predict(request: Request) -> Response:
        executor: dagexec.Executor = request.app.state.executor
        [name], [output] = executor.inputs, executor.outputs
        body = await request.body()
        as_bytes = request.headers.get("content-type") == NPY
        try:
            if as_bytes:
                array = np.lib.format.read_array(io.BytesIO(body), allow_pickle=False)
            else:
                array = np.asarray((await request.json())[name], np.float32)
        except (ValueError, TypeError, KeyError, EOFError) as error:
            return JSONResponse({"error": f"the body is no array for {name!r}: {error}"}, status_code=400)
        answer: Response = Response(status_code=499)  # for a client that is gone
        async with anyio.create_task_group() as tasks:

            async def cancel_when_the_client_leaves() -> None:
                while (await request.receive())["type"] != "http.disconnect":
                    continue
                tasks.cancel_scope.cancel()

            tasks.start_soon(cancel_when_the_client_leaves)
            try:
                result = (await executor.run_async({name: array}, timeout=timeout))[output]
            except DagexecError as error:
                answer = refusal(error)
            else:
                answer = npy(result) if as_bytes else JSONResponse({output: result.tolist()})
            tasks.cancel_scope.cancel()
        return answer

    async def statistics(request: Request) -> Response:
        return JSONResponse(asdict(request.app.state.executor.statistics()))

    routes = [Route("/predict", predict, methods=["POST"]), Route("/statistics", statistics)]
    return Starlette(routes=routes, lifespan=lifespan)


def npy(array: np.ndarray) -> Response:
    """The array as the bytes of an .npy file."""
    return Response(npy_bytes(array), media_type=NPY)


def npy_bytes(array: np.ndarray) -> bytes:
    """What `numpy.save` writes."""
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def refusal(error: DagexecError) -> Response:
    """The status that says whose fault it is and whether to try again."""
    if isinstance(error, QueueFullError | ClosedError):
        return JSONResponse({"error": str(error)}, status_code=503, headers={"Retry-After": "1"})
    status = 422 if isinstance(error, FeedError) else 504 if isinstance(error, RunTimeoutError) else 500
    return JSONResponse({"error": str(error)}, status_code=status)


class Server(uvicorn.Server):
    """A uvicorn server that says on which port it listens."""

    def __init__(self, app: Starlette) -> None:
        super().__init__(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning"))
        self.listening = asyncio.Event()

    async def startup(self, sockets: object = None) -> None:
        """Start, then say so."""
        await super().startup(sockets)  # type: ignore[arg-type]
        self.listening.set()

    @property
    def url(self) -> str:
        """Where clients find it."""
        return f"http://127.0.0.1:{self.servers[0].sockets[0].getsockname()[1]}"


async def drive(client: httpx.AsyncClient, expected: np.ndarray, image: np.ndarray) -> None:
    """Ask for everything the service does."""
    body = npy_bytes(image)

    async def post() -> httpx.Response:
        return await client.post("/predict", content=body, headers={"content-type": NPY})

    answer = await post()
    print("npy: same bytes as here:", np.load(io.BytesIO(answer.content)).tobytes() == expected.tobytes())
    answer = await client.post("/predict", json={"data": image.tolist()})
    print("JSON: same numbers:", np.array_equal(np.float32(answer.json()["softmax"]), expected))
    answer = await client.post("/predict", content=npy_bytes(image[0]), headers={"content-type": NPY})
    print(f"wrong shape: {answer.status_code}: {answer.json()['error']}")
    answer = await client.post("/predict", content=b"PK\x03\x04", headers={"content-type": NPY})
    print(f"no array: {answer.status_code}")

    answers = await asyncio.gather(*(post() for _ in range(64)))
    codes = Counter(answer.status_code for answer in answers)
    again = {answer.headers["Retry-After"] for answer in answers if answer.status_code == 503}
    print(f"64 at once: served and refused: {set(codes) == {200, 503}}; try again after {again} s")

    cancelled = 0
    while not cancelled:  # it may have left before its request arrived
        others = [asyncio.ensure_future(post()) for _ in range(6)]
        impatient = asyncio.ensure_future(post())
        await in_service(client, at_least=4, unless=impatient)
        impatient.cancel()
        await asyncio.gather(*others, impatient, return_exceptions=True)
        cancelled = (await in_service(client, at_least=0))["cancelled"]
    print(f"a client that left: {cancelled} run cancelled, no run left behind")


async def in_service(
    client: httpx.AsyncClient, at_least: int, unless: asyncio.Future[httpx.Response] | None = None
) -> dict[str, int]:
    """The statistics, once so many requests are there, or `unless` is answered; with 0, once none is there."""
    while True:
        moment: dict[str, int] = (await client.get("/statistics")).json()
        there = moment["running"] + moment["queued"]
        if there >= at_least > 0 or there == at_least or (unless is not None and unless.done()):
            return moment


async def main(model: str = "zoo:squeezenet") -> None:
    """Serve, ask, shut down."""
    image = np.random.default_rng(0).standard_normal((1, 3, 224, 224), np.float32)
    with dagexec.compile(model) as executor:
        expected = executor.run({"data": image})["softmax"]
    server = Server(make_app(model, replicas=2, max_queued=8, timeout=30))
    serving = asyncio.create_task(server.serve())
    await server.listening.wait()
    async with httpx.AsyncClient(base_url=server.url, timeout=60, limits=httpx.Limits(max_connections=100)) as client:
        await drive(client, expected, image)
    server.should_exit = True
    await serving
    print("drained and closed")


if __name__ == "__main__":
    asyncio.run(main())
