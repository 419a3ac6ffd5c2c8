from __future__ import annotations

import logging
import os
import resource
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from dagexec import Workspace
from dagexec.core.device import Device
from dagexec.core.tensor import Tensor
from dagexec.errors import MissingBlobError, OutputError, StorageError
from dagexec.platform.disk import installed
from dagexec.storage.blob_file import write_blobs
from dagexec.stress.simulated_disk import DiskCall, Failure, SimulatedDisk
from dagexec.training.checkpoint import Checkpoint, checkpoints, latest_checkpoint, load_checkpoint, save_checkpoint

TYPES = ["minidb", "lmdb"]


def workspace_at(step: int) -> Workspace:
    workspace = Workspace()
    workspace.feed_blob("w", np.full((3, 4), step, np.float32))
    workspace.feed_blob("m", np.full(5, step, ml_dtypes.bfloat16))
    workspace.feed_blob("optimizer_iteration", np.array([step]))
    return workspace


BLOBS = ["w", "m", "optimizer_iteration"]


def save(folder: Path, step: int, db_type: str = "minidb", keep: int = 2) -> Path:
    return save_checkpoint(workspace_at(step), BLOBS, folder, step, db_type=db_type, keep=keep, extra={"seed": "7"})


def steps(folder: Path) -> list[int]:
    return [int(path.stem.removeprefix("step-")) for path in checkpoints(folder)]


def damage(path: Path, place: int = 200) -> None:
    file = path / "data.mdb" if path.is_dir() else path
    content = bytearray(file.read_bytes())
    content[place] ^= 4
    file.write_bytes(content)


@pytest.mark.parametrize("db_type", TYPES)
def test_a_checkpoint_brings_back_every_blob_its_step_and_what_was_to_be_remembered(
    db_type: str, tmp_path: Path
) -> None:
    path = save(tmp_path / "new" / "folder", 12, db_type)
    assert path == latest_checkpoint(tmp_path / "new" / "folder")
    workspace = workspace_at(0)
    array = workspace.get_blob("w").tensor().array
    found = load_checkpoint(workspace, path)
    assert (found.step, found.blobs, found.extra) == (12, tuple(BLOBS), {"seed": "7"})
    assert workspace.get_blob("w").tensor().array is array  # steps prepared on it stay right
    for name in BLOBS:
        assert workspace.fetch_blob(name).tobytes() == workspace_at(12).fetch_blob(name).tobytes()


def test_blobs_go_back_to_the_devices_where_they_are(tmp_path: Path) -> None:
    workspace = Workspace()
    workspace.feed_blob("w", np.arange(4.0), device="sim:1")
    path = save_checkpoint(workspace, ["w"], tmp_path, 1)
    workspace.feed_blob("w", np.zeros(4))
    load_checkpoint(workspace, path)
    assert workspace.get_blob("w").get(Tensor).device == Device("sim", 1)
    assert workspace.fetch_blob("w").tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("db_type", TYPES)
def test_the_newest_ones_are_kept(db_type: str, tmp_path: Path) -> None:
    for step in (5, 6, 7, 100):
        save(tmp_path, step, db_type, keep=3)
    assert steps(tmp_path) == [100, 7, 6]
    assert latest_checkpoint(tmp_path) == tmp_path / f"step-000000000100.{db_type}"
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize("db_type", TYPES)
@pytest.mark.parametrize("place", [0, 17, 200])
def test_a_damaged_checkpoint_is_replaced_when_its_step_comes_again(db_type: str, place: int, tmp_path: Path) -> None:
    damage(save(tmp_path, 3, db_type), place)
    assert latest_checkpoint(tmp_path) is None
    again = save(tmp_path, 3, db_type)
    assert latest_checkpoint(tmp_path) == again
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("db_type", TYPES)
def test_what_was_saved_just_now_stays_beside_checkpoints_of_later_steps(db_type: str, tmp_path: Path) -> None:
    for step in (100, 101, 7):
        path = save(tmp_path, step, db_type)
    assert load_checkpoint(Workspace(), path).step == 7
    assert steps(tmp_path) == [101, 100, 7]
    save(tmp_path, 102, db_type)
    assert steps(tmp_path) == [102, 101]


def test_an_old_one_that_cannot_be_removed_is_named_and_does_not_fail_the_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(call: DiskCall) -> Failure | None:
        return Failure(PermissionError(13, "Permission denied")) if call.path == old and call.kind == "unlink" else None

    old = save(tmp_path, 1)
    with installed(SimulatedDisk(tmp_path, refuse)):
        save(tmp_path, 2, keep=1)
    assert f"cannot remove an old checkpoint: {old}: Permission denied" in caplog.text
    assert steps(tmp_path) == [2, 1]


def test_a_folder_without_checkpoints_has_no_latest_one(tmp_path: Path) -> None:
    assert latest_checkpoint(tmp_path) is None
    assert latest_checkpoint(tmp_path / "none") is None
    (tmp_path / "step-abc.minidb").write_bytes(b"")
    (tmp_path / "step-1.txt").write_bytes(b"")
    assert checkpoints(tmp_path) == []


@pytest.mark.parametrize("db_type", TYPES)
@pytest.mark.parametrize("how", ["flipped", "cut", "emptied"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(
    db_type: str, how: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before, newest = save(tmp_path, 1, db_type), save(tmp_path, 2, db_type)
    file = newest / "data.mdb" if newest.is_dir() else newest
    if how == "flipped":
        damage(newest, file.stat().st_size // 2)
    else:
        os.truncate(file, file.stat().st_size * 2 // 3 if how == "cut" else 0)
    with caplog.at_level(logging.WARNING):
        assert latest_checkpoint(tmp_path) == before
    assert f"checkpoint skipped: {newest}" in caplog.text
    workspace = workspace_at(9)
    with pytest.raises(StorageError, match=str(newest)):
        load_checkpoint(workspace, newest)
    assert workspace.fetch_blob("w").tobytes() == workspace_at(9).fetch_blob("w").tobytes()
    assert newest.exists()


def test_a_damaged_checkpoint_does_not_count_among_those_to_keep(tmp_path: Path) -> None:
    save(tmp_path, 1)
    damage(save(tmp_path, 2))
    save(tmp_path, 3)
    assert steps(tmp_path) == [3, 2, 1]
    save(tmp_path, 4)
    assert steps(tmp_path) == [4, 3]


@pytest.mark.parametrize("db_type", TYPES)
def test_a_full_disk_leaves_the_last_good_state(db_type: str, tmp_path: Path) -> None:
    save(tmp_path, 1, db_type)
    workspace = workspace_at(2)
    workspace.feed_blob("w", np.zeros(1 << 16))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, before[1]))
    try:
        with pytest.raises(OutputError, match=rf"step-0+2\.{db_type}: cannot be written"):
            save_checkpoint(workspace, BLOBS, tmp_path, 2, db_type=db_type)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert os.listdir(tmp_path) == [f"step-000000000001.{db_type}"]
    assert load_checkpoint(workspace, tmp_path / f"step-000000000001.{db_type}").step == 1


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    write_blobs("minidb", tmp_path / "weights.minidb", [("w", np.zeros(1))])
    with pytest.raises(StorageError, match="not a checkpoint: record 'dagexec/checkpoint'"):
        load_checkpoint(Workspace(), tmp_path / "weights.minidb")
    with pytest.raises(StorageError, match="expected a name that ends with"):
        load_checkpoint(Workspace(), tmp_path / "weights")
    write_blobs(
        "minidb", tmp_path / "s.minidb", [], strings={"dagexec/checkpoint": b'{"step": 1, "blobs": ["w"], "extra": {}}'}
    )
    with pytest.raises(StorageError, match="blobs are missing: w"):
        load_checkpoint(Workspace(), tmp_path / "s.minidb")


@pytest.mark.parametrize(
    "state",
    [
        b'{"step": 1, "blobs": [["w"]], "extra": {}}',
        b'{"step": 1, "blobs": [{}], "extra": {}}',
        b'{"step": 1, "blobs": "w", "extra": {}}',
        b'{"step": -1, "blobs": [], "extra": {}}',
        b'{"step": 1e400, "blobs": [], "extra": {}}',
        b'{"step": "1", "blobs": [], "extra": {}}',
        b'{"step": 1, "blobs": [], "extra": {"seed": 7}}',
        b'{"step": 1, "blobs": []}',
        b"[1]",
        b"[" * 100_000,
        b"\xff",
    ],
)
def test_a_state_that_says_something_else_is_refused(state: bytes, tmp_path: Path) -> None:
    """Its checksum is right: somebody wrote it so. `latest_checkpoint` passes it over."""
    path = tmp_path / "step-000000000001.minidb"
    write_blobs("minidb", path, [("w", np.zeros(1))], strings={"dagexec/checkpoint": state})
    with pytest.raises(StorageError, match="not a checkpoint: record 'dagexec/checkpoint'"):
        load_checkpoint(Workspace(), path)
    assert latest_checkpoint(tmp_path) is None


def test_a_blob_of_the_workspace_that_is_no_tensor_is_refused_before_anything_is_fed(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    workspace = workspace_at(5)
    workspace.get_blob("m").value = "text"
    with pytest.raises(StorageError, match="blob 'm' of the workspace holds a str"):
        load_checkpoint(workspace, path)
    assert (workspace.fetch_blob("w") == 5).all()


def test_a_checkpoint_of_another_model_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    workspace = workspace_at(5)
    workspace.feed_blob("w", np.full((3, 5), 5, np.float32))
    workspace.feed_blob("m", np.full(5, 5, np.float32))
    workspace.feed_blob("bias", np.zeros(2))
    before = {name: workspace.fetch_blob(name).tobytes() for name in workspace.blobs()}
    with pytest.raises(StorageError) as caught:
        load_checkpoint(workspace, path, expected=["w", "m", "bias"])
    for part in (
        str(path),
        "another model",
        "'bias' is missing",
        "'optimizer_iteration' is not in the model",
        "'w' must be float32[3, 5], found float32[3, 4]",
        "'m' must be float32[5], found bfloat16[5]",
    ):
        assert part in str(caught.value)
    assert {name: workspace.fetch_blob(name).tobytes() for name in workspace.blobs()} == before
    assert load_checkpoint(workspace_at(5), path, expected=BLOBS).step == 1


def test_a_checkpoint_that_is_not_wanted_changes_nothing(tmp_path: Path) -> None:
    def check(found: Checkpoint) -> None:
        raise StorageError(f"not with seed {found.extra['seed']}")

    workspace = workspace_at(5)
    with pytest.raises(StorageError, match="not with seed 7"):
        load_checkpoint(workspace, save(tmp_path, 1), check=check)
    assert (workspace.fetch_blob("w") == 5).all()


def test_what_cannot_be_saved_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(MissingBlobError, match="none"):
        save_checkpoint(workspace_at(1), ["w", "none"], tmp_path, 1)
    with pytest.raises(ValueError, match="found -1 and 2"):
        save_checkpoint(workspace_at(1), ["w"], tmp_path, -1)
    with pytest.raises(StorageError, match="'leveldb' is unknown"):
        save_checkpoint(workspace_at(1), ["w"], tmp_path, 1, db_type="leveldb")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("db_type", "kills"), [("minidb", 60), ("lmdb", 40), ("minidb-in-place", 30), ("lmdb-in-place", 30)]
)
def test_savers_killed_at_random_instants_leave_a_whole_checkpoint_no_older_than_reported(
    db_type: str, kills: int, tmp_path: Path
) -> None:
    program = Path(__file__).with_name("killed_savers.py")
    root = program.parents[2]
    done = subprocess.run(
        [sys.executable, str(program), str(tmp_path), db_type, str(kills), "1"],
        capture_output=True, text=True, timeout=120, check=False, cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{kills} kills, ")
    assert done.stdout.endswith("1 files\n" if "in-place" in db_type else "2 files\n"), (
        done.stdout
    )  # nothing that a killed one had begun
