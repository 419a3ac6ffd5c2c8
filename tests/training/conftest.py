"""With `--device cuda:0` all nets of these tests run on CUDA: those of the host on `cuda:0`, of `sim:N` on `cuda:N`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from dagexec import NetDef
from dagexec.core.device import Device
from dagexec.core.proto import DeviceOption
from dagexec.scheduler import net as nets
from dagexec.scheduler.copies import insert_copies
from tests.cuda.emulated import cuda_devices


def on_cuda(net: NetDef) -> NetDef:
    """`net` with each of its operators on the CUDA device of the same number; seeds stay."""
    found = NetDef()
    found.CopyFrom(net)
    for definition in found.op:
        asked = definition.device_option if definition.HasField("device_option") else found.device_option
        option = DeviceOption()
        option.CopyFrom(asked)
        option.MergeFrom(Device("cuda", Device.from_option(asked).index).to_option())
        definition.device_option.CopyFrom(option)
    return found


@pytest.fixture(scope="package", autouse=True)
def _device(request: pytest.FixtureRequest) -> Iterator[None]:
    with ExitStack() as stack:
        if request.config.getoption("--device") is not None:
            stack.enter_context(cuda_devices())
            patch = stack.enter_context(pytest.MonkeyPatch.context())
            patch.setattr(nets, "insert_copies", lambda net, *given: insert_copies(on_cuda(net), *given))
        yield
