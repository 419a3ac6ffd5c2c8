"""Which engine the operators of a training net run on, and what they need not promise."""

from __future__ import annotations

from dagexec.core.arguments import make_argument
from dagexec.core.device import CPU, Device
from dagexec.core.proto import NetDef
from dagexec.core.registry import registered_engines
from dagexec.core.workspace import FORM, Workspace, register_form
from dagexec.ops.engines.onednn.binding import engine_library
from dagexec.training.channels_last import with_channels_last
from dagexec.training.split_gradients import split_gradients

ONEDNN = "ONEDNN"
BATCH_INVARIANT = "batch_invariant"
"""The argument by which a row's bytes may depend on its batch; nets for inference do not take it over."""


def training_form(net: NetDef, workspace: Workspace) -> NetDef:
    """The net of a training step in the form that is fastest here; `net` itself stays as it is.

    Operators of the host that name no engine name oneDNN's where it computes them; images have their channels last; a
    batch is computed as a whole; gradients are in two operators where a layer before waits for one of them. `workspace`
    has the parameters, and gives what a blob would hold in `net` where it is in another order.
    """
    form = split_gradients(net)
    name_engines(form)
    form, moved = with_channels_last(form, workspace, ONEDNN)
    workspace.give_channels_first(moved)
    use_whole_batches(form)
    others = [argument for argument in form.arg if argument.name != FORM]
    del form.arg[:]
    form.arg.extend(others)
    return form


TRAINING = "training"
"""The form of nets with gradients that a helper builds, whoever creates them."""

register_form(TRAINING, training_form)


def name_engines(net: NetDef, device: Device = CPU) -> None:
    """Have the operators of `net` on `device` that oneDNN can compute name its engine, if the library is there.

    `device` is the host, or what stands for it.
    An engine that is named already stays. What oneDNN refuses when it is prepared, such as float64, NumPy computes.
    """
    if engine_library() is None:
        return
    for definition in net.op:
        option = definition.device_option if definition.HasField("device_option") else net.device_option
        if (
            Device.from_option(option) == device
            and not definition.engine
            and ONEDNN in registered_engines(definition.type)
        ):
            definition.engine = ONEDNN


def use_whole_batches(net: NetDef) -> None:
    """Let the operators of `net` compute a batch in the way that is fastest for it, whatever bytes a row has then.

    A step depends on its whole batch anyway. Steps of LeNet and ResNet-50 take up to 1.1 times as long otherwise.
    """
    for definition in net.op:
        if all(argument.name != BATCH_INVARIANT for argument in definition.arg):
            definition.arg.append(make_argument(BATCH_INVARIANT, 0))
