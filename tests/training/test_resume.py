"""A run that stops and goes on from its checkpoint gives the bytes of one that did not stop."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dagexec import NetDef, Workspace
from dagexec.scheduler.nets.net import BaseNet
from dagexec.training.checkpoint import latest_checkpoint, load_checkpoint, save_checkpoint
from dagexec.training.data import BatchLoader
from tests.ops.running import operator_def

SAMPLES = {"x": np.random.default_rng(5).standard_normal((50, 3)).astype(np.float32)}
BLOBS = ["w", "velocity", "n"]


def jitter(sample: dict[str, np.ndarray], random: np.random.Generator) -> dict[str, np.ndarray]:
    return {"x": sample["x"] + random.standard_normal(3).astype(np.float32)}


def a_model(folder: Path) -> tuple[Workspace, NetDef]:
    """velocity += tanh(w * x); w += velocity; n += 1, and a Checkpoint of the three every 4 steps"""
    workspace = Workspace(root_folder=folder)
    workspace.feed_blob("w", np.full((8, 3), 0.1, np.float32))
    workspace.feed_blob("velocity", np.zeros((8, 3), np.float32))
    workspace.feed_blob("n", np.zeros(1, np.int64))
    workspace.feed_blob("one", np.ones(1, np.int64))
    ops = [
        operator_def("Mul", ["w", "x"], ["wx"]),
        operator_def("Tanh", ["wx"], ["t"]),
        operator_def("Add", ["velocity", "t"], ["velocity"]),
        operator_def("Add", ["w", "velocity"], ["w"]),
        operator_def("Add", ["n", "one"], ["n"]),
        operator_def("Checkpoint", ["n", "w", "velocity"], [], db="at-%d", every=4),
    ]
    return workspace, NetDef(name="train", op=ops)


def train(workspace: Workspace, net: NetDef, start: int, stop: int, kind: tuple[str, int | None], threads: int) -> None:
    with BatchLoader(SAMPLES, 8, seed=2, start_step=start, threads=threads, transform=jitter) as loader:
        workspace.feed_blob("x", np.zeros((8, 3), np.float32))
        made = workspace.create_net(net, *kind)
        assert isinstance(made, BaseNet)
        with made:
            for _ in range(start, stop):
                workspace.feed_blob("x", loader.take()["x"])
                made.run()


@pytest.mark.parametrize("kind", [("simple", None), ("dag", 2), ("async_dag", 2)])
@pytest.mark.parametrize("db_type", ["minidb", "lmdb"])
def test_resuming_gives_the_bytes_of_an_uninterrupted_run(
    kind: tuple[str, int | None], db_type: str, tmp_path: Path
) -> None:
    whole, net = a_model(tmp_path)
    train(whole, net, 0, 15, ("simple", None), 1)
    expected = {name: whole.fetch_blob(name).tobytes() for name in BLOBS}

    first, net = a_model(tmp_path)
    train(first, net, 0, 7, kind, 3)
    save_checkpoint(first, BLOBS, tmp_path / "checkpoints", 7, db_type=db_type)
    train(first, NetDef(name="on", op=net.op), 7, 9, kind, 1)  # lost: what comes after the checkpoint

    resumed, net = a_model(tmp_path)
    newest = latest_checkpoint(tmp_path / "checkpoints")
    assert newest is not None
    assert load_checkpoint(resumed, newest).step == 7
    train(resumed, net, 7, 15, kind, 2)
    assert {name: resumed.fetch_blob(name).tobytes() for name in BLOBS} == expected

    from_operator, net = a_model(tmp_path)
    load = operator_def("Load", [], BLOBS, db="at-8")
    from_operator.run_operator_once(load)
    train(from_operator, net, 8, 15, kind, 2)
    assert {name: from_operator.fetch_blob(name).tobytes() for name in BLOBS} == expected
