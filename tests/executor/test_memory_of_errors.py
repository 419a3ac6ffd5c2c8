"""An error that its caller is through with keeps nothing of its run in memory: no cycle waits for the collector."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator

import anyio
import pytest

import dagexec
from dagexec import NetDef, Workspace
from dagexec.core.model import Model
from dagexec.core.operator import Operator
from dagexec.errors import OperatorError
from tests.free_threading import not_free_threaded
from tests.nets import temporary_operator
from tests.ops.running import operator_def

NET = NetDef(name="failing", op=[operator_def("Fail", [], [name]) for name in ("y", "z")])

pytestmark = not_free_threaded("what another thread lets go of counts until the thread that made it goes on")


class Large:
    """What the operator that fails was working on."""


@pytest.fixture
def alive() -> Iterator[Callable[[], int]]:
    """How many objects of failed operators are in memory; the garbage collector is off."""
    seen: weakref.WeakSet[Large] = weakref.WeakSet()

    def fail(operator: Operator) -> None:
        large = Large()
        seen.add(large)
        raise ZeroDivisionError(f"on purpose, in {operator.label}")

    with temporary_operator("Fail", fail):
        gc.collect()
        gc.disable()
        try:
            yield lambda: len(seen)
        finally:
            gc.enable()


@pytest.mark.parametrize("kind", ["simple", "dag", "async_dag"])
def test_of_a_net(kind: str, alive: Callable[[], int]) -> None:
    net = Workspace().create_net(NetDef(name=NET.name, op=list(NET.op), type=kind))
    for _ in range(3):
        with pytest.raises(OperatorError, match="on purpose"):
            net.run()
    net.close()
    assert alive() == 0


def _run(executor: dagexec.Executor) -> None:
    with pytest.raises(OperatorError, match="on purpose"):
        executor.run({})


def _awaited(executor: dagexec.Executor) -> None:
    async def fail() -> None:  # what leaves the event loop itself is in a cycle of asyncio's
        with pytest.raises(OperatorError, match="on purpose"):
            await executor.run_async({})

    anyio.run(fail)


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("run", [_run, _awaited])
def test_of_an_executor(run: Callable[[dagexec.Executor], None], replicas: int, alive: Callable[[], int]) -> None:
    model = Model(name=NET.name, net=NET, outputs=("y", "z"))
    with dagexec.compile(model, optimize=False, replicas=replicas) as executor:
        for _ in range(3):
            run(executor)
    assert alive() == 0  # closed: no worker is on its way out of what failed
