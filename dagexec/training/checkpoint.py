"""Checkpoints: the state of a training run in a folder, one file a step, the newest whole one to go on from.

A checkpoint is a database of blobs (`dagexec.storage.blob_file`) and a record that says which step it is of. It is
written beside its place and renamed, so a process that is killed leaves the one before; a damaged one is refused by
name, and the one before it is used.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy.typing as npt

from dagexec.core import dtypes
from dagexec.core.device import CPU
from dagexec.core.tensor import Tensor
from dagexec.core.workspace import Workspace
from dagexec.errors import StorageError
from dagexec.platform.disk import disk, remove
from dagexec.platform.files import reason
from dagexec.platform.records import dataclass
from dagexec.storage import database_types
from dagexec.storage.blob_file import BlobFile, read_blob_file, write_blobs

__all__ = ["Checkpoint", "checkpoints", "latest_checkpoint", "load_checkpoint", "save_checkpoint"]

logger = logging.getLogger("dagexec")

STATE_RECORD = "dagexec/checkpoint"
_NAME = re.compile(r"step-(\d+)\.(\w+)")
_whole: dict[Path, tuple[int, int, int]] = {}
"""Checkpoints that this process wrote or read to the end, with an identity that changes when they do."""


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint holds.

    Attributes:
        step: steps done when it was written.
        blobs: names of the blobs, in the order they were given to `save_checkpoint`.
        extra: what else was to be remembered.
        path: where it is.
    """

    step: int
    blobs: tuple[str, ...]
    extra: Mapping[str, str]
    path: Path


def save_checkpoint(
    workspace: Workspace,
    blobs: Sequence[str],
    folder: str | os.PathLike[str],
    step: int,
    *,
    db_type: str = "minidb",
    keep: int = 2,
    extra: Mapping[str, str] | None = None,
) -> Path:
    """Write the tensors `blobs` as the checkpoint of `step`, and remove old ones but the newest `keep` whole ones.

    The file `step-<step>.<db_type>` is on the disk when this returns its path, even when `keep` others are of later
    steps. An old one that cannot be removed is named in the log. No net that writes the blobs may run meanwhile. Raises
    OutputError when it cannot be written (those before it stay), MissingBlobError, ValueError for a negative step or
    `keep` below 1.
    """
    if step < 0 or keep < 1:
        raise ValueError(f"expected a step of at least 0 and keep of at least 1, found {step} and {keep}")
    if db_type not in database_types():
        raise StorageError(f"database type {db_type!r} is unknown; expected one of {', '.join(database_types())}")
    path = Path(folder) / f"step-{step:012d}.{db_type}"
    if path.is_dir() and not _is_whole(path):  # a file is replaced whatever is in it; a damaged lmdb cannot be opened
        _remove(path)
    state = json.dumps({"version": 1, "step": step, "blobs": list(blobs), "extra": dict(extra or {})})
    tensors = ((name, _values(workspace, name)) for name in blobs)
    write_blobs(db_type, path, tensors, strings={STATE_RECORD: state.encode()})
    _whole[path.resolve()] = _identity(path)
    _remove_old(Path(folder), keep, path)
    return path


def checkpoints(folder: str | os.PathLike[str]) -> list[Path]:
    """The checkpoints in `folder` by name, the newest first; they may be damaged."""
    try:
        names = os.listdir(folder)
    except OSError:
        return []
    steps_and_names = [
        (int(match[1]), name) for name in names if (match := _NAME.fullmatch(name)) and match[2] in database_types()
    ]
    return [Path(folder) / name for _, name in sorted(steps_and_names, reverse=True)]


def latest_checkpoint(folder: str | os.PathLike[str]) -> Path | None:
    """The newest checkpoint in `folder` that is whole, None when there is none.

    It is read to the end and its checksums are compared; damaged ones are named in the log and skipped.
    """
    return next(_whole_ones(Path(folder)), None)


def load_checkpoint(
    workspace: Workspace,
    path: str | os.PathLike[str],
    *,
    expected: Sequence[str] | None = None,
    check: Callable[[Checkpoint], object] | None = None,
) -> Checkpoint:
    """Feed the blobs of the checkpoint at `path`, on the devices where they are; new ones on the host.

    With `expected`, these blobs and no others must be in it, each of the shape and the element type that it has in the
    workspace. `check` may raise when the checkpoint is not the one that is wanted.
    Everything is read and checked first: on failure no blob has changed. Raises StorageError, naming file and place.
    """
    file, checkpoint = _read(Path(path))
    if check is not None:
        check(checkpoint)
    if expected is not None:
        _check_fit(workspace, expected, checkpoint, file)
    for name in checkpoint.blobs:
        blob = workspace.get_blob_or_none(name)
        if blob is not None and blob.value is not None and not isinstance(blob.value, Tensor):
            raise StorageError(
                f"{path}: blob {name!r} of the workspace holds a {type(blob.value).__name__}, not a tensor"
            )
    for name in checkpoint.blobs:
        workspace.feed_blob(name, file.tensors[name])
    return checkpoint


def _values(workspace: Workspace, name: str) -> npt.NDArray[Any]:
    """The values of a blob; its own memory where that is packed and on the host."""
    tensor = workspace.get_blob(name).get(Tensor)
    storage = tensor.storage()
    if tensor.device == CPU and not tensor.is_empty and tensor.is_packed and not (storage and storage.reused):
        return tensor.array
    return workspace.fetch_blob(name)


def _check_fit(workspace: Workspace, expected: Sequence[str], checkpoint: Checkpoint, file: BlobFile) -> None:
    """Raise StorageError, saying what differs, unless the checkpoint is of a model with the blobs `expected`."""
    problems = [f"{name!r} is missing" for name in expected if name not in checkpoint.blobs]
    problems += [f"{name!r} is not in the model" for name in checkpoint.blobs if name not in expected]
    for name in expected:
        if name in checkpoint.blobs:
            tensor, array = workspace.get_blob(name).get(Tensor), file.tensors[name]
            meta = dtypes.from_numpy(array.dtype)
            if (tensor.shape, tensor.meta) != (array.shape, meta):
                problems.append(f"{name!r} must be {tensor.meta}{list(tensor.shape)}, found {meta}{list(array.shape)}")
    if problems:
        more = f"; and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise StorageError(f"{checkpoint.path}: is of another model: {'; '.join(problems[:8])}{more}")


def _read(path: Path) -> tuple[BlobFile, Checkpoint]:
    """A checkpoint, checked. Raises StorageError."""
    db_type = path.suffix.removeprefix(".")
    if db_type not in database_types():
        raise StorageError(f"{path}: not a checkpoint; expected a name that ends with one of {database_types()}")
    file = read_blob_file(db_type, path, require_checksums=True)
    checkpoint = _state(path, file.strings.get(STATE_RECORD))
    missing = [name for name in checkpoint.blobs if name not in file.tensors]
    if missing:
        raise StorageError(f"{path}: not a checkpoint: blobs are missing: {', '.join(missing)}")
    return file, checkpoint


def _state(path: Path, content: bytes | None) -> Checkpoint:
    """What the record of a checkpoint's state says. Raises StorageError."""
    if content is None:
        raise StorageError(f"{path}: not a checkpoint: record {STATE_RECORD!r} is missing")
    try:
        state = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise StorageError(f"{path}: not a checkpoint: record {STATE_RECORD!r} is not JSON: {error}") from None
    entries = state if isinstance(state, dict) else {}
    step, blobs, extra = (entries.get(name) for name in ("step", "blobs", "extra"))
    if (
        type(step) is int
        and step >= 0
        and isinstance(blobs, list)
        and all(isinstance(name, str) for name in blobs)
        and isinstance(extra, dict)
        and all(isinstance(text, str) for text in extra.values())
    ):
        return Checkpoint(step, tuple(blobs), extra, path)
    raise StorageError(
        f"{path}: not a checkpoint: record {STATE_RECORD!r}: expected a step from 0 on, a list of names of blobs and "
        f"texts by name, found step {step!r:.40}, blobs {blobs!r:.80} and extra {extra!r:.80}"
    )


def _whole_ones(folder: Path) -> Iterator[Path]:
    for path in checkpoints(folder):
        try:
            _read(path)
        except StorageError as error:
            logger.warning("checkpoint skipped: %s", str(error))
            continue
        _whole[path.resolve()] = _identity(path)
        yield path


def _remove_old(folder: Path, keep: int, written: Path) -> None:
    """Remove what is older than the newest `keep` whole checkpoints, but not the one `written` just now."""
    whole = 0
    for path in checkpoints(folder):
        if whole >= keep and path != written:
            _whole.pop(path.resolve(), None)
            _remove(path)
        elif whole < keep and _is_whole(path):
            whole += 1


def _remove(path: Path) -> None:
    try:
        remove(path)
        disk().synchronize(path.parent)
    except OSError as error:
        logger.warning("cannot remove an old checkpoint: %s: %s", path, reason(error))


def _is_whole(path: Path) -> bool:
    if _whole.get(path.resolve()) == _identity(path):
        return True
    try:
        _read(path)
    except StorageError as error:
        logger.warning("checkpoint not counted towards `keep`: %s", str(error))
        return False
    _whole[path.resolve()] = _identity(path)
    return True


def _identity(path: Path) -> tuple[int, int, int]:
    """Changes when the checkpoint is written to."""
    try:
        status = (path / "data.mdb" if path.is_dir() else path).stat()
    except OSError:
        return (-1, -1, -1)
    return status.st_ino, status.st_size, status.st_mtime_ns
