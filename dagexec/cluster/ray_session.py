"""The cluster: an existing one, or a local one that is started for the first deployment and ends with the last."""

from __future__ import annotations

import os
import shutil
import tempfile
from typing import Any

import ray

from dagexec.errors import ReplicaError
from dagexec.platform.locks import new_lock
from dagexec.platform.processor import available_cores

OBJECT_STORE_BYTES = 200 << 20
"""Memory of the object store of a local cluster, beyond the parameters."""

_untyped: Any = ray  # some of its functions have no types
_lock = new_lock()
_users = 0
_folder: str | None = None


def enter(address: str | None, cpus: int, store_bytes: int) -> None:
    """Connect this process, unless it is connected already; `leave` once for each call. `cpus` are needed.

    With None and without RAY_ADDRESS, a local cluster is started, with a dashboard, usage reports and logs to the
    console all off, and its files in a folder that goes with it. Raises ReplicaError when that fails, and where it was
    started for another deployment and has no room for this one, as it does not grow.
    """
    global _users, _folder
    with _lock:
        if not ray.is_initialized():
            _users = 0
            settings: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
            address = address or os.environ.get("RAY_ADDRESS")
            if address is None:
                _folder = tempfile.mkdtemp(prefix="dagexec-ray-")
                os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
                settings |= {
                    "num_cpus": max(cpus, available_cores()),
                    "include_dashboard": False,
                    "object_store_memory": store_bytes,
                    "_temp_dir": _folder,
                }
            try:
                ray.init(address or "local", **settings)
            except Exception as error:
                _remove_folder()
                raise ReplicaError(f"Ray cannot be reached or started: {error}") from error
            _users = 1
        elif _users:
            if _folder is not None and _free_cpus() < cpus:
                raise ReplicaError(
                    f"the local cluster was started for another deployment, and {described()}; {cpus} are needed: call "
                    "ray.init(num_cpus=...) before the first one"
                )
            _users += 1


def leave() -> None:
    """Disconnect with the last user, where `enter` connected; a local cluster ends."""
    global _users
    with _lock:
        if _users:
            _users -= 1
            if not _users:
                ray.shutdown()
                _remove_folder()


def described() -> str:
    """What the cluster has, for messages."""
    whole = float(_untyped.cluster_resources().get("CPU", 0))
    return f"the cluster has {whole:g} CPUs, of which {_free_cpus():g} are free"


def _free_cpus() -> float:
    return float(_untyped.available_resources().get("CPU", 0))


def _remove_folder() -> None:
    global _folder
    if _folder is not None:
        shutil.rmtree(_folder, ignore_errors=True)
        _folder = None
