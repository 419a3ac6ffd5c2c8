"""Mistakes in how chains are found, ordered, handed to workers and ended, and in how tensors share memory."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

_POOL, _ROSTER = "scheduler/run/pool.py", "scheduler/run/roster.py"
_MACHINE, _CODE = "scheduler/run/machine.py", "scheduler/run/engine_code.py"
_MACHINE_TESTS = ("tests/scheduler/run/test_machine.py",)
_POOL_TESTS = (
    "tests/scheduler/run/test_pool.py",
    "tests/scheduler/run/test_pool_priority.py",
    "tests/scheduler/run/test_pool_order.py",
)
_DEATHS = ("tests/scheduler/run/test_pool_order.py", "tests/scheduler/run/test_pool_failures.py")
_GRAPH_TESTS = ("tests/core/test_graph.py", "tests/scheduler/plan/test_chains.py")

MUTANTS = (
    Mutant(
        "a worker takes the least urgent of the fresh tasks",
        _MACHINE,
        "task = heappop(self._fresh)",
        "task = self._fresh.pop()",
        _MACHINE_TESTS,
    ),
    Mutant(
        "a worker joins others before it begins a fresh task",
        _MACHINE,
        "        if self._fresh:",
        "        if self._fresh and not self._open:",
        _MACHINE_TESTS,
    ),
    Mutant(
        "a worker leaves the task that it is in",
        _MACHINE,
        "if last >= 0 and",
        "if last >= len(self._taken) and",
        _MACHINE_TESTS,
    ),
    Mutant(
        "a phase begins when one piece of the one before has ended",
        _MACHINE,
        "if self._done[task] < self._graph.pieces[task]:",
        "if self._done[task] != 1:",
        _MACHINE_TESTS,
    ),
    Mutant(
        "machine code lets a child begin when one of its parents is done",
        _CODE,
        '    code.jump("children", NOT_ZERO)\n    _choose(code, fresh=True)',
        "    _choose(code, fresh=True)",
        _MACHINE_TESTS,
    ),
    Mutant(
        "machine code wakes nobody",
        _CODE,
        '    code.jump("WAKE", LESS)',
        '    code.jump("execute")',
        _MACHINE_TESTS,
    ),
    Mutant(
        "a replaced worker wakes nobody",
        _POOL,
        "            worker.wake_up.leave()\n        self._wake_all()",
        "            worker.wake_up.leave()",
        _DEATHS,
    ),
    Mutant(
        "a woken worker stays on the idle list",
        _ROSTER,
        "found = self.idle.pop()",
        "found = self.idle[-1]",
        _POOL_TESTS,
    ),
    Mutant(
        "a run gives way to one of equal priority",
        _ROSTER,
        "first.priority > run.priority",
        "first.priority >= run.priority",
        _POOL_TESTS,
    ),
    Mutant(
        "a run gives way to none",
        _ROSTER,
        "first.priority > run.priority",
        "first.priority < run.priority",
        _POOL_TESTS,
    ),
    Mutant(
        "of equal priority the youngest run is served",
        _ROSTER,
        "(-run.priority, run.start_tag, run.order, run)",
        "(-run.priority, run.start_tag, -run.order, run)",
        _POOL_TESTS,
    ),
    Mutant(
        "any number of workers enter a run",
        "scheduler/run/run.py",
        "self.machine.available > 0 and self.active < self.width and not self.over",
        "self.machine.available > 0 and not self.over",
        _POOL_TESTS,
    ),
    Mutant(
        "whose turn it is does not depend on what a user had of the workers",
        _ROSTER,
        "(-run.priority, run.start_tag, run.order, run)",
        "(-run.priority, 0.0, run.order, run)",
        _POOL_TESTS,
    ),
    Mutant(
        "a submitted run wakes nobody",
        _POOL,
        "            if helper is not None:\n                helper.wake()\n        except BaseException:",
        "        except BaseException:",
        _POOL_TESTS,
    ),
    Mutant(
        "tasks that become ready while all workers are busy are found by none of them",
        "scheduler/run/executing.py",
        "            if machine.available and not run.listed:\n                self._roster.list_run(run)\n"
        "            self._lock.release()",
        "            self._lock.release()",
        _POOL_TESTS,
    ),
    Mutant(
        "a task begins when one of its parents is done",
        _MACHINE,
        "if not self._left[child] and",
        "if self._left[child] >= 0 and",
        _MACHINE_TESTS,
    ),
    Mutant(
        "a failed run goes on with its ready chains",
        "scheduler/run/run.py",
        "        self.interrupted = True\n        self.machine.stop()",
        "",
        ("tests/scheduler/run/test_pool.py",),
    ),
    Mutant(
        "the last error is kept, and not the first",
        "scheduler/run/run.py",
        "if self.error is None:\n            self.error = error",
        "if True:\n            self.error = error",
        (
            "tests/scheduler/run/test_pool.py",
            "tests/scheduler/run/test_pool_order.py",
            "tests/scheduler/nets/test_nets.py",
        ),
    ),
    Mutant(
        "the shortest path to the end goes first",
        "scheduler/plan/plan.py",
        "key=lambda number: (-levels[number], split[number][:1])",
        "key=lambda number: (levels[number], split[number][:1])",
        ("tests/scheduler/plan/test_plan.py",),
    ),
    Mutant(
        "an operator joins a chain on another device",
        "scheduler/plan/chains.py",
        " and graph.device(parent) == graph.device(index)",
        "",
        _GRAPH_TESTS,
    ),
    Mutant(
        "a write does not wait for the readers of what it overwrites",
        "dagexec/core/graph.py",
        "                add(reader, index, Hazard.WAR)",
        "                pass",
        _GRAPH_TESTS,
    ),
    Mutant(
        "a buffer is free while its last reader runs",
        "scheduler/memory/lifetime.py",
        "return self._last[:, np.newaxis] < self._first",
        "return self._last[:, np.newaxis] <= self._first",
        ("tests/scheduler/memory/test_memory.py",),
    ),
    Mutant(
        "a request of lower priority is served first",
        "dagexec/serving/requests.py",
        "-request.priority",
        "request.priority",
        ("tests/serving/test_requests.py",),
    ),
    Mutant(
        "a turn at what streams share follows the last turn only",
        "dagexec/core/exclusive.py",
        "                self._ends[stream] = event\n",
        "                self._ends = {stream: event}\n",
        ("tests/scheduler/run/test_device_ends.py",),
    ),
)
