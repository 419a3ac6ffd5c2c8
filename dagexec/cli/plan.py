"""`dagexec run` of a plan of Caffe2: its nets in one workspace, step by step."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dagexec.cli.feeds import read_arrays
from dagexec.core.io_access import IO
from dagexec.core.proto import PlanDef
from dagexec.core.tensor import Tensor
from dagexec.core.workspace import Workspace
from dagexec.scheduler.plan_steps import run_plan
from dagexec.storage.net_file import TEXT_SUFFIXES, load_plan


def plan_in(source: str) -> PlanDef | None:
    """The plan in a .pb file or a text file; None for a model."""
    path = Path(source)
    return load_plan(path) if path.suffix in (".pb", *TEXT_SUFFIXES) and path.is_file() else None


def run_plan_file(
    plan: PlanDef, folder: Path, input_file: Path | None, repeat: int, allow_io: bool
) -> tuple[dict[str, npt.NDArray[Any]], list[float]]:
    """What the nets of a plan have as external outputs, or else all that they write, and the seconds of each run.

    The arrays of `input_file` are blobs of the workspace before the first run.
    """
    workspace = Workspace(root_folder=folder, allow_io=IO.ANY if allow_io else IO.READ_FOLDER)
    for name, array in ({} if input_file is None else read_arrays(input_file)).items():
        workspace.feed_blob(name, array)
    seconds = []
    try:
        for _ in range(repeat):
            start = time.perf_counter()
            run_plan(workspace, plan)
            seconds.append(time.perf_counter() - start)
    finally:
        for name in workspace.nets:
            workspace.delete_net(name)
    names = dict.fromkeys(name for net in plan.network for name in net.external_output)
    names = names or dict.fromkeys(name for net in plan.network for one in net.op for name in one.output)
    return {name: np.asarray(workspace.fetch_blob(name)) for name in names if _holds_tensor(workspace, name)}, seconds


def _holds_tensor(workspace: Workspace, name: str) -> bool:
    blob = workspace.get_blob_or_none(name)
    return blob is not None and isinstance(blob.value, Tensor) and not blob.value.is_empty
