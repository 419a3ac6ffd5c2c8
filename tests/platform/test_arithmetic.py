"""NumPy's settings while operators run, on every kind of net."""

from __future__ import annotations

import numpy as np
import pytest

from dagexec import NetDef, Workspace
from dagexec.platform.arithmetic import operator_arithmetic
from dagexec.scheduler.nets.dag import DAGNet
from dagexec.scheduler.nets.simple import SimpleNet
from tests.memory_limits import peak_memory
from tests.ops.running import operator_def


def test_the_settings_of_the_thread_come_back() -> None:
    before = np.getbufsize(), np.geterr()
    with operator_arithmetic():
        assert np.getbufsize() == 512
        assert set(np.geterr().values()) == {"ignore"}
    assert (np.getbufsize(), np.geterr()) == before
    with pytest.raises(KeyError), operator_arithmetic():
        raise KeyError
    assert (np.getbufsize(), np.geterr()) == before


@pytest.mark.parametrize("net_class", [SimpleNet, DAGNet])
def test_rows_apart_are_not_copied_to_a_buffer(net_class: type[SimpleNet] | type[DAGNet]) -> None:
    """NumPy's default buffer takes 64 KiB here for two operands."""
    workspace = Workspace()
    workspace.feed_blob("x", np.ones((1, 16, 40, 40), np.float32))
    workspace.feed_blob("w", np.ones((16, 1, 3, 3), np.float32))
    definition = operator_def("Conv", ["x", "w"], ["y"], kernel=3, pad=1, group=16)
    with net_class(NetDef(name="n", op=[definition]), workspace) as net:
        net.run()
        net.run()
        peak = peak_memory(net.run)
    assert peak < 32_000, f"{peak} bytes"
