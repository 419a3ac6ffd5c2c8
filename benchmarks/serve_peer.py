"""The rival of `benchmarks/serve.py`: onnxruntime behind Starlette, as an application would write it.

    python serve_peer.py model.onnx [--threads 1]

It speaks what the load of the benchmark needs of the Open Inference Protocol's binary form: one input, one output. A
request runs in a thread of anyio's pool (`to_thread`), so that the event loop goes on. It prints its port first.
"""

from __future__ import annotations

import argparse
import json
import math
import socket

import anyio.to_thread
import numpy as np
import onnxruntime
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

_LENGTH = "inference-header-content-length"


def application(file: str, threads: int) -> Starlette:
    """Serve one model; with 0 threads onnxruntime chooses."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    [given], [wanted] = session.get_inputs(), session.get_outputs()

    async def infer(request: Request) -> Response:
        body = await request.body()
        length = int(request.headers[_LENGTH])
        header = json.loads(body[:length])
        shape = header["inputs"][0]["shape"]
        values = np.frombuffer(body, np.float32, math.prod(shape), length).reshape(shape)
        [result] = await anyio.to_thread.run_sync(session.run, [wanted.name], {given.name: values})
        parameters = {"binary_data_size": result.nbytes}
        output = {"name": wanted.name, "datatype": "FP32", "shape": result.shape, "parameters": parameters}
        answer = json.dumps({"model_name": "model", "model_version": "1", "outputs": [output]}).encode()
        return Response(
            answer + result.tobytes(), headers={_LENGTH: str(len(answer))}, media_type="application/octet-stream"
        )

    return Starlette(routes=[Route("/v2/models/model/infer", infer, methods=["POST"])])


def main() -> None:
    """Serve until the process is ended."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=0)
    options = parser.parse_args()
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as listener:
        print(listener.getsockname()[1], flush=True)
        server = uvicorn.Server(
            uvicorn.Config(application(options.model, options.threads), log_level="warning", access_log=False)
        )
        server.run(sockets=[listener])


if __name__ == "__main__":
    main()
