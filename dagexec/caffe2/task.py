"""Tasks: steps of a plan with outputs, in groups that run at once (`caffe2.python.task`).

    with TaskGroup() as group:
        with Task():
            total = ops.Add([ops.Const(1.0), ops.Const(2.0)])
        output = Task(outputs=[total]).outputs()[0]

A session (`dagexec.caffe2.session`) runs a group. All nodes are this process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from dagexec.caffe2.context import Current
from dagexec.caffe2.net import Net
from dagexec.caffe2.net_builder import NetBuilder
from dagexec.caffe2.plans import ExecutionStep, execution_step, to_execution_step
from dagexec.caffe2.references import BlobReference
from dagexec.caffe2.schema import Field, from_blob_list
from dagexec.errors import Caffe2Error

__all__ = ["Cluster", "Node", "Task", "TaskGroup", "TaskOutput", "TaskOutputList", "WorkspaceType"]


class WorkspaceType:
    """Where a task runs: in a workspace of its own, whose blobs others do not see, or in that of the session."""

    PRIVATE = "private"
    GLOBAL = "global"


class Cluster(Current):
    """The names of the nodes that are used inside."""

    is_made_when_asked = True

    def __init__(self) -> None:
        self._nodes: list[str] = []
        self._node_kwargs: dict[str, dict[str, Any]] = {}

    def add_node(self, node: Any) -> None:
        """Note a node, and what it was made with."""
        if str(node) not in self._nodes:
            self._nodes.append(str(node))
        if isinstance(node, Node):
            self._node_kwargs[str(node)] = node.kwargs()

    def nodes(self) -> list[str]:
        """The names, in the order in which they came."""
        return self._nodes

    def node_kwargs(self) -> dict[str, dict[str, Any]]:
        """What each node was made with."""
        return self._node_kwargs


class Node(Current):
    """A name of a machine; tasks made inside are of it."""

    is_made_when_asked = True

    def __init__(self, node: Any = "local", **kwargs: Any) -> None:
        self._name = str(node)
        self._kwargs = kwargs
        Cluster.current().add_node(self)

    def __str__(self) -> str:
        return self._name

    def kwargs(self) -> dict[str, Any]:
        """What it was made with."""
        return self._kwargs


class TaskOutput:
    """Blobs, or a record of them, that a session fetches when their task has run."""

    def __init__(self, names: Any) -> None:
        self._record: Field | None = names if isinstance(names, Field) else None
        blobs = names.field_blobs() if isinstance(names, Field) else names
        self._is_scalar = not isinstance(blobs, list | tuple)
        self.names: list[Any] = [blobs] if self._is_scalar else list(blobs)
        self._fetch: Callable[[Any], Any] | None = None

    def set(self, _values: Any, _fetch_func: Callable[[Any], Any] | None = None) -> None:
        """Have the blobs be fetched by a function."""
        self._fetch = _fetch_func

    def get(self) -> Any:
        """What the blobs hold: an array, a list of them, or a record. Raises Caffe2Error before the task has run."""
        if self._fetch is None:
            raise Caffe2Error(f"the task of the outputs {list(map(str, self.names))} has not run in a session")
        values = [self._fetch(name) for name in self.names]
        if self._record is not None:
            return from_blob_list(self._record, values)
        return values[0] if self._is_scalar else values

    fetch = get

    def __repr__(self) -> str:
        return f"TaskOutput({list(map(str, self.names))})"


class TaskOutputList:
    """The outputs of a task."""

    def __init__(self, outputs: Iterable[TaskOutput] = ()) -> None:
        self.outputs = list(outputs)

    def names(self) -> list[Any]:
        """All blobs."""
        return [name for output in self.outputs for name in output.names]

    def set_values(self, values: Any, _fetch_func: Callable[[Any], Any] | None = None) -> None:
        """Have the blobs be fetched by a function."""
        for output in self.outputs:
            output.set(values, _fetch_func)


def setup_nets(key: str, steps: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """What objects that nets have noted under `key` do before, and behind: `setup(net)`, and `exit(net)`.

    Each object does so once.
    """
    ends = []
    noted = [one for step in steps for one in step.get_all_attributes(key)]
    for method in ("setup", "exit"):
        net = Net(f"{key}/{method}")
        further: list[Any] = []
        for one in noted:
            if hasattr(one, method) and not getattr(one, f"_{method}_used", False):
                made = getattr(one, method)(net)
                further += made if isinstance(made, list | tuple) else [] if made is None else [made]
                setattr(one, f"_{method}_used", True)
        ends.append([net, *further] if net.Proto().op else further)
    return ends[0], ends[1]


def _with_setup(name: str, key: str, step: ExecutionStep, others: Sequence[ExecutionStep] = ()) -> ExecutionStep:
    """A step between what its nets have noted under `key`."""
    before, behind = setup_nets(key, [step, *others])
    if not before and not behind:
        return step
    around = [execution_step(f"{name}:init", before), step, execution_step(f"{name}:exit", behind)]
    return execution_step(name, [one for one in around if one.HasNets() or one.HasSubsteps()])


class TaskGroup(Current):
    """Tasks that run at once; those made inside, and not told another group, are of it."""

    LOCAL_SETUP = "local_setup"

    def __init__(self, workspace_type: str | None = None) -> None:
        self._workspace_type = workspace_type
        self._tasks: list[Task] = []
        self._reports: list[tuple[str, ExecutionStep]] = []
        self._task: Task | None = None

    def add(self, task: Task) -> None:
        """Append a task. Raises Caffe2Error where the group was run or another kind of workspace was asked for."""
        if self._task is not None:
            raise Caffe2Error("the group was compiled already: no task can be added")
        if self._workspace_type not in (None, task.workspace_type()):
            raise Caffe2Error(f"task {task.name!r} runs in a {task.workspace_type()} workspace, its group does not")
        self._tasks.append(task)

    def tasks(self) -> list[Task]:
        """The tasks."""
        return self._tasks

    def num_registered_tasks(self) -> int:
        """How many there are."""
        return len(self._tasks)

    def used_nodes(self) -> list[str]:
        """The names of the nodes of the tasks, in order."""
        return list(dict.fromkeys(task.node for task in self._tasks))

    def workspace_type(self) -> str | None:
        """Where its tasks run, if the group says so."""
        return self._workspace_type

    def report_step(self, step: Any = None, node: Any = None, interval_ms: int = 1000) -> None:
        """Run a step every so many milliseconds while the tasks run, and once when they are over."""
        made = to_execution_step(step)
        made.RunEveryMillis(interval_ms)
        self._reports.append((str(Node.current(node)), made))

    def report_net(self, net: Net, node: Any = None, report_interval: int = 5) -> None:
        """Run a net every so many seconds while the tasks run, and once when they are over."""
        self.report_step(net, node, 1000 * report_interval)

    def to_task(self, node: Any = None) -> Task:
        """All tasks as one, whose steps run at once."""
        if self._task is None:
            steps = [task.get_step() for task in self._tasks]
            for step, task in zip(steps, self._tasks, strict=True):
                step.SetCreateWorkspace(task.workspace_type() == WorkspaceType.PRIVATE)
            steps += [step for _, step in self._reports]
            name = str(Node.current(node))
            body = steps[0] if len(steps) == 1 else execution_step(f"{name}:body", steps, concurrent_substeps=True)
            together = TaskGroup()
            outputs = [output for task in self._tasks for output in task.outputs()]
            kinds = {task.workspace_type() for task in self._tasks}
            self._task = Task(
                step=_with_setup(name, TaskGroup.LOCAL_SETUP, body),
                outputs=outputs,
                workspace_type=WorkspaceType.PRIVATE if kinds == {WorkspaceType.PRIVATE} else WorkspaceType.GLOBAL,
                group=together,
                node=name,
                name="grouped_by_node",
            )
        return self._task


class Task:
    """A step with outputs. Open, it is a NetBuilder, and its step is what was built inside.

    Attributes:
        name: for messages.
        node: the name of its machine.
    """

    TASK_SETUP = "task_setup"
    TASK_INSTANCE_SETUP = "task_instance_setup"
    REPORT_STEP = "report_step"

    def __init__(
        self,
        step: Any = None,
        outputs: Any = None,
        workspace_type: str | None = None,
        group: TaskGroup | None = None,
        node: Any = None,
        name: str | None = None,
        num_instances: int | None = None,
    ) -> None:
        """Append it to `group`, or to that which is open. `num_instances` of its step run at once, each by itself."""
        self.node = str(Node.current(node))
        self._group: TaskGroup | None = TaskGroup.current(group, required=False)
        number = 0 if self._group is None else self._group.num_registered_tasks()
        self.name = name or f"{self.node}/task:{number}"
        self._workspace_type = workspace_type
        self._instances = num_instances
        self._outputs: list[TaskOutput] = []
        self._step: ExecutionStep | None = None
        self._complete: ExecutionStep | None = None
        self._builder: NetBuilder | None = None
        self._alone: TaskGroup | None = None
        if step is not None:
            self.set_step(step)
        if outputs is not None:
            self.add_outputs(outputs)
        if self._group is not None:
            self._group.add(self)

    def __enter__(self) -> Task:
        if self._step is not None:
            raise Caffe2Error(f"task {self.name!r} has a step already")
        self._builder = NetBuilder(_fullname=self.name)
        self._builder.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        builder, self._builder = self._builder, None
        assert builder is not None
        builder.__exit__(kind, error, trace)
        if kind is None:
            self.set_step(builder)

    def alone(self) -> TaskGroup:
        """A group of this task."""
        if self._alone is None:
            self._alone = TaskGroup()
            self._alone.add(self)
        return self._alone

    def workspace_type(self) -> str:
        """Where it runs; where neither it nor its group says so, in the workspace of the session."""
        of_group = None if self._group is None else self._group.workspace_type()
        return self._workspace_type or of_group or WorkspaceType.GLOBAL

    def add_output(self, output: Any) -> TaskOutput:
        """Append a blob or a record, or an output of another task."""
        made = output if isinstance(output, TaskOutput) else TaskOutput(output)
        self._outputs.append(made)
        return made

    def add_outputs(self, outputs: Any) -> Any:
        """Append one or several."""
        if isinstance(outputs, list | tuple):
            return [self.add_output(output) for output in outputs]
        return self.add_output(outputs)

    def set_step(self, step: Any) -> None:
        """Let it run a net, a step, or what a NetBuilder has built. Raises Caffe2Error where it has been run."""
        if self._complete is not None:
            raise Caffe2Error(f"task {self.name!r} was compiled already")
        self._step = to_execution_step(step, self.name)

    def outputs(self) -> list[TaskOutput]:
        """The outputs."""
        return self._outputs

    def output_list(self) -> TaskOutputList:
        """The outputs, as a session takes them."""
        return TaskOutputList(self._outputs)

    def get_step(self) -> ExecutionStep:
        """Its step, between what was to be done when the task, and each of its instances, begins and ends."""
        if self._complete is None:
            body = self._step or execution_step(self.name, [])
            reports = body.get_all_attributes(Task.REPORT_STEP)
            if reports:
                body = execution_step(f"{self.name}:body", [*reports, body], concurrent_substeps=True)
            body = _with_setup(f"{self.name}:instance", Task.TASK_INSTANCE_SETUP, body)
            if (self._instances or 1) > 1:
                body.SetCreateWorkspace(True)
                body.SetNumConcurrentInstances(self._instances or 1)
                body = execution_step(f"{self.name}:parallel", [body], concurrent_substeps=True)
            self._complete = _with_setup(self.name, Task.TASK_SETUP, body)
        return self._complete

    def __repr__(self) -> str:
        return f"Task({self.name!r}, outputs={self._outputs})"


def blob_output(output: Any, group: TaskGroup) -> TaskOutput:
    """An output; of a blob, that of a task of the group that has no step."""
    if isinstance(output, TaskOutput):
        return output
    if not isinstance(output, BlobReference):
        raise Caffe2Error(f"expected a blob or the output of a task, found {output!r}")
    return Task(outputs=[output], group=group).outputs()[0]
