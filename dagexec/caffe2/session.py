"""Sessions run tasks, groups of them, plans, steps and nets, and fetch their outputs (`caffe2.python.session`)."""

from __future__ import annotations

from typing import Any

from dagexec.caffe2 import workspace
from dagexec.caffe2.native_workspace import NativeWorkspace
from dagexec.caffe2.net import Net
from dagexec.caffe2.plans import ExecutionStep, Plan, to_execution_step
from dagexec.caffe2.task import Cluster, Task, TaskGroup, TaskOutputList, WorkspaceType
from dagexec.errors import Caffe2Error

__all__ = ["CompiledRunnable", "LocalSession", "Session"]


class CompiledRunnable:
    """What a session has made of a group.

    Attributes:
        obj: the plan, and its outputs.
        session_class: which sessions run it.
    """

    def __init__(self, obj: Any, session_class: type[Session]) -> None:
        self.obj = obj
        self.session_class = session_class


class Session:
    """Base of sessions."""

    def __init__(self) -> None:
        self._open = True

    def is_open(self) -> bool:
        """False once it was closed."""
        return self._open

    @classmethod
    def compile(cls, runnable: Any, workspace_type: str | None = None, setup_net_list: Any = None) -> CompiledRunnable:
        """A plan of a task, a group, a plan, a step or a net. Raises Caffe2Error for anything else.

        `workspace_type` is that of steps, plans and nets; nets of `setup_net_list` are not needed here.
        """
        if isinstance(runnable, CompiledRunnable):
            return runnable
        if isinstance(runnable, Plan | ExecutionStep | Net):
            plan = runnable if isinstance(runnable, Plan) else Plan(to_execution_step(runnable))
            kind = workspace_type or WorkspaceType.GLOBAL
            return CompiledRunnable((plan, TaskOutputList(), kind), cls)
        if isinstance(runnable, Task):
            runnable = runnable.alone()
        if not isinstance(runnable, TaskGroup):
            raise Caffe2Error(f"a session runs tasks, groups, plans, steps and nets; found {type(runnable).__name__}")
        return CompiledRunnable(cls._compile_task_group(runnable), cls)

    @classmethod
    def _compile_task_group(cls, group: TaskGroup) -> Any:
        raise NotImplementedError

    def run(self, runnable: Any, workspace_type: str | None = None, setup_net_list: Any = None) -> None:
        """Run it to the end. Raises Caffe2Error where it fails, and when the session is closed."""
        if not self._open:
            raise Caffe2Error("the session is closed")
        self._run_compiled(self.compile(runnable, workspace_type, setup_net_list).obj)

    def _run_compiled(self, compiled: Any) -> None:
        raise NotImplementedError

    def fetch_output(self, output: Any) -> Any:
        """What an output of a task holds."""
        return output.get()

    def close(self) -> None:
        """Run nothing any more."""
        self._open = False

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class LocalSession(Session):
    """A session in this process: the tasks of all nodes run at once, in one workspace."""

    def __init__(self, ws: NativeWorkspace | None = None) -> None:
        """In a workspace, by default that which is current when something is run."""
        super().__init__()
        self._ws = ws

    @classmethod
    def _compile_task_group(cls, group: TaskGroup) -> Any:
        with Cluster():
            task = group.to_task()
        plan = Plan("task_group_plan")
        plan.AddStep(task.get_step())
        return plan, task.output_list(), task.workspace_type()

    def _run_compiled(self, compiled: Any) -> None:
        plan, outputs, kind = compiled
        around = self._ws or workspace.current()
        for name in outputs.names():
            around.create_blob(name)
        outputs.set_values(None, _fetch_func=around.fetch)
        inside = NativeWorkspace(around) if kind == WorkspaceType.PRIVATE else around
        if plan.Steps():
            inside.run(plan)
