"""The end of a process beside runs: it ends, and nothing is torn down under native code that is at work."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

import dagexec
from dagexec.core.operator import Operator
from dagexec.errors import ClosedError
from dagexec.platform import shutdown
from dagexec.platform.deadline import Deadline
from dagexec.platform.machine_code import is_supported
from tests.forked import PATIENCE, in_child
from tests.held import Held, doubled_model, held_operators, rows
from tests.nets import net_of, temporary_operator

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")

PRODUCTS = """
import sys, threading
import numpy as np
import dagexec
from dagexec.core.proto import NetDef, OperatorDef

net = NetDef(name="product", op=[OperatorDef(type="MatMul", input=["x", "x"], output=["y"])], external_input=["x"])
x = np.ones((600, 600), np.float32)
options = {"optimize": False, "net_type": sys.argv[1], "num_workers": 1, "intra_op_threads": 2}
executors = [dagexec.compile(net, **options) for _ in range(8)]
begun = threading.Barrier(9)


def run_for_ever(executor):
    executor.run({"x": x})
    begun.wait()
    while True:
        executor.run({"x": x})


for executor in executors:
    threading.Thread(target=run_for_ever, args=(executor,), daemon=True).start()
begun.wait()
"""

JOINED = """
import ctypes, sys, threading, time
from dagexec.platform import machine_code  # a module that others hold is emptied
from dagexec.core.native import (NativeCall, declare)
from dagexec.core.native_tables import (merged)

libc = ctypes.CDLL(None)
sleep = ctypes.cast(libc.usleep, ctypes.c_void_p).value


def made():
    step = lambda: None
    declare(step, NativeCall(sleep, (10_000, 0, 0, 0), None, lambda: RuntimeError("it failed"), libc))
    return step


[joined] = merged([made() for _ in range(30)])
begun = threading.Event()


class Last:
    def __del__(self, wait=time.sleep):
        wait(0.4)


def run():
    begun.set()
    joined()


threading.Thread(target=run, daemon=True).start()
begun.wait()
sys.last_to_go = Last()  # when all modules are gone, the process lives on for longer than the calls take
"""


def ended(script: str, *arguments: str) -> tuple[int, str]:
    """How a process that runs `script` ends, and what it prints. Raises TimeoutExpired when it does not."""
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=2 * PATIENCE, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("net_type", ["simple", "dag"])
def test_a_process_ends_while_daemon_threads_compute_products(net_type: str) -> None:
    """OpenBLAS, at its end, waits for ever for its threads when one of them is given work meanwhile."""
    assert ended(PRODUCTS, net_type) == (0, "")


@pytest.mark.slow
@pytest.mark.skipif(not is_supported(), reason="no machine code is written here")
def test_joined_calls_of_a_daemon_thread_outlive_the_interpreter() -> None:
    """Their machine code was unmapped with Python's modules, and the thread that came back to it ended the process."""
    assert ended(JOINED) == (0, "")


class Steps:
    """Counts the operators of type Step that ran; each lasts until others had a turn."""

    def __init__(self) -> None:
        self.ran = 0
        self.begun = threading.Event()

    def __call__(self, operator: Operator) -> None:
        self.ran += 1
        self.begun.set()
        time.sleep(0)


@needs_fork
@pytest.mark.parametrize("device", ["cpu", "sim:0"])
@pytest.mark.parametrize("options", [{"num_workers": 1}, {"num_workers": 2, "replicas": 3}, {"net_type": "simple"}])
def test_at_the_end_runs_are_stopped_workers_end_and_daemons_are_held(device: str, options: dict[str, object]) -> None:
    steps, failed = Steps(), []

    def run_for_ever(executor: dagexec.Executor) -> None:
        try:
            while True:
                executor.run({"x": rows(1)})
        except BaseException as error:
            failed.append(error)

    def end() -> tuple[int, bool, bool, int]:
        executor = dagexec.compile(doubled_model("Step"), optimize=False, device=device, **options)  # type: ignore[arg-type]
        callers = [threading.Thread(target=run_for_ever, args=(executor,), daemon=True) for _ in range(3)]
        for caller in callers:
            caller.start()
        assert steps.begun.wait(PATIENCE)
        shutdown._end()
        with pytest.raises(ClosedError):
            executor.run({"x": rows(1)})
        held = all(caller.is_alive() for caller in callers)
        workers = sum(thread.is_alive() for thread in executor._pool._crew.threads)
        return len(failed), held, executor.statistics().running == 0, workers

    with temporary_operator("Step", steps):
        assert in_child(end) == (0, True, True, 0)


@needs_fork
@pytest.mark.parametrize("net_type", ["simple", "dag", "async_dag"])
def test_at_the_end_runs_of_nets_are_stopped_too(net_type: str) -> None:
    steps, failed = Steps(), []

    def end() -> tuple[int, bool]:
        net = dagexec.Workspace().create_net(net_of([[]] * 20, op_type="Step"), net_type, 2)

        def run_for_ever() -> None:
            try:
                while True:
                    net.run()
            except BaseException as error:
                failed.append(error)

        caller = threading.Thread(target=run_for_ever, daemon=True)
        caller.start()
        assert steps.begun.wait(PATIENCE)
        shutdown._end()
        ran = steps.ran
        caller.join(0.01)
        return len(failed), caller.is_alive() and steps.ran == ran

    with temporary_operator("Step", steps):
        assert in_child(end) == (0, True)


@needs_fork
def test_the_end_waits_for_an_operator_that_hangs_only_so_long(caplog: pytest.LogCaptureFixture) -> None:
    def end(held: Held) -> list[str]:
        shutdown.MAX_WAIT = 0.05
        executor = dagexec.compile(doubled_model("Held"), optimize=False, num_workers=1)
        threading.Thread(target=executor.run, args=({"x": rows(1)},), daemon=True).start()
        held.wait_inside()
        shutdown._end()
        return caplog.messages

    with held_operators() as held:
        assert in_child(lambda: end(held)) == ["the process ends beside operators that take more than 0.05 s"]


def test_what_is_gone_is_not_stopped_and_who_was_made_last_is_waited_for_first(monkeypatch: pytest.MonkeyPatch) -> None:
    class Owner:
        pass

    calls: list[str] = []
    monkeypatch.setattr(shutdown, "_stops", {})
    monkeypatch.setattr(shutdown, "_ending", False)

    def stop(name: str) -> shutdown.Stop[Owner]:
        def wait(_deadline: Deadline) -> None:
            calls.append(f"wait for {name}")

        def stopped(_owner: Owner) -> shutdown.Wait:
            calls.append(f"stop {name}")
            return wait

        return stopped

    owners = [Owner(), Owner(), Owner()]
    for name, owner in zip("abc", owners, strict=True):
        shutdown.stop_at_exit(owner, stop(name))
    del owners[1], owner
    shutdown._end()
    assert calls == ["stop a", "stop c", "wait for c", "wait for a"]


def test_a_result_is_not_held_before_the_end() -> None:
    with dagexec.compile(doubled_model(), optimize=False) as executor:
        found: list[np.ndarray] = []
        caller = threading.Thread(target=lambda: found.append(executor.run({"x": rows(1)})["y"]), daemon=True)
        caller.start()
        caller.join(PATIENCE)
        assert found[0].tobytes() == rows(2).tobytes()
