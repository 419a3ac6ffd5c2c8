"""Peers of a comparison: the model on onnxruntime or OpenVINO, in this process and in the same rounds.

Each computes in float32 with as many threads as the most workers that are compared, and otherwise with its defaults.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dagexec.core.model import Model
from dagexec.errors import DagexecError, SettingError
from dagexec.executor.source.loading import ModelSource
from dagexec.export import to_onnx
from dagexec.platform.extras import install_command

Array = npt.NDArray[Any]
PeerRun = Callable[[], Sequence[Array]]
"""Gives the model's outputs, in order."""


def peers(
    names: Sequence[str], source: ModelSource, model: Model, feeds: Mapping[str, Array], threads: int
) -> dict[str, PeerRun]:
    """A run of `model` on each peer: of the ONNX file that `source` names, or else of the model exported to ONNX.

    Raises SettingError for an unknown peer, and DagexecError where it is not installed or refuses the model.
    """
    unknown = sorted(set(names) - set(_LOADERS))
    if unknown:
        raise SettingError(f"unknown peer {unknown[0]!r}: expected {' or '.join(_LOADERS)}")
    if not names:
        return {}
    is_file = isinstance(source, str | os.PathLike) and os.fspath(source).endswith(".onnx")
    shapes = {name: array.shape for name, array in feeds.items()}
    file = os.fspath(source) if is_file else to_onnx(model, shapes=shapes).SerializeToString()  # type: ignore[arg-type]
    runs = {}
    for name in names:
        try:
            runs[name] = _LOADERS[name](file, feeds, threads)
        except ImportError:
            raise DagexecError(f"{name} is not installed; install it with: {install_command(name)}") from None
        except Exception as error:
            raise DagexecError(f"{name} refuses model {model.name!r}: {type(error).__name__}: {error}") from error
    return runs


def _onnxruntime(file: str | bytes, feeds: Mapping[str, Array], threads: int) -> PeerRun:
    runtime = importlib.import_module("onnxruntime")
    runtime.set_default_logger_severity(3)
    settings = runtime.SessionOptions()
    settings.intra_op_num_threads = threads
    session = runtime.InferenceSession(file, settings, providers=["CPUExecutionProvider"])
    names = {argument.name for argument in session.get_inputs()}
    fed = {name: array for name, array in feeds.items() if name in names}
    return lambda: session.run(None, fed)


def _openvino(file: str | bytes, feeds: Mapping[str, Array], threads: int) -> PeerRun:
    openvino = importlib.import_module("openvino")
    core = openvino.Core()
    model = core.read_model(file)
    inputs = {name: info for info in model.inputs for name in info.names if name in feeds}
    if model.is_dynamic():
        model.reshape({name: list(feeds[name].shape) for name in inputs})
    settings = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY"}
    request = core.compile_model(model, "CPU", settings).create_infer_request()
    arrays = {name: np.ascontiguousarray(feeds[name]) for name in inputs}

    def run() -> Sequence[Array]:
        request.infer(arrays)
        return [np.asarray(info.data) for info in request.output_tensors]

    return run


_LOADERS: Mapping[str, Callable[[str | bytes, Mapping[str, Array], int], PeerRun]] = {
    "onnxruntime": _onnxruntime,
    "openvino": _openvino,
}
