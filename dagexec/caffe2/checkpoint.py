"""Jobs and their checkpoints (`caffe2.python.checkpoint`): what is run before, in each epoch, and in the end.

    with Job() as job:
        with job.init_group, Task():
            total = ops.Const(0.0)
        with Task():                      # of each epoch
            ops.Add([total, ops.Const(1.0)], [total])
        epoch_limiter(job, 10)
    job.compile(LocalSession)
    JobRunner(job, CheckpointManager("/checkpoints", "node", "minidb")).train(LocalSession())

A checkpoint is a database with the tensors and strings of the workspace, and a string that says what its counters,
flags, mutexes and cursors are. Other objects, such as queues, are made in each epoch; they are not saved.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterable
from typing import Any

from dagexec.caffe2.context import Current
from dagexec.caffe2.native_workspace import NativeWorkspace
from dagexec.caffe2.net import Net
from dagexec.caffe2.session import Session
from dagexec.caffe2.task import Task, TaskGroup, TaskOutput, blob_output
from dagexec.core.device import CPU, Device
from dagexec.core.tensor import Tensor
from dagexec.core.workspace import Workspace
from dagexec.errors import Caffe2Error, DagexecError
from dagexec.ops.families.control.counters import Counter, Flag
from dagexec.ops.families.dataset.cursors import TreeCursor
from dagexec.ops.families.dataset.fields import FieldTree
from dagexec.ops.families.optimize.counter import Mutex
from dagexec.storage import database_exists
from dagexec.storage.blob_file import read_blob_file, write_blobs

__all__ = [
    "CheckpointManager", "Job", "JobRunner", "MultiNodeCheckpointManager", "UploadTaskGroupBuilder", "db_name",
    "epoch_limiter", "get_ckpt_filename",
]  # fmt: skip

logger = logging.getLogger("dagexec")

_STATE = "!!checkpoint"
"""The string that says what there is besides tensors and strings."""


class Job(Current):
    """Groups of tasks. Open, tasks are of its `epoch_group`.

    Attributes:
        init_group, epoch_group, download_group, exit_group: run once at the beginning, in each epoch, and, once each,
            in the end.
        stop_conditions: outputs, one of which is true after the last epoch.
    """

    def __init__(
        self,
        init_group: TaskGroup | None = None,
        epoch_group: TaskGroup | None = None,
        download_group: TaskGroup | None = None,
        exit_group: TaskGroup | None = None,
        stop_conditions: Iterable[TaskOutput] | None = None,
        nodes_to_checkpoint: Iterable[str] | None = None,
    ) -> None:
        self.init_group: Any = init_group or TaskGroup()
        self.epoch_group: Any = epoch_group or TaskGroup()
        self.download_group: Any = download_group or TaskGroup()
        self.exit_group: Any = exit_group or TaskGroup()
        self.stop_conditions = list(stop_conditions or ())
        self._nodes = None if nodes_to_checkpoint is None else list(nodes_to_checkpoint)

    def nodes_to_checkpoint(self) -> list[str]:
        """The nodes whose blobs are saved: as it was told, or those of the tasks at the beginning."""
        if self._nodes is None:
            self._nodes = self.init_group.used_nodes()
        return self._nodes

    def compile(self, session_class: type[Session]) -> None:
        """Make plans of all groups, to which nothing can be added then."""
        self.nodes_to_checkpoint()
        for name in ("init_group", "epoch_group", "download_group", "exit_group"):
            setattr(self, name, session_class.compile(getattr(self, name)))

    def __enter__(self) -> Job:
        super().__enter__()
        self.epoch_group.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.epoch_group.__exit__(*error)
        super().__exit__(*error)

    def add_stop_condition(self, output: Any) -> None:
        """Let the epoch be the last one in which this blob, or output of a task, is true."""
        self.stop_conditions.append(blob_output(output, self.epoch_group))


def get_ckpt_filename(node_name: Any, epoch: int) -> str:
    """The name of the file of a node's checkpoint."""
    return f"{node_name}.{epoch}"


def db_name(epoch: int, node_name: Any, db_prefix: str, path_prefix: str | None = None) -> str:
    """The path of a node's checkpoint."""
    return os.path.join(path_prefix or db_prefix, get_ckpt_filename(node_name, epoch))


def _state_of(value: object) -> Any:
    """What makes an object again; None for one that is not saved."""
    if isinstance(value, Counter):
        return ["counter", value.value]
    if isinstance(value, Flag):
        return ["flag", value.value]
    if isinstance(value, Mutex):
        return ["mutex"]
    if isinstance(value, TreeCursor):
        return ["cursor", value.tree.names, value.tree.domains, value.tree.lengths, value.offsets]
    return None


def _object_of(state: list[Any]) -> object:
    kind, *values = state
    if kind == "counter":
        return Counter(*values)
    if kind == "mutex":
        return Mutex()
    if kind == "flag":
        flag = Flag()
        (flag.value,) = values
        return flag
    cursor = TreeCursor(FieldTree(*map(tuple, values[:3])))
    cursor.offsets = values[3]
    return cursor


def _save(workspace: Workspace, db_type: str, path: str) -> None:
    values = {name: workspace.get_blob(name).value for name in workspace.local_blobs()}
    tensors = {name: value for name, value in values.items() if isinstance(value, Tensor) and not value.is_empty}
    state = {
        "objects": {name: made for name, value in values.items() if (made := _state_of(value)) is not None},
        "devices": {name: str(tensor.device) for name, tensor in tensors.items() if tensor.device != CPU},
    }
    strings = {name: value for name, value in values.items() if isinstance(value, bytes)}
    write_blobs(
        db_type,
        path,
        ((name, workspace.fetch_blob(name)) for name in tensors),
        strings={**strings, _STATE: json.dumps(state).encode()},
    )


def _load(workspace: Workspace, db_type: str, path: str, names: set[str] | None) -> None:
    """What a checkpoint has under these names, or all. Raises StorageError, Caffe2Error for a damaged one."""
    file = read_blob_file(db_type, path)
    try:
        state = json.loads(file.strings.pop(_STATE, b'{"objects": {}, "devices": {}}'))
        objects = {name: _object_of(made) for name, made in state["objects"].items()}
        devices = {name: Device.parse(device) for name, device in state["devices"].items()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise Caffe2Error(f"checkpoint {path}: its record {_STATE!r} is damaged: {error}") from None
    for name, array in file.tensors.items():
        if names is None or name in names:
            workspace.feed_blob(name, array, device=devices.get(name))
    for name, value in {**file.strings, **objects}.items():
        if names is None or name in names:
            workspace.create_blob(name).value = value


class CheckpointManager:
    """Checkpoints of one node, in files `<db_prefix>/<node_name>.<epoch>`.

    Its methods make tasks, which a session runs.
    """

    def __init__(self, db_prefix: str, node_name: Any, db_type: str, metadata_handler: Any = None) -> None:
        """A `metadata_handler` is told of epochs, and asked which is the last; see `get_resume_from_epoch_id`."""
        self._db_prefix = db_prefix
        self._node_name = str(node_name)
        self._db_type = db_type
        self._metadata_handler = metadata_handler
        self._path_prefix: str | None = None
        self._names: list[str] = []

    def init(
        self,
        nodes: Any = None,
        retrieve_from_epoch: int | None = None,
        path_prefix: str | None = None,
        path_type: str | None = None,
    ) -> Task:
        """Note which blobs there are, in the workspace or in the checkpoint of an epoch."""
        self._path_prefix = path_prefix

        def note(workspace: Workspace) -> None:
            self._names = workspace.local_blobs()

        def note_saved(_workspace: Workspace) -> None:
            path = self._path(retrieve_from_epoch or 0)
            if not database_exists(self._db_type, path):
                raise Caffe2Error(f"there is no checkpoint {path}")
            file = read_blob_file(self._db_type, path)
            self._names = sorted([*file.tensors, *file.strings])

        return self._task("init", note if retrieve_from_epoch is None else note_saved)

    def blob_list(self) -> list[str]:
        """The names of the blobs, once the task of `init` has run."""
        return self._names

    def load(self, epoch: int, path_prefix: str | None = None, path_type: str | None = None) -> Task:
        """Give all blobs the values of the checkpoint of an epoch."""
        self._path_prefix = path_prefix or self._path_prefix
        return self._task("load", lambda workspace: _load(workspace, self._db_type, self._path(epoch), None))

    def load_blobs_from_checkpoint(self, blob_names: Iterable[Any], epoch: int) -> Task:
        """Give those of some blobs that the checkpoint of an epoch has their values there."""
        names = set(map(str, blob_names))
        return self._task("load", lambda workspace: _load(workspace, self._db_type, self._path(epoch), names))

    def load_blobs_locally(self, nodes: Any, blob_names: Iterable[Any], epoch: int, session: Session) -> bool:
        """Have a session load some blobs; False where there is no checkpoint of the epoch."""
        return _load_blobs([self], blob_names, epoch, session)

    def save(self, epoch: int) -> Task:
        """Write the checkpoint of an epoch, all of it or, on failure, nothing."""
        return self._task("save", lambda workspace: _save(workspace, self._db_type, self._path(epoch)))

    def check_db_exists(self, epoch: int) -> bool:
        """True when there is a checkpoint of the epoch."""
        return database_exists(self._db_type, self._path(epoch))

    def set_params(self, nodes: Any, path_prefix: str | None = None, path_type: str | None = None) -> None:
        """Tell the handler of metadata where checkpoints are."""
        self._path_prefix = path_prefix
        if self._metadata_handler is not None:
            names = [self._node_name]
            self._metadata_handler.set_params(self._db_prefix, self._db_type, names, path_prefix, path_type)

    def get_resume_from_epoch_id(self, user_epoch: int | None = None) -> int | None:
        """The epoch whose checkpoint is to be loaded: as the handler of metadata says, else that of the user."""
        if self._metadata_handler is None:
            return user_epoch
        found: int | None = self._metadata_handler.last_epoch(user_epoch=user_epoch)
        return found

    def write_checkpoint_metadata(self, epoch: int) -> None:
        """Tell the handler of metadata that a checkpoint was written."""
        if self._metadata_handler is not None:
            self._metadata_handler.write(epoch=epoch)

    def cp_accessible(self, epoch: int | None = None) -> bool:
        """What the handler of metadata says; without one, True."""
        return self._metadata_handler is None or bool(self._metadata_handler.cp_accessible(epoch))

    def _path(self, epoch: int) -> str:
        return db_name(epoch, self._node_name, self._db_prefix, self._path_prefix)

    def _task(self, what: str, work: Callable[[Workspace], None]) -> Task:
        """A task that does something with the workspace that it runs in."""

        def call(_inputs: Any, _outputs: Any, around: NativeWorkspace) -> None:
            work(around.inside())

        net = Net(f"checkpoint_{what}")
        net.Python(call, pass_workspace=True)([], [])
        return Task(step=net, node=self._node_name, name=net.Name(), group=TaskGroup())


def _load_blobs(managers: Iterable[CheckpointManager], blob_names: Iterable[Any], epoch: int, session: Session) -> bool:
    names = list(map(str, blob_names))
    for manager in managers:
        if not manager.check_db_exists(epoch):
            logger.warning("there is no checkpoint %s", manager._path(epoch))
            return False
        session.run(manager.load_blobs_from_checkpoint(names, epoch))
    return True


class MultiNodeCheckpointManager:
    """Checkpoints of several nodes, a file each. A local session has all nodes in one workspace."""

    def __init__(self, db_prefix: str, db_type: str, metadata_handler: Any = None) -> None:
        self._db_prefix = db_prefix
        self._db_type = db_type
        self._metadata_handler = metadata_handler
        self._managers: dict[str, CheckpointManager] = {}

    def init(
        self,
        nodes: Iterable[Any],
        retrieve_from_epoch: int | None = None,
        path_prefix: str | None = None,
        path_type: str | None = None,
    ) -> TaskGroup:
        """`CheckpointManager.init`, for these nodes."""
        for node in map(str, nodes):
            self._managers.setdefault(node, CheckpointManager(self._db_prefix, node, self._db_type))
        return self._group(lambda manager: manager.init(None, retrieve_from_epoch, path_prefix, path_type))

    def load(self, epoch: int, path_prefix: str | None = None, path_type: str | None = None) -> TaskGroup:
        """`CheckpointManager.load`, for all nodes."""
        return self._group(lambda manager: manager.load(epoch, path_prefix, path_type))

    def save(self, epoch: int) -> TaskGroup:
        """`CheckpointManager.save`, for all nodes."""
        return self._group(lambda manager: manager.save(epoch))

    def load_blobs_locally(self, nodes: Iterable[Any], blob_names: Iterable[Any], epoch: int, session: Session) -> bool:
        """Have a session load some blobs, each from a checkpoint that has it; False where one of these is missing."""
        managers = [CheckpointManager(self._db_prefix, node, self._db_type) for node in nodes]
        return _load_blobs(managers, blob_names, epoch, session)

    def get_ckpt_db_name(self, node_name: Any, epoch: int) -> str:
        """The path of a node's checkpoint."""
        return db_name(epoch, node_name, self._db_prefix)

    def set_params(self, nodes: Iterable[Any], path_prefix: str | None = None, path_type: str | None = None) -> None:
        """Tell the handler of metadata where checkpoints are."""
        if self._metadata_handler is not None:
            names = list(map(str, nodes))
            self._metadata_handler.set_params(self._db_prefix, self._db_type, names, path_prefix, path_type)

    get_resume_from_epoch_id = CheckpointManager.get_resume_from_epoch_id
    write_checkpoint_metadata = CheckpointManager.write_checkpoint_metadata
    cp_accessible = CheckpointManager.cp_accessible

    def _group(self, make: Callable[[CheckpointManager], Task]) -> TaskGroup:
        if not self._managers:
            raise Caffe2Error("which nodes have checkpoints is said by `init`")
        group = TaskGroup()
        for manager in self._managers.values():
            group.add(make(manager))
        return group


class UploadTaskGroupBuilder:
    """What makes tasks that bring checkpoints elsewhere behind the last epoch."""

    def build(self, epoch: int, checkpoint_manager: Any) -> TaskGroup:
        """The tasks."""
        raise NotImplementedError


class JobRunner:
    """Runs a job to its end, and writes a checkpoint before the first epoch and behind each."""

    def __init__(
        self,
        job: Job,
        checkpoint_manager: Any = None,
        resume_from_epoch: int | None = None,
        upload_task_group_builder: Any = None,
    ) -> None:
        """`upload_task_group_builder.build(epoch, checkpoint_manager)` gives a group to run behind the last epoch."""
        self.job = job
        self.checkpoint_manager = checkpoint_manager
        self.resume_from_epoch = resume_from_epoch
        self.upload_task_group_builder = upload_task_group_builder

    def train(self, session: Session) -> int:
        """The number of the last epoch. An epoch to resume from is loaded in place of the tasks of the beginning."""
        job, manager, last = self.job, self.checkpoint_manager, self.resume_from_epoch
        if manager is not None:
            manager.set_params(nodes=job.nodes_to_checkpoint())
            last = self.resume_from_epoch = manager.get_resume_from_epoch_id(last)
        if last is None:
            session.run(job.init_group)
        if manager is not None:
            session.run(manager.init(job.nodes_to_checkpoint(), retrieve_from_epoch=last))
            if last is None:
                self.save_checkpoints(0, session)
            else:
                session.run(manager.load(last))
        epoch = (last or 0) + 1
        while True:
            session.run(job.epoch_group)
            stops = [bool(output.fetch()) for output in job.stop_conditions]
            if manager is not None:
                self.save_checkpoints(epoch, session)
            if any(stops):
                break
            epoch += 1
        if self.upload_task_group_builder is not None:
            session.run(self.upload_task_group_builder.build(epoch, manager))
        session.run(job.download_group)
        session.run(job.exit_group)
        return epoch

    __call__ = train

    def load_blobs_from_checkpoints(self, blob_names: Iterable[Any], epoch: int, session: Session) -> bool:
        """Have a session load some blobs; False where there is no checkpoint of the epoch. Raises Caffe2Error."""
        if self.checkpoint_manager is None:
            raise Caffe2Error("the job has no manager of checkpoints")
        nodes = self.job.nodes_to_checkpoint()
        return bool(self.checkpoint_manager.load_blobs_locally(nodes, blob_names, epoch, session))

    def save_checkpoints(self, epoch: int, session: Session) -> None:
        """Write a checkpoint. That it cannot be written is logged, and the job goes on."""
        try:
            session.run(self.checkpoint_manager.save(epoch))
            self.checkpoint_manager.write_checkpoint_metadata(epoch)
        except (DagexecError, OSError) as error:
            logger.warning("the checkpoint of epoch %d was not written: %s", epoch, error)


def epoch_limiter(job: Job, num_epochs: int) -> None:
    """Let a job have so many epochs."""
    with job.init_group:
        init_net = Net("epoch_counter_init")
        counter = init_net.CreateCounter([], init_count=num_epochs - 1)
        Task(step=init_net)
    with job.epoch_group:
        epoch_net = Net("epoch_countdown")
        finished = epoch_net.CountDown(counter)
        job.add_stop_condition(Task(step=epoch_net, outputs=finished).outputs()[0])
