"""Plans and their steps under the names of `caffe2.python.core`: which nets run, how often, and which at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count
from typing import Any

from dagexec.caffe2.net import Net
from dagexec.core.proto import ExecutionStep as StepDef
from dagexec.core.proto import PlanDef
from dagexec.platform.locks import new_lock

_lock = new_lock()
_names: set[str] = set()


def _unique(base: str) -> str:
    """`base`, or with the first number that no step and no plan has."""
    with _lock:
        names = (base if not number else f"{base}_{number}" for number in count())
        name = next(name for name in names if name not in _names)
        _names.add(name)
    return name


class ExecutionStep:
    """Nets or further steps, which run in turn or at once, a number of times or until a blob says so."""

    def __init__(self, name: str, nets: Any = None, num_iter: int | None = None) -> None:
        """A step that runs these nets so many times, by default once."""
        self._step = StepDef(name=_unique(name))
        self._net_dict: dict[str, Net] = {}
        self._substeps: list[ExecutionStep] = []
        for net in [nets] if isinstance(nets, Net) else nets or ():
            self.AddNet(net)
        if num_iter is not None:
            self.SetIter(num_iter)

    @classmethod
    def create_from_proto(
        cls, step_proto: StepDef, net_obj_dict: Mapping[str, Net], net_proto_dict: Mapping[str, Any]
    ) -> ExecutionStep:
        """The step of a message; nets that are not in `net_obj_dict` are made of their messages."""
        step = cls(step_proto.name)
        name = step._step.name
        step._step.CopyFrom(step_proto)
        step._step.name = name
        del step._step.substep[:], step._step.network[:]
        for one in step_proto.substep:
            step.AddSubstep(cls.create_from_proto(one, net_obj_dict, net_proto_dict))
        for network in step_proto.network:
            step.AddNet(net_obj_dict[network] if network in net_obj_dict else Net(net_proto_dict[network]))
        return step

    def Name(self) -> str:
        """The name, unique in the process."""
        return self._step.name

    def __str__(self) -> str:
        return self._step.name

    def Proto(self) -> StepDef:
        """The message."""
        return self._step

    def AddSubstep(self, substep: ExecutionStep) -> ExecutionStep:
        """Append a step. Raises ValueError for a step that has nets."""
        if self.HasNets():
            raise ValueError(f"step {self.Name()!r} has nets, so it cannot have steps")
        self._substeps.append(substep)
        self._step.substep.append(substep.Proto())
        return self

    def AddNet(self, net: Net) -> ExecutionStep:
        """Append a net. Raises ValueError for a step that has steps."""
        if self.HasSubsteps():
            raise ValueError(f"step {self.Name()!r} has steps, so it cannot have nets")
        self._net_dict[net.Name()] = net
        self._step.network.append(net.Name())
        return self

    def get_net(self, name: str) -> Net:
        """The net of that name. Raises KeyError."""
        return self._net_dict[name]

    def HasNets(self) -> bool:
        """True when it has nets."""
        return bool(self._step.network)

    def HasSubsteps(self) -> bool:
        """True when it has steps."""
        return bool(self._step.substep)

    def Nets(self) -> list[Net]:
        """Its nets, and that which it reports with."""
        return list(self._net_dict.values())

    def Substeps(self) -> list[ExecutionStep]:
        """Its steps."""
        return self._substeps

    def get_all_attributes(self, name: str) -> list[Any]:
        """What its nets, and those of its steps, have noted under `name`."""
        of_steps = [value for step in self._substeps for value in step.get_all_attributes(name)]
        return of_steps + [value for net in self.Nets() for value in net.get_attributes(name)]

    def SetIter(self, num_iter: int) -> None:
        """Let it run so many times."""
        self._step.num_iter = num_iter

    def SetOnlyOnce(self, only_once: bool) -> None:
        """Let it run once, although a blob would stop it."""
        self._step.only_once = only_once

    def SetShouldStopBlob(self, should_stop_blob: Any) -> None:
        """Let it run until this blob holds true, which is read after each of its steps and nets."""
        self._step.should_stop_blob = str(should_stop_blob)

    def SetConcurrentSubsteps(self, concurrent_substeps: bool) -> None:
        """Let its steps run at once."""
        self._step.concurrent_substeps = concurrent_substeps

    def SetNumConcurrentInstances(self, num_concurrent_instances: int) -> None:
        """Among steps that run at once, let it be so many of them."""
        self._step.num_concurrent_instances = num_concurrent_instances

    def SetCreateWorkspace(self, create_workspace: bool) -> None:
        """Let it run in a workspace of its own, in which that around it is seen."""
        self._step.create_workspace = create_workspace

    def RunEveryMillis(self, interval: int) -> None:
        """Let it run every so many milliseconds while the steps beside it run, and once when they are over."""
        self._step.run_every_ms = interval

    def SetReportNet(self, report_net: Net, report_interval: int) -> None:
        """Run a net every so many seconds while it runs, and once when it is over."""
        self._net_dict[report_net.Name()] = report_net
        self._step.report_net = report_net.Name()
        self._step.report_interval = report_interval


class Plan:
    """Nets, and the steps that run them."""

    def __init__(self, name_or_step: str | ExecutionStep) -> None:
        """An empty plan, or that of one step."""
        self._plan = PlanDef()
        self._steps: list[ExecutionStep] = []
        self._net_dict: dict[str, Net] = {}
        if isinstance(name_or_step, ExecutionStep):
            self._plan.name = _unique(name_or_step.Name())
            self.AddStep(name_or_step)
        else:
            self._plan.name = _unique(name_or_step)

    def Name(self) -> str:
        """The name, unique in the process."""
        return self._plan.name

    def __str__(self) -> str:
        return self._plan.name

    def Proto(self) -> PlanDef:
        """The message, with the nets as they are now."""
        del self._plan.network[:]
        self._plan.network.extend(net.Proto() for net in self._net_dict.values())
        return self._plan

    def AddNets(self, nets: Iterable[Net]) -> None:
        """Have the plan hold nets. Raises ValueError for another one of the same name."""
        for net in nets:
            if self._net_dict.setdefault(net.Name(), net) is not net:
                raise ValueError(f"plan {self.Name()!r} has another net {net.Name()!r}")

    def AddStep(self, step: ExecutionStep) -> None:
        """Append a step; the plan holds its nets."""
        if not step.HasNets() and not step.HasSubsteps():
            return
        nets: list[Net] = []
        add_nets_in_order(step, nets)
        self.AddNets(nets)
        self._steps.append(step)
        self._plan.execution_step.append(step.Proto())

    def Nets(self) -> list[Net]:
        """The nets that it holds."""
        return list(self._net_dict.values())

    def Steps(self) -> list[ExecutionStep]:
        """Its steps."""
        return self._steps

    def get_all_attributes(self, name: str) -> list[Any]:
        """What its nets have noted under `name`."""
        return [value for net in self.Nets() for value in net.get_attributes(name)]


def add_nets_in_order(step: ExecutionStep, net_list: list[Net]) -> None:
    """Append the nets of a step and of its steps, each once, in the order in which they run."""
    for substep in step.Substeps():
        add_nets_in_order(substep, net_list)
    for net in step.Nets():
        if all(other is not net for other in net_list):
            net_list.append(net)


def execution_step(
    default_name: str,
    steps_or_nets: Any,
    num_iter: int | None = None,
    report_net: Net | None = None,
    report_interval: int | None = None,
    concurrent_substeps: bool | None = None,
    should_stop_blob: Any = None,
    only_once: bool | None = None,
    num_concurrent_instances: int | None = None,
    create_workspace: bool = False,
) -> ExecutionStep:
    """A step of a net or a step, or of several of either kind, with the settings that are not None.

    Raises ValueError for settings that exclude one another.
    """
    if should_stop_blob is not None and num_iter is not None:
        raise ValueError(f"step {default_name!r}: num_iter and should_stop_blob exclude one another")
    step = ExecutionStep(default_name)
    settings: tuple[tuple[Any, Callable[[Any], None]], ...] = (
        (num_iter, step.SetIter),
        (concurrent_substeps, step.SetConcurrentSubsteps),
        (should_stop_blob, step.SetShouldStopBlob),
        (only_once, step.SetOnlyOnce),
        (num_concurrent_instances, step.SetNumConcurrentInstances),
        (create_workspace or None, step.SetCreateWorkspace),
    )
    for value, setter in settings:
        if value is not None:
            setter(value)
    if report_net is not None:
        if report_interval is None:
            raise ValueError(f"step {default_name!r}: report_net needs a report_interval, in seconds")
        step.SetReportNet(report_net, report_interval)
    members: Sequence[Any] = (
        steps_or_nets if isinstance(steps_or_nets, list | tuple) else [] if steps_or_nets is None else [steps_or_nets]
    )
    if all(isinstance(one, Net) for one in members):
        for one in members:
            step.AddNet(one)
    else:
        for one in members:
            step.AddSubstep(to_execution_step(one))
    return step


def to_execution_step(step_or_nets: Any, default_name: str | None = None) -> ExecutionStep:
    """A step, a net, a list of them or what a NetBuilder has built, as a step."""
    if isinstance(step_or_nets, ExecutionStep):
        return step_or_nets
    if step_or_nets is None or isinstance(step_or_nets, Net | list | tuple):
        return execution_step(default_name or "step", step_or_nets)
    builder = step_or_nets
    return execution_step(default_name or builder.name, builder.get(), should_stop_blob=builder._stop_blob)
