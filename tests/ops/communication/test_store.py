"""Stores: what one workspace sets others get; counters; waits; and Redis by a client that is not the real one."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from dagexec import NetDef, Workspace
from dagexec.errors import DagexecError, OperatorError, StorageError
from dagexec.ops.families.communication.store import FileStore, RedisStore
from dagexec.platform.threads import threads
from tests.ops.running import operator_def


def test_workspaces_find_each_others_blobs_and_count_together(tmp_path: Path) -> None:
    first, second = Workspace(allow_io=True), Workspace(allow_io=True)
    create = operator_def("FileStoreHandlerCreate", [], "store", path=str(tmp_path / "of" / "all"), prefix="job/1")
    for workspace in (first, second):
        workspace.run_operator_once(create)
    net = NetDef(name="getting", op=[
        operator_def("StoreWait", "store", [], blob_names=["a", "b"]),
        operator_def("StoreGet", "store", "x", blob_name="a"),
        operator_def("StoreGet", "store", "b"),
        operator_def("StoreAdd", "store", "count", blob_name="n", add_value=5),
    ])  # fmt: skip
    waiting = threads().start(lambda: second.run_net_once(net), "waiting")
    values = {"first": np.arange(6, dtype=np.int64).reshape(2, 3), "b": np.array([b"x", b"yz"], object)}
    for name, array in values.items():
        first.feed_blob(name, array)
    first.run_operator_once(operator_def("StoreAdd", "store", "count", blob_name="n", add_value=-2))
    first.run_operator_once(operator_def("StoreSet", ["store", "first"], [], blob_name="a"))
    first.run_operator_once(operator_def("StoreSet", ["store", "b"], []))
    waiting.join()
    np.testing.assert_array_equal(second.fetch_blob("x"), values["first"])
    np.testing.assert_array_equal(second.fetch_blob("b"), values["b"])
    assert (first.fetch_blob("count").tolist(), second.fetch_blob("count").tolist()) == ([-2], [3])
    first.run_operator_once(operator_def("CreateCommonWorld", "store", "world", size=1, rank=0))
    with pytest.raises(OperatorError, match="key 'b' holds no number"):
        first.run_operator_once(operator_def("StoreAdd", "store", "count", blob_name="b"))
    first.feed_blob("names", np.array([b"a"], object))
    first.run_operator_once(operator_def("StoreWait", ["store", "names"], []))


def test_a_key_that_nobody_sets_is_an_error_in_the_end(tmp_path: Path) -> None:
    store = FileStore(tmp_path, timeout=0.0)
    with pytest.raises(StorageError, match=r"nobody has set key '\.\./a'; waited 0 s"):
        store.get("../a")
    store.set("../a", b"1")
    assert store.get("../a") == b"1"
    assert [path.parent for path in tmp_path.iterdir()] == [tmp_path]


class Client:
    """What a RedisStore calls of a client."""

    def __init__(self, host: str, port: int) -> None:
        if port == 1:
            raise ConnectionError("refused")
        self.values: dict[str, bytes] = {}

    def ping(self) -> None:
        pass

    def set(self, key: str, value: bytes) -> None:
        self.values[key] = value

    def get(self, key: str) -> bytes | None:
        return self.values.get(key)

    def incrby(self, key: str, value: int) -> int:
        self.values[key] = b"%d" % (int(self.values.get(key, b"0")) + value)
        return int(self.values[key])


def test_redis_is_asked_through_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(DagexecError, match="pip install redis"):
        RedisStore("localhost", 6379)
    module = ModuleType("redis")
    module.Redis, module.RedisError = Client, ConnectionError  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "redis", module)
    workspace = Workspace(allow_io=True)
    workspace.run_operator_once(operator_def("RedisStoreHandlerCreate", [], "store", prefix="p/"))
    workspace.feed_blob("x", np.array([1.5]))
    workspace.run_operator_once(operator_def("StoreSet", ["store", "x"], []))
    workspace.run_operator_once(operator_def("StoreGet", "store", "y", blob_name="x"))
    workspace.run_operator_once(operator_def("StoreAdd", "store", "n", blob_name="n", add_value=4))
    assert workspace.fetch_blob("y").tolist() == [1.5]
    assert workspace.fetch_blob("n").tolist() == [4]
    assert set(workspace.get_blob("store").get(RedisStore)._client.values) == {"p/x", "p/n"}
