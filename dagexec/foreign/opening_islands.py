"""Opening islands: sessions that operators share where the runtime allows it, and errors that name the operator.

In a child made by `os.fork` the threads of a session are gone, so that operators open another there.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from weakref import WeakValueDictionary

from dagexec.errors import UnsupportedOperatorError
from dagexec.foreign.island import IslandModel, IslandRuntime, IslandSession
from dagexec.foreign.onnx_runtime_island import OnnxRuntimeIsland
from dagexec.foreign.openvino import OpenVinoIsland
from dagexec.platform.extras import install_command
from dagexec.platform.forking import ProcessLock

_Key = tuple[bytes, tuple[int, ...], int, bool, int]

_MAKERS: dict[IslandRuntime, Callable[[IslandModel], IslandSession]] = {
    "onnxruntime": OnnxRuntimeIsland,
    "openvino": OpenVinoIsland,
}
_opened: WeakValueDictionary[_Key, IslandSession] = WeakValueDictionary()
_turn = ProcessLock()
_MAX_REASON = 500  # characters


def open_island(runtime: IslandRuntime, model: IslandModel, owner: str, blobs: Sequence[str]) -> IslandSession:
    """A session for `model`: one of onnxruntime's that is open, or a new one.

    Raises UnsupportedOperatorError, naming the `owner` and the `blobs` that it was to compute, with the reason where
    the runtime is not installed or cannot run it.
    """
    if runtime != "onnxruntime":
        return _made(runtime, model, owner, blobs)
    addresses = tuple(array.ctypes.data for array in model.constants.values())
    key = (
        model.message.SerializeToString(deterministic=True),
        addresses,
        model.threads,
        model.specialized,
        os.getpid(),
    )
    with _turn.own:
        session = _opened.get(key)
        if session is None:
            session = _opened[key] = _made(runtime, model, owner, blobs)
        return session


def _made(runtime: IslandRuntime, model: IslandModel, owner: str, blobs: Sequence[str]) -> IslandSession:
    what = f"{owner}: {runtime} cannot compute {', '.join(map(repr, blobs[:4]))}"
    try:
        return _MAKERS[runtime](model)
    except ImportError as error:
        raise UnsupportedOperatorError(f"{what}: it is not installed: {install_command(runtime)}") from error
    except Exception as error:  # each runtime has its own
        reason = " ".join(str(error).split())[:_MAX_REASON]
        raise UnsupportedOperatorError(f"{what}: {type(error).__name__}: {reason}") from error
