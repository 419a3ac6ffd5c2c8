"""Putting nets of other tests on CUDA as a whole."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from dagexec import NetDef
from dagexec.core.device import Device
from dagexec.core.proto import DeviceOption
from dagexec.devices.cuda.binding import cupy
from dagexec.scheduler.nets import net as nets
from dagexec.scheduler.plan.copies import insert_copies
from tests.cuda.emulated import cuda_devices


def on_cuda(net: NetDef) -> NetDef:
    """`net` with each of its operators on the CUDA device of the same number, counted round; seeds stay."""
    devices = cupy().cuda.runtime.getDeviceCount()
    found = NetDef()
    found.CopyFrom(net)
    for definition in found.op:
        asked = definition.device_option if definition.HasField("device_option") else found.device_option
        option = DeviceOption()
        option.CopyFrom(asked)
        option.MergeFrom(Device("cuda", Device.from_option(asked).index % devices).to_option())
        definition.device_option.CopyFrom(option)
    return found


@contextmanager
def nets_on_cuda() -> Iterator[None]:
    """Within it, a net of the host is made on `cuda:0` and one of `sim:N` on `cuda:N`, emulated where there is no GPU.

    Those that `dagexec.compile` makes stay where they are: their executors have placed them.
    """
    with cuda_devices(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(nets, "insert_copies", lambda net, *given: insert_copies(on_cuda(net), *given))
        yield
