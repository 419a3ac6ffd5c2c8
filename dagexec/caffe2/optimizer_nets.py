"""OptimizerNets: a net of Caffe2's and its init net, as `training.optimizer` wants a model.

Optimizers work on copies; `finish` appends to the nets what they added, with Caffe2's names. Where an optimizer
refuses, the nets stay as they were.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from dagexec.building.fillers import Filler
from dagexec.building.net_builder import ITERATION
from dagexec.caffe2.modeling.parameter_info import ParameterInfo
from dagexec.caffe2.net import Net
from dagexec.caffe2.references import BlobReference, plain_gradient
from dagexec.core.device import CPU, Device
from dagexec.core.dtypes import FLOAT32, INT64, TypeMeta
from dagexec.core.gradient import Gradient
from dagexec.core.operator_def import OpValue, op
from dagexec.core.proto import NetDef

MUTEX = "iteration_mutex"


class OptimizerNets:
    """What `UpdatedModel` asks for.

    Attributes:
        name: of the net.
        net, init_net: copies that grow.
    """

    def __init__(self, net: Net, init_net: Net, infos: Sequence[ParameterInfo], rate: str) -> None:
        """Of the parameters `infos`, each with its gradient; names of learning rates begin with `rate`."""
        self._nets = (net, init_net)
        self._rate = rate
        self._states: list[str] = []
        self._infos = {info.name: info for info in infos}
        self.name = net.Name()
        self.net, self.init_net = NetDef(), NetDef()
        self.net.CopyFrom(net.Proto())
        self.init_net.CopyFrom(init_net.Proto())
        for definition in self.net.op:  # learning rates of other optimizers are not for this one
            if definition.type == "LearningRate" and not definition.output[0].startswith(rate):
                definition.type = "Copy"
        self._rates = sum(definition.type == "LearningRate" for definition in self.net.op)
        filled = {blob for definition in self.init_net.op for blob in definition.output}
        for info in infos:  # those that come from elsewhere: their fillers tell types, and are not appended
            if info.name not in filled and info.shape is not None:
                self.init_net.op.append(op("ConstantFill", [], [info.name], shape=list(info.shape)))
        self._begins = (len(self.net.op), len(self.init_net.op))
        self._device = CPU

    @property
    def params(self) -> list[str]:
        """The names of the parameters."""
        return list(self._infos)

    @property
    def params_to_grad(self) -> Mapping[str, Gradient]:
        """The gradients of those that have one."""
        return {name: plain_gradient(info.grad) for name, info in self._infos.items() if info.grad is not None}

    def tags_of(self, parameter: str) -> frozenset[str]:
        """Its tags, as `dagexec.building` writes them."""
        return frozenset(tag.lower() for tag in self._infos[parameter].tags)

    def iteration(self) -> str:
        """The counter `optimizer_iteration`, to which each run adds 1 under a mutex."""
        if all(ITERATION not in definition.output for definition in self.init_net.op):
            self.init_net.op.append(op("CreateMutex", [], [MUTEX], device_option=CPU))
            fill: dict[str, OpValue] = {"shape": [1], "value": 0, "dtype": INT64.number}
            self.init_net.op.append(op("ConstantFill", [], [ITERATION], device_option=CPU, arg=fill))
        if all(ITERATION not in definition.output for definition in self.net.op):
            self.net.op.append(op("AtomicIter", [MUTEX, ITERATION], [ITERATION], device_option=CPU))
        return ITERATION

    def add_state(self, name: str, shape: Sequence[int], filler: Filler, dtype: TypeMeta = FLOAT32) -> str:
        """A blob that the init net fills."""
        arguments: dict[str, OpValue] = {"shape": list(shape), "dtype": dtype.number, **filler.arguments}
        self.init_net.op.append(op(filler.type, [], [name], device_option=self._device, arg=arguments))
        self._states.append(name)
        return name

    @contextmanager
    def device_scope(self, device: str | Device) -> Iterator[None]:
        """State that is added inside lies on `device`."""
        before, self._device = self._device, Device.parse(device) if isinstance(device, str) else device
        try:
            yield
        finally:
            self._device = before

    def finish(self, factor: str | None) -> tuple[list[BlobReference], list[BlobReference]]:
        """Append what was added to the nets; the state of parameters, and the blobs that parameters share.

        Learning rates are called `<rate>_cpu`, the second one `<rate>_1_cpu`, and multiplied by the blob `factor` where
        there is one.
        """
        net, init_net = self._nets
        updates, fills = list(self.net.op[self._begins[0] :]), list(self.init_net.op[self._begins[1] :])
        renamed: dict[str, str] = {}
        for definition in (*updates, *fills):
            for blob in definition.output:
                if definition.type == "LearningRate":
                    renamed[blob] = f"{self._rate}{f'_{self._rates}' if self._rates else ''}_cpu"
                    self._rates += 1
                elif blob not in self._states and definition.type == "ConstantFill" and blob != ITERATION:
                    renamed[blob] = _numbered(blob)
        for definition in (*updates, *fills):
            for blobs in (definition.input, definition.output):
                blobs[:] = [renamed.get(blob, blob) for blob in blobs]
        init_net.extend_ops(fills)
        net._declare_inputs(BlobReference(blob) for made in fills for blob in made.output)
        for definition in updates:
            net.extend_ops([definition])
            if definition.type == "LearningRate" and factor is not None:
                rate = BlobReference(definition.output[0])
                net.Mul([rate, BlobReference(factor)], rate, broadcast=1)
        shared = [ITERATION, *renamed.values()]
        return [BlobReference(blob, net) for blob in self._states], [BlobReference(blob, net) for blob in shared]


def _numbered(blob: str) -> str:
    """`ONE_CPU_0` for `ONE_cpu`: a number of each device."""
    return blob.upper() if blob[-1:].isdigit() else f"{blob.upper()}_0"
