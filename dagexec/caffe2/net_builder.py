"""NetBuilder: nets and steps written as Python blocks, whose operators are calls of `ops`.

    with NetBuilder() as builder:
        ops.Const(0.0, blob_out="y")
        with ops.IfNet(ops.GT(["x", "y"])):
            ops.Copy("x", "y")

`IfNet` and `WhileNet` are operators of the net; `If`, `loop`, `stop` and `stop_if` make steps of a plan.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from dagexec.caffe2.control_ops_util import add_control_op, add_else_net
from dagexec.caffe2.net import Net
from dagexec.caffe2.plans import ExecutionStep, execution_step, to_execution_step
from dagexec.caffe2.references import BlobReference
from dagexec.core.proto import OperatorDef
from dagexec.errors import Caffe2Error

__all__ = ["NetBuilder", "Operations", "ops"]


class _Open(threading.local):
    def __init__(self) -> None:
        self.builders: list[NetBuilder] = []


_open = _Open()


class NetBuilder:
    """A sequence of nets and steps under construction; open, the operators of `ops` are added to it.

    Attributes:
        name: what its nets are called after.
    """

    def __init__(
        self,
        name: str | None = None,
        initial_scope: Iterable[Any] | None = None,
        _stop_blob_required: bool = False,
        _stop_blob: Any = None,
        _fullname: str | None = None,
        _use_control_ops: bool = False,
    ) -> None:
        """`initial_scope` are blobs around it that its subnets may write.

        With `_use_control_ops` it is a single net, in which `If` is IfNet, and steps are refused.
        """
        self.name = _fullname or name or "builder"
        self._stop_blob = _stop_blob
        self._stop_blob_required = _stop_blob_required
        self._use_control_ops = _use_control_ops
        self._initial_scope = set(map(str, initial_scope or ()))
        self._children: list[Net | ExecutionStep | NetBuilder] = []
        self._current_net: Net | None = None
        self._frozen = False
        self._if: _If | None = None
        self._while: _While | None = None

    def __enter__(self) -> NetBuilder:
        _open.builders.append(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        _open.builders.pop()
        if kind is None and self._stop_blob_required and self._stop_blob is None:
            raise Caffe2Error(
                f"builder {self.name!r} runs until something stops it: call ops.stop or ops.stop_if inside"
            )

    @staticmethod
    def current(required: bool = True) -> NetBuilder | None:
        """The innermost that is open. Raises Caffe2Error where none is, unless it is not `required`."""
        if not _open.builders and required:
            raise Caffe2Error("no NetBuilder is open here")
        return _open.builders[-1] if _open.builders else None

    def current_net(self, name: str | None = None) -> Net:
        """The net that operators are added to; a new one behind a step, or under a new `name`."""
        if self._current_net is None or name is not None:
            self.add(Net(f"{self.name}/{name or 'net'}"))
        assert self._current_net is not None
        return self._current_net

    def add(self, child: Any) -> Any:
        """Append a net, a step or what another builder has built, and return it."""
        if self._frozen:
            raise Caffe2Error(f"builder {self.name!r} is complete: nothing can be added")
        if self._use_control_ops and not isinstance(child, Net):
            raise Caffe2Error(f"builder {self.name!r} builds a single net, which has no steps")
        self._current_net = child if isinstance(child, Net) else None
        self._children.append(child)
        return child

    def stop_blob(self) -> BlobReference:
        """The blob that ends its step when it is true."""
        if self._stop_blob is None:
            start = Net(f"{self.name}/start")
            self._stop_blob = start.Const(False, blob_out=start.NextName("stop"))
            self._children.insert(0, start)
        return BlobReference(self._stop_blob)

    def stop_if(self, blob: Any) -> None:
        """End its step behind what was added so far, if the blob is true then."""
        self.stop_blob()
        self.current_net().Copy(blob, self._stop_blob)
        self._current_net = None

    def freeze(self) -> None:
        """Let nothing be added any more."""
        self._frozen = True
        for child in self._children:
            if isinstance(child, NetBuilder):
                child.freeze()

    def get(self) -> list[Any]:
        """What it has built: nets and steps. Nothing can be added any more."""
        self.freeze()
        return [to_execution_step(child) if isinstance(child, NetBuilder) else child for child in self._children]

    def __len__(self) -> int:
        return len(self._children)

    def __str__(self) -> str:
        return self.name

    def scope(self) -> set[str]:
        """The blobs that there are: of the scope it began with, and of its nets."""
        nets = [child for child in self._children if isinstance(child, Net)]
        return self._initial_scope.union(*(net.UsedBlobNames() for net in nets))

    def _net(self) -> Net:
        """Its nets as one."""
        made = Net(f"{self.name}/body")
        for child in self._children:
            made.AppendNet(child)  # type: ignore[arg-type]  # with _use_control_ops
        return made


class _If:
    """An `If` whose other branch may follow."""

    def __init__(self, net: Net, definition: OperatorDef | None, otherwise: BlobReference | None) -> None:
        self.net = net
        self.definition = definition
        self.otherwise = otherwise


class _While:
    """A `While` under construction; its condition is computed in a builder of its own."""

    def __init__(self, scope: set[str]) -> None:
        self.body = _subnet("while", scope)
        self.condition: NetBuilder | None = None


class Loop:
    """A loop of steps. `iter` gives the number of the iteration, as a blob of int64."""

    def __init__(self, before: BlobReference | None) -> None:
        self._before = before

    def iter(self) -> BlobReference:
        """The number of the iteration, from 0 on. Raises Caffe2Error for a loop that has no number of iterations."""
        if self._before is None:
            raise Caffe2Error("the loop does not count: it was not told how many iterations there are")
        return self._before


def _subnet(name: str, scope: set[str]) -> NetBuilder:
    return NetBuilder(name, initial_scope=scope, _use_control_ops=True)


def _current() -> NetBuilder:
    found = NetBuilder.current()
    assert found is not None
    return found


class Operations:
    """Operators, as methods, and blocks of the builder that is open."""

    def __getattr__(self, op_type: str) -> Callable[..., Any]:
        if op_type.startswith("__"):
            raise AttributeError(op_type)
        method: Callable[..., Any] = getattr(self.net(), op_type)
        return method

    def net(self, net: Net | None = None, name: str | None = None) -> Net:
        """The net that operators are added to, or `net`, which is appended."""
        return _current().current_net(name) if net is None else _current().add(net)

    # Operators of a net

    @contextmanager
    def IfNet(self, cond: Any, name: str | None = None) -> Iterator[None]:
        """The operators inside run if the blob `cond` is true, as one operator of the net."""
        around = _current()
        inside = _subnet(name or "if", around.scope())
        with inside:
            yield
        net = around.current_net()
        around._if = _If(net, add_control_op(net, "If", cond, around.scope(), then_net=inside._net()), None)

    @contextmanager
    def Else(self, name: str | None = None) -> Iterator[None]:
        """The operators inside run if those of the IfNet, or the If, in front of it do not."""
        around = _current()
        before, around._if = around._if, None
        if before is None:
            raise Caffe2Error("Else follows an If or an IfNet")
        if before.definition is None:
            with self._run_if(before.otherwise, name or "else"):
                yield
            return
        inside = _subnet(name or "else", around.scope())
        with inside:
            yield
        add_else_net(before.net, before.definition, around.scope(), inside._net())

    @contextmanager
    def WhileNet(self, name: str | None = None) -> Iterator[None]:
        """The operators inside run again and again, as one operator, while those of `Condition` inside give true."""
        around = _current()
        block = _While(around.scope())
        with block.body:
            block.body._while = block
            yield
        if block.condition is None:
            raise Caffe2Error("WhileNet needs a Condition inside")
        test = block.condition._net()
        if not test.Proto().op or not test.Proto().op[-1].output:
            raise Caffe2Error("the last operator of a Condition gives the condition; there is none")
        condition = test.Proto().op[-1].output[0]
        net, loop = around.current_net(), block.body._net()
        add_control_op(net, "While", condition, around.scope(), cond_net=test, loop_net=loop)

    @contextmanager
    def Condition(self, name: str | None = None) -> Iterator[None]:
        """Inside a WhileNet, at its beginning: what the last operator inside gives is the condition."""
        around = _current()
        block = around._while
        if block is None or block.condition is not None or len(around):
            raise Caffe2Error("a WhileNet begins with one Condition")
        block.condition = _subnet(name or "condition", around.scope())
        with block.condition:
            yield
        around._initial_scope |= block.condition.scope()

    # Steps of a plan

    @contextmanager
    def If(self, cond: Any, name: str | None = None) -> Iterator[None]:
        """The nets and steps inside run if the blob `cond` is true; with `_use_control_ops` it is IfNet."""
        around = _current()
        if around._use_control_ops:
            with self.IfNet(cond, name):
                yield
            return
        net = around.current_net()
        held = net.Copy(cond, net.NextName("condition"))
        with self._run_if(net.Not(held), name or "if"):
            yield
        around._if = _If(net, None, held)

    @contextmanager
    def _run_if(self, stops: Any, name: str) -> Iterator[None]:
        around = _current()
        inside = NetBuilder(f"{around.name}/{name}")
        with inside:
            inside.stop_if(stops)
            yield
        around.add(execution_step(inside.name, inside.get(), should_stop_blob=inside._stop_blob, only_once=True))

    @contextmanager
    def loop(self, iters: Any = None, name: str | None = None) -> Iterator[Loop]:
        """The nets and steps inside run so many times, a number or a blob, or until `stop` or `stop_if`."""
        around = _current()
        inside = NetBuilder(f"{around.name}/{name or 'loop'}", _stop_blob_required=True)
        before = None
        if iters is not None:
            net = around.current_net()
            counter = net.CreateCounter([], net.NextName("counter"))
        with inside:
            if iters is not None:
                net = inside.current_net()
                before = net.CountUp([counter], net.NextName("iteration"))
                limit = net.Const(iters) if isinstance(iters, int) else iters
                inside.stop_if(net.GE([before, limit], net.NextName("is_over")))
            yield Loop(before)
        around.add(to_execution_step(inside))

    def stop(self) -> None:
        """End the step of the builder that is open."""
        self.stop_if(self.Const(True))

    def stop_if(self, blob: Any) -> None:
        """End the step of the builder that is open if the blob is true here."""
        _current().stop_if(blob)

    # What tasks do when they begin and end (`dagexec.caffe2.task`)

    def task_init(self) -> Setup:
        """Operators inside run once, before the task in which they are written."""
        return self._noted("task_setup", Setup("setup"))

    def task_exit(self) -> Setup:
        """Operators inside run once, behind the task in which they are written."""
        return self._noted("task_setup", Setup("exit"))

    def task_instance_init(self) -> Setup:
        """Operators inside run before each instance of the task in which they are written."""
        return self._noted("task_instance_setup", Setup("setup"))

    def task_instance_exit(self) -> Setup:
        """Operators inside run behind each instance of the task in which they are written."""
        return self._noted("task_instance_setup", Setup("exit"))

    def local_init(self) -> Setup:
        """Operators inside run once, before the group of the task in which they are written."""
        return self._noted("local_setup", Setup("setup"))

    def local_exit(self) -> Setup:
        """Operators inside run once, behind the group of the task in which they are written."""
        return self._noted("local_setup", Setup("exit"))

    def _noted(self, key: str, made: Setup) -> Setup:
        self.net().add_attribute(key, made)
        return made


class Setup(NetBuilder):
    """Nets that a task or a group of tasks runs when it begins (`setup`) or ends (`exit`)."""

    def __init__(self, when: str) -> None:
        """`when` is the name of the method that gives the nets."""
        super().__init__(when)
        setattr(self, when, self._run)

    def _run(self, _net: Net) -> list[Any]:
        return [] if self._frozen else self.get()


ops = Operations()
"""What adds operators and blocks to the builder that is open in this thread."""
