"""How do clients reach a model, and a pipeline of two, behind the Open Inference Protocol?

serve.toml -> Server (a thread with an event loop) <- HTTP <- clients: JSON, as `curl` and `tritonclient` send it

The server is what `dagexec serve --config serve.toml` starts; this program asks it, loads a model again, and drains it.
"""

import asyncio
import json
import tempfile
import threading
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np

import dagexec
from dagexec.server.config import read_config
from dagexec.server.run import Server

CONFIG = """
[server]
port = 0                            # any that is free
control = true                      # a client may load models again
python_steps = true                 # this file may name functions: who writes it decides what the server runs

[models.lenet]
source = "zoo:lenet"
timeout = 10.0

[[pipelines]]
name = "both"
outputs = { mean = "mean" }
[pipelines.inputs]
image = "float32[1, 1, 28, 28]"
[pipelines.stages]
digits = { model = "zoo:lenet", inputs = "image" }
again = { model = "zoo:lenet", inputs = "image" }
mean = { python = "steps.py:mean", inputs = ["digits", "again"], outputs = "float32[1, 10]" }
"""
STEPS = """
def mean(first, second):
    return (first + second) / 2
"""


def ask(url: str, body: dict[str, Any] | None = None) -> Any:
    """The answer of the server; to a GET without a body."""
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(url, data), timeout=60) as answer:
        content = answer.read()
    return json.loads(content) if content else None


def infer(url: str, model: str, name: str, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The first output of a model for its only input."""
    given = {"name": name, "datatype": "FP32", "shape": array.shape, "data": array.ravel().tolist()}
    output = ask(f"{url}/v2/models/{model}/infer", {"inputs": [given]})["outputs"][0]
    return np.array(output["data"], np.float32).reshape(output["shape"])


def use(url: str) -> None:
    """What a client does."""
    image = np.random.default_rng(0).standard_normal((1, 1, 28, 28)).astype(np.float32)
    print("ready:", [row["name"] for row in ask(f"{url}/v2/repository/index", {"ready": True})])
    print("takes", ask(f"{url}/v2/models/both")["inputs"])
    one, both = infer(url, "lenet", "data", image), infer(url, "both", "image", image)
    with dagexec.compile("zoo:lenet") as executor:
        expected = executor.run({"data": image})["softmax"]
    print(
        "the same numbers from the model, the pipeline and here:", (one == expected).all() and (both == expected).all()
    )
    ask(f"{url}/v2/repository/models/lenet/load", {})
    print("loaded again, the same:", (infer(url, "lenet", "data", image) == expected).all())


async def serve(folder: Path) -> None:
    """A server, and a client on a thread."""
    (folder / "serve.toml").write_text(CONFIG)
    (folder / "steps.py").write_text(STEPS)
    server = Server(read_config(folder / "serve.toml"))
    loop, listening = asyncio.get_running_loop(), threading.Event()

    def client() -> None:
        try:
            listening.wait(60)
            while any(row["state"] != "READY" for row in ask(f"{server.url}/v2/repository/index", {})):
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
