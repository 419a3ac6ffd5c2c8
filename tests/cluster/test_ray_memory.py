"""What replicas share: the parameters of a node, in Ray's object store, and what is left when a deployment ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

import dagexec
from dagexec.cluster import Deployment, deploy
from dagexec.cluster.message import packed, unpacked
from dagexec.core.dtypes import INT64
from dagexec.platform.threads import ThreadWait
from tests.cluster.test_ray_failures import SECONDS, alive, free_store, processes, until

pytestmark = pytest.mark.ray

MB = 1 << 20
ROWS, COLUMNS = 1 << 14, 1 << 10
TABLE_BYTES = ROWS * COLUMNS * 4  # 64 MB


def embedding() -> dagexec.Model:
    """Rows of a table that no kernel packs."""
    table = np.random.default_rng(0).standard_normal((ROWS, COLUMNS), np.float32)
    found = dagexec.op("Gather", ["table", "ids"], ["rows"])
    summed = dagexec.op("ReduceSum", ["rows"], ["sums"], axes=[0], keepdims=0)
    net = dagexec.NetDef(name="embedding", op=[found, summed])
    ids = dagexec.InputInfo(INT64, (None,))
    return dagexec.Model("embedding", net, parameters={"table": table}, inputs={"ids": ids}, outputs=("rows", "sums"))


def memory(process: int) -> dict[str, int]:
    """Bytes of a process by kind: what it has alone, its share of all, and what is there."""
    lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()[1:]
    found = {name.rstrip(":"): int(value) << 10 for name, value, *_ in map(str.split, lines)}
    return {
        "private": found["Private_Clean"] + found["Private_Dirty"],
        "proportional": found["Pss"],
        "resident": found["Rss"],
    }


def ask_all(deployment: Deployment) -> None:
    """Have each replica read its whole table."""
    parts = np.split(np.arange(ROWS), 16)
    links = deployment._dispatcher.read(lambda state, links: list(links.values()))
    for link in links:
        for ids in parts:
            wait = ThreadWait()
            link.run({"ids": ids}, ("sums",), 0, None, lambda answer: wait.notify())  # noqa: B023 - it is waited for
            assert wait.wait(SECONDS)


def test_replicas_of_a_node_have_one_copy_of_the_parameters(cluster: None) -> None:
    """Beyond what a process has without them, four replicas have together what one has, and alone next to nothing."""
    model = embedding()
    with dagexec.compile(model) as executor:
        expected = executor.run({"ids": np.array([3, 5])})["rows"].tobytes()
    with deploy("zoo:lenet") as deployment:
        [bare] = map(memory, processes(deployment))
    for replicas in (1, 4):
        with deploy(model, replicas=replicas) as deployment:
            ask_all(deployment)
            assert deployment.run({"ids": np.array([3, 5])})["rows"].tobytes() == expected
            found = [memory(process) for process in processes(deployment)]
        print(replicas, [{kind: value // MB for kind, value in one.items()} for one in (bare, *found)])
        for one in found:
            assert one["resident"] > bare["resident"] + 0.9 * TABLE_BYTES  # it was read
            assert one["private"] < bare["private"] + 0.3 * TABLE_BYTES  # other code, and room for 4 MB of rows


class Looking:
    """An actor that tells where the array is that it was sent."""

    async def run(self, written: bytes, large: dict[str, np.ndarray] | None = None) -> tuple[bool, int, str]:
        arrays, _ = unpacked(written, large)
        address = arrays["x"].__array_interface__["data"][0]
        for line in Path("/proc/self/maps").read_text().splitlines():
            bounds, *_, name = line.split(maxsplit=5)
            first, last = (int(one, 16) for one in bounds.split("-"))
            if first <= address < last:
                return arrays["x"].flags.writeable, address % 64, name
        raise AssertionError("it is nowhere")


def test_large_inputs_are_read_where_the_store_has_them(cluster: None) -> None:
    import ray

    actor = ray.remote(Looking).remote()
    _, _, small_place = ray.get(actor.run.remote(packed({"x": np.ones(10, np.float32)})[0]))
    writeable, aligned, place = ray.get(actor.run.remote(*packed({"x": np.ones(MB, np.float32)})))
    ray.kill(actor)
    assert "plasma" in place
    assert "plasma" not in small_place
    assert (writeable, aligned) == (False, 0)


def test_the_store_is_empty_after_many_large_requests(cluster: None) -> None:
    before = free_store()
    with deploy(embedding(), replicas=2) as deployment:
        with_parameters = free_store()
        for _ in range(20):
            deployment.run({"ids": np.arange(1024)}, outputs=["rows"])
        until(lambda: free_store() >= with_parameters)
        ended = processes(deployment)
    until(lambda: free_store() >= before)
    until(lambda: not any(map(alive, ended)))


LOCAL = """
    import json, os, sys
    import dagexec.cluster
    from dagexec.cluster import ray_session
    from dagexec.testing import random_feeds

    if __name__ == "__main__":
        with dagexec.cluster.deploy("zoo:lenet") as one, dagexec.cluster.deploy("zoo:lenet") as other:
            feeds = random_feeds(one.model, seed=0)
            one.run(feeds), other.run(feeds)
            folder = ray_session._folder
            import ray
            dashboard = ray._private.worker.global_worker.node.address_info.get("webui_url")
            children = os.popen(f"pgrep -f {folder}").read().split()
        import ray
        print(json.dumps([folder, dashboard, children, ray.is_initialized()]))
        try:
            with dagexec.cluster.deploy("zoo:lenet"), dagexec.cluster.deploy("zoo:lenet", cores_per_replica=9):
                pass
        except dagexec.errors.ReplicaError as error:
            print(error)
"""


def test_a_local_cluster_ends_with_its_last_deployment_and_leaves_nothing(tmp_path: Path) -> None:
    program = tmp_path / "local.py"
    program.write_text(textwrap.dedent(LOCAL))
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    environment.pop("RAY_ADDRESS", None)
    shared = set(os.listdir("/dev/shm"))
    done = subprocess.run(
        [sys.executable, program],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    first, error = [line for line in done.stdout.splitlines() if "raylet" not in line]
    folder, dashboard, children, connected = json.loads(first)
    assert Path(folder).name.startswith("dagexec-ray-")
    assert not Path(folder).exists()
    assert not [name for name in set(os.listdir("/dev/shm")) - shared if "plasma" in name or "ray" in name]
    assert not dashboard
    assert children
    until(lambda: not any(alive(int(child)) for child in children))
    assert not connected
    assert "9 are needed" in error
