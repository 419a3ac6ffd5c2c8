"""Run as a program: savers that are killed at random instants, and what is in their folder afterwards.

One process imports everything and forks the savers, a hundred of them. Each saves checkpoint after checkpoint and
says so through a pipe; its last instant is drawn from the time after its first, second or third report, or its start,
so that some get ahead on the busiest machine. Prints the kills and the last step, or what was wrong.
"""

from __future__ import annotations

import os
import random
import select
import signal
import sys
from pathlib import Path

import numpy as np

from dagexec import Workspace
from dagexec.storage.blob_file import read_blob_file, write_blobs
from dagexec.training.checkpoint import latest_checkpoint, load_checkpoint, save_checkpoint

IN_PLACE = "-in-place"
BLOBS = {"w": (64, 65), "b": (7,), "iteration": (1,)}


def state_of(step: int) -> dict[str, np.ndarray]:
    """What the blobs hold at a step: every element tells the step."""
    return {
        name: np.full(shape, step, np.int64 if name == "iteration" else np.float32) for name, shape in BLOBS.items()
    }


def save_for_ever(folder: Path, db_type: str, step: int, report: int) -> None:
    """The child: save, report, go on."""
    workspace = Workspace()
    while True:
        step += 1
        if db_type.endswith(IN_PLACE):
            write_in_place(folder, db_type, step)
            os.write(report, b"%d\n" % step)
            continue
        for name, array in state_of(step).items():
            workspace.feed_blob(name, array)
        save_checkpoint(workspace, list(BLOBS), folder, step, db_type=db_type, extra={"seed": str(step)})
        os.write(report, b"%d\n" % step)


def write_in_place(folder: Path, db_type: str, step: int) -> None:
    """What Save does: one database is replaced again and again."""
    write_blobs(db_type.removesuffix(IN_PLACE), folder / "db", state_of(step).items())


def killed(folder: Path, db_type: str, step: int, reports_first: int, seconds: float) -> int:
    """Let a saver go on from `step`, kill it `seconds` after it reported so often; the last step it reported."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.close(reading)
            save_for_ever(folder, db_type, step, writing)
        finally:
            os._exit(1)
    os.close(writing)
    with os.fdopen(reading) as reports:
        told = [reports.readline() for _ in range(reports_first)]
        select.select([], [], [], seconds)
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        told += reports.read().split()
    if not os.WIFSIGNALED(status):
        raise SystemExit(f"the saver ended by itself after {told}")
    return int(told[-1]) if told else step


def check_in_place(folder: Path, db_type: str, reported: int) -> int:
    """The step of the database that is there, whole and of one step; no older than the last reported."""
    if not (folder / "db").exists() and not reported:
        return 0
    found = read_blob_file(db_type.removesuffix(IN_PLACE), folder / "db", require_checksums=True).tensors
    step = int(found["iteration"][0])
    if step < reported or any(found[name].tobytes() != array.tobytes() for name, array in state_of(step).items()):
        raise SystemExit(f"step {reported} was reported, found {found}")
    return step


def check(folder: Path, db_type: str, reported: int) -> int:
    """The step of the newest whole checkpoint, whose contents are of one step; no older than the last reported."""
    if db_type.endswith(IN_PLACE):
        return check_in_place(folder, db_type, reported)
    path = latest_checkpoint(folder)
    workspace = Workspace()
    if path is None:
        if reported:
            raise SystemExit(f"step {reported} was reported and no checkpoint loads")
        return 0
    found = load_checkpoint(workspace, path)
    if found.step < reported or found.extra != {"seed": str(found.step)}:
        raise SystemExit(f"step {reported} was reported, found {found}")
    for name, array in state_of(found.step).items():
        if workspace.fetch_blob(name).tobytes() != array.tobytes():
            raise SystemExit(f"{path}: {name} is not of step {found.step}")
    return found.step


def main(folder: Path, db_type: str, kills: int, seed: int) -> None:
    """Kill `kills` savers, one after another in the same folder."""
    draw = random.Random(seed)
    step = 0
    for _ in range(kills):
        step = check(folder, db_type, killed(folder, db_type, step, draw.randrange(3), draw.uniform(0.002, 0.08)))
    workspace = Workspace()
    for name, array in state_of(step + 1).items():
        workspace.feed_blob(name, array)
    if db_type.endswith(IN_PLACE):
        write_in_place(folder, db_type, step + 1)
    else:
        save_checkpoint(workspace, list(BLOBS), folder, step + 1, db_type=db_type)
    left = sorted(path.name for path in folder.iterdir())
    print(kills, "kills,", step, "steps,", len(left), "files")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
