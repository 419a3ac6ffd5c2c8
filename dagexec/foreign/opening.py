"""Opening sessions: onnxruntime where it is installed and can run a message, else `onnx.reference`.

Operators of one message share its session, those of all replicas of a model among them.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from dagexec.errors import UnsupportedOperatorError
from dagexec.foreign.onnx_runtime import OnnxRuntimeSession
from dagexec.foreign.reference import ReferenceSession
from dagexec.foreign.session import ForeignSession
from dagexec.platform.extras import install_command
from dagexec.platform.forking import ProcessLock

if TYPE_CHECKING:
    import onnx

_Key = tuple[bytes, int, int]

_opened: WeakValueDictionary[_Key, ForeignSession] = WeakValueDictionary()
_latest: deque[ForeignSession] = deque(maxlen=16)
"""Those that loading a model opened live until its operators take them."""
_turn = ProcessLock()
_MAX_REASON = 300  # characters


def open_session(model: onnx.ModelProto, owner: str, threads: int = 1) -> ForeignSession:
    """A session for a complete message, on so many threads: one that is open, or a new one.

    Raises UnsupportedOperatorError, naming the `owner`, with the reasons of both runtimes when neither can run it.
    """
    key = (model.SerializeToString(deterministic=True), threads, os.getpid())
    with _turn.own:
        session = _opened.get(key)
        if session is None:
            session = _opened[key] = _new_session(model, owner, threads)
            _latest.append(session)
        return session


def _new_session(model: onnx.ModelProto, owner: str, threads: int) -> ForeignSession:
    reasons = []
    ways: dict[str, Callable[[], ForeignSession]] = {
        OnnxRuntimeSession.runtime: partial(OnnxRuntimeSession, model, threads),
        ReferenceSession.runtime: partial(ReferenceSession, model),
    }
    for runtime, make in ways.items():
        try:
            return make()
        except ImportError:
            reasons.append(f"{runtime} is not installed: {install_command('onnxruntime')}")
        except Exception as error:  # each runtime has its own
            reasons.append(f"{runtime}: {' '.join(str(error).split())[:_MAX_REASON]}")
    raise UnsupportedOperatorError(f"{owner}: {'; '.join(reasons)}")
