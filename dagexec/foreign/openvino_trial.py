"""Trials of OpenVINO in a process of its own, where it is known to end processes.

OpenVINO 2026.4 reads oneDNN's limit of the instruction set, and with one below what the processor has, some models end
the process in their first run (a segmentation fault). No error can be caught there, so such a model first runs in a
process that may end.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from base64 import b64encode

from dagexec.foreign.island import IslandModel, Shapes
from dagexec.platform.forking import without_fork

_LIMITS = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")
_NO_LIMITS = ("", "DEFAULT", "ALL")
_IN_TRIAL = "DAGEXEC_IN_OPENVINO_TRIAL"
_SECONDS = 300.0
_COMMAND = ["-m", "dagexec.foreign.openvino_child"]

_survived: dict[tuple[bytes, Shapes, bool], str] = {}
"""Why a trial failed, "" for one that did not."""


def may_crash() -> bool:
    """True where the instruction set is limited, but in a trial."""
    limits = [os.environ.get(name, "").upper() for name in _LIMITS]
    return _IN_TRIAL not in os.environ and any(limit not in _NO_LIMITS for limit in limits)


def survive(model: IslandModel, shapes: Shapes, *, is_static: bool) -> None:
    """Run the model in another process on inputs of `shapes`, compiled for those alone if `is_static`.

    Constants have made-up values there. Raises RuntimeError where that process ends early.
    """
    key = (model.message.SerializeToString(deterministic=True), shapes, is_static)
    if key not in _survived:
        _survived[key] = _failure(key, model)
    if _survived[key]:
        raise RuntimeError(_survived[key])


def _failure(key: tuple[bytes, Shapes, bool], model: IslandModel) -> str:
    if not sys.executable:
        return "the instruction set is limited, where OpenVINO may crash, and there is no interpreter to try that with"
    message, shapes, is_static = key
    told = {
        "message": b64encode(message).decode(),
        "constants": {name: (list(array.shape), array.dtype.str) for name, array in model.constants.items()},
        "shapes": shapes,
        "threads": model.threads,
        "is_static": is_static,
    }
    environment = {**os.environ, _IN_TRIAL: "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, *_COMMAND]
    with without_fork():
        try:
            done = subprocess.run(
                command, input=json.dumps(told), env=environment, capture_output=True, text=True, timeout=_SECONDS
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return f"it did not end within {_SECONDS:.0f} s in a process of its own"
    if done.returncode == 0:
        return ""
    limits = ", ".join(f"{name}={os.environ[name]}" for name in _LIMITS if name in os.environ)
    how = f"signal {-done.returncode}" if done.returncode < 0 else f"status {done.returncode}"
    last = " ".join(done.stderr.split()[-40:]) if done.returncode > 0 else ""
    return f"it ended a process of its own ({how}) that ran this with {limits} {last}".rstrip()
