"""Where the failing nets run, and what must be left of it afterwards."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack

import numpy as np
import pytest

from dagexec.core import registry
from dagexec.core.operator import Operator, Step
from dagexec.core.schema import OpSchema, same_as_input
from dagexec.devices.sim import SimRuntime, simulated
from dagexec.stress.devices import HeldResources, leaked
from tests.failures.acting import DEVICE, HOST, Acts, Place, Setting, described


@pytest.fixture
def simulate() -> Iterator[Setting]:
    """Sets up the device sim:0. When the test is over, the device must hold what it held before, threads included.

    The checks come so late because a test's variables hold the executor, and with it memory of the device.
    """
    with ExitStack() as devices:
        before: list[HeldResources] = []

        def set_up(**settings: object) -> SimRuntime:
            runtime = devices.enter_context(simulated("sim:0", **settings))
            before.append(HeldResources.now(["sim:0"]))
            return runtime

        yield set_up
        assert [leaked(["sim:0"], held) for held in before] == [[]] * len(before)


@pytest.fixture(autouse=True)
def no_thread_is_lost(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing is logged meanwhile: pytest keeps the records, and their errors refer to all there was."""
    monkeypatch.setattr(logging.getLogger("dagexec"), "disabled", True)
    before = HeldResources.now([])
    yield
    assert leaked([], before) == []


@pytest.fixture(params=HOST + DEVICE, ids=described)
def place(request: pytest.FixtureRequest, simulate: Setting) -> Place:
    found: Place = request.param
    if found.device != "cpu":
        simulate()
    return found


@pytest.fixture(params=HOST, ids=described)
def host(request: pytest.FixtureRequest) -> Place:
    found: Place = request.param
    return found


@pytest.fixture(params=DEVICE, ids=described)
def device(request: pytest.FixtureRequest) -> Place:
    """A place on a device that the test sets up itself."""
    found: Place = request.param
    return found


@pytest.fixture(autouse=True)
def acts() -> Iterator[Acts]:
    """The operator type Acting while a test runs."""
    control = Acts()
    schema = OpSchema(
        "Acting",
        inputs=(1, 1),
        outputs=(1, 1),
        infer=same_as_input,
        doc="A copy. For a test.",
        args={"number": "which"},
        required_args=("number",),
    )

    class Acting(Operator):
        def prepare(self) -> Step:
            x, y = self.x(0), self.y(0)
            number = self.arguments.int("number", 0)

            def step() -> None:
                control(number, float(x[0, 0]))
                np.copyto(y, x)

            return step

    registry.operator(schema)(Acting)
    yield control
    registry._schemas.pop("Acting")
    registry._operators.pop(("cpu", "Acting", ""))
