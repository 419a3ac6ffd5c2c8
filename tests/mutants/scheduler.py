"""Mistakes in how chains are found, ordered and handed to workers. Those of synchronization are in `tests/planted`."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

_ROSTER = "scheduler/run/roster.py"
_MACHINE, _CODE = "scheduler/run/machine.py", "scheduler/run/engine_code.py"
_MACHINE_TESTS = ("tests/scheduler/run/test_machine.py",)
_POOL_TESTS = (
    "tests/scheduler/run/test_pool.py",
    "tests/scheduler/run/test_pool_priority.py",
    "tests/scheduler/run/test_pool_order.py",
)
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
        "a woken worker stays on the idle list",
        _ROSTER,
        "worker = self.idle.pop()",
        "worker = self.idle[-1]",
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
        "whose turn it is does not depend on what a user had of the workers",
        _ROSTER,
        "(-run.priority, run.start_tag, run.order, run)",
        "(-run.priority, 0.0, run.order, run)",
        _POOL_TESTS,
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
        "return len(graph.devices) == 1 or graph.device(parent) == graph.device(index)",
        "return True",
        _GRAPH_TESTS,
    ),
    Mutant(
        "a request of lower priority is served first",
        "dagexec/executor/requests/queue.py",
        "-request.call.priority",
        "request.call.priority",
        ("tests/executor/test_requests.py",),
    ),
    Mutant(
        "a turn at what streams share follows the last turn only",
        "dagexec/core/exclusive.py",
        "                self._ends[stream] = event\n",
        "                self._ends = {stream: event}\n",
        ("tests/scheduler/run/test_device_ends.py",),
    ),
)
